"""Log collector with real pipes and writers: what reaches the screen and the files, when, and which pipes stay open."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_backend._logs import log_collector, mesh_log
from monarch_backend._logs.log_collector import LogCollector, LogOptions, MeshLog
from monarch_backend._logs.worker_logging import install_worker_logging
from monarch_backend._telemetry.log_history import LogHistory

FOREVER = 3600.0
may_fork = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


class Screen(io.StringIO):
    """A stdout whose output a test can await, and whose writes can block."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = threading.Condition()
        self.open = threading.Event()
        self.open.set()
        self.stuck = threading.Event()

    def write(self, text: str) -> int:
        if not self.open.is_set():
            self.stuck.set()
            assert self.open.wait(60)
        with self.moved:
            self.moved.notify_all()
            return super().write(text)

    def wait_for(self, text: str) -> None:
        with self.moved:
            assert self.moved.wait_for(lambda: text in self.getvalue(), 60), f"no {text!r} in {self.getvalue()!r}"


class Worker:
    """The write ends of one rank's stdout and stderr."""

    def __init__(self, collector: LogCollector, mesh: MeshLog, rank: int) -> None:
        (out, self.out), (err, self.err) = os.pipe(), os.pipe()
        self.reads = out, err
        collector.add(mesh, rank, out, err)

    def say(self, text: str | bytes, *, err: bool = False) -> None:
        data = memoryview(text.encode() if isinstance(text, str) else text)
        while data:
            data = data[os.write(self.err if err else self.out, data) :]

    def end(self) -> None:
        if self.out >= 0:
            os.close(self.out)
            os.close(self.err)
            self.out = self.err = -1


def _label(ranks: Iterable[int]) -> str:
    return "gpus " + ",".join(map(str, ranks))


