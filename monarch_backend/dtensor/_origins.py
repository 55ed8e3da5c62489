"""`Origin`: the DTensor's shard that a plain tensor is computed from. Its random numbers depend on it.

Ranks with other shards must not draw the same numbers. Where the tensor is still a shard, element by element, they draw
the DTensor's, which are those of a single process. Found per signature, so a call costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

    def spec(self, dtype: torch.dtype, local_strides: Sequence[Any]) -> DTensorSpec:
        """Of the DTensor whose shards have these strides, the first rank's: its dimensions are in the same order."""
        strides, count = [0] * len(self.shape), 1
        for dim in sorted(range(len(self.shape)), key=lambda dim: (local_strides[dim], -dim)):
            strides[dim] = count
            count *= max(self.shape[dim], 1)
        meta = TensorMeta(torch.Size(self.shape), tuple(strides), dtype)
        return DTensorSpec(self.mesh, self.placements, tensor_meta=meta)


class Origin(NamedTuple):
    """``streams``: by rank, a number that is the same where shards are. ``whole``: None where it is no shard itself."""

    streams: tuple[int, ...]
    whole: Whole | None = None


MARK = "monarch_origin"
"""Under this key the nodes of a trace have the origins of DTensors' local tensors that a program has asked for."""


def of_shard(spec: DTensorSpec, mesh: Any, coordinates: Sequence[Any]) -> Origin | None:
    """Of a DTensor's local tensor. None where all ranks have the same, or parts of a sum.

    ``coordinates``: by dimension of the mesh, those of all ranks.
    """
    dims = [dim for dim, each in enumerate(spec.placements) if each.is_shard()]
    columns = [_rank_ints.values_of(coordinates[dim]) for dim in dims]
    streams = numbered(list(zip(*(each for each in columns if each is not None), strict=True)))
    if streams is None:
        return None
    is_known = all(type(each) in (Shard, Replicate) for each in spec.placements)
    is_known = is_known and spec.shard_order == DTensorSpec.compute_default_shard_order(spec.placements)
    shape = tuple(spec.shape)
    if not is_known or not all(type(size) is int for size in shape):
        return Origin(streams)
    placements = tuple(Shard(each.dim % len(shape)) if isinstance(each, Shard) else each for each in spec.placements)
    return Origin(streams, Whole(mesh, placements, shape))


def numbered(places: Sequence[Any]) -> tuple[int, ...] | None:
    """The same number for the same place; None where there is one only."""
    known = {place: number for number, place in enumerate(dict.fromkeys(places))}
    return tuple(known[each] for each in places) if len(known) > 1 else None


Given = tuple[Origin, Sequence[Any]]
"""An operand's origin and sizes."""


def of_results(call: Any, given: Sequence[Given]) -> Callable[[torch.Tensor], Origin | None]:
    """What gives the origin of each result of an operation on tensors of these origins; others have none."""
    if not given:
        return lambda _: None
    if call in _MADE_ANEW:
        return lambda result: _anew(*given[0], result)
    streams = _together([origin.streams for origin, _ in given])
    wholes = {(origin.whole, tuple(shape)) for origin, shape in given}
    if len(wholes) > 1 or not is_pointwise(call):
        return lambda _: Origin(streams)
    whole, shape = next(iter(wholes))
    return lambda result: Origin(streams, whole if tuple(result.shape) == shape else None)


def _together(streams: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return numbered(list(zip(*streams, strict=True))) or streams[0]


def of_collective(name: str, given: Sequence[Given], rows: Sequence[Sequence[int]], size: int) -> Origin | None:
    """Of what a collective of the ranks in each of these rows returns.

    Ranks of one row have the same, or each its part; rows have the same where their ranks' operands are the same.
    """
    streams = _together([origin.streams for origin, _ in given]) if given else (0,) * size
    is_scattered = any(part in name for part in _SCATTERED) or name == "reduce_"  # which the root alone has
    places: list[Any] = [None] * size
    for row in rows:
        of_row = tuple(streams[rank] for rank in row)
        for place, rank in enumerate(row):
            places[rank] = (of_row, place if is_scattered else 0)
    inside = [each for each in places if each is not None]
    found = numbered([inside[0] if each is None else each for each in places]) if inside else None
    return None if found is None else Origin(found)


_SCATTERED = ("scatter", "alltoall", "all_to_all", "permute")


def _anew(origin: Origin, given: Sequence[Any], result: torch.Tensor) -> Origin | None:
    """Of a tensor without the values: a dimension of size 1 is no shard, and one of the shard's size is."""
    streams, whole = origin
    if whole is None or result.ndim != len(whole.shape):
        return Origin(streams) if result.numel() > 1 else None
    shape = list(result.shape)
    placements: list[Any] = [
        Replicate() if each.is_shard() and shape[each.dim] == 1 and given[each.dim] != 1 else each
        for each in whole.placements
    ]
    for dim in {each.dim for each in placements if each.is_shard()}:
        if shape[dim] != given[dim]:
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
_ALSO_POINTWISE = {
    _aten._to_copy.default, _aten.detach.default, _aten.alias.default, _aten.native_dropout.default,
    _aten.hardswish.default, _aten.lift_fresh.default, _aten.view.default, _aten._unsafe_view.default,
    _aten.expand.default, _aten.copy_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default,
}  # fmt: skip

"""Views among them, of the same sizes."""
