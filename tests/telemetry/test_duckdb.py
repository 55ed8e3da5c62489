"""Queries in DuckDB's SQL: its own functions, the events that are read for them, and that they are bounded."""

from __future__ import annotations

import importlib.util
import json
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monarch_backend._telemetry import duckdb_engine, sql
from monarch_backend._telemetry.kinds import Kind
from monarch_backend._telemetry.metrics import InstrumentKind
from monarch_backend._telemetry.program_recording import Recording, Unread
from monarch_backend._telemetry.reader import RecordedEvent
from monarch_backend._telemetry.sql_filters import tables_of, wanted_by
from monarch_backend._telemetry.sql_tables import COLUMNS
from monarch_backend.job import LocalJob
from monarch_backend.telemetry import QueryError, query
from tests.telemetry.engines import needs_duckdb
from tests.telemetry.recordings import recording_of

BEGIN_S = 1_700_000_000
PIDS = [11, 12, 13]


def _steps(count: int = 10, name: str = "train") -> Recording:
    """Return a recording of three processes: a step each second, and a loss half a second later."""
    made = recording_of({"": PIDS}, [Unread(7, "", "gone")])
    events = []
    for number in range(count):
        at = (BEGIN_S + number) * 10**9
        loss = int.from_bytes(struct.pack("=d", number / 2), sys.byteorder)
        gauge = InstrumentKind.GAUGE
        events += [
            RecordedEvent(2 * number + 1, at, 10**6, Kind.STEP, 0, 0, name, "", number, 0, 0),
            RecordedEvent(2 * number + 2, at + 5 * 10**8, 0, Kind.METRIC, 0, 0, "loss", "", gauge, loss, 0),
        ]
    made.processes = [replace(each, recorded=replace(each.recorded, events=events)) for each in made.processes]
    return made


@pytest.fixture(scope="module")
def steps() -> Recording:
    return _steps()


def _rows(text: str, recording: Recording) -> list[tuple[Any, ...]]:
    return sql.answer(text, recording, engine="duckdb").rows


BUCKETS = """
    select epoch(time_bucket(interval 4 second, make_timestamp(timestamp_us)))::bigint, count(*) from steps
    group by all order by all
"""
ASOF = """
    select number, value_f64 from steps asof join metric_gauges as loss
    on steps.pid = loss.pid and steps.timestamp_us >= loss.timestamp_us
    where steps.pid = 12 and number < 4 order by all
"""
PIVOT = "pivot (from steps where number < 2) on pid using count(*) group by number order by 1"
LISTS = "select list_transform([1, 2], lambda x: x + 1), list(number order by number)[2:3] from steps where pid = 11"


@needs_duckdb
@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("select quantile_cont(value_f64, 0.5) from metric_gauges", [(2.25,)]),
        (BUCKETS, [(BEGIN_S, 12), (BEGIN_S + 4, 12), (BEGIN_S + 8, 6)]),
        (ASOF, [(1, 0.0), (2, 0.5), (3, 1.0)]),
        (PIVOT, [(0, 1, 1, 1), (1, 1, 1, 1)]),
        (LISTS, [([2, 3], [1, 2])]),
        ("from steps select max(duration_us) where pid = 11", [(1000,)]),
        ("select sum(bytes) from transfers", [(None,)]),  # an empty column has its type
    ],
)
def test_own_functions_of_duckdb_answer(text: str, rows: list[tuple[Any, ...]], steps: Recording) -> None:
    assert _rows(text, steps) == rows


@needs_duckdb
def test_values_of_all_types_are_json(steps: Recording) -> None:
    text = """
        select make_timestamp(0), timestamptz '2020-01-01 00:00:00+00' at time zone 'UTC', date '2020-01-02',
        time '10:00:00', interval 3 day, 1.50, [1, null, 'nan'::double], {'x': [2]}, map {1: 'y'}, '\\x00\\xff'::blob,
        2::hugeint ** 70, uuid()
    """
    result = sql.answer(text, steps, engine="duckdb")
    [row] = json.loads(json.dumps(result.as_json(), allow_nan=False))["rows"]
    assert row[:-1] == [
        "1970-01-01T00:00:00", "2020-01-01T00:00:00", "2020-01-02", "10:00:00", "3 days, 0:00:00", 1.5,
        [1.0, None, "nan"], {"x": [2]}, {"1": "y"}, "00ff", 2.0**70,
    ]  # fmt: skip
    assert len(row[-1]) == 36
    assert [each.pid for each in result.processes] == PIDS and result.unread == ["pid 7: gone"]


NARROWED = [
    ("select quantile_cont(number, 0.9) from steps where pid = 12", {12}, 0),
    ("select list(number) from steps where steps.pid = 24/2 and number % 2 = 0 -- a comment", None, 0),  # 24/2 is 12.0
    ("select max(name) from steps where timestamp_us >= 1700000005 * 1e6 and pid = 12", {12}, BEGIN_S + 5),
    ("select max(name) from steps where timestamp_us > 1.700000005e15", None, BEGIN_S + 5),
    ("select count(*) from steps where timestamp_us > epoch_us(now()) - 60 * 1000000", None, -1),
]


