"""Recording of a rank's collectives and messages: what is under way, and what has ended."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from monarch_backend._core import platform
from monarch_backend._telemetry import recorder
from monarch_backend._telemetry.kinds import Kind, State, Status
from monarch_backend._telemetry.programs import programs
from monarch_backend._telemetry.reader import Area, RecordedProcess
from tests.support.ranks import run_ranks
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="recording areas need memfd_create")

APART_S = 0.001  # operations that follow each other faster may have no event


def _own() -> RecordedProcess:
    area = recorder.area()
    assert area is not None
    with Area(os.dup(area.descriptor)) as reader:
        [process] = reader.processes(events=True)
        return process


def _ended(process: RecordedProcess) -> list[tuple[str, int, int]]:
    return [(e.detail, e.value, e.status) for e in process.events if e.kind == Kind.COLLECTIVE]


def _operations(rank: int) -> None:
    x, many = torch.ones(4), torch.ones(1 << 20)
    before = len(_ended(_own()))
    for operation in (
        lambda: dist.all_reduce(x),
        lambda: dist.broadcast(x, 0),
        lambda: dist.all_reduce(many, async_op=True).wait(),
        lambda: dist.send(x, 1) if rank == 0 else dist.recv(x, 0),
    ):
        time.sleep(APART_S)
        operation()
    process = _own()
    message = "send" if rank == 0 else "recv"
    expected = [("all_reduce", 16), ("broadcast", 16), ("all_reduce", 4 << 20), (message, 16)]
    assert _ended(process)[before:] == [(*each, Status.OK) for each in expected]
    assert [a.state for a in process.activities] == [State.IDLE, State.IDLE]
    assert process.activities[0].name.startswith("group 0")


def test_operations_have_events_with_sizes() -> None:
    run_ranks(_operations, 2)


def _many(_rank: int) -> None:
    x = torch.ones(4)
    before = _own().activities[0].count if _own().activities else 0
    for _ in range(1000):
        dist.all_reduce(x)
    assert _own().activities[0].count - before == 1000


def test_short_operations_are_all_counted() -> None:
    run_ranks(_many, 2)


def _stuck(rank: int) -> None:
    work = None if rank else dist.all_reduce(torch.ones(2), async_op=True)
    if rank == 0:
        [shown] = [
            activity
            for program in programs()
            for process in program.processes
            if process.pid == os.getpid()
            for activity in process.activities
            if activity["state"] == "running"
        ]
        assert (shown["kind"], shown["detail"], shown["rank"]) == ("collective", "all_reduce", 0)
        assert any(program.pid == os.getpid() and program.processes[0].label == "rank 0" for program in programs())
        dist.send(torch.ones(1), 1)  # the other rank may go on
        assert work is not None
        work.wait()
    else:
        dist.recv(torch.ones(1), 0)
        dist.all_reduce(torch.ones(2))


def test_operation_that_waits_for_a_rank_is_shown() -> None:
    run_ranks(_stuck, 2)


def _mismatch(rank: int) -> None:
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(2 + rank))
    assert wait_until(lambda: [e for e in _ended(_own()) if e[2]]) == [("all_reduce", 8 + 4 * rank, Status.ERROR)]


def test_failed_operation_has_an_event() -> None:
    run_ranks(_mismatch, 2)
