"""Program of telemetry.py: a recording of N processes, all written by this one, in the format of real recordings.

    python benchmarks/_simulated_recording.py N EVENTS

The core writes each slot, as in a real process. Pids are larger than the kernel's largest one, so that readers find no
other process in /proc. It prints "ready", and ends when standard input ends.
"""

from __future__ import annotations

import os
import sys

from monarch_backend import _native
from monarch_backend._telemetry import recorder
from monarch_backend._telemetry.kinds import Kind, State
from monarch_backend._telemetry.recording_area import RecordingArea

FIRST_PID = 1 << 22  # the kernel's largest pid is one less
IDENTITY = 1 << 32
MESSAGE_SHARE = 3  # of four events three are messages; the others are spans, metrics, steps and collectives


def write(index: int, events: int) -> None:
    """Write what an actor of this rank has done: messages from the program, spans with attributes, and others."""
    recorder._names.clear()
    _native.set_recording_identity(IDENTITY + index)
    actor, endpoint = recorder.name_number("workers"), recorder.name_number("noop")
    span, metric, step = (recorder.name_number(name) for name in ("forward", "loss", "train"))
    group, operation = recorder.name_number("0"), recorder.name_number("all_reduce")
    cell = recorder.take_cell(Kind.MESSAGE, "workers", index)
    for number in range(1, events + 1):
        start = _native.monotonic_ns()
        if number % 4 < MESSAGE_SHARE:
            _native.record_event(int(Kind.MESSAGE), number % 64 == 1, actor, endpoint, start, number, 64, IDENTITY)
        elif number % 16 == 3:
            attributes = _native.record_text(f'{{"number":{number}}}')
            _native.record_event(int(Kind.SPAN), 0, span, attributes, start, number, 0, 0)
        elif number % 16 == 7:
            _native.record_event(int(Kind.METRIC), 0, metric, 0, 0, 4, 2.5, 0)
        elif number % 16 == 11:
            _native.record_event(int(Kind.STEP), 0, step, 0, start, number, 0, 0)
        else:
            _native.record_event(int(Kind.COLLECTIVE), 0, group, operation, start, number, 4096, 0)
    if index % 64 == 5:
        _native.begin_activity(cell, int(State.RUNNING), endpoint, events + 1, IDENTITY, 64, 0)


def main(processes: int, events: int) -> None:
    """Write all slots, the program's own as the last one, and wait."""
    area = RecordingArea()
    layout = _native.recording_layout
    for rank in range(processes - 1):
        index = area.reserve("")
        if not index:
            raise SystemExit(f"an area has no room for {processes} processes")
        _native.use_recording(area.descriptor, index, f"procs {rank} of workers")
        write(rank, events)
        offset = layout["header_bytes"] + index * layout["slot_bytes"] + 4  # after the state
        os.pwrite(area.descriptor, (FIRST_PID + rank).to_bytes(4, sys.byteorder), offset)
    _native.use_recording(area.descriptor, 0, "program simulated")
    recorder._names.clear()
    _native.set_recording_identity(IDENTITY)
    for number in range(1, events + 1):
        recorder.event(Kind.SENT, "workers", "noop", reference=number, value=64)
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
