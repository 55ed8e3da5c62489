"""`monarch-backend kill`: end a program with all of its processes, or one of them."""

from __future__ import annotations

import argparse
import os
import select
import signal
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from monarch_backend._telemetry.labels import is_named
from monarch_backend.cli.arguments import fail

if TYPE_CHECKING:
    from monarch_backend._telemetry.programs import Process, Program

PATIENCE_S = 10.0
"""Seconds in which the processes have to end after a signal that ends them."""

_ENDING = frozenset(
    {signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGABRT, signal.SIGSEGV}
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "job", metavar="PROGRAM", help="the program's pid, or a part of the command of only one program"
    )
    parser.add_argument("--rank", metavar="LABEL", help='only this process, as "gpus 3"')
    parser.add_argument(
        "--signal", metavar="NAME", type=_signal, default=signal.SIGTERM, help="signal to send; TERM by default"
    )


def _signal(name: str) -> signal.Signals:
    text = name.upper()
    try:
        return signal.Signals(int(text)) if text.isdecimal() else signal.Signals[f"SIG{text.removeprefix('SIG')}"]
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"{name!r} is not a signal; TERM, KILL or INT, for example") from None


def run(args: argparse.Namespace) -> int:
    """Send the signal and wait for the end. Return 0, or 1 with the reason if nothing was sent or a process is left."""
    try:
        program, processes = _targets(args.job, args.rank)
        print(signal_processes(program, processes, args.signal))
    except (LookupError, NotImplementedError, OSError, TimeoutError) as error:
        return fail("kill", error)
    return 0


def _targets(name: str, rank: str | None) -> tuple[Program, list[Process]]:
    """Return the program, and the processes that are to end. The first one gets the signal. Raises LookupError."""
    from monarch_backend._telemetry import programs

    chosen = programs.select(name)
    if len(chosen) > 1:
        there = programs.listed(chosen)
        raise LookupError(f"{name!r} stands for {len(chosen)} programs; give the pid of one: {there}")
    [program] = chosen
    running = [each for each in program.processes if each.exit_code is None]
    if name.isdecimal() and int(name) != program.pid:
        [label] = [each.label for each in running if each.pid == int(name)] or ["ended"]
        raise LookupError(
            f"{name} is a process of program {program}: give {program.pid}, and --rank {label!r} for this process alone"
        )
    if rank is None:
        return program, sorted(running, key=lambda each: each.pid != program.pid)
    found = [each for each in running if is_named(each.label, rank)]
    if not found:
        raise LookupError(f"no running process is {rank!r}; there are {[each.label for each in running]}")
    if len(found) > 1:
        raise LookupError(f"{rank!r} stands for {[f'{each.label} (pid {each.pid})' for each in found]}: name one mesh")
    return program, found


def signal_processes(program: Program, processes: list[Process], number: signal.Signals) -> str:
    """Send a signal to the first of the processes, and wait until all have ended if the signal ends them.

    Return text that says what was done. Raises PermissionError for a process of another user, TimeoutError if one is
    left, and NotImplementedError without pidfd_open.
    """
    from monarch_backend._core import platform
    from monarch_backend._telemetry import programs

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
        recorded = {each.pid for now in programs.programs() for each in now.processes if each.exit_code is None}
        descriptors = {key: process for key, process in descriptors.items() if process.pid in recorded}
        if first not in descriptors.values():
            raise LookupError(f"{_words(program, first)} has ended meanwhile")
        if (owner := os.stat(f"/proc/{first.pid}").st_uid) != os.geteuid():
            raise PermissionError(f"{_words(program, first)} belongs to user {owner}: nothing was sent")
        signal.pidfd_send_signal(next(key for key, process in descriptors.items() if process is first), number)
        if number not in _ENDING:
            return f"sent {number.name} to {_words(program, first)}"
        left = _wait(descriptors)
    if left:
        listed = ", ".join(f"{each.label} (pid {each.pid})" for each in left)
        hint = "" if number == signal.SIGKILL else "; --signal KILL ends also what hangs or is stopped"
        raise TimeoutError(
            f"sent {number.name} to {_words(program, first)}; after {PATIENCE_S:.0f} s still running: {listed}{hint}"
        )
    text = f"killed {_words(program, first)} with {number.name}"
    return f"{text}, and its {len(processes) - 1} processes ended" if len(processes) > 1 else text


def _words(program: Program, process: Process) -> str:
    if process.pid == program.pid:
        return f"program {program.command or process.label} (pid {program.pid})"
    return f"{process.label} (pid {process.pid}) of {program.command} (pid {program.pid})"


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
