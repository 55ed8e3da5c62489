"""Global shapes of DTensors from their shards. The controller knows the sizes of all shards, a rank only its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._per_rank import per_rank_int


def shape_and_stride(
    local: RemoteTensor, slices: torch.Tensor, first: int, placements: Sequence[Any]
) -> tuple[list[Any], list[Any]] | None:
    """Return the global shape and strides for shards of unequal sizes.

    Returns None for equal shards, for which torch's own rule is right, and for strided ones. ``slices``: a mesh of
    global ranks for each slice; ``first`` is the workers' first rank. Each slice has its own tensor; if these differ,
    the result has per-rank integers. Raises ValueError if no tensor has such shards.
    """
    if local._meta.classes is None or any(type(each) is _StridedShard for each in placements):
        return None
    found: list[Sequence[int] | None] = [None] * local._meta.workers.size
    for ranks in slices:
        numbers = [rank - first for rank in ranks.flatten().tolist()]
        metas = [local._meta.on(number) for number in numbers]
        if None in metas:
            return None
        shape = []
        for dim in range(local.ndim):
            sizes = torch.tensor([int(meta.shape[dim]) for meta in metas]).view(ranks.shape)  # type: ignore[union-attr]
            shape.append(_size(sizes, dim, placements))
        for number in numbers:
            found[number] = [*shape, *_stride(shape, metas[0].stride)]  # type: ignore[union-attr]
    columns = [[None if each is None else each[at] for each in found] for at in range(2 * local.ndim)]
    whole = [per_rank_int.by_rank(each, sizes=True) for each in columns]
    return whole[: local.ndim], whole[local.ndim :]


def _size(sizes: torch.Tensor, dim: int, placements: Sequence[Any]) -> int:
    shards = [at for at, placement in enumerate(placements) if type(placement) is Shard and placement.dim == dim]
    whole = int(sizes[tuple(slice(None) if at in shards else 0 for at in range(sizes.ndim))].sum())
    divided = _divided(whole, sizes.shape, shards)
    if not torch.equal(sizes, divided):
        raise ValueError(
            f"from_local: along dimension {dim} the ranks have {sizes.tolist()}, which are no shards of a tensor with "
            f"placements {', '.join(map(str, placements))}: those of {whole} have {divided.tolist()}"
        )
    return whole


def _divided(whole: int, mesh: Sequence[int], shards: Sequence[int]) -> torch.Tensor:
    """Return the length of each rank's shard of a dimension, as torch.chunk divides it."""
    found = torch.full(tuple(mesh), whole)
    for at in shards:
        most = -(-found // mesh[at])
        place = torch.arange(mesh[at]).view([-1 if i == at else 1 for i in range(len(mesh))])
        found = (found - most * place).clamp(min=0).minimum(most)
    return found


def _stride(shape: Sequence[int], like: Sequence[int]) -> list[int]:
    """Return dense strides with the dimensions in the same order."""
    found, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (like[d], -d)):
        found[dim], step = step, step * max(1, shape[dim])
    return found