def _mesh(name: str = "m", **options: Any) -> MeshLog:
    return MeshLog(name, _label, LogOptions(**{"aggregate_window_sec": FOREVER, **options}))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace ``sys`` in the collector: pytest restores its own sys.stdout between a fixture and the test."""
    terminal = SimpleNamespace(stdout=Screen(), stderr=Screen())
    monkeypatch.setattr(log_collector, "sys", terminal)
    return terminal


@pytest.fixture
def screen(terminal: SimpleNamespace) -> Screen:
    """Use one screen as both streams of the controller."""
    terminal.stderr = terminal.stdout
    return terminal.stdout


@pytest.fixture
def collector() -> Iterator[LogCollector]:
    collector = LogCollector()
    yield collector
    assert collector.close()
    assert "monarch-logs" not in {thread.name for thread in threading.enumerate()}


@pytest.fixture
def workers(collector: LogCollector) -> Iterator[Callable[[MeshLog, int], list[Worker]]]:
    made: list[Worker] = []

    def make(mesh: MeshLog, count: int) -> list[Worker]:
        new = [Worker(collector, mesh, rank) for rank in range(count)]
        made.extend(new)
        return new

    yield make
    for worker in made:
        worker.end()


Workers = Callable[[MeshLog, int], list[Worker]]


def test_line_of_all_ranks_is_shown_once_at_once(screen: Screen, workers: Workers) -> None:
    for worker in workers(_mesh(), 8):
        worker.say("ready\n")
    screen.wait_for("\n")  # long before the window's end
    assert screen.getvalue() == "[gpus 0,1,2,3,4,5,6,7] ready\n"


def test_line_of_some_ranks_is_shown_once_after_the_window(screen: Screen, workers: Workers) -> None:
    mesh = _mesh(aggregate_window_sec=0.2)
    team = workers(mesh, 4)
    for turn in range(10):
        said, began = f"almost {turn}\n", time.monotonic()
        for worker in team[1:3]:
            worker.say(said)
        screen.wait_for(said)
        assert time.monotonic() - began >= 0.2
        if f"[gpus 1] {said}" not in screen.getvalue():  # otherwise the machine was too slow between the two writes
            break
    assert screen.getvalue().endswith(f"[gpus 1,2] {said}")


def test_stdout_and_stderr_stay_separate(
    capsys: pytest.CaptureFixture[str], collector: LogCollector, workers: Workers
) -> None:
    for worker in workers(_mesh(), 2):
        worker.say("to out\n")
        worker.say("to err\n", err=True)
    assert collector.flush()
    assert capsys.readouterr() == ("[gpus 0,1] to out\n", "[gpus 0,1] to err\n")


def test_flush_writes_all_lines_of_one_mesh_only(screen: Screen, collector: LogCollector, workers: Workers) -> None:
    ours, theirs = _mesh("ours"), _mesh("theirs")
    (worker, _), (other, _) = workers(ours, 2), workers(theirs, 2)
    worker.say("line\nno line end")
    other.say("patience\n")
    assert collector.flush(ours)
    assert screen.getvalue() == "[gpus 0] line\n[gpus 0] no line end\n"
    assert collector.flush()
    assert screen.getvalue() == "[gpus 0] line\n[gpus 0] no line end\n[gpus 0] patience\n"


@may_fork
def test_last_lines_of_a_killed_process_precede_the_report(screen: Screen, collector: LogCollector) -> None:
    mesh = _mesh(lines_per_sec=None)
    said = "".join(f"line {i}\n" for i in range(3000))  # less than a pipe holds
    (out, w_out), (err, w_err) = os.pipe(), os.pipe()
    collector.add(mesh, 5, out, err)
    pid = os.fork()
    if not pid:
        os.write(w_out, said.encode())
        os.write(w_err, b"terminate called after throwing\nfatal: no line end")
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(w_out)
    os.close(w_err)
    os.waitpid(pid, 0)
    assert collector.flush(mesh)
    print("report", file=screen)
    lines = screen.getvalue().splitlines()
    assert lines.pop() == "report"
    assert sorted(lines) == sorted(
        f"[gpus 5] {line}" for line in [*said.splitlines(), "terminate called after throwing", "fatal: no line end"]
    )
    assert collector.tail(mesh, 5) == ["terminate called after throwing", "fatal: no line end"]
    assert collector.tail(mesh, 6) == []


def test_a_process_that_goes_on_writing_does_not_hold_flush_up(
    screen: Screen, collector: LogCollector, workers: Workers
) -> None:
    (worker,) = workers(_mesh(lines_per_sec=1000, burst=1000), 1)
    worker.say("first\n")
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            worker.say("more\n" * 100)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(20):
            assert collector.flush(timeout=30)
    finally:
        stop.set()
        thread.join()
    assert screen.getvalue().startswith("[gpus 0] first\n")


def test_output_of_a_shell_program_is_collected(screen: Screen, collector: LogCollector) -> None:
    mesh = _mesh()
    (out, w_out), (err, w_err) = os.pipe(), os.pipe()
    os.set_inheritable(out, True)
    collector.add(mesh, 0, out, err)
    assert not os.get_inheritable(out)
    subprocess.run(["sh", "-c", "echo one; echo two >&2; printf three"], stdout=w_out, stderr=w_err, check=True)
    os.close(w_out)
    os.close(w_err)
    screen.wait_for("three\n")
    assert sorted(screen.getvalue().splitlines()) == ["[gpus 0] one", "[gpus 0] three", "[gpus 0] two"]


def test_end_of_the_pipes_closes_all_descriptors(screen: Screen, collector: LogCollector, workers: Workers) -> None:
    mesh = _mesh()
    team = workers(mesh, 3)
    thread = collector._thread
    assert thread is not None
    for rank, worker in enumerate(team):
        worker.say(f"bye {rank}")
        worker.end()
    thread.join(30)
    assert not thread.is_alive() and collector._thread is None
    for worker in team:
        for fd in worker.reads:
            with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
                os.fstat(fd)
    assert sorted(screen.getvalue().splitlines()) == [f"[gpus {rank}] bye {rank}" for rank in range(3)]
    (again,) = workers(mesh, 1)  # this starts a new thread
    again.say("hello\n")
    screen.wait_for("hello")


def test_remove_closes_pipes_that_other_processes_hold(
    screen: Screen, collector: LogCollector, workers: Workers
) -> None:
    mesh, other = _mesh("one"), _mesh("two")
    (worker,), (stays, _) = workers(mesh, 1), workers(other, 2)
    worker.say("half a li")
    assert collector.remove(mesh)
    assert screen.getvalue() == "[gpus 0] half a li\n"
    with pytest.raises(BrokenPipeError):
        worker.say("ne\n")
    stays.say("still here\n")
    assert collector.flush(other)
    assert screen.getvalue().endswith("[gpus 0] still here\n")
    thread = collector._thread
    assert thread is not None
    assert collector.remove(other)
    thread.join(10)
    assert not thread.is_alive()


def test_a_process_may_take_the_place_of_another(screen: Screen, collector: LogCollector, workers: Workers) -> None:
    mesh = _mesh()
    old, peer = workers(mesh, 2)
    new, _ = workers(mesh, 2)
    old.say("a\n")
    peer.say("a\n")
    screen.wait_for("[gpus 0,1] a\n")
    old.end()
    while set(old.reads) & set(collector._pipes):
        time.sleep(0.001)
    new.say("b\n")
    assert collector.flush()
    peer.say("c\n")
    while log_collector._bytes_in(peer.reads[0]):
        time.sleep(0.001)
    with collector._lock:  # the line now waits for rank 0, which is still expected to write it
        pass
    new.say("c\n")
    screen.wait_for("[gpus 0,1] c\n")
    assert screen.getvalue() == "[gpus 0,1] a\n[gpus 0] b\n[gpus 0,1] c\n"


def test_a_partial_line_is_shown_after_a_while(
    screen: Screen, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_collector, "_PARTIAL_LINE_TIMEOUT_S", 0.05)
    (worker,) = workers(_mesh(aggregate_window_sec=0), 1)
    worker.say("name? ")
    screen.wait_for("[gpus 0] name? \n")
    worker.say("\nthanks\n")
    screen.wait_for("thanks\n")
    assert screen.getvalue() == "[gpus 0] name? \n[gpus 0] thanks\n"


def test_a_progress_bar_shows_its_last_state(screen: Screen, collector: LogCollector, workers: Workers) -> None:
    team = workers(_mesh(), 2)
    for worker in team:
        for percent in range(50):
            worker.say(f"\r{percent:3}%|##  |", err=True)
    assert collector.flush()
    assert screen.getvalue() == "[gpus 0,1]  49%|##  |\n"
    for worker in team:
        worker.say("\r100%|####|\n", err=True)
    screen.wait_for("[gpus 0,1] 100%|####|\n")
    assert screen.getvalue().count("\n") == 2


def test_bytes_that_are_no_text(screen: Screen, collector: LogCollector, workers: Workers) -> None:
    (worker,) = workers(_mesh(), 1)
    worker.say(b"\xff\xfe caf\xc3\nna\xc3")
    worker.say(b"\xafve\n\x00\n")
    assert collector.flush()
    assert screen.getvalue() == "[gpus 0] \ufffd\ufffd caf\ufffd\n[gpus 0] naïve\n[gpus 0] \x00\n"


def test_a_long_line_is_cut(screen: Screen, collector: LogCollector, workers: Workers) -> None:
    (worker,) = workers(_mesh(), 1)
    writer = threading.Thread(target=worker.say, args=("x" * 1_000_000 + "\nnext\n",))
    writer.start()
    screen.wait_for("next\n")
    writer.join()
    assert screen.getvalue() == f"[gpus 0] {'x' * 65536} ... [cut: longer than 65536 bytes]\n[gpus 0] next\n"


def test_floods_are_counted_and_not_shown(screen: Screen, collector: LogCollector, workers: Workers) -> None:
    mesh = _mesh(lines_per_sec=0.001, burst=10)
    team = workers(mesh, 3)
    for worker in team[1:]:
        worker.say("".join(f"line {i}\n" for i in range(500)))
    team[0].say("calm\n")
    assert collector.flush()
    *lines, note = screen.getvalue().splitlines()
    assert sorted(lines) == sorted(["[gpus 0] calm", *(f"[gpus 1,2] line {i}" for i in range(10))])
    assert re.fullmatch(
        r"\[gpus 1,2\] 980 lines dropped within \d\.\d s, limit 0\.001 lines/s per process; logging_option\(.*",
        note,
    )


def test_the_drop_note_comes_by_itself(screen: Screen, workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_log.RateLimit, "PERIOD", 0.05)
    (worker,) = workers(_mesh(lines_per_sec=0.001, burst=1), 1)
    worker.say("x\n" * 100)
    screen.wait_for("[gpus 0] 99 lines dropped within ")


def test_options_take_effect_while_running(screen: Screen, collector: LogCollector, workers: Workers) -> None:
    mesh = _mesh()
    first, second = workers(mesh, 2)
    first.say("waits\n")
    mesh.configure(aggregate_window_sec=None)  # shows the waiting line, and wakes the thread before its timeout
    screen.wait_for("waits\n")
    first.say("at once\n")
    screen.wait_for("at once")
    second.say("at once\n")
    screen.wait_for("[gpus 1] at once")
    assert screen.getvalue() == "[gpus 0] waits\n[gpus 0] at once\n[gpus 1] at once\n"
    mesh.configure(stream_to_client=False)
    second.say("unheard\n", err=True)
    assert collector.flush()
    mesh.configure(stream_to_client=True, lines_per_sec=None)
    second.say("heard\n")
    screen.wait_for("[gpus 1] heard\n")
    assert "unheard" not in screen.getvalue()
    assert collector.tail(mesh, 1) == ["unheard"]


def test_records_below_the_level_are_not_shown(screen: Screen, collector: LogCollector, workers: Workers) -> None:
    mesh = _mesh(level="WARNING")
    (worker,) = workers(mesh, 1)
    worker.say("\x1e20\x1fquiet\nplain\n\x1e30\x1floud\x1dsecond line\n", err=True)
    assert collector.flush()
    assert screen.getvalue() == "[gpus 0] plain\n[gpus 0] loud\n[gpus 0] second line\n"
    mesh.configure(level=logging.DEBUG)
    worker.say("\x1e10\x1fdetails\n", err=True)
    screen.wait_for("[gpus 0] details\n")
    assert collector.tail(mesh, 0) == ["quiet", "plain", "loud", "second line", "details"]


def test_the_tail_is_short(collector: LogCollector, workers: Workers, screen: Screen) -> None:
    mesh = _mesh(stream_to_client=False)
    (worker,) = workers(mesh, 1)
    worker.say("".join(f"{i}\n" for i in range(100)) + "y" * 5000 + "\n", err=True)
    assert collector.flush()
    assert collector.tail(mesh, 0) == [
        *(str(i) for i in range(100 - mesh_log.TAIL_LINES + 1, 100)),
        "y" * 2048 + " ...",
    ]


def test_files_get_every_line(screen: Screen, collector: LogCollector, workers: Workers, tmp_path: Path) -> None:
    mesh = _mesh("tra/iners", level="ERROR", lines_per_sec=0.001, burst=1, to_files=tmp_path / "logs")
    first, second = workers(mesh, 2)
    first.say("a\nb\n")
    first.say("\x1e20\x1finfo\x1dmore\nplain\n", err=True)
    second.say("a\nb\xff\n".encode("latin-1"))
    assert collector.flush()
    files = {path.name: path.read_bytes() for path in (tmp_path / "logs" / "tra_iners").iterdir()}
    assert files == {
        "gpus_0.stdout": b"a\nb\n",
        "gpus_0.stderr": b"info\nmore\nplain\n",
        "gpus_1.stdout": b"a\nb\xff\n",
    }
    assert screen.getvalue().startswith("[gpus 0,1] a\n")
    mesh.configure(to_files=None)
    first.say("not in a file\n")
    assert collector.flush()
    mesh.configure(to_files=tmp_path / "logs", stream_to_client=False)
    first.say("c\n")
    assert collector.flush()
    mesh.configure(to_files=tmp_path / "elsewhere")
    first.say("d\n")
    assert collector.remove(mesh)
    assert (tmp_path / "logs" / "tra_iners" / "gpus_0.stdout").read_bytes() == b"a\nb\nc\n"
    assert (tmp_path / "elsewhere" / "tra_iners" / "gpus_0.stdout").read_bytes() == b"d\n"


def test_unwritable_log_files_are_reported_once(
    screen: Screen, collector: LogCollector, workers: Workers, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    mesh = _mesh(to_files=tmp_path / "file")
    for worker in workers(mesh, 2):
        worker.say("line\n")
    assert collector.flush()
    lines = sorted(screen.getvalue().splitlines())
    assert lines[0] == "[gpus 0,1] line"
    assert re.fullmatch(r"\[gpus \d\] cannot write .*/file.*: .*irectory; no output of mesh 'm' goes to .*", lines[1])
    assert len(lines) == 2


def test_full_disk_ends_the_history_and_not_the_output(
    screen: Screen, collector: LogCollector, workers: Workers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def append(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("MONARCH_LOG_DIR", str(tmp_path))
    monkeypatch.setattr(LogHistory, "append", append)
    [worker] = workers(_mesh(), 1)
    for text in ("first\n", "second\n"):
        worker.say(text)
        assert collector.flush()
    note, *shown = sorted(screen.getvalue().splitlines())
    assert note == (
        "[gpus 0] cannot keep the output of mesh 'm' for `monarch-backend logs`: No space left on device; "
        f"free space in {tmp_path}, or set MONARCH_LOG_DIR"
    )
    assert shown == ["[gpus 0] first", "[gpus 0] second"]


@pytest.mark.parametrize("stdout", ["none", "closed", "raising", "broken pipe"])
def test_a_broken_stdout_does_not_stop_the_reading(
    screen: Screen, collector: LogCollector, workers: Workers, terminal: SimpleNamespace, stdout: str
) -> None:
    broken: Any = None
    if stdout == "closed":
        broken = io.StringIO()
        broken.close()
    elif stdout == "raising":
        broken = io.TextIOBase()
    elif stdout == "broken pipe":
        read, write = os.pipe()
        os.close(read)
        broken = open(write, "w", closefd=False)  # noqa: SIM115
    terminal.stdout = broken
    (worker,) = workers(_mesh(lines_per_sec=None), 1)
    worker.say("lost\n" * 100_000)  # more than the pipe holds, so the collector must read it
    assert collector.flush()
    terminal.stdout = screen
    worker.say("shown\n")
    screen.wait_for("shown\n")
    assert screen.getvalue() == "[gpus 0] shown\n"
    if stdout == "broken pipe":
        with contextlib.suppress(BrokenPipeError):
            broken.close()
        os.close(write)


def test_a_stdout_that_cannot_write_every_character(
    collector: LogCollector, workers: Workers, terminal: SimpleNamespace
) -> None:
    raw = io.BytesIO()
    terminal.stdout = io.TextIOWrapper(raw, encoding="ascii")
    (worker,) = workers(_mesh(), 1)
    worker.say("naïve\n")
    assert collector.flush()
    assert raw.getvalue() == b"[gpus 0] na\\xefve\n"


def test_flush_times_out_without_losing_lines(screen: Screen, collector: LogCollector, workers: Workers) -> None:
    (worker,) = workers(_mesh(), 1)
    screen.open.clear()
    worker.say("one\n")
    assert screen.stuck.wait(30)
    worker.say("two\n")
    assert not collector.flush(timeout=0.05)
    assert screen.getvalue() == ""
    screen.open.set()
    screen.wait_for("two\n")
    assert screen.getvalue() == "[gpus 0] one\n[gpus 0] two\n"


def test_lines_that_arrive_at_lock_release_are_written(
    screen: Screen, collector: LogCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that stops waiting for the lock relies on the lock's holder to look for new lines once more."""

    class Lock:
        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.acquire = self.lock.acquire
            self.late = [(1, b"late\n")]

        def release(self) -> None:
            collector._outbox.extend(self.late)
            self.late = []
            self.lock.release()

    with monkeypatch.context() as patch:
        patch.setattr(collector, "_writing", Lock())
        assert collector.flush()
    assert screen.getvalue() == "late\n"


