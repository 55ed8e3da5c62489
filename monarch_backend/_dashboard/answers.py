"""Types of the answers of the HTTP API. The OpenAPI description has their schemas."""

from __future__ import annotations

from typing import Any

import msgspec


class Error(msgspec.Struct):
    """A request has failed: what, and what to do."""

    error: str
    hint: str


class ProgramSummary(msgspec.Struct):
    """A running program, on a host of a job, or on this machine for ""."""

    pid: int
    host: str
    command: str
    processes: int
    running: int
    failed: int
    age_s: float


class Programs(msgspec.Struct):
    """Running programs, of this user on this machine or of a job."""

    unix_s: float
    programs: list[ProgramSummary]


class Rank(msgspec.Struct):
    """A process: its state, and the activity that lasts longest.

    ``state`` is ended, failed, stopped, breakpoint, constructing, collective, waiting, running or idle.
    """

    pid: int
    parent: int
    label: str
    mesh: str
    state: str
    doing: str
    since_s: float
    queue: int
    done: int
    memory_bytes: int | None
    cpu_s: float | None
    exit_code: int | None


class ProgramTree(msgspec.Struct):
    """A program with its processes. Its own comes first."""

    pid: int
    command: str
    ranks: list[Rank]
    host: str = ""


class Tree(msgspec.Struct):
    """Programs with their processes."""

    unix_s: float
    programs: list[ProgramTree]
    not_read: list[str] = []


class ProcessRates(msgspec.Struct):
    """Rates of a process. ``cpu`` is in processors."""

    pid: int
    host: str
    messages_per_s: float
    bytes_per_s: float
    cpu: float
    queue: int


class RatesAnswer(msgspec.Struct):
    """Rates of processes since the last look. A process has rates from the second look on."""

    unix_s: float
    rates: list[ProcessRates]


class ActivityAnswer(msgspec.Struct):
    """What a part of a process does now."""

    kind: str
    name: str
    rank: int
    state: str
    detail: str
    seconds: float
    ended: int
    queue: int


class ProcessAnswer(msgspec.Struct):
    """A process with all of its activities."""

    rank: Rank
    activities: list[ActivityAnswer]


class Cause(msgspec.Struct):
    """A link of a chain of failures: what failed, and in which process."""

    what: str
    process: str
    pid: int


class Failure(msgspec.Struct):
    """A failure. ``chain`` begins with it, and ends with the root cause. ``log`` has the last lines of its process."""

    unix_s: float | None
    kind: str
    what: str
    process: str
    pid: int
    chain: list[Cause]
    log: list[str]
    host: str = ""


class Failures(msgspec.Struct):
    """Failures, the latest first. ``left_out`` counts earlier ones. ``not_read`` has processes without data."""

    failures: list[Failure]
    left_out: int
    not_read: list[str]


class StackGroup(msgspec.Struct):
    """Processes with equal stacks."""

    labels: str
    pids: list[int]
    text: str


class ProgramStacks(msgspec.Struct):
    """Folded stacks of a program."""

    pid: int
    command: str
    groups: list[StackGroup]
    host: str = ""


class StacksAnswer(msgspec.Struct):
    """Folded stacks of programs. ``left_out`` counts processes that were not asked."""

    programs: list[ProgramStacks]
    left_out: int


class LogLineAnswer(msgspec.Struct):
    """A line of output."""

    unix_s: float
    process: str
    pid: int
    stream: str
    text: str
    host: str = ""


class Logs(msgspec.Struct):
    """The last lines that match, oldest first. ``left_out`` counts earlier ones.

    ``kept`` is false if no program keeps its output.
    """

    lines: list[LogLineAnswer]
    left_out: int
    kept: bool
    not_read: list[str] = []


class HostOfAnswer(msgspec.Struct):
    """A host that was asked. ``reason`` is null if it has answered."""

    name: str
    answered: bool
    reason: str | None


class SqlAnswer(msgspec.Struct):
    """Answer to a query, with all hosts that were asked.

    ``events_per_process`` is the number of last events that were read of each process.
    """

    columns: list[str]
    rows: list[list[Any]]
    truncated: bool
    not_read: list[str]
    overwritten: int
    events_per_process: int
    hosts: list[HostOfAnswer]


class CollectiveInFlight(msgspec.Struct):
    """A collective that some ranks have entered. ``missing`` are the ranks of its group that have not."""

    group: str
    operation: str
    number: int
    bytes: int
    seconds: float
    entered: str
    entered_count: int
    missing: str
    missing_count: int


class Collectives(msgspec.Struct):
    """Collectives in flight, the longest first."""

    in_flight: list[CollectiveInFlight]
    left_out: int


class Series(msgspec.Struct):
    """A curve: times in seconds since 1970, and values. Null is a value that is not a number.

    ``low`` and ``high`` are the range over processes, where the values are means.
    """

    name: str
    instrument: str
    attributes: str
    process: str
    unix_s: list[float]
    values: list[float | None]
    low: list[float | None]
    high: list[float | None]


class Metrics(msgspec.Struct):
    """Curves of the metrics that programs record. ``left_out`` counts curves beyond the limit."""

    series: list[Series]
    left_out: int
    not_read: list[str]


class Timeline(msgspec.Struct):
    """A bounded part of the trace, in the Trace Event Format. ``left_out`` counts events beyond the limit."""

    trace: dict[str, Any]
    left_out: int
    seconds: float
