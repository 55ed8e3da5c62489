"""A user's function on this worker: makes its arguments, enables gradients, and keeps its results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from monarch_backend._actor.errors import CancelledError
from monarch_backend.dtensor._worker import remote_call_args
from monarch_backend.dtensor._worker.remote_call_args import NotThereError

if TYPE_CHECKING:
    from monarch_backend.dtensor._worker.executor import Executor


class RunFailed(Exception):  # only the controller catches it by this name
    """Error that reports to the controller how the function ended. ``report``: as for any operation."""

    def __init__(self, report: dict[str, Any]) -> None:
        super().__init__(report["message"])
        self.report = report

    def __reduce__(self) -> Any:
        return RunFailed, (self.report,)


def execute(executor: Executor, run: int, number: int, site: int, meshes: list[Any], body: Any, buffers: Any) -> Any:
    """Return the packed result and the size of the kept part. Raises RunFailed."""
    name = "run"
    try:
        executor.inbox.begin(run)
        (function, args, kwargs), own = remote_call_args.unpack(executor, meshes, body, buffers)
        name = f"run({getattr(function, '__qualname__', function)})"
        with torch.enable_grad():
            result = function(*args, **kwargs)
        body, buffers, kept = remote_call_args.pack(result, own)
    except CancelledError:  # of the actor, not the function's
        raise
    except BaseException as error:  # also KeyboardInterrupt; torch's CheckpointException is not an Exception
        failure = (
            error.failure if isinstance(error, NotThereError) else executor.commands.new_failure(name, site, error)
        )
        executor.commands.tensors[number] = failure
        raise RunFailed(executor.commands.failures.told(failure)) from None
    finally:
        executor.inbox.end()
    executor.commands.tensors[number] = kept
    return body, buffers, len(kept)
