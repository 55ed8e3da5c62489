"""Compiled fast paths of messages on shared memory: every way to send and to receive, what moves them, and failures."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from monarch_backend import CollectiveMismatchError, CollectiveTimeoutError, RankFailedError
from monarch_backend._processes.system_calls import stands_still
from monarch_backend.process_group import MonarchProcessGroup, _cpu_validation, _process_group
from monarch_backend.process_group._shm import messages, shm_backend
from tests.process_group import reference
from tests.process_group.test_fast_paths import _functions_of
from tests.support.ranks import RankFailedError as DeadRank
from tests.support.ranks import init, run_ranks

SMALL, LARGE, HUGE = 2, 1 << 16, 3 << 18
"""Elements of float32: 8 B, 256 KiB, and 3 MiB, which does not fit into a channel."""

PATIENCE = timedelta(seconds=60)

TAGS = (0, 3, 1)
ORDERS = ((0, 1, 2), (2, 0, 1))
"""Orders in which three messages are received."""


def _store() -> Any:
    return dist.group.WORLD.get_group_store()


def _ones_from(rank: int, size: int = SMALL) -> torch.Tensor:
    return torch.full((size,), rank + 1.0)


# Every way, size, order and tag --------------------------------------------------------------------------------------


def _send(group: Any, way: str, x: torch.Tensor, tag: int) -> list[Any]:
    if way == "send":
        dist.send(x, 1, group, tag)
        return []
    if way == "isend":
        return [dist.isend(x, 1, group, tag)]
    return dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1, group, tag)])


def _receive(group: Any, way: str, x: torch.Tensor, tag: int) -> list[Any]:
    source = None if way.endswith("any") else 0
    if way.startswith("recv"):
        assert dist.recv(x, source, group, tag) == 0
        return []
    if way.startswith("irecv"):
        return [dist.irecv(x, source, group, tag)]
    return dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 0, group, tag)])


def _exchange(rank: int, backend: str, size: int) -> int:
    """Send three messages in every way, before, after or while they are received. Compare them, return their number."""
    group = dist.new_group([0, 1], backend=backend)
    checked = 0
    ways = ("send", "isend", "batch"), ("recv", "recv any", "irecv", "irecv any", "batch")
    for sends, receives, order, first in itertools.product(*ways, ORDERS, ("sender", "receiver", "both")):
        blocks = sends == "send" and (size == HUGE or backend == "gloo")
        if (first == "sender" and blocks) or (first == "receiver" and receives.startswith("recv")):
            continue  # the call would wait for the other rank, which waits in the barrier
        if (blocks or size == HUGE) and receives.startswith("recv") and order != ORDERS[0]:
            continue  # so would the first message
        sent = [torch.arange(size) % 1000 + 2000.0 * n + checked for n in range(len(TAGS))]
        got = [torch.zeros(size) for _ in TAGS]
        works: list[Any] = []
        if first != "both" and (rank == 0) != (first == "sender"):
            dist.barrier(group)
        if rank == 0:
            for n, tag in enumerate(TAGS):
                works += _send(group, sends, sent[n], tag)
        else:
            for n in order:
                works += _receive(group, receives, got[n], TAGS[n])
        if first != "both" and (rank == 0) == (first == "sender"):
            dist.barrier(group)
        for work in works:
            work.wait()
        if rank == 1:
            assert all(map(torch.equal, got, sent)), (sends, receives, order, first)
        checked += 1
    return checked


@pytest.mark.parametrize("backend", ["monarch", "gloo"])
@pytest.mark.parametrize("size", [0, SMALL, LARGE, HUGE], ids=["empty", "small", "large", "huge"])
def test_messages_of_every_way_arrive(size: int, backend: str) -> None:
    if backend == "gloo" and size == 0:
        pytest.skip("Gloo refuses an empty message from any source")
    first, second = run_ranks(_exchange, 2, backend, size)
    assert first == second >= 30


def _mixed_ways(rank: int) -> list[str]:
    """One rank uses the fast path while the other calls the method; each dtype."""
    group = dist.group.WORLD
    wrong = []
    for turn, dtype in itertools.product(range(2), reference.DTYPES):
        x, got = reference.values(rank, dtype, (5,)).clone(), torch.zeros(5).to(getattr(torch, dtype))
        fast = rank == turn
        send, recv = (group.send, group.recv) if fast else (messages_of(group, "send"), messages_of(group, "recv"))
        works = [send([_as_real(x)], 1 - rank, 4), recv([_as_real(got)], 1 - rank, 4)]
        for work in works:
            work.wait()
        if not reference.same(got, reference.values(1 - rank, dtype, (5,))):
            wrong.append(f"{dtype}: {got.tolist()}")
    return wrong


def _as_real(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def messages_of(group: Any, name: str) -> Callable[..., Any]:
    return getattr(type(group), name).__get__(group)


def test_ranks_can_take_different_paths_for_messages() -> None:
    assert run_ranks(_mixed_ways, 2) == [[], []]


def _interpreted(rank: int) -> dict[str, list[str]]:
    x, y, peer = torch.ones(SMALL), torch.zeros(SMALL), 1 - rank
    one, two = (
        (lambda: dist.send(x, peer), lambda: dist.recv(y, peer))
        if rank
        else (
            lambda: dist.recv(y, peer),
            lambda: dist.send(x, peer),
        )
    )
    calls: dict[str, Callable[[], Any]] = {
        "blocking": lambda: (one(), two()),
        "any source": lambda: (dist.send(x, peer), dist.recv(y)),
        "asynchronous": lambda: [work.wait() for work in (dist.irecv(y, peer), dist.isend(x, peer))],
    }
    return {name: min((_functions_of(call) for _ in range(50)), key=len) for name, call in calls.items()}


def test_small_messages_run_no_python_function_but_the_time_limit() -> None:
    for ran in run_ranks(_interpreted, 2):
        assert ran["blocking"] == []
        assert ran["any source"] == ["_source_rank"]
        assert set(ran["asynchronous"]) <= {"<lambda>", "timeout_of", "peel"}


def _passed_on(rank: int) -> None:
    """Arguments that the fast path does not know have the errors of the method."""
    group, x = dist.group.WORLD, torch.ones(2)
    for call, words in (
        (lambda: group.send([x], 2, 0), "rank 2 is outside the group"),
        (lambda: group.recv([x], -1, 0), "rank -1 is outside the group"),
        (lambda: group.send([x], rank, 0), "this rank itself"),
        (lambda: group.send([x, x], 1 - rank, 0), "has 2 entries"),
        (lambda: group.send([], 1 - rank, 0), "empty"),
        (lambda: group.recv([torch.ones(4, 4).t()], 1 - rank, 0), "contiguous"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    work = group.recv(tensors=[x], srcRank=1 - rank, tag=2)
    group.send([torch.tensor([2j, 3j]).conj().imag], dstRank=1 - rank, tag=2).wait()  # a lazy view
    work.wait()
    assert x.tolist() == [-2.0, -3.0]


def test_unsupported_messages_take_the_python_path(pool) -> None:
    pool(2).run(_passed_on)


def _mismatched(rank: int) -> list[str]:
    """An asynchronous receive of another size fails, whether it is there before the message or not."""
    errors = []
    for early in (True, False):
        if rank == 0:
            if early:
                dist.barrier()
            dist.send(torch.zeros(4), 1, tag=3)
            if not early:
                dist.barrier()
            continue
        if not early:
            dist.barrier()
        work = dist.irecv(torch.zeros(5), 0, tag=3)
        if early:
            dist.barrier()
        with pytest.raises(CollectiveMismatchError, match="rank 0 sent 4 elements of float32 with tag 3") as caught:
            work.wait()
        assert work.is_completed() and not work.is_success() and type(work.exception()) is caught.type
        errors.append(str(caught.value).partition("[")[0])
    dist.barrier()
    return errors


def test_asynchronous_receive_of_another_size_fails() -> None:
    first, second = run_ranks(_mismatched, 2)[1]
    assert first == second


# What moves them ------------------------------------------------------------------------------------------------------


def _passive_receiver(rank: int, size: int) -> list[float]:
    """The receiver posts receives and waits for the sender elsewhere; the sender waits until all messages have left.

    A message that no receive has been posted for stands before the others.
    """
    unexpected, got = torch.zeros(HUGE), [torch.zeros(size) for _ in range(3)]
    if rank == 0:
        dist.barrier()
        late = dist.isend(_ones_from(6, HUGE), 1, tag=9)
        for n in range(3):
            dist.send(_ones_from(n, size), 1, tag=n)
        late.wait()
        _store().set("all have left", "1")
        return []
    works = [dist.irecv(x, 0, tag=n) for n, x in enumerate(got)]
    dist.barrier()
    _store().wait(["all have left"], PATIENCE)
    for work in works:
        work.wait()
    dist.recv(unexpected, 0, tag=9)
    return [x.unique().item() for x in (*got, unexpected)]


@pytest.mark.parametrize("size", [SMALL, LARGE, HUGE], ids=["small", "large", "huge"])
def test_a_receiver_that_does_not_wait_keeps_no_sender_waiting(size: int) -> None:
    assert run_ranks(_passive_receiver, 2, size)[1] == [1.0, 2.0, 3.0, 7.0]


def _engines() -> int:
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("monarch_engine\n")


def _late_sender(rank: int) -> int:
    """Rank 0 waits for late messages, ten times in a blocking call, and then asynchronously."""
    x, turns = torch.zeros(SMALL), 10
    for turn in range(turns + 1):
        if rank == 1:
            _store().wait([f"{turn} is called"], PATIENCE)
            dist.send(x, 0)
        elif turn < turns:
            _store().set(f"{turn} is called", "1")  # nearly always the message comes after the call
            dist.recv(x, 1)
    if rank == 1:
        return 0
    before = _engines()
    work = dist.irecv(x, 1)
    while not _engines():  # a new thread sets its name itself
        pass
    _store().set(f"{turns} is called", "1")
    work.wait()
    return before


@pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")
def test_blocking_calls_need_no_progress_thread() -> None:
    assert run_ranks(_late_sender, 2) == [0, 0]


def _passive_sender(rank: int) -> float:
    """The sender waits for the receiver elsewhere, with a message that does not fit into the channel."""
    if rank == 0:
        work = dist.isend(_ones_from(0, HUGE), 1)
        assert isinstance(work, messages.MessageWork) and not work.is_completed()
        dist.barrier()
        _store().wait(["received"], PATIENCE)
        work.wait()
        return 0.0
    dist.barrier()
    x = torch.zeros(HUGE)
    dist.recv(x, 0)
    _store().set("received", "1")
    return x.unique().item()


def test_a_sender_that_does_not_wait_keeps_no_receiver_waiting() -> None:
    assert run_ranks(_passive_sender, 2)[1] == 1.0


def _asked(rank: int, ask: str) -> list[float]:
    """Rank 0 asks for the end of a receive, before it has ended and then again, without wait()."""
    x = torch.zeros(SMALL)
    if rank == 1:
        _store().wait(["called"], PATIENCE)
        dist.send(_ones_from(rank), 0)
        return []
    work = dist.irecv(x, 1)
    assert isinstance(work, messages.MessageWork) and not work.is_completed()
    ends: list[Any] = []
    if ask == "future":
        work.get_future().then(lambda done: ends.append(done.value()))
        future = work.get_future()
        _store().set("called", "1")
        future.wait()
        assert future.done() and work.get_future().value()[0] is x
    elif ask == "is_completed":
        _store().set("called", "1")
        while not work.is_completed():
            pass
    else:
        with pytest.raises(CollectiveTimeoutError, match="it goes on"):
            work.wait(timedelta(milliseconds=20))
        _store().set("called", "1")
    assert work.wait() and work.wait() and work.is_success() and work.exception() is None
    assert work._source_rank() == 1 and work.result()[0] is x
    return x.tolist()


@pytest.mark.parametrize("ask", ["future", "is_completed", "wait with a limit"])
def test_a_message_ends_for_a_caller_that_asks_in_another_way(ask: str) -> None:
    assert run_ranks(_asked, 2, ask)[0] == [2.0, 2.0]


def _dropped(rank: int, size: int) -> bool:
    """Works and tensors of pending receives live until the message has come, and no longer."""
    if rank == 1:
        _store().wait(["called"], PATIENCE)
        for _ in range(3):
            dist.send(torch.ones(size), 0)
        dist.send(torch.ones(1), 0, tag=1)
        return True
    seen = []
    for _ in range(3):
        x = torch.zeros(size)
        seen.append(weakref.ref(x))
        dist.irecv(x, 1)
        del x
    gc.collect()
    alive = [each() is not None for each in seen]
    _store().set("called", "1")
    dist.recv(torch.zeros(1), 1, tag=1)
    dist.irecv(torch.zeros(SMALL), 1, tag=2)  # the work of the last small message is kept until the next one
    while any(each() is not None for each in seen):  # the progress thread drops them
        gc.collect()
    return alive == [True] * 3


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_memory_of_pending_messages_lives_until_their_end(size: int) -> None:
    assert run_ranks(_dropped, 2, size) == [True, True]


def _works(rank: int) -> None:
    """A work that the caller keeps is not used again."""
    group, peer = dist.group.WORLD, 1 - rank
    x, y = torch.ones(2), torch.ones(3)
    first, second = group.send([x], peer, 0), group.send([y], peer, 0)
    assert first is not second and first.result()[0] is x and second.result()[0] is y
    assert first.wait() and first.get_future().value()[0] is x
    received = [group.recv([torch.zeros(n)], peer, 0) for n in (2, 3)]
    assert received[0] is not received[1]
    for work, n in zip(received, (2, 3), strict=True):
        work.wait()
        assert work.result()[0].tolist() == [1.0] * n and work._source_rank() == peer


def test_works_of_messages_are_kept_apart() -> None:
    run_ranks(_works, 2)


def _beside_collectives(rank: int) -> list[int]:
    """Asynchronous collectives and messages of one group under way at once, from two threads of each rank."""
    peer, rounds, wrong = 1 - rank, 24, []

    def talk() -> None:
        for n in range(rounds):
            size = (SMALL, LARGE, HUGE)[n % 3]
            got = torch.zeros(size)
            works = [dist.irecv(got, peer, tag=5), dist.isend(_ones_from(n + rank, size), peer, tag=5)]
            for work in works:
                work.wait()
            if got.unique().tolist() != [n + peer + 1.0]:
                wrong.append(n)

    thread = threading.Thread(target=talk)
    thread.start()
    for n in range(rounds):
        reduced = [torch.full((size,), n + rank + 0.0) for size in (SMALL, LARGE, SMALL)]
        got = torch.zeros(SMALL)
        works = [dist.irecv(got, peer), *(dist.all_reduce(x, async_op=True) for x in reduced)]
        dist.send(_ones_from(n), peer)
        for work in works:
            work.wait()
        if [x.unique().item() for x in (*reduced, got)] != [2 * n + 1.0] * 3 + [n + 1.0]:
            wrong.append(-n)
    thread.join()
    return wrong


def test_messages_and_asynchronous_collectives_go_on_beside_each_other() -> None:
    assert run_ranks(_beside_collectives, 2) == [[], []]


def _subgroups(rank: int) -> list[float]:
    """The ranks of a group have other numbers than those of the default group."""
    group = dist.new_group([2, 1])
    got = torch.zeros(SMALL)
    if rank:
        works = [dist.irecv(got, 3 - rank, group), dist.isend(_ones_from(rank), 3 - rank, group)]
        for work in works:
            work.wait()
        assert works[0]._source_rank() == (0 if rank == 2 else 1)
        if rank == 1:
            dist.send(got, 2, group)
        else:
            assert dist.recv(torch.zeros(SMALL), group=group) == 1
    return got.tolist()


def test_messages_of_a_subgroup_arrive() -> None:
    assert run_ranks(_subgroups, 3) == [[0.0, 0.0], [3.0, 3.0], [2.0, 2.0]]


# Observers and overrides ---------------------------------------------------------------------------------------------


def _observed(rank: int) -> list[str]:
    group = dist.new_group([0, 1])
    kept = group.send
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _swap(rank, group)
    titles = sorted({event.name for event in profile.events() if event.name.startswith("shm:")})
    _swap(rank, group)
    group._register_on_completion_hook(lambda info: None)
    assert not {"send", "recv", "recv_anysource"} & vars(group).keys()
    _swap(rank, group)
    kept([torch.ones(1)], 1 - rank, 8).wait()
    dist.recv(torch.zeros(1), 1 - rank, group, 8)
    dist.destroy_process_group(group)
    with pytest.raises(RuntimeError, match="destroyed"):
        kept([torch.ones(1)], 1 - rank, 0)
    return titles


def _swap(rank: int, group: Any) -> None:
    got, peer = torch.zeros(2), 1 - rank
    ops = [dist.P2POp(dist.isend, _ones_from(rank), peer, group), dist.P2POp(dist.irecv, got, peer, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert got.tolist() == [peer + 1.0] * 2


def test_profiler_and_hooks_see_messages() -> None:
    assert run_ranks(_observed, 2) == [["shm:recv", "shm:send"]] * 2


def _overridden(rank: int) -> int:
    calls = []

    class Counting(MonarchProcessGroup):
        def send(self, *args: Any, **named: Any) -> Any:
            calls.append(args)
            return super().send(*args, **named)

    _process_group.MonarchProcessGroup = Counting  # the class that `create` instantiates
    group = dist.new_group([0, 1])
    assert "recv" in group._fast_paths
    _swap(rank, group)
    return len(calls)


def test_overridden_send_of_a_subclass_is_called() -> None:
    assert run_ranks(_overridden, 2) == [1, 1]


# Failures ------------------------------------------------------------------------------------------------------------


def _interrupted(rank: int, way: str) -> list[float]:
    """A signal's handler raises while rank 0 waits for a message that comes later. The message goes on."""
    x = torch.zeros(SMALL)
    if rank == 1:
        _store().wait(["interrupted"], PATIENCE)
        dist.send(_ones_from(1), 0)
        dist.barrier()
        return []
    work = dist.irecv(x, 1) if way == "irecv" else None
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        work.wait() if work is not None else dist.recv(x, 1)
    assert time.monotonic() - start < 20  # the group's time limit is 60 s
    _store().set("interrupted", "1")
    dist.barrier()
    if work is not None:
        work.wait()
    return x.tolist()


