"""torch.compile(backend="monarch"): values of a single process, and one record for each call of a captured step."""

from __future__ import annotations

import copy
import functools
import importlib.machinery
import importlib.util
import itertools
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental._tp_transform import tensor_parallel_transformation
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from monarch_backend._core import patches
from monarch_backend._core.torch_version import torch_version
from monarch_backend.actor import this_host
from monarch_backend.dtensor import (
    RankDependentError,
    RemoteOpError,
    RemoteTensor,
    RemoteTensorError,
    own_random_numbers,
    simulated_mesh,
)
from monarch_backend.dtensor._compile import compile_backend, merge_graphs
from monarch_backend.dtensor._patches import manifest, trace_installation
from monarch_backend.dtensor._per_rank import rank_classes
from tests.dtensor import worker_functions
from tests.dtensor.conftest import workers_of
from tests.dtensor.values import same, value

pytestmark = [
    pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # torch hides it, but not in tests
]


@pytest.fixture
def two(mesh_of: Callable[[str], Any]) -> Any:
    return mesh_of("2")


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def captured(function: Callable[..., Any], inductor: bool = False, **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend=compile_backend.monarch, options={"inductor": inductor}, **options)


def training(loss_of: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a training step. It is called with a model, its optimizer and a batch."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def whole(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Capture a function, and raise if it needs more than one graph."""
    return captured(function, fullgraph=True, **options)


def records(mesh: Any, step: Callable[[], Any]) -> int:
    """Return the number of records that a step writes."""
    sink = workers_of(mesh).sink
    before = sink.records
    step()
    return int(sink.records - before)


def two_layers(mesh: Any) -> tuple[nn.Module, nn.Module]:
    """Return a model on the mesh, and an equal one of a single process."""
    reference = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    ours = copy.deepcopy(reference)
    return parallelize_module(ours, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}), reference


def test_the_entry_point_is_declared_and_resolves() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    found = re.search(r'entry-points\."torch_dynamo_backends"\]\nmonarch = "([\w.]+):(\w+)"', text)
    assert found is not None
    module, name = found.groups()
    assert getattr(importlib.import_module(module), name) is compile_backend.monarch


@pytest.mark.skipif(torch_version() < manifest.CAPTURED.since, reason="the rows for traces are not applied")
def test_replaced_names_of_torch_exist() -> None:
    assert manifest.COMPILE
    for row in manifest.COMPILE:
        if not row.is_for(torch_version()):
            continue
        where, name = patches.locate(row)
        assert getattr(where, name).__wrapped__.__name__ == name


@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "inductor"])
def test_forward_and_backward(two: Any, inductor: bool) -> None:
    ours, reference = two_layers(two)
    x = torch.randn(8, 16)
    there = distribute_tensor(x, two, [Replicate()])
    step = whole(lambda x: ours(x).pow(2).mean(), inductor=inductor)
    for _ in range(2):
        ours.zero_grad()
        reference.zero_grad()
        loss, expected = step(there), reference(x).pow(2).mean()
        same(loss, expected)
        loss.backward()
        expected.backward()
        for mine, theirs in zip(ours.parameters(), reference.parameters(), strict=True):
            same(mine.grad, theirs.grad)  # type: ignore[arg-type]


def test_call_is_one_record_without_new_definitions(two: Any) -> None:
    ours, _ = two_layers(two)
    x = distribute_tensor(torch.randn(8, 16), two, [Replicate()])
    step = whole(lambda x: ours(x).pow(2).mean())
    step(x)
    graphs = compile_backend.statistics["graphs"]
    assert [records(two, lambda: step(x)) for _ in range(3)] == [1, 1, 1]
    assert compile_backend.statistics["graphs"] == graphs


@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "inductor"])
def test_an_optimizer_step(two: Any, inductor: bool) -> None:
    ours, reference = two_layers(two)
    mine, theirs = torch.optim.AdamW(ours.parameters(), lr=0.01), torch.optim.AdamW(reference.parameters(), lr=0.01)
    step = captured(lambda: mine.step(), inductor=inductor)
    counts = []
    for _ in range(4):
        x = torch.randn(8, 16)
        ours(distribute_tensor(x, two, [Replicate()])).pow(2).mean().backward()
        reference(x).pow(2).mean().backward()
        counts.append(records(two, step))
        theirs.step()
        mine.zero_grad()
        theirs.zero_grad()
    assert counts[1:] == [1, 1, 1]  # the first step creates the optimizer's state
    for one, other in zip(ours.parameters(), reference.parameters(), strict=True):
        same(one, other)


@pytest.mark.slow  # the language model's test also has a whole step
def test_a_whole_training_step(two: Any) -> None:
    ours, reference = two_layers(two)
    mine, theirs = torch.optim.SGD(ours.parameters(), lr=0.1), torch.optim.SGD(reference.parameters(), lr=0.1)

    step = training(lambda model, x: model(x).pow(2).mean())
    compiled = captured(step)
    counts = []
    for _ in range(4):
        x = torch.randn(8, 16)
        there = distribute_tensor(x, two, [Replicate()])
        losses: list[Any] = []
        counts.append(records(two, lambda there=there, losses=losses: losses.append(compiled(ours, mine, there))))
        same(losses[0], step(reference, theirs, x))
    assert counts[1:] == [4, 4, 4]  # forward, the gradient of the loss, backward, optimizer


