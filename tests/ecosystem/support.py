"""Run one function over "gloo" and over "monarch", and compare the results of the ranks bit by bit.

Shared parts: the two runs, the comparison, and small models with data. What to train, shard or save is in each test
file.
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
    """A tensor as it travels from a rank to the test: exact, and without shared memory."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def tensor(self) -> Tensor:
        """The tensor again; the test process may look at it, not compute with many threads."""
        dtype = getattr(torch, self.dtype)
        if not self.data:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(bytearray(self.data), dtype=dtype).reshape(self.shape)


def freeze(value: Any) -> Any:
    """``value`` with every tensor in it as :class:`Bits`, and every DTensor as placements, mesh and local part."""
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
    """The places where two frozen results differ: by even one bit, or by more than sums in another order do."""
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
    # One thread: the order of additions must not depend on how busy the machine is.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # A comparison of gloo with gloo would pass as well; make sure that it is not one.
    assert dist.get_backend() == backend
    assert isinstance(dist.group.WORLD, MonarchProcessGroup) == (backend == "monarch")
    return freeze(fn(rank, *args))


def on_both(fn: Callable[..., Any], world_size: int, *args: Any, env: dict[str, str] | None = None) -> list[Any]:
    """``fn(rank, *args)`` on fresh ranks over gloo, then over monarch; frozen results by rank if they are equal.

    Bit for bit; but where more than two ranks share memory, sums are in the order of the ranks and Gloo's go round a
    ring: there within rounding, and bit for bit once more over our Gloo route. ``fn`` may return anything of tensors,
    lists, dicts and plain values.
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
    """Linear and Tanh in turn, the same numbers on every rank and every call."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        pairs = [m for _ in range(layers) for m in (nn.Linear(width, width), nn.Tanh())]
        return nn.Sequential(*pairs[:-1])


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    """One step on a batch; its loss."""
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def batch(step: int, part: int = 0, rows: int = 4, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step; each ``part`` (usually a rank) has its own."""
    generator = torch.Generator().manual_seed(1000 * part + step)
    x = torch.randn(rows, width, generator=generator)
    return x, torch.tanh(x.flip(-1))


def learns(losses: Sequence[float]) -> bool:
    """Whether the losses are numbers and fall: a run where nothing happens must not count as equal."""
    return all(loss == loss for loss in losses) and losses[-1] < losses[0]
