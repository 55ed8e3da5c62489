"""Interruption of the code that an actor runs, when its call is cancelled or the actor is to end in limited time.

An interruption is an exception in user code. It is never raised inside of this package, where it would leave
inconsistent state. blocking_calls.py ends system calls; async_interruption.py is for actors with an event loop.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from monarch_backend._actor.actor import build
from monarch_backend._actor.errors import CancelledError
from monarch_backend._actor.execution import blocking_calls
from monarch_backend._core.package_folder import PACKAGE_FOLDER
from monarch_backend._processes.debugging import channel
from monarch_backend._serialization.pickling import loads
from monarch_backend._transport.local.event_loop import Timer, release
from monarch_backend._transport.local.peer import Peer

log = logging.getLogger("monarch_backend")

INTERRUPT_AFTER_S = 5.0
"""Seconds that ``abort`` gives to the running constructor or message, which is then interrupted."""

KILL_AFTER_S = 3.0
"""Seconds that interrupted code has to end. Then its process is killed."""

REPORT_AFTER_S = 2.0
"""Seconds after a cancellation until a log line reports an actor that is still busy."""

RETRY_S, MAX_RETRY_S = 0.001, 0.05
"""Seconds between two attempts to interrupt: the first pause, and the longest one."""

CONSTRUCTOR = object()
"""Marks a running constructor, where a running message is (peer, number)."""


CALLERS: set[CodeType] = {build.__code__}
"""Functions that call user code and handle its exceptions. The modules of the actor runners add theirs."""


class RunningCode:
    """The constructor or message that an actor runs, and its interruption from other threads.

    The actor's thread sets ``running`` and calls `end`. Other methods may be called on any thread unless stated.
    """

    blocked_by = "C code does not return to Python"

    def __init__(self, progress: Any, actor: str) -> None:
        self._progress, self.actor = progress, actor  # the actor's name and place, for log lines
        self.lock = threading.Lock()
        self.running: Any = None  # the message, as (peer, number), or CONSTRUCTOR
        self.what = "its constructor"  # for log lines
        self.is_cancelled = False  # the running message
        self._is_interrupted = False  # and interrupted, at the latest at its next instruction
        self._reason = ""
        self.aborted: str | None = None  # why running code is interrupted to end the actor
        self.is_over = False  # the actor has ended or failed
        self.thread_id = 0
        self.waiting_for: Any = None  # set while its thread waits, so that the wait can be interrupted
        self._standstill = blocking_calls.Standstill()
        self._report: Timer | None = None  # timer of the report that it is still busy

    # ---- on the actor's thread

    def end(self) -> None:
        """Note that nothing runs any more, so that a pending interruption cannot hit the next message."""
        with self.lock:
            self.running = None
            if self._report is not None:
                self._report.cancel()
                self._report = None
            was_interrupted = self._is_interrupted
            self.is_cancelled = self._is_interrupted = False
        if was_interrupted:
            blocking_calls.discard_exception()

    def is_pending(self) -> bool:
        """Return whether the running message was cancelled and not interrupted yet."""
        return self.is_cancelled and not self._is_interrupted

    def is_ending(self) -> bool:
        """Return whether the running message was cancelled, or the actor is to end."""
        return self.is_cancelled or self.aborted is not None

    def why_pending(self) -> str:
        """Return what ends the running code, for an error."""
        if self.aborted is not None:
            return f"the actor was ended ({self.aborted})"
        return f"the message that the actor runs was cancelled ({self._reason})"

    def raise_here(self) -> None:
        """Raise a pending CancelledError, after a wait."""
        with self.lock:
            if not self.is_pending() or self.thread_id != threading.get_ident():
                return
            self._is_interrupted = True
        raise CancelledError(self._reason)

    def raise_in(self, frame: FrameType | None) -> None:
        """Raise CancelledError in this frame, which a signal has interrupted. Called in the handler, on the main
        thread.
        """
        # Only frames of this package hold the lock, so it is free when user code was interrupted.
        if threading.get_ident() == self.thread_id and self._is_users(frame):
            self.raise_here()

    def repeat(self, error: BaseException | None) -> bool:
        """Interrupt again if Python has ignored this exception and it was an interruption."""
        with self.lock:
            running = self.running
            if type(error) is not CancelledError or not self._is_interrupted or self.thread_id != threading.get_ident():
                return False
            self._is_interrupted = False
        self._progress.later(RETRY_S, lambda: self._interrupt(running))
        return True

    # ---- from any thread

    def is_running(self, message: tuple[Peer, int]) -> bool:
        """Return whether this message, as (peer, number), runs."""
        return bool(self.running == message)

    def cancel(self, peer: Peer, ref: int, reason: str) -> None:
        running = (peer, ref)
        with self.lock:
            if self.running != running or self.is_cancelled:
                return
            self.is_cancelled, self._is_interrupted, self._reason = True, False, reason
            self._standstill = blocking_calls.Standstill()
        self._interrupt(running)

    def begin_abort(self, reason: str) -> None:
        self.aborted = reason
        self._standstill = blocking_calls.Standstill()

    def abort(self, reason: str) -> bool:
        """Interrupt the code that runs. Return False if it is to be tried again, because nothing runs now."""
        with self.lock:
            running = self.running
            self.is_cancelled, self._is_interrupted, self._reason = running is not None, False, reason
        if running is None:  # between two messages, or in __supervise__
            return self.is_over
        self._interrupt(running)
        return True

    def _interrupt(self, running: Any, pause: float = RETRY_S) -> None:
        """Raise CancelledError in running user code, also where it blocks or waits for a reply.

        Attempts are repeated until one succeeds or the message has ended.
        """
        time.sleep(0)  # start a new GIL interval: no other thread runs between the check and the exception
        with self.lock:
            if self.running != running or self._is_interrupted:
                return
            waiting = self.waiting_for
            if waiting is None and self._report is None:
                self._report = self._progress.later(REPORT_AFTER_S, lambda: self._report_cancelled(running))
            by_signal = blocking_calls.can_interrupt(self.thread_id)
            if waiting is None and not by_signal and self._is_users(sys._current_frames().get(self.thread_id)):
                self._is_interrupted = True
                blocking_calls.raise_soon(self.thread_id)
                return
        if waiting is not None:
            release(waiting)
            self._progress.wake()
        elif by_signal:
            blocking_calls.interrupt(self.thread_id, self.raise_in)
        self._progress.later(pause, lambda: self._interrupt(running, min(2 * pause, MAX_RETRY_S)))

    def _is_users(self, frame: FrameType | None) -> bool:
        """Return whether this frame runs user code, called by this package where exceptions are handled."""
        if frame is None:
            return False
        if frame.f_code is channel.wait.__code__:  # a breakpoint, where user code has stopped
            return self._standstill.allows(frame)
        first, innermost = frame, True
        while frame is not None:
            if frame.f_code is loads.__code__:  # unpickling of a constructor's or message's arguments
                is_run = frame.f_back is not None and frame.f_back.f_code in CALLERS
                return is_run and not innermost and self._standstill.allows(first)
            if frame.f_code in CALLERS:
                return not innermost and self._standstill.allows(first)
            if frame.f_code.co_filename.startswith(PACKAGE_FOLDER):
                return False
            frame, innermost = frame.f_back, False
        return False

    # ---- reports

    def place(self) -> str:
        """Return the innermost line of user code that the actor's thread runs, for messages."""
        return blocking_calls.place(self.thread_id)

    def report_busy(self) -> None:
        """Log the place of an actor that is to end and still runs. Called on the reading thread."""
        if not self.is_over and self.running is not None:
            log.warning("%s is to end, and %s runs: %s", self.actor, self.what, self.place())

    def _report_cancelled(self, running: Any) -> None:
        if self.running == running:
            self._log_cancelled(self._reason)

    def _log_cancelled(self, reason: str) -> None:
        why = blocking_calls.why_not(self.thread_id)
        if why is None:
            why = "the code goes on after the exception" if self._is_interrupted else self.blocked_by
        log.warning(
            "%s is still busy %.0f s after %s was cancelled (%s): %s. It takes the next message when the code returns. "
            "It is at %s",
            self.actor, REPORT_AFTER_S, self.what, reason, why, self.place(),
        )  # fmt: skip


class AbortLimits:
    """Limits of time for the end of an actor: its running code is interrupted, and then its process is killed.

    All methods are called on the reading thread.
    """

    def __init__(self, progress: Any, code: RunningCode, kill: Callable[[str], None]) -> None:
        self._progress, self._code, self._kill = progress, code, kill
        self._timers: list[Timer] = []

    def start(self, seconds: float, reason: str) -> None:
        self._later(seconds, lambda: self._interrupt(reason))

    def cancel(self) -> None:
        for timer in self._timers:
            timer.cancel()

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        self._timers.append(self._progress.later(seconds, call))

    def _interrupt(self, reason: str) -> None:
        if self._code.is_over:
            return
        self._later(KILL_AFTER_S, lambda: self._kill(reason))
        self._code.begin_abort(reason)
        self._try(reason)

    def _try(self, reason: str) -> None:
        if not self._code.abort(reason):
            self._later(MAX_RETRY_S, lambda: self._try(reason))
