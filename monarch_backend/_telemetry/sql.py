"""Queries in SQL over what running programs have recorded: SQLite or DuckDB, in memory, read-only and bounded."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sqlite3
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from datetime import time as time_of_day
from decimal import Decimal
from typing import Any

from monarch_backend._telemetry import duckdb_engine, program_recording, recording_history, sql_filters
from monarch_backend._telemetry.errors import QueryError
from monarch_backend._telemetry.program_recording import AskedHost, Recording, Unread
from monarch_backend._telemetry.reader import EventFilter
from monarch_backend._telemetry.sql_tables import COLUMNS, Row, Tables
from monarch_backend._telemetry.subject import Subject

TIME_LIMIT_S = 10.0
"""Seconds that a query may take."""

MAX_ROWS = 100_000
"""Rows of an answer. Further ones are left out."""

MAX_VALUE_BYTES = 256 << 10
"""Size of a text or blob that a query may make. Functions of longer ones may take longer than the time limit."""

MAX_ANSWER_BYTES = 64 << 20
"""Bytes of texts and blobs in an answer. Further rows are left out."""

_UNREAD = "not_read"  # table of a saved file: the processes that could not be read
_HOSTS = "select name, reason from hosts"  # of a saved file
_STEPS = 10_000  # of SQLite's virtual machine between two looks at the clock
_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}

Filled = dict[str, tuple[Sequence[str], Iterable[Row]]]  # table: its columns and rows
Selected = tuple[list[str], list[tuple[Any, ...]], bool]  # columns, rows, whether further rows were left out


@dataclass(frozen=True)
class ReadProcess:
    """A process that an answer is about. ``overwritten`` is the number of events that its ring no longer has.

    >>> from monarch_backend.telemetry import ReadProcess
    >>> ReadProcess(4711, "gpus 0", events=8192, overwritten=100).overwritten
    100
    """

    pid: int
    label: str
    events: int
    overwritten: int


@dataclass(frozen=True)
class QueryResult:
    """Answer to a query: names of columns, rows, and the processes that were read or could not be.

    ``unread`` has a text for each process without data, with the reason. ``is_truncated`` is true where further rows
    were left out. ``hosts`` are all that were asked, also those without an answer. Iteration yields each row as a
    dictionary.

    >>> from monarch_backend.telemetry import QueryResult
    >>> result = QueryResult(["pid"], [(4711,)], [], [], is_truncated=False)
    >>> len(result), list(result)
    (1, [{'pid': 4711}])
    """

    columns: list[str]
    rows: list[tuple[Any, ...]]
    processes: list[ReadProcess]
    unread: list[str]
    is_truncated: bool
    hosts: list[AskedHost] = field(default_factory=list)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (dict(zip(self.columns, row, strict=True)) for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def as_json(self) -> dict[str, Any]:
        """Return the answer as a value for JSON. Blobs are hexadecimal text, and infinite numbers are text.

        >>> from monarch_backend.telemetry import QueryResult
        >>> QueryResult(["pid"], [(4711,)], [], [], is_truncated=False).as_json()["rows"]
        [[4711]]
        """
        return {
            "columns": self.columns,
            "rows": [[_for_json(each) for each in row] for row in self.rows],
            "processes": [asdict(each) for each in self.processes],
            "hosts": [
                {"name": each.name, "answered": each.has_answered, "reason": each.reason or None} for each in self.hosts
            ],
            "not_read": self.unread,
            "truncated": self.is_truncated,
        }


def _for_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Decimal):
        value = float(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, date | time_of_day):
        return value.isoformat()
    if isinstance(value, list | tuple):
        return [_for_json(each) for each in value]
    if isinstance(value, dict):
        return {str(key): _for_json(each) for key, each in value.items()}
    return value if isinstance(value, str | int | None) else str(value)


def query(sql: str, program: str | int | None = None, *, engine: str = "sqlite") -> QueryResult:
    """Return the answer to a query over what running programs of this user on this machine have recorded.

    ``program`` is a pid of any process of the program, or a part of its command. The default is the program of this
    process, or all programs if this process records nothing. The query is one SELECT statement of SQLite. It takes at
    most 10 seconds, and returns at most 100,000 rows. With ``engine="duckdb"`` it is one of DuckDB.

    Raises `QueryError` for a wrong query, LookupError if there is no such program, NotImplementedError on systems
    other than Linux, and ImportError if DuckDB is not installed.

    >>> from monarch_backend.actor import this_proc
    >>> from monarch_backend.telemetry import query, span
    >>> procs = this_proc()
    >>> with span("load", shard=3):
    ...     pass
    >>> [row["fields_json"] for row in query("select fields_json from spans where name = 'load'")]
    ['{"shard":3}']
    """
    name = program_recording.of_this_process() if program is None else str(program)
    return ask(sql, lambda wanted: program_recording.read(name, wanted), engine=engine)


def ask(
    sql: str, read: Callable[[EventFilter], Recording], there: Subject | None = None, engine: str = "sqlite"
) -> QueryResult:  # fmt: skip
    """Return the answer to a query over the recording that ``read`` returns for the events that the query needs.

    Raises QueryError, ValueError for an unknown engine, and ImportError if the engine is not installed.
    """
    _check(engine)
    return answer(sql, read(sql_filters.filter_of(sql, engine=engine)), there, engine)


def answer(sql: str, recording: Recording, there: Subject | None = None, engine: str = "sqlite") -> QueryResult:
    """Return the answer to a query over this recording, which has the events of `filter_of`. Raises QueryError.

    Logs and stacks are asked of ``there``. Without it they are those of this machine's processes.
    """
    tables, wanted = Tables(recording, there), sql_filters.tables_of(sql, engine)
    filled: Filled = {
        table: (columns, tables.rows(table) if table in wanted else ()) for table, columns in COLUMNS.items()
    }
    columns, rows, is_truncated = _select(sql, filled, engine)
    processes = [
        ReadProcess(each.pid, each.label, each.recorded.kept, each.recorded.lost) for each in recording.processes
    ]
    unread = [str(each) for each in recording.unread]
    return QueryResult(columns, rows, processes, unread, is_truncated, recording.hosts)


def save(recording: Recording, path: str, there: Subject | None = None) -> None:
    """Write all tables to a new file, which only this user can read. Raises OSError, FileExistsError if it exists."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        raise FileExistsError(f"{path} exists: name a new file") from None
    try:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("begin")
            tables = Tables(recording, there)
            _fill(connection, {table: (columns, tables.rows(table)) for table, columns in COLUMNS.items()})
            connection.execute(f"create table {_UNREAD} (text)")
            connection.executemany(f"insert into {_UNREAD} values (?)", [(str(each),) for each in recording.unread])
            connection.execute("commit")
    except BaseException as error:
        os.unlink(path)
        if isinstance(error, sqlite3.Error):
            raise OSError(f"{path} cannot be written: {error}") from None
        raise


