"""Dumps of recorded collectives in the format of torch's flight recorder, for torch.distributed.flight_recorder.

A collective that took less than 0.1 ms may have no event. A rank's count says that it has left it, and another rank's
event says what it was. So such an entry has a state, and no times.
"""

from __future__ import annotations

import os
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from monarch_backend._telemetry import stacks
from monarch_backend._telemetry.kinds import POINT_TO_POINT, Kind, State, Status
from monarch_backend._telemetry.labels import fold_labels, numbers_of
from monarch_backend._telemetry.payloads import Payload
from monarch_backend._telemetry.program_recording import ProcessRecording, Recording, is_alive
from monarch_backend._telemetry.recorder import GROUP_RANKS

VERSION = "2.10"
"""Version of the format, as torch 2.13 writes it."""

FILE_PREFIX = "rank_"

_WORLD = "group 0"
_C10D = os.path.join("torch", "distributed", "distributed_c10d.py")
_LIBRARY = "gloo"  # the analyser refuses names that it does not know
# torch's names of dtypes, and the bytes of an element. Of other dtypes the bytes are counted.
_DTYPES = {
    "float64": ("Double", 8), "float32": ("Float", 4), "bfloat16": ("BFloat16", 2), "float16": ("Half", 2),
    "int8": ("Char", 1), "uint8": ("Byte", 1), "int16": ("Short", 2), "uint16": ("UInt16", 2), "int32": ("Int", 4),
    "uint32": ("UInt32", 4), "int64": ("Long", 8), "uint64": ("UInt64", 8), "bool": ("Bool", 1),
    "complex64": ("ComplexFloat", 8), "complex128": ("ComplexDouble", 16), "float8_e4m3fn": ("Float8_e4m3fn", 1),
    "float8_e5m2": ("Float8_e5m2", 1), "float8_e4m3fnuz": ("Float8_e4m3fnuz", 1),
    "float8_e5m2fnuz": ("Float8_e5m2fnuz", 1),
}  # fmt: skip
_UNKNOWN_DTYPE = "Byte", 1
_SCHEDULED, _STARTED, _COMPLETED = "scheduled", "started", "completed"


@dataclass
class _Entered:
    """A collective that a rank has entered. ``end`` is None while it goes on, and if it has failed.

    ``state``: torch's word for it. An accelerator's collectives are "scheduled", because their ends are not recorded.
    """

    operation: str
    dtype: str | None
    size: int
    start: int | None
    end: int | None
    state: str


@dataclass
class _Member:
    """What one rank has done in a group. Collectives up to number ``left`` are in ``ended_state``.

    ``entered`` has what is known of a collective, by its number.
    """

    left: int
    ended_state: str
    entered: dict[int, _Entered] = field(default_factory=dict)


@dataclass
class Dumps:
    """Dumps by rank of the world, and the processes that they are from."""

    of_rank: dict[int, dict[str, Any]]
    processes: dict[int, ProcessRecording]

    def write(self, folder: str) -> None:
        """Write a file for each rank. Raises OSError, FileExistsError if the folder has files."""
        os.makedirs(folder, exist_ok=True)
        if os.listdir(folder):
            raise FileExistsError(f"{folder} is not empty, and its files would be analysed too: name a new folder")
        for rank, dump in self.of_rank.items():
            with open(os.path.join(folder, f"{FILE_PREFIX}{rank}"), "wb") as file:
                pickle.dump(dump, file)

    def add_stacks(self, read: Callable[[str, list[int]], list[stacks.Stacks]]) -> None:
        """Ask the ranks that are in a collective for their stacks, and give these to its entry.

        ``read`` returns the stacks of processes of a host, "" for this machine.
        """
        asked = defaultdict[str, list[tuple[dict[str, Any], int]]](list)
        for rank, dump in self.of_rank.items():
            entries = [entry for entry in dump["entries"] if entry["state"] == "started"]
            process = self.processes[rank]
            if entries and is_alive(process):
                asked[process.host].append((entries[-1], process.pid))
        for host, members in asked.items():
            found = read(host, [pid for _, pid in members])
            for (entry, _), each in zip(members, found, strict=True):
                entry["frames"] = _frames(each)


def _frames(found: stacks.Stacks) -> list[dict[str, Any]]:
    """Return the calls of the thread that is in a collective, the innermost first. Empty if none is, or no answer."""
    for thread in found.threads:
        if any(frame.file.endswith(_C10D) for frame in thread.frames):
            return [
                {"name": frame.function, "filename": frame.file, "line": frame.line}
                for frame in reversed(thread.frames)
            ]
    return []


def dumps(recording: Recording) -> Dumps:
    """Return the dumps of a recording. Raises LookupError if it has no process groups, or those of several jobs."""
    ranks = _ranks(recording)
    groups: dict[tuple[str, tuple[int, ...]], dict[int, _Member]] = defaultdict(dict)
    for rank, process in ranks.items():
        members = _recorded_members(process)
        for name, member in _members(process).items():
            groups[name, members.get(name, ())][rank] = member
    made = Dumps({rank: _empty() for rank in ranks}, ranks)
    for number, ((name, of_host), present) in enumerate(sorted(groups.items())):
        _add_group(made.of_rank, number, name, list(of_host) or sorted(present), present, recording)
    for dump in made.of_rank.values():
        dump["entries"].sort(key=lambda entry: entry["time_created_ns"])
        for record, entry in enumerate(dump["entries"]):
            entry["record_id"] = record
    return made


