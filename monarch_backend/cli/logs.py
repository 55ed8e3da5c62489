"""`monarch-backend logs`: the kept output of a program's processes, also of ended and killed ones."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from monarch_backend._telemetry.labels import is_named
from monarch_backend.cli.arguments import add_program, fail, nothing_there

if TYPE_CHECKING:
    from monarch_backend._telemetry.log_history import LogLine
    from monarch_backend._telemetry.program_output import ProgramOutput
    from monarch_backend._telemetry.programs import Program

_POLL_S = 0.1
_SEARCH_S = 1.0  # between searches for histories of new processes, which read all of /proc


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_program(parser)
    parser.add_argument("--rank", metavar="LABEL", action="append", help='only this process, as "gpus 3"; repeatable')
    parser.add_argument("--follow", action="store_true", help="go on with new lines until the program ends, or Ctrl-C")
    parser.add_argument(
        "--grep", metavar="RE", type=_pattern, help="only lines in which this regular expression occurs"
    )
    parser.add_argument("--since", metavar="SECONDS", type=float, help="only lines of the last SECONDS")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line of output")


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None


def run(args: argparse.Namespace) -> int:
    """Print the lines. Return 0, or 1 with the reason if there is no such program or process, or no output is kept."""
    from monarch_backend._telemetry.program_output import ProgramOutput
    from monarch_backend._telemetry.programs import select

    try:
        chosen = select(args.program)
    except (LookupError, NotImplementedError) as error:
        return fail("logs", error)
    if not chosen:
        return fail("logs", nothing_there())
    with contextlib.ExitStack() as open_outputs:
        try:
            outputs = [open_outputs.enter_context(ProgramOutput(program)) for program in chosen]
            return _show(args, chosen, outputs)
        except (BrokenPipeError, KeyboardInterrupt):  # the reader has seen enough
            return 0
        except ValueError as error:  # another release's layout
            return fail("logs", error)


def _show(args: argparse.Namespace, chosen: list[Program], outputs: list[ProgramOutput]) -> int:
    from monarch_backend._telemetry.program_output import labels_of

    first = [output.read() for output in outputs]
    if not args.follow and not any(output.is_kept for output in outputs):
        pids = ", ".join(str(program.pid) for program in chosen)
        return fail(
            "logs",
            f"program {pids} keeps no output: it has started no processes yet, or MONARCH_LOG_HISTORY_BYTES is 0 there",
        )
    wanted = _filter(args)
    if args.rank:
        labels = [label for program, lines in zip(chosen, first, strict=True) for label in labels_of(program, lines)]
        if not any(_is_rank(label, args.rank) for label in labels):
            return fail("logs", f"no process is {args.rank}; there are {labels}")
    several = len(outputs) > 1
    for output, lines in zip(outputs, first, strict=True):
        _print(lines, wanted, output.pid, several=several, as_json=args.json)
    if args.follow:
        _follow(outputs, lambda output: _print(output.read(), wanted, output.pid, several=several, as_json=args.json))
    return 0


def _follow(outputs: list[ProgramOutput], show: Callable[[ProgramOutput], None]) -> None:
    """Show new lines until all of the programs have ended."""
    from monarch_backend._telemetry.programs import programs

    left, searched_at = list(outputs), time.monotonic()
    while left:
        time.sleep(_POLL_S)
        running = None
        if time.monotonic() >= searched_at + _SEARCH_S:
            running = {program.pid: program for program in programs()}
            searched_at = time.monotonic()
        for output in list(left):
            if running is not None and output.pid in running:
                output.find_histories(running[output.pid])
            elif running is not None:
                left.remove(output)
            show(output)  # also after the end: the memory stays while it is mapped here


def _filter(args: argparse.Namespace) -> Callable[[LogLine], bool]:
    since = None if args.since is None else time.time() - args.since

    def wanted(line: LogLine) -> bool:
        return (
            (since is None or line.time >= since)
            and (not args.rank or _is_rank(line.label, args.rank))
            and (args.grep is None or args.grep.search(line.text) is not None)
        )

    return wanted


def _is_rank(label: str, names: list[str]) -> bool:
    return any(is_named(label, name) for name in names)


def _print(
    lines: list[LogLine], wanted: Callable[[LogLine], bool], program: int, *, several: bool, as_json: bool
) -> None:
    for line in filter(wanted, lines):
        if as_json:
            print(json.dumps({"program": program, **asdict(line)}))
        else:
            print(f"{program} {as_text(line)}" if several else as_text(line))
    if lines:
        sys.stdout.flush()


def as_text(line: LogLine) -> str:
    """Return a line with its local time and its process.

    >>> from monarch_backend._telemetry.log_history import LogLine
    >>> as_text(LogLine(0.5, "gpus 3 of trainers", 4711, "stderr", "no data")).partition(".")[2]
    '500 gpus 3 of trainers, stderr: no data'
    """
    clock = time.strftime("%H:%M:%S", time.localtime(line.time))
    stream = ", stderr" if line.stream == "stderr" else ""
    return f"{clock}.{int(line.time % 1 * 1000):03d} {line.label}{stream}: {line.text}"
