"""Dispatch of operations on remote tensors: one command for all workers, usually with a known signature.

The hot path is csrc/records/controller_dispatch.cpp: a key from the arguments, one lookup in a dict, some words. This
module does what is needed once for each operator and each signature. special_ops.py handles special operations;
op_signatures.py makes unknown signatures.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from monarch_backend import _native
from monarch_backend.dtensor._controller import fetch, host_tensor_cache, remote_tensor
from monarch_backend.dtensor._controller.operations import operations
from monarch_backend.dtensor._controller.per_rank_host_tensor import PerRankTensor
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._controller.worker_set import WorkerSet
from monarch_backend.dtensor._dispatch import fake_tensors, op_signatures
from monarch_backend.dtensor._dispatch.op_signatures import Entry, Target
from monarch_backend.dtensor._per_rank import per_rank_int
from monarch_backend.dtensor._torch_internals import decompositions
from monarch_backend.dtensor._worker import local_functions

SIGNATURE_CACHE_SIZE = 8192
"""Limit of signatures of one set of workers. Beyond it the least recently used half is dropped."""

_MOVED = "monarch_backend.dtensor._worker.local_functions:moved"
_HOST = (torch.Tensor, torch.nn.Parameter)  # types of this process's tensors
_TRUE, _FALSE = object(), object()  # 1 == True, but they are different arguments


class _NotPlainError(Exception):
    """An argument that can't be part of a key."""


_plans: dict[int, _native.Plan] = {}  # by the identity of the operator, which is never deleted
special: dict[Any, Callable[[Any, Any, Any], Any]] = {}
"""Handlers of operators that are not plain operations; filled by special_ops.py."""
specials: list[Callable[[Any], Callable[[Any, Any, Any], Any] | None]] = []
"""Functions that return a handler as in `special`, for whole kinds of operators."""
statistics = {"misses": 0}
dispatch = _native.dispatch
_known: dict[WorkerSet, int] = {}
"""Number of signatures by workers."""


def forget(workers: WorkerSet) -> None:
    for _, plan, key in _entries_of(workers):
        plan.forget(key)
    _known.pop(workers, None)


def _entries_of(workers: WorkerSet) -> list[tuple[Entry, _native.Plan, Any]]:
    return [
        (entry, plan, key)
        for plan in list(_plans.values())
        for key, entry in list(plan.entries.items())
        if entry.workers is workers
    ]


