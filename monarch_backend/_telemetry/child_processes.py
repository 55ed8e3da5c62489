"""Processes that processes of a program have started by themselves, such as workers of a `DataLoader`.

They record nothing, so they are found in /proc, by their parents.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator

from monarch_backend._telemetry import programs
from monarch_backend._telemetry.discovery import descriptor_named
from monarch_backend._telemetry.programs import ENDED, ChildProcess, Process, Program
from monarch_backend._telemetry.recording_area import AREA_NAME

MAX_CHILDREN = 1024
"""Child processes that a program shows."""

_FORK_SERVER = b"monarch fork server"
_MULTIPROCESSING = b"from multiprocessing.forkserver", b"from multiprocessing.resource_tracker"
"""Parts of the command lines of processes that run no code of the program. Their children may."""


def add_to(found: Iterable[Program]) -> None:
    """Set the children of running programs of this machine."""
    below: defaultdict[int, list[int]] | None = None
    for program in found:
        if below is None:
            below = _children_of_all()
        recorded = {each.pid for each in program.processes} | {each["pid"] for each in program.starting}
        program.children = []
        for process in program.processes:
            if process.state != ENDED:
                program.children += _children(process, below, recorded)
        del program.children[MAX_CHILDREN:]


def _children(process: Process, below: dict[int, list[int]], recorded: set[int]) -> Iterator[ChildProcess]:
    """Yield the processes below this one, up to those that record."""
    waiting = list(reversed(below.get(process.pid, ())))
    while waiting:
        pid = waiting.pop()
        if pid in recorded:
            continue
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read()
        except OSError:  # it has ended
            continue
        if command.startswith(_FORK_SERVER) or descriptor_named(pid, AREA_NAME) is not None:
            continue
        waiting += reversed(below.get(pid, ()))
        if not any(part in command for part in _MULTIPROCESSING):
            child = _child(pid, process)
            if child is not None:
                yield child


def _child(pid: int, ancestor: Process) -> ChildProcess | None:
    stat = _stat(pid)
    if stat is None:
        return None
    name, fields = stat
    memory, cpu, state = programs.usage(pid)
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return ChildProcess(
        pid=pid, label=f"{name} of {ancestor.label}", state=state, parent=ancestor.pid,
        age=max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started), exit_code=None, memory=memory,
        cpu_seconds=cpu, activities=[], is_python=_is_python(pid),
    )  # fmt: skip


def _is_python(pid: int) -> bool:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith("python")
    except OSError:
        return False


def _children_of_all() -> defaultdict[int, list[int]]:
    """Return the pids of the children of each process of this machine, the oldest first."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
        stat = _stat(pid)
        if stat is not None:
            found[int(stat[1][1])].append(pid)
    return found


def _stat(pid: int) -> tuple[str, list[str]] | None:
    """Return the name of a process, and the fields of /proc/PID/stat from its state on. None: it has ended."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            text = file.read()
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    return name, rest.split()
