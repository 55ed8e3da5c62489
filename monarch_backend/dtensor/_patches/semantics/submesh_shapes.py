"""Sharding decisions for DTensors on a sliced mesh whose sizes differ by slice: torch decides once for each slice.

A batch of 5 on two rows of ranks is 3 rows of one tensor and 2 of the other. On ``mesh["tp"]`` each is a whole
tensor. Such a size is an int that differs by rank. torch decides by sizes how an operation is sharded. So it is called
once for each slice, with plain ints. The results must be equal except for sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.utils import _pytree as pytree

from monarch_backend.dtensor._controller.controller_mesh import Replacement, workers_of
from monarch_backend.dtensor._errors import RankDependentError, RemoteTensorError
from monarch_backend.dtensor._per_rank import per_rank_int

LOCALLY = (
    "A DTensor is one tensor for all of them: calculate with the ranks' parts and say what they are of "
    "(DTensor.from_local(x.to_local() * number, x.device_mesh, x.placements)), or do it on the workers: "
    "monarch_backend.dtensor.run(mesh, function, ...)"
)
"""Advice for an operation of a DTensor with a number that differs by rank."""


def _hash(own: Any) -> Replacement:
    # torch caches operations by this hash of a DTensor's sizes.
    def __hash__(self: Any) -> int:
        values = per_rank_int.values_of(self)
        return own(self) if values is None else hash(values)

    return __hash__


def _for_each_slice(own: Any) -> Replacement:
    def propagate_op_sharding_non_cached(self: Any, op_schema: Any) -> Any:
        found = numbers(op_schema)
        if not found:
            return own(self, op_schema)
        for number in found:
            if not number.node.are_sizes:
                raise RankDependentError(
                    f"{op_schema.op} of a DTensor and {number}", "is another number on each rank", LOCALLY
                )
        columns = list(zip(*[each.node.values for each in found], strict=True))
        known: dict[Any, Any] = {}
        for rank, mine in enumerate(columns):
            if None not in mine and mine not in known:
                known[mine] = own(self, _on_rank(op_schema, rank))
        results = [None if None in mine else known[mine] for mine in columns]
        return _merged(results, f"{op_schema.op} of DTensors of {', '.join(map(str, found))} rows or columns")

    return propagate_op_sharding_non_cached


class PropagationCache:
    """Cache of a sharding propagator, in which sizes that differ by slice are not kept."""

    def __init__(self, propagator: Any) -> None:
        self._propagator, self._own = propagator, propagator.__dict__["propagate_op_sharding"]

    def __call__(self, *args: Any, **options: Any) -> Any:
        # torch's propagator, which is older than these replacements, caches results of its own function.
        if len(args) == 1 and isinstance(args[0], OpSchema) and numbers(args[0]):
            return self._propagator.propagate_op_sharding_non_cached(args[0])
        return self._own(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


class _OnTheCpu:
    """Schema of an operation whose tensors torch makes on the CPU, for shapes only."""

    def __init__(self, schema: OpSchema) -> None:
        self.op, self._schema = schema.op, schema

    def gen_fake_args(self) -> Any:
        return pytree.tree_map_only(DTensorSpec, _without_values, self._schema.args_schema, is_leaf=_is_spec)

    def gen_fake_kwargs(self) -> Any:
        return pytree.tree_map_only(DTensorSpec, _without_values, self._schema.kwargs_schema, is_leaf=_is_spec)


def _is_spec(value: Any) -> bool:
    return isinstance(value, DTensorSpec)


def _without_values(spec: DTensorSpec) -> torch.Tensor:
    meta = spec.tensor_meta
    assert meta is not None
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype)


def _on_the_cpu(own: Any) -> Replacement:
    # Some of torch's C++ would switch to the device, which fails for XLA.
    def _propagate_tensor_meta_non_cached(self: Any, op_schema: Any) -> Any:
        given = pytree.tree_leaves((op_schema.args_schema, op_schema.kwargs_schema), is_leaf=_is_spec)
        meshes = [each.mesh for each in given if isinstance(each, DTensorSpec)]
        is_xla = any(each.device_type == "xla" and workers_of(each) is not None for each in meshes)
        return own(self, _OnTheCpu(op_schema) if is_xla else op_schema)

    return _propagate_tensor_meta_non_cached


def _ours_as_raised(own: Any) -> Replacement:
    def _propagate_op_sharding_dispatch_slow_path(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return own(self, *args, **options)
        except RuntimeError as error:
            if isinstance(error.__cause__, RemoteTensorError):
                raise error.__cause__  # noqa: B904  (torch has put it into words of its own)
            raise

    return _propagate_op_sharding_dispatch_slow_path


def numbers(value: Any) -> list[torch.SymInt]:
    """The ints that differ by rank in an operation's schema."""
    if type(value) is torch.SymInt:
        return [value] if per_rank_int.values_of(value) is not None else []
    parts = _parts(value)
    return [] if parts is None else [number for each in parts for number in numbers(each)]


