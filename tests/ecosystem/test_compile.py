"""torch.compile over "monarch" as over "gloo", bit by bit: compiled collectives, compiled steps, DDP's own pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.ecosystem.support import batch, learns, mlp, on_both

COMPILERS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
# inductor and functorch still use parts of torch that torch itself deprecated.
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]


def _collectives(rank: int, compiler: str) -> Any:
    def functional(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        group = dist.group.WORLD
        summed = fc.all_reduce(x, "sum", group)
        gathered = fc.all_gather_tensor(x * 2, 0, group)
        scattered = fc.reduce_scatter_tensor(gathered, "sum", 0, group)
        exchanged = fc.all_to_all_single(gathered, None, None, group)
        return summed + 1, gathered.relu(), scattered - x, exchanged * 3

    def in_place(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        dist.all_reduce(y)
        out = y.new_empty(2 * y.shape[0], *y.shape[1:])
        getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(out, y)
        return out.cos()

    x = torch.linspace(-1, 1, 8).view(4, 2) * (rank + 1)
    compiled = [torch.compile(f, backend=compiler, fullgraph=True)(x) for f in (functional, in_place)]
    eager = [f(x) for f in (functional, in_place)]
    if compiler == "aot_eager":
        for ours, plain in zip(compiled[0], eager[0], strict=True):
            assert torch.equal(ours, plain)
        assert torch.equal(compiled[1], eager[1])
    return compiled


@pytest.mark.parametrize("compiler", COMPILERS)
def test_collectives_in_one_graph(compiler: str) -> None:
    on_both(_collectives, 2, compiler)


def _train(rank: int, compiler: str, wrap: bool) -> Any:
    model: Any = mlp()
    if wrap:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(model(x), y)
        # The mean over ranks inside the graph; its gradient is this rank's share.
        return loss if wrap else fc.all_reduce(loss / dist.get_world_size(), "sum", dist.group.WORLD)

    step = torch.compile(model if wrap else loss_of, backend=compiler, fullgraph=not wrap)
    losses = []
    for index in range(4):
        x, y = batch(index % 2, rank)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(step(x), y) if wrap else step(x, y)
        if wrap:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if wrap:
        assert learns(losses[::2])
    return losses, list(model.parameters())


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("wrap", [True, False], ids=["ddp", "functional"])
def test_a_compiled_step(compiler: str, wrap: bool) -> None:
    on_both(_train, 2, compiler, wrap)
