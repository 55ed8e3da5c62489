"""Attention of DTensors on CPUs with a mask: sharded by batch, by heads, or whole, with the mask in the same placement.

torch redistributes only arguments that are given by position. The mask is a keyword argument, so it would keep its
placement, with rows of queries that another rank has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate

from monarch_backend.dtensor._dispatch import local_results
from monarch_backend.dtensor._per_rank import per_rank_int

_aten = torch.ops.aten

TENSORS = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 6,
}
"""Operators with their number of tensors before the other arguments."""


def masked(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result, or the gradients, for a tensor mask. ``args``: with at least one DTensor."""
    count, mask = TENSORS[func], kwargs["attn_mask"]
    mesh, (*given, mask) = local_results.on_one_mesh([*args[:count], mask])
    query, key = given[-3:-1] if count == 3 else given[1:3]  # after its result's gradient
    there = [_kept(each, query, key) for each in query.placements]
    of_mask = [each if _has(mask, each, query) else Replicate() for each in there]
    local = [_local(each, there) for each in given]
    found = func(*local, *args[count:], **{**kwargs, "attn_mask": _local(mask, of_mask)})
    wholes = local_results.wholes(func, (*given, *args[count:]), {**kwargs, "attn_mask": mask})
    return tuple(local_results.of_parts(each, whole, mesh, there) for each, whole in zip(found, wholes, strict=True))


def _kept(placement: Any, query: Any, key: Any) -> Any:
    """Return the placement if it is by batch, or by heads with some on each rank; else Replicate."""
    if not (placement.is_shard(0) or placement.is_shard(1)):
        return Replicate()
    size = query._local_tensor.size(placement.dim)
    alike = query.shape[placement.dim] == key.shape[placement.dim]
    return placement if alike and 0 not in (per_rank_int.values_of(size) or (size,)) else Replicate()


def _has(mask: Any, placement: Any, query: Any) -> bool:
    """Whether the mask differs by batch, or by head; else it is the same for all of them."""
    return bool(placement.is_shard() and mask.ndim == 4 and mask.shape[placement.dim] == query.shape[placement.dim])


def _local(tensor: Any, placements: Any) -> Any:
    return tensor.redistribute(placements=placements)._local_tensor
