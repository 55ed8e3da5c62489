"""Ctrl-C in the main program: KeyboardInterrupt comes where the user's code runs or waits, never in the middle of
sending or reading a message or moving memory, of which half would be left behind. Only SIGINT; actors are interrupted
by runner.py.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # signal.getsignal makes an enum member: too slow for each wait
import os
import signal
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

from monarch_backend._transport.local.event_loop import release

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime

RETRY_S = 0.001
"""Seconds after which an interrupt that came at a bad moment is tried again."""

MAX_DELAY_S = 5.0
"""Seconds after which it comes all the same: whatever happens in there does not end by itself."""

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_RUNTIME_PACKAGES = (
    "_actor", "_core", "_logs", "_mesh", "_processes", "_rdma", "_serialization", "_transport", "_verbs", "dtensor",
)  # fmt: skip
_OURS = tuple(_PACKAGE + folder + os.sep for folder in _RUNTIME_PACKAGES)


class Interrupts:
    """Stands in for Python's own handler, wherever that is in place; a handler of the user's is left alone."""

    def __init__(self, program: Runtime) -> None:
        self._program = program
        self.main = threading.main_thread().ident or 0
        self.noted = False
        self._since = 0.0
        self._again = False  # it is ours, tried again
        self.waiting_for: Any = None
        self.exit_request: BaseException | None = None  # raised in the place of KeyboardInterrupt, see program_exit.py

    def guard(self) -> None:
        """On the main thread: from now on. Notebooks put Python's handler back in place with every cell; and that of
        another program of this process, such as a simulated one or a fork's parent's, would raise nothing here.
        """
        handler = _signal.getsignal(signal.SIGINT)
        if handler is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupted)
            return
        owner = getattr(handler, "__self__", None)
        if owner is not self and isinstance(owner, Interrupts):
            signal.signal(signal.SIGINT, self._interrupted)
            self._inherit(owner)

    def _inherit(self, other: Interrupts) -> None:
        """What has come to the other and is not raised yet."""
        if other.noted:
            other.noted, self.noted, self._since = False, True, self._program.clock.now()
            self._program.pump.later(RETRY_S, self._try_again)

    def is_noted(self) -> bool:
        """There was one, and its KeyboardInterrupt is still to come."""
        return self.noted

    def raise_here(self) -> None:
        """The main thread has waited, and nothing is half done."""
        request, self.exit_request, self.noted = self.exit_request, None, False
        raise KeyboardInterrupt if request is None else request

    def may_raise_in(self, frame: FrameType | None, since: float) -> bool:
        """Whether a request of this time can be raised in this frame of the main thread: nothing is half done there."""
        return self.waiting_for is None and (not _is_ours(frame) or time.monotonic() - since > MAX_DELAY_S)

    def release_main(self) -> None:
        """Let the main thread look for a request, if it waits."""
        if self.waiting_for is not None:
            release(self.waiting_for)
        self._program.pump.wake()  # it may be the main thread itself that reads, and is about to sleep

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        again, self._again = self._again, False
        if again and not self.noted:
            return
        now = self._program.clock.now()
        if not self.noted:
            self.noted, self._since = True, now
        if self._program.disowned or not _is_ours(frame) or now - self._since > MAX_DELAY_S:
            self.noted = False
            signal.default_int_handler(number, frame)
        if self.waiting_for is not None:
            release(self.waiting_for)
        self._program.pump.later(RETRY_S, self._try_again)
        self._program.pump.wake()  # it may be the main thread itself that reads, and is about to sleep

    def _try_again(self) -> None:
        """On the thread that reads."""
        if not self.noted:
            return
        waiting = self.waiting_for
        if waiting is not None:
            release(waiting)
            self._program.pump.wake()
        handler = _signal.getsignal(signal.SIGINT)
        if not callable(handler):
            return  # the signal would end the process, or nobody would hear it
        if getattr(handler, "__self__", None) is self:
            self._again = True
        else:
            self.noted = False  # it is theirs who have put another one in place since
        # A signal, and no _thread.interrupt_main(), which ends no time.sleep() that the main thread is in by now.
        signal.pthread_kill(self.main, signal.SIGINT)


def _is_ours(frame: FrameType | None) -> bool:
    """It runs on behalf of this package, perhaps deep below."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OURS):
            return True
        frame = frame.f_back
    return False
