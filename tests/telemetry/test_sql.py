"""Queries: the rows of each table, and that a query can neither change anything nor run without end."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import math
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from monarch_backend import _native, errors, telemetry
from monarch_backend._core import platform
from monarch_backend._telemetry import program_recording, recording_history, sql
from monarch_backend._telemetry.kinds import Kind
from monarch_backend._telemetry.program_output import Lines
from monarch_backend._telemetry.program_recording import AskedHost, Recording, Unread
from monarch_backend._telemetry.reader import EventFilter
from monarch_backend._telemetry.recording_area import AREA_NAME
from monarch_backend._telemetry.recording_history import HistoryWriter
from monarch_backend._telemetry.sql_filters import filter_of
from monarch_backend._telemetry.sql_tables import COLUMNS
from monarch_backend._telemetry.subject import ThisMachine
from monarch_backend.cli import main
from monarch_backend.cli import sql as cli_sql
from monarch_backend.telemetry import QueryError, QueryResult
from tests.telemetry.engines import each_engine, needs_duckdb
from tests.telemetry.recordings import recording_of
from tests.telemetry.traced_program import traced_program

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="recording areas need memfd_create")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    with traced_program(tmp_path_factory.mktemp("program")) as process:
        yield process


@pytest.fixture(scope="module")
def recording(running: subprocess.Popen[str]) -> Recording:
    return program_recording.read(str(running.pid))


def _rows(query: str, recording: Recording, engine: str = "sqlite") -> list[tuple[Any, ...]]:
    return sql.answer(query, recording, engine=engine).rows


def _command(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "monarch_backend.cli", "sql", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@each_engine
@pytest.mark.parametrize("table", COLUMNS)
def test_each_table_has_its_columns(table: str, engine: str, recording: Recording) -> None:
    result = sql.answer(f"select * from {table}", recording, engine=engine)
    assert engine == "sqlite" or result.rows == _rows(f"select * from {table}", recording)
    assert tuple(result.columns) == COLUMNS[table]
    assert result.rows or table in ("collectives", "transfers", "connections", "batches", "recompilations")
    if "id" in result.columns and table != "span_events":  # that has the span's id
        ids = [row["id"] for row in result]
        assert len(set(ids)) == len(ids)


@pytest.fixture(scope="module")
def saved(recording: Recording, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "of a run?.sqlite"
    sql.save(recording, str(path))
    return path


@pytest.mark.parametrize("table", COLUMNS)
def test_saved_file_has_the_same_rows(table: str, recording: Recording, saved: Path) -> None:
    before, after = (
        sql.answer(f"select * from {table}", recording),
        sql.answer_from(f"select * from {table}", str(saved)),
    )
    assert (after.columns, after.rows, after.processes) == (before.columns, before.rows, before.processes)
    assert after.hosts == before.hosts == [AskedHost("this machine")]


def test_saved_file_is_private_and_read_only(recording: Recording, saved: Path) -> None:
    content = saved.read_bytes()
    assert saved.stat().st_mode & 0o777 == 0o600
    for query in ("delete from processes", "attach 'x' as y", "pragma user_version = 3", "create table t (a)"):
        with pytest.raises(QueryError, match="a query only reads"):
            sql.answer_from(query, str(saved))
    with pytest.raises(QueryError, match="no such table: absent"):
        sql.answer_from("select * from absent", str(saved))
    with pytest.raises(FileExistsError):
        sql.save(recording, str(saved))
    assert saved.read_bytes() == content and [each.name for each in saved.parent.iterdir()] == [saved.name]


def test_commands_save_and_ask_a_file(running: subprocess.Popen[str], tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    command = [sys.executable, "-m", "monarch_backend.cli", "export", "sqlite", str(running.pid)]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 1  # without -o
    done = subprocess.run([*command, "-o", str(path)], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == f'{path}: 4 processes. Ask it: monarch-backend sql "..." --from {path}\n'
    asked = _command("select count(*) as n from spans where name = 'step'", "--from", str(path))
    assert asked.stdout.split() == ["n", "11"] and "4 processes read" in asked.stderr


@pytest.mark.parametrize(
    ("content", "words", "text"),
    [
        (None, [], "No such file or directory"),
        (b"no database" * 100, [], "is no file of monarch-backend export sqlite: file is not a database"),
        (b"", [], "is no file of monarch-backend export sqlite: no such table"),
        (b"", ["train.py"], "leave out 'train.py'"),
    ],
)
def test_wrong_file_is_an_error(content: bytes | None, words: list[str], text: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    done = _command("select 1", *words, "--from", str(path))
    assert done.returncode == 1 and text in done.stderr and done.stderr.count("\n") == 1


NOT_IN_A_HISTORY = ("logs", "stacks", "step_times")


@pytest.mark.parametrize("table", sorted(set(COLUMNS) - set(NOT_IN_A_HISTORY)))
def test_history_has_the_rows_of_its_recording(table: str, recording: Recording, history: Path) -> None:
    query = f"select * from {table}"
    before, after = sql.answer(query, recording), sql.answer_from(query, str(history))
    assert (after.rows, after.processes, after.unread) == (before.rows, before.processes, before.unread)
    assert after.hosts == before.hosts


@pytest.fixture(scope="module")
def history(recording: Recording, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A history of two looks and two writers, whose second look repeats the first."""
    folder = tmp_path_factory.mktemp("history")
    count = sum(len(each.recorded.events) for each in recording.processes)
    for _ in range(2):
        with HistoryWriter(folder, 3600, 1 << 30) as writer:
            assert writer.append(recording).events == count
            last = writer.after
            with pytest.raises(OSError, match="another process writes"):
                HistoryWriter(folder, 3600, 1 << 30)
    with HistoryWriter(folder, 3600, 1 << 30) as writer:
        assert writer.after == last
    return folder