def test_a_label_that_cannot_be_made_loses_no_line(screen: Screen, collector: LogCollector, workers: Workers) -> None:
    def label(ranks: Iterable[int]) -> str:
        raise KeyError("gpus")

    for worker in workers(MeshLog("m", label), 2):
        worker.say("line\n")
    screen.wait_for("line\n")
    assert screen.getvalue() == "[m ranks [0, 1], unnamed: KeyError] line\n"


def test_a_mistake_in_a_round_does_not_stop_the_thread(
    screen: Screen, collector: LogCollector, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    (worker,) = workers(_mesh(), 1)
    with monkeypatch.context() as patch:
        patch.setattr(MeshLog, "say", lambda *args: 1 / 0)
        worker.say("lost\n")
        screen.wait_for("ZeroDivisionError: division by zero\n")
    worker.say("shown\n")
    screen.wait_for("[gpus 0] shown\n")


def test_without_a_thread_the_descriptors_stay_the_callers(
    collector: LogCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    out, err = os.pipe(), os.pipe()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            collector.add(_mesh(), 0, out[0], err[0])
    for fd in (*out, *err):
        os.close(fd)


def test_a_closed_collector_takes_no_more(screen: Screen) -> None:
    collector = LogCollector()
    mesh = _mesh("late")
    worker = Worker(collector, mesh, 0)
    worker.say("last words")
    assert collector.close() and collector.close() and collector.flush()
    assert screen.getvalue() == "[gpus 0] last words\n"
    worker.end()
    with pytest.raises(RuntimeError, match="rank 7 of mesh 'late' has no reader"):
        collector.add(mesh, 7, -1, -1)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"aggregate_window_sec": -1}, "aggregate_window_sec must be 0 or more"),
        ({"aggregate_window_sec": float("nan")}, "aggregate_window_sec must be 0 or more"),
        ({"lines_per_sec": 0}, "lines_per_sec must be more than 0"),
        ({"burst": 0}, "burst must be 1 line or more"),
        ({"level": "loud"}, "a name of logging, such as 'WARNING'; got 'loud'"),
        ({"to_files": 3}, "PathLike"),
        ({"color": True}, "unexpected keyword argument 'color'"),
    ],
)
def test_wrong_options_are_refused_without_effect(options: dict[str, Any], error: str) -> None:
    mesh = _mesh()
    before = mesh.options
    with pytest.raises((ValueError, TypeError), match=error):
        mesh.configure(**options)
    assert mesh.options is before


