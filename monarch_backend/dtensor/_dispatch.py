"""What an operation on remote tensors does: one record for all workers, by a signature that is known, mostly.

This is the hot path: a key from the arguments, one look into a dict, some words. What is no plain operation is in
_special.py; what becomes of an unknown signature, in _signatures.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from monarch_backend.dtensor import _rank_ints, _remote_tensor, _signatures, _sites, _values
from monarch_backend.dtensor._errors import MeshMismatchError
from monarch_backend.dtensor._host_by_rank import HostByRank
from monarch_backend.dtensor._remote_tensor import Ref, RemoteTensor
from monarch_backend.dtensor._signatures import Entry, Target
from monarch_backend.dtensor._wire import Kind

if TYPE_CHECKING:
    from monarch_backend.dtensor._workers import Workers

_TRUE, _FALSE = object(), object()  # 1 == True, and they are not the same argument


class _Plan:
    """What is known of an operator."""

    __slots__ = ("entries", "special", "target")

    def __init__(self, target: Target, special: Callable[[Any, Any, Any], Any] | None) -> None:
        self.target, self.special = target, special
        self.entries: dict[Any, Entry] = {}


class _NotPlainError(Exception):
    """An argument that has no place in a key."""


_plans: dict[int, _Plan] = {}  # by the identity of the operator, which lives for ever: its own hash is slow
special: dict[Any, Callable[[Any, Any, Any], Any]] = {}
"""Operators that are no plain operations; filled by _special.py."""
specials: list[Callable[[Any], Callable[[Any, Any, Any], Any] | None]] = []
"""As `special`, for whole kinds of operators."""
statistics = {"misses": 0}


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """An operator's result, as remote tensors."""
    plan = _plans.get(id(func)) or _plan(func)
    if plan.special is not None:
        return plan.special(func, args, kwargs or {})
    return _run(plan, args, kwargs)


def forget(workers: Workers) -> None:
    """They have ended: no signature of theirs is used again."""
    for plan in list(_plans.values()):
        for key, entry in list(plan.entries.items()):
            if entry.workers is workers:
                plan.entries.pop(key, None)


def run_plain(func: Any, args: Any, kwargs: Any) -> Any:
    """As dispatch, for who is in `special` and wants the plain operation itself."""
    return _run(_plan(func), args, kwargs)


def call(
    function: Callable[..., Any], name: str, args: Any, kwargs: Any, schema: Any = None, writes: tuple[int, ...] = ()
) -> Any:
    """A function's result on every worker, each with its own numbers where they differ by rank.

    It may only calculate with its arguments. ``name``: ``module:function``, as workers find it. ``schema``: as an
    operator's, of a function that changes arguments; or ``writes``: the positions of those.
    """
    plan = _plans.get(id(function))
    if plan is None:
        plan = _plans[id(function)] = _Plan(Target(name, function, schema, writes), None)
    return _run(plan, args, kwargs)


def create(workers: Workers, func: Any, args: Any, kwargs: Any) -> Any:
    """The result, on these workers, of an operator that has no tensor among its arguments."""
    plan = _plans.get(id(func)) or _plan(func)
    operands: list[Any] = []
    key = (workers, *[_part(each, operands) for each in args], *[(k, _part(v, operands)) for k, v in kwargs.items()])
    entry = plan.entries.get(key)
    if entry is None:
        statistics["misses"] += 1
        entry = plan.entries[key] = _signatures.make(workers, plan.target, args, kwargs)
    return _emit(entry, operands, args, kwargs)


def _plan(func: Any) -> _Plan:
    known = _plans.get(id(func))
    if known is not None:
        return known
    own = special.get(func)
    if own is None:
        own = next((found for found in (choose(func) for choose in specials) if found is not None), None)
    plan = _plans[id(func)] = _Plan(Target(str(func), func, func._schema), own)
    return plan


def _run(plan: _Plan, args: Any, kwargs: Any) -> Any:
    operands: list[Any] = []
    try:
        key = [_part(each, operands) for each in args]
        if kwargs:
            for name, each in kwargs.items():
                key += (name, _part(each, operands))
        entry = plan.entries.get(tuple(key))
    except _NotPlainError:
        return _run_with_host_tensors(plan, args, kwargs or {})
    if entry is None:
        entry = plan.entries[tuple(key)] = _miss(plan, args, kwargs or {})
    return _emit(entry, operands, args, kwargs)


