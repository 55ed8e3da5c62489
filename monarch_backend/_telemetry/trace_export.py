"""Timeline of running programs in the Trace Event Format, which Perfetto and chrome://tracing open.

Slices on one track nest, as the format requires. Where activities overlap, as the messages of a concurrent actor do,
the track has further lanes. Times are microseconds since the first slice.
"""

from __future__ import annotations

import bisect
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, TextIO

from monarch_backend._telemetry.kinds import Kind, Status
from monarch_backend._telemetry.metrics import SUMS, kind_of
from monarch_backend._telemetry.profiler import MARK
from monarch_backend._telemetry.profiles import Profile
from monarch_backend._telemetry.program_recording import (
    CONSTRUCTOR,
    ProcessRecording,
    Recording,
    attributes_of,
    double,
    is_alive,
)
from monarch_backend._telemetry.reader import Activity, RecordedEvent
from monarch_backend._telemetry.transfer_ends import EndsOfTransfers

SEND_NS = 1000
"""Length of the slice of a sent message, unless another slice begins or ends meanwhile."""

_SLICES = Kind.MESSAGE, Kind.WAIT, Kind.SPAN, Kind.COLLECTIVE, Kind.TRANSFER, Kind.STEP
_BEGIN_TIMELINE = "X", "i", "C"
"""Phases of events that can begin the timeline: the earliest one is at time 0. Arrows join slices, so none is first."""

_INSTANTS = Kind.HOST, Kind.PROCESS, Kind.ACTOR, Kind.MESH, Kind.CONTROLLER, Kind.LOG

Track = tuple[str, str]
"""Key of a track in its process: what it is about, and its name."""


@dataclass(eq=False)
class _Slice:
    name: str
    category: str
    start: int
    end: int
    track: Track
    args: dict[str, Any]
    process: _Process
    call: tuple[int, int] | None = None  # the sender's identity and the number of the call
    tid: int = 0


@dataclass(eq=False)
class _Process:
    recording: ProcessRecording
    pid: int
    slices: list[_Slice] = field(default_factory=list)
    lanes: dict[Track, list[int]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)

    def lane(self, track: Track, number: int) -> int:
        """Return the tid of a lane of a track."""
        tids = self.lanes.setdefault(track, [])
        while len(tids) <= number:
            tid = len(self.names) + 1
            tids.append(tid)
            self.names[tid] = self._title(track) if len(tids) == 1 else f"{self._title(track)} ({len(tids)})"
        return tids[number]

    def _title(self, track: Track) -> str:
        what, name = track
        rank = self.recording.rank_of_actor.get(name)
        return (name if rank is None else f"{name} rank {rank}") if what == "actor" else f"{what} {name}".strip()

    def track(self, thread: int) -> Track:
        """Return the track of a thread: that of its actor, if it handles the messages of one."""
        actor = self.recording.actor_on(thread)
        return ("thread", str(thread)) if actor is None else ("actor", actor)


def as_trace(recording: Recording, profiles: Sequence[Profile] = ()) -> dict[str, Any]:
    """Return the trace as a value for JSON. Profiles of torch are on further tracks of their processes."""
    processes = _processes(recording)
    senders = {each.recording.recorded.identity: each for each in processes}
    ends = EndsOfTransfers(recording)
    for process in processes:
        process.slices += _slices(process, recording, senders, ends)
    handled = [each for process in processes for each in process.slices if each.category == "message" and each.call]
    sent = _add_sent(processes, handled)
    for process in processes:
        _place(process)
    of_torch = [each for profile in profiles for each in _events_of_profile(profile, processes)]
    instants = [each for process in processes for each in _instants(process)]
    counters = [each for process in processes for each in _counters(process)]
    slices = [each for process in processes for each in process.slices]
    slices.sort(key=lambda each: (each.start, -each.end))
    points = instants + counters
    first = (each["ts"] for each in [*points, *of_torch] if each["ph"] in _BEGIN_TIMELINE)
    base = min([*(each.start for each in slices), *first], default=0)
    points += _arrows(sent, handled) + of_torch
    for point in points:
        point["ts"] = _microseconds(point["ts"] - base)
    events = [*_metadata(processes), *(_as_event(each, base) for each in slices), *points]
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": _about(recording, base, profiles)}


def write(recording: Recording, file: TextIO, profiles: Sequence[Profile] = ()) -> dict[str, int]:
    """Write the trace to a file. Return the number of its events by phase. Raises OSError."""
    trace = as_trace(recording, profiles)
    file.write(json.dumps(trace, separators=(",", ":"), allow_nan=False))
    counts = defaultdict[str, int](int)
    for event in trace["traceEvents"]:
        counts[event["ph"]] += 1
    return dict(counts)


