"""Traces: valid JSON of the Trace Event Format, with slices that nest, arrows that bind and names of tracks."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._core import platform
from monarch_backend._telemetry import program_recording
from monarch_backend._telemetry.kinds import Kind, SlotState
from monarch_backend._telemetry.profiles import Profile
from monarch_backend._telemetry.program_recording import ProcessRecording, Recording
from monarch_backend._telemetry.programs import Process, Program
from monarch_backend._telemetry.reader import RecordedEvent, RecordedProcess
from monarch_backend._telemetry.trace_export import as_trace
from tests.telemetry.traced_program import traced_program

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="recording areas need memfd_create")

Event = dict[str, Any]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    with traced_program(tmp_path_factory.mktemp("program")) as process:
        yield process


def _command(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "monarch_backend.cli", "trace", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def trace(running: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    done = _command(str(running.pid), "-o", str(path))
    assert done.returncode == 0, done.stderr
    assert "of 4 processes" in done.stdout

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    found: dict[str, Any] = json.loads(path.read_text(), parse_constant=refuse)
    return found


def _slices(trace: dict[str, Any]) -> list[Event]:
    """Return the slices, with ``start`` and ``end`` in whole nanoseconds."""
    return [
        {**each, "start": round(each["ts"] * 1000), "end": round((each["ts"] + each["dur"]) * 1000)}
        for each in trace["traceEvents"]
        if each["ph"] == "X"
    ]


def _tracks(trace: dict[str, Any]) -> dict[tuple[int, int], list[Event]]:
    tracks = defaultdict[tuple[int, int], list[Event]](list)
    for each in _slices(trace):
        tracks[each["pid"], each["tid"]].append(each)
    return tracks


def _names(trace: dict[str, Any], kind: str) -> dict[Any, str]:
    found = [each for each in trace["traceEvents"] if each["ph"] == "M" and each["name"] == kind]
    return {
        (each["pid"] if kind == "process_name" else (each["pid"], each["tid"])): each["args"]["name"] for each in found
    }


def _stack_at(track: list[Event], ns: int) -> list[str]:
    """Return the names of the slices that are open at a time, outermost first."""
    open_then = [each for each in track if each["start"] <= ns < each["end"]]
    return [each["name"] for each in sorted(open_then, key=lambda each: (each["start"], -each["end"]))]


def _check_format(trace: dict[str, Any]) -> None:
    last = -1.0
    for each in trace["traceEvents"]:
        assert {"ph", "name", "pid", "ts"} <= set(each) and each["ts"] >= 0, each
        assert isinstance(each["name"], str) and each["name"], each
        if each["ph"] == "X":
            assert each["ts"] >= last and each["dur"] >= 0, each
            last = each["ts"]


def _check_nesting(trace: dict[str, Any]) -> None:
    for key, track in _tracks(trace).items():
        opened: list[Event] = []
        for each in sorted(track, key=lambda each: (each["start"], -each["end"])):
            while opened and opened[-1]["end"] <= each["start"]:
                opened.pop()
            assert not opened or each["end"] <= opened[-1]["end"], (key, opened[-1], each)
            opened.append(each)


def _check_arrows(trace: dict[str, Any]) -> list[tuple[str, str]]:
    """Check that both ends of each arrow bind to a slice. Return the names of these slices."""
    tracks = _tracks(trace)
    ends = defaultdict[int, dict[str, Event]](dict)
    for each in trace["traceEvents"]:
        if each["ph"] in "sf":
            assert each["ph"] not in ends[each["id"]]
            ends[each["id"]][each["ph"]] = each
    bound = []
    for arrow in ends.values():
        start, finish = arrow["s"], arrow["f"]
        assert (start["cat"], start["name"]) == (finish["cat"], finish["name"]) and finish["bp"] == "e"
        assert start["ts"] <= finish["ts"]
        stacks = [_stack_at(tracks[each["pid"], each["tid"]], round(each["ts"] * 1000)) for each in (start, finish)]
        assert all(stacks), arrow
        bound.append((stacks[0][-1], stacks[1][-1]))
    return bound


def test_trace_is_valid_and_slices_nest(trace: dict[str, Any]) -> None:
    _check_format(trace)
    _check_nesting(trace)
    threads, processes = _names(trace, "thread_name"), _names(trace, "process_name")
    assert set(_tracks(trace)) <= set(threads)
    assert {pid for pid, _ in threads} == set(processes)


def test_arrows_go_from_each_send_to_its_handlings(trace: dict[str, Any]) -> None:
    bound = _check_arrows(trace)
    steps = [each for each in bound if each == ("send worker.step", "worker.step")]
    assert len(steps) == 2 * 5 + 1  # a call of two ranks has two arrows
    assert bound.count(("send napper.nap", "napper.nap")) == 6
    assert bound.count(("send worker.relay", "worker.relay")) == 1


def test_tracks_have_names_of_processes_and_actors(trace: dict[str, Any], running: subprocess.Popen[str]) -> None:
    processes = list(_names(trace, "process_name").values())
    assert processes[0] == f"program traced_program.py (pid {running.pid})"
    assert [each.partition(" (pid")[0] for each in processes[1:]] == [
        "gpus 0 of trainers",
        "gpus 1 of trainers",
        "victims 0 of victims",
    ]
    assert processes[3].endswith(f"ended with {-signal.SIGKILL})")
    threads = set(_names(trace, "thread_name").values())
    assert {"worker rank 0", "worker rank 1", "napper rank 0", "napper rank 0 (2)", "victim rank 0"} <= threads


def test_spans_are_inside_of_their_messages_and_parents(trace: dict[str, Any]) -> None:
    tracks = _tracks(trace)
    threads = _names(trace, "thread_name")
    stacks = []
    for key, track in tracks.items():
        for each in track:
            if each["cat"] == "span" and not threads[key].startswith("thread"):
                stacks.append((each["name"], _stack_at(track, each["start"])))
    assert stacks.count(("forward", ["worker.step", "step", "forward"])) == 11
    assert stacks.count(("nap", ["napper.nap", "nap"])) == 6
    assert stacks.count(("after", ["napper.nap", "nap", "after"])) == 6
    [step] = [each for each in _slices(trace) if each["name"] == "step" and each["args"]["number"] == 100]
    assert step["args"]["status"] == "ok"


def test_what_runs_is_an_open_slice_until_now(trace: dict[str, Any]) -> None:
    running = {each["name"]: each for each in _slices(trace) if each["args"].get("status") == "open"}
    assert {"worker.hang", "hang", "waits"} <= set(running)
    assert running["waits"]["args"]["for_what"] == "a line"
    ends = {each["end"] for each in running.values()}
    assert len(ends) == 1 and ends == {max(each["end"] for each in _slices(trace))}
    lost = {each["name"] for each in _slices(trace) if each["args"].get("status") == "lost"}
    assert lost == {"victim.die", "last"}


def test_metrics_are_counters(trace: dict[str, Any]) -> None:
    values = defaultdict[tuple[int, str], list[float]](list)
    for each in trace["traceEvents"]:
        if each["ph"] == "C":
            values[each["pid"], each["name"]].append(each["args"]["value"])
    samples = sorted(series for (_, name), series in values.items() if name == 'samples {"split":"train"}')
    assert samples == [[8, 16, 24, 32, 40], [8, 16, 24, 32, 40, 48]]
    losses = [series for (_, name), series in values.items() if name == "loss"]
    assert sorted(map(len, losses)) == [4, 5]  # a value that is not a number is an instant
    assert sum(each["ph"] == "i" and each["name"] == "loss = nan" for each in trace["traceEvents"]) == 2


def test_trace_states_its_clock_and_what_was_read(trace: dict[str, Any], running: subprocess.Popen[str]) -> None:
    about = trace["otherData"]
    assert about["clock"] == "CLOCK_MONOTONIC" and about["clock_error_bound_ns"] == 0
    assert [each["pid"] for each in about["programs"]] == [running.pid]
    assert [each["label"] for each in about["processes_read"]][1:] == [
        "gpus 0 of trainers",
        "gpus 1 of trainers",
        "victims 0 of victims",
    ]
    assert about["processes_not_read"] == []


def test_stopped_program_can_be_traced(running: subprocess.Popen[str]) -> None:
    pids = [each.pid for each in program_recording.read(str(running.pid)).processes if each.process.state == "running"]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        done = _command(str(running.pid), "-o", "-")
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert done.returncode == 0, done.stderr
    _check_nesting(json.loads(done.stdout))
    assert "4 processes" in done.stderr


def test_trace_of_a_full_ring_has_nested_slices_and_bound_arrows(running: subprocess.Popen[str]) -> None:
    """The handling of a message is there, but its SENT event, or the other way around."""
    recording = program_recording.read(str(running.pid))
    for process in recording.processes:
        process.recorded.events = process.recorded.events[1::2]
    trace = as_trace(recording)
    _check_format(trace)
    _check_nesting(trace)
    _check_arrows(trace)


def test_errors_are_one_line(running: subprocess.Popen[str], tmp_path: Path) -> None:
    unknown = _command("nothing-of-this-name")
    assert unknown.returncode == 1 and unknown.stderr.count("\n") == 1 and "no running program is" in unknown.stderr
    unwritable = _command(str(running.pid), "-o", str(tmp_path / "missing" / "trace.json"))
    assert unwritable.returncode == 1 and unwritable.stderr.count("\n") == 1


def _made(pid: int, identity: int, *events: tuple[Kind, int, int, int, int]) -> ProcessRecording:
    """Return a process with events: kind, start, end, number of the call, and identity of the other process."""
    made = [
        RecordedEvent(number, end, end - start, kind, 0, 0, "actor", "call", reference, 0, trace)
        for number, (kind, start, end, reference, trace) in enumerate(events, 1)
    ]
    recorded = RecordedProcess(0, pid, f"process {pid}", SlotState.ALIVE, 0, 0, identity, [], made)
    program = Program(1, "program", [])
    return ProcessRecording(recorded, program, Process(pid, "", "running", 0, 0.0, None, None, None, []))


def _trace_of(*processes: ProcessRecording) -> dict[str, Any]:
    return as_trace(Recording([], list(processes), [], 10_000_000, 0))


def test_overlapping_slices_of_a_thread_are_on_two_lanes() -> None:
    trace = _trace_of(
        _made(1, 7, (Kind.WAIT, 1000, 5000, 0, 0), (Kind.WAIT, 2000, 3000, 0, 0), (Kind.WAIT, 4000, 9000, 0, 0))
    )
    _check_nesting(trace)
    assert sorted(len(track) for track in _tracks(trace).values()) == [1, 2]
    assert list(_names(trace, "thread_name").values()) == ["thread 0", "thread 0 (2)"]


def test_slices_of_a_profile_are_after_their_outer_slices_on_tracks_of_their_own() -> None:
    def slice_of(name: str, pid: int, start: float, length: float) -> dict[str, Any]:
        return {"ph": "X", "name": name, "cat": "cpu_op", "pid": pid, "tid": 5, "ts": start, "dur": length}

    events = [
        slice_of("inner", 1, 3.0, 1.5),
        slice_of("outer", 1, 3.0, 4.0),
        slice_of("monarch clock 0", 1, 1.0, 0.5),
        slice_of("kernel", 0, 5.0, 1.0),
        {"ph": "s", "name": "launch", "cat": "ac2g", "pid": 1, "tid": 5, "ts": 4.0, "id": 9},
        {"ph": "f", "name": "launch", "cat": "ac2g", "pid": 0, "tid": 5, "ts": 5.0, "id": 9, "bp": "e"},
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "python"}},
    ]
    profile = Profile(1, "process 1", events=events, offset_ns=1000)
    recording = Recording([], [_made(1, 7, (Kind.WAIT, 9000, 9500, 0, 0))], [], 10_000_000, 0)
    before = copy.deepcopy(events)
    trace = as_trace(recording, [profile])
    assert as_trace(recording, [profile]) == trace and profile.events == before, "it can be asked again"
    tracks = _names(trace, "thread_name")
    found = [
        (each["ph"], each["name"], each["ts"], each.get("dur"), tracks[each["pid"], each["tid"]])
        for each in trace["traceEvents"]
        if each["ph"] != "M"
    ]
    assert found == [
        ("X", "wait for actor.call", 5.0, 0.5, "thread 0"),
        ("X", "outer", 0.0, 4.0, "torch thread 5"),
        ("X", "inner", 0.0, 1.5, "torch thread 5"),
        ("X", "kernel", 2.0, 1.0, "torch device 0 stream 5"),
        ("s", "launch", 1.0, None, "torch thread 5"),
        ("f", "launch", 2.0, None, "torch device 0 stream 5"),
    ]


def test_message_that_begins_before_it_is_noted_as_sent_has_an_arrow_forwards() -> None:
    sender = _made(1, 7, (Kind.WAIT, 100_000, 108_000, 0, 0), (Kind.SENT, 110_000, 110_000, 5, 0))
    trace = _trace_of(sender, _made(2, 8, (Kind.MESSAGE, 105_000, 120_000, 5, 7)))
    _check_nesting(trace)
    assert _check_arrows(trace) == [("send actor.call", "actor.call")]


def test_two_processes_with_one_pid_have_groups_of_their_own() -> None:
    trace = _trace_of(_made(1, 7, (Kind.WAIT, 1, 2, 0, 0)), _made(1, 8, (Kind.WAIT, 1, 2, 0, 0)))
    assert len(_names(trace, "process_name")) == 2 and len(_tracks(trace)) == 2
