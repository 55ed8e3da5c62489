"""`monarch-backend kill`: what ends, what is refused, and what is said."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_backend import cli
from monarch_backend._core import platform
from monarch_backend._telemetry import process_signals
from monarch_backend._telemetry.programs import Program, select
from tests.support.waiting import wait_until
from tests.telemetry.programs import busy_program

pytestmark = pytest.mark.skipif(
    not (platform.HAS_MEMFD and platform.HAS_PIDFD), reason="programs are found in /proc, and signalled by pidfd"
)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with busy_program(str(tmp_path)) as process:
        yield process


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """Run a program that no test ends."""
    with busy_program(str(tmp_path_factory.mktemp("program"))) as process:
        yield process
        assert process.poll() is None


def _program(pid: int) -> Program:
    [program] = select(str(pid))
    return program


def _state(pid: int) -> str:
    """Return the state of a process, as Z for one that has ended. Empty: it was reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        parent = name
        while parent not in ("0", "1", ""):
            if parent == str(pid):
                found.add(int(name))
                break
            try:
                parent = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                break
    return found


@pytest.mark.parametrize("stopped", [False, True])
def test_killed_program_leaves_no_process(
    stopped: bool, running: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pids = _descendants(running.pid)
    recorded = [process.pid for process in _program(running.pid).processes]
    assert len(recorded) == 3 and set(recorded) < pids  # the fork server is not recorded
    if stopped:
        for pid in recorded:
            os.kill(pid, signal.SIGSTOP)
    assert cli.main(["kill", str(running.pid), *(["--signal", "KILL"] if stopped else [])]) == 0
    name = "SIGKILL" if stopped else "SIGTERM"
    out = capsys.readouterr().out
    assert f"busy_program.py (pid {running.pid}) with {name}, and its 2 processes ended" in out
    assert all(_state(pid) in ("Z", "") for pid in recorded)
    assert running.wait(30) == -signal.Signals[name]
    wait_until(lambda: all(_state(pid) in ("Z", "") for pid in pids))


def test_killed_rank_is_one_process(running: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]) -> None:
    victim = _program(running.pid).processes[2]
    assert cli.main(["kill", str(running.pid), "--rank", "gpus 1", "--signal", "sigkill"]) == 0
    assert capsys.readouterr().out.startswith(f"killed {victim.label} (pid {victim.pid}) of ")
    assert _state(victim.pid) in ("Z", "")
    assert running.wait(30) == 1  # nothing handles the failure


def test_other_signals_are_sent_without_waiting(
    kept: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    victim = _program(kept.pid).processes[1].pid
    assert cli.main(["kill", str(kept.pid), "--rank", "gpus 0", "--signal", "STOP"]) == 0
    try:
        assert capsys.readouterr().out.startswith("sent SIGSTOP to gpus 0")
        wait_until(lambda: _state(victim) == "T")
    finally:
        assert cli.main(["kill", str(kept.pid), "--rank", "gpus 0", "--signal", "CONT"]) == 0
    wait_until(lambda: _state(victim) == "S")


def test_process_that_does_not_end_is_an_error(
    kept: subprocess.Popen[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_signals, "PATIENCE_S", 0.05)
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda descriptor, number: None)
    assert cli.main(["kill", str(kept.pid), "--rank", "gpus 0"]) == 1
    error = capsys.readouterr().err
    assert "sent SIGTERM to gpus 0" in error and "after 0 s still running: gpus 0" in error and "KILL" in error


def test_process_of_another_user_gets_no_signal(
    kept: subprocess.Popen[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert cli.main(["kill", str(kept.pid)]) == 1
    assert f"belongs to user {os.getuid()}: nothing was sent" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["nothing-runs-like-this"], "no running program is 'nothing-runs-like-this'"),
        (
            ["{pid}", "--rank", "gpus 7"],
            "no running process is 'gpus 7'; there are: program busy_program.py; gpus 0",
        ),
        (["{rank}"], "{rank} is a process of program {pid} "),
    ],
)
def test_unclear_name_kills_nothing(
    arguments: list[str], error: str, kept: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"pid": kept.pid, "rank": _program(kept.pid).processes[1].pid}
    assert cli.main(["kill", *(each.format(**names) for each in arguments)]) == 1
    assert error.format(**names) in capsys.readouterr().err


def test_name_of_several_programs_kills_none(
    kept: subprocess.Popen[str], running: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["kill", "busy_program.py"]) == 1
    assert "programs; give the pid of one: " in capsys.readouterr().err
    assert running.poll() is None


def test_no_name_kills_nothing_and_lists_the_programs(
    kept: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["kill"]) == 2
    error = capsys.readouterr().err
    assert "nothing is killed without its name" in error and str(kept.pid) in error


@pytest.mark.parametrize("arguments", [["1", "--signal", "NOTHING"], ["1", "--signal", "999"]])
def test_wrong_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["kill", *arguments])
    assert "PROGRAM" in capsys.readouterr().err
