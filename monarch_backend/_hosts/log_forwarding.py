"""What processes of a host write, on its way to their controller: pipes here, messages to there, no more than it takes.

Reads and sends bytes; lines and their prefixes are made where they are shown.
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
"""Bytes that are read of a process that has ended: pipes hold no more."""

MAX_UNACKNOWLEDGED_BYTES = 4 << 20
"""Bytes that the controller has not dealt with; then pipes fill up, and processes wait in print()."""


class OutputReader:
    """Reads the pipes of many processes, on a thread. ``say(id, stream, data)`` sends; the end has no data."""

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
        """The read end of a pipe, which belongs to the reader now."""
        os.set_blocking(fd, False)
        with self._lock:
            self._open[number, stream] = fd
            self._selector.register(fd, selectors.EVENT_READ, (number, stream))
        os.write(self._write, b"\0")

    def taken(self, count: int) -> None:
        """The controller has dealt with so many bytes."""
        with self._room:
            self._untaken -= count
            self._room.notify_all()

    def end(self, number: int) -> None:
        """The process has ended: what it left in its pipes, and no more, whoever holds their other end."""
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
        """False at the end; with ``patient`` what is empty for now is no end. With the lock."""
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
