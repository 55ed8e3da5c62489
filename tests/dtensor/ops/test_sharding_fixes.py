"""Operators for which torch's DTensor has a wrong result or gradient have the right one on a controller's mesh."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from monarch_backend.dtensor._patches.fixes import view_writeback
from tests.dtensor.values import same


def gradients_are_the_same(mesh: Any, x: torch.Tensor, calculate: Callable[[Any], Any], placement: Any) -> None:
    alone, ours = x.clone().requires_grad_(), distribute_tensor(x, mesh, [placement]).requires_grad_()
    expected, found = calculate(alone), calculate(ours)
    same(found, expected)
    weights = torch.linspace(0.5, 1.5, expected.numel()).view(expected.shape) if expected.numel() > 1 else 0.5
    for result in (expected, found):
        (result * weights).sum().backward()
    same(ours.grad, alone.grad)


@pytest.mark.parametrize("shape", [(8, 8, 6), (2, 4, 5, 7)], ids=["one image", "a batch"])
def test_adaptive_pooling(mesh_of: Callable[[str], Any], shape: tuple[int, ...]) -> None:
    for dim in range(len(shape)):
        gradients_are_the_same(mesh_of("2"), torch.randn(shape), lambda x: F.adaptive_avg_pool2d(x, (5, 3)), Shard(dim))


def test_gathering_fewer_rows_than_there_are(mesh_of: Callable[[str], Any]) -> None:
    mesh, x = mesh_of("2"), torch.randn(10, 5)
    ways = (Replicate(), Shard(0), Shard(1))
    for dim, shape in ((0, (10, 2)), (1, (4, 5)), (0, (3, 5)), (-1, (10, 5))):
        index = torch.randint(x.shape[dim], shape)
        for of_x, of_index in itertools.product(ways, ways):
            there = distribute_tensor(index, mesh, [of_index])
            same(distribute_tensor(x, mesh, [of_x]).gather(dim, there), x.gather(dim, index))


def test_gradient_of_scatter_add_is_gathered(mesh_of: Callable[[str], Any]) -> None:
    mesh, x, index = mesh_of("2"), torch.randn(10, 2), torch.randint(10, (10, 2))
    there = distribute_tensor(index, mesh, [Shard(1)])

    def calculate(source: Any) -> Any:
        is_ours = isinstance(source, torch.distributed.tensor.DTensor)
        zeros = distribute_tensor(torch.zeros(10, 5), mesh, [Replicate()]) if is_ours else torch.zeros(10, 5)
        return zeros.scatter_add(0, there if is_ours else index, source)

    gradients_are_the_same(mesh, x, calculate, Shard(1))


OF_A_NUMBER: dict[str, Callable[[Any], Any]] = {
    **{name: lambda x, name=name: getattr(x, name)(0) for name in (
        "sum", "mean", "amax", "amin", "logsumexp", "cumsum", "cumprod", "argmax", "argmin", "prod", "any", "all",
        "softmax", "log_softmax", "count_nonzero", "nansum", "logcumsumexp", "flip", "argsort",
    )},
    **{f"{name} and where": lambda x, name=name: getattr(x, name)(-1)[0] for name in ("max", "min", "sort", "median")},
    "without a mean": lambda x: x.var(0, unbiased=False), "aminmax": lambda x: x.aminmax(dim=0)[1],
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=0), "topk": lambda x: x.topk(1, 0)[0],
    "keepdim": lambda x: x.logsumexp(-1, keepdim=True), "all dimensions": lambda x: x.sum(()),
    "transpose": lambda x: x.transpose(-1, 0), "gather": lambda x: x.gather(-1, x.argmax(0)),
    "gather one": lambda x: x.gather(0, x.argmax(0)[None]),
}  # fmt: skip


@pytest.mark.parametrize("way", OF_A_NUMBER)
def test_dimensions_of_a_number(mesh_of: Callable[[str], Any], way: str) -> None:
    mesh, whole = mesh_of("2"), torch.tensor([1.5, -0.5, 2.0])
    expected = OF_A_NUMBER[way](whole.mean())
    for placement in (Replicate(), Shard(0)):
        same(OF_A_NUMBER[way](distribute_tensor(whole, mesh, [placement]).mean()), expected)


def test_reductions_of_no_dimensions(mesh_of: Callable[[str], Any]) -> None:
    for shape in ((4,), (5, 2)):
        for dim in range(len(shape)):
            for reduce in (
                lambda x: x.amax(), lambda x: x.amin(), lambda x: x.sum(dim=[]), lambda x: x.mean(dim=()),
                lambda x: x.sum(dim=[], keepdim=True), lambda x: torch.linalg.norm(x),
            ):  # fmt: skip
                gradients_are_the_same(mesh_of("2"), torch.randn(shape), reduce, Shard(dim))
            x = torch.randn(shape)
            same(torch.any(distribute_tensor(x, mesh_of("2"), [Shard(dim)]) > 0, dim=[]), torch.any(x > 0, dim=[]))


def test_infinity_norm_over_partial_maxima(mesh_of: Callable[[str], Any]) -> None:
    x = torch.tensor([[-5.0, 1], [-7, 2], [-4, 0], [-6, -3]])
    largest = distribute_tensor(x, mesh_of("2"), [Shard(0)]).amax(0)
    for order in (torch.inf, -torch.inf, 2):
        same(torch.linalg.vector_norm(largest, order), torch.linalg.vector_norm(x.amax(0), order))


@pytest.mark.parametrize("name", ["argmax", "argmin", "cumsum", "cumprod", "logcumsumexp"])
def test_dimensions_are_counted_from_the_end(mesh_of: Callable[[str], Any], name: str) -> None:
    x = torch.rand(4, 6)
    for dim in (-1, -2):
        for placement in (Shard(0), Shard(1)):
            found = getattr(distribute_tensor(x, mesh_of("2"), [placement]), name)(dim)
            same(found, getattr(x, name)(dim))


FROM_THE_END: dict[str, Callable[[Any, int], Any]] = {
    "select": lambda x, dim: x.select(dim, 1),
    "the last": lambda x, dim: x.select(dim, -1),
    "slice": lambda x, dim: torch.ops.aten.slice(x, dim, 1, 3),
    "diagonal": lambda x, dim: x.diagonal(0, dim, -3 if dim != -3 else -2),
    "unfold": lambda x, dim: x.unfold(dim, 2, 1),
    "trapezoid": lambda x, dim: torch.trapezoid(x, dim=dim),
    "select_scatter": lambda x, dim: x.select_scatter(x.select(dim, 0), dim, 1),
}


@pytest.mark.parametrize("name", FROM_THE_END)
def test_gradients_of_dimensions_counted_from_the_end(mesh_of: Callable[[str], Any], name: str) -> None:
    for dim, by in itertools.product((-1, -2, -3), range(3)):
        of_dim = lambda x, dim=dim: FROM_THE_END[name](x, dim).sin()  # noqa: E731
        gradients_are_the_same(mesh_of("2"), torch.randn(4, 4, 4), of_dim, Shard(by))


def test_the_gradient_of_index_select(mesh_of: Callable[[str], Any]) -> None:
    index = torch.tensor([0, 2, 2, 3])
    for shape in ((4, 2), (5, 3)):
        for dim in range(2):
            gradients_are_the_same(
                mesh_of("2"), torch.randn(shape), lambda x: x.index_select(0, index).square(), Shard(dim)
            )


def sum_over_ranks(x: torch.Tensor, mesh: Any, other: Any) -> Any:
    """Return ``x`` as a tensor whose parts on the first dimension of the mesh are a quarter and three quarters."""
    given = Shard(other.dim + 1) if isinstance(other, Shard) else other
    return distribute_tensor(torch.stack([x * 0.25, x * 0.75]), mesh, [Shard(0), given]).sum(0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool])
def test_parts_of_a_sum_are_reduced_before_a_cast_to_integers(mesh_of: Callable[[str], Any], dtype: Any) -> None:
    x = torch.arange(-12.0, 12.0).view(6, 4)
    for other in (Replicate(), Shard(0), Shard(1)):
        same(sum_over_ranks(x, mesh_of("2x2"), other).to(dtype), x.to(dtype))


ROWS = torch.tensor([1, 0])
WRITTEN_ROWS: dict[str, Callable[[Any, Any], Any]] = {
    "index_put": lambda x, i: x.index_put((i,), -x[2:4]),
    "index_put, a column of values": lambda x, i: x.index_put((i,), -x[2:4, :1]),
    "index_put, accumulated": lambda x, i: x.index_put((i,), -x[2:4], True),
    "index_put, columns": lambda x, i: torch.ops.aten.index_put(x, [None, i], -x[:, 2:4]),
    "index_put, rows and columns": lambda x, i: x.index_put((i, i), -x[2, :2]),
    "index_put, a mask": lambda x, i: x.index_put((x[:, 0] > 0,), -x[1:2]),
    "_index_put_impl_": lambda x, i: torch._index_put_impl_(x * 1, [i], -x[2:4], True),
    "index_copy": lambda x, i: x.index_copy(0, i, -x[2:4]),
}


@pytest.mark.parametrize("name", WRITTEN_ROWS)
def test_rows_written_by_an_index_match_torch(mesh_of: Callable[[str], Any], name: str) -> None:
    x = torch.arange(-11.0, 13.0).view(6, 4)
    for placements in itertools.product((Shard(0), Shard(1), Replicate()), repeat=2):
        for index in (Shard(0), Replicate()):
            i = distribute_tensor(ROWS, mesh_of("2x2"), [index, Replicate()])
            same(WRITTEN_ROWS[name](distribute_tensor(x, mesh_of("2x2"), placements), i), WRITTEN_ROWS[name](x, ROWS))


READ_ROWS: dict[str, Callable[[Any, Any], Any]] = {
    "rows": lambda x, i: x[i],
    "columns": lambda x, i: x[:, i],
    "rows and columns": lambda x, i: x[i, i],
    "index_select": lambda x, i: x.index_select(0, i),
    "take": lambda x, i: x.take(i),
}


@pytest.mark.parametrize("name", READ_ROWS)
def test_rows_of_a_sum_over_ranks_match_torch(mesh_of: Callable[[str], Any], name: str) -> None:
    x = torch.arange(-12.0, 12.0).view(6, 4)
    for other, index in itertools.product((Shard(0), Shard(1), Replicate()), (Shard(0), Replicate())):
        i = distribute_tensor(ROWS, mesh_of("2x2"), [index, Replicate()])
        same(READ_ROWS[name](sum_over_ranks(x, mesh_of("2x2"), other), i), READ_ROWS[name](x, ROWS))


WRITES: dict[str, Callable[[Any], Any]] = {
    "uniform_": lambda rows: rows.uniform_(),
    "init.normal_": lambda rows: torch.nn.init.normal_(rows),
    "bernoulli_": lambda rows: rows.bernoulli_(0.5),
    "foreach": lambda rows: torch._foreach_mul_([rows], 2.0),
    "out=": lambda rows: torch.add(rows, 1, out=rows),
    "twice": lambda rows: rows.add_(1).mul_(2).sub_(3),
}


@pytest.mark.parametrize("name", WRITES)
def test_write_into_rows_of_several_ranks(mesh_of: Callable[[str], Any], name: str) -> None:
    x = torch.arange(16.0).view(4, 4)
    ours = distribute_tensor(x, mesh_of("2"), [Shard(0)])
    for each in (ours, x):
        torch.manual_seed(1)
        WRITES[name](each[1:])
    same(ours, x)


INDEXED: dict[str, Callable[[Any], Any]] = {
    "rows and columns": lambda x: x.__setitem__((slice(1, 3), slice(2, None)), 0.0),
    "one number": lambda x: x.__setitem__((2, 1), 50.0),
    "a row, then a column": lambda x: x[2].__setitem__(1, 50.0),
    "rows of rows": lambda x: x[1:][1:].mul_(2),
    "columns of rows, changed": lambda x: x[1:3, 1:].add_(7),
    "with a list": lambda x: x.__setitem__((slice(1, 4), [0, 2]), -1.0),
    "and back": lambda x: x.__setitem__((slice(0, 3), 1), x[1:4, 2] * 2),
    "another view": lambda x: x[1:].view(-1).add_(1),
    "rows of columns, with a new dimension": lambda x: x[1:3, :3][None].transpose(1, 2).add_(1),
    "a new dimension": lambda x: x[1:, None, 2].zero_(),
}


@pytest.mark.parametrize("name", INDEXED)
def test_write_through_an_index_of_several_parts(mesh_of: Callable[[str], Any], name: str) -> None:
    x = torch.arange(16.0).view(4, 4)
    for placements in ([Shard(0), Shard(1)], [Shard(0), Replicate()]):
        ours, alone = distribute_tensor(x, mesh_of("2x2"), placements), x.clone()
        for each in (ours, alone):
            INDEXED[name](each)
        same(ours, alone)


def test_gradient_of_overwritten_values(mesh_of: Callable[[str], Any]) -> None:
    def calculate(x: Any) -> Any:
        y = x * 2
        y[1:3, 2:] = 0
        y[2:, 1] *= 3
        return y.square()

    gradients_are_the_same(mesh_of("2"), torch.randn(4, 4), calculate, Shard(0))


def test_bits_are_shifted(mesh_of: Callable[[str], Any]) -> None:
    x = torch.arange(8)
    ours = distribute_tensor(x, mesh_of("2"), [Shard(0)])
    for found, expected in ((ours >> 1, x >> 1), (ours << 2, x << 2), (ours << ours, x << x), (ours >> ours, x >> x)):
        same(found, expected)
    same(ours, x)


def test_rows_of_a_table_that_a_rank_has_not(mesh_of: Callable[[str], Any]) -> None:
    """Operations that accept partial sums use the looked-up rows before the ranks' rows are added up."""
    index = torch.tensor([0, 3, 3, 5])

    def calculate(table: Any) -> Any:
        there = isinstance(table, torch.distributed.tensor.DTensor)
        given = distribute_tensor(index, mesh_of("2"), [Replicate()]) if there else index
        rows, taken = F.embedding(given, table), table.gather(0, given[:, None].expand(4, 3))
        return rows.t().sum(0) + rows.sum(1) + taken.t().sum(0) * rows.view(2, 6).t().sum()

    for dim in (0, 1):
        gradients_are_the_same(mesh_of("2"), torch.randn(6, 3), calculate, Shard(dim))