def answer_from(sql: str, path: str, engine: str = "sqlite") -> QueryResult:
    """Return the answer to a query over a file that `save` has written, or a folder of a `HistoryWriter`.

    Raises QueryError, OSError, and ImportError if the engine is not installed.
    """
    _check(engine)
    if os.path.isdir(path):
        recording = recording_history.read(path, sql_filters.filter_of(sql, wall_offset_ns=0, engine=engine))
        return answer(sql, recording, engine=engine)
    with open(path, "rb"):  # the error of sqlite does not say why
        pass
    name = urllib.parse.quote(os.path.abspath(path))
    with contextlib.closing(sqlite3.connect(f"file:{name}?mode=ro", isolation_level=None, uri=True)) as connection:
        try:
            connection.execute("pragma trusted_schema = off")
            views = connection.execute("select name from sqlite_master where type != 'table'").fetchall()
            if views:
                raise OSError(f"{path} is no file of monarch-backend export sqlite: it has {views[0][0]!r}")
            known = connection.execute("select pid, label, events, overwritten_events from processes").fetchall()
            unread = [text for (text,) in connection.execute(f"select text from {_UNREAD}")]
            hosts = [AskedHost(name, reason or "") for name, reason in connection.execute(_HOSTS)]
        except sqlite3.Error as error:
            raise OSError(f"{path} is no file of monarch-backend export sqlite: {error}") from None
        if engine == "sqlite":
            with _as_query_errors(sql):
                columns, rows, is_truncated = _select_from(connection, sql)
        else:
            wanted = sql_filters.tables_of(sql, engine)
            saved: Filled = {
                table: (names, connection.execute(f"select {', '.join(names)} from {table}") if table in wanted else ())
                for table, names in COLUMNS.items()
            }
            columns, rows, is_truncated = _select(sql, saved, engine)
    processes = [ReadProcess(*row) for row in known]
    return QueryResult(columns, rows, processes, unread, is_truncated, hosts)