@may_fork
def test_forked_child_does_not_collect(screen: Screen, collector: LogCollector, workers: Workers) -> None:
    mesh = _mesh()
    team = workers(mesh, 2)
    team[0].say("waits\n")
    pid = os.fork()
    if not pid:
        code = 1
        try:
            for worker in team:
                for fd in worker.reads:
                    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
                        os.fstat(fd)
                worker.end()
            assert collector._thread is None and collector.flush()
            own = _mesh()
            (worker,) = workers(own, 1)  # the child may have workers of its own
            worker.say("mine\n")
            assert collector.flush(timeout=30)
            assert screen.getvalue() == "[gpus 0] mine\n"
            worker.end()
            code = 0 if collector.close() else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    team[1].say("waits\n")
    screen.wait_for("[gpus 0,1] waits\n")
    assert screen.getvalue() == "[gpus 0,1] waits\n"


@may_fork
def test_fork_while_the_thread_writes(
    collector: LogCollector, workers: Workers, tmp_path: Path, terminal: SimpleNamespace
) -> None:
    """A fork during a write would leave the child a locked stdout, or a second copy of the buffered text."""
    with (tmp_path / "out").open("w") as out:
        terminal.stdout = out
        (worker,) = workers(_mesh(lines_per_sec=None), 1)
        stop = threading.Event()
        written = 0

        def write() -> None:
            nonlocal written
            while not stop.is_set():
                worker.say("".join(f"{written + i}\n" for i in range(100)))
                written += 100

        writer = threading.Thread(target=write)
        writer.start()
        try:
            for _ in range(20):
                pid = os.fork()
                if not pid:
                    signal.alarm(30)
                    print("child", file=out, flush=True)
                    os._exit(0)
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        finally:
            stop.set()
            writer.join()
        assert collector.flush()
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines.count("child") == 20
    assert [line for line in lines if line != "child"] == [f"[gpus 0] {i}" for i in range(written)]


