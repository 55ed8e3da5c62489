"""Log history: the last output of the processes that one process has started, in a file that others can read.

It is a file of log_files.py, which outlives its owner. Where none can be made, it is a memory file without a name,
which ends with its owner. Readers find either in /proc/PID/fd.

Layout, in the byte order of the machine: a page with a JSON object and, from `_ENDS_AT` on, two 64-bit numbers, tail
and head. Then a ring of records. Tail and head count bytes since the start; a position modulo the size of the ring is a
place in it. A record is a header, a label and text, filled up to a multiple of the header's size.

The writer moves the tail before it overwrites old records, and the head after it has written a new one. A reader copies
everything between both and then drops what lies before the new tail. So it needs no lock, and no answer of the writer.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import mmap
import os
import struct
import sys
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

from monarch_backend._core import env
from monarch_backend._telemetry import log_files, recording_area

log = logging.getLogger("monarch_backend")

HISTORY_NAME = "monarch-log-history"
"""Name of the memory file, by which readers find it."""

STREAM_NAMES = {1: "stdout", 2: "stderr"}

_VERSION = 2
_PAGE = 4096
_ENDS_AT = 4080  # of tail and head in the first page
_HEADER = struct.Struct("=QdIIHBx")  # position, time, bytes of text, pid, bytes of the label, stream
_HEADER_BYTES = 32
_MAX_LABEL_BYTES = 255


_MAX_JOBS = 8
_MAX_JOB_CHARACTERS = 100

_jobs: list[str] = []
"""Names of the jobs that this program uses."""

_histories: weakref.WeakSet[LogHistory] = weakref.WeakSet()
"""The histories of this process."""


def note_job(name: str) -> None:
    """Write into the histories of this process that its program uses a job. Readers find them by its name."""
    if name in _jobs or len(_jobs) == _MAX_JOBS or len(name) > _MAX_JOB_CHARACTERS:
        return
    _jobs.append(name)
    for history in list(_histories):
        with contextlib.suppress(OSError):  # closed, or the disk is full: it is not found by this name
            history.write_about()


@dataclass(frozen=True)
class LogLine:
    """A line of output. ``time`` is in seconds since the epoch, ``pid`` is 0 if it was not known yet."""

    time: float
    label: str
    pid: int
    stream: str
    text: str


class LogHistory:
    r"""Writer of a history of at most ``size`` bytes, which is rounded up to pages. One thread at a time appends.

    ``descriptor`` is that of an empty file, which the history closes. Without one it is in memory. Raises OSError
    without memory, space or descriptors; the descriptor stays the caller's.

    >>> history = LogHistory(1 << 16)
    >>> history.append("gpus 3", 4711, 1, b"loading\nready")
    >>> [(line.label, line.pid, line.stream, line.text) for line in HistoryReader(os.dup(history.descriptor)).read()]
    [('gpus 3', 4711, 'stdout', 'loading'), ('gpus 3', 4711, 'stdout', 'ready')]
    >>> history.close()
    """

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        self.size = -(-max(size, _PAGE) // _PAGE) * _PAGE
        self._owner = os.getpid()
        made = os.memfd_create(HISTORY_NAME, os.MFD_CLOEXEC) if descriptor is None else descriptor
        self.descriptor, self._is_file = made, descriptor is not None
        try:
            os.ftruncate(made, _PAGE + self.size)
            self.write_about()
        except BaseException:
            if descriptor is None:
                os.close(made)
            raise
        self._tail = self._head = 0
        _histories.add(self)

    def write_about(self) -> None:
        """Write the first page: the program, and the names of its jobs. Raises OSError."""
        about = {
            "version": _VERSION, "size": self.size, "owner": self._owner, "program": " ".join(sys.argv)[:300],
            "jobs": _jobs,
        }  # fmt: skip
        os.pwrite(self.descriptor, json.dumps(about).encode().ljust(_ENDS_AT, b"\0"), 0)

    def append(self, label: str, pid: int, stream: int, text: bytes) -> None:
        """Add text, of one or more lines without the last line's end. The oldest records make room for it.

        Raises OSError where the disk is full. The history stays as it was.
        """
        name = label.encode(errors="replace")[:_MAX_LABEL_BYTES]
        limit = self.size // 2 - 2 * _HEADER_BYTES - len(name)
        if len(text) > limit:  # no record may fill the ring
            text = text[-limit:].partition(b"\n")[2] or text[-limit:]
        head = self._head
        end = head + _record_bytes(len(name) + len(text))
        if end - self._tail > self.size:
            self._make_room(end)
        header = _HEADER.pack(head, time.time(), len(text), pid, len(name), stream)
        self._put(head, header.ljust(_HEADER_BYTES) + name + text)
        self._head = end
        self._write_end(1, end)

    def _make_room(self, end: int) -> None:
        tail, size = self._tail, self.size
        while end - tail > size:
            header = os.pread(self.descriptor, _HEADER.size, _PAGE + tail % size)
            if len(header) < _HEADER.size:
                raise OSError(errno.EIO, "another program has cut its file")
            _, _, text_bytes, _, label_bytes, _ = _HEADER.unpack(header)
            tail += _record_bytes(label_bytes + text_bytes)
        self._tail = tail
        self._write_end(0, tail)

    def _write_end(self, which: int, value: int) -> None:
        os.pwrite(self.descriptor, value.to_bytes(8, sys.byteorder), _ENDS_AT + 8 * which)

    def _put(self, position: int, data: bytes) -> None:
        at = position % self.size
        first = min(len(data), self.size - at)
        # Not through a mapping: on a full disk, or if the file is truncated, that ends the process with SIGBUS.
        self._write(data[:first], _PAGE + at)
        self._write(data[first:], _PAGE)

    def _write(self, data: bytes, at: int) -> None:
        rest = memoryview(data)
        while rest:
            written = os.pwrite(self.descriptor, rest, at)
            rest, at = rest[written:], at + written

    def close(self) -> None:
        """Close the file. A memory file ends once no reader has it open, and a file without lines is removed."""
        _histories.discard(self)
        if self._is_file and not self._head and self._owner == os.getpid():
            log_files.remove(self.descriptor)
        os.close(self.descriptor)


class HistoryReader:
    """Reader of a history, by a descriptor of its memory file, which it owns.

    Raises ValueError if another release has written it.
    """

    def __init__(self, descriptor: int) -> None:
        try:
            about = json.loads(os.pread(descriptor, _ENDS_AT, 0).partition(b"\0")[0])
            if about["version"] != _VERSION:
                raise ValueError(
                    f"process {about['owner']} keeps its log history in layout {about['version']} of another release "
                    f"of monarch_backend, and this one reads {_VERSION}: use the program's own environment"
                )
            self.owner: int = about["owner"]
            self.program: str = about["program"]
            self.jobs: list[str] = about.get("jobs", [])
            self._size: int = about["size"]
            self._memory = mmap.mmap(descriptor, _PAGE + self._size, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self._ends = memoryview(self._memory)[_ENDS_AT:_PAGE].cast("Q")
        self._seen = 0

    def read(self) -> list[LogLine]:
        """Return the lines since the last call, oldest first. The first call returns all that are kept."""
        head = self._ends[1]
        start = max(self._ends[0], self._seen)
        if start >= head:  # nothing new, or all of it was overwritten meanwhile
            return []
        data = self._copy(start, head)
        valid = self._ends[0]
        self._seen = head
        return list(_lines(data, start, max(start, valid)))

    def _copy(self, start: int, end: int) -> bytes:
        length, at = end - start, start % self._size
        first = self._memory[_PAGE + at : _PAGE + min(at + length, self._size)]
        return first + self._memory[_PAGE : _PAGE + length - len(first)]

    def close(self) -> None:
        self._ends.release()
        self._memory.close()

    def __enter__(self) -> HistoryReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _record_bytes(content: int) -> int:
    return _HEADER_BYTES + -(-content // _HEADER_BYTES) * _HEADER_BYTES


def _lines(data: bytes, start: int, valid: int) -> Iterator[LogLine]:
    at = valid - start
    while at + _HEADER_BYTES <= len(data):
        position, when, text_bytes, pid, label_bytes, stream = _HEADER.unpack_from(data, at)
        if position != start + at:
            raise ValueError(f"the log history has no record at {start + at}: it is damaged")
        content = at + _HEADER_BYTES
        label = data[content : content + label_bytes].decode(errors="replace")
        text = data[content + label_bytes : content + label_bytes + text_bytes].decode(errors="replace")
        for line in text.split("\n"):
            yield LogLine(when, label, pid, STREAM_NAMES.get(stream, str(stream)), line)
        at += _record_bytes(label_bytes + text_bytes)


def make() -> LogHistory | None:
    """Return a history of the size that the setting gives. Return None if none is wanted, or there is no memory."""
    size = int(env.get("MONARCH_LOG_HISTORY_BYTES"))
    if not size or not recording_area.is_wanted():
        return None
    try:  # the program's output matters more than its history
        return _make_in_file(size) or LogHistory(size)
    except OSError as error:
        if env.get("MONARCH_LOG_DIR"):
            log.warning("the last output of this program is only kept while it runs: %s", error)
    try:
        return LogHistory(size)
    except OSError:
        return None


def _make_in_file(size: int) -> LogHistory | None:
    descriptor = log_files.create()
    if descriptor is None:
        return None
    try:
        return LogHistory(size, descriptor)
    except OSError:
        log_files.remove(descriptor)
        os.close(descriptor)
        raise


def of_process(pid: int) -> HistoryReader | None:
    """Return a reader of what a process has collected. Return None if there is no history to see."""
    # Imported here: the search needs numpy's reader of areas, and this module is loaded in each program.
    from monarch_backend._telemetry.discovery import descriptor_named

    descriptor = descriptor_named(pid, HISTORY_NAME, log_files.NAME)
    if descriptor is None:
        return None
    try:
        return HistoryReader(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:  # it has ended meanwhile
        return None
