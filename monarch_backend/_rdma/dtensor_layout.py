"""Layout of a DTensor's shards as `ShardSpec`s. Only this module of the package reads private parts of torch.

These are the attribute `split_factor` of `_StridedShard`, and `DTensorSpec.shard_order` (from torch 2.13 on). FSDP2
makes `_StridedShard` for parameters that are already tensor-parallel. tests/rdma/test_dtensor_layout.py fails when they
change.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

from monarch_backend._rdma.shard_geometry import ShardSpec

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def is_dtensor(tensor: Any) -> TypeGuard[DTensor]:
    """Return whether a tensor is a DTensor, without importing DTensor, which takes a second.

    A process that has a DTensor has imported it already.
    """
    dtensors = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return dtensors is not None and isinstance(tensor, dtensors)


def splits(tensor: DTensor) -> tuple[ShardSpec, ...] | None:
    """Return the splits that lead to this rank's part, in the order in which they apply. None if the rank is not in the
    mesh.

    Raises ValueError for placements that are neither sharded nor replicated.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    for placement in placements:
        _refuse_what_is_no_part(placement)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    order = [i for i in _order(tensor, len(placements)) if not placements[i].is_replicate()]
    return tuple(_split(placements[i], tensor.ndim, mesh.size(i), coordinate[i]) for i in order)


def _split(placement: Any, ndim: int, ways: int, place: int) -> ShardSpec:
    return ShardSpec(placement.dim % ndim, ways, place, getattr(placement, "split_factor", 1))


def _refuse_what_is_no_part(placement: Placement) -> None:
    if placement.is_partial():
        raise ValueError(f"{placement} is a part of a sum that was not made yet: redistribute() it first")
    # _StridedShard.is_shard() is True in torch 2.9 and False in 2.13 and later.
    if not (placement.is_replicate() or placement.is_shard() or hasattr(placement, "split_factor")):
        raise ValueError(f"the placement {placement} is not known here: redistribute() to Shard and Replicate first")


def _order(tensor: DTensor, dims: int) -> list[int]:
    """Return the mesh dimensions in the order in which they shard: left to right, or the tensor's shard order."""
    order = getattr(tensor._spec, "shard_order", None) or ()
    cutting = [mesh_dim for entry in order for mesh_dim in entry.mesh_dims]
    return [*cutting, *(dim for dim in range(dims) if dim not in cutting)]
