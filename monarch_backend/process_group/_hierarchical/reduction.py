"""Reduction of the hosts' partial results to one, always in the same order.

The compiled core (csrc/shm/reduce.h) reduces within a host, and this module agrees with it. 16-bit and 8-bit floats are
added in float32, sums of bools are "any", a NaN wins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from monarch_backend.process_group._integer_mean import INTEGERS, divide_sum
from monarch_backend.process_group._shm import shm_backend


def op_on_host(op: int, dtype: torch.dtype) -> int:
    """Return the reduction inside a host for ``op`` over all ranks. A mean is a sum there, divided once between hosts.

    The sum of 16-bit and 8-bit floats might overflow, so a host makes a mean of these.
    """
    return _SUM if op == _AVG and dtype not in _NARROW else op


def combine(parts: Sequence[Tensor], out: Tensor, op: int, sizes: Sequence[int]) -> None:
    """Reduce the hosts' parts into ``out``, which may be one of them; ``sizes`` are the hosts' numbers of ranks."""
    for start in range(0, out.numel(), _BLOCK):
        block = [part[start : start + _BLOCK] for part in parts]
        out[start : start + _BLOCK] = _combined(block, op, sizes)


# A block fits the cache, and is too small for torch to use several threads: the ranks of a host already occupy the
# processors.
_BLOCK = 1 << 14
_SUM, _AVG = shm_backend._OPS["SUM"], shm_backend._OPS["AVG"]
_NARROW = frozenset(d for d in shm_backend._DTYPES if d.is_floating_point and d.itemsize < 4)
_COMBINE: dict[int, Callable[[Tensor, Tensor], Tensor]] = {
    shm_backend._OPS["SUM"]: torch.add,
    shm_backend._OPS["AVG"]: torch.add,
    shm_backend._OPS["PRODUCT"]: torch.mul,
    shm_backend._OPS["MIN"]: torch.minimum,
    shm_backend._OPS["MAX"]: torch.maximum,
    shm_backend._OPS["BAND"]: torch.bitwise_and,
    shm_backend._OPS["BOR"]: torch.bitwise_or,
    shm_backend._OPS["BXOR"]: torch.bitwise_xor,
}
# torch can't compute with these. Signed numbers have the same bits but another order.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _combined(parts: list[Tensor], op: int, sizes: Sequence[int]) -> Tensor:
    """Return the reduction of the parts, from the first host to the last; ``sizes`` are their numbers of ranks."""
    dtype = parts[0].dtype
    if op == _AVG and dtype in INTEGERS:
        return divide_sum(_combined(parts, _SUM, sizes), sum(sizes))
    if dtype.is_complex and op in (_SUM, _AVG):
        return torch.view_as_complex(_combined([torch.view_as_real(part) for part in parts], op, sizes))
    if dtype in _SIGNED:
        signed = _SIGNED[dtype]
        lowest = torch.iinfo(signed).min if op in (shm_backend._OPS["MIN"], shm_backend._OPS["MAX"]) else 0
        return (_combined([part.view(signed) ^ lowest for part in parts], op, sizes) ^ lowest).view(dtype)
    if dtype in _NARROW:
        parts = [part.float() for part in parts]
        if op == _AVG:  # the parts are means of their hosts
            parts = [part * size for part, size in zip(parts, sizes, strict=True)]
    total = parts[0]
    for part in parts[1:]:
        total = _COMBINE[op](total, part)
    if op == _AVG:
        total = total / sum(sizes)
    return total.to(dtype)
