"""Asynchronous operations on shared memory: a caller that waits moves them, and without one they end all the same."""

from __future__ import annotations

import contextlib
import gc
import signal
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from monarch_backend import CollectiveTimeoutError
from monarch_backend.process_group._shm import shm_backend
from tests.process_group.test_fast_paths import _functions_of
from tests.support.ranks import run_ranks

SMALL, LARGE = 4, 1 << 18
"""Elements of float32: a small tensor is copied when the operation is called, a large one goes in pieces."""

PATIENCE = timedelta(seconds=60)

LIMITS = 40
"""Groups whose time limit is met. Each can be used only once."""


def _store() -> Any:
    return dist.group.WORLD.get_group_store()


def _passive_rank(rank: int, sizes: list[int]) -> list[list[float]]:
    """Rank 0 calls operations, then only waits for the other rank, which waits for each operation at once."""
    tensors = [torch.full((size,), rank + 1.0) for size in sizes]
    if rank == 0:
        works = [dist.all_reduce(x, async_op=True) for x in tensors]
        _store().wait(["the other rank is done"], PATIENCE)
    else:
        works = [dist.all_reduce(x, async_op=True) for x in tensors[:1]]
        works[0].wait()
        for x in tensors[1:]:
            dist.all_reduce(x, async_op=True).wait()
        _store().set("the other rank is done", "1")
    for work in works:
        work.wait()
    return [[x.min().item(), x.max().item()] for x in tensors]


@pytest.mark.parametrize(
    "sizes",
    [[SMALL], [SMALL] * 2, [SMALL] * 9, [LARGE], [LARGE, SMALL], [SMALL, LARGE, SMALL, LARGE]],
    ids=lambda sizes: "+".join("small" if size == SMALL else "large" for size in sizes),
)
def test_a_rank_that_does_not_wait_keeps_no_other_rank_waiting(sizes: list[int]) -> None:
    assert run_ranks(_passive_rank, 2, sizes) == [[[3.0, 3.0]] * len(sizes)] * 2


def _late_peer(rank: int, ask: str) -> Any:
    """Rank 1 comes late, so the operation of rank 0 is not done at once. Rank 0 asks for its end without wait()."""
    x = torch.full((SMALL,), rank + 1.0)
    if rank == 1:
        _store().wait(["called"], PATIENCE)
        dist.all_reduce(x)
        return x.tolist()
    work = dist.all_reduce(x, async_op=True)
    assert isinstance(work, shm_backend.AsyncWork) and not work.is_completed()
    ends: list[Any] = []
    if ask == "future":
        future = work.get_future().then(lambda done: ends.append(done.value()))
        _store().set("called", "1")
        future.wait()
        assert ends[0][0] is x or ends[0][0][0] is x
    else:
        _store().set("called", "1")
        while not work.is_completed():
            pass
    work.wait()
    return x.tolist()


@pytest.mark.parametrize("ask", ["future", "is_completed"])
def test_an_operation_ends_for_a_caller_that_asks_in_another_way(ask: str) -> None:
    assert run_ranks(_late_peer, 2, ask) == [[3.0] * SMALL] * 2


def _dropped(rank: int, size: int) -> list[bool]:
    """Drop the works and tensors of pending operations. They live until the operation ends, and no longer."""
    kept, results = [], []
    if rank == 0:
        _store().wait(["called"], PATIENCE)
    for number in range(3):
        x = torch.full((size,), float(number))
        kept.append(weakref.ref(x))
        dist.all_reduce(x, async_op=True)
        del x
    if rank == 1:
        gc.collect()
        results.append(all(each() is not None for each in kept))
        _store().set("called", "1")
    for _ in range(2):  # the last small operation is kept until the next one
        y = torch.ones(size)
        dist.all_reduce(y, async_op=True).wait()
        dist.barrier()
    gc.collect()
    return [*results, y.tolist()[:1] == [2.0]]


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_memory_of_pending_operations_lives_until_their_end(size: int) -> None:
    assert run_ranks(_dropped, 2, size) == [[True], [True, True]]


