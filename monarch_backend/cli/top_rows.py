"""The tree of `monarch-backend top`: a row for each host, process and activity, with the fields of `ps` and rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monarch_backend.cli import ps

if TYPE_CHECKING:
    from monarch_backend._telemetry.programs import Process, Program
    from monarch_backend._telemetry.rates import ProcessKey, Rates
    from monarch_backend._telemetry.subject import Member

COLUMNS = {
    "PROCESS": 7, "PID": 7, "STATE": 7, "ENDPOINT": 8, "FOR": 7, "QUEUE": 5, "DONE": 6, "CPU%": 6, "MEMORY": 8,
    "MSG/S": 5, "BYTES/S": 7, "GPU": 0, "RESTARTS": 0,
}  # fmt: skip
"""Columns with the width of a usual cell, so that a change moves no column on the screen.

On the screen those of 0 are left out while they are empty.
"""

LEFT = {"PROCESS", "STATE", "ENDPOINT"}
"""Columns of text. Those of numbers are aligned on the right."""


@dataclass(frozen=True)
class Row:
    """A line of the tree. ``key`` is the same in each look. ``cells`` are those of `COLUMNS`.

    ``member`` is the process that the line belongs to, with its program. That of a host has none.
    """

    key: str
    depth: int
    cells: tuple[str, ...]
    member: Member | None = None


def rows_of(programs: Iterable[Program], rates: dict[ProcessKey, Rates]) -> list[Row]:
    """Return the tree: hosts, where there are others than this machine, their processes, and what the actors do."""
    by_host: dict[str, list[Program]] = {}
    for program in programs:
        by_host.setdefault(program.host, []).append(program)
    has_hosts = any(by_host)
    runs = ps.ranks_of_calls(each for found in by_host.values() for each in found)
    rows, seen = [], Counter[str]()
    for host, found in by_host.items():
        if has_hosts:
            running = sum(process.exit_code is None for program in found for process in program.processes)
            state = f"{running} running"
            rows.append(Row(f"host {host}", 0, _cells(host or "this machine", 0, STATE=state)))
        for program in found:
            rows += _of_program(program, rates, runs, seen, int(has_hosts))
    return rows


def _of_program(
    program: Program, rates: dict[ProcessKey, Rates], runs: dict[str, set[int]], seen: Counter[str], depth: int
) -> Iterator[Row]:
    def row(key: str, depth: int, cells: tuple[str, ...], process: Process) -> Row:
        seen[key] += 1  # a process may have the pid of one that has ended, and an actor handle several messages
        return Row(f"{key} {seen[key]}", depth, cells, (program, process))

    for process in program.processes:
        below = depth + (process.parent != 0)
        key = f"{program.host}\n{program.pid}\n{process.pid}\n{process.label}"
        yield row(key, below, _of_process(program, process, rates.get((program.host, process.pid)), below), process)
        for each in ps.actors_joined(process.activities):
            of_activity = f"{key}\n{each['kind']}\n{each['name']}\n{each['rank']}"
            yield row(of_activity, below + 1, _of_activity(each, runs, below + 1), process)
    yield from _starting(program, depth + 1)


def _starting(program: Program, depth: int) -> Iterator[Row]:
    """Yield a row for each process that is being started. Nothing of it is measured yet."""
    for number, each in enumerate(program.starting):
        pid = "" if each["pid"] is None else str(each["pid"])
        cells = _cells(each["label"], depth, PID=pid, STATE=each["state"], FOR=ps.duration(each["seconds"]))
        yield Row(f"{program.host}\n{program.pid}\nstarting {number}", depth, cells)


def _of_process(program: Program, process: Process, rates: Rates | None, depth: int) -> tuple[str, ...]:
    found = {
        "PID": str(process.pid),
        "STATE": ps.state_of(process),
        "MEMORY": "" if process.memory is None else ps.memory_text(process.memory),
        "GPU": "" if process.gpu_memory is None else ps.memory_text(process.gpu_memory),
        "RESTARTS": str(process.restarts or ""),
    }
    if rates is not None:
        found["CPU%"] = f"{rates.cpu * 100:.1f}"
        found["MSG/S"] = f"{rates.messages_per_second:.0f}"
        found["BYTES/S"] = short(rates.bytes_per_second)
    return _cells(ps.name_of(process, program), depth, **found)


def _of_activity(activity: dict[str, Any], runs: dict[str, set[int]], depth: int) -> tuple[str, ...]:
    kind, state, what = activity["kind"], activity["state"], activity["detail"]
    name, seconds = f"{activity['name']} rank {activity['rank']}", activity["seconds"]
    if kind == "wait" and activity["name"] == "breakpoint":
        name = "breakpoint"
    elif kind == "wait":
        name, what = "call", ps.awaited(activity) + ps.missing(activity, runs)
    elif kind == "step":
        name, state, seconds = activity["name"], "", activity["median_seconds"]
        what = f"median of the last {activity['window']}" if activity["window"] else ""
    elif kind == "span":
        name = activity["name"]
    done = "" if kind == "wait" or activity["ended"] is None else str(activity["ended"])
    return _cells(
        name, depth, STATE=state, ENDPOINT=what, FOR=ps.duration(seconds) if state or what else "",
        QUEUE=str(activity["queue"] or ""), DONE=done,
    )  # fmt: skip


def _cells(name: str, depth: int, **cells: str) -> tuple[str, ...]:
    cells["PROCESS"] = "  " * depth + name
    return tuple(printable(cells.get(column, "")) for column in COLUMNS)


def chosen(rows: list[Row], text: str) -> list[Row]:
    """Return the rows that contain a text, with those above them in the tree, and those below them."""
    kept: list[Row] = []
    above: list[Row] = []  # not kept yet
    matching = -1  # depth of the row that contains the text, while those below it follow
    for row in rows:
        above = [each for each in above if each.depth < row.depth]
        if row.depth <= matching:
            matching = -1
        if matching < 0 and any(text.lower() in cell.lower() for cell in row.cells):
            matching = row.depth
        if matching < 0:
            above.append(row)
        else:
            kept += [*above, row]
            above = []
    return kept


def widths(rows: list[Row], least: dict[str, int]) -> dict[str, int]:
    """Return the widths of the columns for rows: 0 for a column that is empty and has no ``least`` width."""
    longest = {name: max((len(row.cells[at]) for row in rows), default=0) for at, name in enumerate(COLUMNS)}
    return {name: max(width, least[name], len(name)) if width or least[name] else 0 for name, width in longest.items()}


def line(cells: tuple[str, ...], widths: dict[str, int]) -> str:
    """Return the cells of columns with these widths as one line. ``cells`` may lack the first columns."""
    columns = list(COLUMNS)[-len(cells) :]
    return "  ".join(
        cell.ljust(widths[name]) if name in LEFT else cell.rjust(widths[name])
        for name, cell in zip(columns, cells, strict=True)
        if widths[name]
    )


def table(rows: list[Row]) -> str:
    """Return the tree as text, without columns that are empty."""
    needed = widths(rows, dict.fromkeys(COLUMNS, 0))
    return "\n".join(line(cells, needed).rstrip() for cells in (tuple(COLUMNS), *(row.cells for row in rows)))


def printable(text: str) -> str:
    """Return a text for a terminal, with each control character replaced.

    >>> printable("step 1\\x1b[2J")
    'step 1\\ufffd[2J'
    """
    return text if text.isprintable() else "".join(each if each.isprintable() else "\ufffd" for each in text)


def short(number: float) -> str:
    """Return a number of bytes for people.

    >>> [short(each) for each in (0, 999, 1500, 25e6, 3e9)]
    ['0', '999', '1.5 K', '25.0 M', '3.0 G']
    """
    for unit in ("", " K", " M", " G"):
        if number < 1000:
            return f"{number:.1f}{unit}" if unit else f"{number:.0f}"
        number /= 1000
    return f"{number:.1f} T"
