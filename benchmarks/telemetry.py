"""Benchmark of the recording of what runs: what it costs the hot paths, an event, and a reader.

    python benchmarks/telemetry.py [--starts 5] [--rounds 20] [--only PART ...] [--out FILE]
    chrt -r 1 python benchmarks/telemetry.py        # on a machine with other load

Paths: the same processes pause and resume the recording. A round measures with recording, without, and without a
second time, in random order. The ratio of a start is the median of its rounds' ratios to the first measurement without.
Each start has new processes. The table has the median of the starts, and their range. The ratio of both measurements
without recording shows the noise of the machine.

Settings: the same between processes with MONARCH_TELEMETRY=1, 0, and 0 a second time, which run in turn. A paused
process still passes the arguments of its events; one with the setting does not. But two processes differ by some
percent with the same setting, so only the median of many starts says something.

Events: nanoseconds of one event, from Python. The floor is a call of the core that only reads the clock.

Readers: milliseconds for all processes of a program that has N of them, which never answer.

Queries: milliseconds of the command `monarch-backend sql` with its start, over 256 real processes, and over a recording
of 4,096 processes that one program writes (_simulated_recording.py). They have about 50 and 64 events each. The floor
is a query of no table.

Engines: milliseconds of the same command with --engine, over recordings of simulated processes with 64 events each.

Parts: paths, settings, events, readers, queries, engines.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from _machine_report import Others, machine
from checkouts import ROOT, Contender

from monarch_backend import _native
from monarch_backend._telemetry import programs, recorder
from monarch_backend._telemetry.discovery import Owner, descriptor_named
from monarch_backend._telemetry.kinds import Kind, State
from monarch_backend._telemetry.recording_area import AREA_NAME

STATES = {"off": False, "off again": False, "on": True}
BARS = {
    "all_reduce 8 B": 1.02,
    "call_one": 1.03,
    "100 x call_one": 1.03,
    "remote a + a": 1.02,
    "DTensor x + x": 1.02,
    "a.sum().item()": 1.02,
}
"""Case -> largest ratio that is wanted."""
CALLS = {
    "all_reduce 8 B": 3000,
    "call_one": 1000,
    "100 x call_one": 20,
    "remote a + a": 2000,
    "DTensor x + x": 2000,
    "a.sum().item()": 200,
}
"""Case -> calls in a round."""
KINDS = {"group": ["all_reduce 8 B"], "actors": ["call_one", "100 x call_one"], "dtensor": list(BARS)[3:]}
EVENTS = 200_000
RUNNER = Path(__file__).with_name("_telemetry_runner.py")
PROGRAM = Path(__file__).with_name("_telemetry_program.py")
SIMULATED = Path(__file__).with_name("_simulated_recording.py")
SIMULATED_EVENTS = 64
PARTS = ["paths", "settings", "events", "readers", "queries", "engines"]

Starts = dict[str, list[dict[str, list[float]]]]
"""Case -> for each start the seconds of each round, by state of the recording."""


def measure_paths(starts: int, rounds: int) -> Starts:
    """Return the times with and without recording."""
    found: Starts = defaultdict(list)
    for _ in range(starts):
        for kind, cases in KINDS.items():
            runner = Contender(ROOT, kind, RUNNER)
            try:
                for case in cases:
                    found[case].append(_rounds(rounds, case, dict.fromkeys(STATES, runner), switches=True))
            finally:
                runner.close()
    return found


def measure_settings(starts: int, rounds: int) -> Starts:
    """Return the times of processes with and without the setting."""
    found: Starts = defaultdict(list)
    for _ in range(starts):
        for kind, cases in KINDS.items():
            with contextlib.ExitStack() as stack:
                runners = {}
                for name in random.sample(list(STATES), len(STATES)):
                    runners[name] = Contender(ROOT, kind, RUNNER, MONARCH_TELEMETRY=str(int(STATES[name])))
                    stack.callback(runners[name].close)
                for case in cases:
                    found[case].append(_rounds(rounds, case, runners))
    return found


def _rounds(rounds: int, case: str, runners: dict[str, Contender], *, switches: bool = False) -> dict[str, list[float]]:
    """Return the times of a case in each round but the first, which warms up, by the state of the recording.

    ``switches``: the runner of a state switches its recording to it.
    """
    times: dict[str, list[float]] = {name: [] for name in STATES}
    for number in range(rounds + 1):
        for name in random.sample(list(STATES), len(STATES)):
            order = {"record": STATES[name]} if switches else {}
            took = runners[name].measure(case, count=CALLS[case], **order)
            if number:
                times[name].append(took)
    return times


def ratios(starts: list[dict[str, list[float]]], name: str) -> list[float]:
    """Return for each start the median of its rounds' ratios to the first measurement without recording."""
    return [
        statistics.median(time / off for time, off in zip(times[name], times["off"], strict=True)) for times in starts
    ]


