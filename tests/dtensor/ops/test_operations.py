"""DTensor operations from the controller have the values of a single process, in every placement."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from monarch_backend.actor import this_host
from monarch_backend.dtensor import RankDependentError
from tests.dtensor.values import same, value
from tests.support.tiers import slow_except

ONE = [Shard(0), Shard(1), Replicate()]
EVEN, UNEVEN = (12, 6), (10, 7)


def placements(mesh: Any) -> list[list[Any]]:
    """Return all placements of a tensor with two dimensions."""
    return [list(each) for each in itertools.product(ONE, repeat=mesh.ndim)]


@pytest.mark.parametrize("size", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_distributed_tensor_has_its_values_and_placements(mesh: Any, size: Any) -> None:
    whole = torch.randn(size)
    for here in placements(mesh):
        there = distribute_tensor(whole, mesh, here)
        same(there, whole, 0)
        assert there.placements == tuple(here)


@pytest.mark.parametrize("size", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_redistribution_from_any_placement_to_any(mesh: Any, size: Any) -> None:
    whole = torch.randn(size)
    for before, after in itertools.product(placements(mesh), repeat=2):
        same(distribute_tensor(whole, mesh, before).redistribute(mesh, after), whole, 0)


def test_two_dimensions_of_a_mesh_and_the_flattened_one(all_procs: Any) -> None:
    with this_host().spawn_procs({"a": 2, "b": 2}) as procs:
        mesh = procs.device_mesh("cpu")
        mesh["a", "b"]._flatten("all")
        for rows in (12, 10):
            whole = torch.randn(rows, 7)
            same(distribute_tensor(whole, mesh, [Shard(0), Shard(0)]), whole, 0)


@pytest.mark.parametrize("size", [(1, 3), (3, 1), (1, 1), (2, 0)], ids=str)
def test_operations_with_empty_shards(mesh: Any, size: Any) -> None:
    whole = torch.randn(size)
    for before, after in itertools.product(itertools.product([Shard(0), Shard(1)], repeat=mesh.ndim), repeat=2):
        sharded = distribute_tensor(whole, mesh, before)
        same(sharded.redistribute(mesh, after), whole, 0)
        same((sharded * 2).sum(), (whole * 2).sum())


@pytest.mark.parametrize("size", [(5, 7), (7, 5), (1, 3)], ids=str)
def test_shards_of_unequal_sizes_are_of_one_tensor(mesh: Any, size: Any) -> None:
    whole = torch.randn(size)
    for placements in itertools.product([Shard(0), Shard(-1), Replicate()], repeat=mesh.ndim):
        local = distribute_tensor(whole, mesh, placements).to_local()
        again = DTensor.from_local(local, mesh, placements)
        same(again, whole, 0)
        assert again.stride() == whole.stride() or 1 in size  # equal shards have strides by torch's own rule
    if 1 not in size:
        turned = distribute_tensor(whole.t(), mesh, [Shard(0)] * mesh.ndim).to_local()
        assert DTensor.from_local(turned, mesh, [Shard(0)] * mesh.ndim).stride() == whole.t().stride()


def test_shards_of_unequal_sizes_on_a_slice_are_of_its_own_tensor(mesh_of: Any) -> None:
    mesh = mesh_of("2x2")
    whole = torch.randn(5, 7)
    for part, placement in itertools.product((mesh["dp"], mesh["tp"]), (Shard(0), Shard(-1))):
        sharded = distribute_tensor(whole, part, [placement]).requires_grad_()
        again = DTensor.from_local(sharded.to_local() * 2, part, [placement])
        assert again.stride() == whole.stride()
        same(again, whole * 2, 0)
        again.sum().backward()
        same(sharded.grad, torch.full_like(whole, 2), 0)
    rows = distribute_tensor(whole, mesh, [Shard(0), Shard(1)]).to_local()
    theirs = DTensor.from_local(rows, mesh["tp"], [Shard(1)])
    assert str(theirs.shape) == "torch.Size([{3 3 2 2}, 7])", "each slice has a tensor of its own"


def test_shards_of_no_tensor_are_refused(mesh_of: Any) -> None:
    mesh = mesh_of("2")
    local = distribute_tensor(torch.randn(3, 2), mesh, [Shard(0)]).to_local()
    with pytest.raises(ValueError, match=r"dimension 0 the ranks have \[2, 1\].*those of 2 have \[2, 2\]"):
        DTensor.from_local(local, mesh, [Replicate()])


def test_partial_values_are_reduced(line: Any) -> None:
    a, b = torch.randn(UNEVEN), torch.randn(7, 4)
    partial = distribute_tensor(a, line, [Shard(1)]) @ distribute_tensor(b, line, [Shard(0)])
    assert partial.placements == (Partial(),)
    for after in ONE:
        same(partial.redistribute(line, [after]), a @ b)


@pytest.mark.parametrize("size", slow_except([EVEN, UNEVEN], UNEVEN), ids=["even", "uneven"])
def test_products_of_matrices(mesh: Any, size: Any) -> None:
    a, b = torch.randn(size), torch.randn(size).t().contiguous()
    for left, right in itertools.product(placements(mesh), repeat=2):
        same(distribute_tensor(a, mesh, left) @ distribute_tensor(b, mesh, right), a @ b)


@pytest.mark.parametrize("size", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_pointwise_reduced_and_normalised(mesh: Any, size: Any) -> None:
    whole = torch.randn(size)
    for here in placements(mesh):
        x = distribute_tensor(whole, mesh, here)
        same(x.sin() * 2 + x, whole.sin() * 2 + whole)
        same(x.sum(0), whole.sum(0))
        same(x.mean(), whole.mean())
        same(x.softmax(1), whole.softmax(1))
        same(x.amax(1), whole.amax(1))


def test_views(mesh: Any) -> None:
    whole = torch.randn(12, 16)
    for here in placements(mesh):
        x = distribute_tensor(whole, mesh, here)
        same(x.t().contiguous(), whole.t())
        same(x[:, 3:7], whole[:, 3:7])
        same(x[2:5], whole[2:5])
        same(x[4], whole[4])
        same(torch.cat([x, x], 1), torch.cat([whole, whole], 1))
        same(x.split(8, dim=1)[1], whole.split(8, dim=1)[1])
        same(x.unsqueeze(0), whole.unsqueeze(0))
        same(x.permute(1, 0), whole.permute(1, 0))
        same(torch.stack(list(x)), whole)


@pytest.mark.parametrize("size", [(10, 7), (12, 6), (6, 2, 2), (2, 6, 4)], ids=str)
def test_dimension_sharded_over_two_mesh_dimensions(mesh_of: Callable[[str], Any], size: Any) -> None:
    """torch checks that each mesh dimension splits the size evenly, but not that both together do."""
    mesh, x = mesh_of("2x2"), torch.randn(size)
    count = x.numel()
    for sizes in [(-1,), (2, -1), (2, 2, -1), (count // 2, 2), (6, 2, -1), (-1, 3), (4, -1)]:
        if count % abs(math.prod(sizes)):
            continue
        for dim in range(x.ndim):
            there = distribute_tensor(x, mesh, [Shard(dim), Shard(dim)])
            same((there * 2).reshape(sizes), (x * 2).reshape(sizes), 0)


def test_changed_in_place(mesh: Any) -> None:
    whole = torch.randn(12, 16)
    for here in placements(mesh):
        x = distribute_tensor(whole, mesh, here)
        x.add_(1).mul_(2)
        same(x, (whole + 1) * 2)
        x.copy_(distribute_tensor(whole, mesh, here))
        same(x, whole)
        x.zero_()
        same(x, whole * 0)


def test_view_sees_changes_of_its_base(line: Any) -> None:
    whole = torch.randn(12, 16)
    x = distribute_tensor(whole, line, [Shard(0)])
    view = x.view(12, 4, 4)
    x.add_(1)
    same(view, (whole + 1).view(12, 4, 4))
    view.mul_(3)
    same(x, (whole + 1) * 3)


def test_changes_of_the_shape_in_place(line: Any) -> None:
    whole = torch.randn(12, 1, 6)
    x = distribute_tensor(whole, line, [Replicate()]).to_local()
    x.squeeze_(1)
    assert x.shape == (12, 6)
    same(x * 2, whole.squeeze(1) * 2)


def test_host_tensors_beside_distributed_ones(mesh: Any) -> None:
    whole, other = torch.randn(UNEVEN), torch.randn(UNEVEN)
    for here in placements(mesh):
        x = distribute_tensor(whole, mesh, here)
        same(x + other, whole + other)
        same(other * x, whole * other)
        same(x * torch.tensor(3.0), whole * 3)


WHOLE: dict[str, Callable[[Any], Any]] = {
    "item": lambda x: x.max().item(),
    "float": lambda x: float(x.min()),
    "bool": lambda x: bool(x.max() > 0),
    "linear": lambda x: F.linear(x, x, x.sum(1)),
    "reshape": lambda x: (x * 2).reshape(-1)[3:],
    "matmul": lambda x: x @ x.T,
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "to": lambda x: x.to(torch.float64).sum(0),
    "mask": lambda x: (x * 1)[x > 0],
    "norm": lambda x: F.layer_norm(x, x.shape[1:]).norm(),
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout1d": lambda x: F.dropout1d(x * 1, 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(*[(x * 1)[None]] * 3),
    "cross_entropy": lambda x: F.cross_entropy(x, x.argmax(1)).item(),
}
"""Operators that torch's autograd decomposes into others."""


