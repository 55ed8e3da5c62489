"""Event loops that number their steps, so that a replay does things after the same step as the recorded actor.

A step is one callback of the loop. Not counted are callbacks from other threads and timers, which come at any moment:
a record has their position. A busy period begins when the loop has nothing to do, and steps count from there. So a
deviation within a busy period moves no position in later ones.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any

from monarch_backend._replay.scope import current

Position = tuple[int, int]
"""Busy period of the loop, and the steps in it until then."""

NO_SCOPE = -1
"""Message of the timers that belong to none."""


class ReadyQueue(deque[asyncio.Handle]):
    """Callbacks that the loop runs next. ``steps`` counts those that it has taken."""

    steps = 0

    def popleft(self) -> asyncio.Handle:
        handle = super().popleft()
        if not (isinstance(handle, asyncio.TimerHandle) and handle.cancelled()):  # the loop does not run such a timer
            self.steps += 1
        return handle


class SteppedLoop(asyncio.SelectorEventLoop):
    """Event loop that counts its steps."""

    def __init__(self, selector: selectors.BaseSelector, ready: ReadyQueue) -> None:
        super().__init__(selector)
        self.ready = self._ready = ready
        self._thread = threading.get_ident()
        self._timers_without_scope = 0

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        if threading.get_ident() != self._thread:
            return self.call_uncounted(callback, *args, context=context)
        return super().call_soon_threadsafe(callback, *args, context=context)

    def call_uncounted(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Call a function on the loop, from any thread. It is no step."""
        return super().call_soon_threadsafe(self._run_uncounted, callback, args, context=context)

    def _run_uncounted(self, callback: Callable[..., object], args: Any) -> None:
        self.ready.steps -= 1
        callback(*args)

    def _read_from_self(self) -> None:
        self.ready.steps -= 1  # it runs once for any number of calls from other threads
        super()._read_from_self()  # type: ignore[misc]

    def next_timer(self) -> tuple[int, int]:
        """Return the name of a timer that is made now: its message, and its number there."""
        scope = current.get()
        if scope is None:
            self._timers_without_scope += 1
            return NO_SCOPE, self._timers_without_scope
        scope.timers += 1
        return scope.message, scope.timers


class _RecordedSelector(selectors.DefaultSelector):
    """Selector that notes where a busy period begins."""

    def __init__(self, ready: ReadyQueue) -> None:
        super().__init__()
        self._ready, self.periods = ready, 0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout > 0:
            self.periods += 1
            self._ready.steps = 0
        return super().select(timeout)


class RecordedLoop(SteppedLoop):
    """Event loop of a recorded actor. ``on_timer`` is called with a timer's name before it runs."""

    def __init__(self, on_timer: Callable[[int, int], None]) -> None:
        ready = ReadyQueue()
        self._recorded = _RecordedSelector(ready)
        super().__init__(self._recorded, ready)
        self._on_timer = on_timer

    @property
    def position(self) -> Position:
        """Position of what another thread or a timer does now."""
        return self._recorded.periods, self.ready.steps

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when, self._run_timer, self.next_timer(), callback, args, context=context)

    def _run_timer(self, name: tuple[int, int], callback: Callable[..., object], args: Any) -> None:
        self.ready.steps -= 1
        self._on_timer(*name)
        callback(*args)