def _ranks(recording: Recording) -> dict[int, ProcessRecording]:
    """Return the latest process of each rank of the world."""
    found: dict[int, ProcessRecording] = {}
    for process in sorted(recording.processes, key=lambda each: (is_alive(each), each.recorded.started_ns)):
        for each in process.recorded.activities:
            if each.kind == Kind.COLLECTIVE and each.name == _WORLD:
                before = found.get(each.rank)
                if before is not None and before is not process and is_alive(before):
                    both = f"{before.label} (pid {before.pid}) and {process.label} (pid {process.pid})"
                    raise LookupError(f"rank {each.rank} is in several jobs: {both}. Name one program")
                found[each.rank] = process
    if not found:
        read = fold_labels(each.label for each in recording.processes) or "none"
        raise LookupError(f"no process has a group of backend='monarch'; processes read: {read}")
    return dict(sorted(found.items()))


def _recorded_members(process: ProcessRecording) -> dict[str, tuple[int, ...]]:
    """Return the ranks of the world that share memory in each group. Those of a very large group are not recorded."""
    parts = (text.partition(GROUP_RANKS) for text in process.recorded.names)
    return {name: tuple(sorted(numbers_of(ranks))) for name, between, ranks in parts if between}


def _members(process: ProcessRecording) -> dict[str, _Member]:
    """Return what a process has done in each of its groups. A group's cell counts, and its events tell the rest."""
    found: dict[str, _Member] = {}
    for each in process.recorded.activities:
        if each.kind == Kind.COLLECTIVE and each.detail not in POINT_TO_POINT:
            going_on = each.state != State.IDLE
            member = found[each.name] = _Member(each.reference - going_on, _ended_state(each.payload))
            if going_on:
                member.entered[each.reference] = _Entered(
                    each.detail, each.payload.dtype, each.value, each.since_ns, None, _STARTED
                )
    for event in process.events(Kind.COLLECTIVE):
        if event.detail not in POINT_TO_POINT and event.name in found:
            state = _STARTED if event.status != Status.OK else _ended_state(event.payload)
            start = event.end_ns - event.duration_ns
            end = event.end_ns if state == _COMPLETED else None
            found[event.name].entered[event.reference] = _Entered(
                event.detail, event.payload.dtype, event.value, start, end, state
            )
    return found


def _ended_state(payload: Payload) -> str:
    return _SCHEDULED if payload.is_only_enqueued else _COMPLETED


def _empty() -> dict[str, Any]:
    return {"version": VERSION, "comm_lib_version": "", "pg_config": {}, "pg_status": {}, "entries": []}


def _add_group(
    of_rank: dict[int, dict[str, Any]], number: int, name: str, all_members: list[int], present: dict[int, _Member],
    recording: Recording,
) -> None:  # fmt: skip
    title = name.removeprefix("group ")
    about = "default_pg" if name == _WORLD else "undefined"
    known: dict[int, _Entered] = {}
    for member in present.values():
        known |= member.entered
    for rank, member in present.items():
        dump = of_rank[rank]
        dump["pg_config"][title] = {"name": title, "desc": about, "ranks": str(all_members)}
        last = max([member.left, *member.entered])
        dump["pg_status"][str(number)] = {
            "last_enqueued_collective": last,
            "last_started_collective": last if member.ended_state == _COMPLETED else -1,
            "last_completed_collective": member.left if member.ended_state == _COMPLETED else -1,
        }  # fmt: skip
        created = 0  # that of a collective that goes on has the resolution of some milliseconds
        for sequence, entered in _entries(member, known):
            start = known[sequence].start if entered.start is None else entered.start
            created = max(created, (start or 0) + recording.wall_offset_ns)
            entry = _entry(entered, sequence, len(all_members), created, recording.wall_offset_ns)
            dump["entries"].append({**entry, "pg_id": number, "process_group": (title, about)})


def _entries(member: _Member, known: dict[int, _Entered]) -> Iterator[tuple[int, _Entered]]:
    for sequence, other in sorted(known.items()):
        if sequence in member.entered:
            yield sequence, member.entered[sequence]
        elif sequence <= member.left:
            yield sequence, _Entered(other.operation, other.dtype, other.size, None, None, member.ended_state)


def _entry(entered: _Entered, sequence: int, size: int, created: int, wall_offset: int) -> dict[str, Any]:
    dtype, element = _DTYPES.get(entered.dtype or "", _UNKNOWN_DTYPE)
    numel = entered.size // element  # shapes are not recorded
    whole, part = [[numel * size]], [[numel]]
    return {
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": sequence,
        "is_p2p": False,
        "profiling_name": f"{_LIBRARY}:{entered.operation}",
        "time_created_ns": created,
        "time_discovered_started_ns": None if entered.start is None else entered.start + wall_offset,
        "time_discovered_completed_ns": None if entered.end is None else entered.end + wall_offset,
        "duration_ms": None if entered.start is None or entered.end is None else (entered.end - entered.start) / 1e6,
        "input_sizes": whole if entered.operation == "reduce_scatter" else part,
        "output_sizes": whole if entered.operation == "all_gather" else part,
        "input_dtypes": [dtype],
        "output_dtypes": [dtype],
        "state": entered.state,
        "retired": entered.state == _COMPLETED,
        "timeout_ms": 0,
        "frames": [],
    }
