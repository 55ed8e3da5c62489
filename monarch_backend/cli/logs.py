"""`monarch-backend logs`: the kept output of a program's processes, also of ended and killed ones."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from monarch_backend._core import env
from monarch_backend._core.parallel import in_parallel
from monarch_backend._telemetry import log_files
from monarch_backend._telemetry.labels import LAUNCHER, fold_labels, in_words, is_wanted
from monarch_backend.cli.arguments import add_program, add_ranks, fail, nothing_there
from monarch_backend.cli.ps import state_of

if TYPE_CHECKING:
    from monarch_backend._telemetry.log_history import LogLine
    from monarch_backend._telemetry.program_output import LineFilter, Lines
    from monarch_backend._telemetry.programs import Process, Program
    from monarch_backend._telemetry.subject import Subject

_POLL_S = 0.1
_POLL_OF_HOSTS_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_program(parser, or_job=True)
    add_ranks(parser)
    parser.add_argument("--follow", action="store_true", help="go on with new lines until the program ends, or Ctrl-C")
    parser.add_argument(
        "--grep", metavar="RE", type=_pattern, help="only lines in which this regular expression occurs"
    )
    parser.add_argument("--since", metavar="SECONDS", type=_seconds, help="only lines of the last SECONDS")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line of output")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:  # nor a NaN
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or more")
    return seconds


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None


def run(args: argparse.Namespace) -> int:
    """Print the lines. Return 0, or 1 with the reason if there is no such program or process, or no output is kept."""
    from monarch_backend._job.errors import JobError
    from monarch_backend.cli.subject import look_at

    try:
        if args.program is None or not args.program.endswith(log_files.SUFFIX):
            with look_at(args.program) as there:
                try:
                    chosen, _, unread = there.look()
                except LookupError as error:
                    return _show_ended(args, error)
                for each in unread:
                    fail("logs", f"not read: {each}")
                if chosen:
                    return _show(args, there, chosen)
        return _show_ended(args, nothing_there(args.program))
    except (BrokenPipeError, KeyboardInterrupt):  # the reader has seen enough
        return 0
    except (LookupError, NotImplementedError, JobError, OSError, ValueError) as error:  # ValueError: another layout
        return fail("logs", error)


def _show_ended(args: argparse.Namespace, why: object) -> int:
    """Print the lines of the last such program that has ended. ``why``: the reason why no running one is shown."""
    from monarch_backend._telemetry import program_output
    from monarch_backend._telemetry.programs import Program

    found = program_output.ended_programs(_name_of_job(args.program))
    if not found:
        return fail("logs", why if args.program is None else f"{why}. {_why_no_file_is_kept()}")
    if args.program is None:
        listed = "".join(f"\n  {each}" for each in found)
        return fail("logs", f"{why}; programs that have ended, for `monarch-backend logs PID`:{listed}")
    program = found[-1]
    lines = program_output.read_ended(program, _filter(args))
    if args.ranks and not any(is_wanted(label, 0, args.ranks) for label in lines.labels):
        return fail("logs", f"no process is {in_words(args.ranks)}; there are: {fold_labels(lines.labels)}")
    print(f"program {program} has ended; its output is in {program.file}", file=sys.stderr)
    for line in lines.lines:
        _print(line, Program(program.pid, program.command, []), several=False, as_json=args.json)
    return 0


def _why_no_file_is_kept() -> str:
    if not env.get("MONARCH_LOG_FILES"):
        return "MONARCH_LOG_FILES is 0: output ends with its program"
    return (
        f"If it has ended, its processes have written nothing, or its output is gone: {log_files.folder()} has that of "
        f"the last {env.get('MONARCH_LOG_FILES')} programs with output (MONARCH_LOG_FILES)"
    )


def _name_of_job(name: str | None) -> str | None:
    """Return the name of a job that is given by its file. Return another name as it is."""
    from monarch_backend._job import state_file
    from monarch_backend.cli.subject import job_file

    path = None if name is None else job_file(name)
    file = None if path is None else state_file.read(path)
    return name if file is None else file.name


def _filter(args: argparse.Namespace) -> LineFilter:
    from monarch_backend._telemetry.program_output import LineFilter

    return LineFilter(tuple(args.ranks or ()), "" if args.grep is None else args.grep.pattern, args.since)


def _show(args: argparse.Namespace, there: Subject, chosen: list[Program]) -> int:
    wanted = _filter(args)
    read = there.follow if args.follow else there.lines
    found = in_parallel(lambda program: _read(read, program, wanted), chosen)
    if not args.follow and not any(lines.is_kept for lines in found if lines is not None):
        why = "; ".join(_why_nothing_is_kept(program) for program in chosen)
        return _show_ended(args, why) if there.is_of_hosts else fail("logs", why)  # its hosts may run on
    if args.ranks:
        labels = list(dict.fromkeys(label for lines in found if lines is not None for label in lines.labels))
        known = [*((label, 0) for label in labels), *((p.label, p.pid) for each in chosen for p in each.processes)]
        if not any(is_wanted(label, pid, args.ranks) for label, pid in known):
            return fail("logs", f"no process is {in_words(args.ranks)}; there are: {fold_labels(labels)}")
    several = len(chosen) > 1
    first = [(program, line) for program, lines in zip(chosen, found, strict=True) if lines for line in lines.lines]
    if several and not args.follow and there.is_of_hosts:
        first.sort(key=lambda each: each[1].time)
    for program, line in first:
        _print(line, program, several=several, as_json=args.json)
    sys.stdout.flush()
    if not args.follow and args.grep is None and args.since is None:
        _name_silent_processes(args, chosen, [line for _, line in first])
    if args.follow:
        left = [program for program, lines in zip(chosen, found, strict=True) if lines is not None]
        _follow(args, there, left, wanted, several=several)
    return 0


def _name_silent_processes(args: argparse.Namespace, chosen: list[Program], lines: list[LogLine]) -> None:
    """Say on stderr that the processes that were asked for have written nothing: those of --rank, or of a pid."""
    pids = {line.pid for line in lines}
    silent = [
        process for program in chosen for process in program.processes if process.parent and process.pid not in pids
    ]
    if args.ranks:
        silent = [each for each in silent if is_wanted(each.label, each.pid, args.ranks)]
    elif args.program is not None and any(each.pid == _number(args.program) for each in silent):
        silent = [each for each in silent if each.pid == _number(args.program)]
    elif lines:
        return
    by_state: dict[str, list[Process]] = {}
    for each in silent:
        by_state.setdefault(state_of(each), []).append(each)
    for state, some in by_state.items():
        which = f"pid {some[0].pid}, {state}) has" if len(some) == 1 else f"{state}) have"
        print(f"{fold_labels(each.label for each in some)} ({which} written nothing that is kept", file=sys.stderr)


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _why_nothing_is_kept(program: Program) -> str:
    label = program.processes[0].label if program.processes else ""
    if label == LAUNCHER or label.startswith("rank "):
        whose = "its ranks write" if label == LAUNCHER else "it writes"
        return (
            f"program {program.pid} keeps no output: {whose} to the terminal of the launcher, and to files in its "
            "--log-dir with --tee 3 or --redirects 3. Of these, `monarch-backend run` keeps also the last lines"
        )
    return (
        f"program {program.pid} keeps no output: it has started no processes yet, or MONARCH_LOG_HISTORY_BYTES is 0 "
        "there"
    )


def _read(read: Callable[[Program, LineFilter], Lines], program: Program, wanted: LineFilter) -> Lines | None:
    """Return the lines of a program. If it or its host cannot be read, print why and return None."""
    try:
        return read(program, wanted)
    except LookupError as error:
        fail("logs", f"not read: {program}: {error}")
        return None


def _follow(
    args: argparse.Namespace, there: Subject, left: list[Program], wanted: LineFilter, *, several: bool
) -> None:
    """Show new lines until all of the programs have ended."""
    while left:
        time.sleep(_POLL_OF_HOSTS_S if there.is_of_hosts else _POLL_S)
        found = in_parallel(lambda program: _read(there.follow, program, wanted), left)
        for program, lines in zip(list(left), found, strict=True):
            for line in lines.lines if lines is not None else ():
                _print(line, program, several=several, as_json=args.json)
            if lines is None or lines.has_ended:
                left.remove(program)
        sys.stdout.flush()


def _print(line: LogLine, program: Program, *, several: bool, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"program": program.pid, "host": program.host, **asdict(line)}))
        return
    where = f"{program.host} " if program.host else f"{program.pid} " if several else ""
    print(f"{where}{as_text(line)}")


def as_text(line: LogLine) -> str:
    """Return a line with its local time and its process.

    >>> from monarch_backend._telemetry.log_history import LogLine
    >>> as_text(LogLine(0.5, "gpus 3 of trainers", 4711, "stderr", "no data")).partition(".")[2]
    '500 gpus 3 of trainers, stderr: no data'
    """
    clock = time.strftime("%H:%M:%S", time.localtime(line.time))
    stream = ", stderr" if line.stream == "stderr" else ""
    return f"{clock}.{int(line.time % 1 * 1000):03d} {line.label}{stream}: {line.text}"
