"""Hosts that announce their end: events of jobs, methods of actors, and the end of the notice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._hosts import daemon
from monarch_backend._job import state_file
from monarch_backend.actor import Actor, Channel, HostEnding, endpoint
from monarch_backend.job import Job, ProcessJob, SSHJob
from tests.job.support import MARK, Saver, in_program, new_mark
from tests.support.waiting import wait_until

NOTICE = 300.0


class AsyncSaver(Actor):
    """Actor whose endpoint waits for the notice, which it receives meanwhile."""

    def __init__(self, port: Any) -> None:
        import asyncio

        self.port, self.received = port, asyncio.Event()

    @endpoint
    async def work(self) -> float:
        await self.received.wait()
        return 0.0

    async def __host_ending__(self, notice: HostEnding) -> None:
        self.port.send((type(self).__name__, notice.host, notice.reason, notice.seconds_left))
        self.received.set()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[ProcessJob]:
    with new_mark() as mark:
        job = ProcessJob({"trainers": 2}, path=tmp_path / "job.json", env={MARK: mark}, notice=NOTICE)
        job.apply()
        try:
            yield job
        finally:
            job.kill()


def daemon_of(job: Job, index: int) -> Any:
    file = state_file.read(job.path)
    assert file is not None
    return file.hosts[index].daemon


def see_the_end_of_a_host(path: Path) -> Any:
    job = Job.load(path)
    procs = job.state().trainers.slice(hosts=0).spawn_procs({"gpus": 1})
    port, received = Channel.open()
    savers = [procs.spawn("plain", Saver, port), procs.spawn("async", AsyncSaver, port)]
    for each in savers:
        each.initialized.get(60)
    working = [each.work.call_one() for each in savers]
    events = job.watch(interval=0.05, timeout=60)
    before = [next(events).state, next(events).state]
    os.kill(daemon_of(job, 0).pid, signal.SIGTERM)
    ending = next(events)
    left = [each.get(60) for each in working]
    first = sorted(received.recv().get(60) for _ in savers)
    # What starts during the notice receives it, too.
    later = [procs.spawn("later", Saver, port), job.state().trainers.spawn_procs({"gpus": 1}).spawn("new", Saver, port)]
    for each in later:
        each.initialized.get(60)
    second = [received.recv().get(60) for _ in range(2)]
    began = time.monotonic()
    job.kill()
    return before, ending, left, first, second, time.monotonic() - began


def test_notice_reaches_watch_and_actors_and_the_host_goes_on(job: ProcessJob) -> None:
    before, ending, left, first, second, seconds = in_program(see_the_end_of_a_host, job.path)
    assert before == ["up", "up"]
    assert (ending.mesh, ending.index, ending.state) == ("trainers", 0, "ending")
    assert ending.reason.startswith("it has received SIGTERM, and ends at ")
    assert NOTICE - 60 < left[0] <= NOTICE
    assert [each[:3] for each in first] == [
        ("AsyncSaver", "trainers0", "it has received SIGTERM"),
        ("Saver", "trainers0", "it has received SIGTERM"),
    ]
    assert [each[:2] for each in second] == [("Saver", "trainers0")] * 2  # the other host has no notice
    assert all(NOTICE - 60 < each[3] <= NOTICE for each in (*first, *second))
    assert seconds < 30  # kill() does not wait for the notice


def use_a_host_to_its_end(path: Path, is_hurried: bool) -> tuple[str, bool]:
    """Return the host's state after the notice, and whether it still runs then, or after a second signal."""
    job = Job.load(path)
    procs = job.state().trainers.slice(hosts=0).spawn_procs({"gpus": 1})
    procs.initialized.get(60)
    procs.stop().get(60)
    host = daemon_of(job, 0)
    os.kill(host.pid, signal.SIGTERM)
    state = wait_until(lambda: [each.state for each in job.status() if each.state == "ending"])
    if is_hurried:
        os.kill(host.pid, signal.SIGTERM)
        wait_until(lambda: not host.runs(), 30)
    return state[0], host.runs()


def test_host_ends_during_its_notice_with_its_last_controller(job: ProcessJob) -> None:
    host = daemon_of(job, 0)
    assert in_program(use_a_host_to_its_end, job.path, False) == ("ending", True)
    wait_until(lambda: not host.runs(), 30)
    assert [each.state for each in job.status()] == ["gone", "up"]


def test_second_signal_ends_the_notice(job: ProcessJob) -> None:
    assert in_program(use_a_host_to_its_end, job.path, True) == ("ending", False)


def test_host_without_controller_ends_at_once(job: ProcessJob) -> None:
    host = daemon_of(job, 1)
    os.kill(host.pid, signal.SIGTERM)
    wait_until(lambda: not host.runs(), 30)


def test_notice_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[float, str]] = []

    class Busy:
        has_controllers = True

        def announce_end(self, seconds: float, reason: str) -> None:
            told.append((seconds, reason))

    waits: list[float] = []

    def no_signal(seconds: float) -> int:
        waits.append(seconds)
        return 0

    monkeypatch.setattr(daemon, "NOTICE_POLL_S", 0.0)
    daemon._give_notice(Busy(), 0.05, signal.SIGTERM, no_signal)  # type: ignore[arg-type]
    assert told == [(0.05, "it has received SIGTERM")]
    assert waits


def test_another_signal_can_be_the_notice() -> None:
    code = (
        "import signal; from monarch_backend.hosts import run_worker_loop_forever as run;"
        "run('127.0.0.1:0', notice=60, notice_signal=signal.SIGURG, on_ready=lambda *_: print('up', flush=True))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGURG)
        assert process.wait(30) == 0


@pytest.mark.parametrize("notice", [-1, "60", float("nan")])
def test_wrong_notice_is_refused(notice: Any) -> None:
    for make in (lambda: ProcessJob({"trainers": 1}, notice=notice), lambda: SSHJob(notice=notice)):
        with pytest.raises((ValueError, TypeError), match="notice="):
            make()
