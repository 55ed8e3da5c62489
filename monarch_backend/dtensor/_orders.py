"""The order in memory of what operators return: as the controller has it, who knows the strides before anybody runs.

torch's functions that find out strides say for some operators what a device's kernels do not (`batch_norm` of what is
transposed, the gradient of `layer_norm`), and a `view` is decided by what is said. So workers are told what was said,
look at what they have when they do an operation for the first time, and copy it into that order where it has another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Strides = list[int] | None
"""None: any will do."""


def said(results: Any, device: torch.device) -> list[Strides]:
    """For workers of this device: the strides of each of these, metadata or fake tensors. XLA has orders of its own."""
    many = results if isinstance(results, (list, tuple)) else [results]
    if device.type == "xla":
        return [None] * len(many)
    return [None if each is None else list(_strides(each)) for each in many]


def _strides(one: Any) -> Sequence[int]:
    return one.stride() if isinstance(one, torch.Tensor) else one.stride


def is_wrong(tensor: Any, strides: Strides) -> bool:
    """Whether what an operator has returned has another order than this."""
    if strides is None or not isinstance(tensor, torch.Tensor) or tensor.numel() < 2 or tensor._is_view():
        return False
    steps = [each for each in zip(tensor.shape, tensor.stride(), strides, strict=True) if each[0] > 1]
    # Nothing can be copied into places that are one.
    return any(has != right for _, has, right in steps) and all(right for _, _, right in steps)


def ordered(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """A copy in this order."""
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
