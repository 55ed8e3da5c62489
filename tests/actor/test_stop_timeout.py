"""stop(timeout=) and abort() of busy actors and processes end in time and log few lines with the reason."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from monarch_backend._actor.processes import stop as process_stop
from monarch_backend._actor.processes.records import OwnedProcess, ProcessRecords
from monarch_backend._actor.runtime import program
from monarch_backend.actor import Actor, Port, endpoint, this_host
from tests.actor.support import PATIENCE, Faults, begun


class IgnoresInterruptions(Actor):
    """Actor in code that swallows every interruption."""

    @endpoint
    def work(self, begin: Port[int]) -> None:
        begin.send(1)
        while True:
            try:
                time.sleep(60)
            except BaseException:
                continue


class StuckInConstructor(Actor):
    def __init__(self) -> None:
        threading.Event().wait()

    @endpoint
    async def echo(self, value: int) -> int:
        return value


@pytest.mark.slow
def test_abort_of_stuck_constructors_takes_at_most_ten_seconds(faults: Faults) -> None:
    """The limits are the defaults.

    On a main thread the constructor is interrupted; on another its process is killed.
    """
    with this_host().spawn_procs({"gpus": 1}) as procs, this_host().spawn_procs({"gpus": 1}, name="killed") as killed:
        procs.initialized.get(PATIENCE), killed.initialized.get(PATIENCE)
        first = procs.spawn("first", StuckInConstructor)
        resident = killed.spawn("resident", IgnoresInterruptions)
        resident.initialized.get(PATIENCE)
        later = killed.spawn("later", StuckInConstructor)
        began = time.monotonic()
        for ending in (first.abort("enough"), later.abort("enough")):
            ending.get(PATIENCE)
        taken = time.monotonic() - began
        assert "enough" in str(first.initialized.exception(PATIENCE))
        assert "SIGKILL" in faults.next().report()
    assert taken < 10.0


def test_stop_after_deadline_logs_one_line_per_process(
    faults: Faults, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills: list[object] = []
    kill = ProcessRecords.kill

    def kill_late(records: ProcessRecords, member: OwnedProcess) -> None:
        """Kill with a delay, like the fork server of a loaded host."""
        kills.append(member)
        program().progress.later(0.3, lambda: kill(records, member))

    monkeypatch.setattr(ProcessRecords, "kill", kill_late)
    procs = this_host().spawn_procs({"gpus": 2}, name="stuck")
    actors = procs.spawn("stuck", IgnoresInterruptions)
    calls = [begun(actors.slice(gpus=rank).work.call_one).ignore() for rank in range(2)]
    with caplog.at_level(logging.WARNING, "monarch_backend"):
        procs.stop(timeout=0.2).get(PATIENCE)
    lines = [line for line in caplog.messages if "is killed" in line]
    assert len(lines) == len(kills) == len(calls) == 2
    assert all("its time to stop is over" in line for line in lines)


def test_stop_of_process_that_survives_kill_repeats_rarely(
    faults: Faults, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_stop, "SHUTDOWN_GRACE_S", 0.3)
    kill, kills = ProcessRecords.kill, 0

    def kill_the_third_time(records: ProcessRecords, member: OwnedProcess) -> None:
        nonlocal kills
        kills += 1
        if kills >= 3:
            kill(records, member)

    monkeypatch.setattr(ProcessRecords, "kill", kill_the_third_time)
    procs = this_host().spawn_procs({"gpus": 1}, name="undying")
    begun(procs.spawn("stuck", IgnoresInterruptions).work.call_one).ignore()
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, "monarch_backend"):
        procs.stop(timeout=0.1).get(PATIENCE)
    lines = [line for line in caplog.messages if "kill" in line]
    assert 3 <= len(lines) <= 2 + (time.monotonic() - began) / 0.3
    assert all("has not ended: a system call keeps it" in line for line in lines[1:])
