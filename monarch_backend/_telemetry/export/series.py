"""Metrics of running programs as families of series: those that users record, and ours from the recording itself.

A `Collector` keeps sums from one look to the next, because the ring of a process has its last events only.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from monarch_backend._telemetry.kinds import Kind, State, Status
from monarch_backend._telemetry.metrics import BOUNDS, MAX_TOTALS, InstrumentKind, kind_of
from monarch_backend._telemetry.program_recording import (
    CONSTRUCTOR,
    ProcessRecording,
    Recording,
    attributes_of,
    double,
    is_alive,
)
from monarch_backend._telemetry.reader import EventFilter, RecordedEvent
from monarch_backend._telemetry.resources import title_of
from monarch_backend._telemetry.unseen_processes import MAX_UNSEEN, with_unseen

FURTHER = {"further_attributes": "true"}
"""Attributes of the series that all values share after the first `MAX_TOTALS` sets of attributes of an instrument."""

_KINDS = frozenset(InstrumentKind)  # a later release may have more

Attributes = tuple[tuple[str, str], ...]
ProcessKey = tuple[int, int]
"""A process: `RecordedProcess.key`."""


@dataclass
class Distribution:
    """Values of a histogram: how many are in each bucket, the last one without bound, their sum and their limits."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    def add(self, value: float) -> None:
        self.least, self.most = min(self.least, value), max(self.most, value)
        self.counts[bisect.bisect_left(BOUNDS, value)] += 1
        self.total += value


@dataclass
class Point:
    """A value with its attributes. ``process`` is None for one of the whole program ``program``."""

    program: str
    process: ProcessRecording | None
    attributes: dict[str, str]
    value: float | Distribution


@dataclass
class Family:
    """All values of a metric."""

    name: str
    kind: InstrumentKind
    about: str
    unit: str = ""
    is_ours: bool = False
    points: list[Point] = field(default_factory=list)


_OURS = {
    each.name: each
    for each in (
        Family("monarch.processes", InstrumentKind.GAUGE, "Processes of a program by state"),
        Family("monarch.process.memory", InstrumentKind.GAUGE, "Resident memory of a process", "bytes"),
        Family("monarch.process.cpu", InstrumentKind.COUNTER, "Processor time of a process", "seconds"),
        Family("monarch.actors", InstrumentKind.GAUGE, "Actors of a process by state"),
        Family("monarch.actor.queue", InstrumentKind.GAUGE, "Messages in the queue of an actor", "messages"),
        Family("monarch.messages.sent", InstrumentKind.COUNTER, "Messages sent, one for all ranks of a call"),
        Family("monarch.messages.sent.size", InstrumentKind.COUNTER, "Size of sent messages", "bytes"),
        Family("monarch.messages.started", InstrumentKind.COUNTER, "Messages whose handling has begun"),
        Family("monarch.messages.ended", InstrumentKind.COUNTER, "Handled messages by status"),
        Family("monarch.messages.failed", InstrumentKind.COUNTER, "Messages whose endpoint has raised"),
        Family("monarch.message.duration", InstrumentKind.HISTOGRAM, "Handling time of messages", "seconds"),
        Family("monarch.collectives.entered", InstrumentKind.COUNTER, "Operations of a group that a rank has entered"),
        Family("monarch.collectives.left", InstrumentKind.COUNTER, "Operations of a group that a rank has left"),
        Family(
            "monarch.collectives.recorded", InstrumentKind.COUNTER,
            "Operations with an event, by operation and status: not all of those shorter than 0.1 ms",
        ),
        Family("monarch.collectives.recorded.size", InstrumentKind.COUNTER, "Size of these operations", "bytes"),
        Family("monarch.transfers", InstrumentKind.COUNTER, "Transfers of registered memory by status"),
        Family("monarch.transfers.size", InstrumentKind.COUNTER, "Size of these transfers", "bytes"),
        Family("monarch.events.overwritten", InstrumentKind.COUNTER, "Events that were overwritten before any look"),
    )
}  # fmt: skip
"""Our own families. Names are in OpenTelemetry's style."""


class _Sums:
    """Sums of a process over all looks. The latest value of gauges, and the sum of counters, are replaced by each."""

    def __init__(self) -> None:
        self.host = ""
        self.last_event = 0
        self.users: dict[tuple[int, str], dict[Attributes, float | Distribution]] = {}
        self.counts = Counter[tuple[str, Attributes]]()
        self.durations: dict[Attributes, Distribution] = {}

    def add(self, process: ProcessRecording) -> None:
        self.host = process.host
        self.counts["monarch.events.overwritten", ()] += process.recorded.lost
        for event in process.recorded.events:
            self.last_event = event.number
            if event.kind == Kind.METRIC and kind_of(event.reference) in _KINDS:
                self._add_metric(event)
            elif event.kind == Kind.SENT:
                self._count("monarch.messages.sent", event, actor=event.name, endpoint=event.detail)
            elif event.kind == Kind.MESSAGE and event.detail != CONSTRUCTOR:
                self._add_message(event)
            elif event.kind == Kind.COLLECTIVE:
                status = _status(event)
                self._count(
                    "monarch.collectives.recorded", event, group=event.name, operation=event.detail, status=status
                )
            elif event.kind == Kind.TRANSFER:
                self._count("monarch.transfers", event, route=event.name, status=_status(event))

    def _count(self, name: str, event: RecordedEvent, **attributes: str) -> None:
        key = tuple(attributes.items())
        self.counts[name, key] += 1
        self.counts[f"{name}.size", key] += event.value

    def _add_message(self, event: RecordedEvent) -> None:
        key = (("actor", event.name), ("endpoint", event.detail))
        self.counts["monarch.messages.started", key] += 1
        self.counts["monarch.messages.ended", (*key, ("status", _status(event)))] += 1
        self.counts["monarch.messages.failed", key] += event.status == Status.ERROR
        self.durations.setdefault(key, Distribution()).add(event.duration_ns / 1e9)

    def _add_metric(self, event: RecordedEvent) -> None:
        kind = kind_of(event.reference)
        series = self.users.setdefault((kind, event.name), {})
        key = pairs_of(event.detail)
        if key not in series and len(series) >= MAX_TOTALS:
            key = tuple(FURTHER.items())
        if kind == InstrumentKind.HISTOGRAM:
            distribution = series.setdefault(key, Distribution())
            assert isinstance(distribution, Distribution)
            distribution.add(double(event.value))
        elif kind == InstrumentKind.GAUGE:
            series[key] = double(event.value)
        else:
            series[key] = double(event.trace)


