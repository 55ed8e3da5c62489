"""DTensors whose local shape differs by slice of a mesh: five rows on two slices are three and two."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from monarch_backend.dtensor import RankDependentError
from tests.dtensor.values import same

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo reads .grad

WHOLE = torch.arange(20.0).view(5, 4) / 10


@pytest.fixture
def rows(mesh_of: Callable[[str], Any]) -> Any:
    """The rows of each slice, sharded by columns within the slice."""
    mesh = mesh_of("2x2")
    return DTensor.from_local(distribute_tensor(WHOLE, mesh, [Shard(0), Shard(1)]).to_local(), mesh["tp"], [Shard(1)])


def together(mesh: Any, tensor: Any) -> Any:
    """Return all rows from the tensor of each slice."""
    return DTensor.from_local(tensor.full_tensor(), mesh["dp"], [Shard(0)])


OPERATIONS: list[Callable[[Any], Any]] = [
    lambda x: x + 1,
    lambda x: x * x.sum(1, keepdim=True),
    lambda x: x.softmax(1),
    lambda x: x.t().contiguous().t(),
    lambda x: x.view(x.shape[0], 2, 2).flatten(1),
    lambda x: x.reshape(-1, 2).relu().view(-1, 4),
    lambda x: x[:, 1:],
    lambda x: x.clone().mul_(2),
    lambda x: torch.zeros_like(x) + 1,
    lambda x: torch.cat([x, x], 1),
    lambda x: x.split(1, 1)[2],
    lambda x: x.redistribute(placements=[Shard(0)]) if isinstance(x, DTensor) else x,
]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations(mesh_of: Callable[[str], Any], rows: Any, operation: Callable[[Any], Any]) -> None:
    same(together(mesh_of("2x2"), operation(rows)), operation(WHOLE))


def test_numbers_and_matrices(mesh_of: Callable[[str], Any], rows: Any) -> None:
    mesh, weight = mesh_of("2x2"), torch.randn(4, 6)
    assert str(rows.shape) == "torch.Size([{3 3 2 2}, 4])"
    same(rows.full_tensor(), WHOLE[:3])  # from the first rank, whose slice has three rows
    assert "Shard(dim=1)" in str(rows)
    for placement in (Shard(0), Shard(1), Replicate()):
        same(together(mesh, rows @ distribute_tensor(weight, mesh["tp"], [placement])), WHOLE @ weight)
    same(DTensor.from_local(rows.sum(0).full_tensor(), mesh["dp"], [Partial()]), WHOLE.sum(0))


@pytest.mark.parametrize("captured", [False, True])
def test_tensor_parallel_layers_of_a_batch_that_the_slices_do_not_share_evenly(
    mesh_of: Callable[[str], Any], captured: bool
) -> None:
    mesh = mesh_of("2x2")
    torch._dynamo.reset()
    alone = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    model = parallelize_module(copy.deepcopy(alone), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    step = torch.compile(model, backend="monarch", options={"inductor": False}) if captured else model
    out = step(distribute_tensor(WHOLE, mesh, [Shard(0), Replicate()]).to_local())
    out = DTensor.from_local(out, mesh, [Shard(0), Replicate()])
    same(out, alone(WHOLE))
    out.square().sum().backward()
    alone(WHOLE).square().sum().backward()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        of_rows = ours.grad.full_tensor()  # type: ignore[union-attr]
        same(DTensor.from_local(of_rows, mesh["dp"], [Partial()]), theirs.grad)  # type: ignore[arg-type]


def test_operations_sharded_differently_on_each_slice(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2x2")
    local = distribute_tensor(WHOLE[:3], mesh, [Shard(0), Replicate()]).to_local()
    x = DTensor.from_local(local, mesh["tp"], [Replicate()])
    by_rows = x.redistribute(placements=[Shard(0)])  # two rows: one on each rank; one row: on the first rank
    with pytest.raises(RankDependentError, match=r"in another way on each slice.*Redistribute"):
        by_rows @ by_rows.t()
    same(together(mesh, x @ x.t().sum(1)), torch.cat([WHOLE[:2] @ WHOLE[:2].sum(0), WHOLE[2:3] @ WHOLE[2]]))


def test_a_number_of_the_rank_is_none_of_a_dtensors(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2x2")
    x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0), Shard(1)])
    for calculate in (lambda n: x * n, lambda n: x + n, lambda n: n - x, lambda n: x.mul_(n)):
        with pytest.raises(RankDependentError, match=r"from_local\(x.to_local\(\) \* number"):
            calculate(mesh.get_local_rank("tp"))
    x = DTensor.from_local(x.to_local() * mesh.get_local_rank("tp"), x.device_mesh, x.placements)
    same(x, torch.tensor([0.0, 1.0]).expand(4, 2))