def test_history_asks_nothing_of_processes_that_may_be_others(history: Path) -> None:
    for table in NOT_IN_A_HISTORY:
        assert sql.answer_from(f"select * from {table}", str(history)).rows == []


def test_history_of_many_files_is_bounded_and_read_as_one(recording: Recording, tmp_path: Path) -> None:
    empty = replace(recording, processes=[])
    with HistoryWriter(tmp_path, 3600, 1 << 17) as writer:
        writer.append(recording)
        files = {each.name for each in tmp_path.glob("history-*")}
        seen, count = set(files), "select count(*), max(timestamp_us) from events"
        for _ in range(12):  # each file is full with its first look
            writer.append(recording)
            seen |= {each.name for each in tmp_path.glob("history-*")}
        now = {each.name: each.stat().st_size for each in tmp_path.glob("history-*")}
        assert 1 < len(now) < len(seen) and min(now) > min(files)
        assert sum(now.values()) <= (1 << 17) + max(now.values())
        assert sql.answer_from(count, str(tmp_path)).rows == sql.answer(count, recording).rows
        later = replace(empty, now_ns=recording.now_ns + int(7200e9))
        writer.append(later)
    states = "select state, exit_code, count(*) from processes group by 1, 2 order by 2"
    assert sql.answer_from(states, str(tmp_path)).rows == [("ended", None, 3), ("ended", -signal.SIGKILL, 1)]


def test_newest_events_of_a_long_history_are_read(
    recording: Recording, history: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_history, "MAX_EVENTS", 10)
    result = sql.answer_from("select timestamp_us from events", str(history))
    newest = sql.answer("select timestamp_us from events order by 1 desc limit 10", recording)
    assert sorted(result.rows, reverse=True) == newest.rows and "newest 10 events" in result.unread[-1]


def test_writer_that_is_killed_leaves_whole_looks(recording: Recording, tmp_path: Path) -> None:
    with HistoryWriter(tmp_path, 3600, 1 << 30) as writer:
        writer.append(recording)
    # The second look is killed after its first events. A small cache has written pages by then.
    code = (
        "import os, signal, sqlite3, sys\n"
        "from monarch_backend._telemetry import program_recording, recording_history\n"
        "made, opened = [], recording_history._opened\n"
        "def event_row(process, event, offset):\n"
        "    made.append(1)\n"
        "    if len(made) > 5000: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return (process, len(made) + 10**6, 2**62, 0, 4, 0, 0, 'x' * 500, '', 0, 0, 0)\n"
        "recording_history._event_row = event_row\n"
        "with recording_history.HistoryWriter(sys.argv[1], 3600, 1 << 30) as writer:\n"
        "    recording = program_recording.read(sys.argv[2])\n"
        "    for each in recording.processes: each.recorded.events *= 10_000\n"
        "    writer.append(recording)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), str(recording.programs[0].pid)], timeout=60)
    assert done.returncode == -signal.SIGKILL and list(tmp_path.glob("*-journal"))
    query = "select count(*), max(timestamp_us) from events"
    assert sql.answer_from(query, str(tmp_path)).rows == sql.answer(query, recording).rows
    with HistoryWriter(tmp_path, 3600, 1 << 30) as writer:
        writer.append(recording)
    assert sql.answer_from(query, str(tmp_path)).rows == sql.answer(query, recording).rows


def test_history_has_the_hosts_of_a_job(tmp_path: Path) -> None:
    def look(number: int, ahead_ns: int) -> Recording:
        """Return what two hosts have recorded: the same pid and start on both clocks, and event ``number``."""
        made = recording_of({"": [1]}, [])
        for host in ("a[0] (gpu-1)", "b[0] (gpu-2)"):
            there = recording_of({"": [1]}, [])
            there.seen_from(host, ahead_ns)
            made.add(there)
        made.wall_offset_ns = time.time_ns()
        for identity, process in enumerate(made.processes, 1):
            process.recorded.identity = identity
            process.recorded.events = [each._replace(number=number) for each in process.recorded.events]
        return made

    for number in (1, 2, 2):  # the clock of a host is measured anew at each look
        with HistoryWriter(tmp_path, 3600, 1 << 30) as writer:
            assert set(writer.after.values()) <= {number, number - 1}
            writer.append(look(number, 1000 * number))
    with HistoryWriter(tmp_path, 3600, 1 << 30) as writer:
        assert writer.after == {(1, 0): 2}
    hosts = sql.answer_from("select host, events, state from processes order by 1", str(tmp_path)).rows
    assert hosts == [("", 2, "running"), ("a[0] (gpu-1)", 2, "running"), ("b[0] (gpu-2)", 2, "running")]


def test_damaged_file_of_a_history_is_an_error_and_a_copy_is_left_alone(history: Path, tmp_path: Path) -> None:
    [file] = history.glob("history-*.sqlite")
    (tmp_path / "history-copy.sqlite").write_bytes(b"of the user")
    (tmp_path / file.name).write_bytes(b"no database" * 100)
    with pytest.raises(OSError, match=f"{file.name} is no file of monarch-backend export history: file is not"):
        HistoryWriter(tmp_path, 3600, 1 << 30)
    (tmp_path / file.name).write_bytes(b"")
    with HistoryWriter(tmp_path, 3600, 1 << 30) as writer:
        assert writer.after == {}


def test_number_of_processes_that_a_history_remembers_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_history, "MAX_UNSEEN", 2)
    with HistoryWriter(tmp_path, 3600, 1 << 30) as writer:
        for pid in range(1, 7):
            writer.append(recording_of({"a": [pid]}, []))
        assert sorted(pid for pid, _ in writer.after) == [4, 5, 6]


