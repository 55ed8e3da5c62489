"""Event loop of an actor with ``async def`` endpoints: uvloop's where it is installed.

It keeps its timers and watchers. A limit of time of an ``await`` is a timer, and a watcher of a file or signal may end
an ``await``, too. So both matter for the detection of deadlocks.
"""

from __future__ import annotations

import asyncio
import functools
import weakref
from typing import Any

_MAX_DELAY_S = 1.0
"""Seconds after its time from which a timer has run, also if the loop was busy."""


class WatchedLoop(asyncio.AbstractEventLoop):
    """Part of an event loop that keeps its timers, so also those of asyncio.timeout, and counts its watchers."""

    def __init__(self) -> None:
        super().__init__()
        # By identity: asyncio's timers of the same time and call are equal.
        self._timers: weakref.WeakValueDictionary[int, asyncio.TimerHandle] = weakref.WeakValueDictionary()
        self._watched: set[tuple[str, Any]] = set()

    # One of the next two calls the other one: call_later does in asyncio, and call_at in uvloop.
    def call_later(self, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:  # type: ignore[override]
        return self._kept(super().call_later(*args, **kwargs))

    def call_at(self, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:  # type: ignore[override]
        return self._kept(super().call_at(*args, **kwargs))

    def _kept(self, timer: asyncio.TimerHandle) -> asyncio.TimerHandle:
        if hasattr(timer, "when"):  # uvloop gives a plain handle for a delay of 0
            self._timers[id(timer)] = timer
        return timer

    def add_reader(self, fd: Any, *args: Any) -> None:  # type: ignore[override]
        super().add_reader(fd, *args)
        self._watched.add(("reader", fd))

    def remove_reader(self, fd: Any) -> bool:
        self._watched.discard(("reader", fd))
        return super().remove_reader(fd)

    def add_writer(self, fd: Any, *args: Any) -> None:  # type: ignore[override]
        super().add_writer(fd, *args)
        self._watched.add(("writer", fd))

    def remove_writer(self, fd: Any) -> bool:
        self._watched.discard(("writer", fd))
        return super().remove_writer(fd)

    def add_signal_handler(self, sig: int, *args: Any) -> None:  # type: ignore[override]
        super().add_signal_handler(sig, *args)
        self._watched.add(("signal", sig))

    def remove_signal_handler(self, sig: int) -> bool:
        self._watched.discard(("signal", sig))
        return super().remove_signal_handler(sig)

    def may_wake(self) -> bool:
        """Return whether a timer may still run, or a watcher be called. Called on the loop's thread."""
        past = self.time() - _MAX_DELAY_S
        timers = list(self._timers.values())
        return bool(self._watched) or any(not timer.cancelled() and timer.when() > past for timer in timers)


@functools.cache
def _loop_class() -> type[WatchedLoop]:
    try:
        import uvloop
    except ImportError:
        loop = asyncio.new_event_loop()  # of the policy
        loop.close()
        base: type[asyncio.AbstractEventLoop] = type(loop)
    else:
        base = uvloop.Loop
    return type("ActorEventLoop", (WatchedLoop, base), {"__module__": __name__})


def new_event_loop() -> WatchedLoop:
    """Return a new event loop, which is not the current one of any thread."""
    return _loop_class()()
