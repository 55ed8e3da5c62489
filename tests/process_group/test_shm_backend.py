"""The shared-memory route: sizes around every limit, order of operations, failures, no leaks.

test_collectives.py and test_point_to_point.py test results.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import random
import re
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import monarch_backend
from monarch_backend._processes.system_calls import stands_still
from monarch_backend.process_group._errors import CollectiveMismatchError, CollectiveTimeoutError, RankFailedError
from monarch_backend.process_group._shm import segment
from tests.process_group import reference
from tests.support.ranks import init, run_ranks

# Sizes around a slot (16 KiB), a chunk (256 KiB) and several chunks, and a size that is not a multiple.
SIZES = (0, 1, 4095, 4096, 4097, 65535, 65536, 65537, 131072, 1_000_003)


def _sizes(rank: int, dtype: str) -> None:
    size = dist.get_world_size()
    for n in SIZES:
        inputs = [((torch.arange(n) + 3 * r) % 5).to(getattr(torch, dtype)) for r in range(size)]
        x = inputs[rank].clone()
        dist.all_reduce(x)
        assert reference.same(x, reference.reduced("SUM", inputs)), n
        row = [torch.zeros_like(x) for _ in range(size)]
        dist.all_gather(row, inputs[rank])
        assert all(reference.same(a, b) for a, b in zip(row, inputs, strict=True)), n
        x = inputs[rank].clone()
        dist.broadcast(x, n % size)
        assert reference.same(x, inputs[n % size]), n
        whole = torch.cat(inputs)  # `size` pieces of `n` elements
        piece = torch.zeros_like(x)
        dist.reduce_scatter_tensor(piece, whole) if n else None
        assert not n or reference.same(piece, reference.reduced("SUM", [inputs[rank]] * size)), n
        swapped = [torch.zeros_like(x) for _ in range(size)]
        dist.all_to_all(swapped, [inputs[(rank + to) % size].clone() for to in range(size)])
        assert all(reference.same(got, inputs[(r + rank) % size]) for r, got in enumerate(swapped)), n


@pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated. Please use:FutureWarning")
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_sizes_around_every_limit(world_size: int, dtype: str) -> None:
    run_ranks(_sizes, world_size, dtype)


def _mixed(rank: int, seed: int) -> None:
    """Random kinds and sizes of operations on overlapping groups, sync and async, with waits in random order."""
    draw, order, size = random.Random(seed), random.Random(f"{seed}/{rank}"), dist.get_world_size()
    groups = [dist.group.WORLD, dist.new_group(list(range(size))), dist.new_group([0, 1]), dist.new_group([1, 2])]
    pending: list[tuple[Any, torch.Tensor, float]] = []
    for turn in range(120):
        which, n, asynchronous = draw.randrange(len(groups)), draw.choice(SIZES[:9]), draw.random() < 0.6
        root, patient = draw.randrange(2), order.random() < 0.7
        group = groups[which]
        if group is None or dist.get_rank(group) < 0:
            continue
        members = dist.get_process_group_ranks(group)
        x = torch.full((n,), float(rank + turn))
        if turn % 3:
            work = dist.all_reduce(x, group=group, async_op=asynchronous)
            want = float(sum(r + turn for r in members))
        else:
            work = dist.broadcast(x, members[root], group=group, async_op=asynchronous)
            want = float(members[root] + turn)
        pending.append((work, x, want))
        if not patient or len(pending) > 20:
            work, x, want = pending.pop(order.randrange(len(pending)))
            if work is not None:
                work.wait()
            assert x.eq(want).all(), f"seed {seed}, turn {turn}"
    for work, x, want in pending:
        if work is not None:
            work.wait()
        assert x.eq(want).all()


@pytest.mark.parametrize("seed", range(4))
def test_mixed_operations_on_overlapping_groups(seed: int) -> None:
    run_ranks(_mixed, 3, seed)


def _same_bits(rank: int) -> list[list[int]]:
    """Sums add in the order of the ranks, so every run and every rank gets the same bits."""
    bits = []
    for n in (100, 10_000, 300_000):
        x = torch.randn(n, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank * 3)
        inputs = [torch.randn(n, generator=torch.Generator().manual_seed(r)) * 10.0 ** (r * 3) for r in range(4)]
        want = ((inputs[0] + inputs[1]) + inputs[2]) + inputs[3]
        dist.all_reduce(x)
        assert torch.equal(x, want)
        bits.append(x.view(torch.int32).sum().item())
    return bits


def test_sums_are_in_rank_order() -> None:
    answers = run_ranks(_same_bits, 4)
    assert all(answer == answers[0] for answer in answers)


# Failures -------------------------------------------------------------------------------------------------------


def _disagree(rank: int) -> None:
    x = torch.ones(4 + rank)
    for call, words in (
        (lambda: dist.all_reduce(x), ("rank 0 called all_reduce(float32, 4", "rank 1 called all_reduce(float32, 5")),
        (lambda: dist.barrier() if rank else dist.all_reduce(x), ("rank 1 called barrier", "all_reduce")),
        (lambda: dist.all_reduce(torch.ones(2).to(torch.int32 if rank else torch.float32)), ("int32", "float32")),
        (lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM), ("MAX", "SUM")),
        (lambda: dist.broadcast(torch.ones(2), rank), ("root 0", "root 1")),
        (lambda: dist.all_to_all([torch.ones(2 + rank)] * 2, [torch.ones(2)] * 2), ("sends 8 bytes", "expects 12")),
    ):
        with pytest.raises(CollectiveMismatchError) as info:
            call()
        assert all(word in str(info.value) for word in words), str(info.value)
    x = torch.ones(2)
    dist.all_reduce(x)  # no data was moved, and the group still works
    assert x.tolist() == [2.0, 2.0]


def test_ranks_with_different_calls_get_each_others_calls() -> None:
    run_ranks(_disagree, 2)


def _reduce(x: torch.Tensor, asynchronous: bool) -> None:
    if (work := dist.all_reduce(x, async_op=asynchronous)) is not None:
        work.wait()


def _broadcast(x: torch.Tensor, asynchronous: bool) -> None:
    if (work := dist.broadcast(x, 0, async_op=asynchronous)) is not None:
        work.wait()


def _disagree_in_functions(rank: int, asynchronous: bool) -> None:
    for _ in range(3):  # the lines are those of the last operation
        with pytest.raises(CollectiveMismatchError) as info:
            (_broadcast if rank == 1 else _reduce)(torch.ones(4), asynchronous)
        calls = str(info.value).split("; rank ")
        for each, function in zip(calls, (_reduce, _broadcast, _reduce), strict=True):
            first = function.__code__.co_firstlineno + 1
            lines = [first, first + 1] if asynchronous else [first]
            assert re.search(rf" at {__file__}:({'|'.join(map(str, lines))}) in {function.__name__}\b", each), each


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranks_with_different_calls_get_the_lines_of_all(asynchronous: bool) -> None:
    run_ranks(_disagree_in_functions, 3, asynchronous)


def _dtypes_of_one_size(rank: int) -> None:
    with pytest.raises(CollectiveMismatchError, match="int16") as info:
        dist.broadcast(torch.ones(4, dtype=torch.float16 if rank else torch.int16), 0)
    assert "float16" in str(info.value)


def test_dtypes_of_one_size_that_only_move_do_not_match() -> None:
    run_ranks(_dtypes_of_one_size, 2)


def _finished(work: Any) -> None:
    if work is not None:
        work.wait()


def _killed(rank: int, asynchronous: bool, n: int) -> float:
    group = dist.new_group([0, 1, 2])
    dist.all_reduce(torch.ones(2), group=group)
    store = dist.group.WORLD.get_group_store()
    if rank == 1:
        store.wait(["ready/0", "ready/2"], datetime.timedelta(seconds=30))
        store.set("time of death", repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    store.set(f"ready/{rank}", "1")
    with pytest.raises(RankFailedError, match=r"^rank 1 \(host .*, pid \d+\) killed by signal 9") as info:
        _finished(dist.all_reduce(torch.ones(n), group=group, async_op=asynchronous))
    assert info.value.rank == 1
    noticed = time.time() - float(store.get("time of death"))
    with pytest.raises(RankFailedError, match="rank 1"):
        dist.barrier(group)
    store.set(f"done/{rank}", "1")
    # a survivor that ends early would be reported as failed, too
    store.wait(["done/0", "done/2"], datetime.timedelta(seconds=30))
    return noticed


@pytest.mark.parametrize("n", [2, 200_000])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_survivors_name_the_dead_rank(asynchronous: bool, n: int) -> None:
    with pytest.raises(Exception, match="--- rank 1:\nthe rank died without an answer") as info:
        run_ranks(_killed, 3, asynchronous, n)
    assert "--- rank 0" not in str(info.value), str(info.value)
    assert "--- rank 2" not in str(info.value), str(info.value)


def _ended_in_between(rank: int) -> None:
    store, x = dist.group.WORLD.get_group_store(), torch.ones(1)
    if rank == 2:
        store.set("pid", str(os.getpid()))
        store.wait(["posted"], datetime.timedelta(seconds=30))
        segment.this_process().host.leave()
        os._exit(0)  # a clean exit, without a message to its groups
    if rank == 0:
        pending = dist.irecv(torch.ones(1), 1, tag=7)  # rank 2 takes no part in this message
        gone = os.pidfd_open(int(store.get("pid")))
        store.set("posted", "1")
        assert select.select([gone], [], [], 30)[0]
        os.close(gone)
    for _ in range(300):  # rank 0 learns of rank 2's exit here, and its pending messages do not involve rank 2
        dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
        dist.recv(x, 1) if rank == 0 else dist.send(x, 0)
    if rank == 1:
        dist.send(x, 0, tag=7)
    else:
        pending.wait()
    with pytest.raises(RankFailedError, match=r"^rank 2 .*ended without all_reduce"):
        dist.all_reduce(x)
    store.set(f"done/{rank}", "1")
    store.wait(["done/0", "done/1"], datetime.timedelta(seconds=30))


@pytest.mark.needs("/proc")
def test_rank_that_ended_between_operations_fails_the_next() -> None:
    with pytest.raises(Exception, match="--- rank 2:\nthe rank died without an answer") as info:
        run_ranks(_ended_in_between, 3)
    assert "--- rank 0" not in str(info.value) and "--- rank 1" not in str(info.value), str(info.value)


def _late(rank: int) -> None:
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=0.3))
    store = dist.group.WORLD.get_group_store()
    if rank == 0:
        with pytest.raises(CollectiveTimeoutError, match=r"timed out: rank 1 .* did not enter all_reduce\(float32, 2"):
            dist.all_reduce(torch.ones(2), group=group)
        store.set("given up", "1")
    else:
        store.wait(["given up"], datetime.timedelta(seconds=30))
        with pytest.raises(CollectiveTimeoutError, match="timed out: rank 1"):  # the late rank gets the error, too
            dist.all_reduce(torch.ones(2), group=group)


def test_late_rank_is_named() -> None:
    run_ranks(_late, 2)


def _many_groups(rank: int) -> None:
    """A destroyed group's memory is reused. The process keeps no more of it than it needs for the next group."""
    counts = []
    for _ in range(30):
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(300_000), group=group)
        dist.destroy_process_group(group)
        counts.append(segment.this_process().host.used())
    assert max(counts[10:]) <= max(counts[:10]), counts


