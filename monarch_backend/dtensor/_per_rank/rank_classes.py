"""Classes of ranks in traces: with shards of unequal sizes a captured step has a graph for each class.

Sizes in a trace are plain ints, so a trace can stand only for ranks that have the same sizes. `standing_for` sets these
ranks. `seen` then maps a value that differs by rank to an int if these ranks agree. Outside of it dynamo's own trace
stands for the first rank. The program sees no sizes in it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from monarch_backend.dtensor._per_rank import per_rank_int
from monarch_backend.dtensor._torch_internals import tracing_state

if TYPE_CHECKING:
    from monarch_backend.dtensor._controller.tensor_meta import Meta
    from monarch_backend.dtensor._controller.worker_set import WorkerSet

MAX_GRAPHS = 32
"""Limit of graphs of one step. With more classes it runs as eager code."""


class _Trace(threading.local):
    """``members``: ranks of the current trace; ``parted``: values that differ between them, by rank."""

    workers: WorkerSet | None = None
    members: tuple[int, ...] = ()
    parted: Sequence[Hashable] | None = None
    unseen: bool = False


_trace = _Trace()


class Classes:
    """``of_rank``: the number of each rank's class, or -1 where a rank takes no part. Numbers are in order of ranks."""

    def __init__(self, workers: WorkerSet, keys: Sequence[Hashable]) -> None:
        self.workers = workers
        numbers = {key: number for number, key in enumerate(dict.fromkeys(key for key in keys if key is not None))}
        self.of_rank = [-1 if key is None else numbers[key] for key in keys]
        self.members = [
            tuple([rank for rank, its in enumerate(self.of_rank) if its == number]) for number in numbers.values()
        ]

    @property
    def is_one(self) -> bool:
        return len(self.members) == 1 and -1 not in self.of_rank

    def parted(self, keys: Sequence[Hashable]) -> Classes:
        both = zip(self.of_rank, keys, strict=True)
        return Classes(self.workers, [None if its < 0 else (its, key) for its, key in both])

    def without(self, others: Classes) -> Classes:
        """Return these classes without the ranks that take no part in the others."""
        both = zip(self.of_rank, others.of_rank, strict=True)
        return Classes(self.workers, [None if its < 0 or theirs < 0 else its for its, theirs in both])


def of(workers: WorkerSet, metas: Sequence[Meta]) -> Classes:
    """Return classes of ranks whose shards have equal metadata. A rank without one of the shards takes no part."""
    varied = list(dict.fromkeys(each for each in metas if each.classes is not None))
    columns = zip(*[each.of_rank for each in varied], strict=True) if varied else [()] * workers.size
    return Classes(workers, [None if -1 in key else key for key in columns])


@contextlib.contextmanager
def standing_for(workers: WorkerSet, members: Sequence[int]) -> Iterator[_Trace]:
    """In this context, traces of this thread are for these ranks."""
    before = _trace.workers, _trace.members
    _trace.workers, _trace.members, _trace.parted = workers, tuple(members), None
    try:
        yield _trace
    finally:
        _trace.workers, _trace.members = before


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """In this context, `seen` changes nothing: for values that torch caches for all ranks."""
    before, _trace.unseen = _trace.unseen, True
    try:
        yield
    finally:
        _trace.unseen = before


def part(keys: Sequence[Hashable]) -> None:
    """Report that the trace differs between ranks with different keys, so that it can't stand for all of them."""
    _trace.parted = keys


def stands_for_some() -> bool:
    """Whether this thread traces for ranks that `standing_for` has set."""
    return _trace.workers is not None


def is_tracing() -> bool:
    """Whether `seen` may have to change a value; called at each redistribution of a DTensor."""
    return _trace.workers is not None or tracing_state.is_dynamos()


def seen(number: Any, workers: WorkerSet) -> Any:
    """Return an int that may differ by rank in the current trace's form."""
    values = per_rank_int.values_of(number)
    if values is None or _trace.unseen:
        return number
    if _trace.workers is workers:
        members: Sequence[int] = _trace.members
    elif _trace.workers is None and tracing_state.is_dynamos():
        members = [next(rank for rank, value in enumerate(values) if value is not None)]
    else:
        return number
    mine = [value if rank in members else None for rank, value in enumerate(values)]
    return per_rank_int.by_rank(mine, sizes=number.node.are_sizes)


def meta_seen(meta: Meta) -> Meta:
    if meta.classes is None:
        return meta
    found = meta.on(_trace.members[0]) if _trace.workers is meta.workers else None
    return found or meta.classes[0]
