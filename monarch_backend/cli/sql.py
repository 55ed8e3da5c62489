"""`monarch-backend sql`: ask what running programs have recorded."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from monarch_backend._core.garbage_collection import without_collector
from monarch_backend.cli.arguments import add_program, fail

if TYPE_CHECKING:
    from monarch_backend._telemetry.sql import QueryResult

MAX_WIDTH = 80
"""Characters of a column in text. Longer values are cut; --json has all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("query", metavar="SELECT", help='a query, for example "select * from processes"')
    add_program(parser, or_job=True)
    parser.add_argument(
        "--from",
        dest="file",
        metavar="FILE",
        help="ask a file of `monarch-backend export sqlite`, or a folder of `monarch-backend export history`, "
        "in place of running programs",
    )
    parser.add_argument(
        "--engine",
        choices=("sqlite", "duckdb"),
        default="sqlite",
        help='whose SQL the query is. "duckdb" needs pip install "monarch_backend[duckdb]" here, not on the hosts',
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the answer. Return 0, or 1 with one line if the query is wrong or there is no such program."""
    from monarch_backend._job.errors import JobError
    from monarch_backend._telemetry import sql
    from monarch_backend.cli.subject import look_at

    if args.file and args.program:
        return fail("sql", f"a file has its own programs: leave out {args.program!r}, or use a condition on processes")
    try:
        with without_collector():
            if args.file:
                result = sql.answer_from(args.query, args.file, args.engine)
            else:
                with look_at(args.program) as there:
                    result = sql.ask(args.query, there.recording, there, args.engine)
    except (sql.QueryError, ImportError, LookupError, NotImplementedError, OSError, ValueError, JobError) as error:
        return fail("sql", error)
    if args.json:
        print(json.dumps(result.as_json(), indent=1))
        return 0
    print(as_text(result))
    print(summary(result), file=sys.stderr)
    return 0


def as_text(result: QueryResult) -> str:
    """Return the rows as a table: a line of names, and one per row. Numbers are aligned to the right."""
    rows = [[_text(value) for value in row] for row in result.rows]
    widths = [max([len(name), *(len(row[i]) for row in rows)]) for i, name in enumerate(result.columns)]
    right = [all(isinstance(row[i], int | float | None) for row in result.rows) for i in range(len(widths))]
    lines = ["  ".join(map(_aligned, row, widths, right)) for row in [list(result.columns), *rows]]
    return "\n".join(line.rstrip() for line in lines)


def _aligned(text: str, width: int, to_the_right: bool) -> str:
    return text.rjust(width) if to_the_right else text.ljust(width)


def _text(value: Any) -> str:
    if value is None:
        return ""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    text = " ".join(text.splitlines())
    return text if len(text) <= MAX_WIDTH else text[: MAX_WIDTH - 3] + "..."


def summary(result: QueryResult) -> str:
    """Return one line: the number of rows, and the hosts and processes that were read or not."""
    parts = [f"{len(result.rows)} rows{', more were left out' if result.is_truncated else ''}"]
    parts.append(f"{len(result.processes)} processes read")
    if lost := sum(each.overwritten for each in result.processes):
        parts.append(f"{lost} older events overwritten")
    if answered := [each.name for each in result.hosts if each.has_answered]:
        parts.append(f"answered: {', '.join(answered)}")
    silent = [str(each) for each in result.hosts if not each.has_answered]
    parts += [f"no answer from {each}" for each in silent]
    parts += [f"not read: {each}" for each in result.unread if each not in silent]
    return f"({'; '.join(parts)})"
