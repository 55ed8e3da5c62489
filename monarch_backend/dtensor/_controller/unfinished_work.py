"""Work that the workers or other processes must finish before the workers may end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class UnfinishedWork:
    """The work that is in transit, and what is called when none of it is left."""

    def __init__(self) -> None:
        self._under_way: set[Any] = set()  # work that needs more than commands: see begin
        self._at_rest: list[Callable[[], None]] = []  # called when none of it is left
        self._settling = threading.Lock()

    def begin(self, what: Any) -> None:
        """Register work."""
        with self._settling:
            self._under_way.add(what)

    def end(self, what: Any) -> None:
        """End registered work, done or not."""
        with self._settling:
            self._under_way.discard(what)
            calls = [] if self._under_way else self._at_rest[:]
            del self._at_rest[: len(calls)]
        for call in calls:
            call()

    def call_at_end(self, then: Callable[[], None]) -> None:
        """Call ``then`` when no work is left: now, or later on the thread that ends the last work."""
        with self._settling:
            if self._under_way:
                self._at_rest.append(then)
                return
        then()