def _forget_half(workers: WorkerSet) -> None:
    """Drop the least recently used half, here and on workers. A later use makes the signature again."""
    entries = sorted(_entries_of(workers), key=lambda each: each[0].used)
    for entry, plan, key in entries[: len(entries) // 2]:
        plan.forget(key)
        workers.forget(entry.parts)
    _known[workers] = len(entries) - len(entries) // 2


def run_plain(func: Any, args: Any, kwargs: Any) -> Any:
    """Dispatch the plain operation, for handlers in `special`."""
    return _native.issue(_plan(func), args, kwargs, None)


def call(
    function: Callable[..., Any], name: str, args: Any, kwargs: Any, schema: Any = None, writes: tuple[int, ...] = ()
) -> Any:
    """Return a function's result on every worker, each with its own numbers where they differ by rank.

    The function may only calculate with its arguments. ``name``: ``module:function``, as workers find it. ``schema``:
    for a function that changes arguments, as an operator's; or ``writes``: the positions of those.
    """
    plan = _plans.get(id(function))
    if plan is None:
        target = Target(name, function, schema, writes)
        plan = _plans.setdefault(id(function), _native.Plan(target, None, 0, frozenset()))
    result = _native.issue(plan, args, kwargs, None)
    if heard.note is not None:
        heard.note(function, name, args, kwargs, schema or writes, result)
    return result


class _Heard(threading.local):
    note: Callable[..., None] | None = None


heard = _Heard()
"""Within the block, call ``note`` with each `call` of this thread and its result."""


def create(workers: WorkerSet, func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result, on these workers, of an operator without tensors among its arguments."""
    return _native.issue(_plan(func), args, kwargs, workers)


def _plan(func: Any) -> _native.Plan:
    known = _plans.get(id(func))
    if known is not None:
        return known
    own = special.get(func)
    if own is None:
        by_others = decompositions.made_of_others(func)
        own = by_others and (lambda _func, args, kwargs: by_others(*args, **kwargs))
    if own is None:
        own = next((found for found in (choose(func) for choose in specials) if found is not None), None)
    target = Target(str(func), func, func._schema)
    return _plans.setdefault(id(func), _native.Plan(target, own, *op_signatures.scalars_of(func._schema)))


def _run_with_host_tensors(plan: _native.Plan, args: Any, kwargs: Any) -> Any:
    """Run with tensors of this process. The changed ones among them are read afterwards, which waits."""
    kwargs = kwargs or {}
    if plan.target.call is torch.ops.aten.copy_.default and args[0].is_meta:
        # It has no values before or after. torch checks that the sizes fit.
        is_by_rank = any(type(each) is not int for each in args[1].shape)
        return args[0] if is_by_rank else args[0].copy_(torch.empty(args[1].shape, device="meta"))
    changed = [each for each in op_signatures.written(plan.target.schema, args, kwargs) if type(each) in _HOST]
    plain = _plain(args, kwargs, plan.target.schema)
    sent = [(each, _where_all_are(plain(each), args, kwargs)) for each in changed]
    known = {id(each): remote for each, remote in sent}
    args, kwargs = pytree.tree_map(lambda v: known[id(v)] if id(v) in known else plain(v), (args, kwargs))
    result = _native.issue(plan, args, kwargs, None)
    if not sent:
        return result
    for each, remote in sent:
        with torch.no_grad():
            each.copy_(fetch.as_host(remote))
    back = {id(remote): each for each, remote in sent}
    return pytree.tree_map(lambda v: back.get(id(v), v), result)


def _where_all_are(sent: RemoteTensor, args: Any, kwargs: Any) -> RemoteTensor:
    """Return the sent tensor without ranks that lack another argument; these would keep the old value."""
    others = [each._meta for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, RemoteTensor)]
    return sent._meta.workers.without(sent, frozenset[int]().union(*(meta.outside for meta in others)))


def _part(value: Any) -> Any:
    """Return the key's part for an argument of a rare kind."""
    kind = type(value)
    if kind is torch.SymInt:
        return value.node if isinstance(value.node, per_rank_int.PerRankInt) else int(value)
    if isinstance(value, torch.Tensor):
        raise _NotPlainError
    if kind is complex:
        return complex, repr(value)  # 2 == 2+0j and 0j == -0j, but they are different arguments
    try:
        hash(value)
    except TypeError:
        raise _NotPlainError from None
    return value


def _plain(args: Any, kwargs: Any, schema: Any = None) -> Callable[[Any], Any]:
    """Return arguments as parts of a key: tensors of this process are sent. ``schema``: of the operator."""
    remote = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, RemoteTensor)]
    if not remote:
        raise TypeError("no argument is a remote tensor")
    workers = remote[0]._meta.workers
    are_cpus = workers.device.type != "cpu" and all(each._meta.device.type == "cpu" for each in remote)

    def send(value: torch.Tensor) -> RemoteTensor:
        """Send a tensor to the device of the others: the workers' device, or their CPU if the others are there."""
        sent = workers.put(value)
        if not are_cpus or sent._meta.device.type == "cpu":
            return sent
        moved: RemoteTensor = call(local_functions.moved, _MOVED, (sent, torch.device("cpu")), {})
        return moved

    def plain(value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return value if isinstance(value.node, per_rank_int.PerRankInt) else int(value)
        if type(value) is RemoteTensor or not isinstance(value, torch.Tensor):
            return value
        if isinstance(value, PerRankTensor):
            return value.sent(workers, schema)
        inner = getattr(value, "elem", None)  # of an AsyncCollectiveTensor
        if isinstance(inner, RemoteTensor):
            return inner
        return host_tensor_cache.put(workers, schema, host_tensor_cache.source(value), lambda: send(value))

    return plain


def _missing(plan: _native.Plan, key: Any, args: Any, kwargs: Any, workers: WorkerSet | None) -> Entry:
    with fake_tensors.one_at_a_time:
        return plan.entries.get(key) or _make(plan, key, args, kwargs, workers)


def _make(plan: _native.Plan, key: Any, args: Any, kwargs: Any, workers: WorkerSet | None) -> Entry:
    statistics["misses"] += 1
    kwargs = kwargs or {}
    if workers is None:
        workers = _workers_of(plan, args, kwargs)
    if plan.target.schema is not None:
        args, kwargs = _at_home(args, kwargs)
    given, named = op_signatures.with_numbers(plan.target.schema, args, kwargs)
    try:
        entry = plan.entries[key] = op_signatures.make(workers, plan.target, given, named)
    except op_signatures.OldValuesError:
        if not _one_by_one(plan.target, args, kwargs):
            raise
        entry = Entry()
        entry.number, entry.host = 0, None  # the operation is done, and must be run like this again the next time
        return entry
    _known[workers] = _known.get(workers, 0) + 1
    if _known[workers] > SIGNATURE_CACHE_SIZE:
        _forget_half(workers)
    return entry


def _at_home(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return an operator's arguments with the intended devices.

    torch's C++ asks a tensor for its device and passes it on: in ``new_zeros``, ``type_as`` and for the gradient of a
    leaf. That is "cpu" for each remote tensor, and means the device of the first one.
    """
    tensors = (each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, RemoteTensor))
    first = next(tensors, None)
    if first is None or first._meta.device == first._meta.shown:
        return args, kwargs
    shown, home = first._meta.shown, first._meta.device
    args, kwargs = pytree.tree_map(lambda v: home if isinstance(v, torch.device) and v == shown else v, (args, kwargs))
    return args, kwargs


def _one_by_one(target: Target, args: Any, kwargs: Any) -> bool:
    """Change the tensors of a list one by one if they are of several slices; return whether it did."""
    count = len(args[0]) if target.name.startswith("aten._foreach_") and isinstance(args[0], (list, tuple)) else 1
    if count == 1:
        return False

    def only(value: Any, at: int) -> Any:
        return [value[at]] if isinstance(value, (list, tuple)) and len(value) == count else value

    for at in range(count):
        target.call(*[only(each, at) for each in args], **{name: only(each, at) for name, each in kwargs.items()})
    return True


def _workers_of(plan: _native.Plan, args: Any, kwargs: Any) -> WorkerSet:
    tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, RemoteTensor)]
    workers: WorkerSet = tensors[0]._meta.workers
    for each in tensors:
        if each._meta.workers is not workers:
            raise op_signatures.other_workers(plan.target.name, workers, each._meta.workers)
    return workers


_native.set_up_issue(
    RemoteTensor, remote_tensor.make, remote_tensor.no_pointer, torch.is_inference_mode_enabled,
    (torch.dtype, torch.device, torch.layout, torch.memory_format),
    _part, _NotPlainError, _run_with_host_tensors, _missing, _plan, _TRUE, _FALSE,
)  # fmt: skip
remote_tensor.set_dispatch(_native.dispatch)
operations.call, operations.create = call, create
