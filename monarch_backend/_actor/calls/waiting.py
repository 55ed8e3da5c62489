"""Waiting for replies and room: an actor's thread can be interrupted in it, and the main thread by Ctrl-C."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from monarch_backend._actor import context
from monarch_backend._core import debug_log
from monarch_backend._transport.local.frames import Kind
from monarch_backend._transport.local.peer import Peer

if TYPE_CHECKING:
    from monarch_backend._actor.execution.runner import ActorRunner
    from monarch_backend._actor.runtime import Runtime


class Waiting:
    """Lets the threads of a runtime wait. The thread that waits reads messages meanwhile."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._progress, self._interrupts = runtime.progress, runtime.interrupts

    def wait(self, what: Any, seconds: float | None = None) -> bool:
        runner = context.runner.get()
        if runner is None:
            if threading.get_ident() == self._interrupts.main:
                return self._wait_on_main(what, seconds)
            return bool(self._progress.wait(what, seconds))
        self._refuse_to_wait(runner, what)
        code = runner.code
        code.waiting_for = what
        try:
            done = bool(self._progress.wait(what, seconds, code.is_pending))
        finally:
            code.waiting_for = None
        if not done:
            code.raise_here()
        return done

    def wait_for_room(self, what: Any, seconds: float | None, whole: bool) -> bool:
        """Wait as `wait` does. With ``whole``, in the middle of a message, it cannot be interrupted."""
        return bool(self._progress.wait(what, seconds)) if whole else self._runtime.wait(what, seconds)

    def on_wait(self, peer: Peer, kind: int, target: int, why: str) -> None:
        """Log why a message must wait. Raise RuntimeError if it would wait for the actor that sends it."""
        runner = context.runner.get()
        if peer is self._runtime.router.me and runner is not None and (kind == Kind.PORT or target == runner.actor):
            # They cannot be received while it waits here. Other actors of this process have threads of their own.
            receiver = "a port of its own process" if kind == Kind.PORT else "itself"
            raise RuntimeError(f"{runner.name} has sent so many messages to {receiver} that the queue is full: {why}")
        log_wait(why)

    def _refuse_to_wait(self, runner: ActorRunner, what: Any) -> None:
        """Raise RuntimeError where an actor waits for its own reply: it handles one message at a time."""
        core = getattr(what, "core", None)
        if core is None or core.actor != runner.actor or what.ready or runner.code.thread_id != threading.get_ident():
            return
        me = self._runtime.router.me
        if getattr(what, "peer", None) is me or me in getattr(what, "peers", ()):
            raise RuntimeError(
                f"{runner.name} would never continue: it handles one message at a time, and waits for its own reply to "
                f"{what.endpoint}. Call the method, self.method(...), or make the endpoints concurrent (async)"
            )

    def _wait_on_main(self, what: Any, seconds: float | None) -> bool:
        interrupts = self._interrupts
        interrupts.guard()
        interrupts.waiting_for = what
        try:
            done = bool(self._progress.wait(what, seconds, interrupts.is_noted))
        finally:
            interrupts.waiting_for = None
        if interrupts.noted:
            interrupts.raise_here()
        return done


def log_wait(why: str) -> None:
    debug_log.write(f"monarch: {why}")
