"""What a failed process or actor was doing, and its last messages: lines for the report of the failure.

The recording of a killed process is in memory of its starter. So the starter needs no answer for it. On another host
this is the agent, which sends the lines with the end of the process.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from monarch_backend._telemetry import recorder
from monarch_backend._telemetry.kinds import Kind, State, Status
from monarch_backend._telemetry.messages import reasons_of
from monarch_backend._telemetry.program_recording import CONSTRUCTOR
from monarch_backend._telemetry.reader import Activity, Area, EventFilter, RecordedEvent, RecordedProcess

MAX_MESSAGES = 5
MAX_ACTIVITIES = 8


def of_started(pid: int) -> tuple[str, ...]:
    """Return the lines of a process that this one has started. Return none if it has recorded nothing. Never raises."""
    return _lines(recorder.own_area(), pid, None)


def of_actor(name: str) -> tuple[str, ...]:
    """Return the lines of an actor of this process. Never raises."""
    return _lines(recorder.recording_area_of_this_process(), os.getpid(), name)


def _lines(descriptor: int | None, pid: int, actor: str | None) -> tuple[str, ...]:
    if descriptor is None:
        return ()
    try:
        with Area(descriptor) as area:
            found = area.processes_of(pid, EventFilter((Kind.MESSAGE, Kind.FAILURE)))
            return () if not found else tuple(_of_process(max(found, key=lambda each: each.started_ns), actor))
    except Exception:  # the text of an error must not hide the error
        return ()


def _of_process(process: RecordedProcess, actor: str | None) -> Iterator[str]:
    now = recorder.monotonic_ns()
    activities = [each for each in process.activities if each.state != State.IDLE and each.kind != Kind.STEP]
    if actor is not None:
        activities = [each for each in activities if each.kind == Kind.MESSAGE and each.name == actor]
    activities.sort(key=lambda each: each.since_ns)
    for each in activities[-MAX_ACTIVITIES:]:
        yield f"it was {_doing(each)} for {_text(now - each.since_ns)}"
    messages = [each for each in process.events if each.kind == Kind.MESSAGE and actor in (None, each.name)]
    reasons = reasons_of(process.events)
    yield from (_ended(each, now, reasons.get(each.number, "")) for each in _newest(messages))


def _newest(messages: list[RecordedEvent]) -> Iterable[RecordedEvent]:
    return reversed(messages[-MAX_MESSAGES:])


def _doing(activity: Activity) -> str:
    if activity.kind == Kind.MESSAGE:
        if activity.state == State.CONSTRUCTING:
            return f"constructing {activity.name}"
        verb = "running" if activity.state == State.RUNNING else "waiting in"
        queued = f" ({activity.waiting} in the queue)" if activity.waiting else ""
        return f"{verb} {activity.name}.{activity.detail}{queued}"
    if activity.kind == Kind.COLLECTIVE:
        return f"in {activity.detail} #{activity.reference} of {activity.name}"
    if activity.kind == Kind.WAIT:
        return f"waiting for {activity.name}{'.' * bool(activity.detail)}{activity.detail}"
    return f"in the {Kind(activity.kind).title} {activity.name}"


def _ended(event: RecordedEvent, now: int, reason: str) -> str:
    what = f"construction of {event.name}" if event.detail == CONSTRUCTOR else f"{event.name}.{event.detail}"
    status = Status(event.status).title
    ended = f"{what}: {status} after {_text(event.duration_ns)}, ended {_text(now - event.end_ns)} ago"
    return f"{ended}: {reason}" if reason else ended


def _text(ns: int) -> str:
    return f"{ns / 1e9:.1f} s" if ns >= 1e9 else f"{ns / 1e6:.1f} ms" if ns >= 1e6 else f"{ns / 1e3:.0f} us"
