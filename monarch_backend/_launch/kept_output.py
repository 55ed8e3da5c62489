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


@dataclass
class _File:
    descriptor: int
    label: str
    pid: int
    stream: int
    splitter: LineSplitter = field(default_factory=LineSplitter)


class KeptOutput:
    """Keeps the output of ranks in files. Close it."""

    def __init__(self) -> None:
        self._files: list[_File] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._history: log_history.LogHistory | None = None

    def add(self, path: str, label: str, pid: int, stream: int) -> None:
        """Keep what a rank writes to a file, as `stream` 1 or 2. Do nothing where no history is wanted or possible."""
        if self._thread is None and not self._start():
            return
        with contextlib.suppress(OSError):  # the launcher's own report names a file that cannot be read
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            with self._lock:
                self._files.append(_File(descriptor, label, pid, stream))

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
        while not self._ended.wait(PERIOD_S):
            self._read(is_end=False)

    def _read(self, *, is_end: bool) -> None:
        """Keep what the files have since the last look; at the end also lines without an end."""
        with self._lock:
            for each in self._files:
                lines: list[bytes] = []
                with contextlib.suppress(OSError):
                    while data := os.read(each.descriptor, _READ_BYTES):
                        lines += each.splitter.feed(data)
                if is_end and (rest := each.splitter.take_partial(final=True)) is not None:
                    lines.append(rest)
                self._keep(each, lines)

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
            self._read(is_end=True)
        for each in self._files:
            os.close(each.descriptor)
        self._files.clear()
        if self._history is not None:
            self._history.close()
            self._history = None