def _interrupted_by_an_alarm(rank: int, way: str) -> list[float]:
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    return _interrupted(rank, way)


@pytest.mark.parametrize("way", ["recv", "irecv"])
def test_interrupt_ends_the_wait_for_a_message(way: str) -> None:
    assert run_ranks(_interrupted_by_an_alarm, 2, way)[0] == [2.0, 2.0]


def _stopped(rank: int, address: str, way: str, pids: Any) -> str:
    """Rank 1 stops itself. Rank 0 gets an error that names it when the group's timeout is over, and then resumes it."""
    init(rank, 2, address, seconds=3.0)
    dist.barrier()
    if rank == 1:
        pids.put(os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises((CollectiveTimeoutError, RankFailedError), match="rank"):
            dist.recv(torch.zeros(HUGE), 0, tag=9)
        return ""
    calls: dict[str, Callable[[], Any]] = {
        "send": lambda: dist.send(torch.zeros(HUGE), 1),
        "isend": lambda: dist.isend(torch.zeros(HUGE), 1).wait(),
        "recv": lambda: dist.recv(torch.zeros(3), 1),
        "irecv": lambda: dist.irecv(torch.zeros(3), 1).wait(),
    }
    start = time.monotonic()
    with pytest.raises(CollectiveTimeoutError) as caught:
        calls[way]()
    assert time.monotonic() - start < 20
    pids.put(0)
    return str(caught.value)


@pytest.mark.parametrize("way", ["send", "isend", "recv", "irecv"])
def test_stopped_peer_is_named_at_the_timeout(way: str) -> None:
    pids: Any = multiprocessing.get_context("fork").SimpleQueue()

    def wake_up() -> None:
        pid = pids.get()
        while not stands_still(pid):
            time.sleep(0.01)
        pids.get()  # the other rank got its error
        os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=wake_up)
    thread.start()
    try:
        told, _ = run_ranks(_stopped, 2, way, pids, backend=None)
    finally:
        thread.join()
        pids.close()
    words = "take what send to rank 1" if "send" in way else "send what recv from rank 1"
    assert told.startswith("timed out: rank 1 (host ") and f"did not {words}" in told


