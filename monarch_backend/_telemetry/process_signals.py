"""Signals to processes of programs of this machine, and the wait for their end."""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import ExitStack

from monarch_backend._core import platform
from monarch_backend._telemetry import programs
from monarch_backend._telemetry.programs import Process, Program

PATIENCE_S = 10.0
"""Seconds in which the processes have to end after a signal that ends them."""

ENDING = frozenset(
    {signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGABRT, signal.SIGSEGV}
)
"""Signals after which `send` waits for the end."""


def send(program: Program, processes: list[Process], number: signal.Signals) -> str:
    """Send a signal to the first of the processes, and wait until all have ended if the signal ends them.

    Return text that says what was done. Raises LookupError if the first one has ended, PermissionError for a process of
    another user, TimeoutError if one is left, and NotImplementedError without pidfd_open.
    """
    if not platform.HAS_PIDFD:
        raise NotImplementedError("a signal to a process that may end meanwhile needs pidfd_open of Linux 5.3")
    first = processes[0]
    with ExitStack() as undo:
        descriptors: dict[int, Process] = {}
        for process in processes:
            try:
                descriptor = os.pidfd_open(process.pid)
            except ProcessLookupError:
                continue
            undo.callback(os.close, descriptor)
            descriptors[descriptor] = process
        # A pid may have got a new meaning before it was opened, and not afterwards.
        recorded = {(p.pid, p.label) for now in programs.programs() for p in now.processes if p.exit_code is None}
        descriptors = {key: each for key, each in descriptors.items() if (each.pid, each.label) in recorded}
        if first not in descriptors.values():
            raise LookupError(f"{in_words(program, first)} has ended meanwhile")
        if (owner := os.stat(f"/proc/{first.pid}").st_uid) != os.geteuid():
            raise PermissionError(f"{in_words(program, first)} belongs to user {owner}: nothing was sent")
        signal.pidfd_send_signal(next(key for key, process in descriptors.items() if process is first), number)
        if number not in ENDING:
            return f"sent {number.name} to {in_words(program, first)}"
        left = _wait(descriptors)
    if left:
        listed = ", ".join(f"{each.label} (pid {each.pid})" for each in left)
        hint = "" if number == signal.SIGKILL else "; --signal KILL ends also what hangs or is stopped"
        raise TimeoutError(
            f"sent {number.name} to {in_words(program, first)}; after {PATIENCE_S:.0f} s still running: {listed}{hint}"
        )
    text = f"killed {in_words(program, first)} with {number.name}"
    return f"{text}, and its {len(processes) - 1} processes ended" if len(processes) > 1 else text


def in_words(program: Program, process: Process) -> str:
    """Return text that names a process: "gpus 3 of trainers (pid 4711) of train.py (pid 4700) on HOST"."""
    where = f" on {program.host}" if program.host else ""
    if process.pid == program.pid:
        return f"program {program.command or process.label} (pid {program.pid}){where}"
    return f"{process.label} (pid {process.pid}) of {program.command} (pid {program.pid}){where}"


def _wait(descriptors: dict[int, Process]) -> list[Process]:
    """Return the processes that still run after the patience."""
    poll, left, deadline = select.poll(), dict(descriptors), time.monotonic() + PATIENCE_S
    for descriptor in left:
        poll.register(descriptor, select.POLLIN)
    while left and (remaining := deadline - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(remaining * 1000):
            poll.unregister(descriptor)
            del left[descriptor]
    return list(left.values())
