"""Kept output: the memory that holds it, and `monarch-backend logs`, which reads it from another process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_backend import cli
from monarch_backend._core import platform
from monarch_backend._telemetry import log_history
from monarch_backend._telemetry.log_history import HistoryReader, LogHistory, LogLine
from monarch_backend._telemetry.programs import Process, select
from tests.support.running_script import running_script
from tests.support.waiting import wait_until
from tests.telemetry.programs import busy_program

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="the log history needs memfd_create")


@pytest.fixture
def history() -> Iterator[LogHistory]:
    made = LogHistory(1 << 16)
    yield made
    made.close()


@contextlib.contextmanager
def _reader(history: LogHistory) -> Iterator[HistoryReader]:
    with HistoryReader(os.dup(history.descriptor)) as reader:
        yield reader


def _texts(lines: list[LogLine]) -> list[str]:
    return [line.text for line in lines]


def test_full_history_keeps_the_last_lines(history: LogHistory) -> None:
    for number in range(10_000):
        history.append(f"gpus {number % 3} of m", number, 1 + number % 2, f"line {number}".encode())
    with _reader(history) as reader:
        lines = reader.read()
    first = lines[0].pid
    assert [(line.label, line.pid, line.stream, line.text) for line in lines] == [
        (f"gpus {n % 3} of m", n, ("stdout", "stderr")[n % 2], f"line {n}") for n in range(first, 10_000)
    ]
    assert len(lines) == (1 << 16) // 64
    assert os.fstat(history.descriptor).st_size == 4096 + (1 << 16)


def test_reader_continues_after_what_it_has_read(history: LogHistory) -> None:
    with _reader(history) as reader:
        assert reader.read() == []
        history.append("gpus 0", 0, 1, b"a\nb")
        assert _texts(reader.read()) == ["a", "b"]
        assert reader.read() == []
        for number in range(5000):  # more than the history holds
            history.append("gpus 0", 0, 1, b"%d" % number)
        lines = reader.read()
        assert _texts(lines) == [str(n) for n in range(int(lines[0].text), 5000)]
        assert reader.read() == []


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 4000, 32_000, 40_000, 1 << 20])
def test_text_of_any_size_is_kept_from_its_end(size: int, history: LogHistory) -> None:
    text = bytes(ord("a") + number % 26 for number in range(size))
    for _ in range(5):
        history.append("gpus 0", 0, 1, text)
    with _reader(history) as reader:
        lines = reader.read()
    assert lines and {line.text for line in lines} == {text[-len(lines[0].text) or size :].decode()}
    assert len(lines[0].text) == min(size, (1 << 15) - 64 - len("gpus 0"))


def test_reader_beside_a_fast_writer_sees_whole_lines_in_order(tmp_path: Path) -> None:
    writer = (
        "import itertools, sys\n"
        "from monarch_backend._telemetry.log_history import LogHistory\n"
        "history = LogHistory(1 << 16)\n"
        "print(history.descriptor, flush=True)\n"
        "for number in itertools.count():\n"
        "    history.append('gpus 0', 0, 1, b'%d ' % number * (number % 50 + 1))\n"
    )
    with subprocess.Popen([sys.executable, "-c", writer], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            reader = log_history.of_process(process.pid)
            assert reader is not None
            with reader:
                last, reads = -1, 0
                while reads < 200 or last < 5000:  # until the ring was overwritten several times
                    lines = reader.read()
                    reads += bool(lines)
                    for line in lines:
                        words = line.text.split()
                        number = int(words[0])
                        assert words == [words[0]] * (number % 50 + 1)
                        assert number > last
                        last = number
        finally:
            process.kill()


def test_history_of_another_release_is_an_error(history: LogHistory) -> None:
    os.pwrite(history.descriptor, json.dumps({"version": 99, "size": 1, "owner": 7}).encode() + b"\0", 0)
    with pytest.raises(ValueError, match="process 7 keeps its log history in layout 99"):
        HistoryReader(os.dup(history.descriptor))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    with busy_program(str(tmp_path_factory.mktemp("program"))) as process:
        yield process


def _processes(pid: int) -> list[Process]:
    [program] = select(str(pid))
    return program.processes


def _logs(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert cli.main(["logs", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_stopped_program_shows_its_output(running: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]) -> None:
    processes = _processes(running.pid)
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        [line] = _logs(capsys, running.pid).splitlines()
    finally:
        for process in processes:
            os.kill(process.pid, signal.SIGCONT)
    assert line.endswith(" gpus 1 of trainers: sleeps")


def test_json_has_program_pid_and_stream(running: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]) -> None:
    line = json.loads(_logs(capsys, running.pid, "--json"))
    assert abs(line.pop("time") - time.time()) < 600
    assert line == {
        "program": running.pid, "host": "", "label": "gpus 1 of trainers", "pid": _processes(running.pid)[2].pid,
        "stream": "stdout", "text": "sleeps",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["--rank", "gpus 1"], True),
        (["--rank", "gpus 1 of trainers"], True),
        (["--rank", "gpus 0"], False),
        (["--rank", "gpus 0", "--rank", "gpus 1"], True),
        (["--grep", "^sl.*s$"], True),
        (["--grep", "^leep"], False),
        (["--since", "600"], True),
        (["--since", "0"], False),
    ],
)
def test_options_choose_lines(
    options: list[str], shown: bool, running: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ("sleeps" in _logs(capsys, running.pid, *options)) is shown


def test_processes_that_have_written_nothing_are_named(
    running: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, silent, other = _processes(running.pid)
    text = f"gpus 0 of trainers (pid {silent.pid}, running) has written nothing that is kept\n"
    for name, *options in ([running.pid, "--rank", "gpus 0"], [running.pid, "--rank", "gpus 0-1"], [silent.pid]):
        assert cli.main(["logs", *map(str, [name, *options])]) == 0
        assert capsys.readouterr().err == text
    for name, *options in ([running.pid], [other.pid], [running.pid, "--rank", "gpus 0", "--grep", "x"]):
        assert cli.main(["logs", *map(str, [name, *options])]) == 0
        assert capsys.readouterr().err == ""


SILENT = """
import os, sys
from monarch_backend import actor