def _run_with_host_tensors(plan: _Plan, args: Any, kwargs: Any) -> Any:
    """Those that the operation changes are read afterwards, which waits: nobody here would see a copy change."""
    changed = [each for each in _signatures.written(plan.target.schema, args, kwargs) if _is_host(each)]
    plain = _plain(args, kwargs)
    sent = [(each, plain(each)) for each in changed]
    known = {id(each): remote for each, remote in sent}
    args, kwargs = pytree.tree_map(lambda v: known[id(v)] if id(v) in known else plain(v), (args, kwargs))
    result = _run(plan, args, kwargs)
    if not sent:
        return result
    for each, remote in sent:
        with torch.no_grad():
            each.copy_(_values.as_host(remote))
    back = {id(remote): each for each, remote in sent}
    return pytree.tree_map(lambda v: back.get(id(v), v), result)


def _is_host(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter)


def _part(value: Any, operands: list[Any]) -> Any:
    """What stands in the key for an argument; what each record has of its own goes into ``operands``."""
    kind = type(value)
    if kind is RemoteTensor:
        operands.append(value._ref.id)
        return value._meta
    if kind is int or kind is str or value is None:
        return value
    if kind is float:
        operands.append(value)
        return float
    if kind is bool:
        return _TRUE if value else _FALSE
    if kind is list or kind is tuple:
        return tuple([_part(each, operands) for each in value])
    if kind is torch.SymInt:
        return value.node if isinstance(value.node, _rank_ints.RankInts) else int(value)
    if isinstance(value, torch.Tensor):
        raise _NotPlainError
    if kind is complex:
        return complex, repr(value)  # 2 == 2+0j and 0j == -0j, and they are not the same argument
    try:
        hash(value)
    except TypeError:
        raise _NotPlainError from None
    return value


def _plain(args: Any, kwargs: Any) -> Callable[[Any], Any]:
    """Makes arguments that have a place in a key: tensors of this process are sent to the workers."""
    first = next((each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, RemoteTensor)), None)
    if first is None:
        raise TypeError("no argument is a remote tensor")
    workers = first._meta.workers

    def plain(value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return value if isinstance(value.node, _rank_ints.RankInts) else int(value)
        if type(value) is RemoteTensor or not isinstance(value, torch.Tensor):
            return value
        if isinstance(value, HostByRank):
            return value.sent(workers)
        inner = getattr(value, "elem", None)  # of an AsyncCollectiveTensor
        return inner if isinstance(inner, RemoteTensor) else workers.put(value)

    return plain


def _miss(plan: _Plan, args: Any, kwargs: Any) -> Entry:
    statistics["misses"] += 1
    tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, RemoteTensor)]
    workers: Workers = tensors[0]._meta.workers
    for each in tensors:
        if each._meta.workers is not workers:
            raise MeshMismatchError(
                f"{plan.target.name} got a tensor of {workers.name} and one of {each._meta.workers.name}: move one of "
                "them first (x.to(mesh) is monarch_backend.dtensor.move(x, mesh))"
            )
    return _signatures.make(workers, plan.target, args, kwargs)


def _emit(entry: Entry, operands: list[Any], args: Any, kwargs: Any) -> Any:
    if not entry.number:
        return entry.host
    workers = entry.workers
    if entry.kind is Kind.ONE:
        number = next(workers.ids)
        workers.write((entry.number, _sites.here(workers), *operands, number))
        return RemoteTensor(entry.outs[0], Ref(workers, number))
    if entry.kind is Kind.NONE:
        workers.write((entry.number, _sites.here(workers), *operands))
        return None if entry.returns is None else entry.returns(args, kwargs)
    numbers = [0 if meta is None else next(workers.ids) for meta in entry.outs]
    workers.write((entry.number, _sites.here(workers), *operands, *numbers))
    return entry.sequence(
        None if meta is None else RemoteTensor(meta, Ref(workers, number))
        for meta, number in zip(entry.outs, numbers, strict=True)
    )


_remote_tensor.set_dispatch(dispatch)