@needs_duckdb
@pytest.mark.parametrize(("text", "pids", "since_s"), NARROWED)
def test_conditions_in_duckdb_restrict_what_is_read(
    text: str, pids: set[int] | None, since_s: int, steps: Recording
) -> None:
    wanted = wanted_by(text, "duckdb")
    assert (wanted.pids and set(wanted.pids), wanted.kinds) == (pids, {Kind.STEP})
    since = time.time() if since_s < 0 else since_s
    assert wanted.since_us // 10**6 == (pytest.approx(since - 120, abs=60) if since else 0)
    assert _rows(text, _only_wanted(text, steps)) == _rows(text, steps)


SUPERSETS = [
    # Constants whose value is another one in SQLite.
    "select count(*) from steps where pid = 23/2 + 0.5",
    "select count(*) from steps where pid = 25/2*1 - 0.5",
    "select count(*) from steps where timestamp_us > 3e15 - 5/2*0.52e15 - 2e13",
    # Parts that SQLite's grammar has not, or reads as something else.
    "select count(*) from steps where pid > 0 /* /* */ and pid = 12 -- */ */",
    "select count(*) from steps where pid = 12 -- a\r or pid > 0",
    "select count(*) from steps where name != $$ and pid = 12 and name != $$",
    "select count(*) from steps where name != E'\\' and pid = 12 and name != '",
    "select struct_pack(pid := 12) as s, number from steps where s.pid = 12 order by all limit 4",
    "select {'pid': 12} as s, number from steps where s.pid = 12 order by all limit 4",
    "select number, (select count(*) from (table steps)) from steps where pid = 12 order by all",
    "select count(*) from steps where exists (from steps where pid = 11) and pid = 12",
    "select count(*) from steps where number in (table main.steps) or pid = 12",
    "select number, pid from steps where number < 3 qualify rank() over (order by pid) = 1 and pid = 11",
    "select count(*) filter (where pid = 12) from steps",
    "select columns('pid') from steps where pid = 12 order by all",
    "select count(*) from steps where [x for x in [1] if x = 1 and pid = 12] is not null",
    "select count(*) from steps where case when pid = 11 and pid = 12 then 0 else 1 end = 1",
    "select count(*) from steps where {'x': number > 0 and pid = 12 and 1 = 1} is not null",
    "select count(*) from steps where pid = 12 and not exists (table steps limit 1 offset 20)",
    "select count(*) from steps where not pid = 12",
    "select count(*) from steps where pid = 12 is not null",
    "select count(*) from query('select * from st' || 'eps')",
    "select count(*) from query_table('steps')",
    "from query_table(['steps']) select max(number)",
    "select (from steps select count(*)), count(*) from metric_sums where pid = 12",
    "from steps where pid = 12",
    "from steps positional join (from steps where pid = 12) as s select count(*)",
    "summarize steps",
    "pivot steps on number using count(*)",
]


@needs_duckdb
@pytest.mark.parametrize("text", SUPERSETS)
def test_query_that_is_not_understood_loses_no_rows(text: str, steps: Recording) -> None:
    wanted = wanted_by(text, "duckdb")
    assert wanted.kinds >= ({Kind.METRIC} if "from metric_" in text else {Kind.STEP})
    if wanted.pids is not None or wanted.since_us:
        assert _rows(text, _only_wanted(text, steps)) == _rows(text, steps)


def test_columns_of_duckdb_decide_which_other_events_are_read() -> None:
    """Parents of spans are in earlier events, senders in other processes."""
    named = wanted_by("select name from spans where timestamp_us > 17e14", "sqlite"), {Kind.SPAN}
    assert named[0].since_us and named[0].kinds == named[1]
    for columns in ("parent_id", "*", "spans.*", "distinct on (pid) *", "columns('parent.*')", "1 * 2, *", "#4"):
        assert not wanted_by(f"select {columns} from spans where timestamp_us > 17e14", "duckdb").since_us, columns
    assert wanted_by("select *, count(*) from messages where to_pid = 5", "duckdb").pids is None


@needs_duckdb
def test_products_and_counts_are_no_columns() -> None:
    for text in ("select count(*) from spans where timestamp_us > 17 * (10 * 1e13)", "select max(2 * (3)) from spans"):
        assert wanted_by(text, "duckdb").kinds == {Kind.SPAN}


def test_tables_of_a_text_are_all() -> None:
    assert tables_of("from query('x')", "duckdb") == list(COLUMNS) and tables_of("from query", "sqlite") == []


