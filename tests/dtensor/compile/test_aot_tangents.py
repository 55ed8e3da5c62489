"""Backward of a captured step with several results when only some of them have gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from monarch_backend.dtensor import put_module
from monarch_backend.dtensor._patches.semantics import aot_tangents
from tests.dtensor.conftest import LAST_ROW
from tests.dtensor.values import same, value

WHOLE = torch.arange(30.0).view(5, 6) / 10


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def captured(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="monarch", options={"inductor": False}, **options)


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "logits and a loss": lambda x: ((y := x * 2), y.square().mean()),
    "views": lambda x: ((y := x * 2), y.t(), y.view(-1)),
    "views of what is given": lambda x: (x[1:], x * 3, x.t()),
    "a sum": lambda x: (x.sum(0), x.square().sum()),
}
INPUTS: dict[str, Callable[[Any], Any]] = {
    "uneven rows": lambda mesh_of: distribute_tensor(WHOLE, mesh_of("2x2"), [Shard(0), Replicate()]),
    "columns of a part": lambda mesh_of: distribute_tensor(WHOLE, mesh_of("2x2")["tp"], [Shard(1)]),
    "of a slice": lambda mesh_of: distribute_tensor(WHOLE, mesh_of(LAST_ROW), [Shard(0)]),
    "a plain tensor": lambda mesh_of: distribute_tensor(WHOLE, mesh_of("2"), [Replicate()]).to_local(),
}


@pytest.mark.slow
@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_of_the_results_is_enough(mesh_of: Callable[[str], Any], name: str, given: str) -> None:
    program, step = PROGRAMS[name], captured(PROGRAMS[name], fullgraph=True)
    for at in range(len(program(WHOLE))):
        for _ in range(2):  # the second time with known signatures
            ours, alone = INPUTS[given](mesh_of).detach().requires_grad_(), WHOLE.clone().requires_grad_()
            for way, x in ((step, ours), (program, alone)):
                way(x)[at].sum().backward()
            same(ours.grad, alone.grad)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_backward_after_a_graph_break_matches_torch(mesh_of: Callable[[str], Any]) -> None:
    """The first graph has results for which the second graph computes no gradient."""

    def program(x: Any, y: Any) -> Any:
        hidden, other = x * 2, y.sigmoid()
        torch._dynamo.graph_break()
        return hidden.square().mean(), other.argmax(0), hidden.view(-1), hidden * 3

    for at, expected in (
        (0, 8 * WHOLE / WHOLE.numel()),
        (2, torch.full_like(WHOLE, 2)),
        (3, torch.full_like(WHOLE, 6)),
    ):
        ours = [distribute_tensor(WHOLE, mesh_of("2"), [Shard(1)]).requires_grad_() for _ in range(2)]
        captured(program)(*ours)[at].sum().backward()
        same(ours[0].grad, expected)
        assert ours[1].grad is None or not value(ours[1].grad).any()


@pytest.mark.parametrize("at", [0, 1])
def test_a_gradient_of_the_host_goes_there(mesh_of: Callable[[str], Any], at: int) -> None:
    """One result gets the host's gradient, and the others get none."""
    x = distribute_tensor(WHOLE, mesh_of("2"), [Shard(0)]).requires_grad_()
    given = torch.randn(5, 6)
    captured(lambda x: (x * 2, x * 3, x * 5), fullgraph=True)(x)[at].backward(given)
    same(x.grad, given * (2 + at))


def test_two_meshes_in_one_step(mesh_of: Callable[[str], Any]) -> None:
    """Both meshes are of one set of processes. Each gradient goes to the mesh of its input."""
    of_all, of_part = INPUTS["uneven rows"](mesh_of), INPUTS["columns of a part"](mesh_of)
    step = captured(lambda x, y: (x * 2, y * 3), fullgraph=True)
    for at in range(2):
        both = of_all.detach().requires_grad_(), of_part.detach().requires_grad_()
        step(*both)[at].sum().backward()
        same(both[at].grad, torch.full_like(WHOLE, 2.0 + at))
        assert both[1 - at].grad is None or not value(both[1 - at].grad).any()


