"""Reader of recording areas: the processes of an area, their activities, and their last events.

A reader maps memory that other processes write to. It needs no answer from them, so it also works while they hang.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy

from monarch_backend import _native
from monarch_backend._telemetry.kinds import ASYNC_FLAG, Kind, SlotState, State, Status
from monarch_backend._telemetry.payloads import Payload, decode
from monarch_backend._telemetry.recording_area import map_slot

_LAYOUT = _native.recording_layout
_EVENT = numpy.dtype(
    [
        ("stamp", "u8"), ("end_ns", "u8"), ("duration_ns", "u8"), ("kind", "u2"), ("status", "u2"), ("thread", "u4"),
        ("name", "u4"), ("detail", "u4"), ("reference", "u8"), ("value", "u8"), ("trace", "u8"),
    ]
)  # fmt: skip
_FIELDS = _EVENT.names or ()
_TEXTS_AT = _FIELDS.index("name"), _FIELDS.index("detail")
_TEXT = struct.Struct(f"=QH{_LAYOUT['text_bytes']}s")
_TEXT_FLAG = 1 << 31
_MESSAGES = (Kind.SENT, Kind.MESSAGE)
_WITH_BYTES = (*_MESSAGES, Kind.COLLECTIVE, Kind.TRANSFER)
_CELL = struct.Struct("=IHHIIQQQQIIQ")
_KIND_AT = 4  # in a cell: 0 if it is free
_SLOT = struct.Struct("=IIQQIiQ192sQI")


@dataclass(frozen=True)
class Activity:
    """What a part of a process does now. ``number`` is that of its cell, ``since_ns`` is on CLOCK_MONOTONIC.

    ``waiting`` is the number of messages in the queue, of steps in the window of a `Kind.STEP`, or the number of the
    payload of a collective. ``is_async``: whether a coroutine handles the message.
    """

    number: int
    kind: int
    state: int
    name: str
    detail: str
    since_ns: int
    count: int
    reference: int
    value: int
    waiting: int
    rank: int
    trace: int
    is_async: bool = False

    @property
    def queue(self) -> int:
        """Messages in the queue, while it is not idle."""
        return 0 if self.state == State.IDLE or self.kind in (Kind.STEP, Kind.COLLECTIVE) else self.waiting

    @property
    def payload(self) -> Payload:
        """Dtype and route of a collective."""
        return decode(self.waiting) if self.kind == Kind.COLLECTIVE else Payload()


class RecordedEvent(NamedTuple):
    """Something that has ended. ``value`` is a number of bytes, or the bits of a double for a metric.

    ``trace`` is an identity, or the number of the payload of a collective.
    """

    number: int
    end_ns: int
    duration_ns: int
    kind: int
    status: int
    thread: int
    name: str
    detail: str
    reference: int
    value: int
    trace: int

    @property
    def payload(self) -> Payload:
        """Dtype and route of a collective."""
        return decode(self.trace) if self.kind == Kind.COLLECTIVE else Payload()


@dataclass(frozen=True)
class EventFilter:
    """Events that are wanted: of these kinds, or of all; that ended after ``since_ns``; of these the last ``limit``.

    With ``failed``, only those with another status than OK. ``pids`` are those of the processes, None for all.
    Events of the kinds ``always`` are wanted whenever they ended, and of all processes. ``after`` has the number of the
    last event that is not wanted, by `RecordedProcess.key`.
    """

    kinds: tuple[int, ...] = ()
    failed: bool = False
    since_ns: int = 0
    limit: int = _LAYOUT["event_count"]
    after: Mapping[tuple[int, int], int] = field(default_factory=dict)
    pids: frozenset[int] | None = None
    always: tuple[int, ...] = ()

    def kinds_of(self, pid: int) -> tuple[int, ...]:
        """Return the kinds that are wanted of a process: () for all, `NO_KINDS` for none."""
        return self.kinds if self.pids is None or pid in self.pids else self.always or NO_KINDS


NO_KINDS = (0,)
"""Kinds of a filter without events. Each event has another kind."""

ALL_EVENTS = EventFilter()


@dataclass
class RecordedProcess:
    """A process of an area. ``names`` are those that stay, read with the events.

    All times are on the clock of this machine. That of the process's host is ahead by ``ahead_ns``.

    ``kept`` is the number of events that the ring had, wanted or not, and ``lost`` of those that it has overwritten,
    both from the first one that was asked for. ``exit_code`` is None where it is unknown. ``read_ns`` is when it was
    read. ``ended_ns`` is when its starter has noted its end, 0 where that is unknown. ``restarts`` is the number of
    processes that had its rank before.
    """

    index: int
    pid: int
    label: str
    state: SlotState
    started_ns: int
    exit_code: int | None
    identity: int
    activities: list[Activity]
    events: list[RecordedEvent] = field(default_factory=list)
    kept: int = 0
    lost: int = 0
    names: list[str] = field(default_factory=list)
    ahead_ns: int = 0
    ended_ns: int = 0
    restarts: int = 0
    read_ns: int = field(default_factory=time.monotonic_ns)

    @property
    def key(self) -> tuple[int, int]:
        """Its pid, and its start on the clock of its host."""
        return self.pid, self.started_ns + self.ahead_ns

    @property
    def last_ns(self) -> int:
        """When it has ended. Where that is unknown, the last time that it has recorded."""
        ends, starts = [each.end_ns for each in self.events], [each.since_ns for each in self.activities]
        return self.ended_ns or max([self.started_ns, *ends, *starts])


@dataclass(frozen=True)
class StartingProcess:
    """A process that is being started, and does not record yet. ``pid`` is 0 until the fork server has made it."""

    label: str
    pid: int
    since_ns: int


@dataclass(frozen=True)
class Traffic:
    """Events of a process after the event ``after``: messages sent and handled, and bytes of these and of collectives.

    ``written`` is the number of the last event. Where the ring has lost some, both numbers are estimates.
    """

    pid: int
    after: int
    written: int
    messages: float
    size: float


class Area:
    """An area, by a descriptor of its memory file. Close it, or use it in a ``with`` block."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        about: dict[str, Any] = json.loads(os.pread(descriptor, _LAYOUT["header_bytes"], 0))
        if (about["version"], about.get("slot_bytes")) != (_LAYOUT["version"], _LAYOUT["slot_bytes"]):
            raise ValueError(
                f"process {about['owner']} records with layout {about['version']} of another release of "
                f"monarch_backend, and this one reads {_LAYOUT['version']}: use the program's own environment"
            )
        self.owner: int = about["owner"]
        self.program: str = about["program"]
        self.slots: int = about["slots"]

    @classmethod
    def of_process(cls, pid: int, descriptor: int) -> Area:
        """Open the area of a running process. Raises OSError."""
        own = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return cls(own)
        except BaseException:
            os.close(own)
            raise

    def close(self) -> None:
        os.close(self.descriptor)

    def __enter__(self) -> Area:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def processes(self, *, events: bool = False, wanted: EventFilter | None = None) -> Iterator[RecordedProcess]:
        """Yield the processes of the area, with all events, or with those that are wanted."""
        if events:
            wanted = ALL_EVENTS
        for index in self._slots_in(SlotState.ALIVE, SlotState.ENDED):
            with map_slot(self.descriptor, index) as memory:
                yield _read(index, memory, wanted)

    def processes_of(self, pid: int, wanted: EventFilter | None) -> list[RecordedProcess]:
        """Return the processes with this pid: ended ones may have had the same. Other slots are not copied."""
        found = []
        for index in self._slots_in(SlotState.ALIVE, SlotState.ENDED):
            if _SLOT.unpack(os.pread(self.descriptor, _SLOT.size, self._offset(index)))[1] == pid:
                with map_slot(self.descriptor, index) as memory:
                    found.append(_read(index, memory, wanted))
        return found

    def starting(self) -> list[StartingProcess]:
        """Return the processes that are being started and do not record yet, or never will."""
        found = []
        for index in self._slots_in(SlotState.RESERVED):
            state, pid, since, _, _, _, _, label, *_ = _SLOT.unpack(
                os.pread(self.descriptor, _SLOT.size, self._offset(index))
            )
            if state == SlotState.RESERVED:  # or it records since
                found.append(StartingProcess(_text(label), pid, since))
        return found

    def traffic(self, after: dict[int, int]) -> Iterator[Traffic]:
        """Yield the traffic of each running process. ``after`` has numbers of events by pid, 0 where it has none."""
        for index in self._slots_in(SlotState.ALIVE):
            with map_slot(self.descriptor, index) as memory:
                _, pid, _, written, *_ = _SLOT.unpack_from(memory)
                yield _traffic(memory, pid, after.get(pid, 0), written)

    def _slots_in(self, *states: SlotState) -> Iterator[int]:
        for index in range(self.slots):
            if int.from_bytes(os.pread(self.descriptor, 4, self._offset(index)), sys.byteorder) in states:
                yield index

    def _offset(self, index: int) -> int:
        return int(_LAYOUT["header_bytes"] + index * _LAYOUT["slot_bytes"])


