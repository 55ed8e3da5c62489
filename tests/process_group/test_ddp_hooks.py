"""DistributedDataParallel with its C++ hooks: values of Gloo, and errors that name the failed rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from monarch_backend import RankFailedError
from tests.support.ranks import RankFailedError as DeadRank
from tests.support.ranks import run_ranks

WIDTH, LAYERS = 32, 4
BUCKET_MB = 0.001
"""Smaller than a layer's weight, so that each layer has a bucket of its own."""

BUILTIN = {"all_reduce": None, "fp16": dist.BuiltinCommHookType.FP16_COMPRESS}


class _InBackward(torch.autograd.Function):
    """Identity that calls a function in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], object]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grad, None


class _Model(nn.Module):
    """Linear layers; ``first`` is called when the backward pass begins."""

    def __init__(self, first: Callable[[], object]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        result: Tensor = _InBackward.apply(x, self.first)
        return result


def _wrapped(first: Callable[[], object], hook: str, **options: Any) -> Any:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(_Model(first), bucket_cap_mb=BUCKET_MB, **options)
    if BUILTIN[hook] is not None:
        ddp._register_builtin_comm_hook(BUILTIN[hook])
    return ddp


def _batch(rank: int, step: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def _nothing() -> None:
    pass


def _train(rank: int, hook: str, options: dict[str, Any]) -> list[float]:
    ddp = _wrapped(_nothing, hook, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        loss = ddp(_batch(rank, step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [*losses, *(p.sum().item() for p in ddp.parameters())]


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}], ids=str)
@pytest.mark.parametrize("hook", BUILTIN)
def test_training_gives_the_values_of_gloo(hook: str, options: dict[str, Any]) -> None:
    ours = run_ranks(_train, 2, hook, options)
    gloo = run_ranks(_train, 2, hook, options, backend="gloo")
    assert ours == gloo


def _peer_dies(rank: int, hook: str, static_graph: bool) -> None:
    def first() -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    ddp = _wrapped(first, hook, static_graph=static_graph)
    with pytest.raises(RankFailedError, match=r"^rank 1 \(host .*, pid \d+\) killed by signal 9"):
        ddp(_batch(rank, 0)).sum().backward()


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("hook", BUILTIN)
def test_failed_rank_in_the_backward_pass_is_named_by_the_error(hook: str, static_graph: bool) -> None:
    with pytest.raises(DeadRank, match="rank 1:\nthe rank died without an answer") as caught:
        run_ranks(_peer_dies, 2, hook, static_graph)
    assert "--- rank 0" not in str(caught.value)
