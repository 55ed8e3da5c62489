"""State, start and identity of processes, from /proc and from ps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_backend._core import platform
from monarch_backend._hosts.process_identity import Identity
from monarch_backend._processes import system_calls
from monarch_backend._processes.process_state import state_and_start
from tests.actor.actors import until

PROGRAM = """
import signal, sys
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
signal.pause()
"""


@pytest.fixture(params=["proc", "ps"])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "proc" and not platform.HAS_PROC:
        pytest.skip("this system has no /proc")
    monkeypatch.setattr(platform, "HAS_PROC", request.param == "proc")
    monkeypatch.setattr(platform, "HAS_PIDFD", platform.HAS_PIDFD and request.param == "proc")
    return str(request.param)


def _start(*words: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    process = _start()
    yield process
    process.kill()
    process.communicate()


def test_state_follows_signals(source: str, process: subprocess.Popen[str]) -> None:
    assert state_and_start(process.pid)[0] in "RS" and not system_calls.stands_still(process.pid)
    process.send_signal(signal.SIGSTOP)
    until(lambda: system_calls.stands_still(process.pid), "it stands still")
    process.kill()
    until(lambda: state_and_start(process.pid)[0] == "Z", "it is a zombie")
    process.wait()
    with pytest.raises(ProcessLookupError, match=f"there is no process {process.pid}"):
        state_and_start(process.pid)
    assert not system_calls.stands_still(process.pid)


def test_start_from_ps_is_in_seconds_since_1970(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "HAS_PROC", False)
    before = time.time()
    process = _start()
    try:
        assert before - 2 <= state_and_start(process.pid)[1] <= time.time() + 2
        assert state_and_start(process.pid) == state_and_start(process.pid)
    finally:
        process.kill()
        process.communicate()


def test_identity_is_that_of_one_process(source: str, process: subprocess.Popen[str]) -> None:
    it = Identity.of(process.pid)
    assert it.runs() and it.boot
    assert not Identity(it.pid, it.start - 5, it.boot).runs()
    process.kill()
    until(lambda: not it.runs(), "a zombie does not run")


@pytest.mark.parametrize("words", [(), ("stubborn",)])
def test_end_of_an_identity_kills_a_process_that_ignores_it(source: str, words: tuple[str, ...]) -> None:
    process = _start(*words)
    Identity.of(process.pid).end(0.2)
    assert process.wait(30) == (-signal.SIGKILL if words else -signal.SIGTERM)
    process.communicate()


def test_end_of_another_process_with_the_pid_does_nothing(source: str, process: subprocess.Popen[str]) -> None:
    it = Identity.of(process.pid)
    Identity(it.pid, it.start - 5, it.boot).end(0.1)
    assert process.poll() is None


def test_sessions_are_killed_with_their_descendants(source: str) -> None:
    program = "import signal, subprocess\nsubprocess.Popen(['sleep', '600'])\nprint('up', flush=True)\nsignal.pause()"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    assert system_calls.kill_sessions([process.pid]) > 0
    assert process.stdout.read() == ""  # both have ended
    process.wait()
    until(lambda: system_calls.kill_sessions([process.pid]) == 0, "nothing is left of the session")
    process.stdout.close()


def test_portable_boot_id_is_that_of_the_machine() -> None:
    if Path("/proc/sys/kernel/random/boot_id").exists() and os.environ.get("MONARCH_PORTABLE") != "1":
        assert Identity.of(os.getpid()).boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert Identity.of(os.getpid()).boot
