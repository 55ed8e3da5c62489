"""Check of the system's limits before processes are started.

A system that has too many processes gets slow, kills other programs, or fails halfway; an error beforehand is better.
Only a start that is sure to fail is refused: the needs below are those of idle processes.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from monarch_backend._core import platform
from monarch_backend._core.errors import public
from monarch_backend._core.limits import ResourceLimitError
from monarch_backend._processes import cgroup

PROC = Path("/proc")

# A process has its main thread and, once it has a connection, one that waits for messages.
TASKS_PER_PROCESS = 2
# Private memory of an idle process from the fork server, page tables included (measured: 5.5 MiB).
MEMORY_BYTES_PER_PROCESS = 6 << 20
MEMORY_EACH_SPAWNED = 150 << 20  # one that has imported torch by itself


MACOS_OPEN_FILES = 10240
"""OPEN_MAX of macOS: it accepts no higher limit where the hard limit is infinite."""

MAX_PROCESSES_PER_HOST = 1 << 16
"""Limit for a host with unknown limits: Linux has 2**22 process ids at most, and each process needs MEMORY_EACH."""


@public("monarch_backend.actor")
class SpawnLimitError(ResourceLimitError):
    """More processes were requested than the system has room for. None were started.

    `HostMesh.spawn_procs` raises it. The text names the limit, its value, and the number of processes that would fit.

    >>> from monarch_backend.actor import SpawnLimitError, this_host
    >>> try:
    ...     this_host().spawn_procs({"gpus": 10**6})
    ... except SpawnLimitError as error:
    ...     print(str(error).partition(":")[0])
    can't start 1000000 processes
    """


@dataclass(frozen=True)
class Limit:
    """A limit: ``room`` is left, ``name`` is the limit's source, and each process needs ``each``."""

    name: str
    room: int
    each: int
    unit: str
    scale: int = 1  # size of one ``unit``


def check(count: int, limits: Iterable[Limit]) -> None:
    """Raise SpawnLimitError if ``count`` processes do not fit into one of ``limits``.

    >>> import monarch_backend.actor  # names the error
    >>> check(100, [Limit("pids.max of the control group /", 50, TASKS_PER_PROCESS, "processes and threads")])
    Traceback (most recent call last):
    monarch_backend.actor.SpawnLimitError: can't start 100 processes: they need 200 processes and threads, \
and pids.max of the control group / leaves 50. Start at most 25, or raise the limit.
    """
    for limit in limits:
        need, room = count * limit.each, max(0, limit.room)
        if need > room:
            raise SpawnLimitError(
                f"can't start {count} processes: they need {need // limit.scale} {limit.unit}, and {limit.name} leaves "
                f"{room // limit.scale}. Start at most {room // limit.each}, or raise the limit."
            )


