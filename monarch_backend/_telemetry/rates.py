"""Rates of running processes: messages, bytes and processor time per second, from two looks at each."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from monarch_backend._telemetry import discovery, gpu_memory
from monarch_backend._telemetry.programs import Program

ProcessKey = tuple[str, int]
"""A running process: its host, "" for this machine, and its pid."""


@dataclass(frozen=True)
class Rates:
    """Rates of a process between two looks. ``cpu`` is in processors: 1.0 is all of one."""

    messages_per_second: float
    bytes_per_second: float
    cpu: float


class RateMeter:
    """Rates of the processes of programs of this machine since the last look. ``find`` returns the programs."""

    def __init__(self, find: Callable[[], list[Program]]) -> None:
        self._find = find
        self._looked_at = 0.0
        self._written: dict[int, int] = {}
        self._cpu: dict[int, float] = {}

    def look(self) -> tuple[list[Program], dict[ProcessKey, Rates]]:
        """Return the programs with their GPU memory, and the rates. A process has rates from the second look on.

        Raises what ``find`` does.
        """
        programs = self._find()
        gpu_memory.add_to(programs)
        now = time.monotonic()
        seconds, self._looked_at = now - self._looked_at, now
        traffic = {each.pid: each for area in discovery.areas() for each in area.traffic(self._written)}
        cpu = {p.pid: p.cpu_seconds for each in programs for p in each.processes if p.cpu_seconds is not None}
        rates = {
            ("", pid): Rates(
                traffic[pid].messages / seconds, traffic[pid].size / seconds, max(0.0, used - self._cpu[pid]) / seconds
            )
            for pid, used in cpu.items()
            if pid in traffic and pid in self._cpu and pid in self._written
        }
        self._written, self._cpu = {pid: each.written for pid, each in traffic.items()}, cpu
        return programs, rates