def _only_wanted(text: str, recording: Recording) -> Recording:
    """Return the recording with only those events that hosts send for the query."""
    wanted = wanted_by(text, "duckdb")
    processes = []
    for each in recording.processes:
        is_read = wanted.pids is None or each.pid in wanted.pids
        events = [
            event
            for event in each.recorded.events
            if event.kind in wanted.kinds
            and (event.kind in wanted.always or (is_read and event.end_ns // 1000 >= wanted.since_us))
        ]
        processes.append(replace(each, recorded=replace(each.recorded, events=events)))
    return replace(recording, processes=processes)


@needs_duckdb
@pytest.mark.parametrize(
    "text",
    [
        "copy steps to '{folder}/x.csv'", "attach '{folder}/x.db'", "export database '{folder}'", "install httpfs",
        "load httpfs", "set threads = 90", "pragma version", "call pragma_version()", "checkpoint", "use memory",
        "insert into steps (id) values (1)", "create temp table t (a int)", "prepare x as select 1", "commit",
        "with x as (insert into steps (id) values (1) returning id) select * from x",
        "explain analyze delete from steps", "from read_csv('/etc/passwd')", "from read_text('/etc/passwd')",
        "from '/etc/passwd'", "from glob('/*')", "from enable_profiling('{folder}/x')",
        "from enable_logging(storage = 'file', storage_path = '{folder}')", "from duckdb_extensions()",
        "from pandas_scan(1)", "from arrays", "from tables", "select time_limit_s", "select ?", "select 1; select 2",
        "select 1; drop table steps", "",
    ],
)  # fmt: skip
def test_query_reaches_nothing_but_its_tables(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import duckdb

    monkeypatch.setattr(duckdb_engine, "_limit", lambda seconds: None)  # of a process, here that of the test
    tables = {"steps": {"id": np.array([1], dtype=np.int64)}}
    with duckdb.connect(":memory:", config=duckdb_engine._SETTINGS) as connection:
        with pytest.raises((PermissionError, ValueError)):
            duckdb_engine._answer(connection, text.format(folder=tmp_path), dict(tables), 1, 10, 1000)
    assert list(tmp_path.iterdir()) == []


@needs_duckdb
def test_query_that_writes_is_refused(steps: Recording) -> None:
    for text in ("delete from steps", "explain analyze delete from steps"):
        with pytest.raises(QueryError, match=r"^a query only reads: it must be one SELECT statement$"):
            _rows(text, steps)


@needs_duckdb
@pytest.mark.parametrize(
    "text",
    [
        "select length(repeat('x', 4000000000))",  # a constant: DuckDB looks neither at its limit nor at interrupts
        "select list_sum(range(300000000))",
        "select list(range) from range(500000000)",
        "select range(90000000)",  # numbers of Python take more
    ],
)
def test_memory_of_a_query_is_bounded(text: str, steps: Recording) -> None:
    with pytest.raises(QueryError, match="takes too much memory: it was ended"):
        _rows(text, steps)


@needs_duckdb
@pytest.mark.parametrize(
    "text",
    [
        "select count(*) from range(1000000000000) a, range(1000) b",
        "select levenshtein(repeat('a', 200000), repeat('b', 200000))",
        "select sleep_ms(60000)",
    ],
)
def test_time_of_a_query_is_bounded(text: str, steps: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "TIME_LIMIT_S", 0.3)
    begun = time.monotonic()
    with pytest.raises(QueryError, match=r"longer than 0\.3 s"):
        _rows(text, steps)
    assert time.monotonic() < begun + 30


@needs_duckdb
def test_lists_of_an_answer_are_bounded(steps: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "MAX_ANSWER_BYTES", 10_000)
    result = sql.answer("select {'a': range(100)} from range(100)", steps, engine="duckdb")
    assert 5 < len(result.rows) < 13 and result.is_truncated


@needs_duckdb
def test_engine_that_crashes_is_an_error(steps: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duckdb_engine, "__name__", "monarch_backend._telemetry.absent")
    with pytest.raises(QueryError, match=r"ended with the exit code 1: .*No module named"):
        _rows("select 1", steps)


def test_missing_package_and_unknown_engine_are_named(
    monkeypatch: pytest.MonkeyPatch, steps: Recording, tmp_path: Path
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "duckdb" else find(name))
    text = r'the engine "duckdb" needs DuckDB: pip install "monarch_backend\[duckdb\]"'
    for ask in (
        lambda: query("select 1", engine="duckdb"),
        lambda: LocalJob().query("select 1", engine="duckdb"),
        lambda: sql.answer_from("select 1", str(tmp_path), "duckdb"),
        lambda: sql.answer("select 1", steps, engine="duckdb"),
    ):
        with pytest.raises(ImportError, match=text):
            ask()
    with pytest.raises(ValueError, match='the engine is "sqlite" or "duckdb", not \'postgres\''):
        query("select 1", engine="postgres")


def test_command_names_the_missing_package(tmp_path: Path) -> None:
    code = (
        "import importlib.util, sys\nfind = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'duckdb' else find(name, *rest)\n"
        "from monarch_backend.cli import main\n"
        "sys.exit(main(['sql', 'select 1', '--engine', 'duckdb', '--from', sys.argv[1]]))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert 'pip install "monarch_backend[duckdb]"' in done.stderr


@needs_duckdb
def test_output_of_other_code_is_no_part_of_the_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Such code runs when the interpreter starts, or while modules are imported."""
    (tmp_path / "sitecustomize.py").write_text("print('hello')")
    monkeypatch.syspath_prepend(tmp_path)
    assert duckdb_engine.select("select 1", {}, 10.0, 10, 1000)[1] == [(1,)]
