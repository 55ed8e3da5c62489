"""Controller programs with DTensors. Worker processes import this module, so it does not import pytest."""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import monarch_backend.actor as ma
from monarch_backend.actor import SupervisionError
from monarch_backend.dtensor import MeshClosedError, move, run
from monarch_backend.hosts import attach_to_workers
from tests.actor.support import Faults
from tests.hosts.support import PATIENCE

BOUNDS = {"heartbeat": 0.3, "silence": 6.0}  # workers train on all cores, which the hosts share


class Modules(ma.Actor):
    """Actor that tells which modules its process has imported."""

    @ma.endpoint
    def has(self, name: str) -> bool:
        return name in sys.modules


def _pid() -> int:
    return os.getpid()


def _trained(model: nn.Module, x: Any, steps: int) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))


def trains(workers: Sequence[str]) -> None:
    """Run operations, FSDP between hosts with tensor parallelism inside each, and a transfer to a second mesh."""
    hosts = attach_to_workers(workers[:2], **BOUNDS)
    procs = hosts.spawn_procs({"gpus": 2})
    has = procs.spawn("modules", Modules).has.call("torch.distributed.tensor").get(PATIENCE)
    assert all(there for _, there in has.items()), "a host's fork server has it, and no worker imports it by itself"
    mesh = procs.device_mesh("cpu")
    assert mesh.mesh_dim_names == ("hosts", "gpus") and mesh.shape == (2, 2), mesh
    whole = torch.arange(35.0).view(7, 5).sin()
    x = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    torch.testing.assert_close((x @ x.T).full_tensor().cpu(), whole @ whole.T)
    torch.testing.assert_close(
        x.redistribute(placements=[Replicate(), Shard(0)]).sum(0).full_tensor().cpu(), whole.sum(0)
    )
    model, batch = _model(), torch.linspace(-1, 1, 48).view(8, 6)
    expected = [loss.item() for loss in _trained(copy.deepcopy(model), batch, 3)]
    parallel: Any = parallelize_module(model, mesh["gpus"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(parallel, mesh=mesh["hosts"])
    losses = [loss.item() for loss in _trained(parallel, batch, 3)]
    torch.testing.assert_close(losses, expected)
    pids = {pid for _, pid in run(mesh, _pid).get(PATIENCE).items()}
    assert len(pids) == 4 and os.getpid() not in pids, pids
    others = hosts.slice(hosts=1).spawn_procs({"gpus": 1}, name="others")
    moved = move(x * 2, others.device_mesh("cpu"))
    torch.testing.assert_close(moved.full_tensor().cpu(), whole * 2)
    others.stop().get(PATIENCE)
    procs.stop().get(PATIENCE)


def _failure_of(read: Callable[[], object]) -> Exception:
    """Repeat ``read`` until it fails, and return the error."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            read()
        except (SupervisionError, MeshClosedError) as error:
            return error
    raise AssertionError("nobody has noticed")


def loses_a_host(workers: Sequence[str], daemon: int) -> None:
    """A waiting read raises an error that names the lost host. The mesh of the other host continues."""
    faults = Faults()
    ma.unhandled_fault_hook = faults
    hosts = attach_to_workers(workers[:2], **BOUNDS)
    procs = hosts.spawn_procs({"gpus": 1}, name="victims")
    left = hosts.slice(hosts=0).spawn_procs({"gpus": 1}, name="left")
    x = distribute_tensor(torch.ones(4), procs.device_mesh("cpu"), [Shard(0), Replicate()])
    kept = distribute_tensor(torch.ones(4), left.device_mesh("cpu"), [Shard(0)])
    assert x.sum().item() == 4 == kept.sum().item()
    begun = time.monotonic()
    os.kill(daemon, 9)
    error = _failure_of(lambda: (x + 1).sum().item())
    print(f"measured: {time.monotonic() - begun:.2f} s: {str(error)[:200]}")
    assert "victims" in str(error), error
    faults.next()
    assert (kept * 3).sum().item() == 12
    left.stop().get(PATIENCE)
    procs.stop().get(PATIENCE)