def _killed(rank: int, way: str) -> None:
    """Rank 1 dies while rank 0 has a message for it under way. Rank 0 gets the error long before the timeout."""
    if rank == 1:
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    works = [dist.irecv(torch.zeros(3), 1 if way == "irecv" else None)]
    if way == "isend":
        works = [dist.isend(torch.zeros(HUGE), 1)]
    dist.barrier()
    start = time.monotonic()
    with pytest.raises(RankFailedError, match=r"rank 1 \(host \S+, pid \d+\) killed by signal 9"):
        works[0].wait()
    assert time.monotonic() - start < 20
    with pytest.raises(RankFailedError):
        dist.isend(torch.zeros(3), 1).wait()


@pytest.mark.parametrize("way", ["isend", "irecv", "irecv any"])
def test_killed_peer_is_named_at_once(way: str) -> None:
    with pytest.raises(DeadRank) as caught:
        run_ranks(_killed, 2, way)
    assert "rank 1:\nthe rank died without an answer" in str(caught.value)
    assert "rank 0:" not in str(caught.value)


def test_codes_of_dtypes_are_those_of_the_method() -> None:
    group: Any = SimpleNamespace(_shm=shm_backend.SharedMemory)
    for dtype, code in messages._DTYPES.items():
        (moved,) = _cpu_validation.movable(group, "send", [torch.zeros(2).to(dtype)])
        assert shm_backend._DTYPES[moved.dtype] == code
