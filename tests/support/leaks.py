"""Leak check: a snapshot of processes, descriptors and files before and after a test, and their difference."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from tests.support.ranks import KEPT_FDS, KEPT_PIDS

_DRIVER = "cuda.shm."  # prefix of the CUDA driver's own files, which it may keep


@dataclass(frozen=True)
class Picture:
    """Snapshot of processes, of this process's descriptors (Unix sockets among them) and of names in /dev/shm."""

    processes: frozenset[int]  # of the whole machine: finding the parents takes long and is done for new processes only
    descriptors: frozenset[str]
    shared_memory: frozenset[str]


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
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
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:80]
    except OSError:
        return "?"


def take() -> Picture:
    """Take a snapshot."""
    descriptors = set()
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in KEPT_FDS:
            try:
                target = os.readlink(f"/proc/self/fd/{name}")
            except OSError:
                continue  # the descriptor of /proc/self/fd itself
            if not target.startswith("/dev/nvidia"):  # the driver keeps its descriptors after the first use of a GPU
                descriptors.add(f"{name} {target}")
    shm = {n for n in os.listdir("/dev/shm") if not n.startswith(_DRIVER)} if os.path.isdir("/dev/shm") else set()
    processes = frozenset(int(name) for name in os.listdir("/proc") if name.isdigit())
    return Picture(processes, frozenset(descriptors), frozenset(shm))


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
