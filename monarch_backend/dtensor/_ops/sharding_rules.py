"""Sharding rules for operators that torch's DTensor lacks or has wrong, added by torch's public function."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import _StridedShard

_aten = torch.ops.aten


def install() -> None:
    for operator, rule in _RULES.items():
        register_sharding(operator)(rule)


def _attention(*args: Any, attn_mask: Any = None, **_: Any) -> list[Any]:
    """Shard attention by heads or batch, as torch does for GPUs; not with a mask, which may lack these dimensions."""
    rest = [None] * (len(args) - 3)
    whole: Any = ([Replicate()] * 2, [*[Replicate()] * 3, *rest])
    if attn_mask is not None:
        return [([Replicate()] * 2, [*[Replicate()] * 3, *rest, Replicate()])]
    return [whole, *(([Shard(dim)] * 2, [*[Shard(dim)] * 3, *rest]) for dim in _shared(args[:3]))]


def _attention_backward(*args: Any, attn_mask: Any = None, **_: Any) -> list[Any]:
    rest = [None] * (len(args) - 6)
    if attn_mask is not None:
        return [([Replicate()] * 3, [*[Replicate()] * 6, *rest, Replicate()])]
    whole: Any = ([Replicate()] * 3, [*[Replicate()] * 6, *rest])
    return [whole, *(([Shard(dim)] * 3, [*[Shard(dim)] * 6, *rest]) for dim in _shared(args[:4]))]


def _shared(tensors: Any) -> list[int]:
    """Return the batch dimension, and heads if each rank has some: torch's kernel divides by their number."""
    return [0] if any(has_nothing(_scattered(each, 1), 1) for each in tensors) else [1, 0]


def _scattered(spec: Any, dim: int) -> DTensorSpec:
    """Return the spec with partial sums scattered along ``dim``, which no other rule would choose."""
    placements = tuple(Shard(dim) if each.is_partial() else each for each in spec.placements)
    return DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta)


def shards(placement: Any, dim: int) -> bool:
    """Whether a placement shards ``dim``, in stripes as well."""
    return isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim


def has_nothing(spec: DTensorSpec, dim: int) -> bool:
    """Whether there is a rank without any part of this dimension."""
    sizes: Any = spec.shape
    if not sizes:  # a number, which has a dimension 0 for torch
        return False
    least = sizes[dim]
    for each, count in zip(spec.placements, spec.mesh.shape, strict=True):
        if each.is_shard(dim):
            least = max(least - (count - 1) * -(-least // count), 0)
    return bool(least == 0 and sizes[dim] != 0)


def _fill(tensor: Any, value: Any) -> list[Any]:
    """Fill as ``x[1:] = 0`` does: each rank its shard. Parts of a sum, which torch would fill, are excluded."""
    filled = None if isinstance(value, (int, float, bool, complex)) else Replicate()
    return [([each], [each, filled]) for each in (Replicate(), *map(Shard, range(len(tensor.shape))))]


def _along(tensor: Any, dim: int, **_: Any) -> list[Any]:
    """Shard by dimensions other than ``dim``. torch takes -1 for another dimension than the last."""
    return [([each], [each, None]) for each in _but(tensor, dim)]


def _index_add(tensor: Any, dim: int, _index: Any, _source: Any, **_: Any) -> list[Any]:
    """Shard the gradient of `index_select` by other dimensions: the added rows must be the same on all ranks."""
    return [([each], [each, None, Replicate(), each]) for each in _but(tensor, dim)]


def _but(tensor: Any, dim: int) -> list[Any]:
    """Replicate, or shard by another dimension than this."""
    return [Replicate(), *(Shard(each) for each in range(len(tensor.shape)) if each != dim % len(tensor.shape))]


def _images(x: Any, *_: Any, **__: Any) -> list[Any]:
    """Shard images by batch: channels, height and width belong together."""
    return [([each], [each, None]) for each in (Replicate(), *map(Shard, range(len(x.shape) - 3)))]


def _pooled_backward(gradient: Any, _x: Any, **_: Any) -> list[Any]:
    """Shard by batch and by channels. torch takes the first two dimensions, but a single image has no batch."""
    return [([each], [each, each]) for each in (Replicate(), *map(Shard, range(gradient.ndim - 2)))]


_RULES: dict[Any, Any] = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    _aten.fill_.Tensor: _fill,
    _aten.fill_.Scalar: _fill,
    _aten.cumsum.default: _along,
    _aten.cumprod.default: _along,
    _aten.logcumsumexp.default: _along,
    _aten.index_add.default: _index_add,
    _aten.pixel_shuffle.default: _images,
    _aten.pixel_unshuffle.default: _images,
    _aten._adaptive_avg_pool2d_backward.default: _pooled_backward,
}
OPERATORS = tuple(_RULES)
"""Operators with a rule of this module."""