@pytest.fixture
def train_lm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """examples/train_lm.py as a module."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples"))
    yield importlib.import_module("train_lm")
    del sys.modules["train_lm"]


def _gradient(results: Any, of: torch.Tensor) -> torch.Tensor:
    parts = [each.sum() for each in pytree.tree_leaves(results) if each.requires_grad]
    return torch.autograd.grad(sum(parts[1:], start=parts[0]), of)[0]


@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "inductor"])
def test_the_language_model_is_four_records_a_step(two: Any, train_lm: Any, inductor: bool) -> None:
    """Vocabulary, heads and hidden units are sharded, activations by tokens. Two graphs hold all of it."""
    reference = train_lm.Transformer(16, 1, 2, 8)
    ours = copy.deepcopy(reference)
    train_lm.tensor_parallel(ours, two)
    there = lambda tensor: distribute_tensor(tensor, two, [Replicate()]).to_local()  # noqa: E731
    attention = ours.blocks[0].attention
    attention.rope = there(attention.rope)
    kind = (
        torch.optim.AdamW if inductor else torch.optim.SGD
    )  # AdamW takes the longest to trace, and test_an_optimizer_step covers it
    mine, theirs = (kind(each.parameters(), lr=0.01) for each in (ours, reference))

    def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return F.nll_loss(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    step = training(loss_of)
    compiled = captured(step, inductor=inductor)
    counts = []
    for _ in range(4):
        tokens = torch.randint(256, (2, 9))
        losses: list[Any] = []
        mesh_tokens = there(tokens)
        counts.append(records(two, lambda: losses.append(compiled(ours, mine, mesh_tokens))))  # noqa: B023
        same(losses[0], step(reference, theirs, tokens))
    assert counts[1:] == [4, 4, 4]
    for one, other in zip(ours.parameters(), reference.parameters(), strict=True):
        same(one, other, 1e-4)


@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "inductor"])
def test_each_rank_has_its_own_numbers(two: Any, inductor: bool) -> None:
    """Ranks differ only in the rows that they keep, and in the words of their vocabulary shards."""
    x = torch.randn(8, 16)
    there = distribute_tensor(x, two, [Replicate()])
    same(whole(lambda x: (x * 2).redistribute(placements=[Shard(0)]), inductor=inductor)(there), x * 2)
    words = nn.Embedding(16, 8)
    ours = parallelize_module(
        copy.deepcopy(words), two, RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    )
    ids = torch.randint(0, 16, (4, 6))
    out = whole(lambda ids: ours(ids).sin(), inductor=inductor)(distribute_tensor(ids, two, [Replicate()]))
    expected = words(ids).sin()
    same(out, expected)
    out.sum().backward()
    expected.sum().backward()
    same(ours.weight.grad, words.weight.grad)  # type: ignore[arg-type]


def test_rows_of_an_embedding_that_are_reduced_elsewhere(two: Any) -> None:
    """The rows are reduced after a graph break, in eager code, or in another graph. The results stay the same."""
    words, ids = torch.randn(16, 8).requires_grad_(), torch.randint(0, 16, (4, 6))
    ours, there = distribute_tensor(words.detach(), two, [Shard(0)]).requires_grad_(), distribute_tensor(ids, two)
    whole_of = lambda rows: rows.redistribute(placements=[Replicate()]).sin()  # noqa: E731

    def broken(ids: torch.Tensor) -> torch.Tensor:
        rows = F.embedding(ids, ours)
        torch._dynamo.graph_break()
        return whole_of(rows)

    find, reduce = whole(lambda ids: F.embedding(ids, ours)), captured(whole_of)
    expected = F.embedding(ids, words).sin()
    (gradient,) = torch.autograd.grad(expected.sum(), words)
    for way in (
        captured(broken),
        lambda ids: whole_of(find(ids)),
        lambda ids: reduce(find(ids)),
        lambda ids: reduce(F.embedding(ids, ours)),
        lambda ids: whole_of(F.embedding(ids, ours)),
    ):
        found = way(there)
        same(found, expected)
        same(torch.autograd.grad(found.sum(), ours)[0], gradient)


def test_gather_along_a_sharded_dimension(two: Any) -> None:
    x, at = torch.randn(4, 8), torch.tensor([[1], [7], [0], [5]])
    step = whole(lambda x, at: x.gather(1, at).redistribute(placements=[Replicate()]) * 2)
    same(step(distribute_tensor(x, two, [Shard(1)]), distribute_tensor(at, two, [Replicate()])), x.gather(1, at) * 2)


def test_a_loss_of_sharded_classes(two: Any) -> None:
    x, classes = torch.randn(6, 8).requires_grad_(), torch.randint(0, 8, (6,))
    ours = distribute_tensor(x.detach(), two, [Shard(1)]).requires_grad_()

    def step(x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        with loss_parallel():
            return F.cross_entropy(x, classes)

    expected = F.cross_entropy(x, classes)
    expected.backward()
    loss = whole(step)(ours, distribute_tensor(classes, two, [Replicate()]))
    with loss_parallel():
        loss.backward()
    same(loss, expected)
    same(ours.grad, x.grad)  # type: ignore[arg-type]


def test_two_dimensions(mesh_of: Callable[[str], Any]) -> None:
    square, x = mesh_of("2x2"), torch.randn(8, 16)
    there = distribute_tensor(x, square, [Shard(0), Replicate()])
    moved = whole(lambda x: (x.sin() @ x.t()).redistribute(placements=[Replicate(), Shard(0)]))(there)
    same(moved, x.sin() @ x.t())


@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "inductor"])
def test_inputs_that_are_changed_and_results_that_are_views(two: Any, inductor: bool) -> None:
    def step(x: torch.Tensor) -> Any:
        x.add_(1)
        return x, x.view(4, 2, 16), None, x * 2

    x = torch.randn(8, 16)
    there = distribute_tensor(x, two, [Shard(1)])
    changed, view, nothing, twice = whole(step, inductor=inductor)(there)
    step(x)
    assert changed is there and nothing is None
    same(there, x)
    same(view, x.view(4, 2, 16))
    same(twice, x * 2)
    there.mul_(3)
    same(view, (x * 3).view(4, 2, 16))


@pytest.mark.parametrize("rows", [4, 5])
def test_results_that_are_views_of_other_ranks_rows(mesh_of: Any, rows: int) -> None:
    def step(x: Any) -> Any:
        return x[1], x[2:], x.diagonal()

    mesh = mesh_of("2x2")
    for placements in ([Shard(0), Shard(1)], [Shard(0), Replicate()]):
        x = torch.randn(rows, 6)
        there = distribute_tensor(x.clone(), mesh, placements).requires_grad_()
        x.requires_grad_()
        found, expected = captured(step)(there), step(x)
        for here, mine in zip(found, expected, strict=True):
            same(here, mine, 0)
            assert here.placements[0].is_replicate()
            parts = DTensor.from_local(here.detach().to_local(), mesh, [Shard(0), *here.placements[1:]])
            same(parts, torch.cat([mine, mine]), 0)  # both rows of the mesh have the values
        sum((each * each).sum() for each in found).backward()
        sum((each * each).sum() for each in expected).backward()
        same(there.grad, x.grad)


def test_gradients_through_a_result_that_is_a_view(two: Any) -> None:
    x = torch.randn(8, 16)
    there = distribute_tensor(x, two, [Shard(1)]).requires_grad_()
    x.requires_grad_()
    (whole(lambda x: x.view(4, 2, 16))(there) * 3).sin().sum().backward()
    (x.view(4, 2, 16) * 3).sin().sum().backward()
    same(there.grad, x.grad)  # type: ignore[arg-type]


@pytest.fixture
def reported(capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """Return the graph breaks and recompilations that torch has logged."""
    torch._logging.set_logs(graph_breaks=True, recompiles=True)
    yield lambda: capfd.readouterr().err
    torch._logging.set_logs()


@pytest.mark.parametrize("dynamic", [None, True])
def test_other_sizes_are_other_graphs(two: Any, dynamic: bool | None, reported: Callable[[], str]) -> None:
    step = whole(lambda x, factor: x * x.shape[0] + factor, dynamic=dynamic)
    for rows in (4, 6, 8, 4):
        x = torch.randn(rows, 16)
        same(step(distribute_tensor(x, two, [Shard(0)]), rows / 2), x * rows + rows / 2)
    if dynamic is None:
        assert "Recompiling function" in reported()


def test_views_that_come_in_with_other_sizes(two: Any) -> None:
    """A layer of unequal shards breaks the graph, and its result is a view. Dynamo has no guards for a view's sizes."""
    alone = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    model = captured(parallelize_module(copy.deepcopy(alone), two, plan))
    for rows in (3, 4, 5):
        x = torch.randn(rows, 4, 6)
        same(model(distribute_tensor(x, two, [Replicate()]).to_local()), alone(x))