def test_interval_that_cannot_be_written_is_tried_again(
    recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened, looks = recording_history._opened, list[EventFilter]()

    def full_disk(path: Path) -> Any:
        if len(looks) < 3:
            raise sqlite3.OperationalError("database or disk is full")
        return opened(path)

    def read(program: str, wanted: EventFilter) -> Recording:
        looks.append(wanted)
        if len(looks) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            raise LookupError("there is none")
        return recording

    monkeypatch.setattr(recording_history, "_opened", full_disk)
    monkeypatch.setattr(program_recording, "read", read)
    command = ["export", "history", "-o", str(tmp_path / "kept"), "--interval", "0.1"]
    assert main(command) == 0
    printed = capsys.readouterr()
    count = sum(len(each.recorded.events) for each in recording.processes)
    assert printed.out == f"added {count} events\nwaits: there is none\n"
    [path] = (tmp_path / "kept").glob("history-*.sqlite")
    reason = f"{path} cannot be written: database or disk is full: free space on its disk, or lower --keep-bytes"
    assert printed.err == f"monarch-backend export: {reason}. This is tried again each 0.1 s\n"
    looks.clear()
    assert main(["export", "history", "-o", str(tmp_path / "other"), "--once"]) == 1
    assert capsys.readouterr().err.endswith(reason.rpartition("cannot")[2] + "\n")


def test_folder_that_cannot_be_written_is_named_with_a_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match=f"^{tmp_path} cannot be written: Permission denied: let this user write there"):
        HistoryWriter(tmp_path, 3600, 1 << 30)


def test_old_files_are_deleted_while_no_program_runs(recording: Recording, tmp_path: Path) -> None:
    old = replace(recording, now_ns=recording.now_ns - int(1800e9))
    with HistoryWriter(tmp_path, 3600, 1 << 30) as writer:
        writer.append(old)
    with HistoryWriter(tmp_path, 3600, 1 << 30) as writer:
        writer.delete_old()
        assert len(list(tmp_path.glob("history-*"))) == 1
    command = ["export", "history", "no-program-of-this-name", "-o", str(tmp_path), "--once", "--keep-hours"]
    assert main([*command, "0.6"]) == 1
    assert len(list(tmp_path.glob("history-*"))) == 1
    assert main([*command, "0.4"]) == 1
    assert list(tmp_path.glob("history-*")) == []
    with pytest.raises(OSError, match="All of a history are deleted if no program has run within its --keep-hours"):
        sql.answer_from("select 1", str(tmp_path))


