"""Ranks that are late for a collective: their lines of code in `ps`, `stack` and the error of its timeout."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from monarch_backend import CollectiveTimeoutError, cli
from monarch_backend._core import platform
from monarch_backend._telemetry import discovery, late_ranks, own_recording, payloads, whereabouts
from monarch_backend._telemetry.kinds import Kind, SlotState, State
from monarch_backend._telemetry.program_recording import ProcessRecording, Recording
from monarch_backend._telemetry.programs import RUNNING, Process, Program
from monarch_backend._telemetry.reader import Activity, RecordedProcess
from tests.support.ranks import RankPool, run_ranks
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="places of other processes need memfd_create")


def _store() -> dist.Store:
    assert dist.group.WORLD is not None
    return dist.group.WORLD.get_group_store()


def _load(store: dist.Store) -> None:
    store.wait(["go on"], datetime.timedelta(seconds=60))  # line A


def _line_a() -> int:
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, 1) if line.endswith("# line A\n"))


def _printed(*words: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli.main([*words]) == 0
    return out.getvalue()


def _one_is_late(rank: int) -> None:
    store = _store()
    dist.all_reduce(torch.ones(2))
    if rank == 2:
        store.set("late pid", str(os.getpid()))
        _load(store)
    work = dist.all_reduce(torch.ones(2), async_op=True)
    if rank == 0:
        pid = int(store.get("late pid"))
        expected = (
            rf"all_reduce #(\d+) of group \S+: rank 2 \(pid {pid}\) has not entered, 2 ranks wait for \d+ s; "
            rf"it is at .*test_late_ranks\.py:{_line_a()} in _load \(store\.wait\(.*# line A\)"
        )
        shown = wait_until(
            lambda: [line for line in _printed("ps", str(pid)).splitlines() if "has not entered" in line]
        )
        assert len(shown) == 1 and re.fullmatch(expected, shown[0]), shown
        [line] = [line for line in _printed("stack", str(pid)).splitlines() if "has not entered" in line]
        assert re.fullmatch(expected, line), line
        [program] = json.loads(_printed("ps", str(pid), "--json"))
        [late] = program["late"]
        assert (late["operation"], late["rank"], late["pid"], late["waiting"]) == ("all_reduce", 2, pid, [0, 1])
        assert "has not entered" not in _printed("ps", str(os.getpid()))  # this program's own rank has entered
        store.set("go on", "1")
    work.wait()
    dist.barrier()
    assert "has not entered" not in _printed("ps", str(os.getpid()))


@pytest.mark.slow
def test_late_rank_is_named_with_its_line(pool: Callable[[int], RankPool]) -> None:
    pool(2)  # ranks of the same launcher, whose default group has the same name
    run_ranks(_one_is_late, 3)


def _looks_at_itself(rank: int) -> None:
    dist.all_reduce(torch.ones(2))
    own = own_recording.read()
    assert own is not None and own.pid == os.getpid()
    last = next(each for each in own.activities if each.kind == Kind.COLLECTIVE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discovery, "areas", lambda: pytest.fail("it reads recordings of other processes"))
        assert late_ranks.is_late(last.trace, last.count + 1)
        assert not late_ranks.is_late(last.trace, last.count)
        assert not late_ranks.is_late(last.trace + 1, last.count + 1)


def test_rank_reads_no_other_recording_to_find_whether_it_is_late() -> None:
    run_ranks(_looks_at_itself, 2)


def _times_out(rank: int) -> None:
    store = _store()
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=0.5))
    if rank == 1:
        _load(store)
        return
    try:
        with pytest.raises(CollectiveTimeoutError) as caught:
            dist.all_reduce(torch.ones(2), group=group)
        text = str(caught.value)
        place = rf"did not enter all_reduce\(.*; it is at .*test_late_ranks\.py:{_line_a()} in _load \(store\.wait"
        assert re.search(place, text), text
        with pytest.raises(CollectiveTimeoutError) as again:  # it is looked for once
            dist.all_reduce(torch.ones(2), group=group)
        assert "it is at" not in str(again.value)
    finally:
        store.set("go on", "1")


def test_timeout_names_the_line_of_the_late_rank() -> None:
    run_ranks(_times_out, 2)


def _cell(
    rank: int, number: int, *, entered: bool, group: int = 1, name: str = "group 0", kind: str = "all_reduce"
) -> Activity:
    """Make a rank's cell of a group: it is in operation ``number``, or has ended it."""
    since_ns = time.monotonic_ns() - 60 * 10**9
    state = State.RUNNING if entered else State.IDLE
    return Activity(1, Kind.COLLECTIVE, state, name, kind, since_ns, number - entered, number, 0, 0, rank, group)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RecordedProcess]:
    """Give a function that adds a process with this label and these cells to a program."""
    job: list[RecordedProcess] = []
    monkeypatch.setattr(late_ranks.jobs, "running", lambda: {("program", 1): job})
    monkeypatch.setattr(late_ranks.whereabouts, "place_of", lambda *_: "at a.py:1")

    def add(label: str, *cells: Activity) -> RecordedProcess:
        number = 1 + len(job)
        job.append(RecordedProcess(number, 100 + number, label, SlotState.ALIVE, 0, None, number, list(cells)))
        return job[-1]

    return add