def _read(index: int, memory: mmap.mmap, wanted: EventFilter | None) -> RecordedProcess:
    state, pid, started, written, names_used, code, identity, label, ended, restarts = _SLOT.unpack_from(memory)
    names = _Names(memory, min(names_used, _LAYOUT["names_bytes"]))
    process = RecordedProcess(
        index=index, pid=pid, label=_text(label), state=SlotState(state),
        started_ns=started, exit_code=code, identity=identity,
        activities=list(_activities(memory, names)), ended_ns=ended, restarts=restarts,
    )  # fmt: skip
    if wanted is not None:
        known = wanted.after.get((pid, started), 0)
        kinds = wanted.kinds_of(pid)
        if kinds == NO_KINDS:
            process.kept = min(max(0, written - known), _LAYOUT["event_count"])
        else:
            process.events, process.kept = _events(memory, names, replace(wanted, kinds=kinds), known, written)
        process.names = list(names.all())
        process.lost = max(0, written - known - process.kept)
    return process


def _text(padded: bytes) -> str:
    return padded.partition(b"\0")[0].decode(errors="replace")


class _Names:
    """Names and texts of a slot by their numbers."""

    def __init__(self, memory: mmap.mmap, used: int) -> None:
        self._names = memory[_LAYOUT["names_offset"] : _LAYOUT["names_offset"] + used]
        self._known: dict[int, str] = {}
        self._memory = memory

    def __getitem__(self, number: int) -> str:
        found = self._known.get(number)
        if found is None:
            found = self._known[number] = self._text(number) if number & _TEXT_FLAG else self._name(number)
        return found

    def _name(self, offset: int) -> str:
        if not 0 < offset <= len(self._names) - 2:
            return ""
        length = int.from_bytes(self._names[offset : offset + 2], "little")
        return self._names[offset + 2 : offset + 2 + length].decode(errors="replace")

    def all(self) -> Iterator[str]:
        """Yield the names that stay."""
        offset = 2
        while name := self._name(offset):
            yield name
            offset += 2 + int.from_bytes(self._names[offset : offset + 2], "little")

    def _text(self, number: int) -> str:
        """Return a text, or "" if a later one has overwritten it."""
        number &= _TEXT_FLAG - 1
        at = _LAYOUT["texts_offset"] + number % _LAYOUT["text_count"] * _TEXT.size
        stamp, length, text = _TEXT.unpack_from(self._memory, at)
        again = _TEXT.unpack_from(self._memory, at)[0]
        if stamp != again or stamp == 0 or (stamp - 1) & (_TEXT_FLAG - 1) != number:
            return ""
        return str(text[:length].decode(errors="replace"))


