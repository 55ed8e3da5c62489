"""Origin of a plain tensor: the DTensor shard that it is computed from, which decides its random numbers.

Ranks with different shards must not draw the same numbers. A tensor that is itself a shard of a known whole draws its
part of the whole's numbers, which are those of a single process. Origins are found once per signature, so a call with a
known signature costs nothing. An alias that exists before an in-place write keeps its origin.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _pytree as pytree

from monarch_backend.dtensor._per_rank import per_rank_int
from monarch_backend.dtensor._torch_internals import tracing_state

_aten = torch.ops.aten


class Whole(NamedTuple):
    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def is_strided(self) -> bool:
        """Whether a shard is several pieces of the whole, such as of heads after they were merged with the batch."""
        return any(type(each) is _StridedShard for each in self.placements)

    def spec(self, dtype: torch.dtype) -> DTensorSpec:
        meta = TensorMeta(torch.Size(self.shape), self.stride, dtype)
        return DTensorSpec(self.mesh, self.placements, tensor_meta=meta)


class Origin(NamedTuple):
    """``streams``: a number for each rank, equal for equal shards. ``whole``: None if the tensor is not a shard."""

    streams: tuple[int, ...]
    whole: Whole | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Operand:
    """A tensor among an operation's arguments, as one rank has it."""

    origin: Origin | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def whole(self) -> Any:
        return None if self.origin is None else self.origin.whole


MARK = "monarch_origin"
"""Key in the ``meta`` of a trace's nodes: the origin of a local tensor that the program took from a DTensor."""


# Shards of DTensors ---------------------------------------------------------------------------------------------


def of_shard(spec: DTensorSpec, mesh: Any, coordinates: Sequence[Any]) -> Origin | None:
    """Return a local tensor's origin; None if ranks have the same. ``coordinates``: by mesh dimension, of all ranks."""
    dims = [dim for dim, each in enumerate(spec.placements) if each.is_shard()]
    columns = [per_rank_int.values_of(coordinates[dim]) for dim in dims]
    streams = numbered(list(zip(*(each for each in columns if each is not None), strict=True)))
    return None if streams is None else Origin(streams, _whole(spec, mesh))


def _whole(spec: DTensorSpec, mesh: Any) -> Whole | None:
    """Return the whole; None if ranks have parts of a sum, or shards in another order than the mesh's."""
    shape, stride = tuple(spec.shape), tuple(spec.stride)
    if not all(type(each) in (Shard, Replicate, _StridedShard) for each in spec.placements):
        return None
    if not all(type(size) is int for size in (*shape, *stride)):
        return None
    placements = tuple(Shard(each.dim % len(shape)) if type(each) is Shard else each for each in spec.placements)
    whole = Whole(mesh, placements, shape, stride)
    if whole.is_strided:
        dims = [each.dim for each in placements if isinstance(each, (Shard, _StridedShard))]
        return whole if len(set(dims)) == len(dims) else None
    return whole if spec.shard_order == DTensorSpec.compute_default_shard_order(spec.placements) else None


def numbered(places: Sequence[Any]) -> tuple[int, ...] | None:
    """Return a number for each place, equal for equal places; None if there is only one."""
    known = {place: number for number, place in enumerate(dict.fromkeys(places))}
    return tuple(known[each] for each in places) if len(known) > 1 else None


