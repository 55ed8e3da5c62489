"""Signatures: the effect of an operation on metadata, computed once, with its number on the workers.

A signature is an operation with the metadata of its tensors and its other arguments. Floats, torch's "Scalars" and
numbers without effect on metadata are not part of it. They are sent with each command, because a learning rate or a
step count differs in each step. The effect is found by running the operation on fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from monarch_backend import _native
from monarch_backend.dtensor import _protocol
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._controller.tensor_meta import Meta
from monarch_backend.dtensor._controller.worker_set import WorkerSet
from monarch_backend.dtensor._dispatch.fake_tensors import (
    Operand,
    meta_of,
    out_sizes,
    propagate_with_device,
)
from monarch_backend.dtensor._errors import MeshMismatchError, RemoteTensorError
from monarch_backend.dtensor._per_rank import output_strides, per_rank_int, shard_origins
from monarch_backend.dtensor._per_rank.shard_origins import Origin
from monarch_backend.dtensor._protocol import Kind
from monarch_backend.dtensor._torch_internals import decompositions

Entry = _native.Entry
"""Cached effect of a signature. ``number`` 0: no command is sent, and ``host`` is the result.

``kind``, ``outs``: of results, None for a value that is not a tensor. ``sequence``: list or tuple, of several results.
An operation that changes an argument returns number ``at``, or ``returns(args, kwargs)``. ``parts``: all its numbers on
the workers. ``used``: time of the last use, counted in commands.
"""


class Target(NamedTuple):
    """The operator or function that workers run."""

    name: str
    """Same as `_protocol.Signature.target`."""
    call: Callable[..., Any]
    schema: Any = None
    """torch's schema of an operator."""
    writes: tuple[int, ...] = ()
    """Positions of the arguments that a function without a schema changes."""


def scalars_of(schema: Any) -> tuple[int, frozenset[str]]:
    """Return the arguments that may be ints without effect on the result's metadata: bits by position, and names.

    These are torch's Scalars, and numbers in place of tensors. Operators that make a tensor only from numbers, such as
    arange, have none.
    """
    if not any("Tensor" in str(each.type) for each in schema.arguments):
        return 0, frozenset()
    found = [(i, each) for i, each in enumerate(schema.arguments) if _takes_a_number(each.type)]
    positions = sum(1 << i for i, each in found if not each.kwarg_only and i < 64)
    return positions, frozenset(each.name for _, each in found)


def _takes_a_number(kind: Any) -> bool:
    inner = kind.getElementType() if isinstance(kind, torch.OptionalType) else kind
    return isinstance(inner, (torch.TensorType, torch.NumberType))


