"""Comparison of values on workers with those of a single process."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from monarch_backend.dtensor import RemoteTensor
from monarch_backend.dtensor._controller.fetch import as_host


def value(tensor: Any) -> torch.Tensor:
    """Return the values as a tensor of this process."""
    found = tensor.detach()
    if isinstance(found, DTensor):
        found = found.full_tensor()
    return as_host(found) if isinstance(found, RemoteTensor) else found


def same(ours: Any, reference: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Assert that both tensors have the same shape and, within rounding, the same values."""
    torch.testing.assert_close(value(ours), reference.detach(), atol=tolerance, rtol=1e-4)
