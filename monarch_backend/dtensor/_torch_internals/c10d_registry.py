"""Private tables of torch.distributed with process groups, in which a controller must write.

tests/dtensor/patches/test_torch_internals.py fails when they move.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch._C._distributed_c10d as native
from torch._C._distributed_c10d import FakeWork
from torch.distributed import distributed_c10d as c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import _mesh_resources

DEVICES = "cpu:monarch,cuda:monarch,xla:monarch"


def register(group: Any, name: Any, ranks: Sequence[int]) -> None:
    world: Any = c10d._world
    world.pg_map[group] = ("monarch", native.HashStore())
    world.pg_names[group] = name
    world.pg_backend_config[group] = DEVICES
    world.pg_to_tag[group] = f"ptd:{name}"
    world.tags_to_pg.setdefault(f"ptd:{name}", []).append(group)
    register_name(group, name)
    set_ranks(group, ranks)


def register_name(group: Any, name: Any) -> None:
    """Register a group by its name, for as long as it is referenced."""
    c10d._register_process_group(name, group)


def set_ranks(group: Any, ranks: Sequence[int]) -> None:
    c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}


def set_default(group: Any) -> None:
    c10d._update_default_pg(group)
    c10d._world.group_count = max(1, c10d._world.group_count)  # its name is "0", as in init_process_group


def default() -> Any:
    return c10d._get_default_group()


# Groups of workers ----------------------------------------------------------------------------------------------


_SORTS = "sort_ranks" not in inspect.signature(c10d.new_group).parameters
"""True for a worker's older torch, which sorts the ranks of a new group."""


def new_group(name: str, ranks: Sequence[int]) -> Any:
    """Make a group as dist.new_group does, called by its ranks only.

    torch would name it by the number of a process's groups. Ranks with different numbers of groups would use different
    names and not find each other.
    """
    own, private = c10d._process_group_name, c10d.__dict__
    private["_process_group_name"] = lambda *_, **__: name
    if _SORTS:
        private["sorted"] = list
    options: dict[str, Any] = {} if _SORTS else {"sort_ranks": False}
    try:
        return c10d.new_group(list(ranks), use_local_synchronization=True, **options)
    finally:
        private["_process_group_name"] = own
        private.pop("sorted", None)


def by_name(name: Any) -> Any:
    return c10d._resolve_process_group(name)


def default_store() -> Any:
    return c10d._get_default_store()


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """Return the value of a collective in flight; any other tensor itself."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def mesh_of_context() -> Any:
    """Return the mesh of the innermost ``with mesh:``; None outside of any."""
    stack = _mesh_resources.mesh_stack
    return stack[-1] if stack else None


def done() -> Any:
    return FakeWork()


def says_gone(error: BaseException) -> bool:
    """Whether an error says that a collective's group is gone; torch has no type for that."""
    return isinstance(error, RuntimeError) and "Could not resolve the process group" in str(error)
