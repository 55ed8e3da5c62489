"""The events that a query needs: those that are not needed are not read, nor sent by other hosts.

The filter is a superset, because the engine applies the query's own conditions to the rows. What is not understood has
no effect. Kinds follow from the tables that a query names. Pids and times are those of a query with one SELECT of one
table, whose WHERE is a chain of AND, in comparisons of a column with a constant.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from monarch_backend._telemetry import duckdb_engine, stragglers
from monarch_backend._telemetry.kinds import Kind
from monarch_backend._telemetry.reader import NO_KINDS, EventFilter
from monarch_backend._telemetry.sql_tables import COLUMNS

ACTORS = frozenset({Kind.MESSAGE, Kind.QUEUE, Kind.ACTOR})
"""Kinds that tell the actors of a process, which messages they handle, and which thread is whose."""

_ALL = frozenset(Kind)

KINDS: dict[str, frozenset[Kind]] = {
    "actors": ACTORS | {Kind.MESH},
    "actor_status_events": ACTORS,
    "meshes": ACTORS | {Kind.MESH},
    "messages": ACTORS | {Kind.SENT, Kind.FAILURE},
    "message_status_events": ACTORS | {Kind.SENT},
    "sent_messages": ACTORS | {Kind.SENT, Kind.MESH},
    "spans": ACTORS | {Kind.SPAN},
    "span_events": frozenset({Kind.SPAN}),
    "events": _ALL,
    "metric_gauges": frozenset({Kind.METRIC}),
    "metric_sums": frozenset({Kind.METRIC}),
    "metric_histograms": frozenset({Kind.METRIC}),
    "hosts": frozenset(),
    "processes": frozenset(),
    "activities": frozenset(),
    "collectives": frozenset({Kind.COLLECTIVE}),
    "steps": frozenset({Kind.STEP}),
    "step_times": frozenset(stragglers.KINDS),
    "transfers": frozenset({Kind.TRANSFER}),
    "connections": frozenset({Kind.CONNECTION}),
    "batches": frozenset({Kind.CONTROLLER}),
    "recompilations": frozenset({Kind.CONTROLLER}),
    "logs": frozenset(),
    "stacks": frozenset(),
}
"""Kinds of the events that a table is made of."""

MARGIN_US = 60_000_000
"""By how much earlier events are read than a condition says: the query runs later, and clocks are adjusted."""


_READS = sqlite3.SQLITE_SELECT, sqlite3.SQLITE_FUNCTION


@dataclass(frozen=True)
class _Rows:
    """How rows of a table follow from events: one of ``kind`` each, or of any kind, with those of the kinds ``also``.

    ``needs`` has columns that also need all events of some kinds. ``of_others`` need events of other processes,
    ``of_earlier`` earlier ones of the same process.
    """

    kind: Kind | None
    pid: str = "pid"
    needs: Mapping[str, frozenset[Kind]] = field(default_factory=dict)
    of_others: frozenset[str] = frozenset()
    of_earlier: frozenset[str] = frozenset()
    also: frozenset[Kind] = frozenset()


_ROWS = {
    "messages": _Rows(
        Kind.MESSAGE,
        "to_pid",
        of_others=frozenset({"from_actor_id", "queued_us"}),
        also=frozenset({Kind.QUEUE, Kind.FAILURE}),
    ),
    "sent_messages": _Rows(Kind.SENT, needs={
        "sender_actor_id": ACTORS, "actor_mesh_id": ACTORS | {Kind.MESH}, "handled": ACTORS,
    }),
    "spans": _Rows(
        Kind.SPAN, needs={"thread_name": ACTORS, "actor_id": ACTORS}, of_earlier=frozenset({"parent_id"})
    ),
    "events": _Rows(None, needs={"thread_name": ACTORS, "parent_span": frozenset({Kind.SPAN})}),
    "metric_gauges": _Rows(Kind.METRIC),
    "metric_sums": _Rows(Kind.METRIC),
    "metric_histograms": _Rows(Kind.METRIC),
    "collectives": _Rows(Kind.COLLECTIVE),
    "steps": _Rows(Kind.STEP),
    "transfers": _Rows(Kind.TRANSFER),
    "connections": _Rows(Kind.CONNECTION),
    "batches": _Rows(Kind.CONTROLLER),
    "recompilations": _Rows(Kind.CONTROLLER),
}  # fmt: skip
# Words that a query of one table lacks.
_ONE_TABLE = {"union", "intersect", "except", "join", "over", "window", "values"}
_QUOTES = set('"`[')  # of names, and of texts that look like names
_END_OF_WHERE = {"group", "order", "limit", "having"}
_FUNCTIONS = {
    "sqlite": {"unixepoch", "strftime", "julianday", "cast", "as", "integer", "real"},
    "duckdb": {"epoch_us", "now"},
}
_TABLES_IN_TEXT = {"query", "query_table", "json_execute_serialized_sql"}  # functions of DuckDB
_OTHER_IN_DUCKDB = re.compile(r"/\*|[\\$\r{#]")  # nested comments, other quotes, structures, numbers of columns
_TOKEN = re.compile(r"\s+|--[^\n]*|/\*.*?(?:\*/|$)|('(?:[^']|'')*'|[\w.]+|<=|>=|==|!=|<>|\|\||.)", re.DOTALL | re.ASCII)
_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "=": "=", "==": "="}


@dataclass(frozen=True)
class WantedEvents:
    """What a query needs. ``since_us`` is in microseconds since 1970, 0 for all times. ``pids`` is None for all.

    Pids and times are conditions on the events of all kinds but ``always``.
    """

    kinds: frozenset[Kind]
    since_us: int = 0
    pids: frozenset[int] | None = None
    always: frozenset[Kind] = frozenset()


def tables_of(sql: str, engine: str = "sqlite") -> list[str]:
    """Return the tables that a query may read: those whose names are words of it."""
    words = set(re.findall(r"\w+", sql.lower()))
    is_dynamic = engine == "duckdb" and words & _TABLES_IN_TEXT
    return [table for table in COLUMNS if is_dynamic or table in words]


def wanted_by(sql: str, engine: str = "sqlite") -> WantedEvents:
    """Return the events that a query needs.

    >>> wanted_by("select avg(value_f64) from metric_gauges where pid = 4711 and timestamp_us > 2e15").pids
    frozenset({4711})
    >>> sorted(kind.title for kind in wanted_by("select * from steps join metric_sums using (pid)").kinds)
    ['metric', 'step']
    """
    words = set(re.findall(r"\w+", sql.lower()))
    tables = tables_of(sql, engine)
    everything = WantedEvents(frozenset[Kind]().union(*(KINDS[table] for table in tables)))
    if len(tables) != 1 or tables[0] not in _ROWS or words & _ONE_TABLE or set(sql) & _QUOTES:
        return everything
    if engine == "duckdb" and _OTHER_IN_DUCKDB.search(sql):
        return everything
    table = tables[0]
    tokens = [found[1] for found in _TOKEN.finditer(sql) if found[1]]
    if any(not token.isascii() for token in tokens if not token.startswith("'")):
        return everything  # in names, SQLite takes also what are spaces elsewhere
    if tokens[-1:] == [";"]:
        tokens.pop()
    where = _where(tokens, table)
    columns = _columns_read(sql) if engine == "sqlite" else _columns_named(tokens, table)
    if where is None or columns is None:
        return everything
    return _narrowed(everything, table, columns, list(_conditions(where)), engine)


def filter_of(sql: str, wall_offset_ns: int | None = None, engine: str = "sqlite") -> EventFilter:
    """Return the filter with which a reader gets the events that a query needs.

    ``wall_offset_ns`` is added to times of events to get those since 1970. The default is that of this machine.
    """
    wanted = wanted_by(sql, engine)
    if wall_offset_ns is None:
        wall_offset_ns = time.time_ns() - time.monotonic_ns()
    return EventFilter(
        kinds=() if wanted.kinds >= _ALL else tuple(sorted(wanted.kinds)) or NO_KINDS,
        since_ns=max(0, wanted.since_us * 1000 - wall_offset_ns) if wanted.since_us else 0,
        pids=wanted.pids,
        always=tuple(sorted(wanted.always)),
    )


def _narrowed(
    everything: WantedEvents,
    table: str,
    columns: set[str],
    conditions: Sequence[tuple[str, str, list[str]]],
    engine: str,
) -> WantedEvents:
    rows = _ROWS[table]
    if columns & rows.of_others:
        return everything
    always = frozenset[Kind]().union(*(kinds for column, kinds in rows.needs.items() if column in columns))
    kinds = everything.kinds if rows.kind is None else frozenset({rows.kind}) | rows.also
    since, pids = 0, everything.pids
    for name, operator, constant in conditions:
        column = name.removeprefix(f"{table}.")
        if column == rows.pid and operator == "=" and isinstance(value := _value(constant, engine), int):
            pids = frozenset({value}) if pids is None else pids & {value}
        elif column == "timestamp_us" and operator in ("=", ">", ">=") and not columns & rows.of_earlier:
            value = _value(constant, engine)
            if isinstance(value, int | float) and MARGIN_US < value < 1 << 62:
                since = max(since, int(value) - MARGIN_US)
        elif column == "kind" and table == "events" and operator == "=":
            value = _value(constant, engine)
            named = frozenset(kind for kind in Kind if kind.title == value)  # none if it is of a later release
            kinds = kinds & named or kinds
    return WantedEvents(kinds | always, since, pids, always)


def _columns_read(sql: str) -> set[str] | None:
    """Return the columns that SQLite reads for a query, None for a wrong query."""
    columns = set[str]()

    def authorize(action: int, _table: str | None, column: str | None, *_: str | None) -> int:
        if action == sqlite3.SQLITE_READ and column:
            columns.add(column.lower())
        return sqlite3.SQLITE_OK if action in (*_READS, sqlite3.SQLITE_READ) else sqlite3.SQLITE_DENY

    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        for table, names in COLUMNS.items():
            connection.execute(f"create table {table} ({', '.join(names)})")
        connection.set_authorizer(authorize)
        try:
            connection.execute(f"explain {sql}")
        except (sqlite3.Error, sqlite3.Warning, ValueError):
            return None
    return columns


def _columns_named(tokens: Sequence[str], table: str) -> set[str] | None:
    """Return the columns that DuckDB may read for a query of one table, None if another part may read the table too."""
    lower = [token.lower() for token in tokens]
    if [name.rpartition(".")[2] for name in lower].count(table) != 1:
        return None
    words = {word for token in lower for word in re.findall(r"\w+", token)}
    columns = set(COLUMNS[table])
    stars = [lower[max(0, i - 2) : i + 2] for i, token in enumerate(lower) if token == "*"]
    are_columns = [around[:2] != ["count", "("] and not _is_product(around) for around in stars]
    return columns if "columns" in words or any(are_columns) else columns & words


def _is_product(around: Sequence[str]) -> bool:
    return bool(re.match(r"[\d)]", around[-3]) and re.match(r"[\d(]", around[-1])) if len(around) == 4 else False


def _where(tokens: Sequence[str], table: str) -> list[str] | None:
    """Return the tokens of the condition of ``SELECT ... FROM table WHERE condition``, None for any other query."""
    lower = [token.lower() for token in tokens]
    if lower.count("select") != 1 or lower[0] != "select" or lower.count("from") != 1 or lower.count("where") > 1:
        return None
    rest = lower[lower.index("from") + 1 :]
    if not rest or rest[0] != table:
        return None
    if len(rest) == 1 or rest[1] in _END_OF_WHERE:
        return []
    if rest[1] != "where":
        return None
    found = list(tokens[lower.index("where") + 1 :])
    end = next(
        (i for i, token, depth in _with_depth(found) if not depth and token.lower() in _END_OF_WHERE), len(found)
    )
    return found[:end]


def _with_depth(tokens: Iterable[str]) -> Iterator[tuple[int, str, int]]:
    """Yield the number, the token and the depth of parentheses around it."""
    depth = 0
    for i, token in enumerate(tokens):
        depth -= token == ")"
        yield i, token, depth
        depth += token == "("


def _conditions(tokens: list[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield those conditions of a chain of AND that compare a column with a constant: column, operator, constant."""
    parts: list[list[str]] = [[]]
    for _, token, depth in _with_depth(tokens):
        word = token.lower()
        if not depth and word in ("or", "between", "case"):  # their AND is another one, or has another meaning
            return
        if not depth and word == "and":
            parts.append([])
        else:
            parts[-1].append(token)
    for part in parts:
        places = [i for i, token, depth in _with_depth(part) if not depth and token in _FLIPPED]
        if len(places) != 1:
            continue
        left, operator, right = part[: places[0]], part[places[0]], part[places[0] + 1 :]
        if len(left) == 1:
            yield left[0].lower(), operator.replace("==", "="), right
        if len(right) == 1:
            yield right[0].lower(), _FLIPPED[operator].replace("==", "="), left


def _value(tokens: list[str], engine: str) -> object:
    """Return the value of a constant expression: numbers, texts, arithmetic, and the present time. None for others."""
    known = _FUNCTIONS[engine]
    for token in tokens:
        if not re.fullmatch(r"\d[\w.]*|'.*'|[-+*/(),]|\|\|", token, re.DOTALL) and token.lower() not in known:
            return None
    if engine == "duckdb":
        return duckdb_engine.constant(" ".join(tokens))
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        try:
            return connection.execute(f"select {' '.join(tokens)}").fetchone()[0]
        except (sqlite3.Error, sqlite3.Warning, ValueError):
            return None
