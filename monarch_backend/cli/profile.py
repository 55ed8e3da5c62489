"""`monarch-backend profile`: torch.profiler on ranks of running programs, in one timeline with all that is recorded."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch_backend._core.garbage_collection import without_collector
from monarch_backend._telemetry.labels import fold_labels, in_words, is_wanted
from monarch_backend.cli.arguments import add_program, add_ranks, fail

if TYPE_CHECKING:
    from monarch_backend._telemetry.profile_result import ProfileResult
    from monarch_backend._telemetry.programs import Process, Program
    from monarch_backend._telemetry.subject import Member, Subject


NOTICE_S = 3.0
"""Seconds after which a profile of steps says what it waits for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_program(parser, or_job=True)
    add_ranks(parser)
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--seconds", type=float, metavar="N", help="how long the profile lasts")
    length.add_argument("--steps", type=int, metavar="N", help="how many calls of telemetry.step() it covers")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    written = parser.add_mutually_exclusive_group()
    written.add_argument("-o", "--output", metavar="FILE", default="trace.json", help="timeline; default trace.json")
    written.add_argument("--flame", metavar="FILE.svg", help="write a flame graph of Python code instead; needs py-spy")


def run(args: argparse.Namespace) -> int:
    """Take the profiles. Return 0, or 1 with the reason if there is no such process, or none could be profiled."""
    from monarch_backend._job.errors import JobError
    from monarch_backend._telemetry import profiles
    from monarch_backend.cli.subject import look_at

    try:
        profiles.check(args.seconds, args.steps, profiles.STEP_LIMIT_S)
        with look_at(args.program) as there:
            chosen, _, unread = there.look()
            for each in unread:
                fail("profile", f"not read: {each}")
            ranks = _ranks(chosen, args.ranks)
            if args.flame:
                return _write_flames(there, args.flame, args.seconds, ranks, as_json=args.json)
            _check_writable(args.output)
            with without_collector():
                with _notice(args.steps, ranks):
                    result = there.profile(ranks, seconds=args.seconds, steps=args.steps)
                counts = result.save(args.output)
    except (LookupError, NotImplementedError, OSError, ValueError, JobError) as error:
        return fail("profile", error)
    except KeyboardInterrupt:
        return fail("profile", "interrupted; nothing was written")
    if args.steps is not None and result.labels and not result.has_steps:
        return fail(
            "profile",
            f"no process has called monarch_backend.telemetry.step() in {profiles.STEP_LIMIT_S:g} s: call it at the "
            f"end of each step, or give --seconds in place of --steps. {args.output} has what ran meanwhile",
        )
    if args.json:
        print(json.dumps(_as_json(args, result, counts), indent=1))
        return 0 if result.labels else 1
    print(
        f"{args.output}: {counts.get('X', 0)} slices, profiles of {len(result.labels)} of {len(ranks)} processes, "
        f"times within {result.clock_error_bound_ns / 1000:.1f} us. Open it in https://ui.perfetto.dev"
    )
    for label, problem in result.problems.items():
        print(f"no profile of {label}: {problem}")
    for line in result.shortfalls(args.steps):
        print(line)
    return 0 if result.labels else 1


@contextlib.contextmanager
def _notice(steps: int | None, ranks: list[Member]) -> Iterator[None]:
    """Print what a profile of steps waits for, if it lasts."""
    from monarch_backend._telemetry import profiles

    text = (
        f"waits for {steps} calls of monarch_backend.telemetry.step() on "
        f"{fold_labels(process.label for _, process in ranks)}, at most {profiles.STEP_LIMIT_S:g} s"
    )
    if not any(activity["kind"] == "step" for _, process in ranks for activity in process.activities):
        text += "; none has called it yet"
    timer = threading.Timer(NOTICE_S, lambda: print(f"monarch-backend profile: {text}", file=sys.stderr, flush=True))
    timer.daemon = True
    if steps is not None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if steps is not None:
            timer.join()  # it may be printing


def _as_json(args: argparse.Namespace, result: ProfileResult, counts: dict[str, int]) -> dict[str, Any]:
    return {
        "file": args.output,
        "slices": counts.get("X", 0),
        "profiled": result.labels,
        "problems": result.problems,
        "shortfalls": result.shortfalls(args.steps),
        "clock_error_bound_ns": result.clock_error_bound_ns,
    }


def _check_writable(path: str) -> None:
    """Raise OSError if the file can't be written. It isn't made here: a command that is killed leaves nothing."""
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    target = path if os.path.exists(path) else os.path.dirname(path) or "."
    os.stat(target)
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), target)


def _ranks(programs: list[Program], which: list[str] | None) -> list[Member]:
    """Return the chosen processes; without a choice all, but not a program's own process beside those it started.

    Gateways, agents and daemons run nothing of the program, and are left out.
    """
    from monarch_backend._telemetry.programs import ENDED

    running = [(program, each) for program in programs for each in program.processes if each.state != ENDED]
    if which is not None:
        chosen = [member for member in running if is_wanted(member[1].label, member[1].pid, which)]
    else:
        ranks = [(program, each) for program, each in running if each.parent and not _is_of_runtime(each)]
        with_ranks = {program.key for program, _ in ranks}
        own = [(program, each) for program, each in running if not each.parent and program.key not in with_ranks]
        has_hosts = any(program.host for program in programs)  # then the programs of this machine control ranks there
        chosen = ranks if has_hosts else sorted([*ranks, *own], key=running.index)
    if not chosen:
        labels = ", ".join(f"{each.label} (pid {each.pid})" for _, each in running) or "none"
        raise LookupError(
            f"no process is {in_words(which)}; there are: {labels}" if which else "no program of this user runs"
        )
    return chosen


def _is_of_runtime(process: Process) -> bool:
    return process.label == "gateway" or process.label.startswith("agent ")


def _write_flames(there: Subject, path: str, seconds: float | None, ranks: list[Member], *, as_json: bool) -> int:
    """Write a flame graph of each process: to ``path``, or with the pid in the name for several."""
    from monarch_backend._telemetry import py_spy

    if seconds is None:
        raise ValueError("--flame needs --seconds, because py-spy knows no steps")
    if not there.is_of_hosts and py_spy.find() is None:
        raise LookupError('--flame needs py-spy: pip install "monarch_backend[stacks]"')
    file = Path(path)

    def target_of(member: Member) -> Path:
        program, process = member
        if len(ranks) == 1:
            return file
        where = f".{re.sub('[^A-Za-z0-9.-]+', '-', program.host).strip('-')}" if program.host else ""
        return file.with_suffix(f"{where}.{process.pid}{file.suffix or '.svg'}")

    def write(member: Member) -> str:
        try:
            target_of(member).write_bytes(there.flame_graph(member, seconds))
        except py_spy.PySpyError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(ranks)) as pool:
        problems = list(pool.map(write, ranks))
    if as_json:
        found = [
            {"label": member[1].label, "pid": member[1].pid, "host": member[0].host, "problem": problem}
            | ({} if problem else {"file": str(target_of(member))})
            for member, problem in zip(ranks, problems, strict=True)
        ]
        print(json.dumps(found, indent=1))
        return 1 if all(problems) else 0
    for member, problem in zip(ranks, problems, strict=True):
        label = member[1].label
        print(f"no flame graph of {label}: {problem}" if problem else f"{target_of(member)}: {label}")
    return 1 if all(problems) else 0
