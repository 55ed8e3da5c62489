"""`monarch-backend ps`: names of processes, and their order."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from monarch_backend import cli
from monarch_backend._core import platform
from monarch_backend._processes.process_state import state_and_start
from monarch_backend._telemetry import programs, rank_states
from monarch_backend._telemetry.kinds import Kind, SlotState, State
from monarch_backend._telemetry.programs import Program
from monarch_backend._telemetry.reader import Activity, RecordedProcess
from monarch_backend._telemetry.stacks import Frame, Stacks, Task
from monarch_backend._telemetry.subject import ThisMachine
from monarch_backend.cli import top
from tests.support.running_script import running_script
from tests.support.waiting import wait_until
from tests.telemetry.programs import busy_program

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="programs are found in /proc")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    with busy_program(str(tmp_path_factory.mktemp("program"))) as process:
        yield process


def test_process_has_the_name_of_its_mesh(running: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ps", str(running.pid)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" (pid")[0] for line in lines if line.startswith("  gpus")] == [
        "  gpus 0 of trainers", "  gpus 1 of trainers",
    ]  # fmt: skip


@pytest.mark.parametrize(("order", "key"), [("age", "age"), ("cpu", "cpu_seconds"), ("memory", "memory")])
def test_sorted_processes_follow_the_program_highest_first(
    order: str, key: str, running: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["ps", str(running.pid), "--sort", order, "--json"]) == 0
    [program] = json.loads(capsys.readouterr().out)
    first, *others = program["processes"]
    assert first["pid"] == running.pid
    assert [each[key] for each in others] == sorted((each[key] for each in others), reverse=True)
    assert len(others) == 2


HANGS_AT_START = """
import os, signal, sys, threading
import cloudpickle
from monarch_backend._processes.spawner import ProcessSpec, Spawner, Started


def spec(label, **environment):
    variables = {**os.environ, **environment}
    return ProcessSpec(label, cloudpickle.dumps(int), variables, sys.path, sys.argv, os.getcwd())


started = threading.Semaphore(0)
spawner = Spawner(lambda event: isinstance(event, Started) and started.release())
os.environ["MONARCH_START_METHOD"] = "spawn"
spawner.spawn([spec("gpus 0", HANGS="1")])
started.acquire()
os.kill(spawner._process.pid, signal.SIGSTOP)
spawner.spawn([spec("gpus 1"), spec("gpus 2")])
print("ready", flush=True)
sys.stdin.readline()
os.kill(spawner._process.pid, signal.SIGCONT)
spawner.close()
"""


@pytest.fixture
def starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A program with a process that hangs in an import, and two that its fork server has not made."""
    hang = "import os, threading\nif os.environ.get('HANGS'): threading.Event().wait()\n"
    (tmp_path / "sitecustomize.py").write_text(hang)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with running_script(tmp_path / "starting.py", HANGS_AT_START) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(60) == 0