def test_commands_keep_and_ask_a_history(running: subprocess.Popen[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "monarch_backend.cli", "export", "history", str(running.pid), "--once"]
    command += ["-o", str(tmp_path / "kept"), "--keep-hours", "2", "--keep-bytes", "500M"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert re.fullmatch(r"added \d+ events\n", done.stdout)
    asked = _command("select count(*) as n from spans where name = 'step'", "--from", str(tmp_path / "kept"))
    assert asked.stdout.split() == ["n", "11"] and "4 processes read" in asked.stderr
    asked = _command("select 1", "--from", str(tmp_path))
    assert asked.returncode == 1 and "is no folder of monarch-backend export history" in asked.stderr


@pytest.mark.parametrize("table", sorted(set(COLUMNS) - {"logs", "stacks", "processes"}))
def test_events_that_a_query_needs_give_the_same_rows(
    table: str, recording: Recording, running: subprocess.Popen[str]
) -> None:
    _same_answer(f"select * from {table}", recording, running.pid)


MONARCH = {
    "actors": "id timestamp_us mesh_id rank full_name display_name",
    "meshes": "id timestamp_us class given_name full_name shape_json parent_mesh_id parent_view_json",
    "actor_status_events": "id timestamp_us actor_id new_status reason",
    "sent_messages": "id timestamp_us sender_actor_id actor_mesh_id view_json shape_json",
    "messages": "id timestamp_us from_actor_id to_actor_id endpoint port_index",
    "message_status_events": "id timestamp_us message_id status",
    "spans": "id name target level fields_json timestamp_us parent_id thread_name file line",
    "span_events": "id timestamp_us event_type",
    "metric_gauges": "name timestamp_us start_timestamp_us scope_name unit attributes_json resource_attributes_json "
    "value_f64 value_i64 value_u64",
    "metric_sums": "name timestamp_us start_timestamp_us scope_name unit temporality is_monotonic attributes_json "
    "resource_attributes_json sum_f64 sum_i64 sum_u64",
    "metric_histograms": "name timestamp_us start_timestamp_us scope_name unit temporality attributes_json "
    "resource_attributes_json count sum_f64 sum_i64 sum_u64 min_f64 min_i64 min_u64 max_f64 max_i64 max_u64 "
    "bounds_json bucket_counts_json",
    "events": "name target level fields_json timestamp_us parent_span thread_id thread_name module_path file line",
}
"""Columns of the tables that Monarch has, of its crate monarch_telemetry_schema."""

PUSHED = [
    ("select name, value_f64 from metric_gauges where {pid} = pid and value_f64 > 0", "metric", True, False, ""),
    ("select actor, endpoint from messages where to_pid = {pid} + 0 and status = 'failed'", "message queue failure",
     True, False, ""),
    ("select name from spans where timestamp_us >= {now} - 1 and pid = {pid};", "span", True, True, ""),
    ("select name, thread_name from spans where timestamp_us > {now} -- the end", "actor message span queue", False,
     True, "actor message queue"),
    ("select name, parent_id is null from spans where timestamp_us > {now}", "span", False, False, ""),
    ("select name from events where kind = 'step' and pid = {pid} order by 1", "step", True, False, ""),
    ("select name, thread_name from events where kind = 'span' and pid = {pid}", "actor message span queue", True,
     False, "actor message queue"),
    ("select name, parent_span from events where kind = 'step' and pid = {pid}", "span step", True, False, "span"),
    ("select endpoint, actor_mesh_id from sent_messages where pid = {pid}", "actor message sent mesh queue", True,
     False, "actor message mesh queue"),
    ("select endpoint, queued_us from messages where to_pid = {pid}", "actor message sent queue failure",
     False, False, ""),
    ("select endpoint, handled from sent_messages where pid = {pid} or 1", "actor message sent queue", False, False,
     "actor message queue"),
    ("select count(*) from steps where pid = {pid} or pid > 0", "step", False, False, ""),
    ("select count(*) from steps where not pid = {pid}", "step", False, False, ""),
    ("select count(*) from steps where pid = {pid} = 0", "step", False, False, ""),
    ("select count(*) from steps where pid between 0 and {pid} and pid = 0", "step", False, False, ""),
    ("select count(*) from steps where name != \"a and pid = 0 and b\"", "step", False, False, ""),
    ("select count(*) from steps where case when pid = 1 and pid = {pid} then 0 else 1 end", "step", False, False, ""),
    ("select count(*) from steps where pid in (select 0) or name = '' /* and pid = 0 */", "step", False, False, ""),
    ("select a.pid from steps a join steps b on a.pid = b.pid where a.pid = {pid}", "step", False, False, ""),
    ("select pid from steps where pid = {pid} union select pid from metric_sums", "metric step", False, False, ""),
    ("select 1 as pid\u2003 from steps where pid\u2003 = 1 and pid = {pid}", "step", False, False, ""),
    ("select label, overwritten_events from processes", None, False, False, ""),
]  # fmt: skip


@needs_duckdb
def test_files_are_asked_in_duckdb(recording: Recording, saved: Path, history: Path, tmp_path: Path) -> None:
    query = "from spans select name, list(duration_us order by id) where pid > 0 group by all order by all"
    expected = sql.answer(query, recording, engine="duckdb")
    assert expected.rows
    for path in (saved, history):
        found = sql.answer_from(query, str(path), "duckdb")
        assert (found.rows, found.processes, found.unread) == (expected.rows, expected.processes, expected.unread)
    wrong = tmp_path / "wrong.sqlite"
    wrong.write_bytes(saved.read_bytes())
    with contextlib.closing(sqlite3.connect(wrong)) as file:
        file.execute("update spans set duration_us = 'a text'")
        file.commit()
    with pytest.raises(QueryError, match="a text"):
        sql.answer_from(query, str(wrong), "duckdb")


@pytest.mark.parametrize(("query", "kinds", "of_pids", "of_time", "always"), PUSHED)
def test_conditions_of_a_query_restrict_what_is_read(
    query: str, kinds: str | None, of_pids: bool, of_time: bool, always: str, recording: Recording, history: Path
) -> None:
    pid = next(each.pid for each in recording.processes if each.label == "gpus 1 of trainers")
    now = (recording.now_ns + recording.wall_offset_ns) // 1000
    query = query.format(pid=pid, now=now - int(600e6))  # ten minutes before: all events are later
    wanted = filter_of(query)
    assert [Kind(kind).title for kind in sorted(wanted.kinds)] == sorted((kinds or "0").split(), key=_kind_number)
    assert (wanted.pids == frozenset({pid})) == of_pids and bool(wanted.since_ns) == of_time
    if always or of_pids or of_time:
        assert [Kind(kind).title for kind in wanted.always] == sorted(always.split(), key=_kind_number)
    _same_answer(query, recording, recording.programs[0].pid)
    assert sql.answer_from(query, str(history)).rows == sql.answer(query, recording).rows


@pytest.mark.parametrize("query", ["-- steps", "/* steps */", ";", "steps"])
def test_query_without_a_statement_is_an_error(query: str, recording: Recording) -> None:
    assert not filter_of(query).since_ns
    with pytest.raises(QueryError):
        sql.answer(query, recording)


def _kind_number(title: str) -> int:
    return int(title) if title.isdecimal() else Kind[title.upper()]


def test_filter_reads_later_events_and_all_of_some_kinds(recording: Recording) -> None:
    process = recording.processes[1]
    last = process.recorded.events[-1]
    wanted = EventFilter(since_ns=last.end_ns - 1, pids=frozenset({process.pid}), always=(Kind.ACTOR,))
    found = program_recording.read(str(process.pid), wanted)
    for before, after in zip(recording.processes, found.processes, strict=True):
        of_kind = before.events(Kind.ACTOR)
        expected = sorted({*of_kind, *([last] if before is process else [])})
        assert after.recorded.events == expected
        assert (after.recorded.kept, after.recorded.lost) == (before.recorded.kept, before.recorded.lost)


def _same_answer(query: str, recording: Recording, pid: int) -> None:
    """Check that the events of the query's filter give the same answer as all events, at the same time."""
    times = {"now_ns": recording.now_ns, "wall_offset_ns": recording.wall_offset_ns}
    found = sql.answer(query, replace(program_recording.read(str(pid), filter_of(query)), **times))
    expected = sql.answer(query, recording)
    assert (found.columns, found.rows, found.processes) == (expected.columns, expected.rows, expected.processes)


def test_processes_are_those_of_the_program(recording: Recording, running: subprocess.Popen[str]) -> None:
    assert _rows("select label, state, exit_code, parent_pid from processes", recording) == [
        ("program traced_program.py", "running", None, None),
        ("gpus 0 of trainers", "running", None, running.pid),
        ("gpus 1 of trainers", "running", None, running.pid),
        ("victims 0 of victims", "ended", -signal.SIGKILL, running.pid),
    ]


@each_engine
def test_actors_have_mesh_rank_and_status(engine: str, recording: Recording) -> None:
    query = """
        select actors.full_name, display_name, meshes.full_name, meshes.class, shape_json, status, messages
        from actors join meshes on meshes.id = mesh_id order by 1
    """
    sizes = '{"inner": {"labels": ["gpus"], "sizes": [2]}}'
    of_victim = '{"inner": {"labels": ["victims"], "sizes": [1]}}'
    napper, worker = "trainers/napper", "trainers/worker"
    assert _rows(query, recording, engine) == [
        ("napper[0]", "<Napper napper{'gpus': 0/2}>", napper, "Python<Napper>", sizes, "Idle", 3),
        ("napper[1]", "<Napper napper{'gpus': 1/2}>", napper, "Python<Napper>", sizes, "Idle", 3),
        ("victim[0]", "<Worker victim{'victims': 0/1}>", "victims/victim", "Python<Worker>", of_victim, "Failed", 1),
        ("worker[0]", "<Worker worker{'gpus': 0/2}>", worker, "Python<Worker>", sizes, "Idle", 6),
        ("worker[1]", "<Worker worker{'gpus': 1/2}>", worker, "Python<Worker>", sizes, "Processing", 8),
    ]
    parents = "select a.given_name, b.class from meshes a join meshes b on a.parent_mesh_id = b.id order by 1"
    assert _rows(parents, recording, engine) == [(name, "Proc") for name in ("napper", "victim", "worker")]
    statuses = "select new_status from actor_status_events where actor_id = (select id from actors where full_name = ?)"
    assert _rows(statuses.replace("?", "'worker[1]'"), recording, engine) == [
        ("Initializing",),
        ("Idle",),
        ("Processing",),
    ]


@each_engine
def test_messages_join_with_what_was_sent(engine: str, recording: Recording) -> None:
    query = """
        select sender.full_name, receiver.full_name, endpoint, messages.status, from_pid = sender.pid
        from messages join actors receiver on receiver.id = to_actor_id join actors sender on sender.id = from_actor_id
    """
    assert _rows(query, recording, engine) == [("worker[0]", "worker[1]", "step", "complete", 1)]
    by_status = "select endpoint, status, count(*) from messages where actor = 'worker' group by 1, 2 order by 1, 2"
    assert _rows(by_status, recording, engine) == [
        ("hang", "active", 1), ("raises", "failed", 1), ("relay", "complete", 1), ("step", "complete", 11),
    ]  # fmt: skip
    [(least, most)] = _rows(
        "select min(queued_us), max(duration_us) from messages where endpoint = 'step'", recording, engine
    )
    assert least >= 0 and 0 < most < 60e6
    handled = "select handled, count(*) from sent_messages where endpoint = 'step' group by 1 order by 1"
    assert _rows(handled, recording, engine) == [(1, 1), (2, 5)]


def test_status_events_of_a_message_are_in_order(recording: Recording) -> None:
    query = """
        select group_concat(status, ' ') from (
            select message_status_events.* from message_status_events join messages on messages.id = message_id
            where endpoint = 'step' order by message_status_events.id
        ) group by message_id
    """
    found = [statuses.replace(" queued", "") for (statuses,) in _rows(query, recording)]  # some found the actor busy
    assert found == ["sent active complete"] * 11
    hang = "select e.status from message_status_events e join messages m on m.id = message_id where endpoint = 'hang'"
    hang += " and e.status != 'queued'"
    assert _rows(hang, recording) == [("active",)]  # a broadcast has no number, so its sending is unknown


def test_spans_have_parents_attributes_and_actors(recording: Recording) -> None:
    query = """
        select child.name, parent.name, full_name, json_extract(parent.fields_json, '$.number'), child.status
        from spans child join spans parent on parent.id = child.parent_id join actors on actors.id = child.actor_id
        where child.name = 'forward' and child.pid = (select pid from processes where label = 'gpus 1 of trainers')
    """
    found = _rows(query, recording)
    assert found == [("forward", "step", "worker[1]", number, "ok") for number in (0, 1, 2, 3, 4, 100)]
    assert _rows("select name, status from spans where status != 'ok' order by 1", recording) == [
        ("hang", "open"), ("last", "lost"), ("waits", "open"),
    ]  # fmt: skip
    assert _rows("select event_type, count(*) from span_events group by 1", recording) == [
        ("close", 11 * 2 + 1 + 6 * 2), ("enter", 11 * 2 + 1 + 6 * 2 + 3), ("exit", 11 * 2 + 1 + 6 * 2),
    ]  # fmt: skip
    joined = (
        "select event_type, spans.name from span_events join spans using (id) where spans.name in ('hang', 'relay')"
    )
    assert _rows(f"{joined} order by 2, span_events.timestamp_us, 1 desc", recording) == [
        ("enter", "hang"), ("enter", "relay"), ("exit", "relay"), ("close", "relay"),
    ]  # fmt: skip


@each_engine
def test_tables_begin_with_the_columns_of_monarch(engine: str, recording: Recording) -> None:
    for table, columns in MONARCH.items():
        found = sql.answer(f"select * from {table} limit 1", recording, engine=engine).columns
        assert " ".join(found).startswith(columns), table


@each_engine
def test_information_schema_has_the_tables_and_columns(engine: str, recording: Recording, saved: Path) -> None:
    for ask in (
        lambda text: _rows(text, recording, engine),
        lambda text: sql.answer_from(text, str(saved), engine).rows,
    ):
        names = (
            "select table_name from information_schema.tables where table_schema = 'main' and table_type = 'BASE TABLE'"
        )
        assert sorted(name for (name,) in ask(names)) == sorted(COLUMNS)
        columns = "select column_name, ordinal_position, data_type from information_schema.columns"
        assert ask(f"{columns} where table_name = 'span_events' order by ordinal_position") == [
            ("id", 1, "BIGINT"), ("timestamp_us", 2, "BIGINT"), ("event_type", 3, "VARCHAR"),
        ]  # fmt: skip


@each_engine
def test_events_have_the_span_that_encloses_them(engine: str, recording: Recording) -> None:
    query = """
        select distinct events.name, events.detail, spans.name, events.level, events.fields_json, thread_id = ''
        from events join spans on spans.id = parent_span where events.kind = 'sent' or events.name = 'forward'
        order by 1
    """
    assert _rows(query, recording, engine) == [
        ("forward", "", "step", "INFO", "{}", False), ("worker", "step", "relay", "INFO", "{}", False),
    ]  # fmt: skip
    failed = "select name, fields_json from events where level = 'ERROR' and kind = 'message'"
    assert _rows(failed, recording, engine) == [("worker", "{}")]
    fields = "select distinct fields_json from events where kind = 'span' and name = 'nap' order by 1 limit 1"
    assert _rows(fields, recording, engine) == [('{"seconds":0.01}',)]


def test_calls_that_all_ranks_have_handled_have_their_view(recording: Recording) -> None:
    view = '{"labels": ["gpus"], "slice": {"offset": 0, "sizes": [2], "strides": [1]}}'
    query = "select endpoint, view_json, shape_json, count(*) from sent_messages where actor = 'worker' group by 1, 2"
    assert _rows(f"{query} order by 1, 2", recording) == [
        ("hang", None, None, 1), ("raises", None, None, 1), ("relay", None, None, 1),
        ("step", None, None, 1), ("step", view, view, 5),
    ]  # fmt: skip


@each_engine
def test_metrics_have_values_and_sums(engine: str, recording: Recording) -> None:
    values = "max(total), sum(sum_f64), min(attributes_json), min(is_monotonic), min(temporality), count(sum_u64)"
    query = f"select {values} from metric_sums where name = 'samples' group by pid"
    assert sorted(_rows(query, recording, engine)) == [(n, n, '{"split":"train"}', 1, "delta", 0) for n in (40, 48)]
    query = "select count(value_f64), count(*), min(attributes_json) from metric_gauges where name = 'loss'"
    assert _rows(query, recording, engine) == [(9, 11, "{}")]  # SQL has NULL for values that are not numbers
    assert _rows("select count(*) from metric_gauges where name = 'samples'", recording, engine) == [(0,)]


@each_engine
def test_metrics_have_the_meter_the_unit_and_the_process(engine: str, recording: Recording) -> None:
    query = """
        select distinct scope_name, unit, json_extract_string(resource_attributes_json, '$."monarch.process"')
        from metric_sums where name = 'samples' order by 3
    """
    if engine == "sqlite":
        query = query.replace("json_extract_string", "json_extract")
    assert _rows(query, recording, engine) == [("m", "ms", f"gpus {rank} of trainers") for rank in (0, 1)]


@each_engine
def test_histograms_have_a_row_for_each_value(engine: str, recording: Recording) -> None:
    query = "select scope_name, count, min_f64, max_f64, bounds_json, bucket_counts_json from metric_histograms"
    [(*values, bounds, counts)] = _rows(f"{query} where name = 'wait' and sum_f64 = 0.25", recording, engine)
    assert values == ["other", 1, 0.25, 0.25]
    edges = [-math.inf, *json.loads(bounds), math.inf]
    [place] = [at for at, count in enumerate(json.loads(counts)) if count]
    assert edges[place] < 0.25 <= edges[place + 1] and len(edges) == len(json.loads(counts)) + 1


def test_logs_are_the_kept_output(recording: Recording) -> None:
    assert ("stdout", "hangs") in _rows("select stream, text from logs", recording)


def test_stacks_are_read_now(recording: Recording) -> None:
    rows = _rows("select process, function, file from stacks where function = 'hang' and problem is null", recording)
    assert [(process, function) for process, function, _ in rows] == [("gpus 1 of trainers", "hang")]
    assert rows[0][2].endswith("traced_program.py")


@each_engine
def test_answer_names_what_was_read_and_what_not(engine: str, recording: Recording) -> None:
    result = sql.answer('select 1 as "1"', recording, engine=engine)
    assert [each.label for each in result.processes][1:] == [
        "gpus 0 of trainers",
        "gpus 1 of trainers",
        "victims 0 of victims",
    ]
    assert result.unread == [] and not result.is_truncated and list(result) == [{"1": 1}]
    partial = Recording(recording.programs, [], [Unread(7, "", "gone")], recording.now_ns, 0)
    assert sql.answer("select count(*) from events", partial, engine=engine).unread == ["pid 7: gone"]


@each_engine
def test_answer_names_the_hosts_that_answered_and_those_that_did_not(
    engine: str, recording: Recording, tmp_path: Path
) -> None:
    made = replace(recording, hosts=[AskedHost("this machine")], unread=[Unread(7, "", "gone")])
    there = recording_of({"": [1]}, [])
    there.seen_from("a[0] (gpu-1)", 0)
    made = replace(made, programs=[*made.programs], processes=[*made.processes])
    made.add(there)
    made.hosts.append(AskedHost("b[0] (gpu-2)", "it is asleep"))
    made.unread.append(Unread(0, "b[0] (gpu-2)", "it is asleep"))
    query = "select * from hosts"
    rows = [("this machine", 1, None), ("a[0] (gpu-1)", 1, None), ("b[0] (gpu-2)", 0, "it is asleep")]
    sql.save(made, str(tmp_path / "saved"))
    with HistoryWriter(tmp_path / "kept", 3600, 1 << 30) as writer:
        writer.append(made)
    answers = [sql.answer(query, made, engine=engine)]
    answers += [sql.answer_from(query, str(tmp_path / name), engine) for name in ("saved", "kept")]
    for result in answers:
        assert result.rows == rows
        assert [tuple(each.values()) for each in result.as_json()["hosts"]] == rows
        assert cli_sql.summary(result) == (
            "(3 rows; 5 processes read; answered: this machine, a[0] (gpu-1); "
            "no answer from b[0] (gpu-2): it is asleep; not read: pid 7: gone)"
        )


def test_host_that_answers_no_more_for_logs_is_named(recording: Recording) -> None:
    class Gone(ThisMachine):
        is_of_hosts = True

        def lines(self, *_: object) -> Lines:
            raise LookupError("host a[0] has not answered: it is asleep")

    made = recording_of({"": [1]}, [])
    made.seen_from("a[0]", 0)
    result = sql.answer("select count(*) from logs", made, Gone(None))
    assert result.rows == [(0,)] and result.hosts == [AskedHost("a[0]", "host a[0] has not answered: it is asleep")]


WRITES = [
    "insert into actors (id) values (1)",
    "delete from actors",
    "update actors set id = 1",
    "drop table actors",
    "create table t (x)",
    "create temp table t (x)",
    "attach ':memory:' as x",
    "pragma query_only",
    "select * from pragma_database_list",
    "vacuum",
    "begin",
    "analyze",
    "select load_extension('x')",
    "explain select 1; drop table actors",
    "with x as (select 1) delete from actors",
]


@pytest.mark.parametrize("query", WRITES)
def test_query_that_does_more_than_read_is_refused(query: str, recording: Recording) -> None:
    with pytest.raises(QueryError, match=r"a query only reads|one statement at a time"):
        sql.answer(query, recording)


@needs_duckdb
@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("select wrong from actors", '"wrong" not found in FROM clause!'),
        ("select wrong from actors", "; actors has the columns id, timestamp_us, mesh_id, rank"),
        ("select * from wrong", "name wrong does not exist!"),
        ("select * from wrong", "; the tables are actors, actor_status_events, meshes"),
        ("selec 1", 'at or near "selec"; the tables are'),
    ],
)
def test_wrong_query_in_duckdb_is_one_line_with_the_columns(query: str, text: str, recording: Recording) -> None:
    with pytest.raises(QueryError) as caught:
        sql.answer(query, recording, engine="duckdb")
    assert text in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("select wrong from actors", "no such column: wrong; actors has the columns id, timestamp_us, mesh_id, rank"),
        ("select * from wrong", "no such table: wrong; the tables are actors, actor_status_events, meshes"),
        ("selec 1", 'near "selec": syntax error; the tables are'),
        ("", "the query is empty"),
        ("select 1; select 2", "one statement at a time"),
        ("select '\0'", "; the tables are"),
        ("select zeroblob(100000000)", "too big"),
    ],
)
def test_wrong_query_is_one_line_with_the_columns(query: str, text: str, recording: Recording) -> None:
    with pytest.raises(QueryError) as caught:
        sql.answer(query, recording)
    assert text in str(caught.value) and "\n" not in str(caught.value)
    assert isinstance(caught.value, errors.MonarchError)