def test_unused_tangents_are_not_materialized(mesh_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A tangent may be as large as the logits here."""
    monkeypatch.setattr(aot_tangents, "distribute_tensor", None)
    monkeypatch.setattr(aot_tangents, "SAMPLE_SIZE", 8)
    looked: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "any", lambda self, *_: looked.append(self.numel()))
    x = distribute_tensor(WHOLE, mesh_of("2"), [Shard(0)]).requires_grad_()
    table = distribute_tensor(torch.randn(6, 50), mesh_of("2"), [Replicate()])

    def program(x: Any) -> Any:
        logits = x @ table
        return logits, F.cross_entropy(logits, torch.arange(5))

    for _ in range(2):
        captured(program)(x)[1].backward()
    assert looked == [8, 8]
    alone = WHOLE.clone().requires_grad_()
    F.cross_entropy(alone @ value(table), torch.arange(5)).backward()
    assert alone.grad is not None
    same(x.grad, 2 * alone.grad)


def test_a_gradient_that_a_later_hook_gives(mesh_of: Callable[[str], Any]) -> None:
    x = distribute_tensor(WHOLE, mesh_of("2"), [Shard(0)]).requires_grad_()
    results = captured(lambda x: (x * 2, x * 3))(x)
    results[0].grad_fn.register_prehook(lambda gradients: (torch.ones(5, 6), gradients[1]))
    results[0].sum().backward()
    same(x.grad, torch.full_like(WHOLE, 2))


@pytest.mark.parametrize("where", ["a hook", "a saved tensor"])
def test_a_backward_inside_another(mesh_of: Callable[[str], Any], where: str) -> None:
    x, y = (distribute_tensor(WHOLE, mesh_of("2"), [Shard(0)]).requires_grad_() for _ in range(2))
    inner = captured(lambda x: (x * 3, x.cos()))(y)[0].sum()
    done: list[bool] = []

    def once(value: Any) -> Any:
        if not done:
            done.append(True)
            inner.backward()
        return value

    with torch.autograd.graph.saved_tensors_hooks(
        lambda each: each, once if where == "a saved tensor" else lambda e: e
    ):
        results = captured(lambda x: (x.sin(), x.exp()))(x)
    if where == "a hook":
        results[0].grad_fn.register_prehook(lambda gradients: once(None))
    results[0].sum().backward()
    same(x.grad, WHOLE.cos())
    same(y.grad, torch.full_like(WHOLE, 3))


def test_a_backward_after_one_that_raised(mesh_of: Callable[[str], Any]) -> None:
    x = distribute_tensor(WHOLE, mesh_of("2"), [Shard(0)]).requires_grad_()
    first, second = (captured(lambda x: (x * 2, x * 3))(x) for _ in range(2))
    first[0].grad_fn.register_prehook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        first[0].sum().backward()
    second[1].sum().backward()
    same(x.grad, torch.full_like(WHOLE, 3))


def test_a_plain_result_that_becomes_a_part_of_a_dtensor(mesh_of: Callable[[str], Any]) -> None:
    """A DTensor operation on both tensors gives the plain result a DTensor as gradient."""
    net, weight = torch.nn.Linear(6, 6), torch.randn(6, 4)
    ours = put_module(copy.deepcopy(net), mesh_of("2"))
    placed = distribute_tensor(weight, mesh_of("2"), [Shard(1)])
    step = captured(lambda x: ours(x).tanh())
    (step(WHOLE) @ placed).square().sum().backward()
    (net(WHOLE).tanh() @ weight).square().sum().backward()
    for mine, theirs in zip(ours.parameters(), net.parameters(), strict=True):
        same(mine.grad, theirs.grad, 1e-4)  # type: ignore[arg-type]
