"""Durable history: what programs have recorded, look by look, in SQLite files of a folder.

The rings of processes keep their last events and end with their program. A history gets the new events at each look. It
has the recording itself and not the tables of queries, so that rows of several looks still refer to each other.

Each look is one transaction: a writer that is killed leaves whole looks. A new writer goes on after the last event of
each process, by the machine's boot, the pid and the start of the process. For a job's host on another machine, its name
is in place of the boot. Times are nanoseconds since 1970.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import sqlite3
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from monarch_backend._telemetry.kinds import SlotState
from monarch_backend._telemetry.program_recording import AskedHost, ProcessRecording, Recording, Unread
from monarch_backend._telemetry.programs import Process, Program
from monarch_backend._telemetry.reader import ALL_EVENTS, Activity, EventFilter, RecordedEvent, RecordedProcess
from monarch_backend._telemetry.unseen_processes import MAX_UNSEEN, with_unseen

MAX_EVENTS = 1_000_000
"""Events that a query reads from a history. Older ones are left out, and the answer says so."""

FILES = 8
"""A history has about this number of full files. The oldest one is deleted at a time."""

_PREFIX, _SUFFIX = "history-", ".sqlite"
_BEGUN = re.compile(rf"{_PREFIX}\d{{20}}{re.escape(_SUFFIX)}")  # a user's copies have other names
_BUSY_S = 10.0  # waiting for the other side's transaction
_SCHEMA = """
    create table if not exists process (
        id integer primary key, boot text, pid integer, started_ns integer, started_unix_ns integer, label text,
        parent integer, program_pid integer, command text, identity integer, is_alive integer, exit_code integer,
        memory_bytes integer, cpu_s real, seen_unix_ns integer, overwritten integer, activities text, names text,
        ended_unix_ns integer, restarts integer,
        unique (boot, pid, started_ns)
    );
    create table if not exists event (
        process integer, number integer, end_unix_ns integer, duration_ns integer, kind integer, status integer,
        thread integer, name text, detail text, reference integer, value integer, trace integer,
        primary key (process, number)
    ) without rowid;
    create table if not exists look (unix_ns integer, not_read text);
"""
_FORMAT = 1
"""Format of a file, its ``user_version``. Files of earlier releases have 0. Raise it when they cannot read new ones."""

_LATER_COLUMNS = "ended_unix_ns", "restarts"  # files of earlier releases lack them
_COLUMNS = (
    "boot, pid, started_ns, started_unix_ns, label, parent, program_pid, command, identity, is_alive, exit_code, "
    "memory_bytes, cpu_s, seen_unix_ns, overwritten, activities, names, ended_unix_ns, restarts"
)
_UPSERT = f"""
    insert into process ({_COLUMNS}) values ({", ".join("?" * 19)})
    on conflict do update set label = excluded.label, identity = excluded.identity, is_alive = excluded.is_alive,
        exit_code = excluded.exit_code, memory_bytes = excluded.memory_bytes, cpu_s = excluded.cpu_s,
        seen_unix_ns = excluded.seen_unix_ns, overwritten = overwritten + excluded.overwritten,
        activities = excluded.activities, names = excluded.names, ended_unix_ns = excluded.ended_unix_ns,
        restarts = excluded.restarts
    returning id
