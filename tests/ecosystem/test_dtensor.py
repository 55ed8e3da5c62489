"""DTensor and DeviceMesh: "monarch" equals "gloo" bit by bit in placements, redistribution and operators.

Tensor parallel modules are in test_tensor_parallel.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from tests.ecosystem.support import on_both

T = TypeVar("T")
ONE = [Replicate(), Shard(0), Shard(1), Shard(-1)]
TWO = list(itertools.product([Replicate(), Shard(0), Shard(1)], repeat=2))


def _numbers(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape).sin()


def _mesh(dims: int) -> DeviceMesh:
    if dims == 1:
        return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("all",))
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))


def _placements(dims: int) -> list[tuple[Placement, ...]]:
    return [(placement,) for placement in ONE] if dims == 1 else list(TWO)


def _distribute(rank: int, dims: int) -> Any:
    mesh, whole = _mesh(dims), _numbers(5, 7)  # no mesh here splits 5 or 7 evenly
    # Only rank 0 has the values. The other ranks must receive them from rank 0.
    mine = whole if rank == 0 else torch.zeros_like(whole)
    results = []
    for placements in _placements(dims):
        x = distribute_tensor(mine, mesh, placements)
        full = x.full_tensor()
        assert torch.equal(full, whole), f"{placements} on rank {rank}: {full}"
        results.append((x, full))
    return results


@pytest.mark.parametrize(("dims", "ranks"), [(1, 2), (1, 3), (2, 4)])
def test_distribute_tensor(dims: int, ranks: int) -> None:
    results = on_both(_distribute, ranks, dims)
    for index, placements in enumerate(_placements(dims)):
        locals_ = [result[index][0]["local"] for result in results]
        assert (len(set(locals_)) == 1) == all(p.is_replicate() for p in placements)


# Pairs of placements in two dimensions: the ordinary run has two targets for each source, the slow run has all.
PAIRS = [(2, 4, "some"), pytest.param(2, 4, "all", marks=pytest.mark.slow)]


def _pairs(left: Sequence[T], right: Sequence[T], how_many: str) -> list[tuple[T, T]]:
    """Return all pairs, or only those on the diagonal and next to it."""
    return [
        (a, b)
        for (i, a), (j, b) in itertools.product(enumerate(left), enumerate(right))
        if how_many == "all" or (j - i) % len(right) in (0, 1)
    ]


def _redistribute(rank: int, dims: int, how_many: str) -> Any:
    mesh = _mesh(dims)
    whole = _numbers(6, 5)
    partials = [(Partial(op),) for op in ("sum", "avg", "max", "min")] if dims == 1 else [(Partial(), Partial())]
    results = []
    for source, target in _pairs([*_placements(dims), *partials], _placements(dims), how_many):
        if any(isinstance(p, Partial) for p in source):
            # each rank's term of a sum (or maximum, ...) that is not reduced yet
            x = DTensor.from_local(whole * (rank + 1), mesh, source, run_check=False)
        else:
            x = distribute_tensor(whole, mesh, source)
        y = x.redistribute(mesh, target)
        z = x.redistribute(mesh, target, async_op=True)
        assert torch.equal(y.to_local(), z.to_local())
        results.append((str(source), y, y.full_tensor()))
    return results


@pytest.mark.slow
@pytest.mark.parametrize(("dims", "ranks", "how_many"), [(1, 2, "all"), (1, 3, "all"), *PAIRS])
def test_redistribute(dims: int, ranks: int, how_many: str) -> None:
    results = on_both(_redistribute, ranks, dims, how_many)
    assert [r[2] for r in results[0]] == [r[2] for r in results[-1]]


def _redistribute_backward(rank: int) -> Any:
    mesh = _mesh(1)
    results = []
    for source, target in itertools.product([Shard(0), Shard(1), Replicate()], repeat=2):
        x = distribute_tensor(_numbers(6, 5), mesh, [source]).requires_grad_()
        y = x.redistribute(mesh, [target])
        (y * y).sum().backward()
        results.append((x.grad, x.grad.full_tensor()))
    return results


def test_redistribute_backward() -> None:
    for grad, full in on_both(_redistribute_backward, 2)[0]:
        assert "local" in grad
        assert torch.allclose(full.tensor(), 2 * _numbers(6, 5))


def _matmul(rank: int, dims: int, how_many: str) -> Any:
    mesh = _mesh(dims)
    results = []
    chosen = _placements(dims) if dims == 1 else TWO[::2]  # planning all 81 pairs of TWO would take seconds
    for left, right in _pairs(chosen, chosen, how_many):
        a = distribute_tensor(_numbers(4, 6), mesh, left).requires_grad_()
        b = distribute_tensor(_numbers(6, 8), mesh, right).requires_grad_()
        c = a @ b
        loss = (c.tanh() * 3).sum()
        loss.backward()
        results.append([str(left), str(right), c, c.full_tensor(), loss.full_tensor(), a.grad, b.grad])
    return results


@pytest.mark.parametrize(
    ("dims", "ranks", "how_many"), [(1, 2, "all"), pytest.param(2, 4, "all", marks=pytest.mark.slow)]
)
def test_matmul_and_backward(dims: int, ranks: int, how_many: str) -> None:
    expected = _numbers(4, 6) @ _numbers(6, 8)
    for row in on_both(_matmul, ranks, dims, how_many)[0]:
        torch.testing.assert_close(row[3].tensor(), expected)


def _operators(rank: int) -> Any:
    mesh = _mesh(1)
    x = distribute_tensor(_numbers(6, 4), mesh, [Shard(0)])
    y = distribute_tensor(_numbers(4, 6), mesh, [Shard(1)])
    results = {
        "add": x + y.t(),
        "sum": x.sum(dim=0),
        "mean": x.mean(),
        "max": x.max(),
        "softmax": torch.softmax(x, dim=0),
        "norm": torch.linalg.vector_norm(x),
        "layer_norm": nn.functional.layer_norm(x, (4,)),
        "cat": torch.cat([x, x], dim=0),
        "sort": x.sort(dim=1)[0],
        "argmax": x.argmax(dim=1),
        "slice": x[1:5],
        "ones": dt.ones(6, 4, device_mesh=mesh, placements=[Shard(0)]),
        "zeros": dt.zeros(6, 4, device_mesh=mesh, placements=[Replicate()]),
        "embedding": nn.functional.embedding(distribute_tensor(torch.tensor([5, 0, 3]), mesh, [Replicate()]), x),
    }
    return {name: (t, t.full_tensor()) for name, t in results.items()}


def test_operators() -> None:
    results = on_both(_operators, 2)
    for name, (_, full) in results[0].items():
        assert full == results[1][name][1], name


def _counted(rank: int) -> Any:
    mesh = _mesh(1)
    x = distribute_tensor(_numbers(6, 4), mesh, [Shard(0)])
    with CommDebugMode() as counts:
        x.full_tensor()
        (x.t() @ x).redistribute(placements=[Replicate()])
        x.redistribute(placements=[Shard(1)])
    return {str(op): count for op, count in counts.get_comm_counts().items()}


def test_comm_debug_mode_counts_the_same() -> None:
    assert sum(on_both(_counted, 2)[0].values()) == 3


# Meshes ---------------------------------------------------------------------------------------------------


def _sum_over(group: Any) -> tuple[list[int], float]:
    x = torch.tensor([2.0 ** dist.get_rank()])
    dist.all_reduce(x, group=group)
    return dist.get_process_group_ranks(group), x.item()


def _slices(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    result = {name: _sum_over(mesh.get_group(name)) for name in ("pp", "dp", "tp")}
    result["by slice"] = _sum_over(mesh["dp"].get_group())
    result["by two"] = _sum_over(mesh["dp", "tp"].get_group("tp"))
    flat = mesh["dp", "tp"]._flatten("dp_tp")
    result["flat"] = _sum_over(flat.get_group())
    result["all"] = _sum_over(mesh._flatten("all").get_group())
    x = distribute_tensor(_numbers(8, 3), flat, [Shard(0)])
    result["on flat"] = (x, x.full_tensor())
    result["where"] = [mesh.get_coordinate(), mesh.get_local_rank("dp"), flat.size(), mesh["pp", "tp"].shape]
    return result


@pytest.mark.slow
def test_mesh_slices_and_flatten() -> None:
    """Ranks are pp * 4 + dp * 2 + tp. Each group sums powers of two, so the sum shows its members."""
    results = on_both(_slices, 8)
    for rank, result in enumerate(results):
        expected = {"pp": [rank % 4, rank % 4 + 4], "tp": [rank // 2 * 2, rank // 2 * 2 + 1]}
        expected["dp"] = [rank & ~2, rank | 2]
        expected["by slice"], expected["by two"] = expected["dp"], expected["tp"]
        expected["flat"] = [rank // 4 * 4 + i for i in range(4)]
        expected["all"] = list(range(8))
        for name, ranks in expected.items():
            assert result[name] == [ranks, float(sum(2**r for r in ranks))], name


def _from_group(rank: int) -> Any:
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    x = distribute_tensor(_numbers(4, 3), mesh, [Shard(0)])
    again = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
    y = distribute_tensor(_numbers(4, 3), again["b"], [Shard(0)])
    whole = init_device_mesh("cpu", (4,))
    return [x, x.full_tensor(), y, y.full_tensor(), whole.get_group() is dist.group.WORLD]


def test_mesh_from_groups_and_lists() -> None:
    results = on_both(_from_group, 4)
    assert all(result[1] == result[3] for result in results)
    assert results[0][4], "a mesh of all ranks should have taken the default group"
