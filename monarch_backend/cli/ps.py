"""`monarch-backend ps`: the running programs of this machine, their processes, and what each actor does."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from monarch_backend._telemetry.labels import fold_numbers, pids_in_words
from monarch_backend.cli.arguments import add_program, fail, nothing_there

if TYPE_CHECKING:
    from monarch_backend._telemetry.programs import Process, Program
    from monarch_backend._telemetry.subject import Subject

MIN_AWAIT_S = 1.0
"""Seconds after which the process of an async endpoint is asked where it waits."""

PLACES_TIME_LIMIT_S = 2.0
"""Seconds after which no other process is asked."""

_ORDERS: dict[str, Callable[[Process], float]] = {
    "cpu": lambda process: process.cpu_seconds or 0.0,
    "memory": lambda process: process.memory or 0,
    "age": lambda process: process.age,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_program(parser, or_job=True)
    parser.add_argument(
        "--sort",
        choices=sorted(_ORDERS),
        help="order of a program's processes, the highest first; by default as started",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON array instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the trees. Return 0, or 1 with the reason if there is no such program."""
    from monarch_backend._job.errors import JobError
    from monarch_backend.cli.subject import look_at

    try:
        with look_at(args.program) as there:
            chosen, unread = there.programs()
            _add_places(there, chosen)
    except (LookupError, NotImplementedError, JobError) as error:
        return fail("ps", error)
    for each in unread:
        print(f"not read: {each}", file=sys.stderr)
    if args.sort:
        for program in chosen:
            program.processes.sort(key=lambda each: (each.pid != program.pid, -_ORDERS[args.sort](each)))
    if args.json:
        print(json.dumps([program.as_json() for program in chosen], indent=1))
    elif not chosen:
        print(nothing_there(args.program))
    else:
        print("\n\n".join(as_text(program, chosen) for program in chosen))
    return 0


def _add_places(there: Subject, programs: list[Program]) -> None:
    """Ask the processes whose async endpoints have run for a while where these wait."""
    from monarch_backend._telemetry import whereabouts
    from monarch_backend._telemetry.programs import IS_ASYNC

    for program in programs:
        asked = [
            process
            for process in program.processes
            if any(IS_ASYNC in each and each["seconds"] >= MIN_AWAIT_S for each in process.activities)
        ]
        if asked:
            pids = [each.pid for each in asked]
            found = there.stacks(program.host, pids, with_py_spy=False, time_limit=PLACES_TIME_LIMIT_S)
            for process, stacks in zip(asked, found, strict=True):
                whereabouts.add_places(process, stacks)


def as_text(program: Program, others: Iterable[Program] = ()) -> str:
    """Return the tree of a program: a line per process, and below it one per activity.

    ``others`` are programs in which its calls may run, such as those of other hosts.
    """
    lines, runs = [], ranks_of_calls([program, *others])
    for process in program.processes:
        indent = "" if process.parent == 0 else "  "
        lines.append(f"{indent}{_process_line(process, program)}")
        lines += [f"{indent}    {_activity_line(activity, runs)}" for activity in actors_joined(process.activities)]
        lines += [f"{indent}    {each}" for each in _child_lines(process, program)]
    lines += [f"  {_starting_line(each)}" for each in program.starting]
    return "\n".join([*lines, *findings(program)])


def _child_lines(process: Process, program: Program) -> list[str]:
    """Return a line for each kind of child processes of a process: those of one name and state."""
    kinds: dict[tuple[str, str], list[int]] = {}
    for child in program.children:
        if child.parent == process.pid:
            kinds.setdefault((child.name, child.state), []).append(child.pid)
    return [
        f"{len(pids)} child process{'es' * (len(pids) > 1)} {name} ({pids_in_words(pids)}, {state})"
        for (name, state), pids in kinds.items()
    ]


def _starting_line(process: dict[str, Any]) -> str:
    """Return the line of a process that is being started, and maybe is not made yet."""
    made = "no process yet" if process["pid"] is None else f"pid {process['pid']}"
    return f"{process['label']} ({made}, {process['state']} for {duration(process['seconds'])})"