def together(streams: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return numbers that are equal on ranks where all of these are equal."""
    return numbered(list(zip(*streams, strict=True))) or streams[0]


def common(origins: Sequence[Origin | None]) -> Origin | None:
    """Return the origin of a tensor on all ranks, from those of its classes of ranks."""
    different = set(origins)
    if len(different) == 1:
        return origins[0]
    return Origin(together([each.streams for each in different if each is not None]))


# Operations -----------------------------------------------------------------------------------------------------


Sizes = Sequence[Any]
OfResult = Callable[[int, Sizes, Sizes], Origin | None]
"""Function from a result's number, shape and strides to its origin."""


def of_results(call: Any, args: Any, kwargs: Any) -> OfResult:
    """Return a function that finds the origins of an operation's results. ``args``: `Operand`s in place of tensors."""
    known = [each for each in pytree.tree_leaves((args, kwargs)) if type(each) is Operand and each.origin is not None]
    if not known:
        return lambda *_: None
    if call in _COPIES and type(args[1]) is Operand:
        return lambda *_: _of_copy(args[0], args[1])
    if getattr(getattr(call, "_schema", None), "name", "").startswith(("aten::_foreach_", "aten::_fused_")):
        each_call = _aten.copy_.default if "copy" in call._schema.name else _pointwise
        return lambda at, *sizes: of_results(each_call, *_element((args, kwargs), at))(0, *sizes)
    if call in _MADE_ANEW:
        return lambda _at, shape, stride: _anew(known[0], shape, stride)
    lost = Origin(together([each.origin.streams for each in known if each.origin is not None]))
    if None in [each.whole for each in known]:
        return lambda *_: lost
    propagated = functools.cache(lambda shape: list(_propagated(call, args, kwargs, known, shape)))
    is_pointwise = call is _pointwise or call in _ALSO_POINTWISE or torch.Tag.pointwise in getattr(call, "tags", ())
    is_alike = is_pointwise and len({(each.origin, tuple(each.shape)) for each in known}) == 1

    def of_result(at: int, shape: Sizes, stride: Sizes) -> Origin | None:
        if call in _OF_SIZES and tuple(shape) == tuple(known[0].shape):  # the same elements
            return known[0].origin
        if is_alike and tuple(shape) == tuple(known[0].shape) and _is_same_order(known[0], stride):
            return known[0].origin
        with_outputs, *others = [
            {whole for whole in wholes[at : at + 1] if whole is not None and _fits(whole, shape, known)}
            for wholes in propagated(tuple(shape) if call in _OF_SIZES else None)
        ] or [set()]
        found = with_outputs or set().union(*others)
        found = {each for each in found if not each.is_strided} or found
        if len(found) == 1:
            return lost._replace(whole=found.pop())
        if is_alike and tuple(shape) == tuple(known[0].shape):
            whole = known[0].whole
            return lost._replace(whole=whole._replace(stride=_ordered(whole.shape, stride)))
        return lost

    return of_result


def _element(args: Any, at: int) -> Any:
    """Return the arguments with this element of each list in place of the list."""

    def one(value: Any) -> Any:
        return value[at] if isinstance(value, (list, tuple)) and at < len(value) else value

    given, named = args
    return [one(each) for each in given], {name: one(each) for name, each in named.items()}


def _pointwise(*_: Any) -> None:
    """Placeholder of an operation on elements of lists."""


def _is_same_order(operand: Operand, stride: Sizes) -> bool:
    """Whether these strides have the operand's order, also in the whole. Dimensions of one element are ignored."""
    whole = operand.whole
    is_told = all(mine > 1 or all_ <= 1 for mine, all_ in zip(operand.shape, whole.shape, strict=True))
    return is_told and tuple(stride) == tuple(operand.stride)


def _ordered(shape: Sizes, local_stride: Sizes) -> tuple[int, ...]:
    """Return the strides of a whole whose dimensions have the order of these strides."""
    strides, count = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (local_stride[dim], -dim)):
        strides[dim] = count
        count *= max(shape[dim], 1)
    return tuple(strides)


def _propagated(
    call: Any, args: Any, kwargs: Any, known: list[Operand], sizes: Sizes | None
) -> Iterator[list[Whole | None]]:
    """Yield the wholes of the results, by the operation on the operands' wholes.

    DTensor's own rules tell whether the local result is a shard of the whole's result. ``sizes``: of a shard, if they
    are an argument. One after the other is left to torch.
    """
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    strategies = propagator.op_strategy_funcs, propagator.op_single_dim_strategy_funcs, propagator.op_to_rules
    meshes = {each.whole.mesh for each in known}
    if len(meshes) > 1 or not any(call in each for each in strategies):
        return
    mesh = next(iter(meshes))
    of_single_dims = propagator.op_to_schema_info_for_single_dim_strategy.get(call)
    schema_info = propagator.op_to_schema_info.get(call, of_single_dims)

    def spec(value: Any) -> Any:
        if type(value) is not Operand:
            return value
        if value.whole is not None:
            return value.whole.spec(value.dtype)
        meta = TensorMeta(torch.Size(value.shape), tuple(value.stride), value.dtype)
        return DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)

    given, named = pytree.tree_map(spec, (tuple(args), kwargs))
    of_sizes = [(given[0], [*sizes[:at], -1, *sizes[at + 1 :]]) for at in range(len(sizes))] if sizes else []
    for each in (given, *of_sizes):
        schema = OpSchema(call, each, named, schema_info=schema_info)
        try:
            with tracing_state.outside(), tracing_state.quiet:
                sharding = propagator.propagate_op_sharding_non_cached(schema)
        except Exception:  # the whole has no such operation, because of its sizes
            yield []
            continue
        moved, results = sharding.redistribute_schema, sharding.output_spec
        if moved is not None and [s.placements for s in moved.args_spec] != [s.placements for s in schema.args_spec]:
            yield []
            continue
        results = list(results) if isinstance(results, (list, tuple)) else [results]
        yield [_whole(each, mesh) if isinstance(each, DTensorSpec) else None for each in results]


def _fits(whole: Whole, shape: Sizes, known: list[Operand]) -> bool:
    """Whether a rank that has the operands' shapes has a shard of this shape."""
    given = [(each.whole, tuple(each.shape)) for each in known]
    cuts = [
        [not w.placements[dim].is_replicate() for w in (whole, *(w for w, _ in given))]
        for dim in range(whole.mesh.ndim)
    ]
    places = itertools.product(
        *(range(size) if any(cut) else (0,) for size, cut in zip(whole.mesh.shape, cuts, strict=True))
    )
    mine = [at for at in places if all(_local_shape(w, at) == size for w, size in given)]
    return bool(mine) and all(_local_shape(whole, at) == tuple(shape) for at in mine)


