"""What the dashboard reads: programs with their rates, and bounded parts of their recordings.

Reads take longer than the event loop may wait, so they run in threads. Equal reads at the same time are done once.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from monarch_backend._telemetry.program_recording import Recording, Unread
from monarch_backend._telemetry.programs import Program, listed, of_pid
from monarch_backend._telemetry.rates import ProcessKey, Rates
from monarch_backend._telemetry.reader import ALL_EVENTS, EventFilter
from monarch_backend._telemetry.subject import Subject

LOOK_AGE_S = 0.5
"""Age of a look at the programs from which the next request has a new one."""

LOOK_AGE_OF_HOSTS_S = 2.0
"""The same where other hosts are asked for it."""

MAX_EVENTS = 400_000
"""Events that one request reads. A process has an equal part of them, of its last ones."""

MAX_EVENTS_OF_HOSTS = 100_000
"""The same where other hosts send them."""

MIN_EVENTS_OF_PROCESS = 20


class Source:
    """Reader of programs, with bounds."""

    def __init__(self, there: Subject) -> None:
        self.there = there
        self._lock = threading.Lock()
        self._looked_at = float("-inf")
        self._programs: list[Program] = []
        self._rates: dict[ProcessKey, Rates] = {}
        self._unread: list[Unread] = []
        self._unix_s = 0.0

    def look(self) -> tuple[list[Program], dict[ProcessKey, Rates], float]:
        """Return the programs, their rates, and the time of this look. Raises LookupError without a program."""
        age = LOOK_AGE_OF_HOSTS_S if self.there.is_of_hosts else LOOK_AGE_S
        with self._lock:
            if time.monotonic() >= self._looked_at + age:
                self._looked_at = float("-inf")
                self._programs, self._rates, self._unread = self.there.look()
                self._unix_s = time.time()
                self._looked_at = time.monotonic()
            return self._programs, self._rates, self._unix_s

    def programs(self, pid: int | None, host: str = "") -> list[Program]:
        """Return the programs, or the one with this process of a host. Raises LookupError if there is none."""
        return chosen(self.look()[0], pid, host)

    def not_read(self) -> list[str]:
        """Return the hosts and processes that the last look has not read, each with the reason."""
        return [str(each) for each in self._unread]

    def recording(
        self, pid: int | None, host: str, wanted: EventFilter | None, max_events: int = MAX_EVENTS
    ) -> tuple[Recording, int]:
        """Return a recording with the wanted events, and the limit of events of a process."""
        programs = self.programs(pid, host)
        if self.there.is_of_hosts:
            max_events = min(max_events, MAX_EVENTS_OF_HOSTS)
        limit = events_of_process(sum(len(program.processes) for program in programs), max_events)
        if wanted is not None:
            wanted = replace(wanted, limit=limit)
        return self.there.recording(wanted, programs), limit


def events_of_process(processes: int, max_events: int = MAX_EVENTS) -> int:
    """Return how many events of each process a request reads.

    >>> events_of_process(2), events_of_process(1000), events_of_process(10**6)
    (8192, 400, 20)
    """
    return min(ALL_EVENTS.limit, max(MIN_EVENTS_OF_PROCESS, max_events // max(1, processes)))


def chosen(programs: list[Program], pid: int | None, host: str = "") -> list[Program]:
    """Return all programs, or the one with this process of a host. Raises LookupError if there is none."""
    if pid is None:
        return programs
    found = of_pid((each for each in programs if each.host == host), pid)
    if not found:
        where = f" on {host}" if host else ""
        raise LookupError(f"no running program has the process {pid}{where}; programs: {listed(programs)}")
    return found