def test_later_groups_reuse_the_memory() -> None:
    run_ranks(_many_groups, 2)


def _forked(rank: int) -> None:
    """A forked child must not keep a rank's descriptors: an open one would hide the rank's death."""
    dist.all_reduce(torch.ones(2))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        links = [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
        ]
        os.write(writer, str(sum("memfd:monarch" in link for link in links)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 9) == b"0"
    os.close(reader)
    os.close(writer)
    dist.all_reduce(torch.ones(2))


@pytest.mark.needs("memfd")
def test_forked_child_keeps_no_shared_memory() -> None:
    run_ranks(_forked, 2)


def test_shared_memory_is_on_unless_switched_off() -> None:
    assert run_ranks(_route, 2) == ["shm", "shm"]
    assert run_ranks(_route, 2, env={"MONARCH_SHM": "0"}) == ["gloo", "gloo"]


def _route(rank: int) -> str:
    return monarch_backend.routes()["cpu"].backend


def _callbacks(rank: int) -> list[float]:
    """A callback waits for another operation, nested three deep, while more operations start."""

    def deeper(depth: int) -> Callable[[Any], torch.Tensor]:
        def then(future: Any) -> torch.Tensor:
            x = future.value()[0] + 1
            if depth:
                x = dist.all_reduce(x, async_op=True).get_future().then(deeper(depth - 1)).wait()
            return x

        return then

    first = dist.all_reduce(torch.ones(4), async_op=True).get_future().then(deeper(3))
    return first.wait().tolist()


def test_callbacks_may_wait_for_operations() -> None:
    assert run_ranks(_callbacks, 2) == [[31.0] * 4] * 2


def _waits(rank: int, how: str) -> tuple[float, float]:
    """Return (CPU time, elapsed time) of a wait for a late rank."""
    store = dist.group.WORLD.get_group_store()
    if rank == 1:
        store.wait(["waited enough"], datetime.timedelta(seconds=60))
    x = torch.ones(100_000 if how == "large" else 2)
    if rank == 0:  # this timer ends the wait, so the test needs no fixed duration
        start, before = time.monotonic(), time.process_time()
        timer = threading.Timer(1.0, lambda: store.set("waited enough", ""))
        timer.start()
        if how == "recv":
            dist.recv(x, 1)
        elif how == "async":
            dist.all_reduce(x, async_op=True).wait()
        else:
            dist.all_reduce(x)
        used, took = time.process_time() - before, time.monotonic() - start
        timer.join()
        return used, took
    dist.send(x, 0) if how == "recv" else dist.all_reduce(x)
    return 0.0, 0.0


@pytest.mark.parametrize("how", ["small", "large", "async", "recv"])
def test_waiting_for_a_late_rank_uses_no_cpu(how: str) -> None:
    used, took = run_ranks(_waits, 2, how)[0]
    assert took > 0.9
    assert used < 0.2 * took, f"{used:.3f} s of processor time in {took:.3f} s"


def _larger_than_the_arena(rank: int) -> None:
    n, peer = 5_000_000, 1 - rank
    x = torch.full((n,), float(rank + 1))
    dist.all_reduce(x)
    assert x.eq(3).all()
    row = [torch.empty(n), torch.empty(n)]
    dist.all_gather(row, torch.full((n,), float(rank)))
    assert row[0].eq(0).all()
    assert row[1].eq(1).all()
    works = [dist.isend(torch.full((n,), float(rank)), peer), dist.irecv(x, peer)]
    for work in works:
        work.wait()
    assert x.eq(peer).all()


def test_tensors_larger_than_the_arena_are_reduced() -> None:
    run_ranks(_larger_than_the_arena, 2, env={"MONARCH_SHM_ARENA_BYTES": str(2 << 20)})


def _no_room(rank: int) -> list[str]:
    routes, x = [], torch.ones(1000)
    for _ in range(8):
        group = dist.new_group([0, 1])
        dist.all_reduce(x, group=group)
        routes.append(monarch_backend.routes(group)["cpu"].backend)
    assert x.eq(2.0**8).all()
    return routes


def test_group_with_full_arena_uses_gloo() -> None:
    first, second = run_ranks(_no_room, 2, env={"MONARCH_SHM_ARENA_BYTES": str(2 << 20)})
    assert first == second
    assert first[0] == "shm"
    assert first[-1] == "gloo"


def _stopped(rank: int, address: str, pids: Any) -> str:
    """Rank 1 stops itself. The other ranks must report it when the group's timeout is over, and then resume it."""
    init(rank, 3, address, seconds=1.0)
    pids.put((rank, os.getpid()))
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises((CollectiveTimeoutError, RankFailedError), match="rank"):
            dist.all_reduce(torch.ones(300_000))
        return "went on"
    with pytest.raises(CollectiveTimeoutError) as info:
        dist.all_reduce(torch.ones(300_000))
    pids.put((rank, 0))
    return str(info.value)


def test_stopped_rank_is_named_at_the_timeout() -> None:
    pids: Any = multiprocessing.get_context("fork").SimpleQueue()

    def wake_up() -> None:
        known = dict(pids.get() for _ in range(3))
        while not stands_still(known[1]):
            time.sleep(0.01)
        for _ in range(2):
            pids.get()  # the other ranks got their errors
        os.kill(known[1], signal.SIGCONT)

    thread = threading.Thread(target=wake_up)
    thread.start()
    try:
        answers = run_ranks(_stopped, 3, pids, backend=None)
    finally:
        thread.join()
        pids.close()
    assert answers[1] == "went on"
    for rank in (0, 2):
        assert re.match(
            r"timed out: rank 1 \(host \S+, pid \d+\) did not enter all_reduce\(float32, 300000|"
            r"timed out: rank 1 .* kept rank",
            answers[rank],
        ), answers[rank]


def _wakes_up_late(rank: int, address: str, pids: Any) -> str:
    """Rank 1 is stopped while it waits for rank 0. When it resumes, its own timeout is over."""
    init(rank, 2, address, seconds=60.0)
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=0.5))
    store = dist.group.WORLD.get_group_store()
    if rank == 0:
        store.wait(["told"], datetime.timedelta(seconds=30))
        return ""
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    pids.put(os.getpid())
    os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(CollectiveTimeoutError) as info:
        work.wait()
    store.set("told", "")
    return str(info.value)


def test_rank_that_was_stopped_does_not_name_others() -> None:
    pids: Any = multiprocessing.get_context("fork").SimpleQueue()

    def wake_up() -> None:
        pid = pids.get()
        while not stands_still(pid):
            time.sleep(0.01)
        end = time.monotonic() + 1.0  # half a second longer than the group's timeout
        while time.monotonic() < end:
            time.sleep(0.01)
        os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=wake_up)
    thread.start()
    try:
        _, told = run_ranks(_wakes_up_late, 2, pids, backend=None)
    finally:
        thread.join()
        pids.close()
    words = r"timed out: rank 1 \(host \S+, pid \d+\) was stopped itself, or had no processor, until \d+ ms after"
    assert re.match(words, told), told