def _check(engine: str) -> None:
    """Raise ValueError for an unknown engine, and ImportError, with the cure, if it is not installed."""
    if engine not in ("sqlite", "duckdb"):
        raise ValueError(f'the engine is "sqlite" or "duckdb", not {engine!r}')
    if engine == "duckdb":
        duckdb_engine.require()


def _select(sql: str, tables: Filled, engine: str) -> Selected:
    """Return the answer of an engine to a query over these tables. Raises QueryError."""
    if engine == "duckdb":
        with _as_query_errors(sql):
            return duckdb_engine.select(sql, tables, TIME_LIMIT_S, MAX_ROWS, MAX_ANSWER_BYTES)
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.execute("begin")  # else each row is a transaction
        _fill(connection, tables)
        connection.execute("commit")
        with _as_query_errors(sql):
            return _select_from(connection, sql)


@contextlib.contextmanager
def _as_query_errors(sql: str) -> Iterator[None]:
    """Raise QueryError in place of the errors of the engines."""
    try:
        yield
    except QueryError:
        raise
    except PermissionError:
        raise QueryError("a query only reads: it must be one SELECT statement") from None
    except TimeoutError:
        raise QueryError(f"the query has taken longer than {TIME_LIMIT_S:g} s: it was ended") from None
    except MemoryError:
        raise QueryError("the query takes too much memory: it was ended") from None
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        raise QueryError(_explain(error, sql)) from None


def _fill(connection: sqlite3.Connection, tables: Filled) -> None:
    """Make and fill tables."""
    for table, (columns, rows) in tables.items():
        connection.execute(f"create table {table} ({', '.join(columns)})")
        marks = ", ".join("?" * len(columns))
        connection.executemany(f"insert into {table} values ({marks})", rows)


def _add_information_schema(connection: sqlite3.Connection) -> None:
    """Make the catalog of the tables in standard SQL, which SQLite lacks and DuckDB has."""
    catalog: Filled = {
        "tables": (
            ("table_catalog", "table_schema", "table_name", "table_type"),
            [("memory", "main", table, "BASE TABLE") for table in COLUMNS],
        ),
        "columns": (
            ("table_catalog", "table_schema", "table_name", "column_name", "ordinal_position", "data_type"),
            [
                ("memory", "main", table, column, place, duckdb_engine.column_type(table, column))
                for table, columns in COLUMNS.items()
                for place, column in enumerate(columns, 1)
            ],
        ),
    }
    connection.execute("attach ':memory:' as information_schema")
    _fill(connection, {f"information_schema.{table}": rows for table, rows in catalog.items()})


def _select_from(connection: sqlite3.Connection, sql: str) -> Selected:
    refused: list[str] = []

    def authorize(action: int, *names: str | None) -> int:
        if action in _ALLOWED and "load_extension" not in names:
            return sqlite3.SQLITE_OK
        refused.append("")
        return sqlite3.SQLITE_DENY

    _add_information_schema(connection)
    deadline = time.monotonic() + TIME_LIMIT_S
    if sys.version_info >= (3, 11):
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    connection.set_authorizer(authorize)
    connection.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS)
    try:
        cursor = connection.execute(sql)
        if cursor.description is None:
            raise QueryError("the query is empty: it must be one SELECT statement")
        columns = [each[0] for each in cursor.description]
        rows: list[tuple[Any, ...]] = []
        size = 0
        for row in cursor:
            size += sum(len(value) for value in row if isinstance(value, str | bytes))
            if len(rows) == MAX_ROWS or size > MAX_ANSWER_BYTES:
                return columns, rows, True
            rows.append(row)
        return columns, rows, False
    except (sqlite3.Error, sqlite3.Warning):
        if refused:
            raise PermissionError from None
        if time.monotonic() > deadline:
            raise TimeoutError from None
        raise


def _explain(error: Exception, sql: str) -> str:
    """Return the error in one line, with the columns of the query's tables, or with the tables if it names none."""
    text = " ".join(str(error).split()) or type(error).__name__
    words = set(re.findall(r"\w+", sql.lower()))
    known = [f"{table} has the columns {', '.join(columns)}" for table, columns in COLUMNS.items() if table in words]
    if "no such table" in text or "Table with name" in text or not known:
        known = [f"the tables are {', '.join(COLUMNS)}"]
    return f"{text.rstrip('.')}; {'; '.join(known)}"


__all__ = [
    "AskedHost",
    "QueryError",
    "QueryResult",
    "ReadProcess",
    "Unread",
    "answer",
    "answer_from",
    "ask",
    "query",
    "save",
]