@pytest.mark.parametrize("seed", range(5))
def test_random_writers_lose_no_lines(
    seed: int, screen: Screen, collector: LogCollector, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_collector, "_PARTIAL_LINE_TIMEOUT_S", FOREVER)  # a slow machine must not split lines
    rng = random.Random(seed)
    mesh = _mesh(aggregate_window_sec=rng.choice((0.0, 0.002, 0.02, FOREVER)), lines_per_sec=None)
    ranks = rng.choice((1, 3, 16))
    said = [[rng.choice(("a", "b", "", f"own {rank} é")) for _ in range(300)] for rank in range(ranks)]

    def write(worker: Worker, rank: int) -> None:
        own = random.Random(f"{seed} {rank}")
        data = "".join(line + "\n" for line in said[rank]).encode()
        while data:
            size = own.choice((1, 10, 100, 1000))
            worker.say(data[:size])
            data = data[size:]
        worker.end()

    threads = [threading.Thread(target=write, args=(worker, rank)) for rank, worker in enumerate(workers(mesh, ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert collector.remove(mesh)
    heard: list[list[str]] = [[] for _ in range(ranks)]
    for line in screen.getvalue().split("\n")[:-1]:
        label, text = line.removeprefix("[gpus ").split("] ", 1)
        for rank in label.split(","):
            heard[int(rank)].append(text)
    assert heard == said


@pytest.mark.slow
@may_fork
@pytest.mark.parametrize("same", [True, False])
def test_ten_megabytes_from_eight_processes(
    same: bool, collector: LogCollector, tmp_path: Path, terminal: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_collector, "_PARTIAL_LINE_TIMEOUT_S", FOREVER)
    count, ranks = 40_000, 8
    mesh = _mesh(aggregate_window_sec=0.1, lines_per_sec=None)
    with (tmp_path / "out").open("w") as out_file:
        terminal.stdout = out_file
        began = time.monotonic()
        writes, pids = [], []
        for rank in range(ranks):
            (out, w_out), (err, w_err) = os.pipe(), os.pipe()
            collector.add(mesh, rank, out, err)
            writes.append((w_out, w_err))
        for rank in range(ranks):
            pid = os.fork()
            if not pid:
                name = "" if same else f" of {rank}"
                with open(writes[rank][0], "wb", closefd=False) as file:
                    file.writelines(b"step %d%s: loss 0.12345678\n" % (i, name.encode()) for i in range(count))
                os._exit(0)
            pids.append(pid)
        for pid in pids:
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert collector.remove(mesh)
        took = time.monotonic() - began
    for pair in writes:
        for fd in pair:
            os.close(fd)
    seen = [0] * ranks
    lines = (tmp_path / "out").read_text().splitlines()
    for line in lines:
        found = re.fullmatch(r"\[gpus ([\d,]+)\] step (\d+)( of \d)?: loss 0.12345678", line)
        assert found, line
        for rank in map(int, found[1].split(",")):
            assert int(found[2]) == seen[rank]
            seen[rank] += 1
    assert seen == [count] * ranks
    print(f"{count * ranks / took:,.0f} lines/s, {len(lines)} shown")


@may_fork
def test_logging_of_a_worker_comes_whole(screen: Screen, collector: LogCollector) -> None:
    """The worker's logging is unconfigured first, then configured by the program."""

    def unconfigured() -> None:
        print("unbuffered")
        logging.getLogger("loader").info("line one\nline two\r")
        logging.getLogger("loader").debug("not made")
        try:
            raise ValueError("bad shard")
        except ValueError:
            logging.exception("cannot read")
        install_worker_logging("debug")
        logging.getLogger("loader").debug("made now")

    def configured() -> None:
        logging.basicConfig(format="<%(message)s>", level=logging.WARNING)
        logging.info("not made")
        logging.warning("two\nlines")
        buffer = io.StringIO()
        logging.getLogger().addHandler(logging.StreamHandler(buffer))
        logging.error("copied")
        assert buffer.getvalue() == "copied\n"

    mesh = _mesh(aggregate_window_sec=0.0)
    _run_worker(collector, mesh, 0, unconfigured)
    assert collector.flush()
    shown = screen.getvalue().replace("[gpus 0] ", "")
    assert shown.startswith("unbuffered\n") or "\nunbuffered\n" in shown
    shown = shown.replace("unbuffered\n", "")
    assert shown.startswith("INFO:loader:line one\nline two\nERROR:root:cannot read\nTraceback (most recent call")
    assert shown.endswith("ValueError: bad shard\n")  # the worker logs DEBUG, but the mesh shows INFO and above
    assert collector.tail(mesh, 0)[-1] == "DEBUG:loader:made now"
    assert "\x1e" not in shown and "\x1d" not in shown

    screen.seek(0)
    screen.truncate()
    mesh.configure(level="ERROR")
    _run_worker(collector, mesh, 1, configured)
    assert collector.flush()
    assert screen.getvalue() == "[gpus 1] <copied>\n"
    assert collector.tail(mesh, 1) == ["<two", "lines>", "<copied>"]


def _run_worker(collector: LogCollector, mesh: MeshLog, rank: int, body: Callable[[], None]) -> None:
    (out, w_out), (err, w_err) = os.pipe(), os.pipe()
    collector.add(mesh, rank, out, err)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.dup2(w_out, 1)
            os.dup2(w_err, 2)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # as an interpreter makes them
            sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
            logging.getLogger().handlers.clear()  # those of pytest
            install_worker_logging()
            body()
            code = 0
        finally:
            os._exit(code)  # without a flush, like a process that dies
    os.close(w_out)
    os.close(w_err)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


EXIT = """
import os, sys
from monarch_backend._logs.log_collector import LogCollector, LogOptions, MeshLog
collector = LogCollector()
(out, w_out), (err, w_err) = os.pipe(), os.pipe()
collector.add(MeshLog("m", str, LogOptions(aggregate_window_sec=3600)), 0, out, err)
os.write(w_out, b"x\\n" * 1000 + b"half a line")
sys.stdout.write("main ends\\n")  # in one piece, as the collector writes beside it
"""


def test_no_lines_are_lost_at_exit() -> None:
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""
    assert sorted(done.stdout.splitlines()) == sorted(["[[0]] x"] * 1000 + ["[[0]] half a line", "main ends"])


def test_many_ranks(screen: Screen, collector: LogCollector, workers: Workers) -> None:
    team = workers(_mesh(), 100)
    for step in range(3):
        for rank, worker in enumerate(team):
            worker.say(f"step {step}\n" + (f"own {rank}\n" if rank % 10 == 0 else ""))
        screen.wait_for(f" step {step}\n")
    assert collector.flush()
    everyone = ",".join(map(str, range(100)))
    lines = screen.getvalue().splitlines()
    assert [line for line in lines if "step" in line] == [f"[gpus {everyone}] step {step}" for step in range(3)]
    assert len(lines) == 3 + 3 * 10
