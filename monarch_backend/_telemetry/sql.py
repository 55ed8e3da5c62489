"""Queries in SQL over what running programs have recorded: SQLite, in memory, read-only and bounded."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sqlite3
import sys
import time
import urllib.parse
from collections.abc import Container, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from monarch_backend._telemetry import program_recording, recording_history, sql_filters
from monarch_backend._telemetry.errors import QueryError
from monarch_backend._telemetry.program_recording import Recording, Unread
from monarch_backend._telemetry.sql_tables import COLUMNS, Tables
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
_STEPS = 10_000  # of SQLite's virtual machine between two looks at the clock
_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}


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
    were left out. Iteration yields each row as a dictionary.

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
            "not_read": self.unread,
            "truncated": self.is_truncated,
        }


def _for_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def query(sql: str, program: str | int | None = None) -> QueryResult:
    """Return the answer to a query over what running programs of this user on this machine have recorded.

    ``program`` is a pid of any process of the program, or a part of its command. The default is the program of this
    process, or all programs if this process records nothing. The query is one SELECT statement of SQLite. It takes at
    most 10 seconds, and returns at most 100,000 rows.

    Raises `QueryError` for a wrong query, LookupError if there is no such program, and NotImplementedError on systems
    other than Linux.

    >>> from monarch_backend.actor import this_proc
    >>> from monarch_backend.telemetry import query, span
    >>> procs = this_proc()
    >>> with span("load", shard=3):
    ...     pass
    >>> [row["attributes"] for row in query("select attributes from spans where name = 'load'")]
    ['{"shard":3}']
    """
    name = program_recording.of_this_process() if program is None else str(program)
    return answer(sql, program_recording.read(name, sql_filters.filter_of(sql)))


def answer(sql: str, recording: Recording, there: Subject | None = None) -> QueryResult:
    """Return the answer to a query over this recording, which has the events of `filter_of`. Raises QueryError.

    Logs and stacks are asked of ``there``. Without it they are those of this machine's processes.
    """
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.execute("begin")  # else each row is a transaction
        _fill(connection, set(re.findall(r"\w+", sql.lower())), recording, there)
        connection.execute("commit")
        columns, rows, is_truncated = _select(connection, sql)
    processes = [
        ReadProcess(each.pid, each.label, each.recorded.kept, each.recorded.lost) for each in recording.processes
    ]
    unread = [str(each) for each in recording.unread]
    return QueryResult(columns, rows, processes, unread, is_truncated)


def save(recording: Recording, path: str, there: Subject | None = None) -> None:
    """Write all tables to a new file, which only this user can read. Raises OSError, FileExistsError if it exists."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        raise FileExistsError(f"{path} exists: name a new file") from None
    try:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("begin")
            _fill(connection, COLUMNS, recording, there)
            connection.execute(f"create table {_UNREAD} (text)")
            connection.executemany(f"insert into {_UNREAD} values (?)", [(str(each),) for each in recording.unread])
            connection.execute("commit")
    except BaseException as error:
        os.unlink(path)
        if isinstance(error, sqlite3.Error):
            raise OSError(f"{path} cannot be written: {error}") from None
        raise


def answer_from(sql: str, path: str) -> QueryResult:
    """Return the answer to a query over a file that `save` has written, or a folder of a `HistoryWriter`.

    Raises QueryError and OSError.
    """
    if os.path.isdir(path):
        return answer(sql, recording_history.read(path, sql_filters.filter_of(sql, wall_offset_ns=0)))
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
        except sqlite3.Error as error:
            raise OSError(f"{path} is no file of monarch-backend export sqlite: {error}") from None
        columns, rows, is_truncated = _select(connection, sql)
    processes = [ReadProcess(*row) for row in known]
    return QueryResult(columns, rows, processes, unread, is_truncated)


def _fill(
    connection: sqlite3.Connection, wanted: Container[str], recording: Recording, there: Subject | None
) -> None:  # fmt: skip
    """Make all tables, and fill those that are wanted."""
    tables = Tables(recording, there)
    for table, columns in COLUMNS.items():
        connection.execute(f"create table {table} ({', '.join(columns)})")
        if table in wanted:
            marks = ", ".join("?" * len(columns))
            connection.executemany(f"insert into {table} values ({marks})", tables.rows(table))


def _select(connection: sqlite3.Connection, sql: str) -> tuple[list[str], list[tuple[Any, ...]], bool]:
    refused: list[str] = []

    def authorize(action: int, *names: str | None) -> int:
        if action in _ALLOWED and "load_extension" not in names:
            return sqlite3.SQLITE_OK
        refused.append("")
        return sqlite3.SQLITE_DENY

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
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
        if isinstance(error, QueryError):
            raise
        if refused:
            raise QueryError("a query only reads: it must be one SELECT statement") from None
        if time.monotonic() > deadline:
            raise QueryError(f"the query has taken longer than {TIME_LIMIT_S:g} s: it was ended") from None
        raise QueryError(_explain(error, sql)) from None


def _explain(error: Exception, sql: str) -> str:
    """Return the error in one line, with the columns of the query's tables, or with the tables if it names none."""
    text = " ".join(str(error).split()) or type(error).__name__
    words = set(re.findall(r"\w+", sql.lower()))
    known = [f"{table} has the columns {', '.join(columns)}" for table, columns in COLUMNS.items() if table in words]
    if "no such table" in text or not known:
        known = [f"the tables are {', '.join(COLUMNS)}"]
    return f"{text.rstrip('.')}; {'; '.join(known)}"


__all__ = ["QueryError", "QueryResult", "ReadProcess", "Unread", "answer", "answer_from", "query", "save"]
