"""`monarch-backend ps`: names of processes, and their order."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from monarch_backend import cli
from monarch_backend._core import platform
from monarch_backend._telemetry import programs
from monarch_backend._telemetry.kinds import Kind, SlotState, State
from monarch_backend._telemetry.programs import Program
from monarch_backend._telemetry.reader import Activity, RecordedProcess
from monarch_backend._telemetry.stacks import Frame, Stacks, Task
from monarch_backend._telemetry.subject import ThisMachine
from monarch_backend.cli import top
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
