"""Scope of the running message: what it does is numbered, so that a replay finds it again."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any


class Scope:
    """A message, or the constructor, that an actor handles. ``place`` counts its calls, ports and spawned meshes."""

    __slots__ = ("error", "has_begun", "is_cancelled", "message", "owner", "place", "timers")

    def __init__(self, owner: Any, message: int) -> None:
        self.owner, self.message = owner, message  # the owner is the actor's recorder or player
        self.place = self.timers = 0
        self.error = ""
        self.is_cancelled = False
        self.has_begun = True

    def next_place(self) -> int:
        place, self.place = self.place, self.place + 1
        return place


current: ContextVar[Scope | None] = ContextVar("monarch_replay", default=None)
"""Scope of the running code. A thread that the actor has started has none."""