MASKS = {
    "by batch": ((4, 1, 3, 3), Shard(0)), "by heads": ((4, 2, 3, 3), Shard(1)), "of all": ((3, 3), Replicate()),
    "by queries": ((1, 1, 3, 3), Shard(2)), "of heads": ((1, 2, 3, 3), Replicate()),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_attention_with_a_mask(mesh_of: Callable[[str], Any], name: str) -> None:
    shape, of_mask = MASKS[name]
    mask = torch.randn(shape)

    def calculate(x: Any) -> Any:
        there = isinstance(x, torch.distributed.tensor.DTensor)
        q, k, v = x, x * 2, x.sin()
        given = distribute_tensor(mask, mesh_of("2"), [of_mask]) if there else mask
        return F.scaled_dot_product_attention(q, k, v, attn_mask=given).transpose(1, 2).reshape(4, 3, -1)

    for dim in (0, 1, 2):
        gradients_are_the_same(mesh_of("2"), torch.randn(4, 2, 3, 4), calculate, Shard(dim))


def test_rows_that_were_taken_before_a_change_have_it(mesh_of: Callable[[str], Any]) -> None:
    def steps(x: Any) -> Any:
        rows, others, one, deep = x[1:], x[1:], x[2], x[1:][1:]
        halves = x.split(3)
        part, column = x[1:, :1], x[1:][:, 1]
        yield "nothing", rows, others, one, deep, *halves, part, column
        x.add_(10)
        yield "the tensor", rows, others, one, deep, *halves, part, column
        rows.mul_(2)
        yield "rows", x, others, one, deep, *halves, part, column
        x[2:, 0] = -1
        yield "an index", x, rows, others, one, deep, *halves, part, column
        for half in halves:
            half -= 1
        yield "several results", x, rows, one, deep, part, column
        deep[0] += 5
        yield "rows of rows", x, rows, others, one, *halves, part, column
        x.view(-1)[4:].zero_()
        yield "a view", x, rows, others, one, deep, *halves, part, column
        torch._foreach_add_([x, torch.zeros_like(x)], 3.0)
        yield "several at once", x, rows, others, one, deep, *halves, part, column

    whole = torch.arange(10.0).view(5, 2)
    ours = distribute_tensor(whole, mesh_of("2"), [Shard(0)])
    for (what, *found), (_, *expected) in zip(steps(ours), steps(whole.clone()), strict=True):
        for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(mine.full_tensor(), theirs), (what, number)


def test_the_gradient_of_rows_that_were_taken_before_a_change(mesh_of: Callable[[str], Any]) -> None:
    def calculate(x: Any) -> Any:
        y = x * 1
        rows, last = y[1:], y[3]
        y.mul_(x + 2)
        rows.mul_(3)
        return rows.sin() + last * 2

    for dim in (0, 1):
        gradients_are_the_same(mesh_of("2"), torch.randn(4, 3), calculate, Shard(dim))


def test_unreferenced_rows_are_not_kept(mesh_of: Callable[[str], Any]) -> None:
    ours = distribute_tensor(torch.arange(4.0), mesh_of("2"), [Shard(0)])
    rows = ours[1:]
    kept = weakref.ref(rows._local_tensor)
    ours.add_(1)
    del rows
    assert kept() is None
    for _ in range(20):
        ours[1:].sum()
    assert not view_writeback._copies[ours._local_tensor]


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_rows_of_a_sharded_table_by_an_index_of_any_dimensions(mesh_of: Callable[[str], Any], shape: Any) -> None:
    """torch indexes by its mask of the rows. For a single index it reads the mask, which differs by rank."""
    table, mesh = torch.randn(5, 4), mesh_of("2")
    rows = distribute_tensor(table, mesh, [Shard(0)]).requires_grad_()
    alone = table.clone().requires_grad_()
    for row in range(5):
        index = torch.full(shape, row)
        found = F.embedding(distribute_tensor(index, mesh, [Replicate()]), rows)
        expected = F.embedding(index, alone)
        same(found, expected)
        (found * (row + 1)).sum().backward()
        (expected * (row + 1)).sum().backward()
    same(rows.grad, alone.grad)


@pytest.mark.slow
@pytest.mark.parametrize("by_frequency", [True, False], ids=["by frequency", "plain"])
def test_the_gradient_of_rows_that_were_looked_up(mesh_of: Callable[[str], Any], by_frequency: bool) -> None:
    """Gradients may be scaled by frequency, indices may be sharded, and both mesh dimensions may shard the rows."""
    mesh, table = mesh_of("2x2"), torch.randn(10, 4)
    index = torch.tensor([[1, 2, 3], [2, 9, 9], [0, 1, 4], [7, 7, 7], [5, 6, 1]])
    alone = table.clone().requires_grad_()
    options: dict[str, Any] = {"scale_grad_by_freq": by_frequency, "padding_idx": 4}
    expected = F.embedding(index, alone, **options)
    expected.square().sum().backward()
    places = list(itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2))
    for of_table, of_index in itertools.product(places, places[:5]):
        ours = distribute_tensor(table, mesh, of_table).requires_grad_()
        found = F.embedding(distribute_tensor(index, mesh, of_index), ours, **options)
        same(found, expected)
        found.square().sum().backward()
        same(ours.grad, alone.grad)


