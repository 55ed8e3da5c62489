"""`monarch-backend kill`: end a program with all of its processes, one of them, or a job with all of its hosts."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from typing import TYPE_CHECKING, Any

from monarch_backend._telemetry.labels import fold_labels, in_words, is_wanted
from monarch_backend.cli.arguments import add_ranks, fail

if TYPE_CHECKING:
    from pathlib import Path

    from monarch_backend._telemetry.programs import Process, Program


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "job",
        nargs="?",
        metavar="PROGRAM",
        help="the program's pid, a part of the command of only one program, or a job's name or file; never chosen by "
        "default, because the choice may be wrong",
    )
    add_ranks(parser, "only this process, not several")
    parser.add_argument(
        "--signal", metavar="NAME", type=_signal, help="signal to send to a program or process; TERM by default"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _signal(name: str) -> signal.Signals:
    text = name.upper()
    try:
        return signal.Signals(int(text)) if text.isdecimal() else signal.Signals[f"SIG{text.removeprefix('SIG')}"]
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"{name!r} is not a signal; TERM, KILL or INT, for example") from None


def run(args: argparse.Namespace) -> int:
    """Send the signal and wait for the end. Return 0, or 1 with the reason if nothing was sent or a process is left.

    Return 2 without a program.
    """
    from monarch_backend._job.errors import JobError
    from monarch_backend.cli.subject import job_file, look_at

    if args.job is None:
        print(f"monarch-backend kill: nothing is killed without its name: {_there()}", file=sys.stderr)
        return 2
    number = signal.SIGTERM if args.signal is None else args.signal
    try:
        path = None if args.ranks is not None else job_file(args.job)
        if path is not None:
            return _kill_job(args, path)
        with look_at(args.job) as there:
            chosen, _, unread = there.look()
            for each in unread:
                fail("kill", f"not read: {each}")
            find = _targets_in_job if there.is_of_hosts else _targets
            program, processes = find(args.job, chosen, args.ranks)
            output = there.send_signal(program, processes, number)
    except (LookupError, NotImplementedError, OSError, TimeoutError, ValueError, JobError) as error:
        return fail("kill", error)
    print(json.dumps(_as_json(program, processes, number), indent=1) if args.json else output)
    return 0


def _there() -> str:
    from monarch_backend._telemetry import programs

    try:
        there = programs.listed(programs.programs())
    except NotImplementedError:
        there = "unknown"
    return f"give the pid of a program, a part of its command, or a job; programs of this machine: {there}"


def _kill_job(args: argparse.Namespace, path: Path) -> int:
    """End all hosts of a job as `Job.kill` does. Raises JobError for hosts that are left, and LookupError."""
    from monarch_backend import job as jobs
    from monarch_backend._job import state_file

    if args.signal is not None:
        raise LookupError(
            f"{args.job!r} is a job, whose hosts end as with Job.kill(): leave out --signal, or add --rank for one of "
            "its processes"
        )
    job, file = jobs.Job.load(path), state_file.read(path)
    hosts = [] if file is None else [f"{each.mesh}[{each.index}]" for each in file.hosts]
    job.kill()
    if args.json:
        print(json.dumps({"job": job.name, "ended_hosts": hosts}, indent=1))
    else:
        print(f"killed job {job.name}: {', '.join(hosts) or 'it had no host'}")
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
    """Return a process of a job with its program. Raises LookupError."""
    assert ranks is not None, name  # else the whole job is ended
    found = _one([(program, each) for program in chosen for each in program.processes if each.exit_code is None], ranks)
    return found[0], [found[1]]


def _one(running: list[tuple[Program, Process]], ranks: list[str]) -> tuple[Program, Process]:
    found = [(program, each) for program, each in running if is_wanted(each.label, each.pid, ranks)]
    if not found:
        labels = fold_labels(each.label for _, each in running)
        raise LookupError(f"no running process is {in_words(ranks)}; there are: {labels}")
    if len(found) > 1:
        there = [f"{each.label} (pid {each.pid}){f' on {where.host}' * bool(where.host)}" for where, each in found]
        raise LookupError(f"{in_words(ranks)} stands for {there}: name one process, also its mesh if there are several")
    return found[0]
