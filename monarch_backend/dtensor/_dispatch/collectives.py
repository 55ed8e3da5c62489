"""Eager collectives of ``torch.distributed`` on remote tensors: commands that call functions of _worker/collectives.py.

Functional collectives are ordinary operations.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from monarch_backend.dtensor import _protocol
from monarch_backend.dtensor._controller import call_sites
from monarch_backend.dtensor._controller.operations import operations
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._controller.tensor_meta import Meta
from monarch_backend.dtensor._controller.worker_set import WorkerSet
from monarch_backend.dtensor._dispatch.op_signatures import set_origin
from monarch_backend.dtensor._errors import RemoteTensorError
from monarch_backend.dtensor._per_rank import shard_origins
from monarch_backend.dtensor._torch_internals import c10d_registry
from monarch_backend.dtensor._worker import collectives as there

SIGNATURE_CACHE_SIZE = 1024
"""Limit of signatures of one set of workers. Beyond it the older half is dropped."""
_WRITTEN = ("tensors", "output", "outputs", "output_tensor", "output_tensors", "output_lists")
"""torch's names of arguments that its collectives change, which their schemas do not declare."""


class _Known(NamedTuple):
    """``numbers`` of a signature: the one in commands, and those of the classes of ranks. ``origin``: of its result."""

    numbers: list[int]
    origin: shard_origins.Origin | None


def eager(func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``dist.all_reduce(tensor)`` and others; the operator has the group and the reduction in boxes."""
    name = func._schema.name.split("::")[1]
    if not hasattr(there, name):
        raise RemoteTensorError(
            f"{name}: the workers have no such collective of tensors of one controller. Redistribute a DTensor, or run "
            "the function that calls it on the workers (monarch_backend.dtensor.run)"
        )
    names = [each.name for each in func._schema.arguments]
    issue(name, pytree.tree_map(_unboxed, {**dict(zip(names, args, strict=False)), **kwargs}))
    work = dist.Work.boxed(c10d_registry.done())
    if len(func._schema.returns) == 1:
        return work if "Work" in str(func._schema.returns[0].type) else None
    return args[0], work


def _unboxed(value: Any) -> Any:
    if isinstance(value, torch.ScriptObject):
        if "ReduceOp" in str(value._type()):
            return dist.ReduceOp.RedOpType(int(value.op())).name  # type: ignore[attr-defined]
        return dist.ProcessGroup.unbox(value)
    return value


def issue(name: str, given: dict[str, Any]) -> None:
    operands: list[RemoteTensor] = []

    def operand(value: Any) -> int | None:
        if isinstance(value, RemoteTensor):
            operands.append(value)
            return len(operands) - 1
        return None

    workers = next(each for each in pytree.tree_leaves(given) if isinstance(each, RemoteTensor))._meta.workers
    places: dict[str, Any] = {}
    writes: list[int] = []
    for argument, value in given.items():
        before = len(operands)
        if isinstance(value, RemoteTensor) or not isinstance(value, torch.Tensor):  # others are empty
            places[argument] = _protocol.place(value, operand, workers.group_name)
        if argument in _WRITTEN:
            writes += range(before, len(operands))
    known = _signature(workers, name, places, writes, [each._meta for each in operands], given)
    workers.write((known.numbers[0], call_sites.here(), *[each._ref.id for each in operands]))
    for at in writes:
        if operands[at]._meta.origin != known.origin:
            set_origin(operands[at], known.origin)


def _signature(
    workers: WorkerSet, name: str, places: dict[str, Any], writes: list[int], metas: list[Meta], given: dict[str, Any]
) -> _Known:
    key = (name, repr(places), *metas)
    known: dict[Any, _Known] = workers.kept.setdefault("collectives", {})
    found = known.get(key)
    if found is None:
        numbers = _define(workers, f"{there.__name__}:{name}", places, writes, metas)
        read = [meta for at, meta in enumerate(metas) if at not in writes] or metas
        origins = [meta.origin for meta in read if meta.origin is not None]
        rows = workers.rows(list(given.values()))
        found = known[key] = _Known(numbers, shard_origins.of_collective(name, origins, rows, workers.size))
        if len(known) > SIGNATURE_CACHE_SIZE:
            for each in list(known)[: len(known) // 2]:
                workers.forget(known.pop(each).numbers)
    return found


def _define(workers: WorkerSet, target: str, places: dict[str, Any], writes: list[int], metas: list[Meta]) -> list[int]:
    """Define the signature. A rank without an operand takes part with zeros of its sizes, which may differ by rank."""
    on_ranks = [[meta.on(rank) for meta in metas] for rank in range(workers.size)]
    by_rank = [[None if meta is None else _protocol.form(meta) for meta in mine] for mine in on_ranks]
    classes = [form for form, _ in itertools.groupby(sorted(by_rank, key=repr)) if None not in form]
    parts = [workers.define(target, [], places, len(metas), _protocol.Kind.NONE, 0, writes, form) for form in classes]
    of_rank = [-1 if None in form else classes.index(form) for form in by_rank]
    return parts if set(of_rank) == {0} else [workers.define_by_rank(parts, of_rank), *parts]


operations.issue = issue
