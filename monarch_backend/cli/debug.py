"""`monarch-backend debug`: processes that wait at a breakpoint: list, attach, send a command, let them go on."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from monarch_backend._telemetry.labels import fold_labels
from monarch_backend.cli.arguments import add_ranks, fail
from monarch_backend.cli.ps import duration

if TYPE_CHECKING:
    from monarch_backend._job.inspection import Inspection
    from monarch_backend._processes.debugging.client import WaitingProcess

DESCRIPTION = """\
Processes of this user on this machine, or of all hosts of a job, that wait at a breakpoint.

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
        with _looking_at(args.program) as there:
            return _act(args, there, action, words)
    except (LookupError, OSError, ValueError, NotImplementedError, JobError) as error:
        return fail("debug", error)
    except KeyboardInterrupt:
        return fail("debug", "interrupted")


def _act(args: argparse.Namespace, there: Inspection | None, action: str, words: list[str]) -> int:
    from monarch_backend._processes.debugging import client

    if there is None:
        found = [("", each) for each in _of_program(client.waiting_processes(), args.program)]
    else:
        found, unread = there.waiting()
        for each in unread:
            fail("debug", f"not read: {each}")
    processes = [process for _, process in found]
    hosts = {process: host for host, process in found}
    if action == "list":
        if args.ranks is not None:
            processes = client.select_processes(args.ranks, processes)
        print(client.as_json(processes) if args.json else _listed(processes, hosts))
        return 0
    if action == "attach":
        return _attach(client.select_processes(words, processes), hosts)
    chosen = client.select_processes(args.ranks, processes)
    is_continue = not words
    command = words[0] if words else "continue"
    try:
        if there is None:
            answers = dict(client.send_command(chosen, command, until_resumed=is_continue))
        else:
            by_host: dict[str, list[WaitingProcess]] = {}
            for process in chosen:
                by_host.setdefault(hosts[process], []).append(process)
            answers = there.debug(by_host, command, until_resumed=is_continue)
    except KeyboardInterrupt:
        return fail("debug", "interrupted; the processes go on with the command")
    _show(chosen, hosts, answers, as_json=args.json)
    return 0


def _looking_at(program: str | None) -> contextlib.AbstractContextManager[Inspection | None]:
    """Return what looks at the hosts of a job, or None in its place for a program of this machine."""
    from monarch_backend.cli.subject import job_file

    path = None if program is None else job_file(program)
    if path is None:
        return contextlib.nullcontext()
    from monarch_backend import _wiring as _wiring  # imports torch
    from monarch_backend._job.inspection import Inspection

    return Inspection(path)


_ACTIONS = {"list": 0, "attach": 1, "run": 1, "continue": 0}
"""Actions and their numbers of further words."""


def _of_program(processes: list[WaitingProcess], program: str | None) -> list[WaitingProcess]:
    if program is None:
        return processes
    from monarch_backend._telemetry.programs import select

    pids = {process.pid for each in select(program) for process in each.processes}
    return [each for each in processes if each.pid in pids]


def _label(process: WaitingProcess, hosts: Mapping[WaitingProcess, str]) -> str:
    return f"{process.label} on {hosts[process]}" if hosts[process] else process.label


def _listed(processes: Sequence[WaitingProcess], hosts: Mapping[WaitingProcess, str]) -> str:
    if not processes:
        return "no process waits at a breakpoint"
    rows = []
    for each in processes:
        since = f"for {duration(time.time() - each.since)}" if each.since else ""
        name = str(each.pid) if sum(other.pid == each.pid for other in processes) == 1 else each.id
        rows.append(
            (
                _label(each, hosts),
                f"pid {name}",
                each.where,
                since,
                f"attached by {each.attached}" * bool(each.attached),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _attach(chosen: Sequence[WaitingProcess], hosts: Mapping[WaitingProcess, str]) -> int:
    from monarch_backend._processes.debugging import client

    if len(chosen) > 1:
        names = ", ".join(f"{each.id} ({each.label})" for each in chosen)
        return fail("debug", f"attach to one of them: {names}")
    [process] = chosen
    if hosts[process]:
        return fail(
            "debug",
            f"{_label(process, hosts)} is attached only from its own machine: run this command there, or send it "
            "single commands from here, with `debug run COMMAND --program JOB`",
        )
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


def _show(
    chosen: Sequence[WaitingProcess], hosts: Mapping[WaitingProcess, str], answers: Mapping[WaitingProcess, str],
    *, as_json: bool,
) -> None:  # fmt: skip
    if as_json:
        found = [{"label": p.label, "pid": p.pid, "host": hosts[p], "answer": answers[p]} for p in chosen]
        print(json.dumps(found, indent=1))
        return
    folded: dict[tuple[str, str], list[str]] = {}
    for process in chosen:
        folded.setdefault((hosts[process], answers[process]), []).append(process.label)
    for (host, text), labels in folded.items():
        where = f" on {host}" if host else ""
        for line in text.splitlines() or [""]:
            print(f"[{fold_labels(labels)}{where}] {line}".rstrip())
