"""Processes that a recorded transfer moves bytes from and to: the one that has recorded it, and that in its detail."""

from __future__ import annotations

import re
import socket
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from monarch_backend._core import env

if TYPE_CHECKING:  # programs that only record do not need the readers
    from monarch_backend._telemetry.program_recording import ProcessRecording, Recording
    from monarch_backend._telemetry.reader import RecordedEvent

ROUTES_OF_ONE_HOST = "this process", "same host"
"""Names of routes between processes of one host."""

_READ, _WRITE = "read from", "write to"
_DETAIL = re.compile(rf"({_READ}|{_WRITE}) pid (\d+) on (.*?)( and \d+ more)?")


class Ends(NamedTuple):
    """Labels and pids of both processes. A process that is not in the recording is "pid 4711 on HOST"."""

    source: str | None = None
    target: str | None = None
    from_pid: int | None = None
    to_pid: int | None = None


def detail_of(write: bool, pid: int, host: str, others: int = 0) -> str:
    """Return the detail of a transfer with this process, and ``others`` more. ``write``: it gets the bytes.

    >>> detail_of(False, 4711, "node-2", 3)
    'read from pid 4711 on node-2 and 3 more'
    """
    more = f" and {others} more" if others else ""
    return f"{_WRITE if write else _READ} pid {pid} on {host}{more}"


class EndsOfTransfers:
    """Finds the ends of transfers in a recording."""

    def __init__(self, recording: Recording) -> None:
        self._here = "" if recording.is_past else env.get("MONARCH_HOST_NAME") or socket.gethostname()
        self._processes: defaultdict[int, list[ProcessRecording]] = defaultdict(list)
        for each in recording.processes:
            self._processes[each.recorded.pid].append(each)

    def of(self, process: ProcessRecording, transfer: RecordedEvent) -> Ends:
        """Return the ends of a transfer that a process has recorded. Of several other processes, it is the first."""
        found = _DETAIL.fullmatch(transfer.detail)
        if found is None:  # a later text has overwritten it
            return Ends()
        pid, host, more = int(found[2]), found[3], found[4] or ""
        here = process.label, process.recorded.pid
        there = self._label(process, transfer, pid, host) + more, pid
        (source, from_pid), (target, to_pid) = (here, there) if found[1] == _WRITE else (there, here)
        return Ends(source, target, from_pid, to_pid)

    def _label(self, process: ProcessRecording, transfer: RecordedEvent, pid: int, host: str) -> str:
        hosts = {"" if host == self._here else host, process.host if transfer.name in ROUTES_OF_ONE_HOST else host}
        started = transfer.end_ns - transfer.duration_ns
        found = [
            each for each in self._processes[pid]
            if each.host in hosts and each.recorded.started_ns <= started and not 0 < each.recorded.ended_ns < started
        ]  # fmt: skip
        return found[0].label if len(found) == 1 else f"pid {pid} on {host}"
