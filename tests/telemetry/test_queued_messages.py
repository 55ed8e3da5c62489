"""Messages that wait in the queue of an actor, in SQL: until they start, are cancelled, or are lost with the actor."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._core import platform
from monarch_backend._telemetry.kinds import Kind, SlotState, State
from monarch_backend._telemetry.messages import messages_of
from monarch_backend._telemetry.program_recording import ProcessRecording
from monarch_backend._telemetry.programs import Process, Program
from monarch_backend._telemetry.reader import Activity, RecordedEvent, RecordedProcess
from monarch_backend.actor import Actor, Future, ProcMesh
from monarch_backend.telemetry import query
from tests.actor.actors import running
from tests.actor.support import PATIENCE
from tests.support.waiting import wait_until
from tests.telemetry.held_actors import MANY, Async, Plain

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="recording areas need memfd_create")


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    with running({"gpus": 2}) as made:
        yield made


def _rows(sql: str) -> list[tuple[Any, ...]]:
    return query(sql, str(os.getpid())).rows


def _statuses(actor: str) -> Counter[tuple[str, str]]:
    """Return the number of messages by endpoint and status."""
    return Counter(_rows(f"select endpoint, status from messages where actor = '{actor}'"))


def _events(actor: str, endpoint: str) -> Counter[str]:
    """Return the number of status events of an endpoint's messages."""
    rows = _rows(
        "select e.status from message_status_events e join messages m on m.id = e.message_id "
        f"where m.actor = '{actor}' and m.endpoint = '{endpoint}'"
    )
    return Counter(status for (status,) in rows)


def _held(actor: Any, path: Path) -> tuple[Future[Any], list[Future[Any]]]:
    """Let each rank handle a message, and hold the next one. Return the held call, and three calls behind it."""
    actor.pass_by.call().get(PATIENCE)
    return actor.hold.call(str(path)), [actor.pass_by.call() for _ in range(3)]


@pytest.mark.parametrize("cls", [Plain, Async])
def test_messages_in_the_queue_are_rows_until_they_start(cls: type[Actor], procs: ProcMesh, gates: Path) -> None:
    name = f"starts_{cls.__name__}"
    actor = procs.spawn(name, cls)
    held, calls = _held(actor, gates / "go")
    actor.pass_by.broadcast()
    wait_until(lambda: _statuses(name)["pass_by", "queued"] == 8, PATIENCE)
    assert _statuses(name)["hold", "active"] == 2
    queued = _rows(
        "select rank, duration_us, queued_us > 0, bytes > 0, to_pid > 0, from_pid from messages "
        f"where status = 'queued' and actor = '{name}' and call is not null order by rank"
    )
    assert queued == [(rank, None, 1, 1, 1, os.getpid()) for rank in (0, 0, 0, 1, 1, 1)]
    assert _events(name, "pass_by")["active"] == 2
    assert {row[0] for row in _rows(f"select messages from actors where name = '{name}'")} == {2}
    assert _rows(f"select handled from sent_messages where actor = '{name}' and call is not null") == [
        (2,), (2,), (0,), (0,), (0,)
    ]  # fmt: skip
    (gates / "go").touch()
    for each in [held, *calls, actor.pass_by.call()]:
        each.get(PATIENCE)
    wait_until(lambda: _statuses(name) == {("pass_by", "complete"): 12, ("hold", "complete"): 2}, PATIENCE)
    assert _events(name, "pass_by")["queued"] >= 8
    actor.stop().get(PATIENCE)


@pytest.mark.parametrize("cls", [Plain, Async])
def test_calls_cancelled_in_the_queue_are_cancelled_messages(cls: type[Actor], procs: ProcMesh, gates: Path) -> None:
    name = f"cancels_{cls.__name__}"
    actor = procs.spawn(name, cls)
    held, calls = _held(actor, gates / "never")
    wait_until(lambda: _statuses(name)["pass_by", "queued"] == 6, PATIENCE)
    calls[0].cancel()
    wait_until(lambda: _statuses(name)["pass_by", "cancelled"] == 2, PATIENCE)
    assert _statuses(name)["pass_by", "queued"] == 4
    for each in [*calls, held]:
        each.cancel()
    expected = {("pass_by", "complete"): 2, ("pass_by", "cancelled"): 6, ("hold", "cancelled"): 2}
    wait_until(lambda: _statuses(name) == expected, PATIENCE)
    assert _events(name, "pass_by")["cancelled"] == 6
    assert _events(name, "pass_by")["active"] == 2
    assert _rows(f"select ended from activities where name = '{name}'") == [(2,), (2,)]
    actor.stop().get(PATIENCE)


