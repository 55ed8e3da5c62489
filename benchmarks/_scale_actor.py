"""Actor of scale.py. A module of its own, because a program's main file is sent by value with all its references."""

from __future__ import annotations

from typing import Any

from monarch_backend.actor import Actor, endpoint


class Times:
    """When the last one was reached, and how many were, in simulated seconds."""

    now: Any = None
    last = 0.0
    reached = 0


class Runner(Actor):
    """Answers at once."""

    @endpoint
    def work(self) -> None:
        Times.reached += 1
        Times.last = Times.now()