@pytest.mark.parametrize(
    ("name", "places"), [("3", (Shard(1),)), ("2x2", (Shard(1), Shard(1))), ("2x2", (Shard(0), Shard(1)))]
)
def test_attention_where_a_rank_has_no_heads(mesh_of: Callable[[str], Any], name: str, places: Any) -> None:
    for heads in (1, 2, 4):
        whole = torch.randn(2, heads, 5, 8)

        def attend(x: Any) -> Any:
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

        alone, ours = whole.clone().requires_grad_(), distribute_tensor(whole, mesh_of(name), places).requires_grad_()
        expected, found = attend(alone), attend(ours)
        same(found, expected)
        expected.square().sum().backward()
        found.square().sum().backward()
        same(ours.grad, alone.grad)


STRIDED = [
    ((4, 4), 1, (16,)), ((4, 4), 1, (2, 8)), ((4, 4), 0, (16,)), ((3, 4), 1, (12,)), ((12,), 0, (6, 2)),
    ((6, 6), 0, (36,)), ((4, 6), 1, (24,)), ((2, 4, 3), 1, (2, 12)), ((2, 4, 3), 1, (8, 3)),
    ((2, 4, 3), 1, (2, 4, 3, 1)),
]  # fmt: skip
"""Sizes, the dimension that is sharded with strides, and the sizes of a view."""


