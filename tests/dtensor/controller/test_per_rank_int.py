"""Integers that differ by rank: supported operations, and errors for the others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, placement_types

from monarch_backend._core.torch_version import torch_version
from monarch_backend.dtensor import RankDependentError
from monarch_backend.dtensor._per_rank import per_rank_int
from tests.dtensor.values import same


def of(*values: int, sizes: bool = False) -> Any:
    return per_rank_int.by_rank(values, sizes=sizes)


@pytest.mark.parametrize("sizes", [True, False])
def test_calculating(sizes: bool) -> None:
    one, other = of(4, 7, sizes=sizes), of(1, 3, sizes=sizes)
    calculated = [one + other, one - 1, 10 - one, one * other, one // 2, one % other, -one]
    values = [per_rank_int.values_of(each) for each in calculated]
    assert values == [(5, 10), (3, 6), (6, 3), (4, 21), (2, 3), (0, 1), (-4, -7)]
    assert torch.sym_max(one, 5).node.values == (5, 7)
    assert per_rank_int.values_of(one - of(3, 6, sizes=sizes)) is None  # 1 on all ranks, so a plain number
    assert one - of(3, 6, sizes=sizes) == 1


@pytest.mark.parametrize("sizes", [True, False])
def test_division_rounds_per_rank(sizes: bool) -> None:
    ratio = of(4, 7, sizes=sizes) / 2
    assert str(ratio) == "{4 7} / 2"
    assert [per_rank_int.values_of(each) for each in (math.ceil(ratio), math.floor(ratio))] == [(2, 4), (2, 3)]
    assert math.ceil(of(3, 4, sizes=sizes) / 2) == 2
    assert per_rank_int.values_of(math.ceil(of(4, 7) / of(3, 7))) == (2, 1)
    for ask in (float, lambda each: each + 1.0, lambda each: each * 2, lambda each: 1.0 - each):
        with pytest.raises(RankDependentError):
            ask(ratio)


def test_a_branch_on_a_coordinate_raises(mesh_of: Any) -> None:
    mesh = mesh_of("2")
    for number in (mesh.get_rank(), mesh.get_local_rank(), mesh.get_coordinate()[0]):
        for ask in (lambda n: n == 0, lambda n: n != 0, lambda n: n < 1, lambda n: n == 1, bool, int):
            with pytest.raises(RankDependentError, match="one controller runs this program for all ranks"):
                assert ask(number)
        assert number != 7  # true on all ranks
        assert number < 2


def test_only_torch_may_compare_sizes() -> None:
    sizes = of(2, 1, 0, sizes=True)
    for ask in (lambda n: n == 0, lambda n: n != 0, lambda n: n == of(2, 1, 1, sizes=True), lambda n: n < 1, bool, int):
        with pytest.raises(RankDependentError):
            assert ask(sizes)
    assert sizes == of(2, 1, 0, sizes=True)
    assert sizes != 7  # true on all ranks
    if torch_version() >= (2, 13):  # torch's check "size % chunks == 0"
        assert not placement_types._hint_proves_even_shard(sizes, 2)
        with pytest.raises(RankDependentError):
            placement_types._hint_proves_even_shard(of(2, 1, 0), 2)


def test_value_computed_from_a_coordinate_is_no_size() -> None:
    with pytest.raises(RankDependentError):
        assert of(0, 1) * 4 + of(3, 2, sizes=True) == 3
    assert of(0, 1) != of(0, 1, sizes=True) + 5


def test_shards_of_uneven_sizes_on_all_ranks_and_none(mesh_of: Any) -> None:
    """With 4 rows on 3 ranks the last rank has none. torch compares such sizes with 0 and 1 in many places."""
    mesh, whole = mesh_of("3"), torch.randn(4, 6)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    assert x.to_local().shape[0].node.values == (2, 2, 0)
    same(x.view(4, 2, 3).sum(2), whole.view(4, 2, 3).sum(2))
    same(x.t().contiguous() @ x, whole.t() @ whole)
    same(x.softmax(1).redistribute(mesh, [Shard(1)]), whole.softmax(1))
    same(x[1:3], whole[1:3])
    same(x.flatten().redistribute(mesh, [Replicate()]) if x.size(0) % 3 == 0 else x + 1, whole + 1)


def test_plain_tensors_of_uneven_sizes_have_columns_and_no_row_that_some_ranks_lack(mesh_of: Any) -> None:
    whole = torch.arange(15.0).view(5, 3)
    local = distribute_tensor(whole, mesh_of("2"), [Shard(0)]).to_local()
    mine = whole[:3]  # the shard of the first rank, from which values are read
    same(local[:, 1], mine[:, 1])
    same(local.select(1, -1), mine.select(1, -1))
    same(local.unbind(1)[2] + local.sum(1), mine.unbind(1)[2] + mine.sum(1))
    same(local[1, :], mine[1, :])
    with pytest.raises(RankDependentError, match=r"\{3 2\} > 2"):
        local[2]
    with pytest.raises(IndexError, match=r"out of bounds for dimension 0 with size \{3 2\}"):
        local[3]


def test_answers_on_which_all_ranks_agree_go_with_others() -> None:
    true, some = of(2, 3) > 1, of(2, 3) > 2
    for answer in (true & some, some & true, (of(2, 3) < 1) | some):
        with pytest.raises(RankDependentError, match="2 3"):
            bool(answer)
    assert not ((of(2, 3) < 1) & some)
    assert true | some
    assert some | true


X = torch.arange(24.0).view(2, 3, 4)
INDICES: dict[str, Callable[[Any, Any], Any]] = {
    "number": lambda x, r: x[r],
    "behind": lambda x, r: x[r - 1],
    "column": lambda x, r: x[:, r],
    "from the end": lambda x, r: x[..., r],
    "between": lambda x, r: x[1:, r, ::2],
    "twice": lambda x, r: x[r, :, r + 1],
    "all": lambda x, r: x[r, r, r],
    "beside a new dimension": lambda x, r: x[None, r, ..., 1:],
    "beside a mask": lambda x, r: x[torch.tensor([[True, False, True], [False, True, True]]), r],
    "beside an index": lambda x, r: x[r, torch.tensor([2, 0])],
    "slice": lambda x, r: x[:, r : r + 2],
    "select": lambda x, r: x.select(1, r),
    "narrow": lambda x, r: x.narrow(2, r * 2, 2),
    "stack of chunks": lambda x, r: torch.stack(x.chunk(2))[r],
    "sum": lambda x, r: x + r,
    "product": lambda x, r: r * x,
    "comparison": lambda x, r: x < r,
}


@pytest.mark.parametrize("what", INDICES)
def test_plain_tensors_of_workers_are_indexed_by_each_rank(mesh_of: Any, what: str) -> None:
    mesh, index = mesh_of("2"), INDICES[what]
    x = distribute_tensor(X, mesh, [Replicate()]).to_local()
    found = index(x, mesh.get_local_rank())
    parts = DTensor.from_local(found.contiguous().view(1, -1), mesh, [Shard(0)])
    same(parts.reshape(2, *found.shape), torch.stack([index(X, rank) for rank in range(2)]))


@pytest.mark.parametrize("index", [(), (slice(None),), (..., slice(1, None)), (None, ...)], ids=str)
def test_plain_tensors_of_workers_are_changed_where_each_rank_is(mesh_of: Any, index: tuple[Any, ...]) -> None:
    mesh = mesh_of("2")
    x = distribute_tensor(X, mesh, [Replicate()]).to_local().clone()
    expected = [X.clone(), X.clone()]
    for before, after in ((index, ()), ((), index)):
        x[(*before, mesh.get_local_rank(), *after)] = -1
        for rank in range(2):
            expected[rank][(*before, rank, *after)] = -1
    same(DTensor.from_local(x, mesh, [Shard(0)]), torch.cat(expected))


@pytest.mark.parametrize("what", INDICES)
def test_tensors_of_the_controller_are_not_one_ranks_part(mesh_of: Any, what: str) -> None:
    """torch itself raises an IndexError about SymInt, or calculates with 7777777."""
    mesh = mesh_of("2")
    number = mesh.get_local_rank()
    with pytest.raises(
        RankDependentError, match=r"on each rank: .*distribute_tensor\(x, mesh\)\.to_local\(\)\[number\]"
    ):
        INDICES[what](X, number)
    with pytest.raises(RankDependentError, match=r"on each rank: .*DTensor\.from_local\("):
        INDICES[what](distribute_tensor(X, mesh, [Replicate()]), number)


def test_lists_and_sizes_with_per_rank_integers_raise_with_a_remedy(mesh_of: Any) -> None:
    number = mesh_of("2").get_local_rank()
    for ask in (
        lambda: [10, 20][number],
        lambda: X.chunk(2)[number],
        lambda: range(2)[number],
        lambda: [10, 20][number:],
        lambda: X[[number]],
        lambda: X.clone().__setitem__(number, 0),
        lambda: torch.tensor(number),
    ):
        with pytest.raises(RankDependentError, match=r"distribute_tensor\(x, mesh\)\.to_local\(\)\[number\]"):
            ask()


ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, r: x + r,
    "from the left": lambda x, r: r + x,
    "subtract": lambda x, r: x - r,
    "multiply": lambda x, r: torch.multiply(x, r),
    "divide": lambda x, r: x / (r + 1),
    "divide and round": lambda x, r: torch.div(x, r + 1, rounding_mode="floor"),
    "floor": lambda x, r: x // (r + 1),
    "in place": lambda x, r: x.clone().add_(r).mul_(r),
    "out": lambda x, r: torch.add(x, r, out=torch.empty_like(x)),
}


@pytest.mark.parametrize("what", ARITHMETIC)
def test_numbers_of_each_rank_are_calculated_with_on_workers_only(mesh_of: Any, what: str) -> None:
    mesh, calculate = mesh_of("2"), ARITHMETIC[what]
    number, x = mesh.get_local_rank(), torch.linspace(0.5, 4, 6)
    local = distribute_tensor(x, mesh, [Replicate()]).to_local()
    found = DTensor.from_local(calculate(local, number), mesh, [Shard(0)])
    same(found, torch.cat([calculate(x, rank) for rank in range(2)]))
    for own in (x, torch.tensor(2.0), nn.Parameter(x)):
        with torch.no_grad(), pytest.raises(RankDependentError, match="on each rank"):
            calculate(own, number)


def test_gradients_with_numbers_of_each_rank(mesh_of: Any) -> None:
    mesh = mesh_of("2")
    x = distribute_tensor(torch.ones(3), mesh, [Replicate()]).to_local().requires_grad_()
    (x * mesh.get_local_rank() + x).sum().backward()
    assert x.grad is not None
    same(DTensor.from_local(x.grad, mesh, [Shard(0)]), torch.tensor([1.0, 1, 1, 2, 2, 2]))
    with pytest.raises(RankDependentError, match="on each rank"):
        torch.ones(3, requires_grad=True) * mesh.get_local_rank()


def test_lazy_negation_is_not_taken_for_a_per_rank_integer(mesh_of: Any) -> None:
    """The negative bit marks per-rank integers. torch itself sets it for imaginary parts of conjugates."""
    mesh_of("2")
    z = torch.tensor([1 + 2j, 3 - 4j])
    y, out = z.conj().imag, torch.empty(2)
    assert y.is_neg()
    assert (y + 1).tolist() == (1 + y).tolist() == torch.add(y, 1, out=out).tolist() == out.tolist() == [-1, 5]
    assert ((y * y).tolist(), (y - y).tolist(), (y / 2).tolist(), (y // 2).tolist()) == (
        [4, 16],
        [0, 0],
        [-1, 2],
        [-1, 2],
    )
    assert y.add_(1) is y
    assert (y.tolist(), z.imag.tolist()) == ([-1, 5], [1, -5])
    torch.add(torch.ones(2), 1, out=y)
    assert z.imag.tolist() == [-2, -2]
