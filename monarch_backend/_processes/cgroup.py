"""Control groups of this process: paths of their files and the values in them, for both versions.

Containers and batch systems set limits with control groups. This module only reads; unreadable files count as absent.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def directories(controller: str, root: Path = ROOT, membership: Path = MEMBERSHIP) -> Iterator[Path]:
    """Yield directories that count this process for ``controller`` ("memory", "pids"): its own, its parent, up to the
    root.

    In a container that sees only its part of the tree the path in ``membership`` does not exist. The root, which is
    then the container's own group, is found all the same.
    """
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return
    v1 = next((path for _, names, path in lines if controller in names.split(",")), None)
    v2 = next((path for _, names, path in lines if not names), None)
    if v1 is not None:
        base, path = root / controller, v1
    elif v2 is not None:
        base, path = root, v2
    else:
        return
    parts = Path(path).parts[1:]
    for depth in range(len(parts), -1, -1):
        directory = base.joinpath(*parts[:depth])
        if directory.is_dir():
            yield directory


def number(file: Path) -> int | None:
    """Return the number in a file; None if there is none ("max") or no such file."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def field(file: Path, name: str) -> int | None:
    """Return the number after ``name`` in a file of lines like ``oom_kill 3``; None if it is not there.

    A unit behind the number is ignored: those of /proc/meminfo are KiB.
    """
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((int(words[1]) for words in map(str.split, lines) if len(words) > 1 and words[0] == name), None)


class OomKills:
    """Counter of out-of-memory kills by the kernel, and whether it has grown.

    The counter is that of this process's memory group, or the host's where there is none. It does not tell which
    process was killed: use it after a SIGKILL that this program has not sent.
    """

    def __init__(self, root: Path = ROOT, membership: Path = MEMBERSHIP, host: Path = Path("/proc/vmstat")) -> None:
        files = [
            directory / name
            for directory in directories("memory", root, membership)
            for name in ("memory.events", "memory.oom_control")
        ]
        self._file = next((file for file in files if field(file, "oom_kill") is not None), host)
        self._seen = self._read()

    def _read(self) -> int:
        return field(self._file, "oom_kill") or 0

    def again(self) -> bool:
        before, self._seen = self._seen, self._read()
        return self._seen > before
