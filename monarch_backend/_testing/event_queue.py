"""What will happen, and when: calls at simulated times, which stand for clocks, timers and delays alike.

Nothing here knows what the calls are. Calls of the same time come in the order in which they were added, so that a run
depends on nothing but its seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from heapq import heappop, heappush


class Agenda:
    """A clock that goes from one call to the next; it stands still while one runs.

    >>> agenda = Agenda()
    >>> agenda.add(2.5, lambda: print("at", agenda.now()))
    >>> agenda.next(), agenda.now()
    (2.5, 0.0)
    >>> agenda.take()()
    at 2.5
    """

    __slots__ = ("_count", "_heap", "time")

    def __init__(self) -> None:
        self.time = 0.0
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._count = itertools.count()

    def now(self) -> float:
        """Simulated seconds since the beginning: what a Clock says."""
        return self.time

    def add(self, seconds: float, call: Callable[[], object]) -> None:
        """Call it in so many seconds."""
        heappush(self._heap, (self.time + seconds, next(self._count), call))

    def add_at(self, time: float, call: Callable[[], object]) -> None:
        """Call it at this time, which is not in the past."""
        heappush(self._heap, (time, next(self._count), call))

    def next(self) -> float | None:
        """The time of the next call; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def take(self) -> Callable[[], object]:
        """The next call, whose time it is now."""
        time, _, call = heappop(self._heap)
        if time > self.time:
            self.time = time
        return call

    def clear(self) -> None:
        """Nothing will happen any more."""
        self._heap.clear()