class Collector:
    """Reader of the metrics of programs. ``read`` returns a recording of them with the wanted events."""

    def __init__(self, read: Callable[[EventFilter], Recording]) -> None:
        self._read = read
        self._sums: dict[ProcessKey, _Sums] = {}

    def look(self) -> tuple[list[Family], Recording]:
        """Return the families that have values, with what was read: only the events since the last look.

        Raises what ``read`` does.
        """
        recording = self._read(EventFilter(after={key: each.last_event for key, each in self._sums.items()}))
        sums = {}
        for process in recording.processes:
            key = process.recorded.key
            sums[key] = self._sums.get(key) or _Sums()
            sums[key].add(process)
        self._sums = with_unseen(sums, self._unread(recording), MAX_UNSEEN)
        return list(self._families(recording)), recording

    def _unread(self, recording: Recording) -> dict[ProcessKey, _Sums]:
        """Return the sums of processes that may still run: none, unless a host or a process was not read this time."""
        if not recording.unread or any(each.pid for each in recording.unread):
            return self._sums if recording.unread else {}
        read = {each.host for each in recording.programs}
        return {key: each for key, each in self._sums.items() if each.host not in read}

    def _families(self, recording: Recording) -> Iterator[Family]:
        made: dict[object, Family] = {
            name: Family(name, each.kind, each.about, each.unit, is_ours=True) for name, each in _OURS.items()
        }
        for each in recording.programs:
            states = Counter([*(process.state for process in each.processes), *(s["state"] for s in each.starting)])
            for state, count in states.items():
                attributes = {"program_pid": str(each.pid), "state": state}
                made["monarch.processes"].points.append(Point(title_of(each), None, attributes, count))
        for process in recording.processes:
            program = title_of(process.program)
            sums = self._sums[process.recorded.key]
            for name, attributes, value in itertools.chain(_of_sums(sums, process), _of_now(process)):
                made[name].points.append(Point(program, process, attributes, value))
            for (kind, name), series in sums.users.items():
                if kind in (InstrumentKind.GAUGE, InstrumentKind.UP_DOWN_COUNTER) and not is_alive(process):
                    continue
                family = made.setdefault((kind, name), Family(name or "unnamed", InstrumentKind(kind), ""))
                family.points += [Point(program, process, dict(key), value) for key, value in series.items()]
        return (family for family in made.values() if family.points)


Value = tuple[str, dict[str, str], "float | Distribution"]


def _of_sums(sums: _Sums, process: ProcessRecording) -> Iterator[Value]:
    counts = sums.counts.copy()
    for each in process.going_on(Kind.MESSAGE):
        if each.state in (State.RUNNING, State.WAITING):
            counts["monarch.messages.started", (("actor", each.name), ("endpoint", each.detail))] += 1
    for (name, key), count in counts.items():
        if name in _OURS:
            yield name, dict(key), count
    for key, distribution in sums.durations.items():
        yield "monarch.message.duration", dict(key), distribution


def _of_now(process: ProcessRecording) -> Iterator[Value]:
    """Yield what the process and its activities are now. An ended process is none of it."""
    if not is_alive(process):
        return
    if process.process.memory is not None and process.process.cpu_seconds is not None:
        yield "monarch.process.memory", {}, process.process.memory
        yield "monarch.process.cpu", {}, process.process.cpu_seconds
    states: dict[tuple[str, int], State] = {}
    queues = Counter[tuple[str, int]]()
    entered, left = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for each in process.recorded.activities:
        key = each.name, each.rank
        if each.kind == Kind.MESSAGE:
            states[key] = max(states.get(key, State.IDLE), State(each.state))
            queues[key] += each.queue
        elif each.kind == Kind.COLLECTIVE:
            left[key] += each.count
            entered[key] += each.count + bool(each.state)
    for state, count in Counter(states.values()).items():
        yield "monarch.actors", {"state": state.title}, count
    for (actor, rank), count in queues.items():
        yield "monarch.actor.queue", {"actor": actor, "rank": str(rank)}, count
    for name, counts in (("entered", entered), ("left", left)):
        for (group, rank), count in counts.items():
            yield f"monarch.collectives.{name}", {"group": group, "rank": str(rank)}, count


def _status(event: RecordedEvent) -> str:
    return Status(event.status).title


def pairs_of(detail: str) -> Attributes:
    """Return recorded attributes as sorted pairs of text.

    >>> pairs_of('{"shard":3,"split":"train"}'), pairs_of("")
    ((('shard', '3'), ('split', 'train')), ())
    """
    return tuple(sorted((name, _text(value)) for name, value in attributes_of(detail).items()))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