def _late(job: list[RecordedProcess]) -> list[tuple[str, int]]:
    return [(each.label, each.number) for each in late_ranks.of_job(job)]


@pytest.mark.parametrize("is_entered", [False, True])
def test_groups_of_two_meshes_have_the_same_name(program: Callable[..., RecordedProcess], is_entered: bool) -> None:
    late = program("gpus 0", _cell(0, 4, entered=False))
    waiting = [program(f"gpus {rank}", _cell(rank, 5, entered=True)) for rank in (1, 2)]
    others = [program(f"gpus {rank}", _cell(rank, 3, entered=is_entered, group=2)) for rank in (0, 1)]
    assert _late([late, *waiting, *others]) == [("gpus 0", 5)]
    text = ", in all_reduce #5 of group 0, which rank 0 (pid 101) has not entered"
    assert late_ranks.collective_of(waiting[0], others[0].identity) == text
    assert late_ranks.collective_of(others[0], waiting[0].identity) == ""
    assert "this process has not entered as rank 0. Each waits" in late_ranks.collective_of(waiting[0], late.identity)


def test_late_rank_of_another_mesh_in_the_same_operation_is_not_named(program: Callable[..., RecordedProcess]) -> None:
    program("gpus 0 of generators", _cell(0, 4, entered=False, group=2))
    program("gpus 1 of generators", _cell(1, 5, entered=True, group=2))
    program("gpus 0 of trainers", _cell(0, 4, entered=False))
    waiting = program("gpus 1 of trainers", _cell(1, 5, entered=True))
    text = ", in all_reduce #5 of group 0, which rank 0 (pid 103) has not entered"
    assert late_ranks.collective_of(waiting, 0) == text


def test_late_rank_of_another_mesh_of_the_same_group_is_named(program: Callable[..., RecordedProcess]) -> None:
    job = [program("gpus 0 of trainers", _cell(0, 5, entered=True)), program("gpus 0", _cell(1, 4, entered=False))]
    assert _late(job) == [("gpus 0", 5)]


def test_late_ranks_of_one_group_are_named_where_threads_are_in_two(program: Callable[..., RecordedProcess]) -> None:
    tensor: dict[str, Any] = {"name": "group tensor", "kind": "all_gather", "group": 1}
    data: dict[str, Any] = {"name": "group data", "group": 2}
    cells = _cell(0, 8, entered=True, **data), _cell(0, 5, entered=True, **tensor)
    waiting = program("gpus 0 of trainers", *cells)
    of_data = program("gpus 1 of trainers", _cell(1, 7, entered=False, **data))
    of_tensor = program("gpus 2 of trainers", _cell(1, 4, entered=False, **tensor))
    late = ", in all_reduce #8 of group data, which rank 1 (pid 102) has not entered"
    assert late_ranks.collective_of(waiting, 0) == late
    each_waits = (
        "which this process has not entered as rank 1. Each waits for the other, until the timeout of the group"
    )
    for caller, operation in ((of_data, "all_reduce #8 of group data"), (of_tensor, "all_gather #5 of group tensor")):
        assert late_ranks.collective_of(waiting, caller.identity) == f", in {operation}, {each_waits}"


def _enqueued(rank: int, number: int, seconds: float = 60) -> Activity:
    """Make a rank's cell of a group of NCCL, which has enqueued operations up to ``number``."""
    payload = payloads.encode("float32", payloads.Route.NCCL)
    since_ns = time.monotonic_ns() - int(seconds * 1e9)
    return Activity(
        1, Kind.COLLECTIVE, State.IDLE, "group 0 on cuda", "all_reduce", since_ns, number, number, 0, payload, rank, 1
    )


