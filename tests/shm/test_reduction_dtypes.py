"""Every dtype and op that the shared-memory route reduces, compared with torch's arithmetic."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from monarch_backend import CollectiveArgumentError
from monarch_backend._core.torch_version import torch_version
from monarch_backend.process_group._shm import shm_backend
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the shared-memory core is Linux's")

FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "AVG": lambda a, b: (a + b) / 2,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def test_the_route_reduces_all_that_torch_has() -> None:
    """A dtype that a newer torch adds must be supported by the core, or be listed here with a reason."""
    found = {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    packed = {"float4_e2m1fn_x2", "float8_e8m0fnu", "complex32", "bcomplex32"}  # torch cannot add these dtypes
    packed |= {"bits8", "bits16", "bits1x8", "bits2x4", "bits4x2", "quint8", "qint8", "qint32", "quint4x2", "quint2x4"}
    packed |= {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}  # torch has no tensors of these dtypes
    missing = {str(d).removeprefix("torch.") for d in found - set(shm_backend._DTYPES)} - packed
    assert not missing


# float8: every pair of its 256 codes ----------------------------------------------------------------------------------


def _float8(rank: int, name: str, op: str) -> list[str]:
    dtype, codes = getattr(torch, name), torch.arange(256, dtype=torch.uint8)
    a, b = codes.repeat_interleave(256).view(dtype), codes.repeat(256).view(dtype)
    x = (a if rank == 0 else b).clone()
    dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
    exact = OPS[op](a.float(), b.float())
    want = exact.to(dtype)
    wrong = x.view(torch.uint8) != want.view(torch.uint8)
    wrong &= ~(x.float().isnan() & want.float().isnan())
    if name == "float8_e4m3fn" and torch_version() < (2, 13):
        wrong &= exact.abs() <= 448  # this torch gives NaN above the dtype's largest number
    return [f"{a[i].item()} {op} {b[i].item()}: {x[i].item()}, not {want[i].item()}" for i in wrong.nonzero()[:5, 0]]


@pytest.mark.parametrize("op", ["SUM", "PRODUCT", "AVG", "MIN", "MAX"])
@pytest.mark.parametrize("name", FLOAT8)
def test_every_pair_of_float8(name: str, op: str) -> None:
    assert run_ranks(_float8, 2, name, op) == [[], []]


# Integers wrap around as in torch -------------------------------------------------------------------------------------


def _integers(rank: int, name: str) -> None:
    dtype = getattr(torch, name)
    wide = {"uint16": torch.int32, "uint32": torch.int64}.get(name)  # torch has no arithmetic for these dtypes
    ends = [torch.iinfo(dtype).min, torch.iinfo(dtype).max, 0, 1, 2, 3, 100]
    pairs = torch.tensor(list(itertools.product(ends, ends)), dtype=dtype)
    mine = pairs[:, rank].contiguous()
    for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        x = mine.clone()
        dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
        assert x.tolist() == [_exact(op, a, b, dtype) for a, b in pairs.tolist()], (name, op)
        if wide is None and name != "uint64" and op != "AVG":
            assert torch.equal(x, OPS[op](pairs[:, 0], pairs[:, 1]))
    with pytest.raises(CollectiveArgumentError, match=rf"PREMUL_SUM can't \w+ (torch\.)?{name}"):
        dist.all_reduce(mine.clone(), op=_premultiplied(2.0))


def _exact(op: str, a: int, b: int, dtype: torch.dtype) -> int:
    if op == "AVG":
        total = _exact("SUM", a, b, dtype)
        return abs(total) // 2 * (1 if total > 0 else -1)
    value = {"SUM": a + b, "PRODUCT": a * b, "MIN": min(a, b), "MAX": max(a, b), "BAND": a & b, "BOR": a | b}.get(
        op, a ^ b
    )
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return (value - low) % (high - low + 1) + low


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_wrap_around(name: str) -> None:
    run_ranks(_integers, 2, name)


# Floats, bools, complex -----------------------------------------------------------------------------------------------


def _nan_and_infinity(rank: int, name: str) -> None:
    inf, nan = float("inf"), float("nan")
    ends = [0.0, -0.0, 1.0, -2.5, inf, -inf, nan, 6e-8, 65504.0]
    pairs = torch.tensor(list(itertools.product(ends, ends)), dtype=torch.float64).to(getattr(torch, name))
    for op in ("SUM", "PRODUCT", "MIN", "MAX", "AVG"):
        x = pairs[:, rank].contiguous()
        dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
        a, b = (side.float() if x.itemsize == 2 else side for side in (pairs[:, 0], pairs[:, 1]))
        assert torch.equal(x.nan_to_num(7.0), OPS[op](a, b).to(x.dtype).nan_to_num(7.0)), (name, op)


@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16", "float16"])
def test_nan_and_infinity(name: str) -> None:
    run_ranks(_nan_and_infinity, 2, name)


def _sixteen_bits(rank: int, name: str) -> None:
    """16-bit sums are accumulated in float32 and rounded once, which is more exact than any order of 16-bit
    additions.
    """
    size = dist.get_world_size()
    for n in (5, 10_000, 1_000_003):
        inputs = [
            torch.randn(n, generator=torch.Generator().manual_seed(r)).to(getattr(torch, name)) for r in range(size)
        ]
        want = inputs[0].float()
        for other in inputs[1:]:
            want = want + other.float()
        x = inputs[rank].clone()
        dist.all_reduce(x)
        assert torch.equal(x, want.to(x.dtype)), n
        x = inputs[rank].clone()
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        assert torch.equal(x, (want / size).to(x.dtype)), n


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_sixteen_bits_are_accumulated_in_float32(name: str, world_size: int) -> None:
    run_ranks(_sixteen_bits, world_size, name)


def _bools(rank: int) -> None:
    pairs = torch.tensor([[False, False], [False, True], [True, False], [True, True]])
    for op, want in (("SUM", "0111"), ("MAX", "0111"), ("BOR", "0111"), ("MIN", "0001"), ("BXOR", "0110")):
        x = pairs[:, rank].contiguous()
        dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
        assert "".join(str(int(v)) for v in x) == want, op


def test_bools() -> None:
    run_ranks(_bools, 2)


def _complex(rank: int, name: str) -> None:
    x = torch.tensor([1 + 2j, -3j], dtype=getattr(torch, name)) * (rank + 1)
    y = x.clone()
    dist.all_reduce(y)
    assert y.tolist() == [3 + 6j, -9j]
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    assert x.tolist() == [1.5 + 3j, -4.5j]
    with pytest.raises((CollectiveArgumentError, ValueError), match=r"all_reduce does not support|PRODUCT can't"):
        dist.all_reduce(x, op=dist.ReduceOp.PRODUCT)


@pytest.mark.parametrize("name", ["complex64", "complex128"])
def test_complex(name: str) -> None:
    run_ranks(_complex, 2, name)


# PREMUL_SUM -----------------------------------------------------------------------------------------------------------


def _premultiplied(factor: float | Tensor) -> object:
    return dist._make_nccl_premul_sum(factor)


def _scaled_sums(rank: int, name: str) -> None:
    dtype = getattr(torch, name)
    op = _premultiplied(0.5)
    x = torch.full((5,), rank + 1.0, dtype=dtype)
    dist.all_reduce(x, op=op)
    assert x.float().eq(1.5).all()
    x = torch.full((5,), rank + 1.0, dtype=dtype)
    dist.reduce(x, 1, op=op)
    assert x.float().eq(1.5 if rank == 1 else 1.0).all()
    row, out = [torch.full((3,), rank + 1.0 + 2 * to, dtype=dtype) for to in range(2)], torch.zeros(3, dtype=dtype)
    dist.reduce_scatter(out, row, op=op)
    assert out.float().eq(1.5 + 2 * rank).all()
    assert row[0].float().eq(rank + 1.0).all()  # the caller's inputs are unchanged
    x = torch.full((5,), rank + 1.0, dtype=torch.float32)
    work = dist.all_reduce(x, op=_premultiplied(torch.tensor(2.0)), async_op=True)
    assert work is not None
    work.wait()
    assert x.eq(6).all()


@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16", "float8_e5m2"])
def test_premultiplied_sums(name: str) -> None:
    run_ranks(_scaled_sums, 2, name)