"""

_ACTIVITY_FIELDS = 12
"""Fields of an activity in a file. Earlier releases cannot read more, and ``is_async`` is of use only while it runs."""

_OF_HOST = "host "
"""What the name of a host on another machine follows in the column ``boot``. No boot begins with it."""

Key = tuple[str, int, int]
"""A process: the boot of its machine or its host, its pid, and its start on the clock of its machine."""


@dataclass(frozen=True)
class Appended:
    """What a look has added: events, and those that were overwritten before it."""

    events: int
    overwritten: int


class HistoryWriteError(OSError):
    """A history could not be written: file, reason, and what to do. A later try may succeed."""


class HistoryWriter:
    """Writer of a history, the only one of its folder. Close it, or use it in a ``with`` block.

    Files are deleted whose events are all older than ``keep_s`` seconds, and the oldest ones of more than
    ``keep_bytes``. Raises OSError, also if another process writes to the folder.
    """

    def __init__(self, folder: str | Path, keep_s: float, keep_bytes: int) -> None:
        self._folder, self._keep_s, self._keep_bytes = Path(folder), keep_s, keep_bytes
        with _explained(self._folder):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self._folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise OSError(f"another process writes the history in {folder}: name another folder") from None
            self._boot = _boot()
            self._last = self._last_numbers()
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> HistoryWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._lock)

    def _last_numbers(self) -> dict[tuple[int, int], int]:
        """Return the numbers of the last events of the processes of this boot and of other hosts, in any file."""
        last: dict[tuple[int, int], int] = {}
        for path in _files(self._folder):
            try:
                with _opened(path) as connection:
                    for pid, started, number in connection.execute(
                        "select pid, started_ns, max(number) from process join event on process = id "
                        "where boot = ? or boot like ? || '%' group by id",
                        (self._boot, _OF_HOST),
                    ):
                        last[pid, started] = max(number, last.get((pid, started), 0))
            except sqlite3.Error as error:
                raise OSError(f"{path} is no file of monarch-backend export history: {error}") from None
        return last

    @property
    def after(self) -> dict[tuple[int, int], int]:
        """The numbers of the last events that the history has, as `EventFilter` has them."""
        return dict(self._last)

    def append(self, recording: Recording) -> Appended:
        """Add the events of a recording that was read with `after`.

        Raises HistoryWriteError, for example on a full disk, and adds nothing. The next call may add the same events.
        """
        now = recording.now_ns + recording.wall_offset_ns
        with _explained(self._folder):
            path = self._file(now)
        count = overwritten = 0
        with _explained(path), _opened(path) as connection:
            connection.execute("begin immediate")
            for each in recording.processes:
                row = self._process_row(each, recording.wall_offset_ns, now)
                [(number,)] = connection.execute(_UPSERT, row).fetchall()
                connection.executemany(
                    "insert or ignore into event values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (_event_row(number, event, recording.wall_offset_ns) for event in each.recorded.events),
                )
                count += len(each.recorded.events)
                overwritten += each.recorded.lost
            connection.execute("delete from look")
            answers = {name: [astuple(each) for each in getattr(recording, name)] for name in ("unread", "hosts")}
            connection.execute("insert into look values (?, ?)", (now, json.dumps(answers)))
            connection.execute("commit")
        last = {key: self._last[key] for each in recording.processes if (key := each.recorded.key) in self._last}
        last |= {
            each.recorded.key: each.recorded.events[-1].number for each in recording.processes if each.recorded.events
        }
        self._last = with_unseen(last, self._last, MAX_UNSEEN)  # each read sends it to all hosts
        self.delete_old()
        return Appended(count, overwritten)

    def _process_row(self, each: ProcessRecording, wall_offset_ns: int, now: int) -> tuple[Any, ...]:
        recorded, process = each.recorded, each.process
        is_alive = recorded.state == SlotState.ALIVE
        activities = [
            (*astuple(activity)[:5], activity.since_ns + wall_offset_ns, *astuple(activity)[6:_ACTIVITY_FIELDS])
            for activity in recorded.activities
        ]
        return (
            _OF_HOST + each.host if each.host else self._boot, *recorded.key, recorded.started_ns + wall_offset_ns,
            each.label, process.parent, each.program.pid, each.program.command, _signed(recorded.identity), is_alive,
            None if is_alive else recorded.exit_code, process.memory, process.cpu_seconds, now, recorded.lost,
            json.dumps(activities), json.dumps(recorded.names),
            recorded.ended_ns + wall_offset_ns if recorded.ended_ns else 0, recorded.restarts,
        )  # fmt: skip

    def _file(self, now: int) -> Path:
        """Return the file for the next look: the last one, or a new one if that is full or covers its share of time."""
        files = _files(self._folder)
        if files:
            newest = files[-1]
            age_s = (now - _begun_ns(newest)) / 1e9
            if 0 <= age_s < self._keep_s / FILES and newest.stat().st_size < self._keep_bytes / FILES:
                return newest
            now = max(now, _begun_ns(newest) + 1)  # the clock may have been set back
        path = self._folder / f"{_PREFIX}{now:020}{_SUFFIX}"
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        return path

    def delete_old(self) -> None:
        """Delete the files that are not kept any more. `append` does this, too: call it while no program runs.

        Raises HistoryWriteError.
        """
        with _explained(self._folder):
            files = _files(self._folder)
            sizes = [each.stat().st_size for each in files]
            oldest = time.time_ns() - int(self._keep_s * 1e9)
            for number, path in enumerate(files):
                # The events of a file ended before the next one was begun. The last one may be written to.
                is_large = path != files[-1] and sum(sizes[number:]) > self._keep_bytes
                if is_large or (_begun_ns(path) < oldest and self._ended_ns(files, number) < oldest):
                    path.unlink()
                else:
                    break

    def _ended_ns(self, files: list[Path], number: int) -> int:
        """Return a time after all events of a file: that of the next file, or of its last look."""
        if number + 1 < len(files):
            return _begun_ns(files[number + 1])
        with _opened(files[number]) as connection:
            [(last,)] = connection.execute("select max(unix_ns) from look")
        return int(last or _begun_ns(files[number]))


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn a failure at a file or folder into a HistoryWriteError."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        number = getattr(error, "errno", None)
        reason = getattr(error, "strerror", None) or str(error)
        cure = ""
        if number in (errno.ENOSPC, errno.EDQUOT) or "full" in reason:
            cure = ": free space on its disk, or lower --keep-bytes"
        elif number in (errno.EACCES, errno.EPERM, errno.EROFS) or "readonly" in reason or "unable to open" in reason:
            cure = ": let this user write there, or name another folder"
        raise HistoryWriteError(f"{path} cannot be written: {reason}{cure}") from None


def read(folder: str | Path, wanted: EventFilter = ALL_EVENTS) -> Recording:
    """Return a recording of what a history has, with the wanted events, at most `MAX_EVENTS` of the newest ones.

    ``wanted.since_ns`` is in nanoseconds since 1970; its numbers ``after`` and ``limit`` have no effect.
    Raises OSError if the folder is not a history.
    """
    files = _files(Path(folder))
    if not files:
        raise OSError(
            f"{folder} is no folder of monarch-backend export history: it has no files {_PREFIX}*{_SUFFIX}. All of a "
            "history are deleted if no program has run within its --keep-hours"
        )
    rows: dict[Key, dict[str, Any]] = {}
    events: dict[Key, list[RecordedEvent]] = {}
    overwritten: dict[Key, int] = {}
    kept: dict[Key, int] = {}
    looked_at, answers, left = 0, "{}", MAX_EVENTS
    is_cut = False
    for path in reversed(files):  # the newest one has the last state of a process
        try:
            with _opened(path) as connection:
                connection.execute("begin")
                for unix_ns, text in connection.execute("select unix_ns, not_read from look"):
                    if unix_ns > looked_at:
                        looked_at, answers = unix_ns, text
                keys = _read_processes(connection, path.name, rows, overwritten)
                for process, count in connection.execute("select process, count(*) from event group by process"):
                    kept[keys[process]] = kept.get(keys[process], 0) + count
                found = _read_events(connection, wanted, left + 1)
        except sqlite3.Error as error:
            if not path.exists():  # the writer has deleted it meanwhile, with all older ones
                break
            raise OSError(f"{path} is no file of monarch-backend export history: {error}") from None
        is_cut = is_cut or len(found) > left
        for process, *fields in found[:left]:
            events.setdefault(keys[process], []).append(_event(fields))
        left -= len(found[:left])
    recording = _recording(rows, events, kept, overwritten, looked_at)
    of_last_look = json.loads(answers)
    if isinstance(of_last_look, list):  # a file of an earlier release
        of_last_look = {"unread": of_last_look}
    recording.unread += [Unread(*each) for each in of_last_look.get("unread", [])]
    recording.hosts += [AskedHost(*each) for each in of_last_look.get("hosts", [])]
    if is_cut:
        reason = f"a query reads its newest {MAX_EVENTS:,} events: ask with a condition on timestamp_us or kind"
        recording.unread.append(Unread(0, "older events of the history", reason))
    return recording


def _read_processes(
    connection: sqlite3.Connection, file: str, rows: dict[Key, dict[str, Any]], overwritten: dict[Key, int]
) -> dict[int, Key]:
    cursor = connection.execute("select * from process order by id")
    names = [each[0] for each in cursor.description]
    keys = {}
    for values in cursor:
        row = {**dict(zip(names, values, strict=True)), "file": file}
        key = keys[row["id"]] = row["boot"], row["pid"], row["started_ns"]
        rows.setdefault(key, row)
        overwritten[key] = overwritten.get(key, 0) + row["overwritten"]
    return keys


def _read_events(connection: sqlite3.Connection, wanted: EventFilter, limit: int) -> list[tuple[Any, ...]]:
    condition, values = ["1"], list[Any]()
    if wanted.kinds:
        condition.append(f"kind in ({', '.join('?' * len(wanted.kinds))})")
        values += [int(kind) for kind in wanted.kinds]
    if wanted.failed:
        condition.append("status != 0")
    always = ", ".join(str(int(kind)) for kind in wanted.always)
    if wanted.since_ns:
        condition.append(f"(end_unix_ns > ? or kind in ({always}))")
        values.append(wanted.since_ns)
    if wanted.pids is not None:
        pids = ", ".join(str(pid) for pid in wanted.pids)
        condition.append(f"(process in (select id from process where pid in ({pids})) or kind in ({always}))")
    query = f"select * from event where {' and '.join(condition)} order by end_unix_ns desc limit ?"
    return connection.execute(query, [*values, limit]).fetchall()


def _recording(
    rows: dict[Key, dict[str, Any]], events: dict[Key, list[RecordedEvent]], kept: dict[Key, int],
    overwritten: dict[Key, int], now: int,
) -> Recording:  # fmt: skip
    programs: dict[tuple[str, int, str], Program] = {}
    processes = list[ProcessRecording]()
    for key, row in sorted(rows.items(), key=lambda item: (item[1]["file"], item[1]["id"])):
        is_alive = bool(row["is_alive"]) and row["seen_unix_ns"] == now
        program_key = row["boot"], row["program_pid"], row["command"]
        host = row["boot"].removeprefix(_OF_HOST) if row["boot"].startswith(_OF_HOST) else ""
        program = programs.setdefault(program_key, Program(row["program_pid"], row["command"], [], host))
        process = Process(
            row["pid"], row["label"], "running" if is_alive else "ended", row["parent"],
            (now - row["started_unix_ns"]) / 1e9, row["exit_code"], row["memory_bytes"], row["cpu_s"], [],
        )  # fmt: skip
        program.processes.append(process)
        own = sorted({event.number: event for event in events.get(key, [])}.values())
        recorded = RecordedProcess(
            index=len(processes), pid=row["pid"], label=row["label"],
            state=SlotState.ALIVE if is_alive else SlotState.ENDED, started_ns=row["started_unix_ns"],
            exit_code=row["exit_code"], identity=_unsigned(row["identity"]),
            activities=[Activity(*fields) for fields in json.loads(row["activities"])],
            events=own, kept=kept.get(key, 0), lost=overwritten[key], names=json.loads(row["names"]),
            ended_ns=row.get("ended_unix_ns") or 0, restarts=row.get("restarts") or 0,
        )  # fmt: skip
        processes.append(ProcessRecording(recorded, program, process))
    return Recording(list(programs.values()), processes, [], now, 0, is_past=True)


def _event_row(process: int, event: RecordedEvent, wall_offset_ns: int) -> tuple[Any, ...]:
    return (
        process, event.number, event.end_ns + wall_offset_ns, event.duration_ns, event.kind, event.status, event.thread,
        event.name, event.detail, _signed(event.reference), _signed(event.value), _signed(event.trace),
    )  # fmt: skip


def _event(fields: list[Any]) -> RecordedEvent:
    return RecordedEvent._make([*fields[:-3], *map(_unsigned, fields[-3:])])


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _unsigned(number: int) -> int:
    return number & ((1 << 64) - 1)


def _boot() -> str:
    """Return an identity of the machine's boot: pids and starts are unique within it."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _files(folder: Path) -> list[Path]:
    """Return the files of a history, the oldest one first."""
    return sorted(path for path in folder.glob(f"{_PREFIX}*{_SUFFIX}") if _BEGUN.fullmatch(path.name))


