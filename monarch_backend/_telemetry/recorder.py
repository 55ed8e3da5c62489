"""What this process records: names, activities and events. All functions have no effect while nothing is recorded.

Recording starts with `start`. In the main program it starts with its first processes, process group, span or metric.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import operator
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from monarch_backend import _native
from monarch_backend._core import fork
from monarch_backend._telemetry import recording_area, stack_signal
from monarch_backend._telemetry.kinds import Kind
from monarch_backend._telemetry.labels import fold_numbers
from monarch_backend._telemetry.recording_area import RecordingArea, printable

_log = logging.getLogger("monarch_backend")

is_recording = _native.is_recording
record_event = _native.record_event
begin_activity = _native.begin_activity
end_activity = _native.end_activity
note_queue = _native.note_queue
note_arrival = _native.note_arrival
count_ended = _native.count_ended
monotonic_ns = _native.monotonic_ns

GROUP_RANKS = " has the ranks "
"""What is between the name of a process group and its ranks, in the names of the recording."""

MAX_GROUP_TEXT = 500
"""Bytes of such a name. Ranks of larger groups are not recorded."""

MAX_GROUP_BYTES = 8 << 10
"""Room for such names in all. Ranks of further groups are not recorded, so that names of actors still fit."""

_group_bytes = 0

_lock = threading.Lock()
_area: RecordingArea | None = None
_names: dict[str, int] = {}
_identity = 0
_can_record = True
_may_begin = True  # a span may start the recording
_is_begun_alone = False  # a span has started it, and the program has started no process
_slot: tuple[int, int, int, str] | None = None  # in the starter's area: its pid and descriptor, the index, the label


def area(label: str = "") -> RecordingArea | None:
    """Return the area for the processes that this one starts, or None if nothing is recorded.

    The first call makes it. It also starts the recording of this process as ``label``, unless its starter records it.
    """
    global _area, _can_record, _may_begin, _is_begun_alone
    _may_begin = _is_begun_alone = False  # before the lock: a signal handler may have a span
    with _lock:
        if _area is None and _can_record and recording_area.is_wanted():
            own = f"program {os.path.basename(sys.argv[0])}" if sys.argv else "program"
            try:
                _area = RecordingArea()
                if not is_recording():
                    _native.use_recording(_area.descriptor, 0, printable(label or own))
                    _names.clear()
                    _native.set_recording_identity(_identity)
                    stack_signal.install()
            except (OSError, RuntimeError) as error:  # no descriptor, memory or thread left
                _can_record = False
                _log.warning("process %d does not record what it does: %s", os.getpid(), error)
        return _area


def own_area() -> int | None:
    """Return a new descriptor of the area of the processes that this one starts, or None. Raises OSError."""
    return None if _area is None else os.dup(_area.descriptor)


def recording_area_of_this_process() -> int | None:
    """Return a new descriptor of the area that has this process's slot, or None. Raises OSError."""
    if _slot is None:
        return own_area()
    return os.open(f"/proc/{_slot[0]}/fd/{_slot[1]}", os.O_RDONLY | os.O_CLOEXEC)


def begin() -> bool:
    """Return whether this process records. The first span or metric of a program starts its recording."""
    global _is_begun_alone
    if _may_begin and not is_recording():
        rank = os.environ.get("RANK", "")  # of torchrun, before there is a process group
        area(f"rank {rank}" if rank else "")
        _is_begun_alone = not rank
    return is_recording()


def start_rank(rank: str) -> None:
    """Start the recording of a rank of torchrun in an area of its own, unless its starter records it."""
    if not is_recording():
        area(f"rank {rank}")
    elif _is_begun_alone and _area is not None:  # its first span did not know that it is a rank
        recording_area.describe(os.getpid(), _area.descriptor, 0, f"rank {rank}", 0)


starts = 0
"""Number of recordings that this process, and those that it was forked from, have begun: each without names."""


