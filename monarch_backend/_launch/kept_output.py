"""Output of ranks that goes to files: also kept in the log history, where `monarch-backend logs` finds it.

The ranks write to their files themselves. A thread of the launcher reads what has come, so no rank waits for it. Output
that goes to the terminal is not kept: a pipe in between would change what the rank's stdout is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from dataclasses import dataclass, field

from monarch_backend._core.limits import ResourceLimitError, start_thread
from monarch_backend._logs.line_splitter import LineSplitter, read_records
from monarch_backend._telemetry import log_history

_log = logging.getLogger("monarch_backend")

PERIOD_S = 0.2
"""Seconds between two looks at the files."""

_READ_BYTES = 1 << 20

MAX_LOOK_BYTES = 4 << 20
"""Bytes of a file that one look keeps. A rank that writes faster does not hold up the files of others."""

MAX_LAST_BYTES = 16 << 20
"""Bytes of a file that the last look keeps: the newest ones. It ends also if processes of the rank still write."""


@dataclass
class _File:
    descriptor: int
    path: str
    label: str
    pid: int
    stream: int
    splitter: LineSplitter = field(default_factory=LineSplitter)
    has_ended: bool = False
    """Whether the next look is the last one."""


class KeptOutput:
    """Keeps the output of ranks in files. Close it."""

    def __init__(self) -> None:
        self._files: list[_File] = []
        self._lock = threading.Lock()  # of the list; only one thread at a time reads files
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._history: log_history.LogHistory | None = None

    def add(self, path: str, label: str, pid: int, stream: int) -> None:
        """Keep what a rank writes to a file, as `stream` 1 or 2. Do nothing where no history is wanted or possible.

        An earlier file of the same label and stream is read to its end and closed.
        """
        if self._thread is None and not self._start():
            return
        with contextlib.suppress(OSError):  # the launcher's own report names a file that cannot be read
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            with self._lock:
                for each in self._files:
                    each.has_ended |= (each.label, each.stream) == (label, stream)
                self._files.append(_File(descriptor, path, label, pid, stream))

    def end(self, pid: int) -> None:
        """Let the next look at the files of a rank that has exited be the last one. It closes them.

        Output that its child processes write later is only in the files.
        """
        with self._lock:
            for each in self._files:
                each.has_ended |= each.pid == pid

    def _start(self) -> bool:
        self._history = self._history or log_history.make()
        if self._history is None:
            return False
        thread = threading.Thread(target=self._run, name="monarch-kept-output", daemon=True)
        try:
            start_thread(thread)
        except ResourceLimitError as error:
            _log.warning("the output of ranks is only in their files: %s", error)
            return False
        self._thread = thread
        return True

    def _run(self) -> None:
        is_more = False
        while not self._ended.wait(0 if is_more else PERIOD_S):
            is_more = self._look()

    def _look(self) -> bool:
        """Keep what the files have since the last look. Return whether a file has more."""
        is_more = False
        for each in self._current():
            if self._ended.is_set():  # `close` reads the rest
                break
            if each.has_ended:
                self._read_last(each)
            else:
                is_more |= self._read(each, MAX_LOOK_BYTES)
        return is_more

    def _current(self) -> list[_File]:
        with self._lock:
            return list(self._files)

    def _read(self, file: _File, most: int) -> bool:
        """Keep about ``most`` further bytes of a file. Return whether it has more."""
        with contextlib.suppress(OSError):
            for _ in range(-(-most // _READ_BYTES)):
                data = os.read(file.descriptor, _READ_BYTES)
                if not data:
                    return False
                self._keep(file, file.splitter.feed(data))
            return True
        return False

    def _read_last(self, file: _File) -> None:
        """Keep the last lines of a file, also one without an end, and close it."""
        self._skip_to_last(file)
        self._read(file, MAX_LAST_BYTES)
        rest = file.splitter.take_partial(final=True)
        self._keep(file, [] if rest is None else [rest])
        with self._lock:
            self._files.remove(file)
        os.close(file.descriptor)

    def _skip_to_last(self, file: _File) -> None:
        with contextlib.suppress(OSError):
            left = os.fstat(file.descriptor).st_size - os.lseek(file.descriptor, 0, os.SEEK_CUR) - MAX_LAST_BYTES
            if left > 0:
                os.lseek(file.descriptor, left, os.SEEK_CUR)
                note = b"... [%d bytes are only in %s]" % (left, os.fsencode(file.path))
                rest = file.splitter.take_partial(final=True)
                self._keep(file, [note] if rest is None else [rest, note])
                file.splitter = LineSplitter()

    def _keep(self, file: _File, lines: list[bytes]) -> None:
        assert self._history is not None
        with contextlib.suppress(OSError):  # a full disk: the lines are in the rank's own file
            for _, line in read_records(lines):
                self._history.append(file.label, file.pid, file.stream, line)

    def close(self) -> None:
        """Keep the last lines, and end."""
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
        for each in self._current():
            self._read_last(each)
        if self._history is not None:
            self._history.close()
            self._history = None
