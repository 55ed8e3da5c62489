"""Replacements of torch's functions that refuse or degrade a backend because of its name.

_c10d_manifest.py lists them. _autoload.py installs them and imports this module at the first call.
tests/test_torch_patches.py checks each one, and fails when torch no longer needs it or has changed the function. Groups
of other backends reach torch's own function.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from monarch_backend.process_group import _backend_names

# name in torch.distributed -> first release of torch that needs no replacement
FIXED_IN = {"monitored_barrier": (2, 14)}


@contextlib.contextmanager
def overriding() -> Iterator[None]:
    """In this context, registering a kernel over another one gives no warning from torch."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="[^$]*Overriding a previously registered kernel")
        yield


def _is_ours(group: Any) -> bool:
    from monarch_backend.process_group import MonarchProcessGroup

    return isinstance(group, MonarchProcessGroup)


def monitored_barrier(
    original: Callable[..., None], group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
) -> None:
    """Replace distributed_c10d.py:monitored_barrier of torch < 2.14, which refuses backends not called "gloo"."""
    # torch's default argument is GroupMember.WORLD at import time: None.
    target: Any = c10d._get_default_group() if group is None else group
    if not _is_ours(target):
        return original(group, timeout, wait_all_ranks)
    if isinstance(timeout, (int, float)):
        timeout = timedelta(seconds=timeout)
    if timeout is None:
        timeout = c10d._get_default_timeout(dist.get_backend(target))
    c10d._check_valid_timeout(timeout)
    target.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)
    return None


def batch_isend_irecv(original: Callable[..., Any], p2p_op_list: list[Any]) -> Any:
    """Replace distributed_c10d.py:batch_isend_irecv of all torch, which starts operations one by one.

    Operations of a batch may share memory, which only the whole batch shows. torch < 2.14 coalesces only if
    ``type(group) is ProcessGroup``. Without coalescing, NCCL runs each send and receive separately, and two ranks that
    both send first deadlock.
    """
    c10d._check_p2p_op_list(p2p_op_list)
    group = p2p_op_list[0].group or c10d._get_default_group()
    if not _is_ours(group):
        return original(p2p_op_list)
    device = p2p_op_list[0].tensor.device
    if device.type == "cpu":
        from monarch_backend.process_group import _overlap

        _overlap.refuse_batch(
            cast(Any, group), [(op.op is dist.irecv, op.tensor, op.group_peer, op.tag) for op in p2p_op_list]
        )
    if not getattr(group._get_backend(device), "supports_coalescing", False):
        return original(p2p_op_list)
    with c10d._coalescing_manager(group, device, async_ops=True) as manager:
        for op in p2p_op_list:
            peer = {"group_dst" if op.op is dist.isend else "group_src": op.group_peer}
            op.op(op.tensor, group=op.group, tag=op.tag, **peer)
    return manager.works


def rendezvous(original: Callable[..., Any], url: Any, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Any:
    """Replace the rendezvous of distributed_c10d.py:init_process_group, which connects before it asks a backend.

    Where no process listens, torch takes several times the timeout; see _rendezvous.py. Only the name that
    init_process_group calls is replaced. torch.distributed.rendezvous stays torch's.
    """
    if not _initialises_ours(sys._getframe(1)) or set(kwargs) != {"timeout"}:
        return original(url, rank, world_size, **kwargs)
    from monarch_backend.process_group import _rendezvous

    return _rendezvous.rendezvous(original, url, rank, world_size, **kwargs)


def _initialises_ours(frame: FrameType | None) -> bool:
    """True if the calling ``init_process_group`` has "monarch" in its ``backend``, which torch made lowercase.

    Reads its locals, because rendezvous does not get the backend.
    """
    while frame is not None and frame.f_code.co_name != "init_process_group":
        frame = frame.f_back
    backend = str(frame.f_locals.get("backend") if frame is not None else None)
    return "monarch" in _backend_names.names_in(backend) or bool(_backend_names.request_for(backend))


def new_process_group_helper(
    original: Callable[..., Any], size: int, rank: int, ranks: Any, backend: Any, store: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replace distributed_c10d.py:_new_process_group_helper in programs with MONARCH_AS; see _backend_names.py.

    torch makes the groups of its own backends there, whatever is registered under their names.
    """
    ours = _backend_names.request_for(str(backend))
    if not ours:
        return original(size, rank, ranks, backend, store, *args, **kwargs)
    kwargs["backend_options"] = _backend_names.options_for(kwargs.get("backend_options"))
    group, prefix_store = original(size, rank, ranks, ours, store, *args, **kwargs)
    if _is_ours(group):
        _backend_names.rename(group, backend)
        if rank == 0 and not ranks:  # the default group
            _backend_names.report()
    return group, prefix_store


def restore_new_group() -> None:
    """Undo the replacement of dist.new_group by torch_xla 2.9 (distributed/xla_backend.py) for our groups.

    torch_xla replaces it for the groups of all backends. Its function has no group_desc, device_id, sort_ranks or
    use_local_synchronization. Where the default group is ours, torch's own function is called again. Does nothing
    unless that module is imported.
    """
    backend = sys.modules.get("torch_xla.distributed.xla_backend")
    theirs = getattr(backend, "new_xla_process_group", None)
    if theirs is None or dist.new_group is not theirs:
        return

    @functools.wraps(c10d.new_group)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        return (c10d.new_group if _is_ours(dist.group.WORLD) else theirs)(*args, **kwargs)

    dist.new_group = new_group


def see_attached_hooks() -> None:
    """Wrap `attach` of NanCheckHook and FlightRecorderHook (torch >= 2.14), so that it informs the group first.

    The hooks register themselves in C++, which Python does not see. torch's dispatcher calls them, and our groups
    bypass it. Does nothing without these classes, or a second time.
    """
    for name in ("NanCheckHook", "FlightRecorderHook"):
        hook = getattr(torch._C._distributed_c10d, name, None)
        if hook is not None and not hasattr(hook.attach, "__wrapped__"):
            hook.attach = staticmethod(_telling(hook.attach, name))


def _telling(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    # Not functools.wraps: pybind11's functions have no attributes to copy.
    def attach(pg: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_ours(pg):
            pg.observe(_recorded(sys._getframe(1)) if name == "FlightRecorderHook" else ())
        return original(pg, *args, **kwargs)

    attach.__wrapped__ = original  # type: ignore[attr-defined]
    return attach


_SHARED = ("shm", "shm+gloo")  # _bootstrap.py


def _recorded(caller: FrameType) -> set[str]:
    """Return the backends whose operations torch's flight recorder should not see.

    Some backends record their operations themselves. Shared memory is left out if torch 2.15 attached the recorder by
    default, with no size set by the user. Recording costs several times its latency, and its errors name hung and dead
    ranks anyway.
    """
    themselves = set(getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", ()))
    asked = any(os.environ.get(name) for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"))
    return themselves if asked or caller.f_code.co_name != "_maybe_attach_flight_recorder" else {*themselves, *_SHARED}
