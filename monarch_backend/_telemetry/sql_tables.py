"""Tables of queries, and their rows in the recording of programs. Monarch's tables begin with its columns, in order.

Times named ``timestamp_us`` are microseconds since 1970, durations microseconds. An id is valid within one answer.
docs/operate/telemetry.md explains the columns.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Any

from monarch_backend._telemetry import jobs, stragglers
from monarch_backend._telemetry.kinds import BATCH, COMPILER, Kind, State, Status
from monarch_backend._telemetry.messages import Message, messages_of
from monarch_backend._telemetry.metrics import BOUNDS, SUMS, InstrumentKind, instruments, kind_of, number_of
from monarch_backend._telemetry.program_output import ALL_LINES
from monarch_backend._telemetry.program_recording import (
    CONSTRUCTOR,
    ProcessRecording,
    Recording,
    Unread,
    double,
    is_alive,
)
from monarch_backend._telemetry.programs import ENDED, Process, Program, activity_state
from monarch_backend._telemetry.rank_states import exit_text
from monarch_backend._telemetry.reader import Activity, RecordedEvent, RecordedProcess
from monarch_backend._telemetry.recorded_meshes import RecordedMesh, RecordedMeshes
from monarch_backend._telemetry.resources import resource_of
from monarch_backend._telemetry.stacks import Stacks
from monarch_backend._telemetry.subject import Subject, ThisMachine
from monarch_backend._telemetry.transfer_ends import EndsOfTransfers

Row = tuple[Any, ...]


def _numbers(name: str) -> tuple[str, str, str]:
    """Return the columns of a number of a metric, one for each type. All recorded numbers are doubles."""
    return f"{name}_f64", f"{name}_i64", f"{name}_u64"


COLUMNS = {
    "actors": (
        "id", "timestamp_us", "mesh_id", "rank", "full_name", "display_name", "name", "status", "messages", "pid",
        "process",
    ),
    "actor_status_events": ("id", "timestamp_us", "actor_id", "new_status", "reason"),
    "meshes": (
        "id", "timestamp_us", "class", "given_name", "full_name", "shape_json", "parent_mesh_id", "parent_view_json",
        "actors_seen", "program_pid",
    ),
    "messages": (
        "id", "timestamp_us", "from_actor_id", "to_actor_id", "endpoint", "port_index", "status", "duration_us",
        "queued_us", "actor", "rank", "bytes", "call", "from_pid", "to_pid", "reason",
    ),
    "message_status_events": ("id", "timestamp_us", "message_id", "status"),
    "sent_messages": (
        "id", "timestamp_us", "sender_actor_id", "actor_mesh_id", "view_json", "shape_json", "actor", "endpoint",
        "bytes", "call", "handled", "pid", "process",
    ),
    "spans": (
        "id", "name", "target", "level", "fields_json", "timestamp_us", "parent_id", "thread_name", "file", "line",
        "duration_us", "status", "actor_id", "pid", "process",
    ),
    "span_events": ("id", "timestamp_us", "event_type"),
    "events": (
        "name", "target", "level", "fields_json", "timestamp_us", "parent_span", "thread_id", "thread_name",
        "module_path", "file", "line", "id", "kind", "status", "detail", "duration_us", "reference", "value", "trace",
        "number", "pid", "process",
    ),
    "metric_gauges": (
        "name", "timestamp_us", "start_timestamp_us", "scope_name", "unit", "attributes_json",
        "resource_attributes_json", *_numbers("value"), "pid", "process",
    ),
    "metric_sums": (
        "name", "timestamp_us", "start_timestamp_us", "scope_name", "unit", "temporality", "is_monotonic",
        "attributes_json", "resource_attributes_json", *_numbers("sum"), "total", "pid", "process",
    ),
    "metric_histograms": (
        "name", "timestamp_us", "start_timestamp_us", "scope_name", "unit", "temporality", "attributes_json",
        "resource_attributes_json", "count", *_numbers("sum"), *_numbers("min"), *_numbers("max"), "bounds_json",
        "bucket_counts_json", "pid", "process",
    ),
    "hosts": ("name", "answered", "reason"),
    "processes": (
        "pid", "label", "program_pid", "command", "parent_pid", "state", "exit_code", "timestamp_us", "memory_bytes",
        "cpu_s", "events", "overwritten_events", "identity", "host", "ended_us", "restarts",
    ),
    "activities": (
        "pid", "process", "kind", "name", "rank", "state", "detail", "timestamp_us", "duration_us", "ended", "queue",
        "reference", "value", "trace",
    ),
    "collectives": (
        "id", "timestamp_us", "name", "status", "duration_us", "bytes", "number", "detail", "dtype", "route", "pid",
        "process",
    ),
    "steps": ("id", "timestamp_us", "name", "number", "duration_us", "pid", "process"),
    "step_times": (
        "pid", "process", "name", "steps", "median_us", "own_us", "usual_own_us", "ranks", "factor", "is_slow",
    ),
    "transfers": (
        "id", "timestamp_us", "name", "status", "duration_us", "bytes", "number", "detail", "source", "target",
        "from_pid", "to_pid", "pid", "process",
    ),
    "connections": ("id", "timestamp_us", "peer", "event", "reason", "pid", "process"),
    "batches": ("id", "timestamp_us", "workers", "number", "bytes", "duration_us", "pid", "process"),
    "recompilations": ("id", "timestamp_us", "event", "reason", "status", "duration_us", "pid", "process"),
    "logs": ("id", "timestamp_us", "stream", "text", "pid", "process"),
    "stacks": ("pid", "process", "thread", "depth", "function", "file", "line", "problem"),
}  # fmt: skip
"""Columns of each table."""

_WITH_FIELDS = Kind.SPAN, Kind.METRIC, Kind.MESH
"""Kinds whose detail is a JSON object, if it begins as one."""


class Tables:
    """The tables of a recording. Rows are made when a table is asked for."""

    def __init__(self, recording: Recording, there: Subject | None = None) -> None:
        self._recording, self._there = recording, there or ThisMachine(None)
        self._actor_ids = {
            (id(process), name): number
            for number, (process, name) in enumerate(
                ((process, name) for process in recording.processes for name in process.rank_of_actor), 1
            )
        }
        self._meshes = RecordedMeshes(recording)
        self._senders = recording.senders()
        self._identities = recording.by_identity()
        self._messages: list[Message] | None = None

    def rows(self, table: str) -> Iterable[Row]:
        """Return the rows of a table of `COLUMNS`."""
        make: Callable[[], Iterable[Row]] = getattr(self, f"_{table}_rows")
        return make()

    # ---- values

    def _wall(self, ns: int) -> int:
        return (ns + self._recording.wall_offset_ns) // 1000

    def _actor_id(self, process: ProcessRecording, name: str | None) -> int | None:
        return None if name is None else self._actor_ids.get((id(process), name))

    def _actor_of_thread(self, process: ProcessRecording, thread: int) -> int | None:
        return self._actor_id(process, process.actor_on(thread))

    def _thread(self, process: ProcessRecording, thread: int) -> str:
        actor = process.actor_on(thread)
        return f"thread {thread}" if actor is None else f"actor {actor}"

    def _events(self, kind: Kind) -> Iterator[tuple[ProcessRecording, RecordedEvent]]:
        return ((process, event) for process in self._recording.processes for event in process.events(kind))

    def _going_on(self, kind: Kind) -> Iterator[tuple[ProcessRecording, Activity]]:
        return ((process, each) for process in self._recording.processes for each in process.going_on(kind))

    @staticmethod
    def _open_status(process: ProcessRecording) -> str:
        return "open" if is_alive(process) else "lost"

    def _open_us(self, process: ProcessRecording, since: int) -> int | None:
        """Return the duration so far, or until the end of the process. None if that end is not recorded."""
        end = self._recording.now_ns if is_alive(process) else process.recorded.ended_ns
        return max(0, end - since) // 1000 if end else None

    # ---- hosts and processes

    def _hosts_rows(self) -> Iterator[Row]:
        return ((each.name, int(each.has_answered), each.reason or None) for each in self._recording.hosts)

    def _processes_rows(self) -> Iterator[Row]:
        for each in self._recording.processes:
            process, recorded = each.process, each.recorded
            yield (
                each.pid, each.label, each.program.pid, each.program.command, process.parent or None,
                process.state if is_alive(each) else ENDED, None if is_alive(each) else recorded.exit_code,
                self._wall(recorded.started_ns), process.memory, process.cpu_seconds, recorded.kept,
                recorded.lost, _identity(recorded.identity), each.host,
                self._wall(recorded.ended_ns) if recorded.ended_ns else None, recorded.restarts,
            )  # fmt: skip

    def _activities_rows(self) -> Iterator[Row]:
        for process in self._recording.processes:
            for each in process.recorded.activities:
                is_idle = each.state == State.IDLE
                yield (
                    process.pid, process.label, Kind(each.kind).title, each.name, each.rank,
                    activity_state(each, is_alive=is_alive(process)),
                    None if is_idle else each.detail, self._wall(each.since_ns), self._open_us(process, each.since_ns),
                    each.count, each.queue, _signed(each.reference), _signed(each.value),
                    _identity(each.trace),
                )  # fmt: skip

    # ---- actors and meshes

    def _actors_rows(self) -> Iterator[Row]:
        statuses = {row[2]: row[3] for row in self._actor_status_events_rows()}  # the last one of each
        handled = Counter(
            self._actor_id(each.process, each.actor) for each in self._all_messages() if each.start is not None
        )
        started = {
            (id(process), event.name): event.end_ns - event.duration_ns
            for process, event in self._events(Kind.MESSAGE)
            if event.detail == CONSTRUCTOR
        }
        for process in self._recording.processes:
            for name, rank in process.rank_of_actor.items():
                actor, start = self._actor_ids[id(process), name], started.get((id(process), name))
                mesh = self._meshes.of_actor(process, name)
                yield (
                    actor, None if start is None else self._wall(start), mesh.id, rank,
                    f"{name}[{'' if rank is None else rank}]", mesh.display_name(rank), name, statuses.get(actor),
                    handled[actor], process.pid, process.label,
                )  # fmt: skip

    def _actor_status_events_rows(self) -> Iterator[Row]:
        found: list[tuple[int, int | None, str, str | None]] = []
        for process in self._recording.processes:
            for event in process.events(Kind.MESSAGE):
                if event.detail == CONSTRUCTOR:
                    actor = self._actor_id(process, event.name)
                    found.append((event.end_ns - event.duration_ns, actor, "Initializing", None))
                    if event.status == Status.OK:
                        found.append((event.end_ns, actor, "Idle", None))
            for event in process.events(Kind.ACTOR):
                actor, status = self._actor_id(process, event.name), "Failed" if event.status else "Stopped"
                found.append((event.end_ns, actor, status, event.detail or None))
            for name in process.rank_of_actor if not is_alive(process) else ():
                code = process.recorded.exit_code
                actor, status = self._actor_id(process, name), "Failed" if code else "Stopped"
                text = f"its process has ended: {exit_text(code)}" if code else "its process has ended"
                found.append((process.recorded.last_ns, actor, status, text))
            for each in process.going_on(Kind.MESSAGE):
                if is_alive(process):
                    status = "Initializing" if each.state == State.CONSTRUCTING else "Processing"
                    found.append((each.since_ns, self._actor_id(process, each.name), status, each.detail))
        found.sort(key=lambda each: each[0])
        for number, (at, actor, status, reason) in enumerate(found, 1):
            yield number, self._wall(at), actor, status, reason

    def _meshes_rows(self) -> Iterator[Row]:
        meshes = [(each, each.actors_seen) for each in self._meshes.of_actors]
        for each, seen in [*meshes, *((each, None) for each in self._meshes.of_processes)]:
            yield (
                each.id, None if each.made_ns is None else self._wall(each.made_ns), each.of_class, each.name,
                f"{each.procs}/{each.name}" if each.procs else each.name, each.shape_json,
                each.parent.id if each.parent else None, each.region_json if each.procs else None, seen,
                each.program.pid,
            )  # fmt: skip

    # ---- messages

    def _all_messages(self) -> list[Message]:
        if self._messages is None:
            self._messages = [each for process in self._recording.processes for each in messages_of(process)]
        return self._messages

    def _sent_of(self, message: Message) -> tuple[ProcessRecording, RecordedEvent] | None:
        return self._senders.get((message.what.trace, message.what.reference)) if message.what.reference else None

    def _messages_rows(self) -> Iterator[Row]:
        pids = {identity: process.pid for identity, process in self._identities.items()}
        for number, each in enumerate(self._all_messages(), 1):
            process, actor, start, end, what = each.process, each.actor, each.start, each.end, each.what
            sent = self._sent_of(each)
            since = each.queued if sent is None else sent[1].end_ns
            yield (
                number, self._wall(each.time_ns),
                None if sent is None else self._actor_of_thread(sent[0], sent[1].thread),
                self._actor_ids.get((id(process), actor)), what.detail, None, each.status,
                None if start is None else self._open_us(process, start) if end is None else (end - start) // 1000,
                None if since is None else self._waited_us(each, since),
                actor, process.rank_of_actor.get(actor), _signed(what.value), what.reference or None,
                pids.get(what.trace), process.recorded.pid, each.reason or None,
            )  # fmt: skip

    def _waited_us(self, message: Message, since: int) -> int | None:
        """Return how long a message has waited until its start or withdrawal, or waits so far."""
        until = message.start or message.end
        return self._open_us(message.process, since) if until is None else max(0, until - since) // 1000

    def _message_status_events_rows(self) -> Iterator[Row]:
        found: list[tuple[int, int, str]] = []
        for number, each in enumerate(self._all_messages(), 1):
            if (sent := self._sent_of(each)) is not None:
                found.append((min(sent[1].end_ns, each.queued or each.time_ns), number, "sent"))
            if each.queued is not None:
                found.append((each.queued, number, "queued"))
            if each.start is not None:
                found.append((each.start, number, "active"))
            if each.end is not None:
                found.append((each.end, number, each.status))
        found.sort(key=itemgetter(0))  # messages have the order of their numbers already
        offset = self._recording.wall_offset_ns
        for number, (at, message, status) in enumerate(found, 1):
            yield number, (at + offset) // 1000, message, status

    def _sent_messages_rows(self) -> Iterator[Row]:
        handled = Counter[tuple[int, int]]()
        receivers = dict[tuple[int, int], RecordedMesh | None]()
        for each in self._all_messages():
            call = each.what.trace, each.what.reference
            handled[call] += each.start is not None
            if call[1] and call not in receivers and each.actor in each.process.rank_of_actor:
                receivers[call] = self._meshes.of_actor(each.process, each.actor)
        for number, (process, event) in enumerate(self._events(Kind.SENT), 1):
            call = process.recorded.identity, event.reference
            mesh = receivers.get(call) or self._meshes.of_receivers(process, event.name)
            is_of_all = mesh is not None and event.reference != 0 and handled[call] == mesh.size
            view = mesh.region_json if mesh and is_of_all else None
            yield (
                number, self._wall(event.end_ns), self._actor_of_thread(process, event.thread),
                mesh.id if mesh else None, view, view, event.name, event.detail,
                _signed(event.value), event.reference or None, handled[call] if event.reference else None,
                process.pid, process.label,
            )  # fmt: skip

    # ---- spans, metrics and others

    def _all_spans(self) -> Iterator[tuple[int, ProcessRecording, RecordedEvent | Activity, int, int | None, str, int]]:
        number = 0
        for process, event in self._events(Kind.SPAN):
            number += 1
            start = event.end_ns - event.duration_ns
            yield number, process, event, start, event.end_ns, Status(event.status).title, event.thread
        for process, each in self._going_on(Kind.SPAN):
            number += 1
            yield number, process, each, each.since_ns, None, self._open_status(process), each.value - 1

    def _span_ids(self) -> dict[tuple[int, int], int]:
        """Return the ids of spans by their process and its number of the span."""
        return {(id(process), what.reference): number for number, process, what, *_ in self._all_spans()}

    def _spans_rows(self) -> Iterator[Row]:
        ids = self._span_ids()
        for number, process, what, start, end, status, thread in self._all_spans():
            yield (
                number, what.name, None, None, what.detail or "{}", self._wall(start),
                ids.get((id(process), what.trace)), self._thread(process, thread), None, None,
                self._open_us(process, start) if end is None else (end - start) // 1000, status,
                self._actor_of_thread(process, thread), process.pid, process.label,
            )  # fmt: skip

    def _span_events_rows(self) -> Iterator[Row]:
        found: list[tuple[int, int, str]] = []
        for number, _, _, start, end, _, _ in self._all_spans():
            found.append((start, number, "enter"))
            if end is not None:
                found += [(end, number, "exit"), (end, number, "close")]
        found.sort(key=itemgetter(0))
        for at, span, what in found:
            yield span, self._wall(at), what

    def _events_rows(self) -> Iterator[Row]:
        number, ids = 0, self._span_ids()
        for process in self._recording.processes:
            for each in process.recorded.events:
                number += 1
                kind = Kind(each.kind)
                has_fields = kind in _WITH_FIELDS and each.detail.startswith("{")
                span = ids.get((id(process), each.trace)) if kind in (Kind.SPAN, Kind.SENT) else None
                yield (
                    each.name, None, "ERROR" if each.status in (Status.ERROR, Status.ABORTED) else "INFO",
                    each.detail if has_fields else "{}", self._wall(each.end_ns), span, str(each.thread),
                    self._thread(process, each.thread), None, None, None, number, kind.title, each.status,
                    each.detail, each.duration_ns // 1000,
                    kind_of(each.reference) if kind == Kind.METRIC else _signed(each.reference),
                    double(each.value) if kind == Kind.METRIC else _signed(each.value),
                    None if kind == Kind.COLLECTIVE else _identity(each.trace), each.number, process.pid,
                    process.label,
                )  # fmt: skip

    def _metrics(self, *kinds: InstrumentKind) -> Iterator[tuple[ProcessRecording, RecordedEvent, Row, Row]]:
        """Yield events of metrics, with two groups of columns: the meter and unit, the attributes and resource."""
        for process in self._recording.processes:
            events = [each for each in process.events(Kind.METRIC) if kind_of(each.reference) in kinds]
            if not events:
                continue
            known = instruments(process.recorded.names)
            resource = json.dumps(resource_of(process))
            for event in events:
                about = known.get(number_of(event.reference), (None, None))
                yield process, event, about, (event.detail or "{}", resource)

    def _metric_gauges_rows(self) -> Iterator[Row]:
        for process, event, about, attributes in self._metrics(InstrumentKind.GAUGE):
            yield (
                event.name, self._wall(event.end_ns), None, *about, *attributes, double(event.value), None, None,
                process.pid, process.label,
            )  # fmt: skip

    def _metric_sums_rows(self) -> Iterator[Row]:
        for process, event, about, attributes in self._metrics(*SUMS):
            at, is_monotonic = self._wall(event.end_ns), int(kind_of(event.reference) == InstrumentKind.COUNTER)
            yield (
                event.name, at, at, *about, "delta", is_monotonic, *attributes, double(event.value), None, None,
                double(event.trace), process.pid, process.label,
            )  # fmt: skip

    def _metric_histograms_rows(self) -> Iterator[Row]:
        for process, event, about, attributes in self._metrics(InstrumentKind.HISTOGRAM):
            at, value = self._wall(event.end_ns), double(event.value)
            counts = [0] * (len(BOUNDS) + 1)
            counts[bisect.bisect_left(BOUNDS, value)] = 1
            yield (
                event.name, at, at, *about, "delta", *attributes, 1, *[value, None, None] * 3, json.dumps(BOUNDS),
                json.dumps(counts), process.pid, process.label,
            )  # fmt: skip

    def _collectives_rows(self) -> Iterator[Row]:
        return self._timed(Kind.COLLECTIVE, lambda _, what: what.payload)

    def _transfers_rows(self) -> Iterator[Row]:
        ends = EndsOfTransfers(self._recording)
        return self._timed(Kind.TRANSFER, ends.of)

    def _connections_rows(self) -> Iterator[Row]:
        for number, (process, event) in enumerate(self._events(Kind.CONNECTION), 1):
            what, _, reason = event.detail.partition(": ")
            yield number, self._wall(event.end_ns), event.name, what, reason or None, process.pid, process.label

    # ---- controllers

    def _batches_rows(self) -> Iterator[Row]:
        for number, (process, event) in enumerate(self._events(Kind.CONTROLLER), 1):
            if event.detail == BATCH:
                yield (
                    number, self._wall(event.end_ns - event.duration_ns), event.name, event.reference, event.value,
                    event.duration_ns // 1000, process.pid, process.label,
                )  # fmt: skip

    def _recompilations_rows(self) -> Iterator[Row]:
        for number, (process, event) in enumerate(self._events(Kind.CONTROLLER), 1):
            if event.name == COMPILER:
                what, _, reason = event.detail.partition(": ")
                yield (
                    number, self._wall(event.end_ns - event.duration_ns), what, reason or None,
                    Status(event.status).title, event.duration_ns // 1000, process.pid, process.label,
                )  # fmt: skip

    # ---- read when they are asked for

    def _logs_rows(self) -> Iterator[Row]:
        numbers = itertools.count(1)
        for program in self._programs_to_ask():
            try:
                found = self._there.lines(program, ALL_LINES).lines
            except LookupError as error:  # its host does not answer any more
                self._recording.unread.append(Unread(program.pid, f"logs of {program}", str(error)))
                self._recording.note_no_answer(program.host, str(error))
                continue
            for line in found:
                yield next(numbers), int(line.time * 1e6), line.stream, line.text, line.pid or None, line.label

    def _stacks_rows(self) -> Iterator[Row]:
        for program in self._programs_to_ask():
            alive = [each for each in program.processes if each.exit_code is None]
            found = self._there.stacks(program.host, [each.pid for each in alive])
            for process, read in zip(alive, found, strict=True):
                yield from _stack_rows(process, read)

    def _programs_to_ask(self) -> list[Program]:
        if self._recording.is_past:
            return []
        return [each for each in self._recording.programs if not each.host or self._there.is_of_hosts]

    def _steps_rows(self) -> Iterator[Row]:
        for number, (process, event) in enumerate(self._events(Kind.STEP), 1):
            yield (
                number, self._wall(event.end_ns), event.name, event.reference, event.duration_ns // 1000 or None,
                process.pid, process.label,
            )  # fmt: skip

    def _step_times_rows(self) -> Iterator[Row]:
        members = defaultdict[jobs.Job, list[RecordedProcess]](list)
        for process in self._recording.processes:
            if is_alive(process) and not self._recording.is_past:
                members[jobs.job_of(process.recorded, process.process.parent or process.pid)].append(process.recorded)
        for each in (times for ranks in members.values() for times in stragglers.of_job(ranks)):
            yield (
                each.pid, each.label, each.name, each.steps, each.median_ns // 1000, each.own_ns // 1000,
                each.usual_ns // 1000 if each.factor else None, each.ranks, each.factor or None, int(each.is_slow),
            )  # fmt: skip

    def _timed(self, kind: Kind, more: Callable[[ProcessRecording, Any], Row]) -> Iterator[Row]:
        """Yield the rows of a kind. ``more`` returns the values of the columns that other kinds lack."""
        found: list[tuple[ProcessRecording, RecordedEvent | Activity, int, int | None, str]] = [
            (process, event, event.end_ns - event.duration_ns, event.duration_ns // 1000, Status(event.status).title)
            for process, event in self._events(kind)
        ]
        found += [
            (process, each, each.since_ns, self._open_us(process, each.since_ns), self._open_status(process))
            for process, each in self._going_on(kind)
        ]
        for number, (process, what, start, duration, status) in enumerate(found, 1):
            yield (
                number, self._wall(start), what.name, status, duration, _signed(what.value), _signed(what.reference),
                what.detail or None, *more(process, what), process.pid, process.label,
            )  # fmt: skip


def _stack_rows(process: Process, read: Stacks) -> Iterator[Row]:
    if read.problem:
        yield process.pid, process.label, None, None, None, None, None, read.problem
    for thread in read.threads:
        for depth, frame in enumerate(thread.frames):
            yield (
                process.pid, process.label, thread.name or None, depth, frame.function, frame.file, frame.line, None,
            )  # fmt: skip


def _signed(number: int) -> int:
    """Return a 64-bit number as SQLite has them."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _identity(number: int) -> str | None:
    return f"{number:x}" if number else None
