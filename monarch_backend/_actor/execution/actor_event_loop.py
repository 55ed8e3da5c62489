"""Event loop of an actor with ``async def`` endpoints: uvloop's where it is installed. It knows its timers.

A limit of time of an ``await`` is a timer of its loop. Detection of deadlocks asks whether there is one.
"""

from __future__ import annotations

import asyncio
import functools
import weakref
from typing import Any

_MAX_DELAY_S = 1.0
"""Seconds after its time from which a timer has run, also if the loop was busy."""


class TimerLoop(asyncio.AbstractEventLoop):
    """Part of an event loop that keeps its timers: those of `call_later` and `call_at`, so also of asyncio.timeout."""

    def __init__(self) -> None:
        super().__init__()
        self._timers: weakref.WeakSet[asyncio.TimerHandle] = weakref.WeakSet()

    # One of the two calls the other one: call_later does in asyncio, and call_at in uvloop.
    def call_later(self, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:  # type: ignore[override]
        timer = super().call_later(*args, **kwargs)
        self._timers.add(timer)
        return timer

    def call_at(self, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:  # type: ignore[override]
        timer = super().call_at(*args, **kwargs)
        self._timers.add(timer)
        return timer

    def has_timers(self) -> bool:
        """Return whether a timer may still run. Called on the loop's thread."""
        past = self.time() - _MAX_DELAY_S
        return any(not timer.cancelled() and timer.when() > past for timer in self._timers)


@functools.cache
def _loop_class() -> type[TimerLoop]:
    base: type[asyncio.AbstractEventLoop] = asyncio.SelectorEventLoop
    try:
        import uvloop
    except ImportError:
        pass
    else:
        base = uvloop.Loop
    return type("ActorEventLoop", (TimerLoop, base), {"__module__": __name__})


def new_event_loop() -> TimerLoop:
    """Return a new event loop, which is not the current one of any thread."""
    return _loop_class()()
