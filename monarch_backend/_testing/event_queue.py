"""Event queue of a simulation: calls at simulated times. It is the clock, and runs timers and delays.

Calls of the same time run in the order in which they were added, so that a run depends on its seed only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from heapq import heappop, heappush


class EventQueue:
    """Queue of calls, and a clock that advances from one call to the next. The clock stops while a call runs.

    >>> event_queue = EventQueue()
    >>> event_queue.add(2.5, lambda: print("at", event_queue.now()))
    >>> event_queue.next(), event_queue.now()
    (2.5, 0.0)
    >>> event_queue.take()()
    at 2.5
    """

    __slots__ = ("_count", "_heap", "time")

    def __init__(self) -> None:
        self.time = 0.0
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._count = itertools.count()

    def now(self) -> float:
        """As Clock.now: simulated seconds since the start."""
        return self.time

    def add(self, seconds: float, call: Callable[[], object]) -> None:
        """Schedule a call in ``seconds``."""
        heappush(self._heap, (self.time + seconds, next(self._count), call))

    def add_at(self, time: float, call: Callable[[], object]) -> None:
        """Schedule a call at a time that is not in the past."""
        heappush(self._heap, (time, next(self._count), call))

    def next(self) -> float | None:
        """Return the time of the next call; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def take(self) -> Callable[[], object]:
        """Remove the next call, and advance the clock to its time."""
        time, _, call = heappop(self._heap)
        if time > self.time:
            self.time = time
        return call

    def clear(self) -> None:
        self._heap.clear()