def test_messages_that_run_without_a_cell_are_active(procs: ProcMesh, gates: Path) -> None:
    actor = procs.slice(gpus=0).spawn("many_run", Async)
    waits = [actor.wait_for.call_one(str(gates / "go")) for _ in range(MANY)]
    wait_until(lambda: _statuses("many_run") == {("wait_for", "active"): MANY}, PATIENCE)
    assert set(_rows("select handled from sent_messages where actor = 'many_run'")) == {(1,)}
    (gates / "go").touch()
    for each in waits:
        each.get(PATIENCE)
    wait_until(lambda: _statuses("many_run") == {("wait_for", "complete"): MANY}, PATIENCE)
    actor.stop().get(PATIENCE)


def test_queued_messages_of_an_aborted_actor_are_lost(procs: ProcMesh, gates: Path) -> None:
    actor = procs.slice(gpus=0).spawn("ends", Async)
    actor.pass_by.call_one().get(PATIENCE)
    held = actor.hold.call_one(str(gates / "go"))
    calls = [actor.pass_by.call_one() for _ in range(2)]
    wait_until(lambda: _statuses("ends")["pass_by", "queued"] == 2, PATIENCE)
    ended = actor.abort()
    (gates / "go").touch()
    for each in [held, *calls]:
        each.exception(PATIENCE)
    ended.get(PATIENCE)
    wait_until(lambda: _statuses("ends")["pass_by", "lost"] == 2, PATIENCE)
    assert _statuses("ends")["pass_by", "queued"] == 0


def test_conditions_leave_rows_of_queued_messages_as_they_are(procs: ProcMesh, gates: Path) -> None:
    actor = procs.spawn("narrow", Plain)
    held = actor.hold.call(str(gates / "go"))
    calls = [actor.pass_by.call() for _ in range(2)]
    wait_until(lambda: _statuses("narrow")["pass_by", "queued"] == 4, PATIENCE)
    [(pid,)] = set(_rows("select to_pid from messages where actor = 'narrow' and rank = 0"))
    columns = "m.endpoint, m.status, m.bytes from messages m"
    whole = _rows(f"select {columns} join processes p on p.pid = m.to_pid where m.to_pid = {pid}")
    narrowed = _rows(
        f"select endpoint, status, bytes from messages where to_pid = {pid} and timestamp_us > 1700000000000000"
    )
    assert Counter(narrowed) == Counter(whole)
    assert [row[1] for row in narrowed].count("queued") == 2
    (gates / "go").touch()
    for each in [held, *calls]:
        each.get(PATIENCE)
    actor.stop().get(PATIENCE)


def _event(number: int, kind: int, end: int, duration: int = 0, status: int = 0, reference: int = 7) -> RecordedEvent:
    return RecordedEvent(number, end, duration, kind, status, 0, "actor", "step", reference, 0, 5)


def _process(events: list[RecordedEvent], activities: list[Activity] | None = None) -> ProcessRecording:
    recorded = RecordedProcess(1, 1, "gpus 0", SlotState.ALIVE, 1, None, 9, activities or [], events)
    return ProcessRecording(
        recorded, Program(1, "train.py", []), Process(1, "gpus 0", "running", 0, 1.0, None, None, None, [])
    )


def _states(process: ProcessRecording) -> list[tuple[str, int | None, int | None, int | None]]:
    return [(each.status, each.queued, each.start, each.end) for each in messages_of(process)]


def test_arrival_that_is_recorded_after_the_start_or_the_end_is_of_that_message() -> None:
    late = [_event(1, Kind.QUEUE, 105), _event(2, Kind.MESSAGE, 120, 20)]
    assert _states(_process(late)) == [("complete", 100, 100, 120)]
    later = [_event(1, Kind.MESSAGE, 120, 20), _event(2, Kind.QUEUE, 125)]
    assert _states(_process(later)) == [("complete", None, 100, 120)]


def test_broadcast_messages_are_matched_in_their_order() -> None:
    events = [
        _event(1, Kind.MESSAGE, 90, 10, reference=0), _event(2, Kind.QUEUE, 100, reference=0),
        _event(3, Kind.QUEUE, 101, reference=0), _event(4, Kind.MESSAGE, 120, 10, reference=0),
    ]  # fmt: skip
    assert _states(_process(events)) == [
        ("complete", None, 80, 90), ("complete", 100, 110, 120), ("queued", 101, None, None),
    ]  # fmt: skip


def test_activity_that_ended_before_the_events_were_read_is_one_message() -> None:
    activity = Activity(1, Kind.MESSAGE, State.RUNNING, "actor", "step", 100, 0, 7, 0, 0, 0, 5)
    ended = _event(1, Kind.MESSAGE, 120, 20)
    assert _states(_process([ended], [activity])) == [("complete", None, 100, 120)]
    assert _states(_process([], [activity])) == [("active", None, 100, None)]