def _activities(memory: mmap.mmap, names: _Names) -> Iterator[Activity]:
    start = _LAYOUT["cells_offset"]
    cells = numpy.frombuffer(memory[start : start + _LAYOUT["cell_count"] * _CELL.size], "u2")
    for number in numpy.flatnonzero(cells[_KIND_AT // 2 :: _CELL.size // 2]).tolist():
        fields = _cell(memory, start + number * _CELL.size)
        if fields is not None and fields[1]:
            _, kind, state, name, detail, since, count, reference, value, waiting, rank, trace = fields
            yield Activity(
                number + 1, kind, state & ~ASYNC_FLAG, names[name], names[detail], since, count, reference, value,
                waiting, rank, trace, bool(state & ASYNC_FLAG),
            )  # fmt: skip


def _cell(memory: mmap.mmap, at: int) -> tuple[Any, ...] | None:
    """Return the fields of a cell, or None if its process always changes it meanwhile."""
    for _ in range(100):
        first = _CELL.unpack_from(memory, at)
        if first[0] % 2 == 0 and _CELL.unpack_from(memory, at) == first:
            return first
    return None


def _traffic(memory: mmap.mmap, pid: int, after: int, written: int) -> Traffic:
    if written <= after:
        return Traffic(pid, after, written, 0.0, 0.0)
    events = _copy(memory, after, written)
    new = events[(events["stamp"] > after) & (events["stamp"] <= written)]
    scale = (written - after) / max(1, len(new))
    size = new["value"][numpy.isin(new["kind"], _WITH_BYTES)].sum(dtype="f8")
    return Traffic(pid, after, written, int(numpy.isin(new["kind"], _MESSAGES).sum()) * scale, float(size) * scale)


def _copy(memory: mmap.mmap, first: int, end: int) -> numpy.ndarray[Any, Any]:
    """Return the places in the ring of the events from ``first`` up to ``end``, counted from 0, but no place twice.

    Places that were never written are not read: reading would allocate their memory.
    """
    count, start, size = _LAYOUT["event_count"], _LAYOUT["events_offset"], _EVENT.itemsize
    first = max(first, end - count)
    at, length = first % count, max(0, end - first)
    parts = [(at, min(at + length, count)), (0, max(0, at + length - count))]
    return numpy.frombuffer(b"".join(memory[start + a * size : start + b * size] for a, b in parts), _EVENT)


@functools.lru_cache(maxsize=64)
def _is_among(kinds: tuple[int, ...]) -> numpy.ndarray[Any, Any]:
    """Return whether each possible kind is one of these. An index into it is faster than `numpy.isin`."""
    found = numpy.zeros(1 << 16, bool)
    found[list(kinds)] = True
    return found


def _events(
    memory: mmap.mmap, names: _Names, wanted: EventFilter, after: int, written: int
) -> tuple[list[RecordedEvent], int]:  # fmt: skip
    """Return the wanted events after this number, oldest first, and the number of all events after it.

    ``written`` is the number of the last event. Events that were written meanwhile are left out.
    """
    oldest = max(after, written - _LAYOUT["event_count"])
    is_filtered = wanted.kinds or wanted.failed or wanted.since_ns
    first = oldest if is_filtered else max(oldest, written - wanted.limit)
    copy = _copy(memory, first, written)
    again = _copy(memory, first, written)["stamp"]
    whole = copy[(copy["stamp"] > after) & (copy["stamp"] == again)]
    kept = len(whole) + max(0, first - oldest)
    if wanted.kinds:
        whole = whole[_is_among(wanted.kinds)[whole["kind"]]]
    if wanted.failed:
        whole = whole[whole["status"] != Status.OK]
    if wanted.since_ns:
        whole = whole[(whole["end_ns"] > wanted.since_ns) | _is_among(wanted.always)[whole["kind"]]]
    whole = whole[numpy.argsort(whole["stamp"])][-wanted.limit :]
    texts = {number: names[number] for number in {*whole["name"].tolist(), *whole["detail"].tolist()}}
    columns = [whole[name].tolist() for name in _FIELDS]
    for place in _TEXTS_AT:
        columns[place] = [texts[number] for number in columns[place]]
    return list(map(RecordedEvent._make, zip(*columns, strict=True))), kept