def paths_table(found: Starts) -> str:
    """Return the table of the hot paths, with times in microseconds."""
    lines = [
        "| path | off, us | on, us | on / off | of the starts | off again / off | of the starts | bar |",
        "| --- | ---: | ---: | ---: | --- | ---: | --- | ---: |",
    ]
    for case, starts in found.items():
        cells = [
            f"{statistics.median(min(times[name]) for times in starts) * 1e6:.2f}" for name in ("off", "on")
        ]  # fmt: skip
        for name in ("on", "off again"):
            of = ratios(starts, name)
            cells += [f"{statistics.median(of):.3f}", f"{min(of):.3f} to {max(of):.3f}"]
        lines.append(f"| {case} | {' | '.join(cells)} | {BARS[case]:.2f} |")
    return "\n".join(lines)


@dataclass
class Cost:
    """What a call takes: nanoseconds of one, least and median of the repetitions."""

    what: str
    least: float
    median: float


def measure_events(repetitions: int = 15) -> list[Cost]:
    """Return the costs of one event, for this process."""
    recorder.area()
    name, detail = recorder.name_number("worker"), recorder.name_number("noop")
    cell = recorder.take_cell(Kind.ACTOR, "worker")
    record_event, begin, end, clock = (
        _native.record_event, _native.begin_activity, _native.end_activity, _native.monotonic_ns,
    )  # fmt: skip
    kind, running = int(Kind.SENT), int(State.RUNNING)

    def activity() -> None:
        begin(cell, running, detail, 7, 0, 64, 9)
        end(cell, 0)

    calls: dict[str, Callable[[], object]] = {
        "floor: a call that reads the clock": clock,
        "an event (a message is sent)": lambda: record_event(kind, 0, name, detail, 0, 7, 64, 9),
        "an activity: its cell twice, and its event (a message is handled)": activity,
        "an event by its names, for rare ones": lambda: recorder.event(Kind.SPAN, "worker", "noop"),
    }
    try:
        return [_cost(what, call, repetitions) for what, call in calls.items()]
    finally:
        recorder.release_cell(cell)


def _cost(what: str, call: Callable[[], object], repetitions: int) -> Cost:
    times = []
    count = EVENTS // repetitions
    for _ in range(repetitions):
        start = time.perf_counter_ns()
        for _ in range(count):
            call()
        times.append((time.perf_counter_ns() - start) / count)
    return Cost(what, min(times), statistics.median(times))


def events_table(costs: list[Cost]) -> str:
    """Return the table of events."""
    lines = ["| | ns, least | ns, median | per second |", "| --- | ---: | ---: | ---: |"]
    for each in costs:
        lines.append(f"| {each.what} | {each.least:.0f} | {each.median:.0f} | {1e9 / each.median:,.0f} |")
    return "\n".join(lines)


