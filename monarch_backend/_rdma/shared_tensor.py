"""Tensors in memory that all processes of this host have mapped: others read them with a plain copy of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from monarch_backend import _native
from monarch_backend._rdma.errors import RDMAError
from monarch_backend._rdma.registrations import registry


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised tensor of the CPU whose memory this host's other processes have mapped.

    As ``torch.empty``. Registered, it is read and written by processes of the same host at the full speed of a copy:
    the kernel, which moves other memory, is two or three times slower for large ones. Its memory comes out of the 4 GiB
    that large messages of this process use as well, and is given back with the tensor. Raises RDMAError if there is no
    room.

    >>> from monarch_backend import rdma
    >>> weights = rdma.empty(2, 3).fill_(1.0)
    >>> weights.shape, weights.sum().item()
    (torch.Size([2, 3]), 6.0)
    """
    shape: Any = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    made = torch.empty(shape, dtype=dtype, device="meta")  # torch's own checks of the arguments
    if made.numel() == 0:
        return torch.empty(made.shape, dtype=made.dtype, device="cpu")
    try:
        room = _native.Room(registry().host, math.prod(made.shape) * made.itemsize)
    except MemoryError:
        raise RDMAError(
            f"there is no room for {made.nbytes} bytes in the shared memory of this process: torch.empty has it, and "
            "can be registered as well"
        ) from None
    return torch.frombuffer(room, dtype=made.dtype).view(made.shape)
