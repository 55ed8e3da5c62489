"""Functions of torch that refuse or degrade a backend because of its name, and what stands in for them.

The only module that replaces anything in torch. Each entry names torch's file and function, the releases that
need it, and is checked by tests/test_torch_patches.py, which fails when torch no longer needs it or changed
its shape. Groups of other backends reach torch's own function untouched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from monarch_backend._versions import torch_version


def _is_ours(group: Any) -> bool:
    from monarch_backend.process_group import MonarchProcessGroup

    return isinstance(group, MonarchProcessGroup)


def _monitored_barrier(original: Callable[..., None]) -> Callable[..., None]:
    """torch < 2.14, distributed_c10d.py:monitored_barrier raises unless the backend is called "gloo"."""

    @functools.wraps(original)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        target = c10d._get_default_group() if group in (None, dist.GroupMember.WORLD) else group
        if not _is_ours(target):
            return original(group, timeout, wait_all_ranks)
        if isinstance(timeout, (int, float)):
            timeout = timedelta(seconds=timeout)
        if timeout is None:
            timeout = c10d._get_default_timeout(dist.get_backend(target))
        c10d._check_valid_timeout(timeout)
        target.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)
        return None

    return monitored_barrier


def _batch_isend_irecv(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch < 2.14, distributed_c10d.py:batch_isend_irecv coalesces only if ``type(group) is ProcessGroup``.

    Without coalescing, NCCL runs each send and receive of the batch by itself, and two ranks that both send
    first wait for each other for ever.
    """

    @functools.wraps(original)
    def batch_isend_irecv(p2p_op_list: list[Any]) -> Any:
        c10d._check_p2p_op_list(p2p_op_list)
        group = p2p_op_list[0].group or c10d._get_default_group()
        device = p2p_op_list[0].tensor.device
        if not _is_ours(group) or not getattr(group._get_backend(device), "supports_coalescing", False):
            return original(p2p_op_list)
        with c10d._coalescing_manager(group, device, async_ops=True) as manager:
            for op in p2p_op_list:
                peer = {"group_dst" if op.op is dist.isend else "group_src": op.group_peer}
                op.op(op.tensor, group=op.group, tag=op.tag, **peer)
        return manager.works

    return batch_isend_irecv


# name in torch.distributed -> (first release that does without, what makes the stand-in)
PATCHES: dict[str, tuple[tuple[int, int], Callable[[Callable[..., Any]], Callable[..., Any]]]] = {
    "monitored_barrier": ((2, 14), _monitored_barrier),
    "batch_isend_irecv": ((2, 14), _batch_isend_irecv),
}


def install() -> None:
    """Put the stand-ins that this torch needs in place, in both modules that carry the names."""
    version = torch_version()
    for name, (fixed_in, make) in PATCHES.items():
        if version < fixed_in:
            stand_in = make(getattr(c10d, name))
            setattr(c10d, name, stand_in)
            setattr(dist, name, stand_in)
