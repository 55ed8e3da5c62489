"""Processes of this machine by the job that they belong to: the ranks of one program, or of one launcher.

Ranks of torchrun are programs of their own in `monarch-backend ps`. They have one parent.
"""

from __future__ import annotations

from collections import defaultdict

from monarch_backend._core import process_stat
from monarch_backend._telemetry import discovery
from monarch_backend._telemetry.kinds import Kind, SlotState
from monarch_backend._telemetry.reader import EventFilter, RecordedProcess

Job = tuple[str, int]
"""Key of a job: what its number is, and the pid of the program or the launcher."""


def running(*kinds: Kind, limit: int | None = None) -> dict[Job, list[RecordedProcess]]:
    """Return running processes by their job, with events of these kinds. Raises NotImplementedError without /proc."""
    found = defaultdict[Job, list[RecordedProcess]](list)
    for area in discovery.areas():
        for process in area.processes(wanted=_filter(kinds, limit) if kinds else None):
            if process.state == SlotState.ALIVE:
                found[job_of(process, area.owner)].append(process)
    return dict(found)


def job_of(process: RecordedProcess, owner: int) -> Job:
    """Return the job of a process that this owner's area has. Without its launcher, the owner is the job."""
    if process.pid == owner and process.label.startswith("rank ") and (launcher := _parent(process.pid)):
        return "launcher", launcher
    return "program", owner


def _parent(pid: int) -> int:
    try:
        return process_stat.read(pid).parent
    except OSError:
        return 0


def _filter(kinds: tuple[Kind, ...], limit: int | None) -> EventFilter:
    return EventFilter(kinds) if limit is None else EventFilter(kinds, limit=limit)
