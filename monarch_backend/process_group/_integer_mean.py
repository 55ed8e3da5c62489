"""Mean of integers: the sum, which wraps around in its dtype, divided by a count and truncated towards zero.

NCCL does the same: its kernel `FuncSumPostDiv` (src/device/reduce_kernel.h) divides the magnitude of the sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

# torch can't divide most unsigned dtypes. It converts a divisor to the tensor's dtype, where it may not fit.
_WIDER = {
    torch.int8: torch.int32,
    torch.uint8: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
INTEGERS = frozenset({*_WIDER, torch.int32, torch.int64, torch.uint64})


def divide_sum(total: Tensor, count: int) -> Tensor:
    """Return ``total`` / ``count``, truncated towards zero, in the dtype of ``total``."""
    if total.dtype is torch.uint64:
        return _divide_uint64(total.view(torch.int64), count).view(torch.uint64)
    wide = total.to(_WIDER.get(total.dtype, total.dtype))
    return wide.div(count, rounding_mode="trunc").to(total.dtype)


def _divide_uint64(bits: Tensor, count: int) -> Tensor:
    half = (bits >> 1) & torch.iinfo(torch.int64).max  # a logical shift
    quotient = half.div(count, rounding_mode="trunc") * 2
    return quotient + (bits - quotient * count >= count)
