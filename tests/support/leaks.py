"""Leak check: a snapshot of processes, descriptors and files before and after a test, and their difference."""

from __future__ import annotations

import os
import stat
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from tests.support.ranks import KEPT_FDS, KEPT_PIDS

_OWN_RECORDING = frozenset(f"/memfd:monarch-{what} (deleted)" for what in ("recording", "stacks"))
# A process has one of each until its end, from its first span, metric, process or group on.
_NOT_OURS = "cuda.shm.", "sem.mp-"
"""Prefixes of files of the CUDA driver, which it may keep, and of multiprocessing, which may be another run's."""


@dataclass(frozen=True)
class Picture:
    """Snapshot of processes, of this process's descriptors (Unix sockets among them) and of names in /dev/shm."""

    processes: frozenset[int]  # of the whole machine: finding the parents takes long and is done for new processes only
    descriptors: frozenset[str]
    shared_memory: frozenset[str]


_HAS_PROC = os.path.isdir("/proc/self")


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    if not _HAS_PROC:
        for line in _ps("ppid="):
            pid, parent = map(int, line.split())
            found.setdefault(parent, []).append(pid)
        return found
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            # read thousands of times, for which pathlib is too slow
            with open(f"/proc/{name}/stat", "rb", buffering=0) as stat:
                fields = stat.read(512).rsplit(b")", 1)[1].split()
        except (OSError, IndexError):
            continue
        found.setdefault(int(fields[1]), []).append(int(name))
    return found


def _ps(*columns: str) -> list[str]:
    """Lines of ps about all processes but itself. The first column is the pid."""
    command = ["ps", "-ax", "-o", "pid=", *(word for column in columns for word in ("-o", column))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as ps:
        lines, _ = ps.communicate()
    return [line.strip() for line in lines.splitlines() if line.split()[0] != str(ps.pid)]


def _descendants(roots: set[int], children: dict[int, list[int]]) -> set[int]:
    found: set[int] = set()
    todo = list(roots)
    while todo:
        for child in children.get(todo.pop(), []):
            found.add(child)
            todo.append(child)
    return found


def children_of(pid: int) -> list[int]:
    """Return the running processes that this one has started."""
    return _children().get(pid, [])


def _command(pid: int) -> str:
    if not _HAS_PROC:
        return next((line.partition(" ")[2][:80] for line in _ps("command=") if line.split()[0] == str(pid)), "?")
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:80]
    except OSError:
        return "?"


def take() -> Picture:
    """Take a snapshot."""
    descriptors, descriptors_of_recording = set(), set()
    for name in os.listdir("/dev/fd"):
        if int(name) not in KEPT_FDS:
            try:
                target = os.readlink(f"/proc/self/fd/{name}") if _HAS_PROC else _kind(int(name))
            except OSError:
                continue  # the descriptor of /proc/self/fd itself
            if target in _OWN_RECORDING and target not in descriptors_of_recording:
                descriptors_of_recording.add(target)
                continue
            if not target.startswith("/dev/nvidia"):  # the driver keeps its descriptors after the first use of a GPU
                descriptors.add(f"{name} {target}")
    shm = {n for n in os.listdir("/dev/shm") if not n.startswith(_NOT_OURS)} if os.path.isdir("/dev/shm") else set()
    if _HAS_PROC:
        processes = frozenset(int(name) for name in os.listdir("/proc") if name.isdigit())
    else:
        processes = frozenset(int(line.split()[0]) for line in _ps())
    return Picture(processes, frozenset(descriptors), frozenset(shm))


def _kind(descriptor: int) -> str:
    """What it is, where that cannot be read from /proc."""
    status = os.fstat(descriptor)
    return f"{stat.S_IFMT(status.st_mode):o} {status.st_dev} {status.st_ino}"


def _ours(pids: frozenset[int]) -> set[int]:
    """Return the pids that descend from this process and are not in KEPT_PIDS."""
    if not pids:
        return set()
    children = _children()
    kept = KEPT_PIDS | _descendants(KEPT_PIDS, children)
    return (_descendants({os.getpid()}, children) - kept) & pids


def left_behind(before: Picture, patience: float = 10.0) -> list[str]:
    """Return what exists now and did not exist before. A process that is exiting gets ``patience`` seconds."""
    deadline = time.monotonic() + patience
    while True:
        after = take()
        left = [f"process {pid} {_command(pid)}" for pid in sorted(_ours(after.processes - before.processes))]
        left += [f"descriptor {d}" for d in sorted(after.descriptors - before.descriptors)]
        left += [f"/dev/shm/{s}" for s in sorted(after.shared_memory - before.shared_memory)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)
