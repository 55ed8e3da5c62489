"""Queries in DuckDB's SQL: each runs in a process of its own, which the operating system bounds.

Within a call, DuckDB's functions look at no clock, and their memory is in no limit of DuckDB:
``list_sum(range(300000000))`` takes 40 s and 14 GB, whatever its settings are.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import duckdb

MAX_MEMORY_BYTES = 1 << 30
"""Memory that a query may take beside that of its tables."""

_START = b"\0monarch_backend answer\0"
"""Bytes before the answer. Code that runs when the interpreter starts may print before it."""

MAX_THREADS = 4
"""Threads of a query: the machine also runs the programs that it is about."""

_SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "enable_external_access": False,  # neither files nor extensions
    "python_enable_replacements": False,  # else names of tables are also those of Python's variables
    "temp_directory": "",
    "threads": MAX_THREADS,
}
_READS = {"SELECT", "MULTI", "EXPLAIN"}  # MULTI is a PIVOT
_INTEGERS = {
    "actors_seen", "answered", "bytes", "call", "count", "depth", "ended", "events", "exit_code", "handled", "id",
    "is_monotonic", "is_slow", "line", "memory_bytes", "messages", "number", "overwritten_events", "parent_span",
    "pid", "port_index", "queue", "rank", "ranks", "reference", "restarts", "steps", "events.status",
    "activities.value",
}  # fmt: skip
_REALS = {"cpu_s", "factor", "total", "value"}


def require() -> None:
    """Raise ImportError, with the cure, if DuckDB is not installed."""
    if importlib.util.find_spec("duckdb") is None:
        raise ImportError(
            'the engine "duckdb" needs DuckDB: pip install "monarch_backend[duckdb]" (Python 3.11 or newer)'
        )


def constant(expression: str) -> object:
    """Return the value of an expression without columns, None for a wrong one."""
    import duckdb

    with duckdb.connect(":memory:", config=_SETTINGS) as connection:
        try:
            [[value]] = connection.execute(f"select {expression}").fetchall()
        except (duckdb.Error, ValueError):
            return None
    return value


def column_type(table: str, column: str) -> str:
    """Return the type of a column. SQLite's columns have none."""
    is_number = column.endswith(("_id", "_pid", "_us", "_i64", "_u64")) and column != "thread_id"  # a text in Monarch
    if is_number or {column, f"{table}.{column}"} & _INTEGERS:
        return "BIGINT"
    return "DOUBLE" if column in _REALS or column.endswith("_f64") else "VARCHAR"


def select(
    sql: str,
    tables: Mapping[str, tuple[Sequence[str], Iterable[tuple[Any, ...]]]],
    time_limit_s: float,
    max_rows: int,
    max_bytes: int,
) -> tuple[list[str], list[tuple[Any, ...]], bool]:
    """Return the columns and rows of a SELECT over these tables, and whether further rows were left out.

    Raises PermissionError for another statement, TimeoutError and MemoryError at its limits, and ValueError with the
    text of DuckDB for a wrong query.
    """
    require()
    arrays = {table: _arrays(table, columns, rows) for table, (columns, rows) in tables.items()}
    path = os.pathsep.join(each or os.getcwd() for each in sys.path)
    child = subprocess.run(
        [sys.executable, "-m", __name__],
        input=pickle.dumps((sql, arrays, time_limit_s, max_rows, max_bytes)),
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    if child.returncode == -signal.SIGALRM:
        raise TimeoutError
    if child.returncode:
        last = child.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ValueError(f"DuckDB has ended with the exit code {child.returncode}: {last}")
    _, found, data = child.stdout.partition(_START)
    if not found:
        raise ValueError("DuckDB has ended without an answer")
    answer = pickle.loads(data)
    if isinstance(answer, Exception):
        raise answer
    columns, rows, is_truncated = answer
    return columns, rows, is_truncated


def _arrays(table: str, columns: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the values of each column. DuckDB reads arrays a hundred times as fast as rows."""
    values = list(zip(*rows, strict=True)) or [()] * len(columns)
    return {name: _array(column_type(table, name), column) for name, column in zip(columns, values, strict=True)}


def _array(kind: str, values: Sequence[Any]) -> np.ndarray[Any, Any]:
    if kind == "VARCHAR":
        return np.array(values, dtype=object)
    is_null = [value is None for value in values]  # and NaN, as in SQLite
    numbers = [0 if null else value for null, value in zip(is_null, values, strict=True)]
    return np.ma.masked_array(np.array(numbers, dtype=np.int64 if kind == "BIGINT" else np.float64), mask=is_null)


def _answer(
    connection: duckdb.DuckDBPyConnection,
    sql: str,
    tables: dict[str, dict[str, Any]],
    time_limit_s: float,
    max_rows: int,
    max_bytes: int,
) -> tuple[list[str], list[tuple[Any, ...]], bool]:
    """Do `select` in this process, with limits that end it."""
    import duckdb

    while tables:
        table, arrays = tables.popitem()
        columns = ", ".join(f'"{name}" {column_type(table, name)}' for name in arrays)
        connection.execute(f"create table {table} ({columns})")
        connection.register("_arrays", arrays).execute(f"insert into {table} from _arrays").unregister("_arrays")
    connection.execute("set lock_configuration = true")
    connection.execute("begin transaction read only")
    _limit(time_limit_s)
    try:
        statements = connection.extract_statements(sql)
        if not statements:
            raise ValueError("the query is empty: it must be one SELECT statement")
        if len(statements) > 1:
            raise ValueError("a query has one statement at a time")
        if statements[0].type.name not in _READS:
            raise PermissionError
        cursor = connection.execute(sql)
        rows: list[tuple[Any, ...]] = []
        size = 0
        while found := cursor.fetchmany(min(1000, max_rows + 1)):
            for row in found:
                size += sum(map(_size, row))
                if len(rows) == max_rows or size > max_bytes:
                    return [each[0] for each in cursor.description], rows, True
                rows.append(row)
        return [each[0] for each in cursor.description], rows, False
    except duckdb.OutOfMemoryException:
        raise MemoryError from None
    except duckdb.Error as error:
        if "read-only mode" in str(error):
            raise PermissionError from None
        raise ValueError(str(error).partition("\n\nLINE ")[0]) from None


def _limit(seconds: float) -> None:
    """Let the system end this process after this time, and refuse it more memory than a query may take."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    if sys.platform == "linux":
        import resource

        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = used + MAX_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _size(value: object) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        value = [*value, *value.values()]
    return 8 * len(value) + sum(map(_size, value)) if isinstance(value, list | tuple) else 0


def _main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what other code prints is no part of the answer
    import duckdb

    connection = duckdb.connect(":memory:", config=_SETTINGS)
    try:
        answer: object = _answer(connection, *pickle.load(sys.stdin.buffer))
    except (ValueError, PermissionError, MemoryError) as error:
        answer = error
    signal.setitimer(signal.ITIMER_REAL, 0)
    answers.write(_START)
    pickle.dump(answer, answers)
    answers.flush()
    os._exit(0)  # else the rest of a cut answer is awaited


if __name__ == "__main__":
    _main()
