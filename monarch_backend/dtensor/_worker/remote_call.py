"""A function of the user's on this worker: with its arguments made here, gradients enabled, and its results kept.

How all ranks go on after one of them has failed is the executor's and control_actor.py's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from monarch_backend._actor.errors import CancelledError
from monarch_backend.dtensor._worker import remote_call_args
from monarch_backend.dtensor._worker.remote_call_args import NotThereError

if TYPE_CHECKING:
    from monarch_backend.dtensor._worker.executor import Executor


class RunFailed(Exception):  # nobody catches it by this name but the controller
    """How the function ended here, on its way to the controller. ``report``: as of any operation."""

    def __init__(self, report: dict[str, Any]) -> None:
        super().__init__(report["message"])
        self.report = report

    def __reduce__(self) -> Any:
        return RunFailed, (self.report,)


def execute(executor: Executor, run: int, number: int, site: int, meshes: list[Any], body: Any, buffers: Any) -> Any:
    """Its result as `_parcels.pack` makes it, without what is kept, and how much that is. Raises RunFailed."""
    name = "run"
    try:
        executor.board.begin(run)
        (function, args, kwargs), own = remote_call_args.unpack(executor, meshes, body, buffers)
        name = f"run({getattr(function, '__qualname__', function)})"
        with torch.enable_grad():
            result = function(*args, **kwargs)
        body, buffers, kept = remote_call_args.pack(result, own)
    except CancelledError:  # of the actor, not the function's
        raise
    except BaseException as error:  # also a KeyboardInterrupt; torch's CheckpointException is no Exception
        failure = error.failure if isinstance(error, NotThereError) else executor.new_failure(name, site, error)
        executor.keep(number, failure)
        raise RunFailed(executor.told(failure)) from None
    finally:
        executor.board.end()
    executor.keep(number, kept)
    return body, buffers, len(kept)