ENDLESS = "with recursive n(x) as (select 1 union all select x + 1 from n) select {} from n"


@each_engine
def test_long_query_is_ended(engine: str, recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "TIME_LIMIT_S", 0.05)
    with pytest.raises(QueryError, match=r"longer than 0\.05 s"):
        sql.answer(ENDLESS.format("count(*)"), recording, engine=engine)


@each_engine
def test_answer_has_a_bounded_number_of_rows(
    engine: str, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(sql, "MAX_ROWS", 10)
    result = sql.answer(ENDLESS.format("x"), recording, engine=engine)
    assert [row["x"] for row in result] == list(range(1, 11)) and result.is_truncated


def test_command_prints_a_table_or_json(running: subprocess.Popen[str]) -> None:
    query = "select label, 9e999 as huge, x'0102' as blob from processes limit 1"
    done = _command(query, str(running.pid))
    assert done.returncode == 0, done.stderr
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["label", "huge", "blob"], ["program", "traced_program.py", "inf", "b'\\x01\\x02'"],
    ]  # fmt: skip
    assert done.stderr == "(1 rows; 4 processes read; answered: this machine)\n"
    found = json.loads(_command(query, str(running.pid), "--json").stdout)
    assert found["columns"] == ["label", "huge", "blob"] and found["rows"] == [
        ["program traced_program.py", "inf", "0102"]
    ]
    assert [each["label"] for each in found["processes"]][1:] == [
        "gpus 0 of trainers",
        "gpus 1 of trainers",
        "victims 0 of victims",
    ]
    assert found["hosts"] == [{"name": "this machine", "answered": True, "reason": None}]
    assert found["not_read"] == [] and found["truncated"] is False
    wrong = _command("select wrong from spans", str(running.pid))
    assert wrong.returncode == 1 and wrong.stdout == "" and wrong.stderr.count("\n") == 1


