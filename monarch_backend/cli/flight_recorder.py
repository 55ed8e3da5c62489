"""`monarch-backend flight-recorder`: write dumps of collectives that torch.distributed.flight_recorder analyses."""

from __future__ import annotations

import argparse

from monarch_backend.cli.arguments import add_program, fail


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_program(parser, or_job=True)
    parser.add_argument("-o", "--output", metavar="FOLDER", required=True, help="new or empty folder for the dumps")
    parser.add_argument(
        "--stacks",
        action="store_true",
        help="ask ranks that are in a collective for their Python stacks",
    )


def run(args: argparse.Namespace) -> int:
    """Write the dumps. Return 0, or 1 with the reason if there are no ranks or the folder can't be written."""
    from monarch_backend._job.errors import JobError
    from monarch_backend._telemetry.export import flight_recorder
    from monarch_backend.cli.subject import look_at

    try:
        with look_at(args.program) as there:
            recording = there.recording()
            made = flight_recorder.dumps(recording)
            if args.stacks:
                made.add_stacks(there.stacks)
        made.write(args.output)
    except (LookupError, NotImplementedError, OSError, ValueError, JobError) as error:
        return fail("flight-recorder", error)
    for rank, process in made.processes.items():
        entries = made.of_rank[rank]["entries"]
        open_ones = sum(entry["state"] == "started" for entry in entries)
        print(
            f"rank {rank} ({process.label}, pid {process.pid}): {len(entries)} collectives, {open_ones} not completed"
        )
    print(f"Analyse them with: python -m torch.distributed.flight_recorder.fr_trace {args.output}")
    for each in recording.unread:
        print(f"not read: {each}")
    return 0
