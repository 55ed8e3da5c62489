"""`monarch-backend up`: detached daemons, daemons that end with standard input, and signals."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from monarch_backend._core import platform
from monarch_backend._hosts import daemon
from monarch_backend._hosts.process_identity import Identity
from monarch_backend._hosts.protocol import Ask, Versions
from monarch_backend._processes.spawner import Exited, SpawnFailed
from monarch_backend._transport.network.auth import new_secret
from monarch_backend.cli import main
from tests.support.ranks import run_ranks

UP = [sys.executable, "-m", "monarch_backend.cli", "up", "--address", "127.0.0.1:0"]
ADDRESS = r"monarch_backend: this host is up: tcp://127\.0\.0\.1:\d+\n"


@pytest.mark.slow
def test_detached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that reads the command's output does not wait for the daemon's end. The daemon's log is private."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    done = subprocess.run([*UP, "--detach"], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    found = re.fullmatch(ADDRESS + r"monarch_backend: its process is (\d+) (\d+) (\S+) (.*)\n", done.stdout)
    assert found and done.returncode == 0 and done.stderr == "", done
    process = Identity(int(found[1]), int(found[2]), found[3])
    assert process.runs()
    process.end(10)
    assert not process.runs()
    assert Path(found[4]).is_relative_to(tmp_path) and Path(found[4]).stat().st_mode & 0o077 == 0


def test_detached_and_can_not_listen(tmp_path: Path) -> None:
    command = [*UP[:-1], "192.0.2.1:1", "--detach", "--secret-from-stdin", "--log", str(tmp_path / "some" / "log")]
    done = subprocess.run(command, input=new_secret().hex(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(
        r"monarch-backend up: can't listen on 192.0.2.1:1: .*Cannot assign requested address.*\n", done.stderr
    ), done.stderr
    assert (tmp_path / "some" / "log").read_text() == done.stderr


def test_host_ends_with_standard_input() -> None:
    process = subprocess.Popen([*UP, "--exit-with-stdin", "--secret-from-stdin"], stdin=-1, stdout=-1, text=True)
    assert process.stdin and process.stdout
    with process.stdin, process.stdout:
        process.stdin.write(new_secret().hex() + "\n")
        process.stdin.flush()
        assert re.fullmatch(ADDRESS, process.stdout.readline())
        process.stdin.close()
        assert process.wait(20) == 0
        assert process.stdout.read() == ""


def test_host_that_was_started_with_blocked_signals_ends_with_standard_input() -> None:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    try:
        process = subprocess.Popen([*UP, "--exit-with-stdin"], stdin=-1, stdout=-1, text=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    try:
        assert process.stdin and process.stdout
        with process.stdin, process.stdout:
            assert re.fullmatch(ADDRESS, process.stdout.readline())
            process.stdin.close()
            assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("line", ["", "secret\n", "ab" * 33 + "\n", "x" * 5000])
def test_invalid_secret_is_refused_without_showing_it(line: str) -> None:
    """The command fails at once, and the error does not contain the line."""

    def up(_rank: int, _address: str) -> tuple[int, str]:
        read, write = os.pipe()
        os.write(write, line.encode())
        os.close(write)
        os.dup2(read, 0)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            return main([*UP[3:], "--secret-from-stdin"]), said.getvalue()

    [(code, said)] = run_ranks(up, 1, backend=None)
    assert code == 2
    assert said == (
        "monarch-backend up: the first line of standard input does not hold a secret of 64 hexadecimal digits\n"
    )


def test_signal_before_the_wait_is_not_missed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    for _ in range(20):
        with daemon._signals(signal.SIGTERM, signal.SIGINT) as told_to_end:
            os.kill(os.getpid(), signal.SIGTERM)
            thread = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT))
            thread.start()
            told_to_end()
            told_to_end()
            thread.join()
    assert signal.getsignal(signal.SIGTERM) is before


def test_tethered_host_ends_after_its_last_controller() -> None:
    def with_and_without_controller(_rank: int, _address: str) -> list[bool]:
        ended = threading.Event()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(daemon.os, "kill", lambda *_: ended.set())
            host = daemon.Daemon(new_secret())
            host._tcp.start()
            host._agents.update({1: "0" * 32, 2: "1" * 32})
            host._readers.add(2)
            host.end_without_controller(0.05)
            result = [ended.wait(0.2)]
            host._event(Exited(1, 0, 0))
            result.append(ended.wait(10))
            host._tcp.close()
            return result

    assert run_ranks(with_and_without_controller, 1, backend=None) == [[False, True]]


def test_agent_that_fails_before_its_start_returns_does_not_count() -> None:
    def fail(_rank: int, _address: str) -> tuple[dict[int, str], bool]:
        host = daemon.Daemon(new_secret())
        events: list[threading.Thread] = []

        def start(*_: object) -> int:
            events.append(threading.Thread(target=host._event, args=(SpawnFailed(7, "no memory"),)))
            events[0].start()
            events[0].join(0.2)
            return 7

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(daemon.agent, "start", start)
            host._answer(Ask("0" * 32, "1" * 32, Versions.here(), 1.0, 3.0), new_secret())
        events[0].join(10)
        return host._agents, host.has_controllers

    assert run_ranks(fail, 1, backend=None) == [({}, False)]


def test_invalid_tether_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tether=0: give more than 0 seconds"):
        daemon.run_worker_loop_forever(tether=0)


PROGRAM = """
import sys
from monarch_backend.actor import Actor, endpoint
from monarch_backend.hosts import attach_to_workers
from monarch_backend.telemetry import get_meter


class Trainer(Actor):
    @endpoint
    def train(self):
        get_meter("trainer").create_counter("samples").add(32)


procs = attach_to_workers([sys.argv[1]]).spawn_procs({"gpus": 1}, name="trainers")
procs.spawn("trainer", Trainer).train.call().get()
print("trained", flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(not platform.HAS_MEMFD, reason="recording areas need memfd_create")
def test_daemon_serves_metrics(tmp_path: Path) -> None:
    path = tmp_path / f"metrics_{tmp_path.name}.py"
    path.write_text(PROGRAM)
    with subprocess.Popen([*UP, "--metrics", "0"], stdin=subprocess.DEVNULL, stdout=-1, stderr=-1, text=True) as up:
        try:
            assert up.stdout is not None and up.stderr is not None
            found = re.fullmatch(
                r"monarch_backend: metrics at (http://127\.0\.0\.1:\d+/metrics)\n", up.stderr.readline()
            )
            assert found is not None
            address = up.stdout.readline().split(": ")[-1].strip()
            with subprocess.Popen([sys.executable, str(path), address], stdin=-1, stdout=-1, text=True) as program:
                assert program.stdout is not None and program.stdout.readline() == "trained\n"
                with urllib.request.urlopen(found[1], timeout=30) as answer:
                    text = answer.read().decode()
                program.communicate("", timeout=60)
            assert re.search(r'^samples_total\{.*process="hosts 0 gpus 0 of trainers"\} 32$', text, re.MULTILINE), text
        finally:
            up.terminate()


def test_daemon_that_cannot_serve_metrics_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [*UP, "--metrics", str(port)], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )
    why = f"cannot serve on 127.0.0.1 port {port}: Address already in use: choose another one"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"monarch-backend up: {why}\n")
