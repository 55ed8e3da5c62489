"""What the commands that look at programs share: a reader that leaves, --rank, --json, and usage lines."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_backend import cli
from monarch_backend._core import platform
from monarch_backend._telemetry import profiles, programs, sql, trace_export
from monarch_backend._telemetry.profile_result import ProfileResult
from monarch_backend._telemetry.program_recording import Recording
from monarch_backend._telemetry.programs import Process, Program, select
from monarch_backend._telemetry.subject import ThisMachine
from tests.support.running_script import running_script
from tests.support.waiting import wait_until
from tests.telemetry.programs import busy_program

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="programs are found in /proc")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    with busy_program(str(tmp_path_factory.mktemp("program"))) as process:
        yield process


def _without_reader(words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command whose stdout is a pipe that is closed at its other end."""
    left, right = os.pipe()
    os.close(left)
    try:
        return subprocess.run(
            [sys.executable, "-m", "monarch_backend.cli", *words],
            stdout=right,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            text=True,
            timeout=120,
        )
    finally:
        os.close(right)


@pytest.mark.parametrize(
    "words",
    [
        ["ps", "{pid}", "--json"],
        ["stack", "{pid}"],
        ["top", "{pid}", "--once"],
        ["sql", "select * from events", "{pid}"],
        ["trace", "{pid}", "-o", "-"],
        ["debug", "{pid}"],
    ],
    ids=lambda words: words[0],
)
def test_command_without_a_reader_ends_without_an_error(words: list[str], running: subprocess.Popen[str]) -> None:
    done = _without_reader([word.format(pid=running.pid) for word in words])
    assert done.returncode == 0, done.stderr
    assert "Broken" not in done.stderr and "Traceback" not in done.stderr


def test_broken_pipe_of_another_file_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str | None) -> list[Program]:
        raise BrokenPipeError("of a host")

    monkeypatch.setattr(programs, "select", refuse)
    with pytest.raises(BrokenPipeError, match="of a host"):
        cli.main(["ps"])


@pytest.mark.parametrize("words", [["ps", "--jsn"], ["stack", "--nothing"], ["kill", "1", "-x"]])
def test_unknown_option_prints_the_usage_of_its_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    error = capsys.readouterr().err
    assert error.startswith(f"usage: monarch-backend {words[0]} ")
    assert f"unrecognized arguments: {words[-1]}" in error


OF_THE_LAUNCHER = ["1", "rank 1", "rank 1: ddp.py", "rank=1", "4711", "1-3", "rank 1-3"]


def _launched() -> Program:
    def process(pid: int, label: str) -> Process:
        return Process(pid, label, "running", 0 if pid == 4700 else 4700, 1.0, None, None, None, [])

    return Program(
        4700, "ddp.py", [process(4700, "launcher"), process(4710, "rank 0: ddp.py"), process(4711, "rank 1: ddp.py")]
    )


