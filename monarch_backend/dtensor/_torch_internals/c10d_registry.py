"""What torch.distributed keeps of process groups in private tables, as far as a controller must write there.

With device_mesh_and_api.py the only module here that touches torch's private parts; tests/dtensor/test_torch.py says
when they move.
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
    """torch finds the group by its name, and its ranks."""
    world: Any = c10d._world
    world.pg_map[group] = ("monarch", native.HashStore())
    world.pg_names[group] = name
    world.pg_backend_config[group] = DEVICES
    world.pg_to_tag[group] = f"ptd:{name}"
    world.tags_to_pg.setdefault(f"ptd:{name}", []).append(group)
    register_name(group, name)
    set_ranks(group, ranks)


def register_name(group: Any, name: Any) -> None:
    """torch finds the group by its name, for as long as somebody has it."""
    c10d._register_process_group(name, group)


def set_ranks(group: Any, ranks: Sequence[int]) -> None:
    """These global ranks, in their order, are its ranks."""
    c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}


def set_default(group: Any) -> None:
    """It is what torch.distributed's functions take where no group is given."""
    c10d._update_default_pg(group)
    c10d._world.group_count = max(1, c10d._world.group_count)  # its name is "0", as in init_process_group


def default() -> Any:
    """The default group, which there is."""
    return c10d._get_default_group()


# What workers need ----------------------------------------------------------------------------------------------


_SORTS = "sort_ranks" not in inspect.signature(c10d.new_group).parameters
"""An older torch, of a worker: it has the ranks in their own order, whatever order they are given in."""


def new_group(name: str, ranks: Sequence[int]) -> Any:
    """As dist.new_group, called by its ranks only.

    torch would name it after how many groups a process has: ranks that are in different ones would look for each other
    under different names.
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
    """The group of this name, which there is."""
    return c10d._resolve_process_group(name)


def default_store() -> Any:
    """Where the ranks of the default group have met."""
    return c10d._get_default_store()


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """The value of a collective that may be under way; any other tensor itself."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def mesh_of_context() -> Any:
    """The mesh of the innermost ``with mesh:``; None outside of any."""
    stack = _mesh_resources.mesh_stack
    return stack[-1] if stack else None


def done() -> Any:
    """What a collective returns of which nothing is left to wait for."""
    return FakeWork()


def says_gone(error: BaseException) -> bool:
    """Whether a collective has not found its group any more: torch has no type for that."""
    return isinstance(error, RuntimeError) and "Could not resolve the process group" in str(error)
