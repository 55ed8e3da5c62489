"""Normalisation layers have the outputs, gradients and running values of a single process, for any placement."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

from tests.dtensor.values import same, value

NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch1d": (lambda: nn.BatchNorm1d(4), (6, 4)),
    "batch2d": (lambda: nn.BatchNorm2d(4), (6, 4, 3, 3)),
    "two channels": (lambda: nn.BatchNorm2d(2), (6, 2, 3, 3)),  # one of 3 ranks has no channel
    "cumulative": (lambda: nn.BatchNorm1d(4, momentum=None), (6, 4)),
    "instance": (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (6, 4, 3, 3)),
    "group": (lambda: nn.GroupNorm(2, 4), (5, 4, 3, 3)),
    "group, one image": (lambda: nn.GroupNorm(2, 4), (1, 4, 3, 3)),
    "group, plain": (lambda: nn.GroupNorm(4, 4, affine=False), (6, 4, 3)),
}
ONE = [Shard(0), Shard(1), Replicate()]


def sharded(_name: str, module: nn.Module, mesh: Any) -> None:
    """Shard each parameter by its first dimension. Buffers stay whole on each rank."""
    for name, each in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, nn.Parameter(distribute_tensor(each, mesh, [Shard(0)] * mesh.ndim)))


KEPT: dict[str, Callable[[nn.Module, Any], nn.Module]] = {
    "replicated": distribute_module,
    "sharded": lambda module, mesh: distribute_module(module, mesh, sharded),
    "here": lambda module, _mesh: module,
}


MESHES = ["3", "2x2"]
CASES = [
    pytest.param(name, kept, marks=[] if kept == "replicated" or name in ("batch2d", "group") else pytest.mark.slow)
    for name in NORMS
    for kept in KEPT
]


@pytest.mark.parametrize(("name", "kept"), CASES)
@pytest.mark.parametrize("on", ["3", pytest.param("2x2", marks=pytest.mark.slow)])
def test_norm_layers_of_a_sharded_batch_match_a_single_process(
    mesh_of: Callable[[str], Any], on: str, name: str, kept: str
) -> None:
    (make, size), mesh = NORMS[name], mesh_of(on)
    for placements in itertools.product(ONE, repeat=mesh.ndim):
        alone, x = make(), torch.randn(size)
        ours = KEPT[kept](copy.deepcopy(alone), mesh)
        for factor, is_leaf in ((1.0, True), (2.0, False)):
            mine = distribute_tensor(x * factor, mesh, placements).requires_grad_(is_leaf)
            theirs = (x * factor).requires_grad_(is_leaf)
            found, expected = ours(mine), alone(theirs)
            same(found, expected)
            if expected.requires_grad:
                found.pow(3).sum().backward()
                expected.pow(3).sum().backward()
            if is_leaf:
                same(mine.grad, theirs.grad, 1e-3)  # type: ignore[arg-type]
        for one, other in zip(ours.parameters(), alone.parameters(), strict=True):
            same(one.grad, other.grad, 1e-3)  # type: ignore[arg-type]
        for one, other in zip(ours.buffers(), alone.buffers(), strict=True):
            same(one, other)
        ours.eval()
        alone.eval()
        mine, theirs = distribute_tensor(x, mesh, placements).requires_grad_(), x.requires_grad_()
        found, expected = ours(mine), alone(theirs)
        same(found, expected)
        found.pow(3).sum().backward()
        expected.pow(3).sum().backward()
        same(mine.grad, theirs.grad, 1e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True)], ids=str)
@pytest.mark.parametrize("on", MESHES)
def test_norm_layers_of_a_host_batch_match_a_single_process(
    mesh_of: Callable[[str], Any], on: str, layer: nn.Module
) -> None:
    alone = copy.deepcopy(layer)
    ours, x = distribute_module(copy.deepcopy(alone), mesh_of(on)), torch.randn(5, 4, 3)
    for net in (ours, alone):
        net(x).pow(3).mean().backward()
    same(ours(x), alone(x))
    for one, other in zip(ours.parameters(), alone.parameters(), strict=True):
        same(one.grad, other.grad)  # type: ignore[arg-type]
    for one, other in zip(ours.buffers(), alone.buffers(), strict=True):
        same(one, other)


LENGTHS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.norm(2, 1).sum(),
    "sum of columns": lambda x: torch.linalg.vector_norm(x, 3, 0).sum(),
    "mean": lambda x: x.norm(2, 0).mean(),
    "norm": lambda x: x.norm(2, 0).norm(2),
    "norm of another kind": lambda x: x.norm(2, 0).norm(3),
    "largest": lambda x: x.norm(2, 0).amax(),
    "distance": lambda x: F.pairwise_distance(x, x.flip(0)).sum(),
    "triplets": lambda x: F.triplet_margin_loss(x, x * 2, x.flip(0)),
}


@pytest.mark.parametrize("name", list(LENGTHS))
@pytest.mark.parametrize("on", MESHES)
def test_norms_over_sharded_dimensions_match_torch(mesh_of: Callable[[str], Any], on: str, name: str) -> None:
    mesh = mesh_of(on)
    for placements in itertools.product(ONE, repeat=mesh.ndim):
        x = torch.randn(5, 4)
        same(LENGTHS[name](distribute_tensor(x, mesh, placements)), LENGTHS[name](x))


@pytest.mark.slow
def test_running_values_in_a_captured_step(mesh_of: Callable[[str], Any]) -> None:
    mesh, x = mesh_of("2"), torch.randn(6, 4)
    alone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    ours = distribute_module(copy.deepcopy(alone), mesh)
    step = torch.compile(lambda x: ours(x).square().sum(), backend="monarch")
    for factor in (1.0, 2.0, 3.0):
        same(step(distribute_tensor(x * factor, mesh, [Shard(1)])), alone(x * factor).square().sum())
    for one, other in zip(ours.buffers(), alone.buffers(), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(value(one), other)