def _local_shape(whole: Whole, place: tuple[int, ...]) -> tuple[int, ...]:
    return _shard_shape(whole.shape, whole.placements, tuple(whole.mesh.shape), place)


@functools.lru_cache(1 << 14)
def _shard_shape(
    shape: tuple[int, ...], placements: tuple[Any, ...], mesh: tuple[int, ...], place: tuple[int, ...]
) -> tuple[int, ...]:
    sizes = list(shape)
    for placement, ranks, rank in zip(placements, mesh, place, strict=True):
        if placement.is_replicate():
            continue
        pieces = getattr(placement, "split_factor", 1)
        size, rest = divmod(sizes[placement.dim], pieces)
        if rest:
            return ()  # pieces of other sizes are not followed
        part = -(-size // ranks)
        sizes[placement.dim] = min(max(size - part * rank, 0), part) * pieces
    return tuple(sizes)


def _anew(given: Operand, shape: Sizes, stride: Sizes) -> Origin | None:
    """Return the origin of a tensor without the operand's values.

    A dimension of the shard's size is a shard's dimension; one of size 1 is not.
    """
    streams, whole = given.origin  # type: ignore[misc]
    if whole is None or whole.is_strided or len(shape) != len(whole.shape):
        return Origin(streams) if math.prod(shape) > 1 else None
    sizes = list(shape)
    placements: list[Any] = [
        Replicate() if each.is_shard() and sizes[each.dim] == 1 and given.shape[each.dim] != 1 else each
        for each in whole.placements
    ]
    for dim in {each.dim for each in placements if each.is_shard()}:
        if sizes[dim] != given.shape[dim]:
            return Origin(streams)
        sizes[dim] = whole.shape[dim]
    if not any(each.is_shard() for each in placements):
        return None
    return Origin(streams, Whole(whole.mesh, tuple(placements), tuple(sizes), _ordered(sizes, stride)))


def _of_copy(written: Operand, source: Operand) -> Origin | None:
    mine, other = written.origin, source.origin
    is_spread = tuple(source.shape) != tuple(written.shape)
    if other is None:  # a shard filled with one number is still a shard
        return mine if is_spread and mine is not None and mine.whole is not None else None
    if other.whole is None or is_spread:
        return other._replace(whole=None)
    if mine is not None and mine.whole is not None and mine.whole[:3] == other.whole[:3]:
        return other._replace(whole=mine.whole)
    if _is_same_order(source, written.stride):
        return other
    return other._replace(whole=other.whole._replace(stride=_ordered(other.whole.shape, written.stride)))


def after_write(base: Origin | None, part: Origin | None) -> Origin | None:
    """Return the origin of a tensor after values of the other origin were written into a part of it."""
    if part is None or base == part:
        return base
    if base is None:
        return Origin(part.streams)
    streams = together([base.streams, part.streams])
    return base if numbered(streams) == numbered(base.streams) else Origin(streams)


# Collectives ----------------------------------------------------------------------------------------------------


def of_collective(name: str, given: Sequence[Origin], rows: Sequence[Sequence[int]], size: int) -> Origin | None:
    """Return the origin of a collective's result, for the ranks in each of these rows.

    Ranks of one row have the same result, or each its part. Rows have equal results if their ranks' operands are equal.
    """
    streams = together([origin.streams for origin in given]) if given else (0,) * size
    is_scattered = any(part in name for part in _SCATTERED) or name == "reduce_"  # only the root has it
    places: list[Any] = [None] * size
    for row in rows:
        of_row = tuple(streams[rank] for rank in row)
        for place, rank in enumerate(row):
            places[rank] = (of_row, place if is_scattered else 0)
    inside = [each for each in places if each is not None]
    found = numbered([inside[0] if each is None else each for each in places]) if inside else None
    return None if found is None else Origin(found)


_SCATTERED = ("scatter", "alltoall", "all_to_all", "permute")


# Kinds of operations --------------------------------------------------------------------------------------------


def _overloads(*packets: Any) -> frozenset[Any]:
    return frozenset(getattr(packet, name) for packet in packets for name in packet.overloads())


_MADE_ANEW = _overloads(_aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty_strided)
"""Operations whose result has an argument's sizes, or others, but not its values."""
_COPIES = (_aten.copy_.default, _aten.copy.default)
_OF_SIZES = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten.expand.default)
_ALSO_POINTWISE = {
    _aten._to_copy.default, _aten.detach.default, _aten.alias.default, _aten.native_dropout.default,
    _aten.hardswish.default, _aten.lift_fresh.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default,
    *_overloads(
        _aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like, _aten.randn_like,
        _aten.randint_like,
    ),
}  # fmt: skip
"""Operations that are not tagged as pointwise."""
