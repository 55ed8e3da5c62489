"""Inputs of all ranks, and the expected results of every collective, computed in one process.

This module uses no process group, no communication and no code of monarch_backend, so it is an independent reference.
All values are small integers that every dtype holds exactly, so the order of additions does not matter. The inputs
are cached and shared: clone one before you write to it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int8", "uint8", "int32", "int64", "bool")
COMPLEX = ("complex64", "complex128")
# Gloo copies these dtypes and does not reduce them. Shared memory reduces them.
GLOO_MOVES = ("float8_e4m3fn", "int16", "uint16", "uint32", "uint64")
DTYPES = (*FLOATS, *INTEGERS, *COMPLEX, *GLOO_MOVES)

OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
ARITHMETIC = ("SUM", "PRODUCT", "MIN", "MAX")


def on_gloo() -> bool:
    """Return whether Gloo runs the collectives because shared memory is switched off."""
    return os.environ.get("MONARCH_SHM", "1") == "0"


def reduces(dtype: str, op: str) -> bool:
    """Whether a reduction with ``op`` must work for ``dtype`` on the CPU."""
    if on_gloo() and dtype not in (*FLOATS, *INTEGERS, *COMPLEX):
        return False
    if dtype in FLOATS or dtype.startswith("float8"):
        return op in (*ARITHMETIC, "AVG")
    if dtype in INTEGERS or dtype in GLOO_MOVES:
        return op in (*ARITHMETIC, "BAND", "BOR", "BXOR") or (op == "AVG" and dtype != "bool")
    return dtype in COMPLEX and op in ("SUM", "AVG")


@functools.cache
def values(rank: int, dtype: str, shape: tuple[int, ...], salt: int = 0) -> Tensor:
    """Numbers from 1 to 13 for collectives that only copy. They depend on the rank, the position and ``salt``."""
    index = torch.arange(_count(shape))
    numbers = (index * 5 + index // 13 + rank * 3 + salt * 7) % 13 + 1
    return _typed(numbers, dtype).view(list(shape))


@functools.cache
def factors(rank: int, dtype: str, shape: tuple[int, ...], salt: int = 0) -> Tensor:
    """Numbers from 1 to 3, some negative, for reductions: the product of four of them fits an int8."""
    index = torch.arange(_count(shape))
    numbers = (index * 5 + index // 3 + rank * 2 + salt) % 3 + 1
    if not dtype.startswith(("u", "bool")):
        numbers = torch.where((index + rank) % 5 == 4, -numbers, numbers)
    return _typed(numbers, dtype).view(list(shape))


def _typed(numbers: Tensor, dtype: str) -> Tensor:
    if dtype == "bool":
        return numbers % 3 == 0
    if dtype in COMPLEX:
        return torch.complex(numbers.double(), (numbers * 5 % 13).double()).to(getattr(torch, dtype))
    return numbers.to(getattr(torch, dtype))


def _count(shape: Sequence[int]) -> int:
    return functools.reduce(lambda a, b: a * b, shape, 1)


def reduced(op: str, inputs: Sequence[Tensor]) -> Tensor:
    """Reduce the inputs of all ranks with ``op``."""
    dtype = inputs[0].dtype
    if str(dtype).removeprefix("torch.") in GLOO_MOVES:  # torch itself reduces few of these dtypes or none
        wide = torch.float32 if dtype.is_floating_point else torch.int64
        return reduced(op, [x.to(wide) for x in inputs]).to(dtype)
    if op == "AVG" and inputs[0].dtype.is_complex:
        # Divide real and imaginary parts separately: a complex division would round differently.
        return torch.view_as_complex(reduced(op, [torch.view_as_real(x) for x in inputs]))
    if op == "AVG":
        rounding_mode = None if dtype.is_floating_point else "trunc"
        return functools.reduce(torch.add, inputs).div(len(inputs), rounding_mode=rounding_mode)
    if inputs[0].dtype is torch.bool:
        # A sum of bools is their logical or, as on every other device.
        op = {"SUM": "BOR", "PRODUCT": "BAND", "MIN": "BAND", "MAX": "BOR"}.get(op, op)
    combine = {
        "SUM": torch.add,
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }[op]
    return functools.reduce(combine, inputs).clone()


def exchanged(inputs: Sequence[Sequence[Tensor]], me: int) -> list[Tensor]:
    """Return the tensors that rank ``me`` receives when rank ``r`` sends ``inputs[r][to]`` to rank ``to``."""
    return [row[me].clone() for row in inputs]


def split_sizes(sender: int, size: int) -> list[int]:
    """Return the number of rows that ``sender`` sends to each of ``size`` ranks. The numbers differ, and some are 0."""
    return [(sender * 2 + to + 1) % 3 for to in range(size)]


def same(got: Tensor, want: Tensor) -> bool:
    """Compare dtype, shape and bytes. torch.equal supports neither float8 nor the larger unsigned integers."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    return torch.equal(_bytes(got), _bytes(want))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
