"""Identity of a process, by pid, start time and boot of its machine. A later process can get the same pid."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import msgspec


class Identity(msgspec.Struct, frozen=True):
    """A process of this machine or of another one. ``start``: clock ticks since the boot.

    >>> me = Identity.of(os.getpid())
    >>> me.runs(), Identity(me.pid, me.start - 1, me.boot).runs(), Identity(me.pid, me.start, "another").runs()
    (True, False, False)
    """

    pid: int
    start: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> Identity:
        """Return the identity of a process of this machine. Raises ProcessLookupError."""
        state, start = _stat(pid)
        if state == "Z":
            raise ProcessLookupError(f"process {pid} has ended")
        return cls(pid, start, boot())

    def runs(self) -> bool:
        """Return whether this process runs on this machine."""
        try:
            return Identity.of(self.pid) == self
        except ProcessLookupError:
            return False

    def end(self, grace: float) -> None:
        """Send SIGTERM, and SIGKILL ``grace`` seconds later. Do nothing if it has ended. Raises PermissionError."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if not self.runs():  # from here on the descriptor refers to this one process
                return
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGTERM)
                if not self._gone_within(grace):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                    self._gone_within(5.0)
        finally:
            os.close(fd)

    def _gone_within(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self.runs():
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True


def boot() -> str:
    """Return the id of this machine's boot, which is another one after each boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _stat(pid: int) -> tuple[str, int]:
    """Return the state of a process and its start time. Raises ProcessLookupError."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        fields = []
    if len(fields) < 20:
        raise ProcessLookupError(f"there is no process {pid}")
    return fields[0].decode(), int(fields[19])
