"""Actors that run ordinary torch.distributed code, for test_process_groups.py.

Worker processes import this module, so it does not import pytest.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from monarch_backend.actor import Actor, Port, current_rank, endpoint

WIDTH = 16
STEPS = 3


def model() -> nn.Sequential:
    """Return a model with the same parameters on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, 1))


def batch(step: int, ranks: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the samples of these ranks in this step, 6 rows per rank."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(6 * 8, WIDTH, generator=generator)
    rows = slice(6 * ranks.start, 6 * ranks.stop)
    return x[rows], x.square().mean(1, keepdim=True)[rows]


def train(network: Any, ranks: range, steps: int = STEPS) -> list[float]:
    """Train the network. Return the loss of each step."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        x, y = batch(step, ranks)
        loss = nn.functional.mse_loss(network(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Trainer(Actor):
    """Actor that is one rank of a process group."""

    @endpoint
    def world(self) -> dict[str, Any]:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return {
            "rank": dist.get_rank(),
            "size": dist.get_world_size(),
            "backend": dist.get_backend(),
            "actor": current_rank().rank,
            "environment": {name: os.environ[name] for name in names},
        }

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def is_initialized(self) -> bool:
        return dist.is_initialized()

    @endpoint
    def all_reduce(self, value: float, times: int = 1) -> list[float]:
        """All-reduce rank + value over the group ``times`` times. Return the sums."""
        sums = []
        for _ in range(times):
            x = torch.full((1000,), float(dist.get_rank() + value))
            dist.all_reduce(x)
            assert bool((x == x[0]).all())
            sums.append(x[0].item())
        return sums

    @endpoint
    def all_reduce_for_ever(self, begun: Port[int]) -> None:
        """Run all-reduces until one raises."""
        x = torch.ones(4)
        dist.all_reduce(x)
        begun.send(os.getpid())
        while True:
            dist.all_reduce(x)
            time.sleep(0.001)

    @endpoint
    def barrier(self, begun: Port[int]) -> None:
        begun.send(os.getpid())
        dist.barrier()

    @endpoint
    def ddp(self) -> tuple[list[float], dict[str, torch.Tensor]]:
        network = nn.parallel.DistributedDataParallel(model())
        rank = dist.get_rank()
        losses = train(network, range(rank, rank + 1))
        return losses, network.module.state_dict()

    @endpoint
    def fsdp(self) -> tuple[list[float], dict[str, torch.Tensor]]:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor

        network = model()
        for layer in network:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(network)
        rank = dist.get_rank()
        losses = train(network, range(rank, rank + 1))
        state = network.state_dict()
        assert all(isinstance(value, DTensor) for value in state.values())
        return losses, {name: value.full_tensor() for name, value in state.items()}

    @endpoint
    def subgroup(self, ranks: list[int]) -> list[float]:
        """All-reduce in a group that the endpoint creates inside the default group."""
        group = dist.new_group(ranks)
        x = torch.tensor([float(dist.get_rank())])
        if dist.get_rank() in ranks:
            dist.all_reduce(x, group=group)
        return x.tolist()