@pytest.mark.parametrize("dim", [1, 2])
def test_views_over_a_sharded_dimension(mesh_of: Callable[[str], Any], dim: int) -> None:
    x = torch.randn(4, 6, 4)
    views = [
        lambda y: y.view(-1) * 2,
        lambda y: (y + 1).flatten(1),
        lambda y: (y * 2).reshape(-1, 4).unflatten(0, (4, 6)),
    ]

    def step(y: torch.Tensor) -> list[torch.Tensor]:
        return [view(y) for view in views]

    for mesh, placements in ((mesh_of("2"), [Shard(dim)]), (mesh_of("2x2"), [Shard(0), Shard(dim)])):
        for ours, theirs in zip(whole(step)(distribute_tensor(x, mesh, placements)), step(x), strict=True):
            same(ours, theirs)


def test_memory_under_two_names_is_left_to_eager_code(two: Any) -> None:
    def step(base: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        base.mul_(2)
        return view + 1

    x = torch.randn(4, 6)
    there = distribute_tensor(x, two, [Shard(1)])
    same(captured(step)(there, there.t()), x.t() * 2 + 1)
    same(there, x * 2)
    views = lambda y: [(z := y.sigmoid()).view(-1, 2), z[..., ::2]]  # noqa: E731  (of one tensor of the graph)
    for ours, theirs in zip(captured(views)(there), views(x * 2), strict=True):
        same(ours, theirs)


def test_graph_breaks_are_reported_and_work(two: Any, reported: Callable[[], str]) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if y.sum().item() > 0:
            y = y + 1
        return y

    x = torch.ones(8, 16)
    there = distribute_tensor(x, two, [Shard(0)])
    same(captured(step)(there), x * 3)
    assert "Graph break" in reported()
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="item"):
        whole(step)(there)


class Words(nn.Module):
    """A vocabulary and hidden units that no mesh of these tests divides evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(13, 10), nn.Linear(10, 7), nn.Linear(7, 13)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(F.dropout(self.words(ids), 0.25))))

    def plan(self) -> dict[str, Any]:
        return {
            "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate(), use_local_output=False),
            "up": ColwiseParallel(use_local_output=False),
            "down": RowwiseParallel(use_local_output=False),
        }


@pytest.mark.parametrize(("name", "inductor"), [pytest.param("2", True, marks=pytest.mark.slow), ("3", False)])
def test_a_training_step_with_shards_of_unequal_sizes(mesh_of: Callable[[str], Any], name: str, inductor: bool) -> None:
    """Forward, backward and optimizer are one record each for all sizes. The values equal a single process's."""
    mesh, reference = mesh_of(name), Words()
    ours = parallelize_module(copy.deepcopy(reference), mesh, reference.plan())
    mine, theirs = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (ours, reference))

    step = training(lambda model, x: model(x).pow(2).mean())
    compiled = captured(step, inductor=inductor)
    counts = []
    for turn in range(4):
        ids, losses = torch.randint(0, 13, (5, 3)), []
        there = distribute_tensor(ids, mesh, [Replicate()])
        torch.manual_seed(turn)
        counts.append(records(mesh, lambda: losses.append(compiled(ours, mine, there))))  # noqa: B023
        torch.manual_seed(turn)
        same(losses[0], step(reference, theirs, ids))
    # The first steps create the optimizer's state.
    # One record of five sends the generator's state, which the reference's draws change.
    assert counts[2:] == [5, 5]
    for one, other in zip(ours.parameters(), reference.parameters(), strict=True):
        same(one, other)


def moved(x: torch.Tensor) -> Any:
    whole_of = x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)
    other = (x.sin() * 2).redistribute(placements=[Shard(1)] + [Replicate()] * (x.device_mesh.ndim - 1))
    return whole_of * 3, other + 1, torch.rand_like(x), x.sum(0)


@pytest.mark.parametrize(("name", "dims"), [("2", [0]), ("3", [0]), ("2x2", [0, 1]), ("2x2", [0, 0])])
def test_shards_of_unequal_sizes(mesh_of: Callable[[str], Any], name: str, dims: list[int]) -> None:
    """Shards are moved, viewed, drawn and summed, with a graph for each rank class and one record for all."""
    mesh, x = mesh_of(name), torch.randn(4 if name == "3" else 5, 7)  # the third of three ranks has no row
    there = distribute_tensor(x, mesh, [Shard(dim) for dim in dims])
    step = whole(moved)
    for turn in range(2):
        torch.manual_seed(turn)
        found = step(there)
        torch.manual_seed(turn)
        expected = (x * 3, x.sin() * 2 + 1, torch.rand_like(x), x.sum(0))
        for mine, theirs in zip(found, expected, strict=True):
            same(mine, theirs)
    assert [records(mesh, lambda: step(there)) for _ in range(2)] == [1, 1]


def test_result_with_one_row_has_the_sizes_of_the_whole(two: Any) -> None:
    """The traced rank has all of it, the other rank has nothing."""
    x = torch.randn(1, 4).requires_grad_()
    there = distribute_tensor(x.detach(), two, [Shard(0)]).requires_grad_()
    step = whole(lambda x: x.sin() * 2)
    for _ in range(2):
        found, expected = step(there), x.sin() * 2
        assert found.shape == expected.shape
        assert found.stride() == expected.stride()
        same(found, expected)
        (mine,) = torch.autograd.grad(found.square().sum(), there)
        same(mine, torch.autograd.grad(expected.square().sum(), x)[0])
        assert mine.shape == x.shape


