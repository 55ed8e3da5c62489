"""Memory of a worker's tensors: changing it, and saying how much there is."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def resize(tensor: torch.Tensor, nbytes: int) -> None:
    """The tensor's storage has so many bytes now; 0 frees it."""
    tensor.untyped_storage().resize_(nbytes)


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether it has values, and no memory for them."""
    if tensor.is_meta or tensor.device.type == "xla":  # those never show any
        return False
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def live_bytes(tensors: Iterable[object]) -> int:
    """The bytes of all storages that these tensors have, each storage once."""
    storages = {}
    for each in tensors:
        if isinstance(each, torch.Tensor) and not each.is_meta:
            storage = each.untyped_storage()
            if storage.nbytes():
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
