"""All that the processes of running programs have recorded: the source of traces and of SQL tables.

Times are in nanoseconds of CLOCK_MONOTONIC, one clock for all processes of a machine. `Recording.seen_from` converts
those of another machine.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from monarch_backend import _native
from monarch_backend._telemetry import discovery
from monarch_backend._telemetry.kinds import Kind, SlotState, State
from monarch_backend._telemetry.programs import Process, Program, programs, select
from monarch_backend._telemetry.reader import ALL_EVENTS, Activity, EventFilter, RecordedEvent, RecordedProcess

CONSTRUCTOR = "__init__"
"""Detail of the event and activity of an actor's construction."""


@dataclass(eq=False)
class ProcessRecording:
    """A process with its events and activities. ``parent`` is the pid of its starter, 0 for the program's own."""

    recorded: RecordedProcess
    program: Program
    process: Process

    actor_of_thread: dict[int, str] = field(init=False)
    rank_of_actor: dict[str, int | None] = field(init=False)
    _events_of_kind: dict[int, list[RecordedEvent]] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.actor_of_thread = self._actors_of_threads()
        self.rank_of_actor = self._ranks_of_actors()

    @property
    def pid(self) -> int:
        return self.recorded.pid

    @property
    def label(self) -> str:
        return self.recorded.label

    @property
    def host(self) -> str:
        """Host of the process, "" for this machine."""
        return self.program.host

    def events(self, kind: Kind) -> list[RecordedEvent]:
        """Return the events of a kind, oldest first."""
        if self._events_of_kind is None:
            self._events_of_kind = defaultdict(list)
            for event in self.recorded.events:
                self._events_of_kind[event.kind].append(event)
        return self._events_of_kind.get(kind, [])

    def going_on(self, kind: Kind) -> Iterator[Activity]:
        """Yield the activities of a kind that have not ended. Those of an ended process ended with it."""
        return (each for each in self.recorded.activities if each.kind == kind and each.state != State.IDLE)

    def senders(self) -> set[int]:
        """Return the identities of the processes whose messages this one has handled or handles. 0 is unknown."""
        return {each.trace for each in self.events(Kind.MESSAGE)} | {each.trace for each in self.going_on(Kind.MESSAGE)}

    def _actors_of_threads(self) -> dict[int, str]:
        names = defaultdict[int, set[str]](set)
        for thread, name in {(event.thread, event.name) for event in self.events(Kind.MESSAGE)}:
            names[thread].add(name)
        return {thread: found.pop() for thread, found in names.items() if len(found) == 1}

    def _ranks_of_actors(self) -> dict[str, int | None]:
        ranks = defaultdict[str, set[int]](set)
        for activity in self.recorded.activities:
            if activity.kind == Kind.MESSAGE:
                ranks[activity.name].add(activity.rank)
        for kind in (Kind.MESSAGE, Kind.ACTOR):  # of an actor that has ended, its rank is not recorded
            for name in dict.fromkeys(event.name for event in self.events(kind)):
                ranks.setdefault(name, set())
        return {name: found.pop() if len(found) == 1 else None for name, found in ranks.items()}

    def actor_on(self, thread: int) -> str | None:
        """Return the actor whose messages a thread handles, None for other threads."""
        return self.actor_of_thread.get(thread)

    def thread_of(self, actor: str) -> int | None:
        """Return the thread that handles an actor's messages, None if that is unknown."""
        return next((thread for thread, name in self.actor_of_thread.items() if name == actor), None)


@dataclass(frozen=True)
class Unread:
    """A process without data in an answer, and the reason. ``pid`` is 0 if it is unknown."""

    pid: int
    label: str
    reason: str

    def __str__(self) -> str:
        return f"{self.label or f'pid {self.pid}'}: {self.reason}"


THIS_MACHINE = "this machine"
"""Name of the machine of the reader among the hosts of an answer."""


@dataclass(frozen=True)
class AskedHost:
    """A host that was asked for an answer. ``reason`` says why it has not answered, and is empty if it has.

    >>> from monarch_backend.telemetry import AskedHost
    >>> AskedHost("trainers[1] (gpu-2)", "it does not accept a connection").has_answered
    False
    """

    name: str
    reason: str = ""

    @property
    def has_answered(self) -> bool:
        """Whether the answer has what the host has recorded."""
        return not self.reason

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}" if self.reason else self.name


