"""Checkpoints on a worker: torch.distributed.checkpoint for this rank's part of a save or load."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from monarch_backend.dtensor._torch_internals import c10d_registry

_groups: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()
"""Groups of some of the ranks, by the default group. Cached: a new group of the same name would read old keys."""


def _group(mesh: DeviceMesh) -> Any:
    """Return the group of the mesh's ranks: None for all, or a group of some of them."""
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    if len(ranks) == dist.get_world_size():
        return None
    known = _groups.setdefault(dist.group.WORLD, {})
    if ranks not in known:
        known[ranks] = c10d_registry.new_group("checkpoint_" + "_".join(map(str, ranks)), ranks)
    return known[ranks]


def save(
    _unfailed: None, mesh: DeviceMesh, state_dict: Any, storage_writer: Any, planner: Any, use_collectives: bool
) -> Any:
    """Save this rank's part; return torch's result on the first rank."""
    metadata = dcp.save(
        state_dict, storage_writer=storage_writer, planner=planner, process_group=_group(mesh),
        use_collectives=use_collectives,
    )  # fmt: skip
    return metadata if _is_first(mesh) else None


def load(mesh: DeviceMesh, state_dict: Any, storage_reader: Any, planner: Any) -> Any:
    """Load this rank's part; return values that are not DTensors on the first rank. DTensors are filled in place."""
    dcp.load(state_dict, storage_reader=storage_reader, planner=planner, process_group=_group(mesh))
    if not _is_first(mesh):
        return None
    return pytree.tree_map(lambda each: None if isinstance(each, DTensor) else each, state_dict)


def _is_first(mesh: DeviceMesh) -> bool:
    return mesh.get_rank() == int(mesh.mesh.flatten()[0])
