"""Replies that coroutines await: they get notices if they last, and those of actors are checked for deadlocks.

A timer for each await would cost more than the call. So an await only notes its actor. A look at the noted actors
follows after `LOOK_S`. An await that is found at two looks has lasted, and the detector begins to probe. An actor that
has a timer or another task then is looked at again, at growing intervals.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from monarch_backend._actor import context
from monarch_backend._actor.calls.await_notices import AwaitNotices
from monarch_backend._actor.calls.future import Future

if TYPE_CHECKING:
    from monarch_backend._actor.execution.async_runner import AsyncActorRunner
    from monarch_backend._actor.runtime import Runtime

LOOK_S = 0.1
"""Seconds between two looks. The third one after the start of an await begins to probe, so up to 0.3 s later."""

MAX_LOOK_S = 10.0
"""Longest interval between looks at an actor that awaits no call alone."""


class Awaits:
    """Awaits of a runtime's calls that have not ended. Any thread may call `begin` and `end`."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.notices = AwaitNotices(runtime)
        # The future and its call or stream, by the asyncio future that a coroutine awaits.
        self._begun: dict[asyncio.Future[Any], tuple[Future[Any], Any]] = {}
        self._actors: set[AsyncActorRunner] = set()  # to look at
        self._is_armed = False
        self._is_checking = runtime.deadlocks.is_on and runtime.waiting.is_real

    def begin(self, future: Future[Any], what: Any, awaited: asyncio.Future[Any]) -> None:
        """Note that a coroutine awaits ``awaited`` for a future, which a call or stream ends."""
        self.notices.begin(future, what)
        runner: Any = context.runner.get()
        if runner is not None and runner.is_async and self._is_checking:
            self._begun[awaited] = future, what
            self._note(runner)

    def end(self, future: Future[Any], awaited: asyncio.Future[Any]) -> None:
        """Note that no coroutine awaits a future any more."""
        self.notices.end(future)
        if self._begun.pop(awaited, None) is not None:
            self._runtime.deadlocks.end_await(awaited)

    def _note(self, runner: AsyncActorRunner) -> None:
        self._actors.add(runner)
        if not self._is_armed:
            self._is_armed = True
            self._runtime.progress.later(LOOK_S, self._look)

    def _look(self) -> None:
        """Look at the noted actors. For those with the message of the last look, find what they await."""
        self._is_armed = False  # first, so that an await that begins meanwhile is not missed
        for _ in range(len(self._actors)):
            runner = self._actors.pop()
            handled = runner.handled
            if handled is None:  # its next await notes it again
                continue
            if handled.is_seen:
                runner.on_loop(lambda runner=runner: self._look_at(runner))  # type: ignore[misc]
            else:
                handled.is_seen = True
                self._note(runner)

    def _look_at(self, runner: AsyncActorRunner) -> None:
        """Begin to probe if the actor awaits what it did at the last look. Called on its event loop."""
        handled, awaited = runner.handled, runner.awaited()
        begun = None if awaited is None else self._begun.get(awaited)
        if handled is None:
            return
        if begun is None:
            handled.pause_s = min(2 * handled.pause_s + LOOK_S, MAX_LOOK_S)
            again = lambda: self._note(runner) if runner.handled is handled else None  # noqa: E731
            self._runtime.progress.later(handled.pause_s, again)
        elif handled.seen is awaited:
            self._runtime.deadlocks.begin_await(runner, *begun, awaited)
        else:
            handled.seen = awaited
            self._note(runner)
