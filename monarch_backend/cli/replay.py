"""`monarch-backend replay`: run one recorded actor again, alone in this process, with the same messages."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch_backend.cli.arguments import fail

if TYPE_CHECKING:
    from monarch_backend._replay.player import Outcome
    from monarch_backend._replay.replay_file import Header
    from monarch_backend._replay.script import Script

DESCRIPTION = """\
Run a recorded actor again, alone in this process, with the same messages in the same order. MONARCH_REPLAY=folder
records. pdb stops at the first line of the last message that failed or has not ended, otherwise of the last one, and
where an exception is raised. A replay runs code that is in the file.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.description = DESCRIPTION
    parser.add_argument("file", metavar="FILE", help="a replay file, or a folder of them: the newest that fits")
    parser.add_argument("actor", nargs="?", metavar="ACTOR", help="name that was given to spawn")
    parser.add_argument("rank", nargs="?", type=int, metavar="RANK", help="rank of the actor in its mesh")
    parser.add_argument("--list", action="store_true", help="print the files of a folder, or the messages of an actor")
    parser.add_argument("--to", type=int, metavar="N", help="end after message N; pdb stops there")
    parser.add_argument("--at", type=int, metavar="N", help="pdb stops at message N; 0 is the constructor")
    parser.add_argument("--no-pdb", action="store_true", help="only compare; exit code 1 if something deviates")
    parser.add_argument("--json", action="store_true", help="print JSON; without pdb")


def run(args: argparse.Namespace) -> int:
    """Replay or list. Return 0; 1 if the replay deviates or the file cannot be used; 2 for wrong arguments."""
    from monarch_backend import _wiring as _wiring
    from monarch_backend._replay import replay_file
    from monarch_backend._replay.replay_file import ReplayError

    if (args.actor is None) != (args.rank is None):
        print("monarch-backend replay: give ACTOR and RANK, or none of them", file=sys.stderr)
        return 2
    if None not in (args.at, args.to) and args.at > args.to:
        print(
            f"monarch-backend replay: pdb would not stop at message {args.at}: the replay ends after message "
            f"{args.to}. Give --at at most the number of --to",
            file=sys.stderr,
        )
        return 2
    path = Path(args.file)
    try:
        found = replay_file.find(path, args.actor, args.rank)
        if args.list and args.actor is None and path.is_dir():
            return _list_files(found, as_json=args.json)
        if args.actor is None and len({(header.actor, header.rank) for _, header in found}) > 1:
            there = ", ".join(sorted({f"{header.actor} {header.rank}" for _, header in found}))
            print(f"monarch-backend replay: give ACTOR and RANK, one of: {there}", file=sys.stderr)
            return 2
        if len(found) > 1:
            print(f"{len(found)} files fit, this is the newest; --list shows all of a folder", file=sys.stderr)
        return _of_actor(args, *found[0])
    except ReplayError as error:
        return fail("replay", error)


def _of_actor(args: argparse.Namespace, path: Path, header: Header) -> int:
    from monarch_backend._replay.script import Script

    if not args.list and header.hash_seed and os.environ.get("PYTHONHASHSEED") != header.hash_seed:
        command = [sys.executable, "-m", "monarch_backend.cli", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": header.hash_seed})
    script = Script(path.absolute())
    if args.list:
        return _list_messages(script, as_json=args.json)
    for number in (args.to, args.at):
        if number is not None:
            script.check(number)
    last = script.last if args.to is None else args.to
    chosen = args.at
    if chosen is None:
        chosen = script.chosen if args.to is None else last
    return _replay(args, script, last, None if args.no_pdb or args.json else chosen)


def _replay(args: argparse.Namespace, script: Script, last: int, stop_at: int | None) -> int:
    from monarch_backend._replay.player import replay

    if not args.json:
        header = script.header
        print(f"{script.where} of {header.mesh} (host {header.host}, pid {header.pid}), recorded in {script.path}")
    outcome = replay(script, last, stop_at)
    if args.json:
        print(json.dumps(_as_json(script, outcome), indent=1))
    else:
        _print(script, outcome, last)
    return 1 if outcome.deviations else 0


def _print(script: Script, outcome: Outcome, last: int) -> None:
    for text in outcome.deviations:
        print(f"deviation: {text}")
    if outcome.stopped:
        print(f"the replay has ended: {outcome.stopped}")
    count = max(outcome.messages - 1, 0)
    found = len(outcome.deviations)
    verdict = f"{found} deviation{'s' * (found > 1)}" if found else "as recorded"
    print(f"{count} of {script.last} messages replayed: {verdict}")
    if last == script.last and script.closed is not None and not script.closed.is_complete:
        print(f"the file ends early: {script.end}")


def _as_json(script: Script, outcome: Outcome) -> dict[str, Any]:
    return {
        "file": str(script.path),
        "actor": script.header.actor,
        "rank": script.header.rank,
        "messages": max(outcome.messages - 1, 0),
        "recorded": script.last,
        "deviations": outcome.deviations,
        "stopped": outcome.stopped,
        "end": script.end,
    }


def _list_files(found: list[tuple[Path, Header]], *, as_json: bool) -> int:
    from monarch_backend._replay.script import Script

    rows = []
    for path, header in sorted(found, key=lambda each: (each[1].actor, each[1].rank)):  # each with the newest first
        script = Script(path)
        rows.append(
            {
                "actor": header.actor,
                "rank": header.rank,
                "class": header.class_name,
                "host": header.host,
                "pid": header.pid,
                "started": header.started_at,
                "messages": script.last,
                "bytes": path.stat().st_size,
                "failed": script.failed,
                "end": script.end,
                "file": str(path),
            }
        )
    if as_json:
        print(json.dumps(rows, indent=1))
        return 0
    for row in rows:
        failed = "" if row["failed"] is None else f", message {row['failed']} failed"
        name = Path(str(row["file"])).name
        print(f"{row['actor']} {row['rank']}  {row['messages']} messages{failed}  {row['end']}  {name}")
    return 0


def _list_messages(script: Script, *, as_json: bool) -> int:
    rows = [
        {
            "message": each.number,
            "endpoint": each.endpoint,
            "sender": "" if each.started is None else each.started.sender,
            "seconds": 0.0 if each.started is None else round(each.started.at, 6),
            "state": each.state,
        }
        for each in script.messages.values()
    ]
    if as_json:
        print(json.dumps(rows, indent=1))
        return 0
    width = len(str(script.last))
    for row in rows:
        sender = f"  from {row['sender']}" if row["sender"] else ""
        print(f"{row['message']:>{width}}  {row['endpoint']}{sender}  {row['state']}")
    print(f"the file ends: {script.end}")
    return 0
