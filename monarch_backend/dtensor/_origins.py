"""`Origin`: the DTensor's shard that a plain tensor is computed from. Its random numbers depend on it.

Ranks with other shards must not draw the same numbers. Where the tensor is still a shard, element by element, they draw
the DTensor's, which are those of a single process. Found per signature, so a call costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from monarch_backend.dtensor import _rank_ints

_aten = torch.ops.aten


class Whole(NamedTuple):
    """The DTensor whose shard it is."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, ...]

    def spec(self, local: Any) -> DTensorSpec:
        """Of a tensor with the dtype of ``local``, and its order in memory."""
        strides, count = [0] * len(self.shape), 1
        order = range(len(self.shape))
        sizes = local.classes[0].stride if local.classes else local.stride
        for dim in sorted(order, key=lambda dim: (sizes[dim], -dim)):
            strides[dim] = count
            count *= max(self.shape[dim], 1)
        meta = TensorMeta(torch.Size(self.shape), tuple(strides), local.dtype)
        return DTensorSpec(self.mesh, self.placements, tensor_meta=meta)


class Origin(NamedTuple):
    """``streams``: by rank, a number that is the same where shards are. ``whole``: None where it is no shard itself."""

    streams: tuple[int, ...]
    whole: Whole | None = None


def of_shard(spec: DTensorSpec) -> Origin | None:
    """Of a DTensor's local tensor. None where all ranks have the same, or parts of a sum."""
    found = spec.__dict__.get("_monarch_origin", False)
    if found is False:
        found = spec.__dict__["_monarch_origin"] = _of_shard(spec)
    return found  # type: ignore[no-any-return]


def _of_shard(spec: DTensorSpec) -> Origin | None:
    dims = [dim for dim, each in enumerate(spec.placements) if each.is_shard()]
    coordinates = spec.mesh.get_coordinate() or []
    columns = [_rank_ints.values_of(coordinates[dim]) for dim in dims]
    streams = numbered(list(zip(*(each for each in columns if each is not None), strict=True)))
    if streams is None:
        return None
    is_known = all(type(each) in (Shard, Replicate) for each in spec.placements)
    is_known = is_known and spec.shard_order == DTensorSpec.compute_default_shard_order(spec.placements)
    shape = tuple(spec.shape)
    if not is_known or not all(type(size) is int for size in shape):
        return Origin(streams)
    placements = tuple(Shard(each.dim % len(shape)) if each.is_shard() else each for each in spec.placements)
    return Origin(streams, Whole(spec.mesh, placements, shape))


def numbered(places: Sequence[Any]) -> tuple[int, ...] | None:
    """The same number for the same place; None where there is one only."""
    known = {place: number for number, place in enumerate(dict.fromkeys(places))}
    return tuple(known[each] for each in places) if len(known) > 1 else None


def of_results(call: Any, metas: Iterable[Any]) -> Callable[[torch.Tensor], Origin | None]:
    """What gives the origin of each result of an operation on tensors of this metadata."""
    found = [each for each in metas if each is not None and each.origin is not None]
    if not found:
        return lambda _: None
    if call in _MADE_ANEW:
        return lambda result: _anew(found[0], result)
    streams = found[0].origin.streams
    if any(each.origin.streams != streams for each in found):
        together = numbered(list(zip(*[each.origin.streams for each in found], strict=True)))
        return lambda _: Origin(together or streams)
    wholes = {(each.origin.whole, tuple(each.shape)) for each in found}
    if len(wholes) > 1 or not is_pointwise(call):
        return lambda _: Origin(streams)
    whole, shape = next(iter(wholes))
    return lambda result: Origin(streams, whole if tuple(result.shape) == shape else None)


def _anew(meta: Any, result: torch.Tensor) -> Origin | None:
    """Of a tensor without the values: a dimension of size 1 is no shard, and one of the shard's size is."""
    streams, whole = meta.origin
    if whole is None or result.ndim != len(whole.shape):
        return Origin(streams) if result.numel() > 1 else None
    shape, placements = list(result.shape), []
    for each in whole.placements:
        if each.is_shard() and shape[each.dim] == 1 and meta.shape[each.dim] != 1:
            each = Replicate()
        placements.append(each)
    for dim in {each.dim for each in placements if each.is_shard()}:
        if shape[dim] != meta.shape[dim]:
            return Origin(streams)
        shape[dim] = whole.shape[dim]
    if not any(each.is_shard() for each in placements):
        return None
    return Origin(streams, Whole(whole.mesh, tuple(placements), tuple(shape)))


def is_pointwise(call: Any) -> bool:
    """Whether each element of its results is made of those in its place."""
    return call in _ALSO_POINTWISE or torch.Tag.pointwise in getattr(call, "tags", ())


_MADE_ANEW = frozenset(
    getattr(packet, name)
    for packet in (
        _aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty_strided, _aten.empty_like,
        _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like, _aten.randn_like, _aten.randint_like,
    )
    for name in packet.overloads()
)  # fmt: skip
"""What has the sizes of an argument, or others, and not its values."""
_ALSO_POINTWISE: set[Any] = {
    _aten._to_copy.default, _aten.detach.default, _aten.alias.default, _aten.native_dropout.default,
    _aten.hardswish.default, _aten.lift_fresh.default,
}  # fmt: skip


def add_pointwise(function: Any) -> None:
    """Count a function that is no operator among them."""
    _ALSO_POINTWISE.add(function)