def with_numbers(schema: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments, with ints that each command sends marked as such."""
    if schema is None:
        return args, kwargs
    positions, names = scalars_of(schema)

    def number(value: Any, is_scalar: object) -> Any:
        return _protocol.Number(value) if is_scalar and type(value) is int and -(2**63) <= value < 2**63 else value

    return (
        [number(each, positions >> i & 1) for i, each in enumerate(args)],
        {name: number(each, name in names) for name, each in kwargs.items()},
    )


def make(workers: WorkerSet, target: Target, args: Any, kwargs: Any) -> Entry:
    """Define a new signature on the workers. The caller has `fake_tensors.one_at_a_time`."""
    flat, spec = pytree.tree_flatten((args, kwargs))
    classes = _classes(workers, flat)
    if target.name.startswith(_protocol.COLLECTIVES):
        classes = _without(workers.outside(flat), classes, workers.size)
    if classes is None:
        return _noting(*_make_same(workers, target, args, kwargs), args, kwargs)
    of_rank, members = classes
    if not members:
        raise RemoteTensorError(
            f"{target.name} got tensors of which no rank has all, of several slices of {workers.name}: move them to "
            "one mesh first: monarch_backend.dtensor.move(x, mesh)"
        )
    if -1 in of_rank:
        changed = written(target.schema, args, kwargs) + [args[at] for at in target.writes]
        refuse_old_values(target.name, changed, of_rank)
    given = [pytree.tree_unflatten([_on(each, rank) for each in flat], spec) for rank in members]
    calls: list[tuple[Target, Any, Any]] = [(target, args, kwargs) for args, kwargs in given]
    if target.name == _SPLIT:
        calls = _chunked(target, given)
    differing = _origin_of_numbers(flat)
    made = [_make_same(workers, called, args, kwargs, differing) for called, args, kwargs in calls]
    origins = [each for _, each in made]
    after = {place: shard_origins.common([each.get(place) for each in origins]) for place in origins[0]}
    return _noting(_combine(workers, [entry for entry, _ in made], of_rank), after, args, kwargs)


def _origin_of_numbers(flat: Sequence[Any]) -> Origin | None:
    """Return the origin of results of numbers that differ by rank."""
    columns = [values for values in map(per_rank_int.values_of, flat) if values is not None]
    streams = shard_origins.numbered(list(zip(*columns, strict=True)))
    return None if streams is None else shard_origins.Origin(streams)


class OldValuesError(RemoteTensorError):
    """A tensor would be changed on only some of its ranks."""


def refuse_old_values(what: str, changed: Sequence[Any], of_rank: Sequence[int]) -> None:
    """Raise OldValuesError if ranks that have one of these tensors take no part in its change."""
    for each in changed:
        if not isinstance(each, RemoteTensor):
            continue
        left = [rank for rank, which in enumerate(of_rank) if which < 0 and each._meta.on(rank) is not None]
        if left:
            raise OldValuesError(
                f"{what} changes a tensor of all workers by one that ranks {left} have no part of (a slice's, "
                "say): they would keep the old values. Make a new tensor in its place (y = y + x), or make the first "
                "one of the other (torch.zeros_like(x), x.new_zeros(...))"
            )


_SPLIT = "aten.split.Tensor"


def _chunked(target: Target, given: list[Any]) -> list[tuple[Target, Any, Any]]:
    """Return the split of ``torch.chunk`` by rank. Empty tensors get as many pieces: C++ has decided once for all."""
    with_sizes = torch.ops.aten.split_with_sizes.default
    nothing = Target("aten.split_with_sizes.default", with_sizes, with_sizes._schema)

    def dim_of(args: Any) -> int:
        return args[2] if len(args) > 2 else 0

    pieces = [-(-args[0].meta.shape[dim_of(args)] // args[1]) for args, _ in given if args[1]]
    return [
        (target, args, kwargs) if args[1] or not pieces else (nothing, [args[0], [0] * max(pieces), dim_of(args)], {})
        for args, kwargs in given
    ]


def _on(value: Any, rank: int) -> Any:
    if isinstance(value, RemoteTensor):
        return Operand(value._meta.on(rank))
    values = per_rank_int.values_of(value)
    return value if values is None else values[rank]


def other_workers(what: str, one: WorkerSet, other: WorkerSet) -> MeshMismatchError:
    return MeshMismatchError(
        f"{what} got a tensor of {one.name} and one of {other.name}: move one of them first: "
        "monarch_backend.dtensor.move(x, mesh)"
    )


def _classes(workers: WorkerSet, flat: Sequence[Any]) -> tuple[list[int], list[int]] | None:
    """Return each rank's class, -1 if it takes no part, and each class's first rank; None if all ranks are alike."""
    varied: list[Sequence[int | None]] = []
    for each in flat:
        if isinstance(each, RemoteTensor):
            if each._meta.workers is not workers:
                raise other_workers("an operation", workers, each._meta.workers)
            if each._meta.classes is not None:
                varied.append(each._meta.of_rank)
        else:
            values = per_rank_int.values_of(each)
            if values is not None:
                if len(values) != workers.size:
                    raise MeshMismatchError(
                        f"a tensor of {workers.name}, which has {workers.size} processes, and a number that is another "
                        f"on each of {len(values)} ranks ({each}), of another mesh: move the tensor there first: "
                        "monarch_backend.dtensor.move(x, mesh)"
                    )
                varied.append(values)
    if not varied:
        return None
    known: dict[Any, int] = {}
    of_rank: list[int] = []
    members: list[int] = []
    for rank in range(workers.size):
        mine = tuple(each[rank] for each in varied)
        if None in mine or any(
            each._meta.on(rank) is None for each in flat if isinstance(each, RemoteTensor) and each._meta.classes
        ):
            of_rank.append(-1)
            continue
        if mine not in known:
            known[mine] = len(members)
            members.append(rank)
        of_rank.append(known[mine])
    return of_rank, members


def _without(
    outside: set[int], classes: tuple[list[int], list[int]] | None, size: int
) -> tuple[list[int], list[int]] | None:
    """Return these classes without the ranks outside a collective's group, which have no result."""
    if not outside:
        return classes
    of_rank, _ = classes or ([0] * size, [0])
    of_rank = [-1 if rank in outside else of_rank[rank] for rank in range(size)]
    kept = sorted(set(of_rank) - {-1})
    members = [of_rank.index(which) for which in kept]
    return [which if which < 0 else kept.index(which) for which in of_rank], members


def _combine(workers: WorkerSet, entries: list[Entry], of_rank: list[int]) -> Entry:
    first = entries[0]
    if len({len(each.outs) for each in entries}) > 1:
        raise RemoteTensorError(
            f"the ranks have different numbers of results, {sorted(len(each.outs) for each in entries)}: "
            "a program here can't have one number for all"
        )
    entry = Entry()
    entry.workers, entry.kind, entry.sequence = workers, first.kind, first.sequence
    entry.returns, entry.at = first.returns, first.at
    entry.host = _host(entries, of_rank)
    if first.number:
        entry.number = workers.define_by_rank([each.number for each in entries], of_rank)
        entry.parts = [entry.number, *(each.number for each in entries)]
    else:
        entry.number, entry.parts = 0, []

    def out(i: int) -> Meta:
        origin = shard_origins.common([each.outs[i].origin for each in entries])
        metas = [workers.metas.with_origin(each.outs[i], origin) for each in entries]
        return workers.metas.by_rank([None if c < 0 else metas[c] for c in of_rank])

    entry.outs = tuple(None if first.outs[i] is None else out(i) for i in range(len(first.outs)))
    return entry


def _host(entries: list[Entry], of_rank: list[int]) -> Any:
    """Return results that are not tensors as one value. Ints may differ by rank; other values must be equal."""
    flats = [pytree.tree_flatten(each.host) for each in entries]
    leaves = []
    for column in zip(*(flat for flat, _ in flats), strict=True):
        if all(type(each) is int for each in column):
            leaves.append(per_rank_int.by_rank([None if c < 0 else column[c] for c in of_rank], sizes=True))
        elif all(type(each) is bool for each in column):
            leaves.append(all(column))
        elif all(each == column[0] for each in column):
            leaves.append(column[0])
        else:
            raise RemoteTensorError(f"the ranks have different results that are no ints: {sorted(map(repr, column))}")
    return pytree.tree_unflatten(leaves, flats[0][1])


Place = tuple[int, str, int]
"""Place of an argument that an operation changes: its position, its name, its index in a list of tensors."""


def _make_same(
    workers: WorkerSet, target: Target, args: Any, kwargs: Any, differing: Origin | None = None
) -> tuple[Entry, dict[Place, Origin | None]]:
    """Make the entry for ranks that are alike, and changed arguments' origins. ``differing``: origin of numbers."""
    entry = Entry()
    entry.workers, entry.outs, entry.kind, entry.sequence, entry.host = workers, (), Kind.NONE, tuple, None
    entry.returns, writes = _returned(target.schema)
    entry.at = writes[0][0] if entry.returns is not None and len(target.schema.returns) == 1 else -1
    writes += [(i, "") for i in target.writes]
    of_result = _origins_of(workers, target, args, kwargs, differing)
    # All checks come before the definition on workers.
    if entry.returns is None:
        result, device = propagate_with_device(workers, target.call, args, kwargs)
        result = output_strides.as_cpus_have_it(target.call, list(map(meta_of, args)), result)
        _shape_results(workers, entry, result, device, of_result)
        if entry.host is not None:
            entry.number, entry.parts = 0, []
            return entry, {}
    elif decompositions.is_out_variant(target.call):
        _check_sizes(target, args, kwargs)
    elif target.schema.returns:
        propagate_with_device(workers, target.call, args, kwargs)
    operands: list[Any] = []

    def operand(value: Any) -> int | None:
        if isinstance(value, (RemoteTensor, Operand, float, _protocol.Number)):
            operands.append(value)
            return len(operands) - 1
        return None

    places = [_protocol.place(each, operand, workers.group_name) for each in args]
    named = {name: _protocol.place(each, operand, workers.group_name) for name, each in kwargs.items()}
    ins = (
        [meta and _protocol.form(meta) for meta in map(meta_of, operands)]
        if target.name.startswith(_protocol.COLLECTIVES)
        else []
    )
    entry.number = workers.define(
        target.name, places, named, len(operands), entry.kind, len(entry.outs), _written(writes, places, named), ins,
        output_strides.said(entry.outs, workers.device),
    )  # fmt: skip
    entry.parts = [entry.number]
    changed: dict[Place, Origin | None] = {}
    for at, name in _known_writes(target.schema) if target.schema is not None else ():
        for i, value in enumerate(_as_list(_argument(args, kwargs, at, name))):
            meta = meta_of(value)
            if meta is not None:
                changed[at, name, i] = of_result(i, meta.shape, meta.stride)
    return entry, changed


def _argument(args: Any, kwargs: Any, at: int, name: str) -> Any:
    return args[at] if at < len(args) else kwargs.get(name)


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _noting(entry: Entry, changed: dict[Place, Origin | None], args: Any, kwargs: Any) -> Entry:
    """Make each call store the new origins of the arguments that it changes."""
    returns = entry.returns

    def written(place: Place, args: Any, kwargs: Any) -> Any:
        at, name, i = place
        return _as_list(_argument(args, kwargs, at, name))[i]

    found = {
        place: origin
        for place, origin in changed.items()
        if isinstance(tensor := written(place, args, kwargs), RemoteTensor) and tensor._meta.origin != origin
    }
    if not found or returns is None:
        return entry

    def noting(args: Any, kwargs: Any) -> Any:
        for place, origin in found.items():
            set_origin(written(place, args, kwargs), origin)
        return returns(args, kwargs)

    entry.returns, entry.at = noting, -1
    return entry


def set_origin(tensor: Any, origin: Origin | None) -> None:
    """Store the origin of a changed tensor. If it is a view, its base has some of the new values, too."""
    if not isinstance(tensor, RemoteTensor):
        return
    metas = tensor._meta.workers.metas
    tensor._meta = metas.with_origin(tensor._meta, origin)
    base = tensor._base if tensor._is_view() else None
    if isinstance(base, RemoteTensor):
        base._meta = metas.with_origin(base._meta, shard_origins.after_write(base._meta.origin, origin))


def _check_sizes(target: Target, args: Any, kwargs: Any) -> None:
    """Raise for an ``out=`` of other sizes, which torch resizes with a warning of deprecation.

    Empty ones, which torch always resizes, are the caller's task. So is a sent tensor of this process, which is read
    afterwards.
    """
    for out, size in out_sizes(target.call, args, kwargs):
        if isinstance(out, RemoteTensor) and 0 not in out._meta.shape and tuple(out._meta.shape) != size:
            raise RemoteTensorError(
                f"{target.name}: the result has the shape {size}, and `out`, a tensor of the workers, "
                f"{tuple(out._meta.shape)}: give it one of that shape, or an empty one"
            )


def _returned(schema: Any) -> tuple[Callable[[Any, Any], Any] | None, list[Any]]:
    """Return what an operation that changes arguments returns, and which arguments it changes."""
    if schema is None:
        return None, []
    writes = _writes(schema)
    if not writes:
        return None, []
    if not schema.returns:
        return (lambda _args, _kwargs: None), writes
    if not all(each.alias_info is not None and each.alias_info.is_write for each in schema.returns):
        return None, writes  # it changes some and makes others, as native_batch_norm does

    def one(at: int, name: str) -> Callable[[Any, Any], Any]:
        return lambda args, kwargs: args[at] if at < len(args) else kwargs[name]

    # Changed arguments that the schema does not declare, batch norm's running values, are not returned.
    returned = [one(*each) for each in writes if schema.arguments[each[0]].alias_info is not None]
    if len(schema.returns) == 1:
        return returned[0], writes
    return (lambda args, kwargs: tuple(each(args, kwargs) for each in returned)), writes


_BATCH_NORMS = ("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm")
"""Operators that change their running values although their schemas do not declare it."""


def _writes(schema: Any) -> list[tuple[int, str]]:
    """Return positions and names of the arguments that the operator changes."""
    unsaid = ("running_mean", "running_var") if schema.name in _BATCH_NORMS else ()
    return [
        (i, each.name)
        for i, each in enumerate(schema.arguments)
        if each.name in unsaid or (each.alias_info is not None and each.alias_info.is_write)
    ]


_known: dict[int, tuple[Any, list[tuple[int, str]]]] = {}
"""Changed arguments of schemas by id, with the schemas, which stay alive. Schemas with list defaults have no hash."""


def _known_writes(schema: Any) -> list[tuple[int, str]]:
    found = _known.get(id(schema))
    if found is None:
        found = _known[id(schema)] = schema, _writes(schema)
    return found[1]


def written(schema: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the tensors among the arguments that the operator changes; none for another function."""
    if schema is None:
        return []
    found = [args[i] if i < len(args) else kwargs.get(name) for i, name in _known_writes(schema)]
    return [each for each in pytree.tree_leaves(found) if isinstance(each, torch.Tensor)]


def _written(writes: list[Any], places: list[Any], named: dict[str, Any]) -> list[int]:
    found: list[int] = []
    for i, name in writes:
        at = places[i] if i < len(places) else named.get(name)
        inner = at[1] if isinstance(at, list) and at[0] == _protocol.Tag.LIST else [at]
        found += [each[1] for each in inner if isinstance(each, list) and each[0] == _protocol.Tag.OPERAND]
    return found


def _origins_of(
    workers: WorkerSet, target: Target, args: Any, kwargs: Any, differing: Origin | None = None
) -> shard_origins.OfResult:
    """Return a function that finds the origin of a result, or of a changed argument."""
    if target.name.startswith(_protocol.COLLECTIVES):
        flat = pytree.tree_leaves((args, kwargs))
        metas = [meta for meta in map(meta_of, flat) if meta is not None]
        given = [meta.origin for meta in metas if meta.origin is not None]
        found = shard_origins.of_collective(target.name, given, workers.rows(flat), workers.size)
        return lambda *_: found

    def operand(value: Any) -> Any:
        meta = meta_of(value)
        return value if meta is None else shard_origins.Operand(meta.origin, meta.shape, meta.stride, meta.dtype)

    of_result = shard_origins.of_results(target.call, *pytree.tree_map(operand, (args, kwargs)))
    return of_result if differing is None else lambda *each: shard_origins.after_write(of_result(*each), differing)


def _shape_results(
    workers: WorkerSet, entry: Entry, result: Any, device: torch.device | None, origin: shard_origins.OfResult
) -> None:
    """Set the entry's results. ``device``: the results' device, if they report another one."""

    def meta(tensor: torch.Tensor, at: int = 0) -> Meta:
        return workers.metas.like(tensor, device, origin(at, tuple(tensor.shape), tensor.stride()))

    if isinstance(result, torch.Tensor):
        entry.kind, entry.outs = Kind.ONE, (meta(result),)
    elif result is None:
        return
    elif isinstance(result, (list, tuple)) and any(isinstance(each, torch.Tensor) for each in result):
        entry.kind, entry.sequence = Kind.MANY, type(result) if type(result) in (list, tuple) else tuple
        entry.outs = tuple(meta(each, at) if isinstance(each, torch.Tensor) else None for at, each in enumerate(result))
    elif pytree.tree_any(lambda each: isinstance(each, torch.Tensor), result):
        raise RemoteTensorError(f"a result of this form can't be kept on workers: {pytree.tree_structure(result)}")
    else:
        entry.host = result
