"""Values that a single process refuses raise for shards too, at the next read. They never give wrong results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

from monarch_backend.dtensor import RemoteOpError
from tests.dtensor.conftest import DEVICE, workers_of
from tests.dtensor.values import same

Case = tuple[Callable[[Any, Any], Any], torch.Tensor]
TABLE, WIDE = torch.arange(24.0).view(6, 4), torch.arange(24.0).view(4, 6)
GOOD = torch.tensor([0, 1, 5, 2])
BAD = {"too large": torch.tensor([0, 1, 7, 2]), "negative": torch.tensor([0, -1, 1, 2])}


def rows(index: Any) -> Any:
    return index.unsqueeze(1).expand(4, 4)


LOOKED_UP: dict[str, Case] = {
    "embedding": (lambda x, i: F.embedding(i, x), TABLE),
    "embedding of a batch": (lambda x, i: F.embedding(i.view(2, 2), x), TABLE),
    "gather": (lambda x, i: x.gather(0, rows(i)), TABLE),
    "gather from rows": (lambda x, i: x.gather(1, i.unsqueeze(1)), WIDE),
    "index_select": (lambda x, i: x.index_select(0, i), TABLE),
    "take": (lambda x, i: x.take(i + (i < 0) * -30 + (i > 6) * 30), TABLE),
    "scatter": (lambda x, i: x.scatter(0, rows(i), 1.0), TABLE),
    "scatter into rows": (lambda x, i: x.scatter(1, i.unsqueeze(1), 1.0), WIDE),
    "scatter_add": (lambda x, i: x.scatter_add(0, rows(i), x[:4].clone()), TABLE),
    "scatter_reduce": (lambda x, i: x.scatter_reduce(0, rows(i), x[:4].clone(), "amax"), TABLE),
    "index_add": (lambda x, i: x.index_add(0, i, x[:4].clone()), TABLE),
    "index_copy": (lambda x, i: x.index_copy(0, i, x[:4].clone()), TABLE),
    "cross_entropy": (lambda x, i: F.cross_entropy(x, i), WIDE),
    "cross_entropy of each": (lambda x, i: F.cross_entropy(x, i, reduction="none"), WIDE),
    "cross_entropy with weights": (lambda x, i: F.cross_entropy(x, i, weight=torch.ones(6)), WIDE),
    "multi_margin_loss": (lambda x, i: F.multi_margin_loss(x, i), WIDE),
    "one_hot": (lambda _, i: F.one_hot(i, 6), WIDE),
}
CAPTURED = ("embedding", "gather from rows", "cross_entropy", "one_hot")
PLACED = [
    (Shard(0), Replicate()), (Shard(1), Replicate()), (Shard(0), Shard(0)), (Replicate(), Shard(0)),
    (Replicate(), Replicate()),
]  # fmt: skip


def read(result: Any) -> None:
    result.full_tensor().tolist()


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("name", LOOKED_UP)
def test_an_index_that_is_out_of_range(mesh_of: Callable[[str], Any], name: str, kind: str) -> None:
    if DEVICE == "xla" and name != "one_hot":
        pytest.skip("XLA takes the last row for an index that is out of range")
    call, x = LOOKED_UP[name]
    with pytest.raises((IndexError, RuntimeError)):
        call(x.clone(), BAD[kind])
    expected = call(x.clone(), GOOD)
    for mesh in (mesh_of("2"), mesh_of("3")):
        for placements in PLACED:
            tensor, good, bad = (
                distribute_tensor(each, mesh, [placed])
                for each, placed in zip((x, GOOD, BAD[kind]), (placements[0], *[placements[1]] * 2), strict=True)
            )
            with pytest.raises(RemoteOpError, match=r"out of (range|bounds|DATA bounds)|non-negative"):
                read(call(tensor, bad))
            same(call(tensor, good), expected)


@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CAPTURED)
def test_an_index_that_is_out_of_range_in_a_captured_step(
    mesh_of: Callable[[str], Any], name: str, inductor: bool
) -> None:
    if DEVICE == "xla" and name != "one_hot":
        pytest.skip("XLA takes the last row for an index that is out of range")
    call, x = LOOKED_UP[name]
    mesh = mesh_of("2")
    for placement in (Shard(0), Shard(1)):
        torch._dynamo.reset()
        step = torch.compile(lambda x, i: call(x, i), backend="monarch", options={"inductor": inductor})
        tensor = distribute_tensor(x, mesh, [placement])
        for bad in BAD.values():
            with pytest.raises(RemoteOpError):
                read(step(tensor, distribute_tensor(bad, mesh, [Replicate()])))
        same(step(tensor, distribute_tensor(GOOD, mesh, [Replicate()])), call(x, GOOD))


@pytest.mark.parametrize("kind", BAD)
def test_a_label_that_is_out_of_range_of_a_parallel_loss(mesh_of: Callable[[str], Any], kind: str) -> None:
    mesh = mesh_of("2")
    x = distribute_tensor(WIDE, mesh, [Shard(1)])
    with loss_parallel():  # no failure is raised inside, because loss_parallel would stay on
        failed = F.cross_entropy(x, distribute_tensor(BAD[kind], mesh, [Replicate()]))
    with pytest.raises(RemoteOpError, match="out of bounds"):
        read(failed)
    labels = torch.tensor([0, -100, 5, 2])
    with loss_parallel():
        same(F.cross_entropy(x, distribute_tensor(labels, mesh, [Replicate()])), F.cross_entropy(WIDE, labels))


def test_results_of_an_index_out_of_range_have_failed(mesh_of: Callable[[str], Any]) -> None:
    """Also the table that is trained with the index has failed, because no step may use zeros."""
    mesh = mesh_of("2")
    table = torch.nn.Parameter(distribute_tensor(TABLE, mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([table], lr=0.1)
    F.embedding(distribute_tensor(BAD["too large"], mesh, [Replicate()]), table).square().sum().backward()
    optimizer.step()
    with pytest.raises(RemoteOpError, match=r"aten\.embedding\.default.*index out of range"):
        read(table)


OF_PROBABILITIES: dict[str, Callable[[Any, Any], Any]] = {
    "mean": F.binary_cross_entropy,
    "sum": lambda x, y: F.binary_cross_entropy(x, y, reduction="sum"),
    "none": lambda x, y: F.binary_cross_entropy(x, y, reduction="none"),
    "weighted": lambda x, y: F.binary_cross_entropy(x, y, weight=y),
}
UNLIKELY = {"too large": 1.5, "negative": -0.5, "nan": float("nan")}


@pytest.mark.parametrize("kind", UNLIKELY)
@pytest.mark.parametrize("name", OF_PROBABILITIES)
def test_invalid_probability_is_an_error(mesh_of: Callable[[str], Any], name: str, kind: str) -> None:
    call, x, mesh = OF_PROBABILITIES[name], torch.full((5, 3), 0.25), mesh_of("3")
    wrong = x.clone()
    wrong[4, 1] = UNLIKELY[kind]
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        call(wrong, x)
    for placement in (Shard(0), Shard(1), Replicate()):
        bad, good = (distribute_tensor(each, mesh, [placement]) for each in (wrong, x))
        with pytest.raises(RemoteOpError, match="all elements of input should be between 0 and 1"):
            read(call(bad, good))
        same(call(good, good), call(x, x))


def test_parts_of_a_sum_are_looked_at_together(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2")
    parts = distribute_tensor(torch.full((4, 2), 0.75), mesh, [Shard(0)]) - distribute_tensor(
        torch.full((4, 2), 0.5), mesh, [Shard(0)]
    )
    total = parts.sum(0)  # the sum is 1.0, and each rank has 0.5
    assert total.placements == (Partial(),)
    same(F.binary_cross_entropy(total, torch.ones(2)), torch.tensor(0.0))
    with pytest.raises(RemoteOpError, match="between 0 and 1"):
        read(F.binary_cross_entropy(total * 2, torch.ones(2)))


@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_invalid_probability_in_a_captured_step_is_an_error(mesh_of: Callable[[str], Any], inductor: bool) -> None:
    mesh = mesh_of("2")
    step = torch.compile(F.binary_cross_entropy, backend="monarch", options={"inductor": inductor})
    for placement in (Shard(0), Replicate()):
        x = distribute_tensor(torch.full((4, 2), 0.25), mesh, [placement])
        with pytest.raises(RemoteOpError, match="between 0 and 1"):
            read(step(x - 1, x))
        same(step(x, x), F.binary_cross_entropy(torch.full((4, 2), 0.25), torch.full((4, 2), 0.25)))


@pytest.mark.parametrize("values", [[-1], [-1, -3, 2], [0, -2]])
def test_one_hot_of_negative_numbers(mesh_of: Callable[[str], Any], values: list[int]) -> None:
    """one_hot reads the number of classes, and this read raises."""
    mesh, x = mesh_of("2"), torch.tensor(values)
    with pytest.raises(RuntimeError, match="non-negative"):
        F.one_hot(x)
    for placement in (Shard(0), Replicate()):
        distributed = distribute_tensor(x, mesh, [placement])
        for each in (distributed, workers_of(mesh).put(x)):
            with pytest.raises(RemoteOpError, match="non-negative"):
                F.one_hot(each)
        same(F.one_hot(distributed.abs()), F.one_hot(x.abs()))
        same(F.one_hot(distributed.abs(), 4), F.one_hot(x.abs(), 4))


def test_a_check_costs_one_record_and_no_wait(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2")
    sink = workers_of(mesh).sink
    x = distribute_tensor(GOOD, mesh, [Shard(0)])
    same(F.one_hot(x, 6), F.one_hot(GOOD, 6))
    before = sink.records
    F.one_hot(x, 6)
    assert sink.records - before <= 5, "what torch makes it of, and one more"
