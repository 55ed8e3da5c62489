"""Functions of the controller's torch that a worker's older torch (2.9, with torch_xla) lacks or has in another form.

Commands of the controller name them. torch's DTensor runs them once for each rank, with that rank's numbers. All of
them are functions of tensors, with the results of the controller's torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

from monarch_backend._core import torch_version

NEWEST = (2, 13)
"""Release from which torch has all of them."""
_PLACEMENTS = "torch.distributed.tensor.placement_types:"


def replaced() -> dict[str, Callable[..., Any]]:
    """Return, for this process's torch, the called function by its name in commands."""
    return {} if torch_version.torch_version() >= NEWEST else _REPLACED


_KINDS = (Shard, Replicate, Partial, _StridedShard)


def reduce_placement(value: Any) -> Any:
    """Pickle a placement for a newer torch, where its constructor makes it.

    There it is a C++ object. An older torch's pickle would restore it without its content. torch 2.11 and 2.12 have
    C++ objects too, whose content is not in ``vars``.
    """
    if type(value) not in _KINDS or not replaced():
        return NotImplemented
    return _placement, (type(value), value.__reduce_ex__(4)[2] or {})


def _placement(kind: Any, fields: dict[str, Any]) -> Any:
    return kind(**fields)


def _pad(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return F.pad(tensor, [0, 0] * (tensor.ndim - dim - 1) + [0, size]) if size else tensor


def _unpad(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return tensor.narrow(dim, 0, tensor.size(dim) - size) if size else tensor


def _chunks(tensor: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    """Return ``count`` chunks; the last ones are empty if there are too few elements."""
    found = list(torch.chunk(tensor, count, dim))
    return found + [tensor.narrow(dim, 0, 0)] * (count - len(found))


def _copied(tensor: torch.Tensor, contiguous: bool, clone: bool) -> torch.Tensor:
    if clone:
        return tensor.clone()
    return tensor.contiguous() if contiguous else tensor


def select_split(
    placement: Any, tensor: torch.Tensor, num_chunks: int, index: int,
    *, with_padding: bool = True, contiguous: bool = True, clone: bool = True,
) -> torch.Tensor:  # fmt: skip
    dim = placement.dim
    found = _chunks(tensor, num_chunks, dim)[index]
    if with_padding:
        found = _pad(found, dim, -(-tensor.size(dim) // num_chunks) - found.size(dim))
    return _copied(found, contiguous, clone)


def select_strided(
    placement: Any, tensor: torch.Tensor, num_chunks: int, index: int,
    *, with_padding: bool = True, contiguous: bool = True, clone: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Return a shard of a dimension that is sharded from right to left; not padded, as in torch."""
    del with_padding
    parts = [
        _chunks(each, num_chunks, placement.dim)[index]
        for each in _chunks(tensor, placement.split_factor, placement.dim)
    ]
    return _copied(torch.cat(parts, placement.dim), contiguous, clone)


def select(shards: list[torch.Tensor], shard_index: int) -> torch.Tensor:
    return shards[shard_index].clone()


def pad_uneven(placement: Any, local: torch.Tensor, logical_dim_size: int, num_chunks: int) -> torch.Tensor:
    if logical_dim_size % num_chunks:
        local = _pad(local, placement.dim, -(-logical_dim_size // num_chunks) - local.size(placement.dim))
    return local.contiguous()


def unpad_uneven(placement: Any, local: torch.Tensor, logical_dim_size: int, num_chunks: int) -> torch.Tensor:
    """Remove the padding of gathered shards."""
    del num_chunks
    return _unpad(local, placement.dim, local.size(placement.dim) - logical_dim_size).contiguous()


def unpad_by_sizes(dim: int, local: torch.Tensor, pad_sizes: Any, mine: int, make_contiguous: bool) -> torch.Tensor:
    if pad_sizes[mine] > 0:
        local = _unpad(local, dim, pad_sizes[mine])
        return local.contiguous() if make_contiguous else local
    return local


def pad_for_new_dim(
    current_logical_shape: Any, local: torch.Tensor, num_chunks: int, old_shard_dim: int, new_shard_dim: int
) -> torch.Tensor:
    """Pad before an all-to-all from shards of one dimension to those of another."""
    for dim, times in ((old_shard_dim, 1), (new_shard_dim, num_chunks)):
        size = current_logical_shape[dim]
        if size % num_chunks:
            local = _pad(local, dim, -(-size // num_chunks) * times - local.size(dim))
    return local.contiguous()


def unpad_for_new_dim(
    current_logical_shape: Any, local: torch.Tensor, num_chunks: int, old_shard_dim: int, new_shard_dim: int,
    local_rank: int,
) -> torch.Tensor:  # fmt: skip
    """Remove the padding after that all-to-all."""
    old, new = current_logical_shape[old_shard_dim], current_logical_shape[new_shard_dim]
    if old % num_chunks:
        local = _unpad(local, old_shard_dim, -(-old // num_chunks) * num_chunks - old)
    if new % num_chunks:
        full = -(-new // num_chunks)
        mine = max(0, min(full, new - full * local_rank))
        local = _unpad(local, new_shard_dim, full - mine)
    return local


def mask(tensor: torch.Tensor, local_offset_on_dim: int, local_shard_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mask of indices in other shards, and the indices in this one, 0 for others."""
    others = (tensor < local_offset_on_dim) | (tensor >= local_offset_on_dim + local_shard_size)
    return others, (tensor - local_offset_on_dim).masked_fill(others, 0)


_REPLACED: dict[str, Callable[..., Any]] = {
    _PLACEMENTS + "Shard._select_split_tensor": select_split,
    _PLACEMENTS + "Shard._maybe_pad_tensor": pad_uneven,
    _PLACEMENTS + "Shard._maybe_unpad_tensor": unpad_uneven,
    _PLACEMENTS + "Shard._maybe_unpad_tensor_with_sizes": unpad_by_sizes,
    _PLACEMENTS + "Shard._pad_for_new_shard_dim": pad_for_new_dim,
    _PLACEMENTS + "Shard._unpad_for_new_shard_dim": unpad_for_new_dim,
    _PLACEMENTS + "_StridedShard._select_split_tensor": select_strided,
    _PLACEMENTS + "_StridedShard._select_shard": select,
    _PLACEMENTS + "_MaskPartial._mask_tensor": mask,
}
