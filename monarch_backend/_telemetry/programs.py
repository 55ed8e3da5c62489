"""Running programs of this machine as trees: program, processes, what their actors do.

All of it is read from recording areas and /proc. No process has to answer, so it works while a program hangs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from monarch_backend._core import process_stat
from monarch_backend._telemetry import discovery
from monarch_backend._telemetry.kinds import Kind, SlotState, State
from monarch_backend._telemetry.labels import fold_labels
from monarch_backend._telemetry.reader import Activity, Area, RecordedProcess

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


RUNNING = "running"
"""State of a process that runs or sleeps."""

ENDED = "ended"
"""State of a process that has ended."""

HELD_STATES = {"T": "stopped", "t": "traced", "D": "uninterruptible", "Z": "zombie"}
"""States of processes that have not ended and execute nothing, by the kernel's letter in /proc/PID/stat."""

STARTING = "starting"
"""State of a process that was asked for, and has not begun to record."""

LOST = "lost"
"""State of an activity that had not ended when its process did."""

IS_ASYNC = "is_async"
"""Key of an activity: a coroutine of a running process handles the message. JSON output does not have it."""


@dataclass
class Process:
    """A process of a program. Times are in seconds, memory in bytes. ``parent`` is the pid of its starter.

    gpu_memory.py fills ``gpu_memory``, where asked. ``restarts`` is the number of processes that had its rank before.
    """

    pid: int
    label: str
    state: str
    parent: int
    age: float
    exit_code: int | None
    memory: int | None
    cpu_seconds: float | None
    activities: list[dict[str, Any]]
    gpu_memory: int | None = None
    restarts: int = 0


@dataclass
class ChildProcess(Process):
    """A process that the process ``parent`` has started by itself, or one of its children has. It records nothing.

    Its ``label`` is its ``name`` with the label of ``parent``.
    """

    name: str = ""
    is_python: bool = True


@dataclass
class Program:
    """A program: its own process comes first in ``processes``. ``host``: where it runs, "" for this machine.

    ``starting`` has processes that are being started. ``parent`` is the pid of the starter, and ``pid`` is None until
    the fork server has made the process. late_ranks.py fills ``late`` and ``slow``, where asked, and child_processes.py
    fills ``children``.
    """

    pid: int
    command: str
    processes: list[Process]
    host: str = ""
    late: list[dict[str, Any]] = field(default_factory=list)
    slow: list[dict[str, Any]] = field(default_factory=list)
    starting: list[dict[str, Any]] = field(default_factory=list)
    children: list[ChildProcess] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.pid} ({self.command[:60]})"

    @property
    def key(self) -> tuple[str, int]:
        """What tells it from all others: hosts may use the same pids."""
        return self.host, self.pid

    def has(self, pids: Collection[int]) -> bool:
        """Return whether one of its processes has one of these pids."""
        return any(process.pid in pids for process in self.processes)

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        for process in found["processes"]:
            process["activities"] = activities_as_json(process["activities"])
        return found


