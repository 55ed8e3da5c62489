"""Convolutions and their gradients have the values of a single process, for any sharding of images and weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.dtensor.values import same

PLACES = [
    (Replicate(), Replicate()), (Shard(0), Replicate()), (Shard(0), Shard(0)), (Shard(3), Replicate()),
    (Replicate(), Shard(0)), (Replicate(), Shard(1)), (Shard(1), Shard(0)), (Shard(1), Shard(1)),
]  # fmt: skip
"""Placements of image and weight."""


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("transposed", [False, True], ids=["straight", "transposed"])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolution_of_any_placement_matches_torch(line: Any, bias: bool, transposed: bool, groups: int) -> None:
    function = torch.conv_transpose2d if transposed else torch.conv2d
    options: dict[str, Any] = {"stride": 2, "padding": 1, "groups": groups}
    image, weight = torch.randn(5, 4, 6, 6), torch.randn(4, 4 if transposed else 4 // groups, 3, 3)
    for here, there in PLACES:
        whole = [image, weight, *([torch.randn(weight.size(1) * groups if transposed else 4)] if bias else [])]
        whole = [each.clone().requires_grad_() for each in whole]
        where = [here, there, Replicate()]
        ours = [distribute_tensor(x.detach(), line, [p]).requires_grad_() for x, p in zip(whole, where, strict=False)]
        result, expected = function(*ours, **options), function(*whole, **options)
        same(result, expected, 1e-4)
        result.square().sum().backward()
        expected.square().sum().backward()
        for mine, theirs in zip(ours, whole, strict=True):
            same(mine.grad, theirs.grad, 1e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize(("here", "there"), PLACES)
@pytest.mark.parametrize("name", ["2", pytest.param("2x2", marks=pytest.mark.slow)])
def test_convolution_in_a_captured_step_matches_torch(
    mesh_of: Callable[[str], Any], name: str, here: Any, there: Any
) -> None:
    def step(x: Any, w: Any) -> Any:
        y = torch.conv2d(x, w, padding=1).relu()
        return y.detach(), y.square().sum()

    torch._dynamo.reset()
    mesh, whole = mesh_of(name), [torch.randn(5, 4, 6, 6).requires_grad_(), torch.randn(4, 4, 3, 3).requires_grad_()]
    before = [Replicate()] * (mesh.ndim - 1)
    ours = [
        distribute_tensor(x.detach(), mesh, [*before, p]).requires_grad_()
        for x, p in zip(whole, (here, there), strict=True)
    ]
    captured = torch.compile(step, backend="monarch", fullgraph=True, options={"inductor": False})
    (result, loss), (expected, of_one) = captured(*ours), step(*whole)
    same(result, expected, 1e-4)
    loss.backward()
    of_one.backward()
    for mine, theirs in zip(ours, whole, strict=True):
        same(mine.grad, theirs.grad, 1e-3)  # type: ignore[arg-type]
    torch._dynamo.reset()


def test_a_sharded_weight_makes_sharded_channels(line: Any) -> None:
    image, weight = torch.randn(2, 4, 6, 6), torch.randn(6, 4, 3, 3)
    result = torch.conv2d(distribute_tensor(image, line, [Replicate()]), distribute_tensor(weight, line, [Shard(0)]))
    assert result.placements == (Shard(1),)  # type: ignore[attr-defined]
    same(result, torch.conv2d(image, weight), 1e-4)