def actors_joined(activities: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return activities with the messages of each actor together, the oldest first.

    It has the actor's counts. Further messages that run have None as ``ended``, and idle cells are left out.

    >>> cell = {"kind": "message", "name": "a", "rank": 0, "state": "idle", "seconds": 1, "ended": 7, "queue": 0}
    >>> running = [cell | {"state": "running", "seconds": age, "ended": 0, "queue": age} for age in (2, 3)]
    >>> [(each["seconds"], each["ended"], each["queue"]) for each in actors_joined([cell, *running])]
    [(3, 7, 5), (2, None, 0)]
    """
    groups: dict[Any, list[dict[str, Any]]] = {}
    for number, each in enumerate(activities):
        key = (each["name"], each["rank"]) if each["kind"] == "message" else number
        groups.setdefault(key, []).append(each)
    found: list[dict[str, Any]] = []
    for cells in groups.values():
        busy = sorted((each for each in cells if each["state"] != "idle"), key=lambda each: -each["seconds"])
        first, *others = busy or cells[:1]
        if len(cells) > 1:
            first = {**first, **{count: sum(each[count] for each in cells) for count in ("ended", "queue")}}
        found += [first, *({**each, "ended": None, "queue": 0} for each in others)]
    return found


def findings(program: Program) -> list[str]:
    """Return a line for each late and each slow rank of a program."""
    return [str(each["text"]) for each in (*program.late, *program.slow)]


def name_of(process: Process, program: Program) -> str:
    """Return the name of a process: its label, and for the program's own process the command."""
    if process.pid != program.pid:
        return process.label
    return program.command if process.label.startswith("program ") else f"{process.label} of {program.command}"


def state_of(process: Process) -> str:
    """Return the state of a process, with the exit code of one that has ended."""
    return process.state if process.exit_code is None else f"ended with {process.exit_code}"


def memory_text(size: int) -> str:
    """Return an amount of memory in bytes for people.

    >>> memory_text(3 << 30)
    '3072 MiB'
    """
    return f"{size / 2**20:.0f} MiB"


def _process_line(process: Process, program: Program) -> str:
    what = name_of(process, program)
    what += f" on {program.host}" if program.host and process.pid == program.pid else ""
    facts = [f"pid {process.pid}", state_of(process)]
    if process.restarts:
        facts.append(f"restarted {'once' if process.restarts == 1 else f'{process.restarts} times'}")
    if process.memory is not None and process.cpu_seconds is not None:
        facts.append(memory_text(process.memory))
        if process.gpu_memory is not None:
            facts.append(f"{memory_text(process.gpu_memory)} of GPU memory")
        facts.append(f"{process.cpu_seconds:.1f} s of processor time")
    return f"{what} ({', '.join(facts)})"


def ranks_of_calls(programs: Iterable[Program]) -> dict[str, set[int]]:
    """Return the ranks that run a call now, by its ``call``."""
    ranks: dict[str, set[int]] = {}
    for activity in (each for program in programs for process in program.processes for each in process.activities):
        if activity["kind"] == "message" and activity.get("call") and activity["state"] != "lost":
            ranks.setdefault(activity["call"], set()).add(activity["rank"])
    return ranks


def awaited(activity: dict[str, object]) -> str:
    """Return what a wait is for: the actor and the endpoint of a call."""
    return f"{activity['name']}.{activity['detail']}" if activity["detail"] else str(activity["name"])


def missing(activity: dict[str, object], runs: dict[str, set[int]]) -> str:
    """Return the ranks that a wait misses, as ", rank 1 missing": those that run the call. Queued ones are unknown."""
    ranks = sorted(runs.get(str(activity.get("call")), ()))
    return f", rank{'s' * (len(ranks) > 1)} {fold_numbers(ranks)} missing" if ranks else ""


def _activity_line(activity: dict[str, object], runs: dict[str, set[int]]) -> str:
    seconds = duration(float(str(activity["seconds"])))
    if activity["kind"] == "wait" and activity["name"] == "breakpoint":  # of a thread, which has no rank
        return f"waits at {activity['detail']} for {seconds}: monarch-backend debug"
    if activity["kind"] == "step":
        made = f"{activity['name']} {activity['ended']} done"
        median = f", median of the last {activity['window']} {duration(float(str(activity['median_seconds'])))}"
        return made + median * bool(activity["window"])
    if activity["kind"] == "wait" and activity["state"] != "lost":
        return f"waits for {awaited(activity)} for {seconds}{missing(activity, runs)}"
    rank = "" if activity["kind"] == "span" else f" rank {activity['rank']}"
    text = f"{activity['name']}{rank}: {activity['state']}"
    if activity["detail"]:
        text += f" {activity['detail']}"
    text += " after" if activity["state"] == "lost" else " for"
    text += f" {seconds}"
    text += f", {activity['ended']} done" if activity["ended"] is not None else ""
    text += f", {activity['queue']} in the queue" if activity["queue"] else ""
    text += f", {activity['place']}" if activity.get("place") else ""
    return f"{text}, waits for {activity['awaits']}" if activity.get("awaits") else text


def duration(seconds: float) -> str:
    """Return a duration for people.

    >>> [duration(each) for each in (0.0123, 3.21, 754.0, 7300.0)]
    ['12 ms', '3.2 s', '12 min 34 s', '2 h 1 min']
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds) // 60
    return f"{minutes} min {int(seconds) % 60} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