@pytest.mark.parametrize(
    ("numbers", "seconds", "late"),
    [
        ((5, 5, 5), 60, []),
        ((5, 4, 5), 60, [("gpus 1", 5)]),
        ((7, 4, 5), 60, [("gpus 1", 7)]),  # gpus 2 may wait for its operation 5
        ((4, 4, 5), 60, [("gpus 0", 5), ("gpus 1", 5)]),
        ((5, 4, 5), 0, []),  # it may come in a moment
    ],
)
def test_rank_that_has_enqueued_the_fewest_is_late(
    program: Callable[..., RecordedProcess], numbers: tuple[int, ...], seconds: float, late: list[tuple[str, int]]
) -> None:
    assert _late([program(f"gpus {r}", _enqueued(r, number, seconds)) for r, number in enumerate(numbers)]) == late


def test_rank_that_has_enqueued_nothing_is_late(program: Callable[..., RecordedProcess]) -> None:
    new = dataclasses.replace(_enqueued(1, 0), waiting=0, reference=0, detail="")
    assert _late([program("gpus 0", _enqueued(0, 1)), program("gpus 1", new)]) == [("gpus 1", 1)]


def test_late_rank_is_found_by_the_ranks_of_another_host() -> None:
    """Host b has only the late rank, so it can't find it by itself. Hosts may use the same pids."""
    cells = {"a": _cell(0, 5, entered=True), "b": _cell(1, 4, entered=False)}
    processes = []
    for host, cell in cells.items():
        program = Program(7, "train.py", [Process(7, "gpus 0", RUNNING, 0, 1.0, None, None, None, [])], host)
        recorded = RecordedProcess(0, 7, "gpus 0", SlotState.ALIVE, 0, None, 0, [cell])
        processes.append(ProcessRecording(recorded, program, program.processes[0]))
    recording = Recording([each.program for each in processes], processes, [], time.monotonic_ns(), 0)
    asked = []

    def places(host: str, pids: list[int]) -> list[str]:
        asked.append((host, pids))
        return ["at a.py:1"] * len(pids)

    late_ranks.add_of_hosts(recording, places)
    assert asked == [("b", [7])]
    of_a, of_b = recording.programs
    assert of_a.late == [] and of_b.late[0]["text"].startswith("all_reduce #5 of group 0: rank 1 (gpus 0, pid 7) has")
    late_ranks.add_of_hosts(recording, places)  # its place is known
    assert len(asked) == 1 and len(of_b.late) == 1


def test_rank_that_was_read_before_the_others_waited_is_not_late() -> None:
    """Hosts are read one after the other, and one of them may take seconds."""
    now = time.monotonic_ns()
    cell = _cell(0, 5, entered=True)
    waiting = RecordedProcess(0, 7, "gpus 0", SlotState.ALIVE, 0, None, 1, [dataclasses.replace(cell, since_ns=now)])
    idle = RecordedProcess(0, 8, "gpus 1", SlotState.ALIVE, 0, None, 2, [_cell(1, 4, entered=False)])
    waiting.read_ns, idle.read_ns = now + 5 * 10**9, now + 10**8
    assert late_ranks.of_job([waiting, idle]) == []
    idle.read_ns = now + 2 * 10**9
    assert [each.rank for each in late_ranks.of_job([waiting, idle])] == [1]


def _makes_a_group_again(_rank: int) -> None:
    first = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(2), group=first)
    dist.destroy_process_group(first)
    second = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(2), group=second)
    [own] = [each for job in late_ranks.jobs.running().values() for each in job if each.pid == os.getpid()]
    groups = [(each.name, each.trace) for each in own.activities if each.kind == Kind.COLLECTIVE and each.count]
    assert len({trace for _, trace in groups}) == len(groups) >= 2 and 0 not in dict(groups).values(), groups


def test_group_that_is_made_again_has_another_identity() -> None:
    run_ranks(_makes_a_group_again, 2)


def test_rank_of_another_process_has_no_place() -> None:
    assert late_ranks.place_of_rank(1, 0, os.getpid()) is None


def test_stopped_process_has_a_place_that_says_so() -> None:
    code = "from monarch_backend.actor import this_proc; this_proc(); print('ready', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            [recorded] = [each for each in whereabouts.processes().values() if each.pid == process.pid]
            os.kill(process.pid, signal.SIGSTOP)
            wait_until(lambda: "stopped" in whereabouts.place_of(recorded, 0.5))
        finally:
            process.kill()
