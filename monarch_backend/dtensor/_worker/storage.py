"""Storage of a worker's tensors: resizing and measuring."""

from __future__ import annotations

import torch


def resize(tensor: torch.Tensor, nbytes: int) -> None:
    """Resize the tensor's storage to ``nbytes``; 0 frees it."""
    tensor.untyped_storage().resize_(nbytes)


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether it has elements, but no memory for them."""
    if tensor.is_meta or tensor.device.type == "xla":  # their tensors never show memory
        return False
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def identity(tensor: object) -> int | None:
    """Return the identity of the storage while it exists, or None for a tensor without a storage that can change."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.device.type == "xla":
        return None
    return int(tensor.untyped_storage()._cdata)


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a write into one may change the other."""
    if one.layout != torch.strided or other.layout != torch.strided:  # other layouts have no storage
        return False
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    (begin, end), (first, past) = _extent(one), _extent(other)
    return begin < past and first < end


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte in the storage and the byte after the last."""
    begin, steps = int(tensor.storage_offset()), zip(tensor.shape, tensor.stride(), strict=True)
    size = 1 + sum((n - 1) * step for n, step in steps) if tensor.numel() else 0
    return begin * tensor.itemsize, (begin + size) * tensor.itemsize
