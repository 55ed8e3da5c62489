"""`monarch-backend stack`: the Python stacks of all processes of a program, equal ones once."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from monarch_backend._telemetry.labels import LAUNCHER, fold_labels, in_words, is_wanted
from monarch_backend.cli.arguments import add_program, add_ranks, fail, nothing_there
from monarch_backend.cli.ps import findings

if TYPE_CHECKING:
    from monarch_backend._telemetry.programs import ChildProcess, Process, Program
    from monarch_backend._telemetry.stacks import Stacks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_program(parser, or_job=True)
    add_ranks(parser)
    parser.add_argument("--all-threads", action="store_true", help="also threads and calls of monarch_backend itself")
    parser.add_argument("--native", action="store_true", help="also C frames; needs py-spy")
    parser.add_argument("--json", action="store_true", help="print one JSON array instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the stacks. Return 0, or 1 with the reason if there is no such program or process."""
    from monarch_backend._job.errors import JobError
    from monarch_backend._telemetry import py_spy
    from monarch_backend.cli.subject import look_at

    try:
        if args.native and py_spy.find() is None:
            raise LookupError("--native needs py-spy: pip install py-spy")
        with look_at(args.program) as there:
            chosen, unread = there.programs()
            found = [(program, _selected(program, args.ranks)) for program in chosen]
            if args.ranks is not None and not any(processes for _, processes in found):
                labels = fold_labels(each.label for program in chosen for each in _selected(program, None))
                there_are = f"there are: {labels}" if labels else nothing_there(args.program)
                raise LookupError(f"no process is {in_words(args.ranks)}; {there_are}")
            read = []
            for program, processes in found:
                if processes:
                    stacks = there.stacks(program.host, [each.pid for each in processes], native=args.native)
                    both = zip(processes, stacks, strict=True)
                    read.append((program, [each for each in both if not _is_ended_child(*each)]))
    except (LookupError, NotImplementedError, ValueError, JobError) as error:
        return fail("stack", error)
    for each in unread:
        print(f"not read: {each}", file=sys.stderr)
    if args.json:
        print(json.dumps([_as_json(*each) for each in read], indent=1))
    elif not read:
        print(nothing_there(args.program))
    else:
        print("\n\n".join(as_text(*each, all_threads=args.all_threads) for each in read))
    return 0


def _selected(program: Program, ranks: list[str] | None) -> list[Process]:
    from monarch_backend._telemetry.programs import ENDED

    chosen = [each for each in program.processes if each.state != ENDED and is_wanted(each.label, each.pid, ranks)]
    pids = {each.pid for each in chosen}
    return chosen + [
        each for each in program.children if each.is_python and (each.parent in pids or _is_child_wanted(each, ranks))
    ]


def _is_ended_child(process: Process, stacks: Stacks) -> bool:
    """Return whether a child process has ended meanwhile. A process of a mesh is shown then."""
    from monarch_backend._telemetry.programs import ChildProcess
    from monarch_backend._telemetry.stacks import HAS_ENDED

    return isinstance(process, ChildProcess) and stacks.problem == HAS_ENDED


def _is_child_wanted(child: ChildProcess, ranks: list[str] | None) -> bool:
    """Return whether a child process is among ``ranks``, also as "pt_data_worker of gpus 0-1"."""
    prefix = f"{child.name} of "
    of_starter = [each.removeprefix(prefix) for each in ranks or () if each.startswith(prefix)]
    by_starter = bool(of_starter) and is_wanted(child.label.removeprefix(prefix), child.parent, of_starter)
    return by_starter or is_wanted(child.label, child.pid, ranks)


def as_text(program: Program, read: list[tuple[Process, Stacks]], *, all_threads: bool = False) -> str:
    """Return the stacks of a program: processes with equal stacks are one block. The innermost call is the last."""
    from monarch_backend._telemetry.folded_stacks import fold, heading
    from monarch_backend._telemetry.programs import starting_in_words

    where = f" on {program.host}" if program.host else ""
    lines = [f"{program.command} (pid {program.pid}{where})", *findings(program)]
    lines += filter(None, [starting_in_words(program)])
    if not all_threads:  # a launcher runs no code of the program
        launchers = [process for process, stacks in read if process.label == LAUNCHER and not stacks.problem]
        read = [(process, stacks) for process, stacks in read if process not in launchers]
        lines += [f"\n{heading([each])}\n    starts the ranks, and waits for their end" for each in launchers]
    blocks = fold(read, all_threads=all_threads)
    lines += [f"\n{heading(processes)}\n{block}" for block, processes in blocks.items()]
    return "\n".join(lines)


def _as_json(program: Program, read: list[tuple[Process, Stacks]]) -> dict[str, Any]:
    from monarch_backend._telemetry.folded_stacks import source_of
    from monarch_backend._telemetry.stacks import Task

    return {
        "pid": program.pid,
        "command": program.command,
        "host": program.host,
        "late": program.late,
        "starting": program.starting,
        "processes": [
            {
                "pid": process.pid,
                "label": process.label,
                "parent": process.parent,
                "problem": stacks.problem or stacks.unread_tasks,
                "threads": [
                    {
                        "name": thread.name,
                        "runtime": thread.is_runtime,
                        "awaits": thread.awaits if isinstance(thread, Task) else "",
                        "lock": thread.lock,
                        "frames": [
                            {"file": each.file, "line": each.line, "function": each.function, "source": source_of(each)}
                            for each in thread.frames
                        ],
                    }
                    for thread in stacks.threads
                ],
            }
            for process, stacks in read
        ],
    }