def _processes(recording: Recording) -> list[_Process]:
    made: list[_Process] = []
    used: set[int] = set()
    for each in recording.processes:
        pid = each.pid
        while pid in used:  # of an ended process, or on another host
            pid += 1 << 22
        used.add(pid)
        made.append(_Process(each, pid))
    return made


# ---- slices


def _slices(
    process: _Process, recording: Recording, senders: dict[int, _Process], ends: EndsOfTransfers
) -> Iterator[_Slice]:
    recorded = process.recording.recorded
    for event in recorded.events:
        kind = event.kind
        if kind in _SLICES:
            args = {"status": Status(event.status).title, **_args(event, senders)}
            if kind == Kind.TRANSFER:
                args |= _known(ends.of(process.recording, event)._asdict())
            start = event.end_ns - event.duration_ns
            track = _own_track(kind) or process.track(event.thread)
            yield _slice(process, event, start, event.end_ns, track, args)
    end = recording.now_ns if is_alive(process.recording) else recorded.last_ns
    for activity in recorded.activities:
        kind = activity.kind
        if activity.state and kind in _SLICES:
            args = {"status": "open" if is_alive(process.recording) else "lost", **_args(activity, senders)}
            track = _own_track(kind) or _track_of_activity(process, activity)
            yield _slice(process, activity, activity.since_ns, max(end, activity.since_ns + 1), track, args)


def _slice(
    process: _Process, what: RecordedEvent | Activity, start: int, end: int, track: Track, args: dict[str, Any]
) -> _Slice:
    kind = Kind(what.kind)
    call = (what.trace, what.reference) if kind == Kind.MESSAGE and what.reference else None
    return _Slice(_title(what), kind.title, start, end, track, args, process, call)


def _title(what: RecordedEvent | Activity) -> str:
    name = what.name or "(name not recorded)"
    if what.kind == Kind.MESSAGE:
        return f"construct {name}" if what.detail == CONSTRUCTOR else f"{name}.{what.detail}"
    if what.kind == Kind.WAIT:
        return f"wait for {name}.{what.detail}" if what.detail else f"wait for {name}"
    return name


def _args(what: RecordedEvent | Activity, senders: dict[int, _Process]) -> dict[str, Any]:
    if what.kind == Kind.SPAN:
        return {"span": what.reference, "parent": what.trace, **attributes_of(what.detail)}
    args: dict[str, Any] = {"number": what.reference}
    if what.kind in (Kind.COLLECTIVE, Kind.TRANSFER):
        return {**args, "bytes": what.value, **_known({"detail": what.detail or None, **what.payload._asdict()})}
    other = senders.get(what.trace)
    if other is not None:
        args["sender" if what.kind == Kind.MESSAGE else "waits for process"] = other.recording.label
    return {**args, "bytes": what.value} if what.kind == Kind.MESSAGE else args


