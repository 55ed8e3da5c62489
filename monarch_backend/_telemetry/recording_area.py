"""Recording area of a process and of the processes that it starts: one slot of shared memory for each.

The owner keeps the area, so the slot of a killed process can be read afterwards. The area ends with its owner. The
number of slots of ended processes is bounded. csrc/telemetry/recording.h has the layout of a slot.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import threading
import time
from collections import deque

from monarch_backend import _native
from monarch_backend._core import env, platform
from monarch_backend._telemetry.kinds import SlotState

AREA_NAME = "monarch-recording"
"""Name of the area's memory file, by which readers find it."""

MAX_SLOTS = 4096
MAX_ENDED = 64
"""Ended processes whose slots are kept."""

_LAYOUT = _native.recording_layout
_SLOT_BYTES = _LAYOUT["slot_bytes"]
_HEADER_BYTES = _LAYOUT["header_bytes"]
_PID_AT, _STARTED_AT, _EXIT_CODE_AT, _LABEL_AT, _ENDED_AT, _RESTARTS_AT = 4, 8, 28, 40, 232, 240  # in a slot
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2


class RecordingArea:
    """The slots of one owner. Slot 0 is the owner's own, unless another process records it."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create(AREA_NAME, os.MFD_CLOEXEC)
        self._lock = threading.Lock()
        self._used, self._free = 1, list[int]()
        self._ended: deque[int] = deque()
        try:
            self._grow()
        except OSError:
            os.close(self.descriptor)
            raise

    def _grow(self) -> None:
        """Make room for the used slots. Raises OSError, for example where files are limited in size."""
        os.ftruncate(self.descriptor, _HEADER_BYTES + self._used * _SLOT_BYTES)
        self._write_header()

    def _write_header(self) -> None:
        about = {
            "version": _LAYOUT["version"],
            "slot_bytes": _SLOT_BYTES,
            "slots": self._used,
            "owner": os.getpid(),
            "program": " ".join(sys.argv)[:1024],
            "started": time.time(),
        }
        os.pwrite(self.descriptor, json.dumps(about).encode().ljust(_HEADER_BYTES - 1) + b"\n", 0)

    def reserve(self, label: str) -> int:
        """Return the number of a slot for a new process, or 0 if all are in use."""
        with self._lock:
            if self._free:
                index = self._free.pop()
            elif self._used < MAX_SLOTS:
                index, self._used = self._used, self._used + 1
                try:
                    self._grow()
                except OSError:
                    self._used -= 1
                    return 0
            else:
                return 0
        _write_label(self.descriptor, index, label)
        self._write_number(index, _STARTED_AT, time.monotonic_ns(), 8)  # its process overwrites it
        self._write_state(index, SlotState.RESERVED)
        return index

    def forked(self, index: int, pid: int) -> None:
        """Note the pid of the process of a slot, which it may not have written yet."""
        self._write_number(index, _PID_AT, pid, 4)

    def cancel(self, index: int) -> None:
        """Free the slot of a process that was not started."""
        _discard(self.descriptor, self._offset(index), _SLOT_BYTES)
        with self._lock:
            self._free.append(index)

    def end(self, index: int, exit_code: int) -> None:
        """Note that the process of a slot has ended. The oldest slot of an ended process may be reused from now on."""
        self._write_number(index, _EXIT_CODE_AT, exit_code, 4)
        self._write_number(index, _ENDED_AT, time.monotonic_ns(), 8)
        self._write_state(index, SlotState.ENDED)  # last: a reader that sees this state finds the others
        with self._lock:
            self._ended.append(index)
            while len(self._ended) > MAX_ENDED:
                oldest = self._ended.popleft()
                _discard(self.descriptor, self._offset(oldest), _SLOT_BYTES)
                self._free.append(oldest)

    def _write_state(self, index: int, state: SlotState) -> None:
        self._write_number(index, 0, int(state), 4)

    def _write_number(self, index: int, at: int, number: int, size: int) -> None:
        value = number.to_bytes(size, sys.byteorder, signed=number < 0)
        os.pwrite(self.descriptor, value, self._offset(index) + at)

    def _offset(self, index: int) -> int:
        return int(_HEADER_BYTES + index * _SLOT_BYTES)

    def close(self) -> None:
        os.close(self.descriptor)


def _discard(descriptor: int, offset: int, length: int) -> None:
    """Give the memory of a part of the file back. It reads as zero afterwards."""
    libc = ctypes.CDLL(None)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    libc.fallocate(descriptor, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, offset, length)


def printable(text: str, limit: int | None = None) -> str:
    """Return at most ``limit`` bytes of the text, without characters that UTF-8 lacks, as in undecodable file names."""
    return text.encode(errors="replace")[:limit].decode(errors="ignore")


def is_wanted() -> bool:
    """Return whether this process records: MONARCH_TELEMETRY, and the system has what it needs."""
    return bool(env.get("MONARCH_TELEMETRY")) and platform.HAS_MEMFD


def use(owner: int, descriptor: int, index: int, label: str) -> None:
    """Record this process into a slot of another process's area. Raises OSError."""
    path = f"/proc/{owner}/fd/{descriptor}"
    area = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        _native.use_recording(area, index, printable(label))
    finally:
        os.close(area)


def describe(owner: int, descriptor: int, index: int, label: str, restarts: int) -> None:
    """Change the label of a slot of another process's area, and note its restarts. Raises OSError."""
    area = os.open(f"/proc/{owner}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        _write_label(area, index, label)
        at = _HEADER_BYTES + index * _SLOT_BYTES + _RESTARTS_AT
        os.pwrite(area, restarts.to_bytes(4, sys.byteorder), at)
    finally:
        os.close(area)


def _write_label(descriptor: int, index: int, label: str) -> None:
    os.pwrite(descriptor, printable(label, 191).encode() + b"\0", _HEADER_BYTES + index * _SLOT_BYTES + _LABEL_AT)


def map_slot(descriptor: int, index: int) -> mmap.mmap:
    """Return the memory of a slot, for reading."""
    # An offset of mmap must be a multiple of the page size, which slots have.
    return mmap.mmap(descriptor, _SLOT_BYTES, prot=mmap.PROT_READ, offset=_HEADER_BYTES + index * _SLOT_BYTES)
