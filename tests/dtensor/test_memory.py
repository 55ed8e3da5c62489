"""What workers hold is what the program can still reach; a step that was done before teaches nobody anything new."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from monarch_backend.dtensor import _dispatch
from tests.dtensor.conftest import workers_of


def held(mesh: Any) -> list[int]:
    """Tensors on each worker, after everything that was sent."""
    gc.collect()
    workers = workers_of(mesh)
    workers.synchronize()
    return workers.ask("count")  # type: ignore[no-any-return]


def test_an_unreachable_tensor_is_gone_with_the_next_batch(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2")
    before = held(mesh)
    x = distribute_tensor(torch.ones(8), mesh, [Shard(0)])
    y = x * 2
    assert held(mesh) == [n + 2 for n in before]
    del x
    assert held(mesh) == [n + 1 for n in before]
    del y
    assert held(mesh) == before


def train(mesh: Any, steps: int) -> Callable[[int], None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    parallelize_module(copy.deepcopy(model), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    x = distribute_tensor(torch.randn(4, 16), mesh, [Replicate()]).to_local()

    def run(count: int) -> None:
        for _ in range(count):
            loss = (model(x) - x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    return run


def test_a_thousand_steps_hold_no_more_than_three_and_learn_no_signature(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2")
    run = train(mesh, 1003)
    run(3)
    tensors, misses, sites = held(mesh), _dispatch.statistics["misses"], len(workers_of(mesh)._by_rank)
    run(1000)
    assert held(mesh) == tensors
    assert _dispatch.statistics["misses"] == misses
    assert len(workers_of(mesh)._by_rank) == sites


def test_messages_of_a_step_are_bytes_not_pickles(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2")
    run = train(mesh, 100)
    run(3)
    stream = workers_of(mesh).stream
    stream.flush()
    before = stream.nbytes
    run(10)
    stream.flush()
    operations = 10 * 60
    assert stream.nbytes - before < operations * 40, "a record has some small integers"
