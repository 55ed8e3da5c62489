"""Tensors in shared memory of a host. Its other processes read and write them with a plain copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from monarch_backend import _native
from monarch_backend._rdma.errors import RDMAError
from monarch_backend._rdma.registrations import registry


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an uninitialised CPU tensor in memory that the host's other processes have mapped.

    The arguments are those of ``torch.empty``. Once it is registered, processes of the same host read and write it at
    the full speed of a copy. For large tensors in other memory the kernel copies, which is two or three times slower.
    The memory is taken from the 4 GiB that large messages of this process also use, and is freed with the tensor.
    Raises RDMAError if it is exhausted.

    >>> from monarch_backend import rdma
    >>> weights = rdma.empty(2, 3).fill_(1.0)
    >>> weights.shape, weights.sum().item()
    (torch.Size([2, 3]), 6.0)
    """
    shape: Any = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    made = torch.empty(shape, dtype=dtype, device="meta")  # so that torch checks the arguments
    if made.numel() == 0:
        return torch.empty(made.shape, dtype=made.dtype, device="cpu")
    try:
        buffer = _native.ArenaBuffer(registry().host, math.prod(made.shape) * made.itemsize)
    except MemoryError:
        raise RDMAError(
            f"there is no room for {made.nbytes} bytes in the shared memory of this process: torch.empty has it, and "
            "can be registered as well"
        ) from None
    return torch.frombuffer(buffer, dtype=made.dtype).view(made.shape)