@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "inductor"])
def test_gradients_with_other_strides_of_shards_of_unequal_sizes(two: Any, inductor: bool) -> None:
    x, gradient = torch.randn(5, 7).requires_grad_(), torch.randn(7, 5)
    there = distribute_tensor(x.detach(), two, [Shard(0)]).requires_grad_()
    step = whole(lambda x: x.sin().t() * 2, inductor=inductor)
    (expected,) = torch.autograd.grad(x.sin().t() * 2, x, gradient)
    for given in (
        distribute_tensor(gradient, two, [Shard(1)]),
        distribute_tensor(gradient.t().contiguous(), two, [Shard(0)]).t(),
    ):
        same(torch.autograd.grad(step(there), there, given)[0], expected)


def test_a_step_of_some_of_the_ranks(mesh_of: Callable[[str], Any]) -> None:
    """The other ranks do nothing, and a later random operation finds their state unchanged."""
    mesh, first = mesh_of("3"), workers_of(mesh_of("3")).first
    few, x, after = DeviceMesh("cpu", [first, first + 1]), torch.ones(5, 6), torch.ones(7, 3)
    step = whole(lambda x: F.dropout(x, 0.5).redistribute(placements=[Replicate()]) * 2)
    torch.manual_seed(1)
    found = step(distribute_tensor(x, few, [Shard(0)])), F.dropout(distribute_tensor(after, mesh, [Shard(0)]), 0.5)
    torch.manual_seed(1)
    for mine, theirs in zip(found, (F.dropout(x, 0.5) * 2, F.dropout(after, 0.5)), strict=True):
        same(mine, theirs, 0)


def test_a_rank_of_another_class_that_fails(two: Any) -> None:
    table = distribute_tensor(torch.randn(5, 4), two, [Replicate()])
    good, bad = (distribute_tensor(torch.tensor(ids), two, [Shard(0)]) for ids in ([1, 2, 3], [1, 2, 7]))
    step = whole(lookup)
    same(step(table, good), lookup(table, good).full_tensor())
    with pytest.raises(RemoteOpError, match="rank 1"):
        value(step(table, bad))  # rank 1 fails before a collective that rank 0 enters
    same(step(table, good), lookup(table, good).full_tensor())


def test_sizes_that_turn_out_unequal_inside(two: Any) -> None:
    """Equal inputs become unequal shards inside the step. Each number of rows makes another graph."""
    step = whole(lambda x: (x * 2).redistribute(placements=[Shard(0)]) * x.shape[0], dynamic=True)
    for rows in (5, 7, 6, 5):
        x = torch.randn(rows, 3)
        same(step(distribute_tensor(x, two, [Replicate()])), x * 2 * rows)


def test_the_local_part_of_an_uneven_tensor_is_left_to_eager_code(two: Any, reported: Callable[[], str]) -> None:
    x = torch.randn(7, 16)
    there = distribute_tensor(x, two, [Shard(0)])
    step = lambda x: DTensor.from_local((x * 2).to_local() + 1, two, [Shard(0)], shape=x.shape, stride=x.stride())  # noqa: E731
    same(captured(step)(there), x * 2 + 1)
    assert "sizes that differ by rank" in reported()
    for program in (lambda x: x.to_local() * 2, lambda x: x._local_tensor * 2):
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="differ by rank"):
            whole(program)(there)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="differ by rank"):
        whole(lambda x: x * 2)(there.to_local())


@pytest.mark.parametrize("of", [lambda x: x.view(12, 5), lambda x: x[1:], lambda x: x.transpose(0, 1)])
def test_a_view_of_uneven_shards_is_left_to_eager_code(
    two: Any, reported: Callable[[], str], of: Callable[[Any], Any]
) -> None:
    x = torch.randn(3, 4, 5)
    same(captured(lambda y: (y * 2).sum())(of(distribute_tensor(x, two, [Shard(2)]))), (of(x) * 2).sum())
    assert "a view, made before" in reported()


def test_too_many_classes_of_ranks_are_left_to_eager_code(
    two: Any, reported: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_classes, "MAX_GRAPHS", 1)
    x = torch.randn(7, 16)
    same(captured(lambda x: x * 2)(distribute_tensor(x, two, [Shard(0)])), x * 2)
    assert "too many" in reported()


def test_graphs_that_do_not_fit_together() -> None:
    """Ranks would wait for each other in different collectives, or would return different results."""

    def traced(function: Callable[..., Any]) -> Any:
        return make_fx(lambda x: pytree.tree_leaves(function(x)), tracing_mode="fake")(torch.ones(4, 2))

    one = lambda x: torch.ops._c10d_functional.all_reduce(x, "sum", "0")  # noqa: E731
    for what, other in (
        ("collectives", lambda x: torch.ops._c10d_functional.all_reduce(x, "max", "0")),
        ("collectives", lambda x: x * 2),
        ("results", lambda x: one(x).sum()),
        ("results", lambda x: (one(x), x)),
    ):
        with pytest.raises(RemoteTensorError, match=f"other {what}"):
            merge_graphs.check([traced(one), traced(other)])
    merge_graphs.check([traced(one), traced(lambda x: one(x * 2))])


