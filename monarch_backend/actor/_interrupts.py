"""Ctrl-C in the main program: KeyboardInterrupt comes where the user's code runs or waits, never in the middle of
sending or reading a message or moving memory, of which half would be left behind. Only SIGINT; actors are interrupted
by _cell.py.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # signal.getsignal makes an enum member: too slow for each wait
import _thread
import os
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

from monarch_backend.transport._pump import release

if TYPE_CHECKING:
    from monarch_backend.actor._program import Program

AGAIN = 0.001
"""Seconds after which an interrupt that came at a bad moment is tried again."""

MOST = 5.0
"""Seconds after which it comes all the same: whatever happens in there does not end by itself."""

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_OURS = tuple(_PACKAGE + folder + os.sep for folder in ("actor", "mesh", "rdma", "transport"))


class Interrupts:
    """Stands in for Python's own handler, wherever that is in place; a handler of the user's is left alone."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.main = threading.main_thread().ident
        self.noted = False
        self._since = 0.0
        self._again = False  # it is ours, tried again
        self.waiting_for: Any = None

    def guard(self) -> None:
        """On the main thread: from now on. Notebooks put Python's handler back in place with every cell."""
        if _signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupted)

    def is_noted(self) -> bool:
        """There was one, and its KeyboardInterrupt is still to come."""
        return self.noted

    def raise_here(self) -> None:
        """The main thread has waited, and nothing is half done."""
        self.noted = False
        raise KeyboardInterrupt

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        again, self._again = self._again, False
        if again and not self.noted:
            return
        now = self._program.clock.now()
        if not self.noted:
            self.noted, self._since = True, now
        if self._program.disowned or not _is_ours(frame) or now - self._since > MOST:
            self.noted = False
            signal.default_int_handler(number, frame)
        if self.waiting_for is not None:
            release(self.waiting_for)
        self._program.pump.later(AGAIN, self._try_again)

    def _try_again(self) -> None:
        """On the thread that reads."""
        if not self.noted:
            return
        waiting = self.waiting_for
        if waiting is not None:
            release(waiting)
            self._program.pump.wake()
        self._again = True
        _thread.interrupt_main()


def _is_ours(frame: FrameType | None) -> bool:
    """It runs on behalf of this package, perhaps deep below."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OURS):
            return True
        frame = frame.f_back
    return False
