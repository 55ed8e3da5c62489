"""The HTTP API: one table of routes, with the function, the parameters and the answer of each.

The server, the checks of parameters and the OpenAPI description are made from this table.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from textwrap import dedent
from typing import Annotated, Any

import msgspec

from monarch_backend import _native
from monarch_backend._core.parallel import in_parallel
from monarch_backend._dashboard import curves, failures, states
from monarch_backend._dashboard.answers import (
    ActivityAnswer,
    Collectives,
    Failures,
    HostOfAnswer,
    LogLineAnswer,
    Logs,
    Metrics,
    ProcessAnswer,
    ProcessRates,
    Programs,
    ProgramStacks,
    ProgramSummary,
    RatesAnswer,
    SqlAnswer,
    StackGroup,
    StacksAnswer,
    Timeline,
    Tree,
)
from monarch_backend._dashboard.source import Source
from monarch_backend._telemetry import folded_stacks, sql, sql_filters, trace_export
from monarch_backend._telemetry.labels import fold_labels, is_named
from monarch_backend._telemetry.program_output import LineFilter, Lines
from monarch_backend._telemetry.programs import Process, Program
from monarch_backend._telemetry.reader import EventFilter

PREFIX = "/api/v1"
MAX_STACKS = 1024
STACKS_TIME_LIMIT_S = 10.0
MAX_WITH_PY_SPY = 8
"""Processes up to which those that do not answer are read with py-spy, which may take 20 s for each."""

MAX_AT_ONCE = 8
"""Programs, on different hosts, that one request reads at the same time."""

_MAX_PID = 1 << 31

Pid = Annotated[int, msgspec.Meta(ge=1, lt=_MAX_PID, description="pid of a process of the program; default all")]
Host = Annotated[str, msgspec.Meta(max_length=300, description="host of that process; default this machine")]
Label = Annotated[str, msgspec.Meta(max_length=200, description='label of a process, such as "gpus 3", or its pid')]


class NoParameters(msgspec.Struct, forbid_unknown_fields=True):
    """No parameters."""


class OfProgram(msgspec.Struct, forbid_unknown_fields=True):
    """Parameters of routes about programs."""

    program: Pid | msgspec.UnsetType = msgspec.UNSET
    host: Host = ""


class OfProcess(msgspec.Struct, forbid_unknown_fields=True):
    """Parameters of a route about one process."""

    pid: Annotated[int, msgspec.Meta(ge=1, lt=_MAX_PID, description="pid of the process")]
    host: Host = ""


class StacksOf(msgspec.Struct, forbid_unknown_fields=True):
    """Parameters of stacks."""

    program: Pid | msgspec.UnsetType = msgspec.UNSET
    host: Host = ""
    rank: Label = ""
    all_threads: Annotated[bool, msgspec.Meta(description="also threads and calls of the runtime")] = False


class LogsOf(msgspec.Struct, forbid_unknown_fields=True):
    """Parameters of logs."""

    program: Pid | msgspec.UnsetType = msgspec.UNSET
    host: Host = ""
    rank: Label = ""
    search: Annotated[str, msgspec.Meta(max_length=200, description="text in the line; case is ignored")] = ""
    since_s: Annotated[float, msgspec.Meta(gt=0, le=1e9, description="only lines of the last seconds")] = 1e9
    limit: Annotated[int, msgspec.Meta(ge=1, le=5000, description="last lines that are returned")] = 500


class MetricsOf(msgspec.Struct, forbid_unknown_fields=True):
    """Parameters of metrics."""

    program: Pid | msgspec.UnsetType = msgspec.UNSET
    host: Host = ""
    name: Annotated[str, msgspec.Meta(max_length=200, description="name of the metric; default all")] = ""
    points: Annotated[int, msgspec.Meta(ge=10, le=2000, description="most points of a curve")] = 300


class TimelineOf(msgspec.Struct, forbid_unknown_fields=True):
    """Parameters of the timeline."""

    program: Pid | msgspec.UnsetType = msgspec.UNSET
    host: Host = ""
    seconds: Annotated[float, msgspec.Meta(gt=0, le=3600, description="length of the window that ends now")] = 10.0
    limit: Annotated[int, msgspec.Meta(ge=100, le=100_000, description="most events, of all processes")] = 10_000


class Query(msgspec.Struct, forbid_unknown_fields=True):
    """A query: one SELECT statement of SQLite, as `monarch-backend sql` takes it."""

    query: Annotated[str, msgspec.Meta(min_length=1, max_length=20_000)]
    program: Pid | msgspec.UnsetType = msgspec.UNSET
    host: Host = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000, description="most rows of the answer")] = 1000


@dataclass(frozen=True)
class Route:
    """A route: its answer is what ``call`` returns for the source and the parameters.

    Parameters of GET are in the query string, those of POST are a JSON object.
    """

    method: str
    path: str
    parameters: type[msgspec.Struct]
    answer: type[msgspec.Struct]
    call: Callable[[Source, Any], msgspec.Struct]


def programs(source: Source, _: NoParameters) -> Programs:
    """Return the running programs, of this user on this machine or of a job."""
    found, _rates, unix_s = source.look()
    return Programs(
        unix_s,
        [
            ProgramSummary(
                pid=each.pid,
                host=each.host,
                command=each.command,
                processes=len(each.processes),
                running=sum(process.exit_code is None for process in each.processes),
                failed=sum(bool(process.exit_code) for process in each.processes),
                age_s=max(process.age for process in each.processes),
            )
            for each in found
        ],
    )


def tree(source: Source, of: OfProgram) -> Tree:
    """Return the processes of programs, with the state of each: what it does, since when, its queue and memory."""
    found = source.programs(of.program or None, of.host)
    return Tree(source.look()[2], [states.tree(each) for each in found], source.not_read())


def process(source: Source, of: OfProcess) -> ProcessAnswer:
    """Return one process with all of its activities."""
    for program in source.programs(of.pid, of.host):
        for each in program.processes:
            if each.pid == of.pid:
                return ProcessAnswer(states.rank(each), msgspec.convert(each.activities, list[ActivityAnswer]))
    raise LookupError(f"the process {of.pid} has ended, and its recording was reused")


def rates(source: Source, of: OfProgram) -> RatesAnswer:
    """Return messages, bytes and processor time of each process per second, and the lengths of queues."""
    found = source.programs(of.program or None, of.host)
    _, by_key, unix_s = source.look()
    return RatesAnswer(
        unix_s,
        [
            ProcessRates(
                pid=each.pid,
                host=program.host,
                messages_per_s=by_key[program.host, each.pid].messages_per_second,
                bytes_per_s=by_key[program.host, each.pid].bytes_per_second,
                cpu=by_key[program.host, each.pid].cpu,
                queue=sum(int(activity["queue"]) for activity in each.activities),
            )
            for program in found
            for each in program.processes
            if (program.host, each.pid) in by_key
        ],
    )


def failures_of(source: Source, of: OfProgram) -> Failures:
    """Return ended processes, failed actors, messages and collectives, each with its chain of causes and last lines."""
    recording, _ = source.recording(of.program or None, of.host, failures.WANTED)
    return failures.find(recording, source.there)


def stacks(source: Source, of: StacksOf) -> StacksAnswer:
    """Return the Python stacks of running processes, equal ones once. It asks each process by a signal."""
    asked: list[tuple[Program, list[Process]]] = []
    left_out, budget = 0, MAX_STACKS
    for program in source.programs(of.program or None, of.host):
        running = [
            each
            for each in program.processes
            if each.exit_code is None and (not of.rank or is_named(each.label, of.rank, each.pid))
        ]
        if running[:budget]:
            asked.append((program, running[:budget]))
        left_out += max(0, len(running) - budget)
        budget = max(0, budget - len(running))
    if of.rank and not asked:
        raise LookupError(f"no running process is {of.rank!r}")
    end = time.monotonic() + STACKS_TIME_LIMIT_S

    def read(program: Program, processes: list[Process]) -> ProgramStacks:
        stacks = source.there.stacks(
            program.host,
            [each.pid for each in processes],
            with_py_spy=len(processes) <= MAX_WITH_PY_SPY,
            time_limit=max(0.0, end - time.monotonic()),
        )
        folded = folded_stacks.fold(list(zip(processes, stacks, strict=True)), all_threads=of.all_threads)
        groups = [
            StackGroup(fold_labels([each.label for each in members]), [each.pid for each in members], dedent(text))
            for text, members in folded.items()
        ]
        return ProgramStacks(program.pid, program.command, groups, program.host)

    return StacksAnswer(in_parallel(lambda each: read(*each), asked, MAX_AT_ONCE), left_out)


def logs(source: Source, of: LogsOf) -> Logs:
    """Return the last lines of output that match, also of processes that have ended."""
    pattern = f"(?i){re.escape(of.search)}" if of.search else ""
    wanted = LineFilter((of.rank,) if of.rank else (), pattern, of.since_s, of.limit)
    programs, problems = source.programs(of.program or None, of.host), list[str]()

    def read(program: Program) -> Lines:
        try:
            return source.there.lines(program, wanted)
        except LookupError as error:
            problems.append(str(error))
            return Lines([], 0, [], is_kept=False)

    read_of = in_parallel(read, programs, MAX_AT_ONCE)
    found = [(line, program.host) for program, each in zip(programs, read_of, strict=True) for line in each.lines]
    found.sort(key=lambda each: each[0].time)
    shown = found[-of.limit :]
    return Logs(
        lines=[LogLineAnswer(each.time, each.label, each.pid, each.stream, each.text, host) for each, host in shown],
        left_out=len(found) - len(shown) + sum(each.left_out for each in read_of),
        kept=any(each.is_kept for each in read_of),
        not_read=[*source.not_read(), *problems],
    )


def sql_query(source: Source, of: Query) -> SqlAnswer:
    """Return the answer to a SELECT statement over what programs have recorded. It takes at most 10 s."""
    recording, limit = source.recording(of.program or None, of.host, sql_filters.filter_of(of.query))
    result = sql.answer(of.query, recording, source.there)
    answer = result.as_json()
    return SqlAnswer(
        columns=result.columns,
        rows=answer["rows"][: of.limit],
        truncated=result.is_truncated or len(result.rows) > of.limit,
        not_read=result.unread,
        overwritten=sum(each.overwritten for each in result.processes),
        events_per_process=limit,
        hosts=[HostOfAnswer(**each) for each in answer["hosts"]],
    )


def collectives(source: Source, of: OfProgram) -> Collectives:
    """Return the collectives in flight, with the ranks that are in and those that are missing."""
    recording, _ = source.recording(of.program or None, of.host, None)
    return states.in_flight(recording)


def metrics(source: Source, of: MetricsOf) -> Metrics:
    """Return curves of the metrics that programs record, such as a loss."""
    recording, _ = source.recording(of.program or None, of.host, curves.WANTED, max_events=100_000)
    return curves.curves(recording, of.name, of.points)


def timeline(source: Source, of: TimelineOf) -> Timeline:
    """Return the last seconds of the trace, in the Trace Event Format. Times are microseconds since its first slice."""
    since = max(1, _native.monotonic_ns() - int(of.seconds * 1e9))
    recording, limit = source.recording(of.program or None, of.host, EventFilter(since_ns=since), max_events=of.limit)
    cut = sum(len(each.recorded.events) >= limit for each in recording.processes)
    return Timeline(trace_export.as_trace(recording), cut, of.seconds)


ROUTES = [
    Route("GET", "/programs", NoParameters, Programs, programs),
    Route("GET", "/tree", OfProgram, Tree, tree),
    Route("GET", "/process", OfProcess, ProcessAnswer, process),
    Route("GET", "/rates", OfProgram, RatesAnswer, rates),
    Route("GET", "/failures", OfProgram, Failures, failures_of),
    Route("GET", "/stacks", StacksOf, StacksAnswer, stacks),
    Route("GET", "/logs", LogsOf, Logs, logs),
    Route("POST", "/sql", Query, SqlAnswer, sql_query),
    Route("GET", "/collectives", OfProgram, Collectives, collectives),
    Route("GET", "/metrics", MetricsOf, Metrics, metrics),
    Route("GET", "/timeline", TimelineOf, Timeline, timeline),
]
"""All routes of the API."""
