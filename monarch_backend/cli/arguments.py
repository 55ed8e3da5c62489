"""What the commands that look at running programs share: their argument PROGRAM, how they fail, and how they end."""

from __future__ import annotations

import argparse
import contextlib
import select
import signal
import sys
import threading
from collections.abc import Iterator


def add_program(parser: argparse.ArgumentParser, *, or_job: bool = False) -> None:
    """Add the optional argument PROGRAM, as ``program``. _telemetry/programs.py says what it stands for.

    With ``or_job`` it may be a job, too: cli/subject.py.
    """
    what = "a pid of the program, or a part of its command; all by default"
    if or_job:
        what = "a job's name or file, a pid of the program, or a part of its command; all of this machine by default"
    parser.add_argument("program", nargs="?", metavar="PROGRAM", help=what)


def add_ranks(parser: argparse.ArgumentParser, text: str = "only these processes") -> None:
    """Add the option --rank, also --ranks, as the list ``ranks``: `labels.is_among` has its grammar."""
    parser.add_argument(
        "--rank",
        "--ranks",
        dest="ranks",
        metavar="WHICH",
        action="append",
        help=f'{text}: labels or pids ("gpus 3", "gpus 0-1", "rank 1", 4711), or indices of dimensions '
        '("hosts=0 gpus=0,2-3"); repeatable',
    )


def nothing_there(program: str | None = None) -> str:
    """Return what a command says that has found no program where it looks."""
    return "no program of this user runs there" if program else "no program of this user runs on this machine"


def has_reader() -> bool:
    """Return whether stdout may still have a reader: false for a pipe that was closed at its other end."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return not any(event & select.POLLERR for _, event in poll.poll(0))
    except (AttributeError, OSError, ValueError):  # a replaced stdout, or none
        return True


def fail(command: str, reason: object) -> int:
    """Print why a command has failed, and return its exit code 1.

    Raises the reason if it is a BrokenPipeError of stdout: `cli.main` ends the command.
    """
    if isinstance(reason, BrokenPipeError) and not has_reader():
        raise reason
    print(f"monarch-backend {command}: {reason}", file=sys.stderr)
    return 1


@contextlib.contextmanager
def until_signal() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and Ctrl-C set, in place of ending the process. Only for the main thread."""
    ended = threading.Event()
    before = {number: signal.signal(number, lambda *_: ended.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
