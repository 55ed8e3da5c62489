"""`monarch-backend kill`: end a program with all of its processes, or one of them."""

from __future__ import annotations

import argparse
import json
import signal
from typing import TYPE_CHECKING, Any

from monarch_backend._telemetry.labels import in_words, is_wanted
from monarch_backend.cli.arguments import add_ranks, fail

if TYPE_CHECKING:
    from monarch_backend._telemetry.programs import Process, Program


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "job",
        metavar="PROGRAM",
        help="the program's pid, a part of the command of only one program, or a job's name or file",
    )
    add_ranks(parser, "only this process, not several")
    parser.add_argument(
        "--signal", metavar="NAME", type=_signal, default=signal.SIGTERM, help="signal to send; TERM by default"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _signal(name: str) -> signal.Signals:
    text = name.upper()
    try:
        return signal.Signals(int(text)) if text.isdecimal() else signal.Signals[f"SIG{text.removeprefix('SIG')}"]
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"{name!r} is not a signal; TERM, KILL or INT, for example") from None


def run(args: argparse.Namespace) -> int:
    """Send the signal and wait for the end. Return 0, or 1 with the reason if nothing was sent or a process is left."""
    from monarch_backend._job.errors import JobError
    from monarch_backend.cli.subject import look_at

    try:
        with look_at(args.job) as there:
            chosen, _, unread = there.look()
            for each in unread:
                fail("kill", f"not read: {each}")
            find = _targets_in_job if there.is_of_hosts else _targets
            program, processes = find(args.job, chosen, args.ranks)
            output = there.send_signal(program, processes, args.signal)
    except (LookupError, NotImplementedError, OSError, TimeoutError, ValueError, JobError) as error:
        return fail("kill", error)
    print(json.dumps(_as_json(program, processes, args.signal), indent=1) if args.json else output)
    return 0


def _as_json(program: Program, processes: list[Process], number: signal.Signals) -> dict[str, Any]:
    from monarch_backend._telemetry.process_signals import ENDING

    return {
        "program": program.pid,
        "command": program.command,
        "host": program.host,
        "signal": number.name,
        "sent_to": processes[0].pid,
        "ended": [{"pid": each.pid, "label": each.label} for each in processes] if number in ENDING else [],
    }


def _targets(name: str, chosen: list[Program], ranks: list[str] | None) -> tuple[Program, list[Process]]:
    """Return the program, and the processes that are to end. The first one gets the signal. Raises LookupError."""
    from monarch_backend._telemetry import programs

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
    if ranks is None:
        return program, sorted(running, key=lambda each: each.pid != program.pid)
    return program, [_one([(program, each) for each in running], ranks)[1]]


def _targets_in_job(name: str, chosen: list[Program], ranks: list[str] | None) -> tuple[Program, list[Process]]:
    """Return a process of a job with its program. Raises LookupError, also without ranks: a job is not a program."""
    from monarch_backend._telemetry import programs

    if ranks is None:
        here = programs.listed(program for program in chosen if not program.host)
        raise LookupError(
            f"{name!r} is a job: add --rank for one of its processes, or give the pid of a program that uses it, with "
            f"which its processes end on all hosts; on this machine: {here}"
        )
    found = _one([(program, each) for program in chosen for each in program.processes if each.exit_code is None], ranks)
    return found[0], [found[1]]


def _one(running: list[tuple[Program, Process]], ranks: list[str]) -> tuple[Program, Process]:
    found = [(program, each) for program, each in running if is_wanted(each.label, each.pid, ranks)]
    if not found:
        raise LookupError(f"no running process is {in_words(ranks)}; there are {[each.label for _, each in running]}")
    if len(found) > 1:
        there = [f"{each.label} (pid {each.pid}){f' on {where.host}' * bool(where.host)}" for where, each in found]
        raise LookupError(f"{in_words(ranks)} stands for {there}: name one process, also its mesh if there are several")
    return found[0]
