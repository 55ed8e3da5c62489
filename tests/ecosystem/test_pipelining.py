"""Pipeline schedules on two ranks: stages, losses and gradients over "monarch" equal "gloo" bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage

from tests.ecosystem.support import batch, learns, mlp, on_both
from tests.support.tiers import slow_except

STEPS, MICROBATCHES = 3, 4

# name -> number of stages on each rank
SCHEDULES = {
    "ScheduleGPipe": 1,
    "Schedule1F1B": 1,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleLoopedBFS": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
}


def _parts(count: int) -> list[nn.Sequential]:
    return [nn.Sequential(*mlp(layers=8)[i * 16 // count : (i + 1) * 16 // count]) for i in range(count)]


def _stage_numbers(rank: int, ranks: int, each: int, schedule: str) -> list[int]:
    if schedule == "ScheduleZBVZeroBubble":
        return [rank, 2 * ranks - 1 - rank]  # first ascending, then descending over the ranks, like a V
    return [rank + ranks * i for i in range(each)]


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def _piped(rank: int, name: str, subgroup: bool) -> Any:
    ranks, each = 2, SCHEDULES[name]
    group = dist.group.WORLD
    if subgroup:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        group, rank = mesh.get_group("pp"), mesh.get_local_rank("pp")
    count = ranks * each
    numbers = _stage_numbers(rank, ranks, each, name)
    parts = _parts(count)
    modules = [parts[number] for number in numbers]
    stages = [
        PipelineStage(module, number, count, torch.device("cpu"), group=group)
        for module, number in zip(modules, numbers, strict=True)
    ]
    schedule: Any = getattr(pipelining, name)(stages if each > 1 else stages[0], MICROBATCHES, loss_fn=_loss)
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.5)
    losses, grads, output = [], [], None
    for _ in range(STEPS):
        x, y = batch(0, rows=8)
        mine: list[torch.Tensor] = []
        out = schedule.step(
            *([x] if 0 in numbers else []), **({"target": y, "losses": mine} if count - 1 in numbers else {})
        )
        losses += [torch.stack(mine).mean().item()] if mine else []
        output = out if out is not None else output
        grads = [p.grad.clone() for module in modules for p in module.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "output": output, "grads": grads, "state": [m.state_dict() for m in modules]}


def _whole(rank: int) -> list[float]:
    model = mlp(layers=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(STEPS):
        x, y = batch(0, rows=8)
        loss = _loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", slow_except(SCHEDULES, "Schedule1F1B", "ScheduleZBVZeroBubble"))
def test_schedule(name: str) -> None:
    results = on_both(_piped, 2, name, False)
    whole = on_both(_whole, 1)[0]
    losses = [result["losses"] for result in results if result["losses"]]
    assert len(losses) == 1 and learns(losses[0])
    assert losses[0] == pytest.approx(whole, rel=1e-4), "not the model that was cut into stages"


@pytest.mark.parametrize("name", slow_except(["ScheduleGPipe", "ScheduleInterleaved1F1B"], "ScheduleGPipe"))
def test_schedule_in_subgroups(name: str) -> None:
    """Two pipelines of two ranks side by side: stages are numbered by the ranks of their group, not of the world."""
    results = on_both(_piped, 4, name, True)
    assert results[0]["state"] == results[2]["state"] and results[1] == results[3]
    assert learns(results[1]["losses"])
