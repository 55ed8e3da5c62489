"""Processes that processes of a program have started by themselves, such as workers of a `DataLoader`.

They record nothing, so they are found in /proc, by their parents.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator

from monarch_backend._core import process_stat
from monarch_backend._telemetry import programs
from monarch_backend._telemetry.discovery import Owner, descriptor_named
from monarch_backend._telemetry.programs import ENDED, ChildProcess, Process, Program
from monarch_backend._telemetry.recording_area import AREA_NAME

_FORK_SERVER = b"monarch fork server"
_OF_MULTIPROCESSING = b"from multiprocessing.forkserver", b"from multiprocessing.resource_tracker"
"""Parts of the command lines of servers that run no code of the program. A worker keeps that of its server."""


def add_to(found: Iterable[Program]) -> None:
    """Set the children of running programs of this machine."""
    below: defaultdict[int, list[int]] | None = None
    for program in found:
        if below is None:
            below = _children_of_all()
        recorded = {each.pid for each in program.processes if each.state != ENDED}
        recorded |= {each["pid"] for each in program.starting}
        program.children = [
            child
            for process in program.processes
            if process.state != ENDED
            for child in _children(process, below, recorded)
        ]


def _children(process: Process, below: dict[int, list[int]], recorded: set[int]) -> Iterator[ChildProcess]:
    """Yield the processes below this one, up to those that record. The caller and its shells are left out."""
    waiting = [(pid, False) for pid in reversed(below.get(process.pid, ()))]
    while waiting:
        pid, is_of_server = waiting.pop()
        if pid in recorded or pid == os.getpid():
            continue
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read()
        except OSError:  # it has ended
            continue
        if command.startswith(_FORK_SERVER) or _has_own_area(pid):
            continue
        is_server = not is_of_server and any(part in command for part in _OF_MULTIPROCESSING)
        waiting += [(each, is_server) for each in reversed(below.get(pid, ()))]
        if not is_server and os.getpid() not in below.get(pid, ()):
            child = _child(pid, process, command)
            if child is not None:
                yield child


def _has_own_area(pid: int) -> bool:
    """Return whether a process is a program of its own. A fork may still have the descriptor of its parent's area."""
    descriptor = descriptor_named(pid, AREA_NAME)
    if descriptor is None:
        return False
    try:
        Owner(pid, descriptor).open().close()
    except (OSError, ValueError):
        return False
    return True


def _child(pid: int, ancestor: Process, command: bytes) -> ChildProcess | None:
    try:
        stat = process_stat.read(pid)
    except OSError:  # it has ended
        return None
    name = _printable(stat.name)
    is_python = _is_python(pid)
    if is_python and name.startswith("python"):
        name = " ".join(filter(None, [name, _script(command)]))
    memory, cpu, state = programs.usage(pid)
    started = stat.start_ticks / os.sysconf("SC_CLK_TCK")
    return ChildProcess(
        pid=pid, label=f"{name} of {ancestor.label}", name=name, state=state, parent=ancestor.pid,
        age=max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started), exit_code=None, memory=memory,
        cpu_seconds=cpu, activities=[], is_python=is_python,
    )  # fmt: skip


def _script(command: bytes) -> str:
    """Return the script or module in the command line of an interpreter, "" without one.

    >>> commands = "-B\\0dir/train.py\\0--fast", "-m\\0http.server", "-c\\0pass"
    >>> [_script(f"python\\0{each}\\0".encode()) for each in commands]
    ['train.py', 'http.server', '']
    """
    words = command.decode(errors="replace").split("\0")[1:]
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word == "-m":
            return _printable(after)
        if word == "-c":
            return ""
        if word and not word.startswith("-"):
            return _printable(os.path.basename(word))
    return ""


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text)


def _is_python(pid: int) -> bool:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith("python")
    except OSError:
        return False


def _children_of_all() -> defaultdict[int, list[int]]:
    """Return the pids of the children of each process of this machine, the oldest first."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
        with contextlib.suppress(OSError):  # it has ended
            found[process_stat.read(pid).parent].append(pid)
    return found
