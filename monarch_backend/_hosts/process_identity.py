"""Identity of a process, by pid, start time and boot of its machine. A later process can get the same pid."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from pathlib import Path

import msgspec

from monarch_backend import _native
from monarch_backend._core import platform
from monarch_backend._processes.process_state import state_and_start


class Identity(msgspec.Struct, frozen=True):
    """A process of this machine or of another one. ``start``: that of `state_and_start`.

    >>> me = Identity.of(os.getpid())
    >>> me.runs(), Identity(me.pid, me.start - 1, me.boot).runs(), Identity(me.pid, me.start, "another").runs()
    (True, False, False)
    """

    pid: int
    start: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> Identity:
        state, start = state_and_start(pid)
        if state == "Z":
            raise ProcessLookupError(f"process {pid} has ended")
        return cls(pid, start, boot())

    def runs(self) -> bool:
        try:
            return Identity.of(self.pid) == self
        except ProcessLookupError:
            return False

    def end(self, grace: float, first: int = signal.SIGTERM) -> None:
        """Send the signal ``first``, and SIGKILL ``grace`` seconds later. Do nothing if it has ended.

        Raises PermissionError.
        """
        with contextlib.ExitStack() as stack, contextlib.suppress(ProcessLookupError):
            send = functools.partial(os.kill, self.pid)  # another process could get the pid before the signal
            if platform.HAS_PIDFD:  # the descriptor refers to one process
                fd = os.pidfd_open(self.pid)
                stack.callback(os.close, fd)
                send = functools.partial(signal.pidfd_send_signal, fd)
            for number, seconds in ((first, grace), (signal.SIGKILL, 5.0)):
                if not self.runs():
                    return
                send(number)
                until = time.monotonic() + seconds
                while self.runs() and time.monotonic() <= until:
                    time.sleep(0.01)


def boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() if platform.HAS_PROC else _native.boot_id()
