"""`monarch-backend flight-recorder`: write dumps of collectives that torch.distributed.flight_recorder analyses."""

from __future__ import annotations

import argparse
import json

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
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


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
    ranks = []
    for rank, process in made.processes.items():
        entries = made.of_rank[rank]["entries"]
        open_ones = sum(entry["state"] == "started" for entry in entries)
        about = {"rank": rank, "label": process.label, "pid": process.pid}
        ranks.append({**about, "collectives": len(entries), "not_completed": open_ones})
    if args.json:
        not_read = [str(each) for each in recording.unread]
        print(json.dumps({"folder": args.output, "ranks": ranks, "not_read": not_read}, indent=1))
        return 0
    for each in ranks:
        print(
            f"rank {each['rank']} ({each['label']}, pid {each['pid']}): {each['collectives']} collectives, "
            f"{each['not_completed']} not completed"
        )
    print(f"Analyse them with: python -m torch.distributed.flight_recorder.fr_trace {args.output}")
    for unread in recording.unread:
        print(f"not read: {unread}")
    return 0