@pytest.mark.parametrize("name", list(WHOLE))
@pytest.mark.parametrize("on", ["3", pytest.param("2x2", marks=pytest.mark.slow)])
def test_in_inference_mode(mesh_of: Callable[[str], Any], on: str, name: str) -> None:
    """Without autograd these operators are not decomposed."""
    mesh = mesh_of(on)
    x, of = torch.randn(UNEVEN), WHOLE[name]
    for here in placements(mesh):
        there = distribute_tensor(x, mesh, here)
        with torch.inference_mode():
            torch.manual_seed(5)
            expected = of(x)
            torch.manual_seed(5)
            found = of(there)
            of_local = None if "dropout" in name or name == "rrelu" else of(there.full_tensor())
            if not isinstance(expected, torch.Tensor):
                assert (found, of_local) == (pytest.approx(expected),) * 2
                continue
        same(found, expected)
        if of_local is not None:
            same(of_local, expected)


@pytest.mark.parametrize("name", ["2", "3", pytest.param("2x2", marks=pytest.mark.slow)])
def test_gradients(mesh_of: Any, name: str) -> None:
    mesh = mesh_of(name)
    a, b = torch.randn(UNEVEN), torch.randn(7, 5)
    for left, right in itertools.product(placements(mesh), repeat=2):
        x = distribute_tensor(a, mesh, left).requires_grad_()
        y = distribute_tensor(b, mesh, right).requires_grad_()
        (x @ y).relu().sum().backward()
        p, q = a.clone().requires_grad_(), b.clone().requires_grad_()
        (p @ q).relu().sum().backward()
        same(x.grad, p.grad)  # type: ignore[arg-type]
        same(y.grad, q.grad)  # type: ignore[arg-type]


