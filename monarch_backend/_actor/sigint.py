"""Ctrl-C in the main program: raises KeyboardInterrupt where user code runs or waits.

It is never raised while a message is sent or read or memory is moved, which would leave inconsistent state. Only SIGINT
is handled here; execution/interruption.py interrupts actors.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # signal.getsignal makes an enum member: too slow for every wait
import os
import signal
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

from monarch_backend._core.package_folder import PACKAGE_FOLDER
from monarch_backend._transport.local.event_loop import release

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime

RETRY_S = 0.001
"""Seconds to the next attempt, when an interrupt came at a place that cannot be interrupted."""

MAX_DELAY_S = 5.0
"""Seconds after which KeyboardInterrupt is raised anywhere, because the running code does not end by itself."""

_RUNTIME_PACKAGES = (
    "_actor", "_core", "_logs", "_mesh", "_processes", "_rdma", "_serialization", "_transport", "_verbs", "dtensor",
)  # fmt: skip
_OURS = tuple(PACKAGE_FOLDER + folder + os.sep for folder in _RUNTIME_PACKAGES)


class Interrupts:
    """Replaces Python's default handler of SIGINT. A handler that the user has installed stays."""

    def __init__(self, program: Runtime) -> None:
        self._program = program
        self.main = threading.main_thread().ident or 0
        self.noted = False
        self._since = 0.0
        self._again = False  # the next signal is a further attempt of this class
        self.waiting_for: Any = None
        self.exit_request: BaseException | None = None  # raised instead of KeyboardInterrupt, see program_exit.py

    def guard(self) -> None:
        """Install the handler, on the main thread.

        Notebooks restore Python's handler with every cell. The handler of another runtime in this process, of a
        simulation or of a fork's parent, would raise nothing here.
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
        """Take over an interrupt that the other handler has not raised yet."""
        if other.noted:
            other.noted, self.noted, self._since = False, True, self._program.clock.now()
            self._program.progress.later(RETRY_S, self._try_again)

    def is_noted(self) -> bool:
        """Return True if an interrupt has arrived and its KeyboardInterrupt was not raised yet."""
        return self.noted

    def raise_here(self) -> None:
        """Raise the pending interrupt. Called on the main thread after a wait, where all state is consistent."""
        request, self.exit_request, self.noted = self.exit_request, None, False
        raise KeyboardInterrupt if request is None else request

    def may_raise_in(self, frame: FrameType | None, since: float) -> bool:
        """Return whether a request of time ``since`` can be raised in this frame of the main thread."""
        return self.waiting_for is None and (not _is_ours(frame) or time.monotonic() - since > MAX_DELAY_S)

    def release_main(self) -> None:
        """Wake the main thread if it waits, so that it checks for a request."""
        waiting = self.waiting_for  # the main thread may reset it meanwhile
        if waiting is not None:
            release(waiting)
        self._program.progress.wake()  # the main thread may be the reader, about to sleep

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
        self._program.progress.later(RETRY_S, self._try_again)
        self.release_main()

    def _try_again(self) -> None:
        """Send the signal again, from the reading thread."""
        if not self.noted:
            return
        self.release_main()
        handler = _signal.getsignal(signal.SIGINT)
        if not callable(handler):
            return  # the signal would end the process, or be ignored
        if getattr(handler, "__self__", None) is self:
            self._again = True
        else:
            self.noted = False  # another handler was installed meanwhile and gets the signal
        # Not _thread.interrupt_main(), which would not end a time.sleep() of the main thread.
        signal.pthread_kill(self.main, signal.SIGINT)


def _is_ours(frame: FrameType | None) -> bool:
    """Return whether the frame was called, directly or not, by this package."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OURS):
            return True
        frame = frame.f_back
    return False
