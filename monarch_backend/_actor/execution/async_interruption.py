"""Interruption of the coroutines that an actor with an event loop runs: as in interruption.py, one task a message."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from monarch_backend._actor.execution import blocking_calls
from monarch_backend._actor.execution.interruption import MAX_RETRY_S, REPORT_AFTER_S, RunningCode
from monarch_backend._transport.local.peer import Peer

log = logging.getLogger("monarch_backend")

BLOCKED_S = 0.1
"""Seconds after a cancellation in which an event loop that has not run counts as blocked."""

MessageKey = tuple[Peer, int]
"""Sender and number of a message."""


def call_soon(loop: asyncio.AbstractEventLoop | None, call: Callable[..., object], *args: Any) -> None:
    """Call a function on the loop, from any thread. Does nothing if the loop has ended or ends meanwhile."""
    if loop is not None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(call, *args)


class RunningTasks(RunningCode):
    """The constructor of an async actor, and later the tasks of its messages.

    ``loop`` is set while the event loop runs. Until then the actor is interrupted as one without an event loop.
    """

    blocked_by = "C code does not return to Python, or a task that the message has started blocks the event loop"

    def __init__(self, progress: Any, actor: str) -> None:
        super().__init__(progress, actor)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.tasks: dict[MessageKey, asyncio.Task[None]] = {}
        self._withdrawn: set[MessageKey] = set()  # calls that their callers have cancelled
        self._to_cancel: dict[MessageKey, str] = {}  # reasons of cancellations that the loop has not handled yet
        self._interrupted_tasks: set[MessageKey] = set()  # interrupted to end the actor

    def is_running(self, message: MessageKey) -> bool:
        return message in self.tasks or super().is_running(message)

    def is_ending(self) -> bool:
        return super().is_ending() or bool(self._to_cancel or self._withdrawn)

    # ---- on the loop's thread

    def forget(self, key: MessageKey) -> None:
        self.tasks.pop(key, None)
        self._to_cancel.pop(key, None)
        self._withdrawn.discard(key)

    def is_withdrawn(self, key: MessageKey) -> bool:
        return key in self._withdrawn

    def cancel_all(self) -> None:
        """Cancel all tasks but the running one, because the actor has failed."""
        for task in self.tasks.values():
            if task is not asyncio.current_task():
                task.cancel("the actor has failed")

    def raise_in(self, frame: FrameType | None) -> None:
        """Raise CancelledError in this frame if it is of a cancelled coroutine that blocks the loop."""
        loop = self.loop
        if loop is None:
            super().raise_in(frame)
            return
        if threading.get_ident() != self.thread_id or not self._is_users(frame):
            return
        key = self._running_key(loop)
        if key is None:
            return
        reason = self._to_cancel.pop(key, None)
        if reason is not None:
            self._withdrawn.add(key)
        elif self.aborted is not None and key not in self._interrupted_tasks:
            self._interrupted_tasks.add(key)
            reason = self.aborted
        if reason is not None:
            raise asyncio.CancelledError(reason)

    def repeat(self, error: BaseException | None) -> bool:
        loop = self.loop
        if loop is None:
            return super().repeat(error)
        if type(error) is not asyncio.CancelledError or threading.get_ident() != self.thread_id:
            return False
        key = self._running_key(loop)
        if key is None:
            return False
        if key in self._interrupted_tasks:  # its interruption is repeated anyway
            self._interrupted_tasks.discard(key)
            return True
        if key not in self._withdrawn:
            return False
        self.cancel(*key, str(error))
        return True

    def _running_key(self, loop: asyncio.AbstractEventLoop) -> MessageKey | None:
        """Return (peer, number) of the message whose task runs; None between tasks."""
        task = asyncio.current_task(loop)
        return next((key for key, each in self.tasks.items() if each is task), None)

    def _cancel_task(self, peer: Peer, ref: int, reason: str) -> None:
        if self._to_cancel.pop((peer, ref), None) is None and (peer, ref) in self._withdrawn:
            return  # it was interrupted where it blocked the loop
        task = self.tasks.get((peer, ref))
        if task is not None:
            self._withdrawn.add((peer, ref))
            task.cancel(reason)

    # ---- from any thread

    def cancel(self, peer: Peer, ref: int, reason: str) -> None:
        key = peer, ref
        if self.loop is None or key not in self.tasks:
            call_soon(self.loop, self._cancel_task, peer, ref, reason)
            return
        if not self._to_cancel:  # further cancellations must not reset its time
            self._standstill = blocking_calls.Standstill()
        self._to_cancel[key] = reason
        call_soon(self.loop, self._cancel_task, peer, ref, reason)
        later = self._progress.later
        later(BLOCKED_S, lambda: self._unblock(key))
        later(REPORT_AFTER_S, lambda: self._log_cancelled(reason) if key in self._to_cancel else None)

    def _unblock(self, key: MessageKey) -> None:
        """Interrupt a coroutine that blocks the loop, which has not run for a while."""
        if key in self._to_cancel and blocking_calls.can_interrupt(self.thread_id):
            blocking_calls.interrupt(self.thread_id, self.raise_in)
            self._progress.later(MAX_RETRY_S, lambda: self._unblock(key))

    def abort(self, reason: str) -> bool:
        if self.loop is None:
            return super().abort(reason)
        if not self.is_over and blocking_calls.can_interrupt(self.thread_id):
            blocking_calls.interrupt(self.thread_id, self.raise_in)
        return self.is_over

    def report_busy(self) -> None:
        if self.loop is None:
            super().report_busy()
        elif not self.is_over:
            for task in list(self.tasks.values()):
                log.warning("%s is to end, and a message runs: %s", self.actor, blocking_calls.place_of_task(task))
