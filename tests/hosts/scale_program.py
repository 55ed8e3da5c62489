"""Controller program with hundreds of processes: it calls all, some, and the remaining ones after hosts are lost.

Worker processes import this module, so it does not import pytest. Output lines with "measured" are for human readers.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from pathlib import Path

from monarch_backend.actor import Actor, ActorError, ActorMesh, SupervisionError, current_rank, endpoint
from monarch_backend.hosts import attach_to_workers
from tests.actor.actors import until
from tests.hosts.controller_programs import expect_faults
from tests.hosts.support import NAMES, until_gone

PATIENCE = 60.0
"""Timeout in seconds for an operation of hundreds of processes."""

MULTICASTS = 100


class Counter(Actor):
    """Actor that counts multicasts. It expects them in order without a gap."""

    def __init__(self) -> None:
        self.count = 0

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def place(self) -> tuple[str, int]:
        return os.environ["MONARCH_HOST_NAME"], current_rank().rank

    @endpoint
    def add(self, number: int) -> None:
        assert number == self.count + 1, f"{number} came after {self.count}"
        self.count = number

    @endpoint
    def total(self) -> int:
        return self.count

    @endpoint
    def fails_at(self, rank: int) -> None:
        if current_rank().rank == rank:
            raise ValueError(f"rank {rank} was told to")


def scale(addresses: list[str], gpus: int, daemons: list[int]) -> None:
    """Run every step once: spawn, calls, multicasts, losses and the end."""
    faults, size = expect_faults(), len(addresses) * gpus
    with _measured(f"attach {len(addresses)} hosts"):
        hosts = attach_to_workers(addresses, timeout=PATIENCE)
    free = _available()
    with _measured(f"spawn {size} processes, until all have answered"):
        procs = hosts.spawn_procs({"gpus": gpus}, name="procs")
        counters = procs.spawn("counters", Counter)
        pids = list(counters.pid.call().get(PATIENCE).values())
    print(f"measured memory of a process: {(free - _available()) / size / 2**20:.1f} MiB", flush=True)
    assert len(set(pids)) == size
    _all_at_once(counters, 1)
    _some(counters, gpus)
    error = counters.fails_at.call(size // 2 + 1).exception(PATIENCE)
    assert isinstance(error, ActorError) and error.rank == size // 2 + 1, error
    assert f"rank {size // 2 + 1} was told to" in str(error), error
    with _measured("kill -9 of a process, until the error of a call of all"):
        os.kill(pids[-1], signal.SIGKILL)
        _until_it_fails(counters, {size - 1})
    assert faults.next().ranks == (size - 1,)
    with _measured("kill -9 of a host, until all that it had is known to be lost"):
        os.kill(daemons[1], signal.SIGKILL)
        lost = set(range(gpus, 2 * gpus))
        _until_it_fails(counters, lost | {size - 1})
        while lost:
            lost -= set(faults.next().ranks)
    until_gone(pids[gpus : 2 * gpus], PATIENCE)
    rest = counters.without(counters.failed_ranks)
    assert len(rest) == size - gpus - 1
    _all_at_once(rest, MULTICASTS + 1)
    assert sorted(set(rest.total.call().get(PATIENCE).values())) == [2 * MULTICASTS]
    with _measured("stop of all that is left"):
        procs.stop().get(PATIENCE)
        until_gone(pids, PATIENCE)
    faults.none()


def _all_at_once(counters: ActorMesh, first: int) -> None:
    """Measure calls and multicasts of all processes.

    The time of one multicast is the average of many, until every process has counted them.
    """
    size, times = len(counters), []
    for _ in range(10):
        began = time.monotonic()
        assert len(list(counters.total.call().get(PATIENCE).values())) == size
        times.append(time.monotonic() - began)
    print(f"measured call of {size}: {statistics.median(times) * 1000:.1f} ms", flush=True)
    began = time.monotonic()
    for number in range(first, first + MULTICASTS):
        counters.add.broadcast(number)
    counts = list(counters.total.call().get(PATIENCE).values())
    print(f"measured multicast to {size}: {(time.monotonic() - began) / MULTICASTS * 1000:.2f} ms", flush=True)
    assert counts == [first + MULTICASTS - 1] * size, counts


def _some(counters: ActorMesh, gpus: int) -> None:
    """Call slices: one host, one column, one block and one process."""
    count = len(counters) // gpus
    assert [host for host, _ in counters.slice(hosts=2).place.call().get(PATIENCE).values()] == [NAMES[3]] * gpus
    column = list(counters.slice(gpus=gpus - 1).place.call().get(PATIENCE).values())
    assert column == [(NAMES[1 + host], host) for host in range(count)], column
    block = counters.slice(hosts=slice(1, 3), gpus=slice(0, gpus // 2))
    assert len(list(block.place.call().get(PATIENCE).values())) == 2 * (gpus // 2)
    assert counters.slice(hosts=count - 1, gpus=0).place.call_one().get(PATIENCE) == (NAMES[count], 0)


def _until_it_fails(counters: ActorMesh, lost: set[int]) -> None:
    """Repeat a call of all until exactly the ranks in ``lost`` are known to have failed.

    Each error names one of them.
    """

    def failed() -> bool:
        error = counters.total.call().exception(PATIENCE)
        assert error is None or (isinstance(error, SupervisionError) and error.rank in lost), error
        return error is not None and lost == set(counters.failed_ranks)

    until(failed, f"ranks {sorted(lost)} are lost")


class _measured:
    """Prints how long the block takes."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            print(f"measured {self._what}: {time.monotonic() - self._began:.3f} s", flush=True)


def _available() -> int:
    """Return the available memory of this machine in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
