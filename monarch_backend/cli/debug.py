"""`monarch-backend debug`: processes that wait at a breakpoint: list, attach, send a command, let them go on."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from monarch_backend._telemetry.labels import fold_labels
from monarch_backend.cli.arguments import add_ranks, fail
from monarch_backend.cli.ps import duration

if TYPE_CHECKING:
    from monarch_backend._processes.debugging.client import WaitingProcess

DESCRIPTION = """\
Processes of this user on this machine that wait at a breakpoint.

  monarch-backend debug [PROGRAM]      list them
  monarch-backend debug attach WHICH   debug one of them: pdb in this terminal
  monarch-backend debug run COMMAND    send a command of pdb to all, print the answers
  monarch-backend debug continue       let all go on
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = DESCRIPTION
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="PROGRAM is a pid of it, a part of its command, or a job; see above"
    )
    add_ranks(parser)
    parser.add_argument("--program", metavar="PROGRAM", help="only processes of this program")
    parser.add_argument("--json", action="store_true", help="print one JSON array instead of text")


def run(args: argparse.Namespace) -> int:
    """Run one of the actions. Return 0; 1, with the reason, if no such process waits; 2 for wrong arguments."""
    from monarch_backend._job.errors import JobError
    from monarch_backend._processes.debugging import client

    action, words = "list", args.words
    if words and words[0] in _ACTIONS:
        action, words = words[0], words[1:]
    elif len(words) == 1 and args.program is None:
        args.program, words = words[0], []
    if len(words) != _ACTIONS[action]:
        print(f"monarch-backend debug: wrong arguments: {' '.join(args.words)}\n\n{DESCRIPTION}", file=sys.stderr)
        return 2
    if action == "run" and not words[0].strip():
        print("monarch-backend debug: the command is empty, and would repeat none: name one of pdb", file=sys.stderr)
        return 2
    try:
        processes = _of_program(client.waiting_processes(), args.program)
        if action == "list":
            if args.ranks is not None:
                processes = client.select_processes(args.ranks, processes)
            print(client.as_json(processes) if args.json else _listed(processes))
            return 0
        if action == "attach":
            return _attach(client.select_processes(words, processes))
        chosen = client.select_processes(args.ranks, processes)
    except (LookupError, OSError, ValueError, NotImplementedError, JobError) as error:
        return fail("debug", error)
    try:
        return _send(chosen, words[0] if words else "continue", is_continue=not words, as_json=args.json)
    except KeyboardInterrupt:
        return fail("debug", "interrupted; the processes go on with the command")


_ACTIONS = {"list": 0, "attach": 1, "run": 1, "continue": 0}
"""Actions and their numbers of further words."""


def _of_program(processes: list[WaitingProcess], program: str | None) -> list[WaitingProcess]:
    if program is None:
        return processes
    from monarch_backend.cli.subject import look_at

    with look_at(program) as there:
        chosen, unread = there.programs()
    pids = {process.pid for each in chosen if not each.host for process in each.processes}
    found = [each for each in processes if each.pid in pids]
    elsewhere = sorted({each.host for each in chosen if each.host} | {each.label for each in unread if not each.pid})
    if elsewhere:
        text = (
            f"debug reaches only the processes of this machine; not those of {', '.join(elsewhere)}. Run it there. "
            f"'monarch-backend ps {program}' shows breakpoints on all hosts"
        )
        if not found:
            raise LookupError(text)
        fail("debug", text)
    return found


def _listed(processes: Sequence[WaitingProcess]) -> str:
    if not processes:
        return "no process waits at a breakpoint"
    rows = []
    for each in processes:
        since = f"for {duration(time.time() - each.since)}" if each.since else ""
        name = str(each.pid) if sum(other.pid == each.pid for other in processes) == 1 else each.id
        rows.append(
            (each.label, f"pid {name}", each.where, since, f"attached by {each.attached}" * bool(each.attached))
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _attach(chosen: Sequence[WaitingProcess]) -> int:
    from monarch_backend._processes.debugging import client

    if len(chosen) > 1:
        names = ", ".join(f"{each.id} ({each.label})" for each in chosen)
        return fail("debug", f"attach to one of them: {names}")
    [process] = chosen
    try:
        attachment = client.Attachment(process)
    except OSError as error:
        return fail("debug", f"{process.label} does not wait any more: {error}")
    print(f"{process.label} (pid {process.pid}) waits at {process.where}. Ctrl-D detaches.")
    _use_completion(attachment.complete)
    print(attachment.run(input, _write))
    return 0


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _use_completion(complete: object) -> None:
    try:
        import readline
    except ImportError:  # a Python that was built without it
        return
    readline.set_completer(complete)  # type: ignore[arg-type]
    readline.set_completer_delims(" \t\n`@#%^&*()=+[{]}\\|;:'\",<>?")  # those of pdb
    is_libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")


def _send(chosen: Sequence[WaitingProcess], command: str, *, is_continue: bool, as_json: bool) -> int:
    from monarch_backend._processes.debugging import client

    answers = dict(client.send_command(chosen, command, until_resumed=is_continue))
    if as_json:
        print(json.dumps([{"label": p.label, "pid": p.pid, "answer": answers[p]} for p in chosen], indent=1))
        return 0
    folded: dict[str, list[str]] = {}
    for process in chosen:
        folded.setdefault(answers[process], []).append(process.label)
    for text, labels in folded.items():
        for line in text.splitlines() or [""]:
            print(f"[{fold_labels(labels)}] {line}".rstrip())
    return 0
