"""Output of a host's processes on its way to their controller: read from pipes, sent in messages, with a limit.

It handles bytes only. The controller splits them into lines and adds prefixes.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
from collections.abc import Callable

from monarch_backend._core.limits import start_thread

CHUNK_BYTES = 64 << 10
MAX_PIPE_BYTES = 1 << 20
"""Limit of bytes that are read from a process that has ended. A pipe holds no more."""

MAX_UNACKNOWLEDGED_BYTES = 4 << 20
"""Limit of bytes that the controller has not handled. Beyond it pipes fill up, and processes wait in print()."""


class OutputReader:
    """Reader of many processes' pipes, on one thread. ``say(id, stream, data)`` sends; empty data marks the end."""

    def __init__(self, say: Callable[[int, int, bytes], None]) -> None:
        self._say = say
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._untaken = 0
        self._room = threading.Condition(self._lock)
        self._read, self._write = os.pipe()
        self._selector.register(self._read, selectors.EVENT_READ, None)
        self._open: dict[tuple[int, int], int] = {}
        self._thread = threading.Thread(target=self._run, name="monarch-output", daemon=True)
        start_thread(self._thread)

    def add(self, number: int, stream: int, fd: int) -> None:
        """Read from the read end of a pipe, which the reader owns from now on."""
        os.set_blocking(fd, False)
        with self._lock:
            self._open[number, stream] = fd
            self._selector.register(fd, selectors.EVENT_READ, (number, stream))
        os.write(self._write, b"\0")

    def taken(self, count: int) -> None:
        """Note that the controller has handled ``count`` more bytes."""
        with self._room:
            self._untaken -= count
            self._room.notify_all()

    def end(self, number: int) -> None:
        """Read the rest of an ended process's pipes and close them, even if a descendant holds their other end."""
        for stream in (1, 2):
            with self._lock:
                fd = self._open.get((number, stream))
                for _ in range(MAX_PIPE_BYTES // CHUNK_BYTES):  # a descendant may be writing still
                    if fd is None or not self._take(number, stream, fd):
                        break
                self._close(number, stream)

    def _run(self) -> None:
        while True:
            with self._room:
                while self._untaken >= MAX_UNACKNOWLEDGED_BYTES:
                    self._room.wait()
            for key, _ in self._selector.select():
                if key.data is None:
                    os.read(self._read, 4096)
                    continue
                number, stream = key.data
                with self._lock:
                    if self._open.get((number, stream)) == key.fd and not self._take(number, stream, key.fd, True):
                        self._close(number, stream)

    def _take(self, number: int, stream: int, fd: int, patient: bool = False) -> bool:
        """Read once, with the lock held; return False at the end. With ``patient`` an empty pipe is not the end."""
        try:
            data = os.read(fd, CHUNK_BYTES)
        except BlockingIOError:
            return patient
        except OSError:
            return False
        if data:
            self._untaken += len(data)
            self._say(number, stream, data)
        return bool(data)

    def _close(self, number: int, stream: int) -> None:
        fd = self._open.pop((number, stream), None)
        if fd is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(fd)
            os.close(fd)
            self._say(number, stream, b"")