@dataclass
class Recording:
    """What was read, at time ``now_ns``. Wall time in nanoseconds is a time here plus ``wall_offset_ns``.

    Times of processes on other machines may be wrong by ``clock_error_ns``. ``is_past``: it was read from a file,
    so other processes may have its pids now. ``hosts`` are all that were asked.
    """

    programs: list[Program]
    processes: list[ProcessRecording]
    unread: list[Unread]
    now_ns: int
    wall_offset_ns: int
    clock_error_ns: int = 0
    is_past: bool = False
    hosts: list[AskedHost] = field(default_factory=list)

    def seen_from(self, host: str, ahead_ns: int) -> None:
        """Name the host of all programs, and convert the times: its clock is ahead of the reader's by ``ahead_ns``."""
        self.hosts = [AskedHost(host)]
        for program in self.programs:
            program.host = host
        for process in self.processes:
            recorded = process.recorded
            recorded.ahead_ns = ahead_ns
            recorded.started_ns -= ahead_ns
            recorded.read_ns -= ahead_ns
            recorded.ended_ns -= ahead_ns if recorded.ended_ns else 0
            recorded.activities = [replace(each, since_ns=each.since_ns - ahead_ns) for each in recorded.activities]
            recorded.events = [each._replace(end_ns=each.end_ns - ahead_ns) for each in recorded.events]
            process._events_of_kind = None
        self.unread = [replace(each, label=f"{each.label or f'pid {each.pid}'} on {host}") for each in self.unread]

    def remove(self, processes: Collection[Process]) -> None:
        """Remove processes, which then seem not to exist."""
        pids = {each.pid for each in processes}
        self.processes = [each for each in self.processes if each.pid not in pids]
        for program in self.programs:
            program.processes = [each for each in program.processes if each.pid not in pids]

    def add(self, other: Recording) -> None:
        """Add what was read on another host, with times of this one's clock."""
        self.programs += other.programs
        self.processes += other.processes
        self.unread += other.unread
        self.hosts += other.hosts
        self.clock_error_ns = max(self.clock_error_ns, other.clock_error_ns)

    def note_no_answer(self, host: str, reason: str) -> None:
        """Note that a host has answered before, and does not any more."""
        self.hosts = [AskedHost(host, reason) if each.name == host else each for each in self.hosts]

    def senders(self) -> dict[tuple[int, int], tuple[ProcessRecording, RecordedEvent]]:
        """Return the SENT events by the sender's identity and the number of the call.

        A message without reply has the number 0, and is left out.
        """
        return {
            (process.recorded.identity, event.reference): (process, event)
            for process in self.processes
            for event in process.events(Kind.SENT)
            if event.reference
        }

    def by_identity(self) -> dict[int, ProcessRecording]:
        """Return the processes by the number with which events refer to them."""
        return {each.recorded.identity: each for each in self.processes if each.recorded.identity}


def read(name: str | None, wanted: EventFilter | None = ALL_EVENTS) -> Recording:
    """Read the wanted events of the programs that ``name`` stands for, as `programs.select` does.

    Raises LookupError if there is no such program, and NotImplementedError without /proc.
    """
    recording = read_programs(select(name), wanted)
    if name is None:
        recording.unread += _of_other_releases()
    return recording


def _of_other_releases() -> Iterator[Unread]:
    for owner in discovery.owners():
        try:
            owner.open().close()
        except OSError:  # it has just ended
            continue
        except ValueError as error:
            yield Unread(owner.pid, "", str(error))


def read_pids(pids: Iterable[int], events: EventFilter | None = ALL_EVENTS) -> Recording:
    """Read the programs with these processes. Processes that record nothing are among those that were not read.

    Raises NotImplementedError without /proc.
    """
    wanted, there = dict.fromkeys(pids), programs()
    chosen = [program for program in there if program.has(wanted)]
    recording = read_programs(chosen, events)
    found = {process.pid for program in chosen for process in program.processes}
    recording.unread += [Unread(pid, "", "it records nothing, or has ended") for pid in wanted if pid not in found]
    return recording


def read_programs(chosen: list[Program], wanted: EventFilter | None = ALL_EVENTS) -> Recording:
    """Read these programs, with the wanted events, or without events. Raises NotImplementedError without /proc."""
    program_of = {process.pid: (program, process) for program in chosen for process in program.processes}
    program_of_owner = {pid: program for pid, (program, _) in program_of.items()}
    program_of_owner.update({program.pid: program for program in chosen})
    processes: list[ProcessRecording] = []
    unread: list[Unread] = []
    for owner in discovery.owners():
        program = program_of_owner.get(owner.pid)
        if program is None:
            continue
        known = {(each.parent or each.pid, each.pid): each for each in program.processes}
        try:
            with owner.open() as area:
                for recorded in area.processes(wanted=wanted):
                    process = known.get((area.owner, recorded.pid))
                    if process is None:  # started after the look at the programs
                        continue
                    processes.append(ProcessRecording(recorded, program, process))
                unread += [
                    Unread(each.pid, each.label, "it is being started, and records nothing yet")
                    for each in area.starting()
                ]
        except (OSError, ValueError) as error:
            unread.append(Unread(owner.pid, "", f"its recording cannot be read: {error}"))
    # In a mesh, the slots have the order of the ranks; their starts have not.
    processes.sort(
        key=lambda each: (each.program.pid, each.process.parent != 0, each.process.parent, each.recorded.index)
    )
    now = _native.monotonic_ns()
    return Recording(chosen, processes, unread, now, time.time_ns() - now, hosts=[AskedHost(THIS_MACHINE)])


def of_this_process() -> str | None:
    """Return the name by which `read` finds the program of this process, None if it records nothing."""
    own = os.getpid()
    return str(own) if any(p.pid == own for each in programs() for p in each.processes) else None


def double(bits: int) -> float:
    """Return the double whose bits an event has.

    >>> double(4612811918334230528)
    2.5
    """
    return float(struct.unpack("=d", struct.pack("=Q", bits))[0])


def is_alive(process: ProcessRecording) -> bool:
    """Return whether the process had not ended."""
    return process.recorded.state == SlotState.ALIVE


def attributes_of(detail: str) -> dict[str, Any]:
    """Return the attributes of a span or metric.

    >>> attributes_of('{"shard":3}'), attributes_of("")
    ({'shard': 3}, {})
    """
    try:
        found = json.loads(detail, parse_constant=str) if detail else {}
    except ValueError:
        return {"attributes": detail}
    return found if isinstance(found, dict) else {"attributes": found}
