"""Groups over several hosts with MONARCH_SHM=1: shared memory inside a host, Gloo between hosts.

The matrix of test_collectives.py runs here for several placements of ranks on hosts. A host is a network namespace
(tests/support/hosts.py).
"""

from __future__ import annotations

import datetime
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import monarch_backend
from monarch_backend import GroupClosedError
from monarch_backend._telemetry import late_ranks
from monarch_backend.process_group import _bootstrap
from monarch_backend.process_group._errors import CollectiveMismatchError, CollectiveTimeoutError, RankFailedError
from monarch_backend.process_group._hierarchical import hierarchical_backend, line_requests
from monarch_backend.process_group._hierarchical.line_requests import LineRequests
from tests.ecosystem.support import batch, mlp, train_step
from tests.process_group import reference
from tests.process_group.test_collectives import COLLECTIVES, _run_cells
from tests.support.hosts import Hosts, hosts, refusal, run_on_hosts, sent_bytes
from tests.support.killed_processes import killed_at_end

pytestmark = pytest.mark.skipif(bool(refusal()), reason=refusal() or "-")

ON = {"MONARCH_SHM": "1"}
DTYPES = ("float32", "bfloat16", "int64", "bool", "complex64")
GLOO_MOVES = ("float8_e4m3fn", "uint16", "int16")  # Gloo copies these dtypes and does not reduce them

# The host of each rank.
TWO_BY_TWO, INTERLEAVED, TWO_AND_ONE = (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 1)
# With these placements the matrix has sub-groups on one host, on several, and with at most one rank per host.
PLACEMENTS = {"2 x 2": TWO_BY_TWO, "interleaved": INTERLEAVED, "3 + 1": (0, 1, 1, 1), "1 + 2 + 1": (0, 1, 1, 2)}


@pytest.fixture(scope="module")
def three() -> Iterator[Hosts]:
    with hosts(3) as made:
        yield made


def _matrix(rank: int, collective: str, dtypes: tuple[str, ...]) -> list[str]:
    assert monarch_backend.routes()["cpu"].backend == "shm+gloo"
    return [text for dtype in dtypes for text in _run_cells(rank, collective, dtype)[1]]


@pytest.mark.slow
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_matrix_of_collectives_over_hosts(three: Hosts, placement: str, collective: str) -> None:
    some_on_gloo = placement in ("2 x 2", "1 + 2 + 1")
    _no_cell_fails(three, placement, collective, DTYPES if some_on_gloo else DTYPES + GLOO_MOVES)


@pytest.mark.slow
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_part_of_the_matrix_over_hosts(three: Hosts, collective: str) -> None:
    """Run each collective with two dtypes and one placement. Every dtype and placement occurs with several
    collectives.
    """
    turn = list(COLLECTIVES).index(collective)
    placement = list(PLACEMENTS)[turn % 4]
    _no_cell_fails(three, placement, collective, (DTYPES[turn % 5], DTYPES[(turn + 2) % 5]))


def _no_cell_fails(three: Hosts, placement: str, collective: str, dtypes: tuple[str, ...]) -> None:
    answers = run_on_hosts(three, PLACEMENTS[placement], _matrix, collective, dtypes, env=ON)
    failures = [text for texts in answers for text in texts]
    assert not failures, f"{len(failures)} cells failed; the first:\n" + "\n".join(failures[:8])


SEGMENT = 512 << 10  # reduced for tests