@dataclass(frozen=True)
class System:
    """Source of the readings; tests replace it."""

    proc: Path = Path("/proc")
    cgroups: Path = cgroup.ROOT
    rlimit: Callable[[int], tuple[int, int]] = resource.getrlimit
    uid: int | None = None

    def limits(
        self, count: int, memory_each: int = MEMORY_BYTES_PER_PROCESS, descriptors_each: int = 0
    ) -> Iterator[Limit]:
        """Yield the current limits. ``count`` avoids costly readings where the cheap ones suffice."""
        yield from self.memory(memory_each)
        yield from self._tasks(count)
        if descriptors_each:
            used = len(os.listdir(self.proc / "self/fd")) if (self.proc / "self/fd").is_dir() else 0
            yield from self._open_files(descriptors_each, used)

    def limits_without_proc(self, descriptors_each: int) -> Iterator[Limit]:
        """Yield the limits that are known without /proc, where each process is spawned. What is in use is not known."""
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        yield Limit("the memory of the host", total, MEMORY_EACH_SPAWNED, "MiB of memory", 1 << 20)
        yield from self._open_files(descriptors_each, 0)
        soft, _ = self.rlimit(resource.RLIMIT_NPROC)
        if soft != resource.RLIM_INFINITY:
            yield Limit("RLIMIT_NPROC (ulimit -u)", soft, 1, "processes")

    def _open_files(self, each: int, used: int) -> Iterator[Limit]:
        soft, _ = self.rlimit(resource.RLIMIT_NOFILE)
        if each and soft != resource.RLIM_INFINITY:
            yield Limit("RLIMIT_NOFILE (ulimit -n)", soft - used, each, "open files")

    def memory(self, each: int) -> Iterator[Limit]:
        """Yield the limits of memory: of the host, and of each control group."""
        available = cgroup.field(self.proc / "meminfo", "MemAvailable:")
        if available is not None:
            yield Limit("the host", available << 10, each, "MiB of memory", 1 << 20)
        for directory in cgroup.directories("memory", self.cgroups, self.proc / "self/cgroup"):
            for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
                most, used = cgroup.number(directory / limit), cgroup.number(directory / usage)
                if most is not None and used is not None:
                    # The file cache counts as used, and is dropped when memory is needed.
                    cache = cgroup.field(directory / "memory.stat", "inactive_file") or 0
                    yield Limit(
                        f"{limit} of the control group {directory}", most - used + cache, each, "MiB of memory", 1 << 20
                    )

    def _tasks(self, count: int) -> Iterator[Limit]:
        unit = "processes and threads"
        everything = self._all_tasks()
        for name in ("threads-max", "pid_max"):
            most = cgroup.number(self.proc / "sys/kernel" / name)
            if most is not None:
                yield Limit(f"/proc/sys/kernel/{name}", most - everything, TASKS_PER_PROCESS, unit)
        for directory in cgroup.directories("pids", self.cgroups, self.proc / "self/cgroup"):
            most, used = cgroup.number(directory / "pids.max"), cgroup.number(directory / "pids.current")
            if most is not None and used is not None:
                yield Limit(f"pids.max of the control group {directory}", most - used, TASKS_PER_PROCESS, unit)
        soft, _ = self.rlimit(resource.RLIMIT_NPROC)
        uid = os.geteuid() if self.uid is None else self.uid
        if soft != resource.RLIM_INFINITY and uid != 0:  # root is exempt
            used = everything
            if count * TASKS_PER_PROCESS > soft - used:  # only then is it worth the time to read every process's file
                used = self._tasks_of(uid)
            yield Limit("RLIMIT_NPROC (ulimit -u)", soft - used, TASKS_PER_PROCESS, unit)

    def _all_tasks(self) -> int:
        try:
            return int((self.proc / "loadavg").read_text().split()[3].partition("/")[2])
        except (OSError, IndexError, ValueError):
            return 0

    def _tasks_of(self, uid: int) -> int:
        total = 0
        for status in self.proc.glob("[0-9]*/status"):
            try:
                fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
                if int(fields["Uid"].split()[0]) == uid:
                    total += int(fields["Threads"])
            except (OSError, KeyError, ValueError):
                continue  # it has ended meanwhile
        return total


def check_count(per_host: int, *, here: bool) -> None:
    """Raise SpawnLimitError if ``per_host`` processes on each host are too many, before anything is made for them.

    ``here``: they are for this host, so its limits are known. Another host checks its own limits when it starts them.

    >>> import monarch_backend.actor  # names the error
    >>> check_count(10**6, here=False)
    Traceback (most recent call last):
    monarch_backend.actor.SpawnLimitError: can't start 1000000 processes: they need 1000000 processes of one \
host, and MAX_PROCESSES_PER_HOST leaves 65536. Start at most 65536, or raise the limit.
    """
    if here:
        check_spawn(per_host, plain=False, descriptors_each=0)
    check(per_host, [Limit("MAX_PROCESSES_PER_HOST", MAX_PROCESSES_PER_HOST, 1, "processes of one host")])


def check_spawn(count: int, *, plain: bool, descriptors_each: int) -> None:
    """Raise SpawnLimitError if this system has no room for ``count`` more processes."""
    if platform.HAS_PROC:
        if not (PROC / "self/fd").is_dir():
            raise SpawnLimitError(
                f"can't start {count} processes: {PROC} is not mounted, and the fork server reads {PROC}/self to find "
                "open files and threads. Mount it (mount -t proc proc /proc)"
            )
        memory = MEMORY_EACH_SPAWNED if plain else MEMORY_BYTES_PER_PROCESS
        check(count, System().limits(count, memory, descriptors_each))
    else:
        check(count, System().limits_without_proc(descriptors_each))


def allow_descriptors() -> None:
    """Raise the limit of open files to the hard limit. Each process needs four, and the usual limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, MACOS_OPEN_FILES) if platform.IS_PORTABLE else hard
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
