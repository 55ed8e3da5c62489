"""Shardings of losses. torch's DTensor finds some out of what an operator is composed of, which is for whole tensors.

There the mean is over the whole; calculated on a shard it is over the shard. So a mean of shards that are not equal is
no mean, and a gradient of a mean, which is divided by the count of numbers, would be too great by the count of shards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

_aten = torch.ops.aten
_NONE, _MEAN, _SUM = range(3)
"""Of what a loss is, by the number that says it."""

LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy")


def install() -> None:
    """Register them."""
    register_sharding(_aten.binary_cross_entropy_with_logits.default)(_forward(4))  # its gradient is composed
    for name in LOSSES:
        at = 3 if name == "binary_cross_entropy" else 2  # which has weights before it
        register_sharding(getattr(_aten, name).default)(_forward(at))
        register_sharding(getattr(_aten, f"{name}_backward").default)(_backward(at + 1))


def _forward(at: int) -> Any:
    def sharding(*args: Any, **_: Any) -> list[Any]:
        reduction = args[at] if len(args) > at else _MEAN
        found: list[Any] = [([Replicate()], _inputs(args, Replicate()))]
        for dim, size in enumerate(args[0].shape):
            if _alike(args[:at]) and (reduction != _MEAN or size % args[0].mesh.size() == 0):
                result = {_NONE: Shard(dim), _MEAN: Partial("avg"), _SUM: Partial("sum")}[reduction]
                found.append(([result], _inputs(args, Shard(dim))))
        return found

    return sharding


def _backward(at: int) -> Any:
    def sharding(*args: Any, **_: Any) -> list[Any]:
        reduction = args[at] if len(args) > at else _MEAN
        found: list[Any] = [([Replicate()], _inputs(args, Replicate()))]
        if reduction != _MEAN and _alike(args[1:at]):
            for dim in range(len(args[1].shape)):
                inputs = _inputs(args, Shard(dim))
                inputs[0] = Shard(dim) if reduction == _NONE else Replicate()
                found.append(([Shard(dim)], inputs))
        return found

    return sharding


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "shape")


def _inputs(args: Any, placement: Any) -> list[Any]:
    return [placement if _is_tensor(each) else None for each in args]


def _alike(args: Any) -> bool:
    """None is broadcast."""
    return len({tuple(each.shape) for each in args if _is_tensor(each)}) == 1