def start(owner: int, descriptor: int, index: int, label: str) -> None:
    """Record this process into a slot of its starter's area. Without access to the area, nothing is recorded."""
    global _slot, starts
    starts += 1
    try:
        recording_area.use(owner, descriptor, index, label)
        _slot = (owner, descriptor, index, label)
        _names.clear()
        _native.set_recording_identity(_identity)
        stack_signal.install()
    except (OSError, RuntimeError):
        return


def name_mesh(name: str, restarts: int = 0) -> None:
    """Add the name of the mesh of this process to its label: "gpus 3 of trainers". Note how often it was restarted."""
    if _slot is not None and name:
        owner, descriptor, index, label = _slot
        with contextlib.suppress(OSError):  # the starter has ended
            recording_area.describe(owner, descriptor, index, f"{label} of {name}", restarts)


def set_identity(identity: int) -> None:
    """Set the number by which events of other processes refer to this one."""
    global _identity
    _identity = identity
    _native.set_recording_identity(identity)


def name_number(text: str) -> int:
    """Return the number of a name in events."""
    number = _names.get(text)
    if number is None:
        number = _native.intern_name(printable(text))
        if number:
            _names[text] = number
    return number


def take_cell(kind: int, name: str, rank: int = 0, trace: int = 0) -> int:
    """Return a cell for an activity, 0 if there is none. ``trace`` of a collective is the identity of its group."""
    return int(_native.take_cell(int(kind), printable(name), rank, trace))


def cell_number(cell: int) -> int:
    """Return the place of a cell in the slot, from 1, or 0 for no cell."""
    return int(_native.cell_number(cell))


def release_cell(cell: int) -> None:
    """Free a cell that `take_cell` has returned."""
    _native.release_cell(cell)


def event(
    kind: int, name: str, detail: str = "", *, status: int = 0, start_ns: int = 0, reference: int = 0,
    value: Any = 0, trace: int = 0,
) -> None:  # fmt: skip
    """Record an event. For paths that run rarely: it looks up both names."""
    if is_recording():
        record_event(int(kind), status, name_number(name), name_number(detail), start_ns, reference, value, trace)


def mesh(name: str, kind: str, extent: Any, reference: int = 0, procs: str = "", shape: Any = None) -> None:
    """Record a new mesh: its class and its dimensions.

    Of actors also the name of the mesh of their processes, and with ``shape`` which of these they are on.
    """
    if is_recording():
        about = {"class": kind, "sizes": dict(zip(extent.labels, extent.sizes, strict=True))}
        if procs:
            about["procs"] = procs
        if shape is not None and (shape.offset, shape.strides) != (0, row_major(extent.sizes)):
            about["view"] = shape.strides and (shape.offset, shape.strides)
        event(Kind.MESH, name, json.dumps(about, separators=(",", ":")), reference=reference)


def row_major(sizes: Iterable[int]) -> tuple[int, ...]:
    """Return the strides of a mesh of these sizes: the ranks between neighbors in each dimension.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    steps = list(itertools.accumulate(reversed(tuple(sizes)), operator.mul, initial=1))
    return tuple(reversed(steps[:-1]))


def process_group(name: str, ranks: Sequence[int]) -> None:
    """Record the ranks of the world that share memory in a group. As a name it stays; an event would be overwritten."""
    global _group_bytes
    text = f"{name}{GROUP_RANKS}{fold_numbers(ranks)}"
    size = len(text.encode()) + 2
    if ranks and size <= MAX_GROUP_TEXT and _group_bytes + size <= MAX_GROUP_BYTES and text not in _names:
        _group_bytes += size
        name_number(text)


def _in_forked_child() -> None:
    global _area, _lock, _slot, _group_bytes, _may_begin, _is_begun_alone, starts
    _may_begin = _is_begun_alone = False  # such as a worker of a DataLoader: it is no program of its own
    _slot = None
    starts += 1
    _group_bytes = 0
    _lock = threading.Lock()
    _names.clear()
    if _area is not None:
        _area.close()
        _area = None


fork.register(fork.Step.RECORDING, after_in_child=_in_forked_child)
