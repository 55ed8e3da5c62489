"""Program of dashboard.py: N processes that record what ranks of a training would, without torch and actors.

    python benchmarks/_dashboard_program.py N

Each process is real and has its own slot of the recording area. It records ten messages, a span, two metrics and a
collective every second. One in a hundred hangs in its message, and one in a hundred is late for the collective. It
prints "ready", and ends when standard input ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import sys
import time

from monarch_backend import _native
from monarch_backend._telemetry import metrics, recorder
from monarch_backend._telemetry.kinds import Kind, State

EARLIER = 100
"""Seconds of events that each process records at its start."""


def rank(number: int, owner: int, descriptor: int, index: int) -> None:
    """Record what a rank would, without end."""
    recorder.start(owner, descriptor, index, f"gpus {number} of trainers")
    recorder.set_identity(number + 1)
    actor = recorder.take_cell(Kind.MESSAGE, "trainer", number)
    group = recorder.take_cell(Kind.COLLECTIVE, "group 0", number)
    name, step, reduce = (recorder.name_number(each) for each in ("trainer", "step", "all_reduce"))
    loss = metrics.get_meter("m").create_gauge("loss")
    samples = metrics.get_meter("m").create_counter("samples")
    hangs, is_late = number % 100 == 7, number % 100 == 42
    for second in range(1 << 30):
        for message in range(10):
            start = _native.monotonic_ns()
            recorder.record_event(int(Kind.MESSAGE), 0, name, step, start, second * 10 + message, 4096, 1)
        recorder.record_event(int(Kind.COLLECTIVE), 0, name, reduce, _native.monotonic_ns(), second, 1 << 20, 0)
        loss.set(2.0 / (second + 1) + random.random() * 0.1)
        samples.add(32)
        if second < EARLIER:
            continue
        recorder.begin_activity(actor, int(State.RUNNING), step, second, number % 3, 4096, 1)
        if not is_late:
            recorder.begin_activity(group, int(State.RUNNING), reduce, second, 0, 1 << 20, 0)
        if hangs:
            signal.pause()
        time.sleep(0.5 + random.random() / 2)
        recorder.end_activity(actor, 0)
        recorder.end_activity(group, 0)
        time.sleep(random.random() / 2)


def main(processes: int) -> None:
    """Start the processes, and wait."""
    area = recorder.area()
    assert area is not None
    pids = []
    for number in range(processes):
        index = area.reserve(f"gpus {number} of trainers")
        owner, descriptor = os.getpid(), area.descriptor
        if (pid := os.fork()) == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the program
            rank(number, owner, descriptor, index)
        pids.append(pid)
    print("ready", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        sys.stdin.read()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