def _never_entered(rank: int) -> list[str]:
    """Rank 1 enters no operation. Rank 0 waits for the first of several until the time limit, in group after group."""
    groups = [dist.new_group([0, 1]) for _ in range(LIMITS)]
    options = dist.AllreduceOptions()
    options.timeout, options.asyncOp = timedelta(milliseconds=30), True
    ended = []
    for group in groups if rank == 0 else []:
        works = [group.allreduce([torch.ones(LARGE // 4)], options) for _ in range(8)]
        try:
            works[0].wait()
        except CollectiveTimeoutError as error:
            ended.append(type(error).__name__)
    if rank == 0:
        _store().set("all have ended", "1")
    _store().wait(["all have ended"], PATIENCE)
    return ended


def test_time_limit_ends_the_wait_while_the_progress_thread_meets_it_too() -> None:
    """Both threads act at the same moment. Neither may hold what the other one needs."""
    assert run_ranks(_never_entered, 2) == [["CollectiveTimeoutError"] * LIMITS, []]


def _calls(rank: int) -> dict[str, Callable[[], Any]]:
    x, two = torch.full((2,), rank + 1.0), torch.arange(4.0) + rank
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return {
        "all_reduce": lambda: dist.all_reduce(x, async_op=True),
        "broadcast": lambda: dist.broadcast(x, 1, async_op=True),
        "all_gather_single": lambda: gather(torch.empty(4), x, async_op=True),
        "reduce_scatter_single": lambda: scatter(torch.empty(2), two, async_op=True),
        "barrier": lambda: dist.barrier(async_op=True),
    }


def _interpreted(rank: int) -> dict[str, list[str]]:
    ran = {}
    for name, call in _calls(rank).items():
        call().wait()
        ran[name] = min((_functions_of(lambda call=call: call().wait()) for _ in range(50)), key=len)
    return ran


def test_small_asynchronous_calls_run_no_python_function() -> None:
    for ran in run_ranks(_interpreted, 2):
        assert ran == {name: [] for name in ran}
        assert len(ran) == 5


def _interpreted_large(_: int) -> list[str]:
    x = torch.zeros(LARGE)

    def call() -> None:
        dist.all_reduce(x, async_op=True).wait()

    call()
    return min((_functions_of(call) for _ in range(20)), key=len)


def test_large_asynchronous_calls_run_python_only_for_the_time_limit() -> None:
    assert run_ranks(_interpreted_large, 2) == [["_seconds", "timeout_of", "peel"]] * 2


def _without_a_limit(rank: int, size: int) -> list[float]:
    """Each wait has a timeout of zero, as those of C++ callers: no time limit."""
    x = torch.full((size,), rank + 1.0)
    work = dist.all_reduce(x, async_op=True)
    assert work.wait(timedelta(0)) and work.wait(timedelta(0)) and work.wait(timedelta(seconds=1))
    return [x.min().item(), x.max().item()]


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_a_timeout_of_zero_is_no_time_limit(size: int) -> None:
    assert run_ranks(_without_a_limit, 2, size) == [[3.0, 3.0]] * 2


def _interrupted_wait(rank: int) -> list[float]:
    """A signal's handler raises while rank 0 waits. The operation goes on."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    x = torch.full((LARGE,), rank + 1.0)
    if rank == 1:
        _store().wait(["interrupted"], PATIENCE)
        dist.all_reduce(x)
        return [x.min().item(), x.max().item()]
    work = dist.all_reduce(x, async_op=True)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    assert time.monotonic() - start < 20  # the group's time limit is 60 s
    _store().set("interrupted", "1")
    work.wait()
    return [x.min().item(), x.max().item()]


def test_interrupt_ends_the_wait_for_a_large_operation() -> None:
    assert run_ranks(_interrupted_wait, 2) == [[3.0, 3.0]] * 2


def _interrupted_before_its_future(rank: int) -> list[float]:
    """An interrupt comes between the end of a wait and the completion of the future."""
    x = torch.full((LARGE,), rank + 1.0)
    if rank == 1:
        _store().wait(["called"], PATIENCE)
        dist.all_reduce(x)
        return [x.min().item(), x.max().item()]
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future()
    settle, calls = shm_backend.ShmWork._settle, 0

    def interrupted(self: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyboardInterrupt
        settle(self)

    shm_backend.ShmWork._settle = interrupted  # type: ignore[method-assign]
    _store().set("called", "1")
    with contextlib.suppress(KeyboardInterrupt):  # none if the progress thread was first
        work.wait()
    future.wait()
    return [x.min().item(), x.max().item()]


def test_future_completes_after_an_interrupt_at_the_end_of_a_wait() -> None:
    assert run_ranks(_interrupted_before_its_future, 2) == [[3.0, 3.0]] * 2