@pytest.mark.parametrize("option", ["--rank", "--ranks"])
@pytest.mark.parametrize("rank", OF_THE_LAUNCHER)
def test_rank_of_the_launcher_has_several_names(
    rank: str, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def stacks(_: ThisMachine, host: str, pids: list[int], **options: Any) -> list[Any]:
        asked.append(pids)
        raise LookupError("no stacks here")

    def send(_: ThisMachine, program: Program, processes: list[Process], number: signal.Signals) -> str:
        asked.append([each.pid for each in processes])
        return "sent"

    def profile(_: ThisMachine, members: list[Any], **length: Any) -> ProfileResult:
        asked.append([each.pid for _, each in members])
        raise LookupError("no profile here")

    monkeypatch.setattr(programs, "select", lambda _: [_launched()])
    for name, function in (("stacks", stacks), ("send_signal", send), ("profile", profile)):
        monkeypatch.setattr(ThisMachine, name, function)
    cli.main(["kill", "ddp.py", option, rank])
    cli.main(["profile", "ddp.py", option, rank, "--seconds", "1"])
    cli.main(["stack", "ddp.py", option, rank])
    assert asked == [[4711]] * 3, capsys.readouterr()


@pytest.mark.parametrize("rank", ["gpus=0-1", "gpus 0-1", "gpus 0-1 of trainers"])
def test_several_ranks_have_one_name(
    rank: str, running: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["stack", str(running.pid), "--rank", rank, "--json"]) == 0
    [program] = json.loads(capsys.readouterr().out)
    assert [each["label"] for each in program["processes"]] == ["gpus 0 of trainers", "gpus 1 of trainers"]
    assert cli.main(["logs", str(running.pid), "--rank", rank]) == 0
    assert "sleeps" in capsys.readouterr().out
    assert cli.main(["kill", str(running.pid), "--rank", rank]) == 1
    assert f"{rank!r} stands for ['gpus 0 of trainers (pid" in capsys.readouterr().err
    assert cli.main(["stack", str(running.pid), "--rank", "gpus=x"]) == 1
    assert "'x' is not a list of indices" in capsys.readouterr().err


def test_kill_as_json_has_what_was_sent(running: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]) -> None:
    [program] = select(str(running.pid))
    assert cli.main(["kill", str(running.pid), "--rank", "gpus 0", "--signal", "CONT", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "program": running.pid,
        "command": program.command,
        "host": "",
        "signal": "SIGCONT",
        "sent_to": program.processes[1].pid,
        "ended": [],
    }


def test_trace_as_json_has_the_file_and_processes(
    running: subprocess.Popen[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    assert cli.main(["trace", str(running.pid), "-o", str(path), "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    events = json.loads(path.read_text())["traceEvents"]
    assert about["file"] == str(path) and about["not_read"] == []
    assert about["slices"] == sum(each["ph"] == "X" for each in events) > 40
    assert [each["label"] for each in about["processes"]][1:] == ["gpus 0 of trainers", "gpus 1 of trainers"]


def test_profile_as_json_has_the_file_and_the_problems(
    running: subprocess.Popen[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    found = [profiles.Profile(1, "gpus 0", steps=3), profiles.Profile(2, "gpus 1", problem="it is stopped")]
    result = ProfileResult(found, Recording([], [], [], 0, 0))
    monkeypatch.setattr(ThisMachine, "profile", lambda *_, **length: result)
    path = tmp_path / "trace.json"
    assert cli.main(["profile", str(running.pid), "--steps", "5", "-o", str(path), "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["file"] == str(path) and path.exists()
    assert (about["profiled"], about["problems"]) == (["gpus 0"], {"gpus 1": "it is stopped"})
    assert about["shortfalls"] == ["gpus 0 (pid 1) made 3 of 5 steps in 60 s"]


@pytest.mark.parametrize("command", ["profile", "trace", "sql"])
def test_command_of_many_objects_does_not_collect_garbage(
    command: str, running: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A collection visits all objects, and a second of a busy rank has a million of them."""
    is_enabled = list[bool]()

    def read(*_: Any, **__: Any) -> Any:
        is_enabled.append(gc.isenabled())
        recording = Recording([], [], [], 0, 0)
        return ProfileResult([], recording) if command == "profile" else recording

    write = trace_export.write

    def noted_write(*arguments: Any) -> dict[str, int]:
        is_enabled.append(gc.isenabled())
        return write(*arguments)

    monkeypatch.setattr(ThisMachine, "profile" if command == "profile" else "recording", read)
    monkeypatch.setattr(trace_export, "write", noted_write)
    words = {"profile": ["--seconds", "1"], "sql": ["select 1"]}.get(command, [])
    file = [] if command == "sql" else ["-o", str(tmp_path / "trace.json")]
    cli.main([command, *words, str(running.pid), *file])
    assert is_enabled and not any(is_enabled) and gc.isenabled()


def _profile_of(steps: int, said: list[str], capfd: pytest.CaptureFixture[str]) -> Any:
    """Return a stand-in of a profile that ends when the command has said something."""

    def profile(_: ThisMachine, members: list[Any], **length: Any) -> ProfileResult:
        said.append(wait_until(lambda: capfd.readouterr().err))
        return ProfileResult([profiles.Profile(1, "gpus 0", steps=steps)], Recording([], [], [], 0, 0))

    return profile


@pytest.mark.parametrize(("steps", "code"), [(0, 1), (2, 0)])
def test_profile_of_steps_says_what_it_waits_for(
    steps: int,
    code: int,
    running: subprocess.Popen[str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    said = list[str]()
    monkeypatch.setattr(cli.profile, "NOTICE_S", 0.01)
    monkeypatch.setattr(ThisMachine, "profile", _profile_of(steps, said, capfd))
    words = ["profile", str(running.pid), "--steps", "2", "-o", str(tmp_path / "trace.json")]
    assert cli.main(words) == code
    assert "waits for 2 calls of monarch_backend.telemetry.step() on gpus 0-1 of trainers, at most 60 s" in said[0]
    assert "none has called it yet" in said[0]
    error = capfd.readouterr().err
    assert ("no process has called monarch_backend.telemetry.step() in 60 s" in error) == (code == 1)


WAITS = """
import asyncio, threading
from monarch_backend.actor import Actor, current_rank, endpoint, this_host


class Trainer(Actor):
    @endpoint
    def hang(self):
        if current_rank().rank == 1:
            threading.Event().wait()


class AsyncTrainer(Actor):
    @endpoint
    async def hang(self):
        if current_rank().rank == 1:
            await asyncio.Event().wait()


if __name__ == "__main__":
    this_host().spawn_procs({"gpus": 3}, name="trainers").spawn("trainer", TRAINER).hang.call().get()
"""


@pytest.mark.parametrize("trainer", ["Trainer", "AsyncTrainer"])
def test_wait_names_the_call_and_the_missing_rank(
    trainer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def line() -> str:
        if cli.main(["ps", name]) != 0:
            return ""
        lines = capsys.readouterr().out.splitlines()
        return next((line for line in lines if "waits for trainer.hang for " in line), "")

    with running_script(tmp_path / "waits_for_a_rank.py", WAITS.replace("TRAINER", trainer)):
        name = str(tmp_path / "waits_for_a_rank.py")
        assert wait_until(lambda: line().endswith(", rank 1 missing"))  # at first, others may be
        assert cli.main(["top", name, "--once"]) == 0
        assert re.search(r"call +waiting +trainer\.hang, rank 1 missing ", capsys.readouterr().out)


def test_error_of_a_query_has_one_punctuation_mark_between_its_parts() -> None:
    with pytest.raises(sql.QueryError) as caught:
        sql.answer("select 1 from messages; select 2", Recording([], [], [], 0, 0))
    assert ".;" not in str(caught.value) and "; messages has the columns" in str(caught.value)


def test_no_program_without_a_name_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "no program of this user runs on this machine"
    monkeypatch.setattr(programs, "programs", list)
    assert [cli.main(["ps"]), cli.main(["ps", "--json"]), cli.main(["stack"])] == [0, 0, 0]
    assert capsys.readouterr().out == f"{said}\n[]\n{said}\n"
    assert cli.main(["ps", "nothing"]) == 1
