"""Shardings of operators that torch's DTensor has none for, by torch's own public way to add them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

_aten = torch.ops.aten


def install() -> None:
    """Register them."""
    register_sharding(_aten._scaled_dot_product_flash_attention_for_cpu.default)(_attention)
    register_sharding(_aten._scaled_dot_product_flash_attention_for_cpu_backward.default)(_attention_backward)
    register_sharding(_aten.fill_.Tensor)(_fill)


def _attention(*args: Any, attn_mask: Any = None, **_: Any) -> list[Any]:
    """By heads, by batch, or whole, as torch has it for GPUs. A mask may have neither, so with one it is whole."""
    rest = [None] * (len(args) - 3)
    whole: Any = ([Replicate()] * 2, [*[Replicate()] * 3, *rest])
    if attn_mask is not None:
        return [([Replicate()] * 2, [*[Replicate()] * 3, *rest, Replicate()])]
    return [whole, *(([Shard(dim)] * 2, [*[Shard(dim)] * 3, *rest]) for dim in (1, 0))]


def _attention_backward(*args: Any, attn_mask: Any = None, **_: Any) -> list[Any]:
    rest = [None] * (len(args) - 6)
    if attn_mask is not None:
        return [([Replicate()] * 3, [*[Replicate()] * 6, *rest, Replicate()])]
    whole: Any = ([Replicate()] * 3, [*[Replicate()] * 6, *rest])
    return [whole, *(([Shard(dim)] * 3, [*[Shard(dim)] * 6, *rest]) for dim in (1, 0))]


def _fill(tensor: Any, _value: Any) -> list[Any]:
    """As ``x[1:] = 0`` does; each rank fills what it has."""
    return [([each], [each, Replicate()]) for each in (Replicate(), *map(Shard, range(len(tensor.shape))))]
