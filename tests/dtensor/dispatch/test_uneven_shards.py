"""Tensors with uneven or empty shards have the values of a single process."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

from monarch_backend._core.torch_version import torch_version
from tests.dtensor.conftest import DEVICE
from tests.dtensor.ops.test_normalization import sharded
from tests.dtensor.values import same

AT = torch.tensor([[0], [1], [2], [3], [0]])
CASES: dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]] = {
    "argmax": ((5, 4), lambda x: x.argmax(1)),
    "argmax of all": ((4, 5), lambda x: x.argmax()),
    "argmin": ((4, 5), lambda x: x.argmin(0)),
    "argmin of a number": ((), lambda x: x.argmin(0)),
    "amax of a number": ((), lambda x: x.amax(0)),
    "amax": ((4, 5), lambda x: x.amax(0)),
    "max": ((4, 5), lambda x: x.max()),
    "aminmax": ((4, 5), lambda x: torch.stack(list(x.aminmax()))),
    "norm": ((4, 5), lambda x: x.norm(float("inf"), 0)),
    "gather": ((5, 4), lambda x: x.gather(1, AT)),
    "gather rows": ((4, 5), lambda x: x.gather(0, AT.T)),
    "categorical": ((5, 4), lambda x: torch.distributions.Categorical(logits=x).log_prob(AT[:, 0])),
    "rfft": ((4, 6), lambda x: torch.fft.rfft(x).abs()),
    "fft2": ((4, 6), lambda x: torch.fft.fft2(x).abs()),
    "pixel_shuffle": ((2, 12, 4, 4), lambda x: F.pixel_shuffle(x, 2)),
    "pixel_unshuffle": ((3, 4, 4), lambda x: F.pixel_unshuffle(x, 2)),
    "expand": ((1, 1, 8), lambda x: x.expand(5, -1, -1) * 2),
    "expand columns": ((5, 1), lambda x: x.expand(5, 3) * 2),
    "kron": ((6, 5), lambda x: torch.kron(x[:2], x[2:4])),
    "max_pool2d": ((4, 4, 6, 6), lambda x: F.max_pool2d(x, 2)),
    "avg_pool2d": ((4, 4, 6, 6), lambda x: F.avg_pool2d(x, 2)),
    "interpolate": ((4, 4, 6, 6), lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    "heads": (
        (4, 5, 12),
        lambda x: F.scaled_dot_product_attention(*[x.view(4, 5, 3, 4).transpose(1, 2)] * 3).transpose(1, 2).flatten(2),
    ),
    "other order": ((4, 6), lambda x: x.t().cumsum(1).t().reshape(-1)),
}


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("on", ["3", pytest.param("2x2", marks=pytest.mark.slow)])
def test_operations_with_few_rows_match_torch(mesh_of: Callable[[str], Any], on: str, name: str) -> None:
    (size, of), mesh = CASES[name], mesh_of(on)
    for there in itertools.product([*map(Shard, range(min(len(size), 3))), Replicate()], repeat=mesh.ndim):
        theirs = torch.randn(size, requires_grad=True)
        mine = distribute_tensor(theirs.detach(), mesh, there).requires_grad_()
        found, expected = of(mine), of(theirs)
        same(found, expected)
        has_derivative = name != "aminmax" or torch_version() >= (2, 12)  # torch 2.11 has none
        if expected.requires_grad and has_derivative:
            found.pow(2).sum().backward()
            expected.pow(2).sum().backward()
            same(mine.grad, theirs.grad, 1e-4)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_recurrent_layers_of_a_batch_that_ranks_do_not_share_evenly(line: Any, kind: Any) -> None:
    alone, x = kind(6, 8, batch_first=True), torch.randn(5, 4, 6)
    expected = alone(x)[0]
    ours = distribute_module(alone, line)
    with line if DEVICE != "cpu" else contextlib.nullcontext():  # torch makes the first state by device type
        same(ours(distribute_tensor(x, line, [Shard(0)]))[0], expected)


def test_gathered_tensor_keeps_its_dimension_order(mesh: Any) -> None:
    x = torch.randn(4, 5, 3)
    for dim in range(3):
        there = distribute_tensor(x, mesh, [Shard(dim)] * mesh.ndim).transpose(0, 1)
        gathered = there.redistribute(placements=[Replicate()] * mesh.ndim)
        assert gathered.to_local().stride() == gathered.stride() == x.transpose(0, 1).stride()
        same(gathered.transpose(0, 1).view(-1), x.view(-1), 0)


@pytest.mark.parametrize("rows", [4, 1])
def test_weight_norm(mesh_of: Callable[[str], Any], rows: int) -> None:
    """The kernel of weight_norm divides by the number of rows."""
    x = torch.randn(5, 3)
    ours, alone = (nn.utils.parametrizations.weight_norm(nn.Linear(3, rows)) for _ in range(2))
    ours.load_state_dict(alone.state_dict())

    distribute_module(ours, mesh_of("3"), sharded)
    for net, given in ((ours, distribute_tensor(x, mesh_of("3"), [Replicate()])), (alone, x)):
        net(given).square().sum().backward()
    same(ours(x), alone(x))
    for mine, theirs in zip(ours.parameters(), alone.parameters(), strict=True):
        same(mine.grad, theirs.grad, 1e-4)  # type: ignore[arg-type]