def activities_as_json(activities: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return activities without the keys that only the commands use."""
    return [{key: value for key, value in each.items() if key != IS_ASYNC} for each in activities]


def programs() -> list[Program]:
    """Return the running programs of this user that record. Raises NotImplementedError without /proc."""
    found: dict[int, Program] = {}
    nested: list[Program] = []
    for area in discovery.areas():
        processes = [_process(each, area.owner) for each in area.processes()]
        program = Program(area.owner, area.program, processes, starting=_starting(area))
        if any(process.pid == area.owner for process in processes):
            found[area.owner] = program
        else:
            nested.append(program)
    while nested:  # processes that actors have started, in any depth
        placed = [each for each in nested if _place(found, each)]
        nested = [each for each in nested if each not in placed]
        if not placed:
            break
    for program in nested:  # of a daemon's agent: its controller is a program elsewhere
        program.command = _command(program.pid)
        found[program.pid] = program
    return [found[pid] for pid in sorted(found)]


def select(name: str | None) -> list[Program]:
    """Return the programs that ``name`` stands for: a pid of any of its processes, or a part of its command.

    None stands for all. Raises LookupError, with the names that there are, if none matches.
    """
    all_programs = programs()
    if name is None:
        return all_programs
    if name.isdecimal():
        chosen = of_pid(all_programs, int(name))
    else:
        chosen = [each for each in all_programs if name in each.command]
    if not chosen:
        raise LookupError(
            f"no running program is {name!r}; programs of this user on this machine: {listed(all_programs)}. "
            "A program is there from its first process or process group on"
        )
    return chosen


def of_pid(programs: Iterable[Program], pid: int) -> list[Program]:
    """Return the programs with this process: that in which it runs, or else those in which it has ended.

    A system gives the pids of ended processes to later ones.
    """
    having = [program for program in programs if program.has([pid])]
    running = [
        program for program in having if any(each.pid == pid and each.state != ENDED for each in program.processes)
    ]
    return running or having


def listed(programs: Iterable[Program]) -> str:
    """Return the programs as text for an error."""
    return ", ".join(map(str, programs)) or "none"


def starting_in_words(program: Program) -> str:
    """Return "starting for 4 s: gpus 0-1", with the oldest of the processes that are being started, or ""."""
    if not program.starting:
        return ""
    oldest = max(each["seconds"] for each in program.starting)
    return f"{STARTING} for {oldest:.0f} s: {fold_labels(each['label'] for each in program.starting)}"


def _place(found: dict[int, Program], nested: Program) -> bool:
    for program in of_pid(found.values(), nested.pid):
        program.processes += nested.processes
        program.starting += nested.starting
        return True
    return False


def _starting(area: Area) -> list[dict[str, Any]]:
    now = time.monotonic_ns()
    return [
        {
            "label": each.label, "pid": each.pid or None, "parent": area.owner, "state": STARTING,
            "seconds": max(0.0, (now - each.since_ns) / 1e9),
        }
        for each in area.starting()
    ]  # fmt: skip


def _process(recorded: RecordedProcess, owner: int) -> Process:
    now, is_alive = time.monotonic_ns(), recorded.state == SlotState.ALIVE
    memory, cpu, state = usage(recorded.pid) if is_alive else (None, None, ENDED)
    return Process(
        pid=recorded.pid,
        label=recorded.label,
        state=state,
        parent=owner if recorded.pid != owner else 0,
        age=(now - recorded.started_ns) / 1e9,
        exit_code=None if is_alive else recorded.exit_code,
        memory=memory,
        cpu_seconds=cpu,
        activities=[
            _activity(each, now if is_alive else recorded.last_ns, is_alive, recorded.identity)
            for each in recorded.activities
            if each.kind != Kind.SPAN or each.state != State.IDLE
        ],
        restarts=recorded.restarts,
    )


def activity_state(activity: Activity, *, is_alive: bool) -> str:
    """Return the state of an activity in readers: one that had not ended with its process is `LOST`."""
    return State(activity.state).title if is_alive or activity.state in (State.IDLE, State.FAILED) else LOST


def name_of_call(caller: int, number: int) -> str:
    """Return the ``call`` of an activity, from the identity of the caller's process and the call's number."""
    return f"{caller:x}.{number}"


def _activity(activity: Activity, now: int, is_alive: bool, identity: int) -> dict[str, Any]:
    """Return an activity as it was at time ``now``, the present or the end of its process.

    The wait for a call and its messages have the same ``call``. ``identity`` is that of the process.
    """
    caller = {Kind.WAIT: identity, Kind.MESSAGE: activity.trace}.get(Kind(activity.kind), 0)
    is_of_call = caller and activity.reference and activity.state != State.IDLE
    return {
        "kind": Kind(activity.kind).title,
        "name": activity.name,
        "rank": activity.rank,
        "state": activity_state(activity, is_alive=is_alive),
        "detail": activity.detail if activity.state != State.IDLE else "",
        "seconds": max(0.0, (now - activity.since_ns) / 1e9),
        "ended": activity.count,
        "call": name_of_call(caller, activity.reference) if is_of_call else "",
        "queue": activity.queue,
        **({IS_ASYNC: True} if activity.is_async and is_alive and activity.state != State.IDLE else {}),
        **({"median_seconds": activity.value / 1e9, "window": activity.waiting} if activity.kind == Kind.STEP else {}),
    }


def usage(pid: int) -> tuple[int | None, float | None, str]:
    """Return the resident memory, the processor time and the state of a process that has not ended."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            memory = int(file.read().split()[1]) * _PAGE
        stat = process_stat.read(pid)
    except (OSError, IndexError):
        return None, None, RUNNING
    return memory, stat.cpu_ticks / _TICKS, HELD_STATES.get(stat.state, RUNNING)


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
