"""Waiting for replies and room: an actor's thread can be interrupted in it, and the main thread by Ctrl-C.

A wait that lasts is shown in a cell of the recording, so that others see what this process waits for.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from monarch_backend._actor import context
from monarch_backend._actor.calls import own_waits
from monarch_backend._actor.calls.pending_calls import asked_of
from monarch_backend._actor.calls.shown_waits import begin_shown_wait, end_shown_wait
from monarch_backend._actor.calls.wait_notice import noticed
from monarch_backend._actor.errors import CancelledError, DeadlockError
from monarch_backend._core import debug_log
from monarch_backend._transport.local.event_loop import ProgressLoop
from monarch_backend._transport.local.frames import Kind
from monarch_backend._transport.local.peer import Peer

if TYPE_CHECKING:
    from monarch_backend._actor.execution.interruption import RunningCode
    from monarch_backend._actor.execution.runner import ActorRunner
    from monarch_backend._actor.runtime import Runtime


SHORT_WAIT_S = 0.1
"""Waits up to this time are not recorded."""


class Waiting:
    """Lets the threads of a runtime wait. The thread that waits reads messages meanwhile."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._progress, self._interrupts = runtime.progress, runtime.interrupts
        self.is_real = isinstance(runtime.progress, ProgressLoop)  # not a simulator's, which has its own time

    def wait(self, what: Any, seconds: float | None = None) -> bool:
        runner = context.runner.get()
        if runner is None:
            if threading.get_ident() == self._interrupts.main:
                return self._wait_on_main(what, seconds)
            return self._wait(what, seconds)
        self._refuse_to_wait(runner, what, seconds)
        code = runner.code
        others = None if code.thread_id == threading.get_ident() else _InterruptionOfActor(code)
        code.waiting_for = what
        try:
            done = self._wait(what, seconds, others or code.is_pending, runner)
        finally:
            code.waiting_for = None
        if not done:
            code.raise_here()
            if others is not None and others.why:
                raise CancelledError(f"{others.why}, and this wait ends with it")
        return done

    def _wait(
        self,
        what: Any,
        seconds: float | None,
        given_up: Callable[[], bool] | None = None,
        runner: ActorRunner | None = None,
    ) -> bool:
        if not self.is_real:
            return self._wait_in_simulation(what, seconds, given_up, runner)
        if seconds is not None and seconds <= SHORT_WAIT_S:
            return bool(self._progress.wait(what, seconds, given_up))
        if self._progress.wait(what, SHORT_WAIT_S, given_up) or (given_up is not None and given_up()):
            return bool(what.ready)
        left = None if seconds is None else seconds - SHORT_WAIT_S
        asked = asked_of(what)
        watched = self._runtime.deadlocks.watched(asked, seconds, runner, given_up)
        shown = _shown(self._runtime, asked, runner)
        with shown, watched as until, noticed(self._runtime, asked, runner, SHORT_WAIT_S):
            return bool(self._progress.wait(what, left, until))

    def _wait_in_simulation(
        self, what: Any, seconds: float | None, given_up: Callable[[], bool] | None, runner: ActorRunner | None
    ) -> bool:
        with self._runtime.deadlocks.watched(asked_of(what), seconds, runner, given_up) as until:
            return bool(self._progress.wait(what, seconds, until))

    def wait_for_room(self, what: Any, seconds: float | None, whole: bool) -> bool:
        """Wait as `wait` does. With ``whole``, in the middle of a message, it cannot be interrupted."""
        return bool(self._progress.wait(what, seconds)) if whole else self._runtime.wait(what, seconds)

    def on_wait(self, peer: Peer, kind: int, target: int, why: str) -> None:
        """Log why a message must wait. Raise RuntimeError if it would wait for the actor that sends it."""
        runner = context.runner.get()
        own = peer is self._runtime.router.me
        if own and runner is not None and own_waits.fills_own_queue(self._runtime, runner, kind, target):
            receiver, cure = (
                ("a port of its own process", "Read the port in another actor, or after some messages")
                if kind == Kind.PORT
                else ("itself", "Return between the messages, or call the method, self.method(...)")
            )
            raise RuntimeError(
                f"{runner.code.actor} would never continue: its messages to {receiver} fill the queue ({why}). {cure}"
            )
        log_wait(why)

    def _refuse_to_wait(self, runner: ActorRunner, what: Any, seconds: float | None) -> None:
        """Raise DeadlockError where an actor waits for its own reply, which cannot come.

        A call with a limit of time, an alarm, and a short wait such as ``get(timeout=0)`` are left to their end.
        """
        if not own_waits.waits_for_own_reply(self._runtime, runner, what):
            return
        is_short = seconds is not None and seconds <= SHORT_WAIT_S
        if is_short or getattr(what, "has_limit", False) or own_waits.has_alarm():
            return
        if runner.is_async:
            why, cure = "it blocks its event loop", f"Use `await` for {what.endpoint}"
        else:
            why = "it handles one message at a time"
            cure = "Call the method, self.method(...), or make the endpoints concurrent (async)"
        raise DeadlockError(
            f"{runner.code.actor} would never continue: {why}, and waits for its own reply to {what.endpoint}. {cure}"
        )

    def _wait_on_main(self, what: Any, seconds: float | None) -> bool:
        interrupts = self._interrupts
        interrupts.guard()
        interrupts.waiting_for = what
        try:
            done = self._wait(what, seconds, interrupts.is_noted)
        finally:
            interrupts.waiting_for = None
        if interrupts.noted:
            interrupts.raise_here()
        return done


class _InterruptionOfActor:
    """Condition that ends a wait of another thread than the actor's, which has its context, as of asyncio.to_thread.

    The actor's thread may be interrupted before this thread continues. So ``why`` is kept when it is seen.
    """

    __slots__ = ("_code", "why")

    def __init__(self, code: RunningCode) -> None:
        self._code, self.why = code, ""

    def __call__(self) -> bool:
        if not self.why and self._code.is_pending():
            self.why = self._code.why_pending()
        return bool(self.why)


@contextlib.contextmanager
def _shown(runtime: Runtime, what: Any, runner: ActorRunner | None) -> Iterator[None]:
    """Show a wait in a cell."""
    cell = begin_shown_wait(runtime, what, runner)
    try:
        yield
    finally:
        end_shown_wait(cell, is_done=what.ready)


def log_wait(why: str) -> None:
    debug_log.write(f"monarch: {why}")
