"""`monarch-backend trace`: write a timeline of running programs, for Perfetto and chrome://tracing."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

from monarch_backend._core.garbage_collection import without_collector
from monarch_backend.cli.arguments import add_program, fail, nothing_there

if TYPE_CHECKING:
    from monarch_backend._telemetry.program_recording import Recording


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_program(parser, or_job=True)
    parser.add_argument(
        "-o", "--output", metavar="FILE", default="trace.json", help="file to write; default trace.json, - for stdout"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object about the file instead of text")


def run(args: argparse.Namespace) -> int:
    """Write the trace. Return 0, or 1 with the reason if there is no such program or the file can't be written."""
    from monarch_backend._job.errors import JobError
    from monarch_backend._telemetry import trace_export
    from monarch_backend.cli.subject import look_at

    to_stdout = args.output == "-"
    try:
        with without_collector():
            with look_at(args.program) as there:
                recording = there.recording()
            if not recording.processes and not recording.unread:
                raise LookupError(nothing_there())
            with contextlib.nullcontext(sys.stdout) if to_stdout else open(args.output, "w") as file:
                counts = trace_export.write(recording, file)
    except (LookupError, NotImplementedError, OSError, ValueError, JobError) as error:
        return fail("trace", error)
    out = sys.stderr if to_stdout else sys.stdout
    if args.json:
        print(json.dumps(_as_json(args.output, recording, counts), indent=1), file=out)
        return 0
    print(
        f"{args.output}: {counts.get('X', 0)} slices, {counts.get('s', 0)} arrows and {counts.get('C', 0)} values of "
        f"{len(recording.processes)} processes. Open it in https://ui.perfetto.dev",
        file=out,
    )
    for process in recording.processes:
        if process.recorded.lost:
            print(f"{process.label} (pid {process.pid}): {process.recorded.lost} older events overwritten", file=out)
    if recording.clock_error_ns:
        print(f"times of other machines may be wrong by {recording.clock_error_ns / 1e6:.3f} ms", file=out)
    for each in recording.unread:
        print(f"not read: {each}", file=out)
    return 0


def _as_json(path: str, recording: Recording, counts: dict[str, int]) -> dict[str, Any]:
    return {
        "file": path,
        "slices": counts.get("X", 0),
        "arrows": counts.get("s", 0),
        "values": counts.get("C", 0),
        "processes": [
            {"pid": each.pid, "label": each.label, "host": each.host, "overwritten_events": each.recorded.lost}
            for each in recording.processes
        ],
        "clock_error_ns": recording.clock_error_ns,
        "not_read": [str(each) for each in recording.unread],
    }
