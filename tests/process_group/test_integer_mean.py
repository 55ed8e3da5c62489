"""AVG of integers: the sum in the dtype, divided by the group's size and truncated towards zero, on every route.

Python's integers give the expected values. Plain combinations of collective, layout and dtype are cells of
test_collectives.py's matrix.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._dynamo  # functional collectives import this for seconds: import it once before the fork
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed import ReduceOp

import monarch_backend
from monarch_backend import CollectiveArgumentError
from monarch_backend.process_group._integer_mean import INTEGERS, divide_sum
from monarch_backend.process_group._xla import host_staged
from tests.process_group.test_work import REDUCE_SCATTER_SINGLE
from tests.support.hosts import Hosts, hosts, refusal, run_on_hosts
from tests.support.ranks import run_ranks

SHM_DTYPES = ("uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
GLOO_DTYPES = ("uint8", "int8", "int32", "int64")  # the integer dtypes that Gloo reduces
SIZE = 3
# torch 2.13 introduced these names and deprecates the old ones.
SCATTER = getattr(funcol, "reduce_scatter_single", funcol.reduce_scatter_tensor)
SCATTER_COALESCED = getattr(funcol, "reduce_scatter_single_coalesced", funcol.reduce_scatter_tensor_coalesced)


def _input(rank: int, dtype: torch.dtype) -> list[int]:
    """Return inputs whose sums have several signs and remainders, and inputs whose sums wrap around in the dtype."""
    limits = torch.iinfo(dtype)
    signed = limits.min < 0
    first = [-7, -1, -2, 5] if signed else [7, 1, 2, 5]
    large = [limits.max, limits.max // 2 + 1, limits.min]
    return [number + rank for number in first] + [0, rank == 0, rank] + [max(x - rank, limits.min) for x in large]


def _wrap(number: int, dtype: torch.dtype) -> int:
    limits = torch.iinfo(dtype)
    return (number - limits.min) % (limits.max - limits.min + 1) + limits.min


def _truncate(number: int, count: int) -> int:
    return abs(number) // count * (1 if number > 0 else -1)


def _mean(dtype: torch.dtype) -> list[int]:
    totals = [sum(column) for column in zip(*(_input(rank, dtype) for rank in range(SIZE)), strict=True)]
    return [_truncate(_wrap(total, dtype), SIZE) for total in totals]


def _all_reduce(x: Tensor) -> Tensor:
    dist.all_reduce(x, ReduceOp.AVG)
    return x


def _all_reduce_async(x: Tensor) -> Tensor:
    work = dist.all_reduce(x, ReduceOp.AVG, async_op=True)
    assert work is not None
    (seen,) = work.get_future().wait()
    assert seen is x or seen.data_ptr() == x.data_ptr()
    return x


def _all_reduce_in_callback(x: Tensor) -> Tensor:
    work = dist.all_reduce(x, ReduceOp.AVG, async_op=True)
    assert work is not None
    copied: Tensor = work.get_future().then(lambda future: future.value()[0].clone()).wait()
    work.wait()
    assert copied.tolist() == x.tolist()
    return copied


def _all_reduce_observed(x: Tensor) -> Tensor:
    with torch.profiler.profile():
        dist.all_reduce(x, ReduceOp.AVG)
    return x


def _all_reduce_in_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        given = x.clone()
        work = dist.all_reduce(given, ReduceOp.AVG, async_op=True)
    assert work is not None
    work.wait()
    return given


def _reduce(x: Tensor) -> Tensor:
    given = x.clone()
    dist.reduce(x, 1, ReduceOp.AVG)
    # After a reduce the tensors of ranks other than the root are undefined.
    return x if dist.get_rank() == 1 else torch.tensor(_mean(given.dtype), dtype=given.dtype)


def _coalesced(x: Tensor) -> Tensor:
    other = x.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_reduce_coalesced([other, x], ReduceOp.AVG)
    assert other.tolist() == x.tolist()
    return x


def _coalescing_manager(x: Tensor) -> Tensor:
    other = x.clone()
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(x, ReduceOp.AVG)
        dist.all_reduce(other, ReduceOp.AVG)
    manager.wait()
    assert other.tolist() == x.tolist()
    return x


def _reduce_scatter(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    dist.reduce_scatter(out, [x] * SIZE, ReduceOp.AVG)
    return out


def _reduce_scatter_tensor(x: Tensor, *, async_op: bool = False) -> Tensor:
    out = torch.zeros_like(x)
    work = REDUCE_SCATTER_SINGLE(out, torch.cat([x] * SIZE), ReduceOp.AVG, async_op=async_op)
    if work is not None:
        work.wait()
        work.wait()  # a second wait must not divide again
    return out


def _reduce_scatter_tensor_async(x: Tensor) -> Tensor:
    return _reduce_scatter_tensor(x, async_op=True)


def _reduce_scatter_into_strides(x: Tensor) -> Tensor:
    out = torch.zeros(len(x), 2, dtype=x.dtype)[:, 0]
    REDUCE_SCATTER_SINGLE(out, torch.cat([x] * SIZE), ReduceOp.AVG)
    return out


def _functional(x: Tensor) -> Tensor:
    return funcol.all_reduce(x, "avg", dist.group.WORLD) + torch.zeros(1, dtype=x.dtype)


def _functional_coalesced(x: Tensor) -> Tensor:
    first, second = funcol.all_reduce_coalesced([x, x.clone()], "avg", dist.group.WORLD)
    assert first.tolist() == second.tolist()
    return first


def _functional_scatter(x: Tensor) -> Tensor:
    return SCATTER(torch.cat([x] * SIZE), "avg", 0, dist.group.WORLD)


def _functional_scatter_coalesced(x: Tensor) -> Tensor:
    large = torch.cat([x] * SIZE)
    first, second = SCATTER_COALESCED([large, large], "avg", [0, 0], dist.group.WORLD)
    assert first.tolist() == second.tolist()
    return first


def _functional_of_xla(x: Tensor) -> Tensor:
    name = dist.group.WORLD.group_name
    reduced = host_staged._KERNELS["all_reduce"](x, "avg", name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        scattered = host_staged._KERNELS["reduce_scatter_tensor"](torch.cat([x] * SIZE), "avg", SIZE, name)
    assert scattered.tolist() == reduced.tolist()
    return reduced


CALLS: tuple[Callable[[Tensor], Tensor], ...] = (
    _all_reduce,
    _all_reduce_async,
    _all_reduce_in_callback,
    _all_reduce_in_inference_mode,
    _reduce,
    _coalesced,
    _coalescing_manager,
    _reduce_scatter,
    _reduce_scatter_tensor,
    _reduce_scatter_tensor_async,
    _reduce_scatter_into_strides,
    _functional_scatter,
    _functional_scatter_coalesced,
    _functional_of_xla,
)
# Functional collectives use torch's arithmetic here, which does not support the larger unsigned dtypes.
SIGNED_CALLS = (_functional, _functional_coalesced)


def _every_call(rank: int, route: str, dtypes: tuple[str, ...]) -> list[str]:
    assert monarch_backend.routes()["cpu"].backend == route
    wrong = []
    for name in dtypes:
        dtype = getattr(torch, name)
        want = _mean(dtype)
        calls = [*CALLS, *(SIGNED_CALLS if name not in ("uint16", "uint32", "uint64") else ())]
        # once, because the profiler takes a second to start
        for call in calls + [_all_reduce_observed] * (name == "int8"):
            got = call(torch.tensor(_input(rank, dtype), dtype=dtype))
            if got.dtype is not dtype or got.tolist() != want:
                wrong.append(f"{call.__name__} of {name}: {got.dtype} {got.tolist()}, not {want}")
        big = torch.full((300_001,), 5 + rank, dtype=dtype)
        dist.all_reduce(big, ReduceOp.AVG)
        if not bool(big.to(torch.int64).eq(6).all()):
            wrong.append(f"300,001 elements of {name}")
    with pytest.raises(CollectiveArgumentError, match=rf"AVG can't combine torch.bool.*rank {rank} of {SIZE}"):
        dist.all_reduce(torch.ones(2, dtype=torch.bool), ReduceOp.AVG)
    return wrong


def test_integer_avg_in_shared_memory_is_truncated_quotient(pool) -> None:
    assert pool(SIZE).run(_every_call, "shm", SHM_DTYPES) == [[]] * SIZE


def test_integer_avg_over_gloo_is_truncated_quotient() -> None:
    assert run_ranks(_every_call, SIZE, "gloo", GLOO_DTYPES, env={"MONARCH_SHM": "0"}) == [[]] * SIZE


@pytest.fixture(scope="module")
def two() -> Iterator[Hosts]:
    with hosts(2) as made:
        yield made


@pytest.mark.skipif(bool(refusal()), reason=refusal() or "-")
def test_integer_avg_over_hosts_is_truncated_quotient(two: Hosts) -> None:
    answers = run_on_hosts(two, (0, 0, 1), _every_call, "shm+gloo", SHM_DTYPES, env={"MONARCH_SHM": "1"})
    assert answers == [[]] * SIZE


@pytest.mark.parametrize("dtype", sorted(INTEGERS, key=str), ids=str)
def test_divide_sum_by_count_beyond_dtype_is_exact(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    totals = [limits.min, limits.max, limits.max // 2 + 1, limits.min // 2, 0, 1, 100, limits.max - 1]
    for count in (1, 2, 3, 127, 128, 129, 255, 256, 70_000):
        got = divide_sum(torch.tensor(totals, dtype=dtype), count)
        assert (got.dtype, got.tolist()) == (dtype, [_truncate(total, count) for total in totals]), count
