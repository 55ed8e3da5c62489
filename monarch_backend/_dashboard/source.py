"""What the dashboard reads: programs with their rates, and bounded parts of their recordings.

Reads take longer than the event loop may wait, so they run in threads. Equal reads at the same time are done once.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from monarch_backend._telemetry import program_recording
from monarch_backend._telemetry.program_recording import Recording
from monarch_backend._telemetry.programs import Program, listed
from monarch_backend._telemetry.rates import RateMeter, Rates
from monarch_backend._telemetry.reader import ALL_EVENTS, EventFilter

LOOK_AGE_S = 0.5
"""Age of a look at the programs from which the next request has a new one."""

MAX_EVENTS = 400_000
"""Events that one request reads. A process has an equal part of them, of its last ones."""

MIN_EVENTS_OF_PROCESS = 20


class Source:
    """Reader of the programs that ``name`` stands for, as `programs.select` has it."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self._meter = RateMeter(name)
        self._lock = threading.Lock()
        self._looked_at = float("-inf")
        self._programs: list[Program] = []
        self._rates: dict[int, Rates] = {}
        self._unix_s = 0.0

    def look(self) -> tuple[list[Program], dict[int, Rates], float]:
        """Return the programs, their rates by pid, and the time of this look. Raises LookupError without a program."""
        with self._lock:
            if time.monotonic() >= self._looked_at + LOOK_AGE_S:
                self._looked_at = float("-inf")
                self._programs, self._rates = self._meter.look()
                self._unix_s = time.time()
                self._looked_at = time.monotonic()
            return self._programs, self._rates, self._unix_s

    def programs(self, pid: int | None) -> list[Program]:
        """Return the programs, or the one with this process. Raises LookupError if there is none."""
        return chosen(self.look()[0], pid)

    def recording(
        self, pid: int | None, wanted: EventFilter | None, max_events: int = MAX_EVENTS
    ) -> tuple[Recording, int]:
        """Return a recording with the wanted events, and the limit of events of a process."""
        programs = self.programs(pid)
        limit = events_of_process(sum(len(program.processes) for program in programs), max_events)
        if wanted is not None:
            wanted = replace(wanted, limit=limit)
        return program_recording.read_programs(programs, wanted), limit


def events_of_process(processes: int, max_events: int = MAX_EVENTS) -> int:
    """Return how many events of each process a request reads.

    >>> events_of_process(2), events_of_process(1000), events_of_process(10**6)
    (8192, 400, 20)
    """
    return min(ALL_EVENTS.limit, max(MIN_EVENTS_OF_PROCESS, max_events // max(1, processes)))


def chosen(programs: list[Program], pid: int | None) -> list[Program]:
    """Return all programs, or the one with this process. Raises LookupError if there is none."""
    if pid is None:
        return programs
    found = [each for each in programs if each.has([pid])]
    if not found:
        raise LookupError(f"no running program has the process {pid}; programs: {listed(programs)}")
    return found
