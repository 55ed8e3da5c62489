"""Trainers and generators of test_sharded_state_actors.py. Worker processes import this module, so it has no pytest."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from monarch_backend._core.torch_version import torch_version
from monarch_backend.actor import Actor, context, endpoint
from monarch_backend.rdma import ShardedState, StatePart

# torch 2.9: full_tensor() mixes up the rows of 10 over 2 ranks of tensor parallelism and 2 of FSDP2. Shards are right.
WORDS = 10 if torch_version() >= (2, 13) else 12


class Model(nn.Module):
    """A model whose weights are sharded in every way, with sizes that do not divide by three."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, 8)
        self.up, self.down = nn.Linear(8, 20), nn.Linear(20, 8)
        self.norm = nn.LayerNorm(8)
        self.coarse = nn.Linear(8, 8).bfloat16()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens))
        x = x + self.down(torch.tanh(self.up(x)))
        made: Tensor = self.coarse(x.bfloat16())
        return made


class Trainer(Actor):
    """A rank of a job with FSDP2 and, if its mesh has a second dimension, tensor parallelism."""

    def __init__(self) -> None:
        self.model = Model()
        self.part: StatePart | None = None

    @endpoint
    def shard(self) -> list[str]:
        extent = context().actor_instance.rank.extent
        mesh = init_device_mesh("cpu", tuple(extent.sizes), mesh_dim_names=tuple(extent.labels))
        if "tp" in extent.labels:
            plan = {
                "embed": RowwiseParallel(input_layouts=Replicate()),
                "up": ColwiseParallel(),
                "down": RowwiseParallel(),
            }
            parallelize_module(self.model, mesh["tp"], plan)
        for layer in (self.model.up, self.model.down, self.model.coarse, self.model):
            fully_shard(layer, mesh=mesh["dp"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.train(0)  # under torch 2.9, FSDP2's first step moves parameters with uneven shards
        return [str(getattr(value, "placements", None)) for value in self.model.state_dict().values()]

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "version": 1}

    @endpoint
    def register(self) -> StatePart:
        self.part = ShardedState.register(self.state())
        return self.part

    def train(self, seed: int) -> None:
        tokens = torch.randint(0, 10, (4, 5), generator=torch.Generator().manual_seed(seed))
        self.model(tokens).float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.seen += 1

    @endpoint
    def step(self, seed: int) -> None:
        self.train(seed)
        assert self.part is not None
        self.part.check(self.state())

    @endpoint
    def whole(self) -> dict[str, Tensor]:
        state = self.model.state_dict()
        return {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in state.items()}

    @endpoint
    def drop(self) -> None:
        assert self.part is not None
        self.part.drop()

    @endpoint
    def pid(self) -> int:
        return os.getpid()


def generator_placement(name: str, value: Tensor) -> Placement:
    """Return a placement that differs from the trainers' placement."""
    if value.ndim < 2:
        return Replicate()
    return Shard(1) if name.startswith(("up", "embed")) else Shard(0)


class Generator(Actor):
    """A rank of a job whose tensors are sharded over all ranks. A single generator has plain tensors."""

    def __init__(self) -> None:
        self.mine: dict[str, Any] = {}

    @endpoint
    def shard(self) -> None:
        extent = context().actor_instance.rank.extent
        self.mesh = init_device_mesh("cpu", tuple(extent.sizes)) if extent.labels else None
        self.mine = {name: self.cut(name, torch.zeros_like(v)) for name, v in Model().state_dict().items()}

    def cut(self, name: str, value: Tensor) -> Tensor:
        if self.mesh is None or value.ndim == 0:
            return value.clone()
        return distribute_tensor(value.clone(), self.mesh, [generator_placement(name, value)])

    @endpoint
    def load(self, state: ShardedState, timeout: float = 30) -> dict[int, int]:
        """Read the state. Return the number of bytes by owner."""
        for value in self.mine.values():
            local(value).zero_()
        mine: dict[str, Any] = {"model": self.mine, "version": 0}
        plan = state.plan(mine)
        plan.read(timeout=timeout).get()
        assert mine["version"] == 1
        return plan.bytes_by_rank

    @endpoint
    def compare(self, whole: dict[str, Tensor]) -> int:
        """Compare this rank's part with these tensors bit by bit. Return its number of bytes."""
        total = 0
        for name, value in whole.items():
            mine, theirs = local(self.mine[name]), local(self.cut(name, value))
            assert mine.shape == theirs.shape and mine.dtype == theirs.dtype, name
            assert torch.equal(raw(mine), raw(theirs)), f"{name} is not the same"
            total += mine.nbytes
        return total


def local(value: Tensor) -> Tensor:
    with torch.no_grad():
        return (value.to_local() if isinstance(value, DTensor) else value).detach()


def raw(value: Tensor) -> Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)
