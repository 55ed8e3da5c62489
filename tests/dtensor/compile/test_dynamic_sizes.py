"""Captured steps with other sizes or other shardings have the values of a single process at each call.

After a second size dynamo uses symbolic sizes, and some code cannot be traced with these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from monarch_backend.dtensor._compile import compile_backend
from tests.dtensor.values import same
from tests.support.tiers import slow_except

CALLS = ((6, Shard(0)), (9, Shard(0)), (12, Shard(0)), (7, Shard(0)), (6, Shard(1)), (9, Replicate()))
"""Rows and placements on three ranks: one size, two more sizes, unequal shards, and other placements."""
WEIGHT = torch.randn(6, 6, 3, generator=torch.Generator().manual_seed(7))


OFTEN: dict[str, Callable[[Any, Any], Any]] = {
    "dropout": lambda x, _: F.dropout(x, 0.5),
    "conv1d": lambda x, w: F.conv1d(x, w, padding=1),
    "redistribute": lambda x, _: x.redistribute(placements=[Shard(1)]) * 2 if isinstance(x, DTensor) else x * 2,
    "group_norm": lambda x, w: F.group_norm(x, 2, w[:, 0, 0], w[0, :, 0]),
    "view": lambda x, _: x.view(x.shape[0] * 6, 4) * 1,
}
SELDOM: dict[str, Callable[[Any, Any], Any]] = {
    "rand_like": lambda x, _: torch.rand_like(x) * x,
    "normal_": lambda x, _: torch.empty_like(x).normal_() + x,
    "bernoulli": lambda x, _: torch.bernoulli(x.sigmoid()) * x,
    "dropout1d": lambda x, _: F.dropout1d(x, 0.5),
    "alpha_dropout": lambda x, _: F.alpha_dropout(x, 0.5, training=True),
    "batch_norm": lambda x, _: F.batch_norm(x, None, None, training=True),
    "layer_norm": lambda x, _: F.layer_norm(x, (6, 4)),
    "prelu": lambda x, w: F.prelu(x, w[0, :, 0]),
    "embedding": lambda x, w: F.embedding(x.detach().long().abs() % 6, w[0]),
    "cross_entropy": lambda x, _: F.cross_entropy(x.flatten(1), x.detach().argmax(1)[:, 0]),
    "attention": lambda x, _: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "matmul": lambda x, _: x.flatten(1) @ x.flatten(1).t(),
    "rows": lambda x, _: x[1:],
    "flatten": lambda x, _: x.flatten(0, 1) * 1,
    "chunk": lambda x, _: x.chunk(3, 1)[1] * 2,
    "cat": lambda x, _: torch.cat([x, x], 1),
    "sum": lambda x, _: x.sum(0),
    "cumsum": lambda x, _: x.cumsum(0),
    "sort": lambda x, _: x.sort(1)[0],
    "gather": lambda x, _: x.gather(1, x.argsort(1)),
    "new_zeros": lambda x, _: x.new_zeros(x.shape[0], 6, 4) + x,
    "roll": lambda x, _: x.roll(1, 0),
    "in place": lambda x, _: x.clone().add_(1),
}


@pytest.mark.parametrize("name", slow_except([*OFTEN, *SELDOM], "view", "redistribute"))
def test_captured_functions_accept_other_sizes(mesh_of: Callable[[str], Any], name: str) -> None:
    function = {**OFTEN, **SELDOM}[name]

    def program(x: Any) -> Any:
        return function(x, weight if isinstance(x, DTensor) else WEIGHT)

    torch._dynamo.reset()
    weight = distribute_tensor(WEIGHT, mesh_of("3"), [Replicate()])
    captured = torch.compile(program, backend="monarch", options={"inductor": False})
    for rows, placement in CALLS:
        x = torch.randn(rows, 6, 4)
        ours, alone = distribute_tensor(x, mesh_of("3"), [placement]).requires_grad_(), x.clone().requires_grad_()
        calls = compile_backend.statistics["calls"]
        results = []
        for call, given in ((captured, ours), (program, alone)):
            torch.manual_seed(1)
            results.append(call(given))
            if results[-1].requires_grad:
                results[-1].square().sum().backward()
        assert compile_backend.statistics["calls"] > calls, f"eagerly, of {rows} rows, {placement}"
        same(*results, 1e-4)
        assert (ours.grad is None) == (alone.grad is None)
        if ours.grad is not None:
            same(ours.grad, alone.grad, 1e-3)  # type: ignore[arg-type]
    torch._dynamo.reset()


def test_captured_function_accepts_other_placements_and_sizes(mesh_of: Callable[[str], Any]) -> None:
    """The second call has the size of the first one, but smaller shards."""
    torch._dynamo.reset()
    captured = torch.compile(lambda x: x + x.sin(), backend="monarch", options={"inductor": False})
    for rows, placement in ((4, Replicate()), (4, Shard(0)), (6, Shard(0)), (3, Shard(0)), (4, Shard(1))):
        x = torch.randn(rows, 6)
        found = captured(distribute_tensor(x, mesh_of("2"), [placement]))
        assert found.shape == x.shape
        same(found, x + x.sin())


def test_gradient_across_a_graph_break_matches_torch(mesh_of: Callable[[str], Any]) -> None:
    """After the break the input has an autograd history and a symbolic size."""
    torch._dynamo.reset()

    def program(x: Any) -> Any:
        y = x.sin()
        torch._dynamo.graph_break()
        return F.dropout(y, 0.5) * x

    captured = torch.compile(program, backend="monarch", options={"inductor": False})
    for rows in (4, 6, 8, 5):
        x = torch.randn(rows, 6)
        ours, alone = distribute_tensor(x, mesh_of("2"), [Shard(0)]).requires_grad_(), x.clone().requires_grad_()
        for call, given in ((captured, ours), (program, alone)):
            torch.manual_seed(1)
            call(given).square().sum().backward()
        same(ours.grad, alone.grad)  # type: ignore[arg-type]
