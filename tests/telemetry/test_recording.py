"""Recording areas: what a reader finds of a program that runs, hangs or has been killed."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_backend import _native
from monarch_backend._core import platform
from monarch_backend._telemetry import discovery
from monarch_backend._telemetry.kinds import Kind, SlotState, State, Status
from monarch_backend._telemetry.programs import Process, Program, of_pid, programs, select
from monarch_backend._telemetry.reader import Area, EventFilter, RecordedProcess
from monarch_backend._telemetry.recording_area import MAX_ENDED, RecordingArea
from tests.support.waiting import wait_until
from tests.telemetry.programs import busy_program

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="recording areas need memfd_create")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    with busy_program(str(tmp_path_factory.mktemp("program"))) as process:
        yield process


def _processes(pid: int) -> dict[str, RecordedProcess]:
    [owner] = [each for each in discovery.owners() if each.pid == pid]
    with owner.open() as area:
        return {process.label: process for process in area.processes(events=True)}


def test_reader_sees_processes_activities_and_events(running: subprocess.Popen[str]) -> None:
    found = _processes(running.pid)
    assert list(found) == ["program busy_program.py", "gpus 0 of trainers", "gpus 1 of trainers"]
    idle, busy = found["gpus 0 of trainers"], found["gpus 1 of trainers"]
    assert [(a.name, a.rank, a.detail) for a in busy.activities if a.state] == [
        ("worker", 1, "sleep"), ("concurrent", 1, "wait"),
    ]  # fmt: skip
    assert [(a.name, a.detail) for a in idle.activities if a.state] == [("concurrent", "wait")]
    echoes = [e for e in busy.events if e.kind == Kind.MESSAGE and e.detail == "echo"]
    assert len(echoes) == 20
    assert all(0 < e.duration_ns < 60e9 and e.trace == found["program busy_program.py"].identity for e in echoes)
    assert [e.status for e in busy.events if e.detail == "raises"] == [Status.ERROR]
    sent = [e for e in found["program busy_program.py"].events if e.kind == Kind.SENT and e.detail == "echo"]
    assert [e.reference for e in sent] == [e.reference for e in echoes]


def test_killed_process_leaves_its_last_events(tmp_path: Path) -> None:
    with busy_program(str(tmp_path)) as process:
        [owner] = [each for each in discovery.owners() if each.pid == process.pid]
        with owner.open() as area:  # it outlives the program, which ends with its process
            [victim] = [each for each in area.processes(events=True) if each.label == "gpus 1 of trainers"]
            os.kill(victim.pid, signal.SIGKILL)

            def ended() -> RecordedProcess | None:
                [left] = [each for each in area.processes(events=True) if each.index == victim.index]
                return left if left.state == SlotState.ENDED else None

            left = wait_until(ended)
        assert left is not None and left.exit_code == -signal.SIGKILL
        assert next((a.name, a.detail) for a in left.activities if a.state) == ("worker", "sleep")
        assert [e.number for e in left.events] == [e.number for e in victim.events] != []


def test_stopped_program_can_be_looked_at(running: subprocess.Popen[str]) -> None:
    [before] = select(str(running.pid))
    for process in before.processes:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        command = [sys.executable, "-m", "monarch_backend.cli", "ps", "--json", str(before.processes[-1].pid)]
        result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    finally:
        for process in before.processes:
            os.kill(process.pid, signal.SIGCONT)
    [after] = json.loads(result.stdout)
    assert [each["label"] for each in after["processes"]] == [each.label for each in before.processes]
    assert after["processes"][2]["activities"][0]["detail"] == "sleep"


def test_unknown_program_is_an_error_with_the_known_ones(running: subprocess.Popen[str]) -> None:
    assert running.pid in {each.pid for each in programs()}
    with pytest.raises(LookupError, match=f"no running program is 'nothing'.*{running.pid} .*busy_program.py"):
        select("nothing")


def test_pid_that_was_used_before_stands_for_the_running_process() -> None:
    def program(pid: int, state: str) -> Program:
        own = Process(pid, "main", "running", 0, 1.0, None, None, None, [])
        return Program(pid, "train.py", [own, Process(7, "gpus 0", state, pid, 1.0, None, None, None, [])])

    old, new, other = program(1, "ended"), program(2, "running"), program(3, "ended")
    assert of_pid([old, new, other], 7) == [new]
    assert of_pid([old, other], 7) == [old, other]
    assert of_pid([old, new, other], 3) == [other]
    assert of_pid([old], 8) == []


@pytest.fixture
def area() -> Iterator[RecordingArea]:
    made = RecordingArea()
    yield made
    made.close()


def _in_child(area: RecordingArea, slot: int, code: str) -> None:
    """Run code in a process that records into a slot."""
    start = f"from monarch_backend import _native as n; n.use_recording({area.descriptor}, {slot}, 'child')\n"
    subprocess.run([sys.executable, "-c", start + code], check=True, pass_fds=[area.descriptor])


def _read(area: RecordingArea) -> list[RecordedProcess]:
    with Area(os.dup(area.descriptor)) as reader:
        return list(reader.processes(events=True))


def test_full_ring_keeps_the_last_events(area: RecordingArea) -> None:
    size = _native.recording_layout["event_count"]
    slot = area.reserve("child")
    _in_child(area, slot, f"for i in range({size + 5}): n.record_event(8, 0, 0, 0, 0, i, i, 0)")
    [process] = _read(area)
    assert [event.reference for event in process.events] == list(range(5, size + 5))
    assert process.lost == 5


@pytest.mark.parametrize("written", [5, 8192, 20_000])
def test_reader_filters_and_limits_events(written: int, area: RecordingArea) -> None:
    record = "for i in range(1, {} + 1): n.record_event(5 + i % 2, i % 3, 0, 0, 0, i, 0, 0)"
    _in_child(area, 0, record.format(written))
    numbers = range(max(0, written - 8192) + 1, written + 1)

    def read(wanted: EventFilter) -> list[int]:
        with Area(os.dup(area.descriptor)) as reader:
            [process] = reader.processes(wanted=wanted)
        assert process.lost == max(0, written - 8192)
        return [each.reference for each in process.events]

    assert read(EventFilter()) == list(numbers)
    assert read(EventFilter(limit=3)) == list(numbers)[-3:]
    assert read(EventFilter(kinds=(6,))) == [i for i in numbers if i % 2]
    assert read(EventFilter(failed=True, limit=2)) == [i for i in numbers if i % 3][-2:]
    assert read(EventFilter(since_ns=1)) == list(numbers)
    assert read(EventFilter(since_ns=time.monotonic_ns())) == []


def test_reader_does_not_allocate_the_unwritten_part_of_a_ring(area: RecordingArea) -> None:
    _in_child(area, 0, "n.record_event(5, 0, 0, 0, 0, 1, 0, 0)")
    before = os.fstat(area.descriptor).st_blocks
    [process] = _read(area)
    assert len(process.events) == 1
    assert os.fstat(area.descriptor).st_blocks - before < 64 * 1024 // 512


def test_values_of_events_are_integers_or_doubles(area: RecordingArea) -> None:
    slot = area.reserve("child")
    _in_child(area, slot, "n.record_event(9, 0, 0, 0, 0, 0, 2.5, 0); n.record_event(9, 0, 0, 0, 0, 0, 7, 0)")
    first, second = _read(area)[0].events
    assert struct.unpack("d", first.value.to_bytes(8, "little")) == (2.5,)
    assert second.value == 7


def test_names_beyond_the_room_are_empty(area: RecordingArea) -> None:
    slot = area.reserve("child")
    _in_child(
        area, slot, "for i in range(2000): n.record_event(8, 0, n.intern_name(f'{i:0100}'), 0, 0, i, 0, 0)"
    )  # fmt: skip
    names = [event.name for event in _read(area)[0].events]
    room = _native.recording_layout["names_bytes"] // 102
    assert names[:500] == [f"{i:0100}" for i in range(500)]
    assert [bool(name) for name in names] == [i < room for i in range(2000)]


def test_slots_of_ended_processes_are_bounded(area: RecordingArea) -> None:
    slots = [area.reserve(f"process {number}") for number in range(MAX_ENDED + 3)]
    for slot in slots:
        area.end(slot, 0)
    assert area.reserve("another") in slots[:3]
    assert [each.label for each in _read(area)] == [f"process {number}" for number in range(3, MAX_ENDED + 3)]


@pytest.mark.parametrize(
    "call", ["record_event(1)", "begin_activity(0)", "end_activity(0, 'x')", "record_event(*'x'*8)"]
)
def test_wrong_arguments_raise_type_error(call: str) -> None:
    with pytest.raises(TypeError):
        eval(f"_native.{call}", {"_native": _native})


def test_nothing_is_recorded_without_the_setting(tmp_path: Path) -> None:
    code = (
        "import os; os.environ['MONARCH_TELEMETRY'] = '0'\n"
        "from monarch_backend.actor import this_proc\n"
        "from monarch_backend import _native\n"
        "this_proc(); assert not _native.is_recording()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_fork_of_a_recording_process_records_nothing(area: RecordingArea) -> None:
    slot = area.reserve("child")
    _in_child(
        area, slot,
        "import os; cell = n.take_cell(4, 'actor', 0)\n"
        "if os.fork() == 0:\n"
        "    assert not n.is_recording()\n"
        "    n.begin_activity(cell, 1, 0, 0, 0, 0, 0); n.record_event(8, 0, 0, 0, 0, 0, 0, 0)\n"
        "    os._exit(0)\n"
        "assert os.wait()[1] == 0",
    )  # fmt: skip
    [process] = _read(area)
    assert process.events == [] and process.activities[0].state == 0


def test_numbers_of_a_later_release_are_their_own_names() -> None:
    assert [(each.name, each.value) for each in (Kind(99), State(98), Status(97))] == [
        ("99", 99),
        ("98", 98),
        ("97", 97),
    ]
    assert Kind(99) == 99 and Kind(3) is Kind.SENT and 99 not in list(Kind)
    with pytest.raises(ValueError):
        Kind("sent")
