"""Messages of a process, each with its states, from its events and activities.

The end of a message is an event. One that had to wait in the queue has an event of its arrival, and also one when it
is withdrawn or refused. One that runs is an activity, or has an event of its start if the process shows too many.
Why one has failed is an event before its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from monarch_backend._telemetry.kinds import Kind, QueueStatus, State, Status
from monarch_backend._telemetry.program_recording import CONSTRUCTOR, ProcessRecording, is_alive
from monarch_backend._telemetry.reader import Activity, RecordedEvent

_LEFT = {QueueStatus.WITHDRAWN: "cancelled", QueueStatus.REFUSED: "lost"}

_Key = tuple[str, int, int]  # actor, sender and number of the call


_STATUS: dict[int, str] = {Status.OK: "complete", Status.ERROR: "failed"}
"""How a message has ended, in Monarch's words. Others have the words of `Status`."""


class Message(NamedTuple):
    """A message that waits, is handled, or has been. Times are None where they are unknown, or not there yet.

    ``queued``: when it began to wait. ``status``: "queued", "active", "complete", "failed", "cancelled", "lost".
    ``what`` has the endpoint as its detail. ``reason``: why it has failed, "" where that is unknown.
    """

    process: ProcessRecording
    actor: str
    queued: int | None
    start: int | None
    end: int | None
    status: str
    what: RecordedEvent | Activity
    reason: str = ""

    @property
    def time_ns(self) -> int:
        """When it started. Of one that has not started, when it began to wait or was withdrawn."""
        known = self.start or self.end or self.queued
        assert known is not None
        return known


class _Arrivals:
    """Messages that have begun to wait, by key. Broadcast messages have no number, so several may have one key."""

    def __init__(self, events: list[RecordedEvent]) -> None:
        self.waiting: dict[_Key, deque[RecordedEvent]] = {
            (event.name, event.trace, event.reference): deque()
            for event in events
            if event.status == QueueStatus.ARRIVED
        }
        self._over = set[_Key]()

    def add(self, key: _Key, event: RecordedEvent) -> None:
        if key not in self._over:  # the thread that receives it was late
            self.waiting[key].append(event)

    def take(self, key: _Key, start: int) -> int | None:
        """Remove the message that has started at this time. Return when it has begun to wait."""
        found = self.waiting.get(key)
        if found is None:
            return None
        if key[2]:
            self._over.add(key)
        if not found or (not key[2] and found[0].end_ns > start):
            return None
        return min(found.popleft().end_ns, start)


def messages_of(process: ProcessRecording) -> Iterator[Message]:
    """Yield the messages of a process: those that have ended, then those that run, then those that wait."""
    queue = process.events(Kind.QUEUE)
    arrivals = _Arrivals(queue)
    started: dict[_Key, deque[tuple[RecordedEvent, int | None]]] = {}  # without an activity
    running = [each for each in process.going_on(Kind.MESSAGE) if each.state != State.CONSTRUCTING]
    starts, ended = {each.since_ns for each in running}, set[tuple[_Key, int]]()
    reasons = reasons_of(process.recorded.events) if process.events(Kind.FAILURE) else {}
    events = process.events(Kind.MESSAGE)
    for event in sorted(events + queue) if queue else events:
        _, end, duration, kind, status, _, actor, detail, reference, _, trace = event
        key = actor, trace, reference
        if kind == Kind.MESSAGE:
            if detail == CONSTRUCTOR:
                continue
            start = end - duration
            queued = None
            if queue:
                first = started.get(key)
                queued = first.popleft()[1] if first else arrivals.take(key, start)
            if start in starts:
                ended.add((key, start))
            state = _STATUS.get(status) or Status(status).title
            yield Message(process, actor, queued, start, end, state, event, reasons.get(event.number, ""))
        elif status == QueueStatus.ARRIVED:
            arrivals.add(key, event)
        elif status == QueueStatus.STARTED:
            started.setdefault(key, deque()).append((event, arrivals.take(key, end)))
        else:
            queued = arrivals.take(key, end)
            yield Message(process, actor, queued, None, end, _LEFT.get(QueueStatus(status), "lost"), event)
    active, waits = ("active", "queued") if is_alive(process) else ("lost", "lost")
    for each in running:
        key = each.name, each.trace, each.reference
        if (key, each.since_ns) not in ended:  # else it has ended before the events were read
            queued = arrivals.take(key, each.since_ns)
            yield Message(process, each.name, queued, each.since_ns, None, active, each)
    for event, queued in (each for some in started.values() for each in some):
        yield Message(process, event.name, queued, event.end_ns, None, active, event)
    for event in (each for some in arrivals.waiting.values() for each in some):
        yield Message(process, event.name, event.end_ns, None, None, waits, event)


def reasons_of(events: Iterable[RecordedEvent]) -> dict[int, str]:
    """Return why messages have failed, by the numbers of the events of their ends. Takes the events of one process."""
    found: dict[int, str] = {}
    last: dict[tuple[int, _Key], str] = {}
    for event in events:
        key = event.thread, (event.name, event.trace, event.reference)
        if event.kind == Kind.FAILURE:
            last[key] = event.detail
        elif event.kind == Kind.MESSAGE and event.status == Status.ERROR and key in last:
            found[event.number] = last.pop(key)
    return found
