"""Run one function over "gloo" and over "monarch", and compare the results of the ranks bit by bit.

This module has the shared parts: both runs, the comparison, and small models with data. Each test file defines what
to train, shard or save.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from monarch_backend.process_group import MonarchProcessGroup
from tests.support.ranks import run_ranks

WIDTH = 8


class Bits(NamedTuple):
    """A tensor as a rank sends it to the test: exact bytes, without shared memory."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def tensor(self) -> Tensor:
        """Return the tensor. The test process must not run operations on it that use many threads."""
        dtype = getattr(torch, self.dtype)
        if not self.data:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(bytearray(self.data), dtype=dtype).reshape(self.shape)


def freeze(value: Any) -> Any:
    """Return ``value`` with each tensor as :class:`Bits`, and each DTensor as its placements, mesh and local tensor."""
    if isinstance(value, DTensor):
        mesh = value.device_mesh.mesh.tolist()
        return {"placements": str(value.placements), "mesh": mesh, "local": freeze(value.to_local())}
    if isinstance(value, AsyncCollectiveTensor):
        value = value.wait()
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous().reshape(-1)
        raw = data.view(torch.uint8).numpy().tobytes() if data.numel() else b""
        return Bits(str(value.dtype).removeprefix("torch."), tuple(value.shape), raw)
    if isinstance(value, Mapping):
        return {key: freeze(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, Bits):
        return [freeze(item) for item in value]
    return value


def _is_close(ours: Bits, gloo: Bits) -> bool:
    a, b = ours.tensor(), gloo.tensor()
    if a.dtype != b.dtype or a.shape != b.shape or not (a.is_floating_point() or a.is_complex()):
        return ours == gloo
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


def differences(ours: Any, gloo: Any, where: str = "result", *, bits: bool = True) -> list[str]:
    """Return the places where two frozen results differ.

    With ``bits`` any different bit counts. Otherwise differences that another order of additions explains are ignored.
    """
    if isinstance(ours, Bits) and isinstance(gloo, Bits):
        return (
            []
            if ours == gloo or (not bits and _is_close(ours, gloo))
            else [f"{where}: monarch {ours.tensor()}, gloo {gloo.tensor()}"]
        )
    if type(ours) is not type(gloo):
        return [f"{where}: monarch {ours!r}, gloo {gloo!r}"]
    if isinstance(ours, dict):
        if list(ours) != list(gloo):
            return [f"{where}: monarch has {list(ours)}, gloo {list(gloo)}"]
        return [d for key in ours for d in differences(ours[key], gloo[key], f"{where}[{key!r}]", bits=bits)]
    if isinstance(ours, list):
        if len(ours) != len(gloo):
            return [f"{where}: monarch has {len(ours)} items, gloo {len(gloo)}"]
        return [d for i in range(len(ours)) for d in differences(ours[i], gloo[i], f"{where}[{i}]", bits=bits)]
    if isinstance(ours, float) and not bits:
        return (
            []
            if math.isclose(ours, gloo, rel_tol=1e-4, abs_tol=1e-5)
            else [f"{where}: monarch {ours!r}, gloo {gloo!r}"]
        )
    return [] if ours == gloo else [f"{where}: monarch {ours!r}, gloo {gloo!r}"]


def _as_rank(rank: int, fn: Callable[..., Any], args: tuple[Any, ...], backend: str) -> Any:
    # One thread: the order of additions must not depend on the load of the machine.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # If both runs used gloo, the comparison would always pass, so check the backend.
    assert dist.get_backend() == backend
    assert isinstance(dist.group.WORLD, MonarchProcessGroup) == (backend == "monarch")
    return freeze(fn(rank, *args))


def on_both(fn: Callable[..., Any], world_size: int, *args: Any, env: dict[str, str] | None = None) -> list[Any]:
    """Run ``fn(rank, *args)`` on new ranks over gloo, then over monarch, and return the frozen results by rank.

    The results must be equal bit by bit. The exception is more than two ranks that share memory: monarch adds in the
    order of the ranks, Gloo around a ring. There the results must be equal within rounding, and a second run over
    monarch's Gloo route must be equal bit by bit. ``fn`` may return tensors, lists, dicts and plain values.
    """
    gloo = run_ranks(_as_rank, world_size, fn, args, "gloo", backend="gloo", env=env)
    ours = run_ranks(_as_rank, world_size, fn, args, "monarch", backend="monarch", env=env)
    shared = sys.platform == "linux" and (env or {}).get("MONARCH_SHM") != "0"
    different = differences(ours, gloo, bits=world_size <= 2 or not shared)
    assert not different, "\n".join(different)
    if world_size > 2 and shared:
        alone = {**(env or {}), "MONARCH_SHM": "0"}
        routed = run_ranks(_as_rank, world_size, fn, args, "monarch", backend="monarch", env=alone)
        different = differences(routed, gloo)
        assert not different, "\n".join(different)
    return ours


def mlp(width: int = WIDTH, layers: int = 3) -> nn.Sequential:
    """Return alternating Linear and Tanh layers, with the same parameters on every rank and in every call."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        pairs = [m for _ in range(layers) for m in (nn.Linear(width, width), nn.Tanh())]
        return nn.Sequential(*pairs[:-1])


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    """Do one training step on a batch and return the loss."""
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def batch(step: int, part: int = 0, rows: int = 4, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a step, which differ for each ``part`` (usually a rank)."""
    generator = torch.Generator().manual_seed(1000 * part + step)
    x = torch.randn(rows, width, generator=generator)
    return x, torch.tanh(x.flip(-1))


def learns(losses: Sequence[float]) -> bool:
    """Return whether the losses are numbers and fall. Two runs that train nothing must not count as equal."""
    return all(loss == loss for loss in losses) and losses[-1] < losses[0]
