"""Hosts that announce their end: events of jobs, methods of actors, and the end of the notice."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._hosts import agent, daemon
from monarch_backend._hosts.attach import attach_as_reader
from monarch_backend._job import state_file
from monarch_backend._mesh.runtime_protocol import program
from monarch_backend._transport.network.auth import user_secret
from monarch_backend.actor import Actor, Channel, HostEnding, endpoint
from monarch_backend.hosts import attach_to_workers
from monarch_backend.job import Job, ProcessJob, SSHJob
from tests.job.support import MARK, Saver, Where, in_program, new_mark
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


@pytest.mark.slow
def test_second_signal_ends_the_notice(job: ProcessJob) -> None:
    assert in_program(use_a_host_to_its_end, job.path, True) == ("ending", False)


def attach_twice_during_a_notice(path: Path) -> list[str]:
    """Return what a second program reads while the first one keeps the host: the states in two looks."""
    job = Job.load(path)
    job.state().trainers.slice(hosts=0).spawn_procs({"gpus": 1}).initialized.get(60)
    os.kill(daemon_of(job, 0).pid, signal.SIGTERM)
    wait_until(lambda: any(each.state == "ending" for each in job.status()))
    states: list[str] = in_program(attach_both_hosts, path)
    return states


def attach_both_hosts(path: Path) -> list[str]:
    states = []
    for _ in range(2):
        job = Job.load(path)
        job.state().trainers.spawn_procs({"gpus": 1}).initialized.get(60)
        states.append(wait_until(lambda job=job: [e.state for e in job.status() if e.state == "ending"])[0])  # type: ignore[misc]
    return states


@pytest.mark.slow
def test_program_that_attaches_during_a_notice_receives_it(job: ProcessJob) -> None:
    assert in_program(attach_twice_during_a_notice, job.path, timeout=120) == ["ending", "ending"]


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
    daemon._give_notice(Busy(), 0.05, "it has received SIGTERM", [signal.SIGTERM], no_signal)  # type: ignore[arg-type]
    assert told == [(0.05, "it has received SIGTERM")]
    assert waits


@contextlib.contextmanager
def host_with(notice: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a host whose notice is SIGURG, and its address."""
    code = (
        "import signal; from monarch_backend.hosts import run_worker_loop_forever as run;"
        f"run('127.0.0.1:0', notice={notice}, notice_signal=signal.SIGURG,"
        "    on_ready=lambda *where: print(*where, flush=True));"
        "print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            host, port = process.stdout.readline().split()
            yield process, f"tcp://{host}:{port}"
        finally:
            process.kill()


def receive_the_notice(address: str, pid: int) -> str:
    procs = attach_to_workers([address]).spawn_procs({"gpus": 1})
    port, received = Channel.open()
    procs.spawn("saver", Saver, port).initialized.get(60)
    os.kill(pid, signal.SIGURG)
    reason: str = received.recv().get(60)[2]
    return reason


@pytest.mark.slow
def test_another_signal_can_be_the_notice() -> None:
    with host_with(60) as (process, address):
        assert in_program(receive_the_notice, address, process.pid) == "it has received SIGURG"
        assert process.wait(30) == 0  # with its last controller
        assert process.stdout is not None and process.stdout.read() == "True\n"


def answer_after_the_signal(address: str, pid: int) -> str:
    procs = attach_to_workers([address]).spawn_procs({"gpus": 1})
    where = procs.spawn("where", Where)
    os.kill(pid, signal.SIGURG)
    answer: str = where.echo.call_one("still there").get(60)
    return answer


@pytest.mark.slow
def test_signal_of_a_notice_without_one_does_nothing() -> None:
    with host_with(0) as (process, address):
        assert in_program(answer_after_the_signal, address, process.pid) == "still there"
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None and process.stdout.read() == "True\n"


@pytest.mark.parametrize("notice", [0, 1])
def test_handlers_of_signals_are_restored_after_the_loop(notice: int) -> None:
    code = (
        "import os, signal; from monarch_backend.hosts import run_worker_loop_forever as run\n"
        f"run('127.0.0.1:0', notice={notice}, on_ready=lambda *_: os.kill(os.getpid(), signal.SIGTERM))\n"
        "assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_invalid_message_of_a_daemon_does_not_end_its_agent(caplog: pytest.LogCaptureFixture) -> None:
    agent.AgentProcess._hear_daemon(None, b"\xff")  # type: ignore[arg-type]
    assert "invalid message" in caplog.text


@pytest.mark.parametrize("notice", [-1, "60", float("nan")])
def test_wrong_notice_is_refused(notice: Any) -> None:
    for make in (lambda: ProcessJob({"trainers": 1}, notice=notice), lambda: SSHJob(notice=notice)):
        with pytest.raises((ValueError, TypeError), match="notice="):
            make()


# ---- readers


@contextlib.contextmanager
def host(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a host with these options of `monarch-backend up`. Yield its daemon and its address."""
    command = [sys.executable, "-m", "monarch_backend.cli", "up", "--address", "127.0.0.1:0", *options]
    with new_mark() as mark:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, MARK: mark})
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().split()[-1]
        finally:
            process.kill()
            process.communicate()


def control(address: str, pid: int) -> None:
    """Use a host as its controller. Send SIGTERM to ``pid``, unless it is 0."""
    attach_to_workers([address], timeout=60).spawn_procs({"gpus": 1}).initialized.get(60)
    if pid:
        os.kill(pid, signal.SIGTERM)


def read_to_the_end(address: str, pid: int) -> str:
    """Attach a host as commands that look at a job do, while its controller ends. Return how the host was lost."""
    [mesh] = attach_as_reader([("host", address)], secret=user_secret(), timeout=60)
    assert not isinstance(mesh, str), mesh
    assert mesh.hosts is not None
    host: Any = program().hosts.find(mesh.hosts[0])  # type: ignore[attr-defined]
    in_program(control, address, pid)
    assert wait_until(lambda: host.lost, 60)
    return str(host.lost)


def test_tethered_host_ends_although_a_reader_is_attached() -> None:
    with host("--tether", "0.5", "--first-tether", "100") as (process, address):
        assert "is lost" in in_program(read_to_the_end, address, 0)
        assert process.wait(30) == 0


@pytest.mark.slow
def test_notice_ends_with_the_last_controller_although_a_reader_is_attached() -> None:
    with host("--notice", str(NOTICE)) as (process, address):
        assert "is lost" in in_program(read_to_the_end, address, process.pid)
        process.wait(30)
