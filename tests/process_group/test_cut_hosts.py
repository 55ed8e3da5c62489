"""Hosts that are cut off while a group of backend "monarch" is used: which ranks raise, when, and what the error says.

A host is a network namespace (tests/support/hosts.py). A cut drops all frames silently, in both directions.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from monarch_backend.process_group._errors import CollectiveTimeoutError, RankFailedError
from tests.support.hosts import Hosts, hosts, refusal, run_on_hosts

pytestmark = pytest.mark.skipif(bool(refusal()), reason=refusal() or "-")

TWO_BY_TWO, ONE_EACH, THREE = (0, 0, 1, 1), (0, 1), (0, 1, 2)
LIMIT = 5.0  # the default of MONARCH_HOST_TIMEOUT
SHORT = {"MONARCH_HOST_TIMEOUT": "4"}
NAMES = "abc"


@pytest.fixture(scope="module")
def three() -> Iterator[Hosts]:
    with hosts(3) as made:
        yield made


@pytest.fixture
def where(three: Hosts) -> Iterator[Hosts]:
    """Yield three hosts, and heal their network afterwards."""
    yield three
    three.cables.heal_all()


def _all_reduce() -> None:
    while True:
        dist.all_reduce(torch.ones(2))


def _large_all_reduce() -> None:
    while True:  # a cut in the middle of data, which no kernel has acknowledged
        dist.all_reduce(torch.ones(1 << 22))


def _asynchronous() -> None:
    while True:
        work = dist.broadcast(torch.ones(2), 0, async_op=True)
        assert work is not None
        work.wait()
        dist.barrier()


def _receive() -> None:
    size = dist.get_world_size()
    dist.recv(torch.ones(2), (dist.get_rank() + size // 2) % size)


def _compute() -> None:
    while True:  # more than the limit, so that it is known before the next collective
        time.sleep(LIMIT)
        dist.all_reduce(torch.ones(2))


OPERATIONS: dict[str, Callable[[], None]] = {
    "all_reduce": _all_reduce,
    "large all_reduce": _large_all_reduce,
    "asynchronous broadcast": _asynchronous,
    "receive": _receive,
    "compute": _compute,
}


def _raises_after_cut(rank: int, where: Hosts, host: int, operation: str, folder: Path) -> tuple[float, str]:
    """Cut a host off, wait for this rank's error, and return the seconds since the cut and the text."""

    def cut() -> None:
        where.cables.cut_off(host)
        (folder / "cut").write_text(str(time.monotonic()))

    dist.barrier()
    if rank == 0:
        threading.Timer(0.3, cut).start()
    with pytest.raises(RankFailedError) as caught:
        OPERATIONS[operation]()
    raised = time.monotonic()
    with pytest.raises(RankFailedError) as again:  # at once
        dist.all_reduce(torch.ones(2))
    assert time.monotonic() < raised + 1 and str(again.value) == str(caught.value)
    (folder / str(rank)).touch()
    while rank == 0 and not all((folder / str(r)).exists() for r in range(dist.get_world_size())):
        time.sleep(0.01)  # it has the store
    return raised - float((folder / "cut").read_text()), str(caught.value)


def _check_cut(where: Hosts, placement: tuple[int, ...], host: int, operation: str, folder: Path, **env: str) -> None:
    found = run_on_hosts(where, placement, _raises_after_cut, where, host, operation, folder, env=env, together=False)
    limit = float(env.get("MONARCH_HOST_TIMEOUT", LIMIT))
    for rank, (seconds, text) in enumerate(found):
        away = [r for r, at in enumerate(placement) if (at == host) != (placement[rank] == host)]
        assert 0 < seconds < limit, (rank, seconds, text)
        for other in {placement[r] for r in away}:
            assert f"host-{NAMES[other]} ({where.address(other)})" in text, text
        named = re.search(r"(?:has|have) ranks? ([\d, ]+), for", text)
        assert named and [int(each) for each in named[1].split(", ")] == away, text
        assert text.startswith(f"rank {away[0]} (host "), text