def _known(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _own_track(kind: int) -> Track | None:
    """Return the track of what is completed by any thread, None for other kinds."""
    tracks = {Kind.COLLECTIVE: "collectives", Kind.TRANSFER: "transfers", Kind.STEP: "steps"}
    return (tracks[Kind(kind)], "") if kind in tracks else None


def _track_of_activity(process: _Process, activity: Activity) -> Track:
    if activity.kind == Kind.MESSAGE:
        return "actor", activity.name
    if activity.kind == Kind.SPAN:
        return process.track(activity.value - 1)
    recorded = process.recording.recorded
    for other in recorded.activities:  # a wait in an actor refers to the actor's cell
        if other.number == activity.value and other.kind == Kind.MESSAGE:
            return "actor", other.name
    for event in reversed(recorded.events):
        if event.kind in (Kind.WAIT, Kind.SENT) and process.recording.actor_on(event.thread) is None:
            return process.track(event.thread)
    return "main thread", ""


# ---- messages from process to process


def _add_sent(processes: list[_Process], handled: list[_Slice]) -> dict[tuple[int, int], _Slice]:
    """Add a slice for each sent message. Return those that a handled message can refer to."""
    first: dict[tuple[int, int], int] = {}
    for each in handled:
        assert each.call is not None
        first[each.call] = min(each.start, first.get(each.call, each.start))
    sent: dict[tuple[int, int], _Slice] = {}
    for process in processes:
        bounds = defaultdict[Track, list[int]](list)
        for each in process.slices:
            bounds[each.track] += [each.start, each.end]
        for some in bounds.values():
            some.sort()
        added: list[_Slice] = []
        for event in process.recording.events(Kind.SENT):
            track = process.track(event.thread)
            some = bounds[track]
            before = bisect.bisect_left(some, event.end_ns)
            start = max(event.end_ns - SEND_NS, some[before - 1] if before else 0)
            call = (process.recording.recorded.identity, event.reference)
            if call in first:  # the receiver can begin before the sender has noted that it has sent
                start = min(start, first[call])
            args = {"number": event.reference, "bytes": event.value}
            name = f"send {event.name or '(name not recorded)'}.{event.detail}"
            added.append(_Slice(name, "sent", start, event.end_ns, track, args, process, call))
            if event.reference:
                sent[call] = added[-1]
        process.slices += added
    return sent


def _arrows(sent: dict[tuple[int, int], _Slice], handled: list[_Slice]) -> list[dict[str, Any]]:
    """Return two flow events for each message with a known sender: in its slice, and at the start of the handling."""
    arrows: list[dict[str, Any]] = []
    for number, to in enumerate(sorted(handled, key=lambda each: each.start), 1):
        assert to.call is not None
        start = sent.get(to.call)
        if start is not None:
            common = {"name": "message", "cat": "message", "id": number}
            arrows.append({**common, "ph": "s", "ts": start.start, "pid": start.process.pid, "tid": start.tid})
            arrows.append({**common, "ph": "f", "bp": "e", "ts": to.start, "pid": to.process.pid, "tid": to.tid})
    return arrows


# ---- profiles of torch


def _events_of_profile(profile: Profile, processes: list[_Process]) -> list[dict[str, Any]]:
    """Return the slices of a profile, outer ones first, and its arrows, from launches on a CPU to kernels on a device.

    A profile has hundreds of thousands of operators a second, so this takes most of the time of an export.
    """
    key = profile.host, profile.pid
    found = (each for each in processes if (each.recording.host, each.recording.pid) == key)
    process = next((each for each in found if is_alive(each.recording)), None)
    if process is None:  # it has ended since
        return []
    slices: list[dict[str, Any]] = []
    arrows: list[dict[str, Any]] = []
    lanes: dict[tuple[int, Any], int] = {}
    offset, own_pid = profile.offset_ns, process.pid
    for event in profile.events:
        phase, pid = event.get("ph"), event.get("pid")
        if phase not in ("X", "s", "f") or not isinstance(pid, int):
            continue
        name = str(event.get("name"))
        if name.startswith(MARK):
            continue
        tid = lanes.get((pid, event["tid"]))
        if tid is None:
            where = f"thread {event['tid']}" if pid == profile.pid else f"device {pid} stream {event['tid']}"
            tid = lanes[pid, event["tid"]] = process.lane(("torch", where), 0)
        start, category = round(event["ts"] * 1000) + offset, event.get("cat", "torch")
        if phase == "X":
            slices.append({
                "ph": phase, "name": name, "cat": category, "ts": start, "dur": round(event["dur"] * 1000) / 1000,
                "pid": own_pid, "tid": tid, "args": event.get("args", {}),
            })  # fmt: skip
        else:
            arrow = {"ph": phase, "name": name, "cat": category, "ts": start}
            arrow |= {"bp": "e"} if phase == "f" else {}
            arrows.append({**arrow, "id": f"{own_pid}:{event['id']}", "pid": own_pid, "tid": tid})
    slices.sort(key=itemgetter("dur"), reverse=True)
    slices.sort(key=itemgetter("ts"))
    return slices + arrows


# ---- tracks


def _place(process: _Process) -> None:
    """Choose a lane for each slice, so that any two slices of a lane are disjoint or nested."""
    by_track = defaultdict[Track, list[_Slice]](list)
    for each in process.slices:
        by_track[each.track].append(each)
    for track in sorted(by_track, key=_order):
        lanes: list[list[_Slice]] = []  # of each lane, its open slices, innermost last
        for each in sorted(by_track[track], key=lambda each: (each.start, -each.end)):
            for opened in lanes:
                while opened and opened[-1].end <= each.start:
                    opened.pop()
            lane = _lane_for(each, lanes)
            if lane == len(lanes):
                lanes.append([])
            lanes[lane].append(each)
            each.tid = process.lane(track, lane)


def _lane_for(each: _Slice, lanes: list[list[_Slice]]) -> int:
    """Return the number of a lane for a slice that begins last, or that of a new one.

    A message is never inside of another one of its actor. A span goes to its parent, and other slices to the slice
    that has begun last: in a concurrent actor that is most likely the message that they belong to.
    """
    tops = [opened[-1] if opened else None for opened in lanes]
    empty = next((number for number, top in enumerate(tops) if top is None), len(lanes))
    if each.category == "message":
        return empty
    fitting = [(top.start, number, top) for number, top in enumerate(tops) if top is not None and each.end <= top.end]
    parent = each.args.get("parent") if each.category == "span" else None
    for _, number, top in fitting:
        if parent and top.category == "span" and top.args.get("span") == parent:
            return number
    return max(fitting, key=lambda found: found[:2])[1] if fitting else empty


def _order(track: Track) -> tuple[int, str, int, str]:
    what, name = track
    first = ["main thread", "thread", "steps", "actor", "collectives", "transfers"].index(what)
    return first, what, int(name) if what == "thread" else 0, name


# ---- events of the format


def _microseconds(ns: int) -> float:
    return ns / 1000


def _as_event(each: _Slice, base: int) -> dict[str, Any]:
    return {
        "ph": "X", "name": each.name, "cat": each.category, "ts": _microseconds(each.start - base),
        "dur": _microseconds(each.end - each.start), "pid": each.process.pid, "tid": each.tid, "args": each.args,
    }  # fmt: skip


def _instants(process: _Process) -> Iterator[dict[str, Any]]:
    for event in process.recording.recorded.events:
        if event.kind in _INSTANTS:
            kind = Kind(event.kind).title
            args = {"detail": event.detail, "status": Status(event.status).title, "number": event.reference}
            yield _instant(process, event, f"{kind} {event.name}", kind, args)
        elif event.kind == Kind.METRIC and not math.isfinite(_value(event)):
            args = attributes_of(event.detail)
            yield _instant(process, event, f"{event.name} = {_value(event)}", "metric", args)


def _instant(process: _Process, event: RecordedEvent, name: str, category: str, args: dict[str, Any]) -> dict[str, Any]:
    tid = process.lane(process.track(event.thread), 0)
    return {
        "ph": "i", "name": name, "cat": category, "ts": event.end_ns, "pid": process.pid, "tid": tid, "s": "t",
        "args": args,
    }  # fmt: skip


def _counters(process: _Process) -> Iterator[dict[str, Any]]:
    for event in process.recording.events(Kind.METRIC):
        value = _value(event)
        if math.isfinite(value):  # JSON has no other numbers
            name = f"{event.name or '(name not recorded)'}{' ' if event.detail else ''}{event.detail}"
            yield {
                "ph": "C", "name": name, "cat": "metric", "ts": event.end_ns, "pid": process.pid,
                "args": {"value": value},
            }  # fmt: skip


def _value(event: RecordedEvent) -> float:
    """Return what a track of a metric shows: the sum of a counter, and the value of others."""
    return double(event.trace if kind_of(event.reference) in SUMS else event.value)


def _metadata(processes: list[_Process]) -> Iterator[dict[str, Any]]:
    for order, process in enumerate(processes):
        ended = "" if is_alive(process.recording) else f", ended with {process.recording.recorded.exit_code}"
        on_host = f" on {process.recording.host}" if process.recording.host else ""
        title = f"{process.recording.label}{on_host} (pid {process.recording.pid}{ended})"
        yield _meta("process_name", process.pid, 0, name=title)
        yield _meta("process_sort_index", process.pid, 0, sort_index=order)
        for tid, name in process.names.items():
            yield _meta("thread_name", process.pid, tid, name=name)
            yield _meta("thread_sort_index", process.pid, tid, sort_index=tid)


def _meta(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _about(recording: Recording, base: int, profiles: Sequence[Profile]) -> dict[str, Any]:
    return {
        "clock": "CLOCK_MONOTONIC",
        # One machine has one such clock. Profiles are on torch's own.
        "clock_error_bound_ns": max([recording.clock_error_ns, *(each.bound_ns for each in profiles)]),
        "first_slice_unix_us": (base + recording.wall_offset_ns) // 1000,
        "programs": [{"pid": each.pid, "command": each.command, "host": each.host} for each in recording.programs],
        "processes_read": [
            {
                "pid": each.pid,
                "label": each.label,
                "host": each.host,
                "events": len(each.recorded.events),
                "overwritten": each.recorded.lost,
            }
            for each in recording.processes
        ],
        "processes_not_read": [str(each) for each in recording.unread],
        "profiles": [
            {
                "pid": each.pid,
                "label": each.label,
                "problem": each.problem,
                "steps": each.steps,
                "clock_error_bound_ns": each.bound_ns,
            }
            for each in profiles
        ],
    }