@contextlib.contextmanager
def program_of(processes: int, script: Path = PROGRAM, *arguments: str) -> Iterator[int]:
    """Run a program with this many processes, and yield its pid."""
    program = subprocess.Popen(
        [sys.executable, str(script), str(processes), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MONARCH_TELEMETRY": "1"},
        text=True,
    )
    assert program.stdin is not None
    assert program.stdout is not None
    with program:
        if program.stdout.readline() != "ready\n":
            raise SystemExit("the program with many processes has failed; its error is above")
        yield program.pid
        program.stdin.close()


class Readers:
    """Ways to read a program. Each returns the number of processes that it has seen."""

    def __init__(self, pid: int) -> None:
        descriptor = descriptor_named(pid, AREA_NAME)
        assert descriptor is not None
        self._pid, self._owner = pid, Owner(pid, descriptor)

    def cells(self) -> int:
        with self._owner.open() as area:
            return sum(1 for _ in area.processes())

    def events(self) -> int:
        with self._owner.open() as area:
            return sum(1 for each in area.processes(events=True) if each.events)

    def tree(self) -> int:
        [program] = programs.select(str(self._pid))
        return len(program.processes)

    def command(self) -> int:
        call = [sys.executable, "-m", "monarch_backend", "ps", str(self._pid)]
        return subprocess.run(call, capture_output=True, text=True, check=True, cwd=ROOT).stdout.count("(pid ")


READERS: dict[str, Callable[[Readers], int]] = {
    "activities of all processes": Readers.cells,
    "with all events": Readers.events,
    "the tree, with memory and processor time": Readers.tree,
    "the command `monarch-backend ps`": Readers.command,
}


def measure_readers(sizes: list[int], repetitions: int) -> dict[str, dict[int, list[float]]]:
    """Return the seconds of each reader, by the number of processes."""
    found: dict[str, dict[int, list[float]]] = {name: defaultdict(list) for name in READERS}
    for size in sizes:
        with program_of(size) as pid:
            readers = Readers(pid)
            for _ in range(repetitions):
                for name, read in READERS.items():
                    start = time.perf_counter()
                    seen = read(readers)
                    found[name][size].append(time.perf_counter() - start)
                    if seen < size:
                        raise SystemExit(f"{name}: {seen} of {size} processes")
    return found


def readers_table(found: dict[str, dict[int, list[float]]]) -> str:
    """Return the table of readers, in milliseconds."""
    sizes = list(next(iter(found.values())))
    lines = [f"| ms | {' | '.join(f'{size} processes' for size in sizes)} |", "| --- |" + " ---: |" * len(sizes)]
    for name, of in found.items():
        lines.append(f"| {name} | {' | '.join(f'{statistics.median(of[size]) * 1e3:.1f}' for size in sizes)} |")
    return "\n".join(lines)


QUERIES = {
    "floor: no table": "select 1",
    "processes by state": "select state, count(*) from processes group by 1",
    "which processes work": "select process, name, detail from activities where state = 'running'",
    "slowest endpoints": "select endpoint, count(*), max(duration_us) from messages group by 1 order by 3 desc",
    "messages of a process": "select * from messages where to_pid = (select max(pid) from processes)",
    "messages that failed": "select actor, rank, endpoint from messages where status = 'failed' limit 10",
    "times of each message's states": "select status, count(*) from message_status_events group by 1",
    "messages and their actors": (
        "select full_name, count(*) from messages join actors on actors.id = to_actor_id group by 1"
    ),
    "all events by kind": "select kind, count(*) from events group by 1",
    "a metric of all ranks": "select avg(value_f64), max(value_f64) from metric_gauges where name = 'loss'",
}
"""What is asked -> the query."""


ENGINE_QUERIES = ["floor: no table", "slowest endpoints", "messages and their actors", "all events by kind"]
"""Queries of both engines: the keys of `QUERIES`."""


def measure_engines(sizes: list[int], repetitions: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each query, by the size of the simulated program and the engine."""
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in ENGINE_QUERIES}
    for size in sizes:
        with program_of(size, SIMULATED, str(SIMULATED_EVENTS)) as pid:
            for _ in range(repetitions):
                for name in ENGINE_QUERIES:
                    for engine in ("sqlite", "duckdb"):
                        call = [sys.executable, "-m", "monarch_backend", "sql", QUERIES[name], str(pid)]
                        start = time.perf_counter()
                        subprocess.run([*call, "--engine", engine], capture_output=True, check=True, cwd=ROOT)
                        found[name][f"{size:,} simulated, {engine}"].append(time.perf_counter() - start)
    return found


def measure_queries(processes: int, simulated: int, repetitions: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each query, by the recording that is asked."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in QUERIES}
    for what, program in (
        (f"{processes} processes", program_of(processes)),
        (f"{simulated:,} simulated", program_of(simulated, SIMULATED, str(SIMULATED_EVENTS))),
    ):
        with program as pid:
            for _ in range(repetitions):
                for name, query in QUERIES.items():
                    call = [sys.executable, "-m", "monarch_backend", "sql", query, str(pid)]
                    start = time.perf_counter()
                    subprocess.run(call, capture_output=True, check=True, cwd=ROOT)
                    found[name].setdefault(what, []).append(time.perf_counter() - start)
    return found


def queries_table(found: dict[str, dict[str, list[float]]]) -> str:
    """Return the table of queries, in milliseconds."""
    columns = list(next(iter(found.values())))
    lines = [f"| ms, least (median) | {' | '.join(columns)} |", "| --- |" + " ---: |" * len(columns)]
    for name, times in found.items():
        cells = [f"{min(times[each]) * 1e3:.0f} ({statistics.median(times[each]) * 1e3:.0f})" for each in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def scheduling() -> str:
    """Return how the kernel schedules this process and those that it starts."""
    real_time = os.sched_getscheduler(0) in (os.SCHED_RR, os.SCHED_FIFO)
    return "real-time priority (chrt -r 1)" if real_time else "normal priority"


def main() -> None:
    """Run the benchmark and print the tables; with --out also write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=5, help="starts of new processes for the hot paths")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each start")
    parser.add_argument("--processes", type=int, nargs="+", default=[16, 256], help="sizes of the program to read")
    parser.add_argument("--only", nargs="+", choices=PARTS)
    parser.add_argument("--out", type=Path, help="write a page with the tables to this file")
    args = parser.parse_args()
    parts = args.only or PARTS
    others, sections = Others(), list[str]()
    if "paths" in parts:
        sections.append(f"## Hot paths\n\n{paths_table(measure_paths(args.starts, args.rounds))}")
        calls = ", ".join(f"{count} of {case}" for case, count in CALLS.items())
        sections.append(f"{args.starts} starts of {args.rounds} rounds. Calls in a round: {calls}.")
    if "settings" in parts:
        table = paths_table(measure_settings(args.starts, args.rounds))
        sections.append(f"## Hot paths, by MONARCH_TELEMETRY\n\n{table}")
        sections.append(f"{args.starts} starts of {args.rounds} rounds.")
    if "events" in parts:
        sections.append(f"## Events\n\n{events_table(measure_events())}")
    if "readers" in parts:
        sections.append(f"## Readers\n\n{readers_table(measure_readers(args.processes, 7))}")
    if "queries" in parts:
        sections.append(f"## Queries\n\n{queries_table(measure_queries(256, 4096, 3))}")
    if "engines" in parts:
        sections.append(f"## Engines of queries\n\n{queries_table(measure_engines([256, 4096], 3))}")
    load = os.getloadavg()[0]
    sections.append(f"- {machine()}; {scheduling()}; load {load:.1f}; {others.note()}")
    text = "\n\n".join(sections)
    print(text)
    if args.out:
        title = "# Measured: the recording of what runs\n\nFrom `benchmarks/telemetry.py`, which says how it measures."
        args.out.write_text(f"{title}\n\n{text}\n")


if __name__ == "__main__":
    main()
