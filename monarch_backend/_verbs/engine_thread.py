"""Thread of an engine: it handles the devices' events, and runs calls that other threads queue."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence

from monarch_backend import _native
from monarch_backend._verbs.completion_poller import Completions
from monarch_backend._verbs.open_device import Device

log = logging.getLogger("monarch_backend")

UNREADABLE = "completions of a device cannot be read"

_of_thread = threading.local()


def hears() -> bool:
    """True on a thread that handles an engine's completions. It must not wait, because nothing would complete."""
    return getattr(_of_thread, "hears", False)


class _Wake:
    """Event that wakes the engine's thread.

    Other threads may be about to set it, at any point and without a lock, while the engine is closed. It stays open
    until the last of them has released it, because its file descriptor might be reused.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.fd)


class EngineThread:
    """Thread of one engine, with the calls that are queued for it.

    ``turn`` is called after each wake-up, and returns True if the thread is to end. ``patience`` returns the
    milliseconds until the next turn, None without a deadline. ``fail(reason)`` is called in an except clause, if
    completions cannot be read.
    """

    def __init__(
        self, turn: Callable[[], bool], patience: Callable[[], float | None], fail: Callable[[str], None]
    ) -> None:
        self._turn, self._patience, self._fail = turn, patience, fail
        self._soon: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._wake: _Wake | None = None

    def open(self) -> None:
        self._wake = _Wake()

    def start(self, devices: Sequence[Device], completions: Completions) -> None:
        assert self._wake is not None
        of = devices, completions, self._wake.fd
        self._thread = threading.Thread(target=self._run, args=of, name="monarch-verbs", daemon=True)
        self._thread.start()

    def stop(self) -> threading.Thread | None:
        """Wake the thread, because it is to end. Return it, if it was started, for the caller to join."""
        thread, self._thread = self._thread, None
        self.wake()
        return thread

    def close(self) -> None:
        # The descriptor stays open until the last thread that may set the event has released it.
        self._wake = None

    def detach_after_fork(self) -> None:
        """Keep a forked child from waking the parent's thread, and from running its calls."""
        _native.keep_for_ever(self._soon)
        self._soon, self._thread, self._wake = deque(), None, None

    @property
    def is_here(self) -> bool:
        return threading.current_thread() is self._thread

    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def call_soon(self, call: Callable[[], None]) -> None:
        """Call a function on the thread, once it exists. Takes no lock, because objects call it when they end."""
        self._soon.append(call)
        self.wake()

    def wake(self) -> None:
        wake = self._wake
        if wake is not None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(wake.fd, 1)

    def settle(self, seconds: float) -> None:
        """Wait, for at most ``seconds``, until the thread has run the calls that are queued now."""
        if self._thread is None or self.is_here:
            return
        done = threading.Event()
        self.call_soon(done.set)
        done.wait(seconds)

    def _run(self, devices: Sequence[Device], completions: Completions, wake: int) -> None:
        _of_thread.hears = True
        poller = select.poll()
        poller.register(wake, select.POLLIN)
        by_fd = {device.nic.fd: device for device in devices}
        for fd in by_fd:
            poller.register(fd, select.POLLIN)
        while True:
            for fd, _ in poller.poll(0 if self._soon else self._patience()):
                if fd == wake:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(fd)
                    continue
                try:
                    completions.heard(by_fd[fd])
                except Exception:
                    self._fail(UNREADABLE)
                    poller.unregister(fd)
            for _ in range(len(self._soon)):
                try:
                    self._soon.popleft()()
                except Exception:
                    log.exception("verbs: a callback has failed")
            if self._turn() and not self._soon:
                return