class Worker(actor.Actor):
    @actor.endpoint
    def end(self):
        os._exit(3)


if __name__ == "__main__":
    actor.unhandled_fault_hook = lambda failure: None
    procs = actor.this_host().spawn_procs({"gpus": 3}, name="short")
    workers = procs.spawn("worker", Worker)
    try:
        workers.end.call().get()
    except Exception:
        pass
    print("ended", flush=True)
    sys.stdin.readline()
"""


def test_ended_processes_without_output_are_named_with_their_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_script(tmp_path / "silent.py", SILENT) as process:
        assert process.stdout is not None and process.stdout.readline() == "ended\n"
        wait_until(lambda: [each.exit_code for each in _processes(process.pid)] == [None, 3, 3, 3])
        first = _processes(process.pid)[1]
        assert cli.main(["logs", str(process.pid)]) == 0
        text = "gpus 0-2 of short (ended with 3) have written nothing that is kept\n"
        assert capsys.readouterr().err == text
        assert cli.main(["logs", str(first.pid)]) == 0
        text = f"{first.label} (pid {first.pid}, ended with 3) has written nothing that is kept\n"
        assert capsys.readouterr().err == text


def test_unknown_process_is_an_error_with_the_known_ones(
    running: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["logs", str(running.pid), "--rank", "gpus 7"]) == 1
    assert "no process is 'gpus 7'; there are: program busy_program.py; gpus 0" in capsys.readouterr().err


def test_wrong_expression_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["logs", "--grep", "("])
    assert "'(' is not a regular expression" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["-5", "nan", "soon"])
def test_wrong_time_is_an_error(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["logs", f"--since={text}"])
    assert f"'{text}' is not a number of seconds, 0 or more" in capsys.readouterr().err


def test_program_without_history_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MONARCH_LOG_HISTORY_BYTES", "0")
    with busy_program(str(tmp_path)) as process:
        assert cli.main(["logs", str(process.pid)]) == 1
    assert f"program {process.pid} keeps no output" in capsys.readouterr().err


@pytest.mark.slow
def test_output_is_followed_until_the_program_ends(tmp_path: Path) -> None:
    with busy_program(str(tmp_path)) as process:
        command = [sys.executable, "-m", "monarch_backend.cli", "logs", "--follow", str(process.pid)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
            assert follower.stdout is not None
            assert follower.stdout.readline().endswith(" gpus 1 of trainers: sleeps\n")
            os.kill(_processes(process.pid)[2].pid, signal.SIGKILL)  # nothing handles that, so the program ends
            assert process.wait(30) != 0
            assert follower.wait(30) == 0


KILLED = """
import os, signal, sys
from monarch_backend import actor


class Worker(actor.Actor):
    @actor.endpoint
    def end(self):
        print("first")
        sys.stderr.write("last words")
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    actor.unhandled_fault_hook = lambda failure: None
    procs = actor.this_host().spawn_procs({"gpus": 1}, name="short")
    try:
        procs.spawn("worker", Worker).end.call_one().get()
    except Exception:
        pass
    print("ended", flush=True)
    sys.stdin.readline()
"""


def test_killed_process_leaves_its_last_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and any(line == "ended\n" for line in process.stdout)
            lines = [json.loads(line) for line in _logs(capsys, process.pid, "--json").splitlines()]
            ended = _processes(process.pid)[1]
        finally:
            process.kill()
    assert ended.exit_code == -signal.SIGKILL
    assert {(line["label"], line["pid"], line["stream"], line["text"]) for line in lines} == {
        ("gpus 0 of short", ended.pid, "stdout", "first"), ("gpus 0 of short", ended.pid, "stderr", "last words"),
    }  # fmt: skip