@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "inductor"])
def test_random_numbers_are_those_of_a_single_process(two: Any, inductor: bool) -> None:
    """Equal to the last bit: draws for sharded, replicated and plain tensors, forward and backward, and later draws."""

    def step(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
        x, y, z = F.dropout(x, 0.5), F.dropout(F.dropout(y, 0.25), 0.5), F.dropout(z, 0.1)
        return x * 2, y, z * z, torch.rand_like(x)

    given = [torch.ones(6, 5), torch.ones(40, 3), torch.ones(3, 4)]
    ours: list[Any] = [distribute_tensor(given[0], two, [Shard(0)]), distribute_tensor(given[1], two, [Replicate()])]
    ours.append(distribute_tensor(given[2], two, [Replicate()]).to_local())
    compiled = whole(step, inductor=inductor)
    for tensors in (given, ours):
        for each in tensors:
            each.requires_grad_()
    for turn in range(2):
        results = []
        for run, tensors in ((compiled, ours), (step, given)):
            torch.manual_seed(turn)
            made = run(*tensors)
            gradients = torch.autograd.grad([each.sum() for each in made[:3]], tensors)
            results.append([*made, *gradients, torch.rand(3)])
        for mine, theirs in zip(*results, strict=True):
            same(mine, theirs)


@pytest.mark.parametrize("is_plain", [False, True], ids=["dtensor", "plain"])
def test_checkpointed_random_numbers_are_not_drawn_again(two: Any, is_plain: bool) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(lambda x: F.dropout(x * 3, 0.5).sin() * x, x, use_reentrant=False)
        return y.pow(2).sum()

    x = torch.randn(8, 16)
    ours: Any = distribute_tensor(x, two, [Replicate() if is_plain else Shard(0)])
    ours = (ours.to_local() if is_plain else ours).requires_grad_()
    for run, tensor in ((whole(step), ours), (step, x.requires_grad_())):
        torch.manual_seed(1)
        run(tensor).backward()
    same(ours.grad, x.grad)  # type: ignore[arg-type]


def test_a_step_with_dropout_is_one_record(two: Any) -> None:
    there = distribute_tensor(torch.ones(8, 16), two, [Shard(0)])
    step = whole(lambda x: F.dropout(x, 0.5))
    step(there)
    assert [records(two, lambda: step(there)) for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bernoulli_of_a_tensor_is_that_of_a_single_process(two: Any, dtype: torch.dtype) -> None:
    x = torch.rand(7, 5, dtype=dtype)
    there = distribute_tensor(x, two, [Shard(0)])
    step = whole(lambda x: torch.bernoulli(x) * 2)
    for turn in range(2):
        results = []
        for run, tensor in ((step, there), (lambda x: torch.bernoulli(x) * 2, x)):
            torch.manual_seed(turn)
            results.append([run(tensor), torch.rand(3)])
        for mine, theirs in zip(*results, strict=True):
            same(mine, theirs, 0)


def test_random_numbers_that_depend_on_values_are_left_to_eager_code(two: Any, reported: Callable[[], str]) -> None:
    weights, x = torch.rand(4, 6), torch.rand(6, 4).t()
    there = distribute_tensor(weights, two, [Shard(0)])
    for what, program, tensor, given in (
        ("multinomial", lambda x: torch.multinomial(x * 2, 2) + 1, weights, there),
        ("bernoulli", lambda x: torch.bernoulli(x) + 1, x, distribute_tensor(x, two, [Shard(0)])),  # other strides
        ("bernoulli", lambda x: torch.bernoulli(x) + 1, weights, there.full_tensor()),  # no DTensor
    ):
        results = []
        for run, argument in ((captured(program), given), (program, given), (program, tensor)):
            torch.manual_seed(1)
            results.append(run(argument))
        assert what in reported()
        same(results[0], value(results[1]), 0)
        if isinstance(given, DTensor):
            same(results[0], results[2], 0)


def test_plain_tensors_with_their_own_random_numbers_are_left_to_eager_code(
    mesh_of: Callable[[str], Any], reported: Callable[[], str]
) -> None:
    with this_host().spawn_procs({"x": 2}) as procs:  # new ones, as own_random_numbers lasts
        mesh = procs.device_mesh("cpu")
        own_random_numbers(mesh)
        x = distribute_tensor(torch.ones(40), mesh, [Replicate()]).to_local()
        parts = DTensor.from_local(captured(lambda x: F.dropout(x, 0.5))(x), mesh, [Shard(0)]).tolist()
    assert parts[:40] != parts[40:]
    assert "own_random_numbers" in reported()


def lookup(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    found = F.embedding(ids, table)
    return found.sum(0).redistribute(placements=[Replicate()])


@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "inductor"])
def test_failure_on_a_rank_is_raised_with_the_programs_line(two: Any, inductor: bool) -> None:
    table = distribute_tensor(torch.randn(5, 4), two, [Replicate()])
    good, bad = (distribute_tensor(torch.tensor(ids), two, [Shard(0)]) for ids in ([1, 2], [1, 7]))
    step = whole(lookup, inductor=inductor)
    result = step(table, bad)  # rank 1 fails before a collective that rank 0 enters
    with pytest.raises(RemoteOpError, match="rank 1") as raised:
        value(result)
    assert "test_compile.py" in raised.value.issued_at
    if not inductor:
        assert "found = F.embedding(ids, table)" in str(raised.value)
    dependent = step(table + result.sum(), good)  # rank 1 has no valid input, but still joins the collective
    with pytest.raises(RemoteOpError, match="rank 1"):
        value(dependent)
    same(step(table, good), lookup(table, good).full_tensor())


def test_a_worker_without_a_compiler_runs_the_operations_one_by_one(
    two: Any, all_procs: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from monarch_backend.dtensor._protocol import Graph, Tag
    from monarch_backend.dtensor._torch_internals import inductor as _inductor
    from monarch_backend.dtensor._worker.graph_executor import GraphFunction

    def no_compiler(*_: Any) -> Any:
        raise RuntimeError("no working C++ compiler found")

    monkeypatch.setattr(_inductor, "compiled", no_compiler)
    step = ["aten.sin.default", [[Tag.OPERAND, 0]], {}, "", None, [None]]
    function = GraphFunction(
        Graph(1, 1, [], [step], [1], [], [[[2], "float32"]], True, []), 0, torch.device("cpu"), str
    )
    tensors: dict[int, Any] = {5: torch.ones(2)}
    with caplog.at_level(logging.WARNING, "monarch_backend"):
        for _ in range(2):
            function.run(tensors, [1, 0, 5, 6], 0)
    assert tensors[6].equal(torch.ones(2).sin())
    assert [each.message for each in caplog.records if "C++ compiler" in each.message] == [caplog.records[0].message]


def test_a_library_that_a_killed_worker_has_left_half_written_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.exc import InductorError

    from monarch_backend.dtensor._torch_internals import inductor as _inductor

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    broken = tmp_path / "half.so"
    broken.write_bytes(b"\x7fELF")

    def as_inductor_does(graph: Any, _inputs: Any) -> Any:
        if broken.exists():
            try:
                loader = importlib.machinery.ExtensionFileLoader("half", str(broken))
                importlib.util.module_from_spec(importlib.util.spec_from_loader("half", loader))  # type: ignore[arg-type]
            except ImportError as error:
                raise InductorError(error, None) from None
        return graph

    monkeypatch.setattr(_inductor, "inductor", as_inductor_does)
    one = torch.ones(2)
    assert _inductor.compiled(lambda x: [x + 1], [one])(one)[0].tolist() == [2, 2]
    assert not broken.exists()


def test_unknown_options_are_refused(two: Any) -> None:
    there = distribute_tensor(torch.ones(8, 16), two, [Shard(0)])
    with pytest.raises(Exception, match="the options are inductor"):
        torch.compile(lambda x: x + 1, backend=compile_backend.monarch, options={"fast": True})(there)


def test_a_step_that_prints_in_the_middle(two: Any, capfd: Any) -> None:
    """Two graphs with eager code between them, forward and backward."""
    ours, reference = two_layers(two)

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).pow(2).mean()
        print(f"loss {loss.item():.3f}")
        loss = loss * 2
        loss.backward()
        return loss

    torch._logging.set_logs(graph_breaks=True)
    x, compiled = torch.randn(8, 16), captured(step)
    there = distribute_tensor(x, two, [Replicate()])
    for _ in range(2):
        ours.zero_grad()
        reference.zero_grad()
        same(compiled(ours, there), step(reference, x))
        for mine, theirs in zip(ours.parameters(), reference.parameters(), strict=True):
            same(mine.grad, theirs.grad)  # type: ignore[arg-type]
    torch._logging.set_logs()
    said, log = capfd.readouterr()
    assert len(set(said.splitlines())) == 1 and said.count("loss") == 4  # both models print the same
    assert "Graph break" in log


def test_a_tensor_of_this_process_is_not_changed_by_the_workers(two: Any) -> None:
    there, here = distribute_tensor(torch.ones(4), two, [Replicate()]), torch.zeros(4)

    def step(here: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        here.copy_(there.to_local())
        return there * 2

    with pytest.raises(Exception, match="changes a tensor of this process"):
        whole(step)(here, there)


def test_no_tensors_are_left_on_the_workers(two: Any) -> None:
    ours, _ = two_layers(two)
    x = distribute_tensor(torch.randn(8, 16), two, [Replicate()])
    step = whole(lambda x: ours(x).pow(2).mean())
    counts = []
    for _ in range(4):
        step(x).backward()
        ours.zero_grad()
        counts.append(workers_of(two).ask("inspect", worker_functions.count))
    assert counts[1] == counts[2] == counts[3]


def test_the_number_of_the_rank(two: Any) -> None:
    there = distribute_tensor(torch.ones(4), two, [Replicate()])

    def branch(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if two.get_local_rank() == 0 else x

    def rows(x: torch.Tensor) -> torch.Tensor:
        local = (x * 2).to_local().narrow(0, two.get_local_rank() * 2, 2)
        return DTensor.from_local(local, two, [Shard(0)]) + 1

    with pytest.raises(RankDependentError, match=r"\{0 1\} == 0 is true on some ranks"):
        captured(branch)(there)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"\{0 1\} has another value on each rank"):
        whole(rows)(there)
    same(captured(lambda x: x * two.get_local_rank())(there.to_local()), torch.zeros(4))
    x = torch.arange(4.0)
    eager = torch.compiler.disable(rows)
    for step in (rows, lambda x: eager(x * 2) / 2 + 0.5):
        same(captured(step)(distribute_tensor(x, two, [Replicate()])), x * 2 + 1)


def test_a_device_that_the_controller_has_not() -> None:
    x = distribute_tensor(torch.ones(8, 8), simulated_mesh((4,), ("x",), "cuda"), [Shard(0)]).requires_grad_()
    loss = whole(lambda x: (x.sin() @ x.t() + torch.ones_like(x)).pow(2).mean())(x)
    loss.backward()
    for each in (loss, x.grad):
        assert each is not None and each.device.type == "cuda" and each.to_local().device.type == "cuda"


def test_remote_tensors_by_themselves(two: Any) -> None:
    x = torch.randn(4, 4)
    there = distribute_tensor(x, two, [Replicate()]).to_local()
    assert isinstance(there, RemoteTensor)
    step = whole(lambda x: (x.sin() * 2 + 1, x.sum()))
    found = step(there)
    assert type(found[0]) is RemoteTensor
    same(found[0], x.sin() * 2 + 1)
    assert records(two, lambda: step(there)) == 1


def test_rows_see_later_changes_of_their_tensor(two: Any) -> None:
    def calculate(x: torch.Tensor) -> Any:
        given = x[1:]
        x.add_(1)
        made = x * 2
        rows, last = made[1:], made[3]
        made.mul_(3)
        rows.sub_(1)
        return given, rows, last, made

    x = torch.arange(5.0)
    there = distribute_tensor(x, two, [Shard(0)])
    for found, expected in zip(whole(calculate)(there), calculate(x), strict=True):
        same(found, expected)
    same(there, x)


def test_other_dtypes_and_devices_are_captured(two: Any) -> None:
    x = torch.randn(4, 4)
    there = distribute_tensor(x, two, [Replicate()])
    step = whole(lambda x: x.to(torch.float64).cpu().type_as(x) + x.to(dtype=torch.float64).to(x))
    for each in (there, there.to_local()):
        same(step(each), x * 2)


def test_gradients_of_remote_tensors_by_themselves(two: Any) -> None:
    x = torch.randn(4, 4).requires_grad_()
    there = distribute_tensor(x.detach(), two, [Replicate()]).to_local().requires_grad_()
    whole(lambda x: x.sin().pow(2).sum())(there).backward()
    x.sin().pow(2).sum().backward()
    same(there.grad, x.grad)  # type: ignore[arg-type]


WITH_HOSTS = {
    "sum": lambda z, t, n: z + t,
    "columns": lambda z, t, n: torch.where(t[:, :1] > 3, z, t[:, :1] * 2 + 1),
    "other results": lambda z, t, n: (z * t, t[1:] + 1, t.sum(), (z * t).sum(0)),
    "a number": lambda z, t, n: z * t.sum() + t,
    "counted": lambda z, t, n: (n.add_(1), z * n + t * n)[1],
}


@pytest.mark.parametrize(
    ("name", "mesh_name", "placements"),
    [
        ("sum", "2", (Shard(0),)),
        *(pytest.param(name, "2", (Shard(0),), marks=pytest.mark.slow) for name in WITH_HOSTS if name != "sum"),
        pytest.param("other results", "2", (Shard(1),), marks=pytest.mark.slow),
        pytest.param("other results", "3", (Shard(0),), marks=pytest.mark.slow),
        pytest.param("other results", "2x2", (Shard(0), Shard(1)), marks=pytest.mark.slow),
    ],
)
def test_a_hosts_tensor_is_each_ranks_own_part(mesh_of: Any, name: str, mesh_name: str, placements: Any) -> None:
    """A captured step with equal shards, with unequal shards, and with ranks that have no rows."""
    mesh, calculate = mesh_of(mesh_name), WITH_HOSTS[name]
    for rows in (4, 3, 1):
        torch._dynamo.reset()
        step = whole(calculate)
        x, there_count, count = torch.randn(rows, 7), torch.tensor(1.0), torch.tensor(1.0)
        for _ in range(3):
            host = torch.arange(rows * 7.0).view(rows, 7) + torch.rand(())
            there = distribute_tensor(x, mesh, placements).requires_grad_()
            here = x.clone().requires_grad_()
            found, expected = step(there, host, there_count), calculate(here, host, count)
            for one, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
                same(one, other)
            same(_gradient(found, there), _gradient(expected, here))
        assert there_count.item() == count.item()


def _gradient(results: Any, of: torch.Tensor) -> torch.Tensor:
    parts = [each.sum() for each in pytree.tree_leaves(results) if each.requires_grad]
    return torch.autograd.grad(sum(parts[1:], start=parts[0]), of)[0]


@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("words", [8, 19])
def test_embeddings_of_a_hosts_words(two: Any, words: int, inductor: bool) -> None:
    reference = nn.Embedding(words, 4)
    style = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    model = parallelize_module(copy.deepcopy(reference), two, style)
    host = torch.tensor([0, 3, 7, words - 1])
    found, expected = captured(model, inductor)(host), reference(host)
    same(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    same(model.weight.grad, reference.weight.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "rate", [pytest.param(0.1, marks=pytest.mark.slow), torch.tensor(0.1)], ids=["a number", "a tensor"]
)
def test_gradients_are_clipped_and_the_rate_follows_a_schedule(two: Any, rate: Any) -> None:
    """Clipping is a separate graph between backward and optimizer. A rate that is a number is traced for each value."""
    ours, reference = two_layers(two)
    x = torch.randn(8, 16)
    there = distribute_tensor(x, two, [Replicate()]).to_local()

    def trained(model: nn.Module, wrap: Any) -> Callable[[torch.Tensor], Any]:
        start = rate.clone() if isinstance(rate, torch.Tensor) else rate
        optimizer = torch.optim.SGD(model.parameters(), lr=start, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i))

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = (model(x) - x).square().mean() * 100
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        compiled = wrap(step)

        def run(x: torch.Tensor) -> Any:
            loss = compiled(x)
            schedule.step()
            return loss

        return run

    mine, theirs = trained(ours, captured), trained(reference, lambda step: step)
    counts = []
    for _ in range(5):
        losses: list[Any] = []
        counts.append(records(two, lambda: losses.append(mine(there))))  # noqa: B023
        same(losses[0], theirs(x))
    assert len(set(counts[2:])) == 1 and counts[-1] <= 6, counts
    for one, other in zip(ours.parameters(), reference.parameters(), strict=True):
        same(one, other)


class Attends(nn.Module):
    """Attention in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(16, 16), nn.Linear(16, 16)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (-1, 4)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._inner, x, use_reentrant=False)  # type: ignore[no-any-return]


def test_a_checkpoint_around_attention(two: Any) -> None:
    """torch marks attention as random even if it draws nothing."""
    reference = Attends()
    ours = parallelize_module(copy.deepcopy(reference), two, {"q": ColwiseParallel(), "o": RowwiseParallel()})
    x = torch.randn(2, 5, 16)
    there = distribute_tensor(x, two, [Replicate()]).to_local()

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    compiled, losses, counts = captured(step), [], []
    for _ in range(3):
        ours.zero_grad()
        counts.append(records(two, lambda: losses.append(compiled(ours, there))))
    same(losses[-1], step(reference, x))
    assert len(set(counts)) == 1 and counts[0] <= 4, counts
    for one, other in zip(ours.parameters(), reference.parameters(), strict=True):
        same(one.grad, other.grad)  # type: ignore[arg-type]


def test_a_captured_step_has_no_second_derivative(mesh_of: Callable[[str], Any]) -> None:
    """The second derivative raises. Otherwise it would silently lack the part that the first gradient contributes."""
    x = distribute_tensor(torch.arange(1.0, 5), mesh_of("2"), [Shard(0)]).requires_grad_()
    step = torch.compile(lambda x: (x * x * x).sum(), backend="monarch", options={"inductor": False})
    [gradient] = torch.autograd.grad(step(x), x)
    same(gradient, 3 * torch.arange(1.0, 5) ** 2)
    with pytest.raises(RemoteTensorError, match="no second derivative"):
        torch.autograd.grad(step(x), x, create_graph=True)
    view = torch.compile(lambda x: (x * x).view(2, 2).t(), backend="monarch", options={"inductor": False})
    with pytest.raises(RemoteTensorError, match="no second derivative"):
        torch.autograd.grad(view(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("placements", [(Shard(2), Shard(1)), (Shard(1), Shard(2)), (Shard(2), Shard(2))], ids=str)
def test_a_result_that_is_a_view_of_shards_of_two_dimensions(mesh_of: Callable[[str], Any], placements: Any) -> None:
    """The trace has the order in which the mesh dimensions shard the result."""
    whole, weights = torch.randn(5, 4, 6), torch.randn(120)

    def program(x: Any) -> Any:
        doubled = x * 2
        return doubled, doubled.reshape(-1)

    step, alone = captured(program), whole.clone().requires_grad_()
    same(program(alone)[1], (whole * 2).view(-1))
    (program(alone)[1] * weights).sum().backward()
    for _ in range(2):
        ours = distribute_tensor(whole, mesh_of("2x2"), placements).requires_grad_()
        flat = step(ours)[1]
        same(flat, (whole * 2).view(-1))
        same(flat * 3, (whole * 6).view(-1))
        (flat * weights).sum().backward()
        same(ours.grad, alone.grad)


def test_an_empty_tensor_of_the_step_begins_a_cat(two: Any) -> None:
    """As at the start of a key-value cache, also sharded by heads."""

    def begin(x: Any, dim: int) -> Any:
        return torch.cat([torch.tensor([], dtype=x.dtype, device=x.device), x, x], dim) * 2

    x = torch.arange(24.0).view(2, 4, 3)
    for placement, dim in itertools.product((Replicate(), Shard(0), Shard(1), Shard(2)), range(-3, 3)):
        same(begin(distribute_tensor(x, two, [placement]), dim), begin(x, dim))
    for placement, dim in ((Shard(0), 0), (Shard(1), 2), (Shard(2), -1)):
        ours = distribute_tensor(x, two, [placement]).requires_grad_()
        found = whole(begin)(ours, dim)
        same(found, begin(x, dim))
        found.sum().backward()
        assert value(ours.grad).tolist() == torch.full_like(x, 4.0).tolist()


def test_a_constant_of_the_step_is_sharded_by_rank(two: Any) -> None:
    """FakeTensorMode evaluates constants of at most one element."""

    def between(x: Any) -> Any:
        return torch.cat([torch.tensor([[], []]), x], 1) + 1

    x = torch.arange(6.0).view(2, 3)
    same(whole(between)(distribute_tensor(x, two, [Shard(0)])), between(x))


@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "inductor"])
def test_grouped_mm_of_float32_in_a_captured_step(two: Any, inductor: bool, capfd: Any) -> None:
    a, b, offsets = torch.randn(8, 16), torch.randn(2, 16, 16), torch.tensor([3, 8], dtype=torch.int32)

    def experts(x: Any, y: Any) -> Any:
        return F.grouped_mm(x, y, offs=offsets) * 2

    x, y = distribute_tensor(a, two, [Replicate()]), distribute_tensor(b, two, [Shard(2)])
    same(captured(experts, inductor)(x, y), experts(a, b))
    assert "can't compile" not in capfd.readouterr().err, "Inductor on a worker takes float32, too"


OTHER_BACKENDS = """
import copy
import warnings
import torch
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from monarch_backend.actor import this_host
from monarch_backend.dtensor import RemoteTensor

seen = []
def custom(graph, inputs):
    seen.append(len(inputs))
    return graph.forward

@torch.compile(backend=custom)  # before there is a mesh
def double(x):
    return x * 2

with this_host().spawn_procs({"tp": 2}) as procs:
    mesh = procs.device_mesh("cpu")
    assert double(distribute_tensor(torch.ones(2), mesh, [Replicate()])).tolist() == [2, 2]
    assert seen == [1]
    for backend in BACKENDS:
        torch.manual_seed(0)
        alone = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        ours = parallelize_module(copy.deepcopy(alone), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        torch._dynamo.reset()
        x = torch.rand(6, 4)
        expected, found = alone(x), torch.compile(ours, backend=backend, fullgraph=True)(x)
        assert isinstance(found, RemoteTensor)
        torch.testing.assert_close(torch.tensor(found.tolist()), expected.detach())
        for each in (expected, found):
            each.square().sum().backward()
        gradient = torch.tensor(ours[0].weight.grad.full_tensor().tolist())
        torch.testing.assert_close(gradient, alone[0].weight.grad)
    if "inductor" in BACKENDS:
        assert torch.compile(lambda x: x * 2 + 1)(torch.ones(2)).tolist() == [3, 3], "a graph of this process's tensors"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.compile(ours, options={"max_autotune": True})(x)
        assert any("is not sent there" in str(each.message) for each in caught)
print("end")
"""


@pytest.mark.slow
@pytest.mark.parametrize("backends", ["'eager', 'aot_eager'", "'inductor', 'eager'"])
def test_other_backends_need_no_earlier_use_of_monarch(run_script: Callable[..., Any], backends: str) -> None:
    ended = run_script(OTHER_BACKENDS.replace("BACKENDS", f"({backends})"), patience=300)
    assert ended.out.endswith("end\n"), ended.out + ended.err


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_trace_for_another_backend_installs_what_it_needs(
    two: Any, monkeypatch: pytest.MonkeyPatch, fullgraph: bool
) -> None:
    installed: list[None] = []
    monkeypatch.setattr(trace_installation, "install", lambda: installed.append(None))
    x = distribute_tensor(torch.ones(2), two, [Replicate()])
    assert value(torch.compile(lambda x: x * 2, backend="eager", fullgraph=fullgraph)(x)).tolist() == [2, 2]
    assert installed


def test_inductor_compiles_on_the_workers(two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's default backend compiles on the workers, but its options are not sent."""
    compile_there = functools.partial(compile_backend.monarch, options={"inductor": False})  # inductor takes long
    monkeypatch.setattr(compile_backend, "monarch", compile_there)
    x = distribute_tensor(torch.ones(2), two, [Replicate()])
    before = compile_backend.statistics["calls"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = torch.compile(lambda x: x * 2 + 1, options={"max_autotune": True})(x)
    assert value(found).tolist() == [3, 3]
    assert compile_backend.statistics["calls"] == before + 1
    assert [str(each.message) for each in caught if "{'max_autotune': True} is not sent there" in str(each.message)]


class Layers(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(10, width), nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)))  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch warns about its treespecs
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_is_transformed_to_tensor_parallel(mesh_of: Callable[[str], Any], strict: bool) -> None:
    """torch makes a mesh of the program's first ranks, and traces each redistribution."""
    mesh_of("2")
    model, x = Layers(32).eval(), torch.randn(7, 10)
    plan = {"first": ColwiseParallel, "last": RowwiseParallel}
    with torch.inference_mode():
        exported = torch.export.export(model, (x,), strict=strict).run_decompositions()
        found = tensor_parallel_transformation(exported, 0, 2, "cpu", plan).module()(x)  # type: ignore[arg-type]
        same(found, model(x))
        uneven = torch.export.export(Layers(33).eval(), (x,), strict=strict).run_decompositions()
        with pytest.raises(
            RankDependentError, match=r"another result on each rank .*sizes that the number of ranks div"
        ):
            tensor_parallel_transformation(uneven, 0, 2, "cpu", plan)  # type: ignore[arg-type]


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(8, 12), nn.Dropout(0.5), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.first(x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["2", "3"])
def test_dropout_of_plain_shards_is_that_of_a_single_process(mesh_of: Callable[[str], Any], name: str) -> None:
    """Dropout between parallel layers with default layouts, forward and backward."""
    alone = Dropped()
    ours = parallelize_module(
        copy.deepcopy(alone), mesh_of(name), {"first": ColwiseParallel(), "last": RowwiseParallel()}
    )
    step, x = whole(ours), torch.ones(4, 8)
    for seed in range(2):
        for net in (alone, step):
            torch.manual_seed(seed)
            net(x).square().mean().backward()
        for mine, theirs in zip(ours.parameters(), alone.parameters(), strict=True):
            same(mine.grad, theirs.grad)  # type: ignore[arg-type]


def test_plain_shards_that_come_in_draw_their_part_of_the_whole(two: Any) -> None:
    """A captured step is traced for the origins of its inputs, and records the origins of its results."""
    step = captured(lambda x: (F.dropout(x + 1, 0.5), x * 2))
    x = torch.zeros(6, 4)
    for placement in (Shard(0), Shard(1), Replicate()):
        local = distribute_tensor(x, two, [placement]).to_local()
        torch.manual_seed(3)
        dropped, doubled = step(local)
        assert doubled._meta.origin == local._meta.origin
        torch.manual_seed(3)
        same(DTensor.from_local(dropped, two, [placement]), F.dropout(x + 1, 0.5))


def test_dropout_of_computed_shards_runs_in_eager_code(two: Any) -> None:
    """It is not known which elements of the whole a rank has. Eager code draws other numbers and warns."""

    def drop_columns(x: Any) -> Any:
        return F.dropout(x.to_local().flip(0), 0.5)

    x = distribute_tensor(torch.ones(16, 16), two, [Shard(0)])
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"(?s)computed from a DTensor's shards.*use_local_output"):
        whole(drop_columns)(x)
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="use_local_output=False"):
        dropped = captured(drop_columns)(x)
    one, other = value(DTensor.from_local(dropped, two, [Shard(0)])).chunk(2)
    assert not torch.equal(one, other)
    with pytest.raises(RemoteTensorError, match=r"computed from a DTensor's shards.*torch\.compiler\.disable"):
        captured(lambda x: F.dropout(x, 0.5))(x.to_local().flip(0))
