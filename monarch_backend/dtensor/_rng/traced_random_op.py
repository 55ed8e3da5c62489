"""Operator in traces for random numbers: each worker draws its part of those of a whole tensor.

A captured step (see _compile/lowering.py) draws all its random numbers before its other operations, in the program's
order. So changes by a compiler do not change the numbers. Like _per_rank/per_rank_op.py, it never runs on real tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class TracedRandomOp(NamedTuple):
    """``func`` of a whole tensor of this shape, strides and dtype, with these arguments; whole without ``cuts``.

    ``cuts``, ``keeps``: as in `random_ops.Shards`. ``is_plain``: the tensor is not a DTensor's.
    """

    func: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    cuts: list[Any]
    keeps: Any
    args: tuple[Any, ...]
    is_plain: bool


_draws: list[TracedRandomOp] = []


def draw(like: torch.Tensor, what: TracedRandomOp) -> torch.Tensor:
    """Draw in a trace; ``like`` has the shape and dtype on each rank. Raises TypeError if its sizes are symbols."""
    hash((what.shape, what.stride))
    _draws.append(what)
    return torch.ops.monarch_backend.draw(like, len(_draws) - 1)  # type: ignore[no-any-return]


def drawn(number: int) -> TracedRandomOp:
    return _draws[number]


torch.library.define(
    "monarch_backend::draw", "(Tensor like, int number) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
)
torch.library.register_fake("monarch_backend::draw")(lambda like, number: torch.empty_like(like))  # noqa: ARG005