def test_sizes_that_depend_on_values(line: Any) -> None:
    whole = torch.randn(UNEVEN).relu()
    x = distribute_tensor(whole, line, [Replicate()]).to_local()
    assert x.nonzero().shape == whole.nonzero().shape
    same(x.nonzero(), whole.nonzero())
    same(x[x > 0.5], whole[whole > 0.5])


def test_attention(line: Any) -> None:
    heads = line.size() * 2
    q, k, v = (torch.randn(2, heads, 8, 4, requires_grad=True) for _ in range(3))
    ours = [distribute_tensor(each.detach(), line, [Shard(1)]).requires_grad_() for each in (q, k, v)]
    out = F.scaled_dot_product_attention(*ours, is_causal=True)
    reference = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    same(out, reference)
    out.sum().backward()
    reference.sum().backward()
    for mine, theirs in zip(ours, (q, k, v), strict=True):
        same(mine.grad, theirs.grad)  # type: ignore[arg-type]


def test_values_read_by_the_controller_match_torch(mesh: Any) -> None:
    whole = torch.randn(UNEVEN)
    for here in placements(mesh):
        x = distribute_tensor(whole, mesh, here)
        total = x.abs().sum()
        assert total.item() == pytest.approx(whole.abs().sum().item(), rel=1e-5)
        assert bool(total > 0)
        assert float(total) == pytest.approx(float(whole.abs().sum()), rel=1e-5)
        assert x.tolist() == whole.tolist()
        assert (x.numpy() == whole.numpy()).all()
        assert [row.tolist() for row in x] == whole.tolist()
        assert torch.equal(x, x)
        assert not torch.equal(x, x + 1)
    assert value(x).equal(whole)


