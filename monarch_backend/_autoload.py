"""The hook that makes ``backend="monarch"`` known. Runs inside ``import torch`` for every user of the machine.

May live here: registering the name and the stand-ins for torch's name checks. May not: anything that costs
time or can fail. The process group itself is imported by the creator, when the first group is made.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

BACKEND_NAME = "monarch"
# torch's register_backend makes a backend the default of each listed device that has none. cpu and cuda have their
# defaults, so listing them changes none. The packages of "xla" and "tpu" register those.
DEVICES = ["cpu", "cuda"]
_replaced: set[str] = set()  # functions of torch
after_import: list[Callable[[Any], object]] = []
"""Functions that `import torch` calls once with torch, in processes that are forked without it."""


def _create_process_group(options: Any, pg_options: Any = None) -> ProcessGroup:
    from monarch_backend.process_group import create

    return create(options, pg_options)


def _stand_in(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function ``name``, with the body of _c10d_patches in front; that module is imported when called."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        from monarch_backend.process_group import _c10d_patches

        return getattr(_c10d_patches, name)(original, *args, **kwargs)

    return _hidden_from_dynamo(call)


def _hidden_from_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """What torch.compiler.disable does, without importing TorchDynamo: compiled code breaks off here and goes on."""
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def _needs_stand_ins(dist: Any) -> bool:
    # torch 2.14 brought this method together with the last of the fixes (see _c10d_patches.FIXED_IN).
    return not hasattr(dist.Backend, "_ensure_backend_registered")


def _replace(name: str, *importers: Any) -> None:
    """Put a stand-in in the place of c10d's function, before a user's script imports it by name.

    ``importers`` are further modules of torch that have the function.
    """
    from torch.distributed import distributed_c10d as c10d

    if name not in _replaced:
        _replaced.add(name)
        stand_in = _stand_in(name.removeprefix("_"), getattr(c10d, name))
        for module in (c10d, *importers):
            setattr(module, name, stand_in)


def take_names() -> None:
    """Let groups for the backends in MONARCH_AS be made by this one; does nothing without that setting."""
    if "MONARCH_AS" in os.environ:
        _replace("_new_process_group_helper")


def _replace_for_every_torch(dist: Any) -> None:
    _replace("rendezvous")  # init_process_group calls it on its way to the store
    take_names()
    _replace("batch_isend_irecv", dist)


def register() -> None:
    """Register ``"monarch"`` with torch.distributed; calling it again changes nothing.

    Does nothing on a torch without distributed support: there ``init_process_group`` does not exist either.
    """
    import torch.distributed as dist

    if not dist.is_available() or BACKEND_NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(BACKEND_NAME, _create_process_group, extended_api=True, devices=DEVICES)
    _replace_for_every_torch(dist)
    if _needs_stand_ins(dist):
        _replace("monitored_barrier", dist)


def torch_backends_entry() -> None:
    """Entry point of group ``torch.backends``: called by ``import torch`` itself.

    torch 2.14 and later load the group ``torch.distributed.backends`` when the name is first used, which is after
    ``init_process_group`` has connected to the store. Only the connection is prepared at import. An exception here
    would break ``import torch`` in every program, so each is caught and logged once. ``init_process_group`` then
    reports an unknown backend.
    """
    import torch

    try:
        while after_import:
            after_import.pop(0)(torch)
        if _needs_stand_ins(torch.distributed):
            register()
        elif torch.distributed.is_available():
            _replace_for_every_torch(torch.distributed)
    except Exception as error:  # see the docstring
        import warnings

        warnings.warn(f"monarch_backend could not register with torch {torch.__version__}: {error}", stacklevel=2)
