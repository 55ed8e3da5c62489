"""Training step of `collectives.py --ddp`: 29 M parameters, with DistributedDataParallel or without."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def training_step(kind: str) -> Callable[[], object]:
    """Return a training step: "ddp" uses the default process group, "local" runs without communication."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(1024, 3584), nn.ReLU(), nn.Linear(3584, 1024)) for _ in range(4)]
    model: nn.Module = nn.Sequential(*blocks)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(16, 1024)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step