def _parts(value: Any) -> Sequence[Any] | None:
    if isinstance(value, OpSchema):
        return [*value.args_schema, *value.kwargs_schema.values()]
    if isinstance(value, DTensorSpec):
        return [] if value.tensor_meta is None else [*value.tensor_meta.shape, *value.tensor_meta.stride]
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, (list, tuple)) else None


def _on_rank(value: Any, rank: int) -> Any:
    if type(value) is torch.SymInt:
        values = per_rank_int.values_of(value)
        return value if values is None else values[rank]
    if isinstance(value, OpSchema):
        return OpSchema(
            value.op, _on_rank(value.args_schema, rank), _on_rank(value.kwargs_schema, rank), value.schema_info
        )
    if isinstance(value, DTensorSpec):
        return value.shallow_copy_with_tensor_meta(_on_rank(value.tensor_meta, rank))
    if isinstance(value, TensorMeta):
        shape = torch.Size(_on_rank(tuple(value.shape), rank))
        return TensorMeta(shape, _on_rank(tuple(value.stride), rank), value.dtype)
    if isinstance(value, dict):
        return {name: _on_rank(each, rank) for name, each in value.items()}
    return type(value)([_on_rank(each, rank) for each in value]) if type(value) in (list, tuple) else value


def _merged(column: Sequence[Any], what: str) -> Any:
    """Return one value for the ranks' values; None for a rank that takes no part."""
    first = next(each for each in column if each is not None)
    if type(first) in (int, torch.SymInt):
        numbers = [_on_rank(each, rank) for rank, each in enumerate(column)]
        return per_rank_int.by_rank(numbers, sizes=True)

    def part(of: Any) -> Any:
        parts = [None if each is None else of(each) for each in column]
        return None if all(each is None for each in parts) else _merged(parts, what)

    if any(each is not None and type(each) is not type(first) for each in column):
        raise _other(what)
    if isinstance(first, OutputSharding):
        return OutputSharding(
            part(lambda each: each.output_spec), part(lambda each: each.redistribute_schema),
            part(lambda each: each.needs_redistribute), part(lambda each: each.use_val_from_redistribute_schema),
        )  # fmt: skip
    if isinstance(first, OpSchema):
        args, kwargs = part(lambda each: each.args_schema), part(lambda each: each.kwargs_schema)
        return OpSchema(first.op, args, kwargs, first.schema_info)
    if isinstance(first, DTensorSpec):
        if any(each is not None and not first._check_equals(each, skip_shapes=True) for each in column):
            raise _other(what)
        return first.shallow_copy_with_tensor_meta(part(lambda each: each.tensor_meta))
    if isinstance(first, TensorMeta):
        shape = torch.Size(part(lambda each: tuple(each.shape)))
        return TensorMeta(shape, part(lambda each: tuple(each.stride)), first.dtype)
    if isinstance(first, dict):
        return {name: part(lambda each, name=name: each[name]) for name in first}
    if type(first) in (list, tuple):
        if any(each is not None and len(each) != len(first) for each in column):
            raise _other(what)
        return type(first)([part(lambda each, at=at: each[at]) for at in range(len(first))])
    if any(each is not None and each != first for each in column):
        raise _other(what)
    return first


def _other(what: str) -> RankDependentError:
    instead = "Redistribute the tensors first, to shards that all slices can have (Replicate())"
    return RankDependentError(what, "would be sharded in another way on each slice of the mesh", instead)