@pytest.mark.parametrize(("sizes", "dim", "after"), STRIDED)
def test_views_of_what_is_sharded_with_strides(mesh_of: Callable[[str], Any], sizes: Any, dim: int, after: Any) -> None:
    mesh, whole = mesh_of("2x2"), torch.randn(sizes)
    places = (_StridedShard(dim, split_factor=2), Shard(dim))  # as fully_shard places a parallelized parameter
    alone, ours = whole.clone().requires_grad_(), distribute_tensor(whole, mesh, places).requires_grad_()
    same(ours, whole, 0)
    same(ours.view(after), whole.view(after), 0)
    weights = torch.randn(after)
    (alone.view(after) * weights).sum().backward()
    (ours.view(after) * weights).sum().backward()
    same(ours.grad, alone.grad)


def test_the_gradient_of_attention_where_a_rank_would_get_no_heads(mesh_of: Callable[[str], Any]) -> None:
    """A partial gradient would be scattered by heads, and four heads on three ranks leave one rank without heads."""
    mesh, whole, weight = mesh_of("3"), torch.randn(2, 4, 5, 8), torch.randn(8, 6)

    def project(x: Any, w: Any) -> Any:
        return F.scaled_dot_product_attention(x, x, x) @ w  # w is sharded by columns, so x gets a partial gradient

    alone, ours = whole.clone().requires_grad_(), distribute_tensor(whole, mesh, [Replicate()]).requires_grad_()
    expected, found = project(alone, weight), project(ours, distribute_tensor(weight, mesh, [Shard(1)]))
    same(found, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    same(ours.grad, alone.grad, 1e-4)


GROUPS: dict[str, tuple[tuple[int, ...], tuple[int, ...], bool]] = {
    "2 by 3": ((8, 16), (2, 16, 24), True),
    "3 by 3": ((2, 8, 16), (2, 16, 24), False),
    "3 by 2": ((2, 8, 16), (16, 8), True),
    "2 by 2": ((16, 8), (8, 16), True),
}
"""Sizes of both matrices, and whether ``offs`` splits one of them into groups."""


@pytest.mark.parametrize("dims", GROUPS)
def test_grouped_mm_of_float32_has_a_single_process_values(mesh_of: Callable[[str], Any], dims: str) -> None:
    """Mixtures of experts may use float32. The kernels accept it, but torch's meta function does not."""
    mesh, (one, other, has_groups) = mesh_of("2"), GROUPS[dims]
    offsets = torch.tensor([3, 8], dtype=torch.int32) if has_groups else None
    a, b = torch.randn(one, requires_grad=True), torch.randn(other, requires_grad=True)
    expected = F.grouped_mm(a, b, offs=offsets)
    weights = torch.randn(expected.shape)
    (expected * weights).sum().backward()

    def agrees(x: Any, y: Any) -> None:
        found = F.grouped_mm(x, y, offs=offsets)
        same(found, expected)
        (found * weights).sum().backward()
        same(x.grad, a.grad)
        same(y.grad, b.grad)

    ways = [[Replicate(), *map(Shard, range(len(each)))] for each in (one, other)]
    for of_a, of_b in itertools.product(*ways):
        agrees(*(distribute_tensor(t.detach(), mesh, [p]).requires_grad_() for t, p in ((a, of_a), (b, of_b))))
    agrees(*(distribute_tensor(t.detach(), mesh, [Replicate()]).to_local().requires_grad_() for t in (a, b)))


def test_grouped_mm_refuses_the_same_arguments_as_its_kernel(mesh_of: Callable[[str], Any]) -> None:
    x, y = (
        distribute_tensor(torch.ones(2, *each), mesh_of("2"), [Replicate()]).to_local() for each in ((4, 6), (6, 4))
    )
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        F.grouped_mm(x, y)
    x, y = (distribute_tensor(torch.ones(2, 4, 4), mesh_of("2"), [Replicate()]).to_local() for _ in range(2))
    with pytest.raises(
        RuntimeError, match=r"grouped_mm of torch\.float32 has results of this dtype|output dtype must match"
    ):
        F.grouped_mm(x, y, out_dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"BF16|BFloat16"):
        F.grouped_mm(x.double(), y.double())
