"""Actor of scale.py. It has its own module, because classes of a main file are pickled by value with all references."""

from __future__ import annotations

from typing import Any

from monarch_backend.actor import Actor, endpoint


class Times:
    """Number of actors that a message has reached, and the simulated time at which it reached the last one."""

    now: Any = None
    last = 0.0
    reached = 0


class Runner(Actor):
    """Actor that records the time and returns."""

    @endpoint
    def work(self) -> None:
        Times.reached += 1
        Times.last = Times.now()
