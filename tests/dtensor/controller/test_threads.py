"""Several controller threads issue operations, and each gets the results that it gets alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

THREADS = 4

pytestmark = pytest.mark.usefixtures("frequent_thread_switches")


def at_once(work: Any) -> list[Any]:
    """Return the results of ``work(thread)`` on several threads that start at the same time."""
    together = threading.Barrier(THREADS)

    def begin(thread: int) -> Any:
        together.wait()
        return work(thread)

    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(begin, range(THREADS)))


def test_threads_run_new_operations_at_the_same_time(mesh_of: Any) -> None:
    """Each thread has different shapes, so the threads meet new operations at the same time."""
    mesh = mesh_of("2")

    def calculated(x: Any, step: int) -> Any:
        y = ((x + step).relu().T.contiguous().T * 2).view(x.shape)
        return torch.cat([y, x[:, : step % 3 + 1]], 1).sum() + (y.T @ y).softmax(0).sum()

    def work(thread: int) -> list[float]:
        values = []
        for step in range(3):
            x = torch.linspace(0, 1, 4 * (20 * thread + step + 3)).view(4, -1)
            values.append((calculated(distribute_tensor(x, mesh, [Shard(0)]), step), calculated(x, step)))
        return [(ours.item(), alone.item()) for ours, alone in values]  # type: ignore[misc]

    for values in at_once(work):
        for ours, alone in values:
            assert ours == pytest.approx(alone, rel=1e-5)


def test_models_that_are_trained_beside_each_other(mesh_of: Any) -> None:
    mesh = mesh_of("2")

    def trained(thread: int, *, distributed: bool) -> list[float]:
        model = nn.Sequential(nn.Linear(3 + thread, 6), nn.ReLU(), nn.Linear(6, 2))
        for number, parameter in enumerate(model.parameters()):
            values = torch.linspace(-1, 1, parameter.numel()).view(parameter.shape)
            parameter.data.copy_(values * (number + 1) / (thread + 1))
        x = torch.linspace(-1, 1, 8 * (3 + thread)).view(8, -1)
        if distributed:
            model, x = distribute_module(model, mesh), distribute_tensor(x, mesh, [Shard(0)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [loss.item() for loss in losses]

    for thread, losses in enumerate(at_once(lambda thread: trained(thread, distributed=True))):
        assert losses == pytest.approx(trained(thread, distributed=False), rel=1e-4)