def _sizes(rank: int, dtype: str) -> list[int]:
    """Check sizes around every limit where the algorithm changes, in elements of 4 bytes, and sizes that are not
    multiples.
    """
    size, sums = dist.get_world_size(), []
    hierarchical_backend.SEGMENT_BYTES = SEGMENT
    limits = (hierarchical_backend.SLICE_MIN_BYTES // 4, hierarchical_backend.TWO_STEPS_FROM // 4, SEGMENT // 4)
    for n in (1, 3, *(limit + more for limit in limits for more in (-1, 0, 1, 3)), 3 * SEGMENT // 4 + 5):
        inputs = [((torch.arange(n) * 7 + 3 * r) % 5 + 1).to(getattr(torch, dtype)) for r in range(size)]
        for op in ("SUM", "MAX", "AVG"):
            x = inputs[rank].clone()
            dist.all_reduce(x, getattr(dist.ReduceOp, op))
            want = reference.reduced(op, inputs)
            assert torch.equal(x, want) if op != "AVG" else torch.allclose(x, want), (n, op)
            sums.append(int(x.double().sum()))
        x = inputs[rank].clone()
        dist.broadcast(x, n % size)
        assert torch.equal(x, inputs[n % size]), n
    return sums


@pytest.mark.parametrize(
    ("placement", "dtype"), [(TWO_BY_TWO, "float32"), (TWO_AND_ONE, "int32"), ((0, 1, 2, 0, 1, 2), "float32")]
)
def test_sizes_around_every_limit(three: Hosts, placement: tuple[int, ...], dtype: str) -> None:
    answers = run_on_hosts(three, placement, _sizes, dtype, env=ON)
    assert all(answer == answers[0] for answer in answers)


def _numbers(rank: int, n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank * 2)


def _bits(rank: int, dtype: torch.dtype) -> list[int]:
    """Return checksums of sums whose bits depend on the order of additions."""
    bits = []
    hierarchical_backend.SEGMENT_BYTES = SEGMENT
    for n in (100, 40_000, 600_001):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            x = _numbers(rank, n).to(dtype)
            dist.all_reduce(x, op)
            bits.append(int(x.view(torch.uint8).to(torch.int64).mul(torch.arange(x.nbytes) % 251).sum()))
    return bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("placement", [TWO_AND_ONE, (0, 1, 2, 0, 1, 2)])
def test_results_have_the_same_bits_on_all_ranks_and_in_every_run(
    three: Hosts, placement: tuple[int, ...], dtype: torch.dtype
) -> None:
    answers = [bits for _ in range(2) for bits in run_on_hosts(three, placement, _bits, dtype, env=ON)]
    assert all(answer == answers[0] for answer in answers)


def _order(rank: int) -> None:
    """Sums add the ranks of a host first, then the sums of the hosts."""
    for n in (100, 300_000):
        inputs = [_numbers(r, n) for r in range(4)]
        x = inputs[rank].clone()
        dist.all_reduce(x)
        assert torch.equal(x, (inputs[0] + inputs[2]) + (inputs[1] + inputs[3]))
    half = torch.full((9,), 40000.0, dtype=torch.float16)  # a sum of two of these is infinite in float16
    dist.all_reduce(half, dist.ReduceOp.AVG)
    assert half.eq(40000.0).all()


def test_sums_are_in_rank_order_and_means_do_not_overflow(three: Hosts) -> None:
    run_on_hosts(three, INTERLEAVED, _order, env=ON)


# Placement of ranks on hosts ----------------------------------------------------------------------------------------


def _routes(rank: int, *groups: list[int]) -> list[str]:
    found = [str(monarch_backend.routes()["cpu"])]
    for ranks in groups:
        group = dist.new_group(ranks)
        if rank in ranks:
            found.append(str(monarch_backend.routes(group)["cpu"]))
            x = torch.ones(3)
            dist.all_reduce(x, group=group)
            assert x.tolist() == [float(len(ranks))] * 3
        else:
            found.append("")
    return found


def test_subgroups_have_their_own_routes(three: Hosts) -> None:
    answers = run_on_hosts(three, TWO_BY_TWO, _routes, [0, 1], [2, 3], [0, 2], [0, 1, 2], env=ON)
    everybody, first, second, alone, uneven = (next(filter(None, texts)) for texts in zip(*answers, strict=True))
    assert everybody == "cpu -> shm+gloo (shared memory + gloo: 2 hosts x 2 ranks)"
    assert first == second == "cpu -> shm (all ranks share memory)"
    assert alone.startswith("cpu -> gloo (") and "no two ranks share memory" in alone
    assert uneven == "cpu -> shm+gloo (shared memory + gloo: 2 hosts, 2 + 1 ranks)"


def test_wrong_local_rank_variables_are_ignored(three: Hosts) -> None:
    lie = ON | {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "0", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    answers = run_on_hosts(three, TWO_BY_TWO, _routes, env=lie)
    assert answers == [["cpu -> shm+gloo (shared memory + gloo: 2 hosts x 2 ranks)"]] * 4


def test_one_rank_per_host_takes_gloo(three: Hosts) -> None:
    for (route,) in run_on_hosts(three, (0, 1, 2), _routes, env=ON):
        assert route.startswith("cpu -> gloo ("), route


def test_hosts_consist_of_ranks_that_reached_each_other() -> None:
    def pairs(*ranks: tuple[int, int]) -> set[frozenset[int]]:
        return {frozenset(pair) for pair in ranks}

    assert _bootstrap._cliques(pairs((0, 2), (1, 3)), 4) == ([[0, 2], [1, 3]], "")
    assert _bootstrap._cliques(pairs((1, 2), (0, 2), (0, 1)), 4) == ([[0, 1, 2], [3]], "")
    found, remark = _bootstrap._cliques(pairs((0, 1), (1, 2), (3, 4)), 5)
    assert found == [[0], [1], [2], [3, 4]]
    assert "ranks 0 and 2 share no memory" in remark


# Bytes sent between hosts -------------------------------------------------------------------------------------------


def _traffic(rank: int, n: int) -> int:
    """Return the bytes that this rank's host sends for an all_reduce of ``n`` bytes."""
    x = torch.ones(n // 4)
    dist.all_reduce(x)
    dist.barrier()
    before = sent_bytes()
    dist.barrier()
    dist.all_reduce(x)
    dist.barrier()
    after = sent_bytes()
    dist.barrier()
    return after - before


@pytest.mark.parametrize("placement", [TWO_BY_TWO, INTERLEAVED])
def test_all_reduce_sends_each_slice_between_hosts_once(three: Hosts, placement: tuple[int, ...]) -> None:
    # In a flat ring every rank sends 2 (size - 1) / size of the vector. With a hierarchy of `hosts` hosts every rank
    # sends 2 (hosts - 1) / hosts, divided by the number of ranks on its host.
    size, local, n = 4, 2, 16 << 20
    flat = 2 * (size - 1) / size * n
    ours = 2 * (2 - 1) / 2 * n / local
    for sent in run_on_hosts(three, placement, _traffic, n, env=ON):
        per_rank = sent / local
        assert ours <= per_rank <= 1.1 * ours + 65536, (per_rank, ours)  # plus packet headers and acknowledgements
        assert per_rank < flat / local


# Failures -----------------------------------------------------------------------------------------------------------


def _finished(work: Any) -> None:
    if work is not None:
        work.wait()


def _killed(rank: int, victim: int, asynchronous: bool, n: int) -> tuple[float, str]:
    dist.all_reduce(torch.ones(n))
    store = dist.group.WORLD.get_group_store().clone()
    others = [r for r in range(dist.get_world_size()) if r != victim]
    if rank == victim:
        store.wait([f"ready/{r}" for r in others], datetime.timedelta(seconds=30))
        store.set("time of death", repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    store.set(f"ready/{rank}", "1")
    with pytest.raises(RankFailedError, match=rf"^rank {victim} \(host host-\w, pid \d+\) ") as info:
        _finished(dist.all_reduce(torch.ones(n), async_op=asynchronous))
    noticed = time.time() - float(store.get("time of death"))
    assert info.value.rank == victim
    assert noticed < 5, noticed
    with pytest.raises(RankFailedError, match=f"rank {victim}"):
        dist.barrier()
    store.set(f"done/{rank}", str(info.value).partition(". ")[0])
    store.wait([f"done/{r}" for r in others], datetime.timedelta(seconds=30))
    told = {store.get(f"done/{r}") for r in others}
    assert len(told) == 1, told  # all survivors report the same cause
    store.set(f"left/{rank}", "1")
    if rank == 0:  # rank 0 hosts the store
        store.wait([f"left/{r}" for r in others], datetime.timedelta(seconds=30))
    return noticed, told.pop().decode()


def _dies(three: Hosts, placement: tuple[int, ...], victim: int, asynchronous: bool, n: int) -> None:
    with pytest.raises(Exception, match=f"--- rank {victim}:\nthe rank died without an answer") as info:
        run_on_hosts(three, placement, _killed, victim, asynchronous, n, env=ON, timeout=60, together=False)
    for rank in set(range(len(placement))) - {victim}:
        assert f"--- rank {rank}" not in str(info.value), str(info.value)


@pytest.mark.parametrize("n", [2, 3_000_000])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("victim", [1, 2, 3])
def test_survivors_on_all_hosts_name_the_dead_rank(three: Hosts, victim: int, asynchronous: bool, n: int) -> None:
    _dies(three, TWO_BY_TWO, victim, asynchronous, n)


@pytest.mark.parametrize("placement", [(0, 0, 0, 1, 1, 2), TWO_AND_ONE])
def test_survivors_on_uneven_hosts_name_the_dead_rank(three: Hosts, placement: tuple[int, ...]) -> None:
    for victim in {len(placement) - 1, 1}:
        _dies(three, placement, victim, False, 100)


def _raises(error: type[Exception], words: str, call: Callable[[], Any]) -> float:
    started = time.monotonic()
    with pytest.raises(error, match=words):
        call()
    return time.monotonic() - started


def _late(rank: int) -> None:
    group = dist.new_group([0, 1, 2, 3], timeout=datetime.timedelta(seconds=0.5))
    store = dist.group.WORLD.get_group_store().clone()
    if rank != 3:
        words = r"timed out: rank [23] \(host host-b.* did not enter all_reduce\(float32, 2 elements, SUM\)"
        took = _raises(CollectiveTimeoutError, words, lambda: dist.all_reduce(torch.ones(2), group=group))
        assert took < 3, took
        store.set(f"given up/{rank}", "1")
    store.wait([f"given up/{r}" for r in range(3)], datetime.timedelta(seconds=30))
    if rank == 3:  # the late rank gets the error, too
        _raises(CollectiveTimeoutError, "timed out: rank", lambda: dist.all_reduce(torch.ones(2), group=group))
    x = torch.ones(2)
    dist.all_reduce(x)  # another group keeps working
    assert x.tolist() == [4.0, 4.0]


def test_late_rank_is_named_within_the_timeout(three: Hosts) -> None:
    run_on_hosts(three, TWO_BY_TWO, _late, env=ON)


def _load(store: dist.Store) -> None:
    store.wait(["all told"], datetime.timedelta(seconds=60))  # line A


def _is_placed(rank: int, late: int) -> None:
    ask = LineRequests.ask
    line_requests.ANSWER_TIMEOUT_S, late_ranks.PLACE_TIMEOUT_S = 60.0, 30.0  # a busy machine
    LineRequests.ask = lambda *args: ask(*args[:-1], 60.0)  # type: ignore[method-assign, misc]
    group = dist.new_group([0, 1, 2, 3], timeout=datetime.timedelta(seconds=1.5))
    store = dist.group.WORLD.get_group_store().clone()
    dist.barrier(group)
    if rank == late:
        _load(store)
        return
    place = rf"rank {late} \(host host-b, pid \d+\).*it is at .*test_hierarchical\.py:\d+ in _load \(.*# line A\)"
    _raises(CollectiveTimeoutError, place, lambda: dist.all_reduce(torch.ones(2), group=group))
    if store.add("told", 1) == 3:
        store.set("all told", "1")


@pytest.mark.parametrize(
    ("placement", "late"),
    [
        (TWO_BY_TWO, 3),
        pytest.param(TWO_BY_TWO, 2, marks=pytest.mark.slow),
        pytest.param((0, 0, 0, 1), 3, marks=pytest.mark.slow),
    ],
)
def test_timeout_names_the_line_of_a_late_rank_of_another_host(
    three: Hosts, placement: tuple[int, ...], late: int
) -> None:
    run_on_hosts(three, placement, _is_placed, late, env=ON)


def _unplugged(rank: int, folder: Path) -> float:
    group = dist.new_group([0, 1, 2, 3], timeout=datetime.timedelta(seconds=1))
    dist.barrier(group)
    dist.barrier(group)
    if rank == 0:  # rank 0's host also hosts the store, so no rank can look up the first cause
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    words = (
        "timed out: " + ("rank [23] ", "rank [23] ", "rank [01] ", "the group: another rank of this host gave up")[rank]
    )
    started = time.monotonic()
    try:
        return _raises(CollectiveTimeoutError, words, lambda: dist.all_reduce(torch.ones(2), group=group))
    finally:
        (folder / str(rank)).touch()
        if rank == 0:  # the other ranks must fail without the store
            while len(list(folder.iterdir())) < 4 and time.monotonic() < started + 6:
                time.sleep(0.01)
            subprocess.run(["ip", "link", "set", "eth0", "up"], check=True)


def test_silent_host_is_named_within_the_timeout(three: Hosts, tmp_path: Path) -> None:
    env = {**ON, "MONARCH_HOST_TIMEOUT": "0"}  # a busy machine may leave the host unplugged for longer
    assert max(run_on_hosts(three, TWO_BY_TWO, _unplugged, tmp_path, env=env)) < 5


def _disagree(rank: int, odd: set[int]) -> float:
    group = dist.new_group([0, 1, 2, 3])
    words = r"the ranks disagree about .*rank \d called \w+\(.*rank \d called \w+\("
    x = torch.ones(5 if rank in odd else 4)
    took = _raises(CollectiveMismatchError, words, lambda: dist.all_reduce(x, group=group))
    _raises(CollectiveMismatchError, words, lambda: dist.barrier(group))
    return took


@pytest.mark.parametrize("odd", [{1}, {2, 3}, {1, 2}])
def test_ranks_with_different_calls_get_errors(three: Hosts, odd: set[int]) -> None:
    assert max(run_on_hosts(three, TWO_BY_TWO, _disagree, odd, env=ON)) < 6


def _closed(rank: int, why: str) -> None:
    group = dist.new_group([0, 1, 2, 3])
    store = dist.group.WORLD.get_group_store()
    dist.barrier()
    if rank == 2:
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        group.abort(why)
        store.set("aborted", "1")
        with pytest.raises(GroupClosedError):
            work.wait()
    else:
        if rank == 3:  # so that no rank can complete the operation before
            store.wait(["aborted"], datetime.timedelta(seconds=30))
        begin = f"aborted: {why}, and " if why else ""
        with pytest.raises(RankFailedError, match=rf"rank 2 \(host host-b.*\) {begin}closed the group while"):
            _finished(dist.all_reduce(torch.ones(2), group=group, async_op=rank == 1))


@pytest.mark.parametrize("why", ["", "the loss is NaN"])
def test_abort_on_one_rank_ends_the_group_on_all(three: Hosts, why: str) -> None:
    run_on_hosts(three, TWO_BY_TWO, _closed, why, env=ON)


def _raises_and_closes(rank: int) -> None:
    group = dist.new_group([0, 1, 2, 3])
    dist.barrier()
    if rank == 2:
        try:
            raise ValueError("bad batch")
        except ValueError:
            dist.destroy_process_group(group)
    else:
        words = r"rank 2 \(host host-b.*\) raised ValueError: bad batch, and closed the group"
        with pytest.raises(RankFailedError, match=words):
            dist.all_reduce(torch.ones(2), group=group)
    dist.barrier()


def test_exception_of_closing_rank_is_named_on_all_hosts(three: Hosts) -> None:
    run_on_hosts(three, TWO_BY_TWO, _raises_and_closes, env=ON)


def _closes_in_a_handler(rank: int) -> None:
    for _ in range(8):
        group = dist.new_group([0, 1, 2, 3])
        value = torch.full((1 << 14,), float(rank))
        dist.all_reduce(value, group=group)
        assert value.eq(6).all()
        try:
            raise StopIteration
        except StopIteration:
            dist.destroy_process_group(group)


def test_group_that_all_ranks_close_in_a_handler_ends_well(three: Hosts) -> None:
    run_on_hosts(three, TWO_BY_TWO, _closes_in_a_handler, env=ON)


ENDING = """
import sys, torch, torch.distributed as dist
rank = int(sys.argv[1])
dist.init_process_group("monarch", rank=rank, world_size=3, init_method=sys.argv[2])
dist.all_reduce(torch.ones(1))
if rank == 2:
    raise ValueError("bad batch")
try:
    dist.all_reduce(torch.ones(1))
except Exception as error:
    print(type(error).__name__, error)
    sys.stdin.read()  # rank 0 has the store, and must not end first
"""


@pytest.mark.slow
def test_unhandled_exception_is_named_on_all_hosts(three: Hosts) -> None:
    address = three.store_address(0)
    jobs = [
        subprocess.Popen(
            three.command(host, sys.executable, "-c", ENDING, str(rank), address),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, host in enumerate((0, 0, 1))
    ]
    with killed_at_end(jobs):
        heard = [job.stdout.readline() for job in jobs[:2] if job.stdout is not None]
        outputs = [job.communicate(timeout=60) for job in jobs]
    words = rf"RankFailedError rank 2 \(host host-b, pid {jobs[2].pid}\) raised ValueError: bad batch, and "
    assert [bool(re.match(words, line)) for line in heard] == [True, True], (heard, outputs)


# Asynchronous operations --------------------------------------------------------------------------------------------


def _progress(rank: int) -> None:
    """Operations progress in call order while the caller does other work, with synchronous operations between them."""
    tensors = [torch.full((1000 * i + 1,), float(rank)) for i in range(20)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    y = torch.ones(3)
    dist.all_reduce(y)  # runs after the earlier operations
    assert y.tolist() == [4.0] * 3
    assert all(work.is_completed() for work in works)
    for work, x in zip(reversed(works), reversed(tensors), strict=True):
        work.wait()
        assert x.eq(6.0).all()
    # a store client is busy while it waits
    store, to_tell = (dist.group.WORLD.get_group_store().clone() for _ in range(2))
    x = torch.ones(400_000)
    works[0] = dist.all_reduce(x, async_op=True)
    works[0].get_future().then(lambda _: to_tell.set(f"finished/{rank}", "1"))
    # the rank does not wait for the work
    store.wait([f"finished/{r}" for r in range(4)], datetime.timedelta(seconds=30))
    assert x.eq(4.0).all()


def test_async_operations_progress_without_a_wait(three: Hosts) -> None:
    run_on_hosts(three, INTERLEAVED, _progress, env=ON)


def _callbacks(rank: int) -> list[float]:
    """A callback waits for another operation of the group, nested three deep."""

    def deeper(depth: int) -> Callable[[Any], torch.Tensor]:
        def then(future: Any) -> torch.Tensor:
            x = future.value()[0] + 1
            if depth:
                x = dist.all_reduce(x, async_op=True).get_future().then(deeper(depth - 1)).wait()
            return x

        return then

    return dist.all_reduce(torch.ones(4), async_op=True).get_future().then(deeper(3)).wait().tolist()


def test_callbacks_may_wait_for_operations(three: Hosts) -> None:
    assert run_on_hosts(three, TWO_AND_ONE, _callbacks, env=ON) == [[27 * 4.0 + 13] * 4] * 3


def _modes(rank: int) -> None:
    """A thread's torch modes affect neither the group's own thread nor later operations."""
    size = dist.get_world_size()
    for n in (5, 100_000):
        for mode in (torch.inference_mode(), torch.device("meta"), torch.no_grad(), torch.enable_grad()):
            leaf = torch.ones(n, requires_grad=True)
            with mode:
                made = torch.ones(n, device="cpu")
                for x in (made, leaf):
                    for asynchronous in (True, False):
                        _finished(dist.all_reduce(x, async_op=asynchronous))
                    pieces = torch.empty(size, n, device="cpu")
                    dist.all_gather_single(pieces, x) if hasattr(dist, "all_gather_single") else None
            assert leaf.eq(size**2).all()
            assert made.eq(size**2).all()


def test_operations_ignore_modes_of_the_calling_thread(three: Hosts) -> None:
    run_on_hosts(three, INTERLEAVED, _modes, env=ON)


def _overlapping(rank: int) -> None:
    """Groups that share ranks are used in a different order on each rank, without a deadlock."""
    left, right = dist.new_group([0, 1, 2]), dist.new_group([1, 2, 3])
    for turn in range(20):
        works = []
        for group in (left, right) if rank % 2 else (right, left):
            if dist.get_rank(group) >= 0:
                x = torch.ones(5 if turn % 2 else 50_000)
                works.append((dist.all_reduce(x, group=group, async_op=True), x))
        for work, x in works:
            work.wait()
            assert x.eq(3.0).all()


def test_overlapping_groups(three: Hosts) -> None:
    run_on_hosts(three, TWO_BY_TWO, _overlapping, env=ON)


# Features that use the group ----------------------------------------------------------------------------------------


def _ddp(rank: int, hook: str) -> list[list[float]]:
    torch.set_num_threads(1)
    model = DistributedDataParallel(mlp(), bucket_cap_mb=0.0005)  # small enough for several buckets
    if hook:
        model.register_comm_hook(None, getattr(default_hooks, hook))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [train_step(model, optimizer, *batch(0, rank)) for _ in range(4)]
    assert losses[-1] < losses[0]
    return [losses, *(p.detach().flatten().tolist() for p in model.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["", "allreduce_hook", "fp16_compress_hook"])
@pytest.mark.parametrize("placement", [INTERLEAVED, TWO_AND_ONE])
def test_ddp_trains_as_over_gloo(three: Hosts, placement: tuple[int, ...], hook: str) -> None:
    ours = run_on_hosts(three, placement, _ddp, hook, env=ON)
    gloo = run_on_hosts(three, placement, _ddp, hook, backend="gloo")
    near = 2e-3 if hook.startswith("fp16") else 1e-5
    for mine, theirs in zip(ours, gloo, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a == pytest.approx(b, rel=near, abs=near)


# The hosts ----------------------------------------------------------------------------------------------------------


def test_destroyed_groups_leave_no_resources() -> None:
    def links() -> str:
        return subprocess.run(["ip", "-brief", "link"], check=True, capture_output=True, text=True).stdout

    before = links()
    with hosts(2) as made:
        pids = list(made.pids)
        assert len(pids) == 3
    assert links() == before
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