def test_cut_host_is_named_within_the_limit(where: Hosts, tmp_path: Path) -> None:
    _check_cut(where, TWO_BY_TWO, 1, "all_reduce", tmp_path, **SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("placement", "host", "shm"),
    [(TWO_BY_TWO, 0, "1"), (TWO_BY_TWO, 1, "0"), (ONE_EACH, 1, "1"), (THREE, 2, "1"), (THREE, 0, "1")],
    ids=["2 x 2, store cut", "2 x 2 by gloo", "1 + 1", "1 + 1 + 1", "1 + 1 + 1, store cut"],
)
def test_cut_host_ends_each_operation(
    where: Hosts, placement: tuple[int, ...], host: int, shm: str, operation: str, tmp_path: Path
) -> None:
    if operation == "receive" and placement == THREE:
        pytest.skip("a survivor's receive from a survivor")
    if operation == "compute":  # the error comes with the first operation after the limit
        _check_cut(where, placement, host, operation, tmp_path, MONARCH_HOST_TIMEOUT="8", MONARCH_SHM=shm)
    else:
        _check_cut(where, placement, host, operation, tmp_path, MONARCH_SHM=shm)


def _goes_on_after(rank: int, disturb: Callable[[int], None]) -> list[float]:
    dist.barrier()
    disturb(rank)
    x = torch.ones(1 << 18)
    dist.all_reduce(x)
    return [float(x[0]), float(x[-1])]


@pytest.mark.slow
def test_rank_that_holds_the_gil_is_not_lost(where: Hosts) -> None:
    def hold(rank: int) -> None:
        if rank != 0:
            ctypes.PyDLL(None).sleep(8)  # type: ignore[attr-defined,unused-ignore]  # with the GIL

    assert run_on_hosts(where, TWO_BY_TWO, _goes_on_after, hold) == [[4.0, 4.0]] * 4


@pytest.mark.slow
def test_stopped_rank_is_not_lost_before_the_timeout(where: Hosts) -> None:
    def stop(rank: int) -> None:
        if rank == 3:
            subprocess.Popen(["sh", "-c", f"sleep 8; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)

    assert run_on_hosts(where, TWO_BY_TWO, _goes_on_after, stop) == [[4.0, 4.0]] * 4


@pytest.mark.slow
def test_cut_that_heals_in_time_has_no_effect(where: Hosts) -> None:
    def blink(rank: int) -> None:
        if rank == 0:
            where.cables.cut_off(1)
            time.sleep(2.0)
            where.cables.heal(1)
        time.sleep(5.0)

    assert run_on_hosts(where, TWO_BY_TWO, _goes_on_after, blink) == [[4.0, 4.0]] * 4


def _stopped(rank: int, folder: Path) -> float:
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    dist.barrier(group)
    started = time.monotonic()
    if rank == 3:
        subprocess.Popen(["sh", "-c", f"sleep 8; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        return 0.0
    with pytest.raises(CollectiveTimeoutError, match=r"timed out: rank [23] \(host host-b"):
        dist.all_reduce(torch.ones(2), group=group)
    (folder / str(rank)).touch()
    while rank == 0 and not all((folder / str(r)).exists() for r in range(3)):
        time.sleep(0.01)
    return time.monotonic() - started


@pytest.mark.slow
def test_stopped_rank_is_named_after_the_timeout(where: Hosts, tmp_path: Path) -> None:
    assert max(run_on_hosts(where, TWO_BY_TWO, _stopped, tmp_path, together=False)) < 2 + LIMIT


def _guard(_rank: int) -> bool:
    return dist.group.WORLD._guard is not None  # type: ignore[union-attr]


@pytest.mark.parametrize(("limit", "guarded"), [("0", False), ("5", True)])
def test_zero_switches_the_watch_off(where: Hosts, limit: str, guarded: bool) -> None:
    assert run_on_hosts(where, ONE_EACH, _guard, env={"MONARCH_HOST_TIMEOUT": limit}) == [guarded] * 2