def test_any_and_all_over_ranks(mesh: Any) -> None:
    whole = torch.tensor([[1.0, -1, -1], [1, -1, 1], [1, 1, -1], [1, -1, -1]])
    for here in placements(mesh):
        x = distribute_tensor(whole, mesh, here) > 0
        for dim in (0, 1):
            same(x.any(dim).float(), (whole > 0).any(dim).float())
            same((~x.any(dim)).float(), (~(whole > 0).any(dim)).float())
            same(x.all(dim).float() + x.any().float(), (whole > 0).all(dim).float() + 1)


def test_dimensions_that_are_counted_from_the_end(line: Any) -> None:
    for shape in ((5,), (4, 6)):
        whole = torch.randn(shape)
        x = distribute_tensor(whole, line, [Shard(0)])
        for dim in range(-len(shape), len(shape)):
            same(x.cumsum(dim), whole.cumsum(dim))
            same(x.cumprod(dim), whole.cumprod(dim))
    whole = torch.randn(4, 6)
    part = distribute_tensor(whole, line, [Shard(1)]).sum(1)
    part.fill_(2)  # each rank has a term of the sum, so the ranks must not all write the value
    same(part, torch.full((4,), 2.0))


WRITING: list[Callable[[Any], Any]] = [
    lambda x: x.__setitem__(slice(1, None), 2.0),
    lambda x: x.__setitem__(2, x[0] + 1),
    lambda x: x.__setitem__((..., 0), x[..., -1]),
    lambda x: x[0:2].add_(x[1:3] * 1),
    lambda x: x.select(0, 1).fill_(3.0),
    lambda x: x.t()[:, 1:].mul_(5),
    lambda x: x.narrow(1, 1, 2).zero_(),
    lambda x: x.diagonal().fill_(1.0),
]


@pytest.mark.parametrize("rows", [4, 5])
def test_writes_into_rows_change_the_tensor(mesh_of: Callable[[str], Any], rows: int) -> None:
    """Also if several ranks have the rows, which are then gathered for the write."""
    for write, (name, here) in itertools.product(WRITING, [("2", [Shard(0)]), ("2x2", [Shard(0), Shard(1)])]):
        theirs = torch.randn(rows, 4, requires_grad=True)
        ours = distribute_tensor(theirs.detach(), mesh_of(name), here).requires_grad_()
        for leaf in (theirs, ours):
            written = leaf * 1
            write(written)
            written.square().sum().backward()
            if leaf is theirs:
                reference = written
        same(written, reference)
        same(ours.grad, theirs.grad)  # type: ignore[arg-type]


def test_operations_with_ranks_without_rows(mesh_of: Callable[[str], Any]) -> None:
    mesh, whole = mesh_of("3"), torch.randn(4, 4)
    for before, after in itertools.product(ONE, repeat=2):
        x = distribute_tensor(whole, mesh, [before])
        same(x * 2 + x.t().t(), whole * 3)
        same(x.redistribute(mesh, [after]), whole, 0)
        same(x.sum(0), whole.sum(0))
        same(x @ distribute_tensor(whole, mesh, [after]), whole @ whole)
        leaf = x.detach().requires_grad_()
        leaf.square().sum().backward()
        same(leaf.grad, whole * 2)  # type: ignore[arg-type]
    rows = distribute_tensor(whole, mesh, [Shard(0)]).to_local().size(0)
    with pytest.raises(RankDependentError, match=r"\{2 2 0\} != 0"):
        assert rows != 0