def test_processes_that_are_being_started_are_listed(
    starting: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["ps", str(starting.pid), "--json"]) == 0
    [program] = json.loads(capsys.readouterr().out)
    found = program["starting"]
    assert [(each["label"], each["parent"], each["state"]) for each in found] == [
        (f"gpus {rank}", starting.pid, "starting") for rank in range(3)
    ]
    forked = found[0]["pid"]
    assert os.path.exists(f"/proc/{forked}") and [each["pid"] for each in found[1:]] == [None, None]
    assert all(0 < each["seconds"] < 60 for each in found) and found[0]["seconds"] > found[1]["seconds"]
    assert cli.main(["ps", str(starting.pid)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(f"  gpus 0 (pid {forked}, starting for ")
    assert lines[2].startswith("  gpus 1 (no process yet, starting for ") and len(lines) == 4
    assert cli.main(["stack", str(starting.pid)]) == 0
    assert re.search(r"\nstarting for \d+ s: gpus 0-2\n", capsys.readouterr().out)
    assert cli.main(["top", str(starting.pid), "--once", "--interval", "0.01"]) == 0
    table = capsys.readouterr().out
    assert re.search(rf"^  gpus 0 +{forked} +starting +[\d.]+ m?s$", table, re.MULTILINE), table
    assert re.search(r"^  gpus 1 +starting +[\d.]+ m?s$", table, re.MULTILINE), table
    assert cli.main(["top", str(starting.pid), "--json", "--interval", "0.01"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(each["pid"], each["state"]) for each in rows[1:]] == [
        (forked, "starting"), (None, "starting"), (None, "starting"),
    ]  # fmt: skip


BOOTSTRAP = """
import threading
from monarch_backend.actor import this_host

def hang():
    print("in the bootstrap", flush=True)
    threading.Event().wait()

if __name__ == "__main__":
    procs = this_host().spawn_procs({"gpus": 1}, name="trainers", bootstrap=hang)
    procs.initialized.get()
"""


def test_bootstrap_that_hangs_is_an_activity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running_script(tmp_path / "bootstrap.py", BOOTSTRAP) as process:
        assert process.stdout is not None
        assert process.stdout.readline().endswith("in the bootstrap\n")
        assert cli.main(["ps", str(process.pid)]) == 0
        assert "\n      bootstrap: running for " in capsys.readouterr().out


@pytest.mark.parametrize(("number", "state"), [(signal.SIGSTOP, "stopped"), (signal.SIGCONT, "running")])
def test_state_of_a_stopped_process_is_that_of_the_kernel(
    number: signal.Signals, state: str, running: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    [program] = programs.select(str(running.pid))
    [rank] = [each for each in program.processes if each.label == "gpus 1 of trainers"]
    os.kill(rank.pid, number)
    wait_until(lambda: (state_and_start(rank.pid)[0] == "T") == (state == "stopped"))
    try:
        assert cli.main(["ps", str(running.pid)]) == 0
        assert f"(pid {rank.pid}, {state}," in capsys.readouterr().out
        assert cli.main(["ps", str(running.pid), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)[0]["processes"]
        assert [each["state"] for each in found if each["pid"] == rank.pid] == [state]
        query = f"select state from processes where pid = {rank.pid}"
        assert cli.main(["sql", query, str(running.pid), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["rows"] == [[state]]
        assert cli.main(["top", str(running.pid), "--once"]) == 0
        found = re.search(r"^  gpus 1 of trainers +\d+ +stopped ", capsys.readouterr().out, re.MULTILINE)
        assert (found is not None) == (state == "stopped")
        process = next(each for each in programs.select(str(running.pid))[0].processes if each.pid == rank.pid)
        assert rank_states.state_of(process)[0] == state
        assert cli.main(["stack", str(running.pid), "--rank", str(rank.pid)]) == 0  # it has not ended
        assert "gpus 1 of trainers" in capsys.readouterr().out
    finally:
        os.kill(rank.pid, signal.SIGCONT)


OF_A_LATER_RELEASE = """
import os
from monarch_backend import cli
from monarch_backend._telemetry import recorder

recorder.area()
cell = recorder.take_cell(999, "later")
recorder.begin_activity(cell, 77, 0, 0, 0, 0, 0)
cli.main(["ps", str(os.getpid()), "--json"])
"""


def test_activity_of_a_later_release_has_a_number_as_kind() -> None:
    command = [sys.executable, "-c", OF_A_LATER_RELEASE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    [activity] = json.loads(done.stdout)[0]["processes"][0]["activities"]
    assert (activity["kind"], activity["state"]) == ("999", "77")


def _recorded(pid: int, identity: int, activities: list[Activity]) -> RecordedProcess:
    return RecordedProcess(pid, pid, f"rank {pid}", SlotState.ALIVE, 1, None, identity, activities)


def test_async_messages_have_the_call_of_their_wait_and_only_theirs_are_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def activity(kind: Kind, state: State, rank: int, trace: int = 0, *, is_async: bool = False) -> Activity:
        return Activity(1, kind, state, "w", "step", 1, 0, 5, 0, 0, rank, trace, is_async)

    recorded = [
        _recorded(1, 0xBEEF, [activity(Kind.WAIT, State.WAITING, 0)]),
        _recorded(2, 2, [activity(Kind.MESSAGE, State.RUNNING, 1, 0xBEEF, is_async=True)]),
        _recorded(3, 3, [activity(Kind.MESSAGE, State.IDLE, 2, 0xBEEF, is_async=True)]),
        _recorded(4, 4, [activity(Kind.MESSAGE, State.RUNNING, 3, 0xBEEF)]),
        replace(_recorded(5, 5, [activity(Kind.MESSAGE, State.RUNNING, 4, is_async=True)]), state=SlotState.ENDED),
    ]

    def task(line: int, caller: int) -> Task:
        return Task((Frame("train.py", line, "step"),), actor="w", rank=1, endpoint="step", caller=caller, number=5)

    asked: list[int] = []

    def stacks(_: ThisMachine, host: str, pids: list[int], **options: object) -> list[Stacks]:
        asked.extend(pids)
        return [Stacks(pid, [task(7, 0xCAFE), task(8, 0xBEEF)]) for pid in pids]  # of two callers

    monkeypatch.setattr(ThisMachine, "stacks", stacks)
    monkeypatch.setattr(
        programs, "select", lambda _: [Program(1, "train.py", [programs._process(each, 1) for each in recorded])]
    )
    assert cli.main(["ps"]) == 0
    text = capsys.readouterr().out
    assert asked == [2]
    assert "waits for w.step for " in text and ", ranks 1,3 missing\n" in text
    assert "at train.py:8 in step" in text and "train.py:7" not in text
    assert cli.main(["ps", "--json"]) == 0
    [program] = json.loads(capsys.readouterr().out)
    found = [each for process in program["processes"] for each in process["activities"]]
    assert [each["call"] for each in found] == ["beef.5", "beef.5", "", "beef.5", ""]
    assert not any(programs.IS_ASYNC in each for each in found)
    assert not any(
        programs.IS_ASYNC in each
        for process in top.as_json(programs.select(None), {})
        for each in process["activities"]
    )