@needs_duckdb
def test_command_asks_duckdb(running: subprocess.Popen[str]) -> None:
    query = "select list(label order by label)[:2] as labels, make_timestamp(0) as at from processes where pid > 1"
    found = json.loads(_command(query, str(running.pid), "--engine", "duckdb", "--json").stdout)
    assert found["rows"] == [[["gpus 0 of trainers", "gpus 1 of trainers"], "1970-01-01T00:00:00"]]
    assert len(found["processes"]) == 4 and found["not_read"] == []
    done = _command(query, str(running.pid), "--engine", "duckdb")
    assert done.stdout.splitlines()[1].split() == ["['gpus", "0", "of", "trainers',", "'gpus", "1", "of", "trainers']",
                                                   "1970-01-01", "00:00:00"]  # fmt: skip
    assert done.stderr == "(1 rows; 4 processes read; answered: this machine)\n"


@pytest.mark.parametrize("code", [0, 1])
def test_command_leaves_the_garbage_collector_on(code: int, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sql", "select nothing" if code else "select 1", "--from", str(saved)]) == code
    assert gc.isenabled()
    assert capsys.readouterr().out == ("" if code else "1\n1\n")


def test_program_asks_about_itself_and_about_others(running: subprocess.Popen[str], tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from monarch_backend.telemetry import query, span\n"
        "others = query('select pid from processes')\n"
        "from monarch_backend.actor import this_proc\n"
        "this_proc()\n"
        "with span('mine'):\n"
        '    [row] = query("select name, status from spans")\n'
        "print(row, len(query('select 1 from spans', sys.argv[1])) > 10)\n"
        "print(int(sys.argv[1]) in [row['pid'] for row in others])\n"
        "try: query('select 1', 'nothing-of-this-name')\n"
        "except LookupError: print('unknown')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(running.pid)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "{'name': 'mine', 'status': 'open'} True\nTrue\nunknown\n", done.stderr


def test_all_rows_of_an_answer_are_one_transaction(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    connect, run = sqlite3.connect, list[str]()

    def traced(*args: Any, **options: Any) -> sqlite3.Connection:
        made: sqlite3.Connection = connect(*args, **options)
        made.set_trace_callback(run.append)
        return made

    monkeypatch.setattr(sqlite3, "connect", traced)
    sql.answer("select count(*) from messages", recording)
    inserts = [number for number, line in enumerate(run) if line.startswith("insert into messages")]
    assert len(inserts) > 1 and run.index("begin") < inserts[0] and inserts[-1] < run.index("commit")


def test_result_iterates_over_rows_as_dictionaries() -> None:
    result = QueryResult(["a", "b"], [(1, 2), (3, math.inf)], [], [], is_truncated=False)
    assert list(result) == [{"a": 1, "b": 2}, {"a": 3, "b": math.inf}] and len(result) == 2
    assert telemetry.QueryResult is QueryResult


def test_page_has_each_table_with_its_columns_and_an_example() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operate" / "telemetry.md").read_text()
    rows = {}
    for names, text in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*) \|$", page, re.MULTILINE):
        rows.update(dict.fromkeys(re.findall(r"`(\w+)`", names), text))
    for table, columns in COLUMNS.items():
        missing = set(columns) - set(re.findall(r"\w+", rows[table])) - {"id", "timestamp_us", "pid", "process"}
        assert not missing, (table, missing)
        assert re.search(rf"^select .*\bfrom {table}\b", page, re.MULTILINE), table


@pytest.mark.parametrize("version", [0, 1])  # 1: states have no flag of async messages
def test_recording_of_another_release_is_named_as_unread(version: int, running: subprocess.Popen[str]) -> None:
    layout = _native.recording_layout
    about = {"version": version, "slot_bytes": layout["slot_bytes"], "slots": 1, "owner": 1, "program": "old"}
    header = json.dumps(about).encode().ljust(_native.recording_layout["header_bytes"])
    code = (
        f"import os; descriptor = os.memfd_create({AREA_NAME!r}); os.pwrite(descriptor, {header!r}, 0)\n"
        "print('up', flush=True); input()"
    )
    with _python(code) as other:
        assert other.stdout is not None and other.stdout.readline() == "up\n"
        unread = [each for each in program_recording.read(None).unread if each.pid == other.pid]
        assert len(unread) == 1 and "of another release" in unread[0].reason
        assert program_recording.read(str(running.pid)).unread == []


@contextlib.contextmanager
def _python(code: str) -> Iterator[subprocess.Popen[str]]:
    """Run code in a process that is killed at the end of the block."""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_process_that_records_nothing_is_named_as_unread(running: subprocess.Popen[str]) -> None:
    with _python("input()") as other:
        recording = program_recording.read_pids([running.pid, other.pid])
        assert [each.pid for each in recording.unread] == [other.pid]
    assert len(recording.processes) == 4


@each_engine
def test_large_answer_is_cut(engine: str, recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "MAX_ANSWER_BYTES", 10_000)
    numbers = "with recursive c(x) as (select 1 union all select x + 1 from c where x < 1000)"
    text = "printf('%.1000c', 'x')" if engine == "sqlite" else "repeat('x', 1000)"
    result = sql.answer(f"{numbers} select {text} from c", recording, engine=engine)
    assert len(result.rows) == 10 and result.is_truncated


@pytest.mark.skipif(sys.version_info < (3, 11), reason="sqlite3 has no limits there")
def test_values_are_small_enough_for_the_time_limit(recording: Recording) -> None:
    begun = time.monotonic()
    with pytest.raises(sql.QueryError):
        sql.answer("select instr(zeroblob(16000000), zeroblob(8000000) || x'01')", recording)
    longest = sql.MAX_VALUE_BYTES
    assert sql.answer(f"select instr(zeroblob({longest}), zeroblob({longest // 2}) || x'01')", recording).rows == [(0,)]
    assert time.monotonic() < begun + sql.TIME_LIMIT_S


def test_file_with_a_view_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "evil.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as made:
        endless = "with recursive c(x) as (select 1 union all select x + 1 from c) select x, x, x, x from c"
        made.execute(f"create view processes as {endless}")
    with pytest.raises(OSError, match="is no file of monarch-backend export sqlite: it has 'processes'"):
        sql.answer_from("select 1", str(path))
