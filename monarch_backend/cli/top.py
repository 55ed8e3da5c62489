"""`monarch-backend top`: running programs with rates, on the whole screen, and keys for what `ps` finds."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from monarch_backend.cli.arguments import add_program, fail, nothing_there
from monarch_backend.cli.top_rows import rows_of, table

if TYPE_CHECKING:
    from monarch_backend._telemetry.programs import Program
    from monarch_backend._telemetry.rates import ProcessKey, Rates
    from monarch_backend._telemetry.subject import Subject

EXTRA = "pip install 'monarch_backend[top]'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_program(parser, or_job=True)
    parser.add_argument("--once", action="store_true", help="print one table of rates instead of a screen")
    parser.add_argument("--json", action="store_true", help="with --once: print one JSON array")
    parser.add_argument(
        "--interval", metavar="SECONDS", type=_seconds, default=1.0, help="time between two looks; 1 by default"
    )


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.01 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0.01 to 3600")
    return seconds


def run(args: argparse.Namespace) -> int:
    """Show rates. Return 0, or 1 with the reason if there is no such program, or no terminal for the screen."""
    from monarch_backend._job.errors import JobError
    from monarch_backend.cli.subject import look_at

    try:
        with look_at(args.program) as there:
            _, _, unread = there.look()
            if not (args.once or args.json):
                return _show_screen(there, args)
            for each in unread:
                fail("top", f"not read: {each}")
            time.sleep(args.interval)
            programs, rates, _ = there.look()
    except (LookupError, NotImplementedError, JobError) as error:
        return fail("top", error)
    if args.json:
        print(json.dumps(as_json(programs, rates), indent=1))
    else:
        print(table(rows_of(programs, rates)) if programs else nothing_there(args.program))
    return 0


def _show_screen(there: Subject, args: argparse.Namespace) -> int:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return fail("top", "the screen needs a terminal; --once prints one table")
    try:
        from monarch_backend.cli import top_screen  # only here, because the import of textual takes long
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("rich", "textual"):
            raise
        return fail("top", f"the screen needs {error.name}: {EXTRA}; --once prints one table without it")
    return top_screen.show(there, args.program or "", args.interval)


def as_json(programs: Iterable[Program], rates: dict[ProcessKey, Rates]) -> list[dict[str, Any]]:
    """Return an entry for each process that runs or has ended, with its rates, and each that is being started."""
    from monarch_backend._telemetry.programs import activities_as_json

    programs = list(programs)
    nothing: dict[str, Any] = {"memory": None, "gpu_memory": None, "restarts": 0, "activities": [], "rates": None}
    starting = [
        {
            "program": program.pid, "host": program.host, "pid": each["pid"], "label": each["label"],
            "state": each["state"], **nothing,
        }
        for program in programs for each in program.starting
    ]  # fmt: skip
    processes = [
        {
            "program": program.pid, "host": program.host, "pid": process.pid, "label": process.label,
            "state": process.state, "memory": process.memory, "gpu_memory": process.gpu_memory,
            "restarts": process.restarts, "activities": activities_as_json(process.activities),
            "rates": asdict(rates[key]) if (key := (program.host, process.pid)) in rates else None,
        }
        for program in programs for process in program.processes
    ]  # fmt: skip
    return [*processes, *starting]