def _begun_ns(path: Path) -> int:
    return int(path.name[len(_PREFIX) : -len(_SUFFIX)])


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a file of a history. One that a killed writer has left empty gets its tables.

    Raises OSError for a file of a later release that this one cannot read.
    """
    # Also readers open it for writing: after a killed writer, SQLite undoes the transaction that was not complete.
    name = f"file:{urllib.parse.quote(str(path.absolute()))}?mode=rw"
    with contextlib.closing(sqlite3.connect(name, timeout=_BUSY_S, isolation_level=None, uri=True)) as connection:
        connection.execute("pragma trusted_schema = off")
        [(version,)] = connection.execute("pragma user_version")
        if version > _FORMAT:
            raise OSError(
                f"{path} has format {version} of a later release of monarch_backend, and this one reads at most "
                f"{_FORMAT}: use that release, or name another folder"
            )
        if not connection.execute("select 1 from sqlite_master").fetchone():
            connection.executescript(f"begin immediate; {_SCHEMA} pragma user_version = {_FORMAT}; commit;")
        elif _missing_columns(connection):
            _add_columns(connection)
        yield connection


def _missing_columns(connection: sqlite3.Connection) -> list[str]:
    """Return the columns that a file of an earlier release lacks."""
    found = {name for (name,) in connection.execute("select name from pragma_table_info('process')")}
    return [name for name in _LATER_COLUMNS if name not in found]


def _add_columns(connection: sqlite3.Connection) -> None:
    """Add the missing columns, all or none. A file that cannot be written stays as it is: readers do without them."""
    try:
        connection.execute("begin immediate")
        for name in _missing_columns(connection):  # another process may have added the columns
            connection.execute(f"alter table process add column {name} integer")
        connection.execute("commit")
    except sqlite3.OperationalError:
        if connection.in_transaction:
            connection.execute("rollback")
