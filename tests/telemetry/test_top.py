"""`monarch-backend top`: rates of processes, the table, and the screen in a pseudo-terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_backend import cli
from monarch_backend._core import platform
from monarch_backend._telemetry.kinds import Kind
from monarch_backend._telemetry.programs import select
from monarch_backend._telemetry.rates import RateMeter
from monarch_backend._telemetry.reader import Area
from monarch_backend._telemetry.recording_area import RecordingArea
from tests.support.waiting import wait_until
from tests.telemetry.programs import busy_program

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="programs are found in /proc")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    with busy_program(str(tmp_path_factory.mktemp("program"))) as process:
        yield process


def _record(area: RecordingArea, code: str) -> None:
    start = f"from monarch_backend import _native as n; n.use_recording({area.descriptor}, 1, 'child')\n"
    subprocess.run([sys.executable, "-c", start + code], check=True, pass_fds=[area.descriptor])


@pytest.fixture
def area() -> Iterator[RecordingArea]:
    made = RecordingArea()
    assert made.reserve("child") == 1
    yield made
    made.close()


def test_traffic_counts_events_after_a_number(area: RecordingArea) -> None:
    _record(
        area,
        f"for i in range(10): n.record_event({Kind.MESSAGE:d}, 0, 0, 0, 0, i, 100, 0)\n"
        f"n.record_event({Kind.COLLECTIVE:d}, 0, 0, 0, 0, 1, 5000, 0)\n"
        f"n.record_event({Kind.METRIC:d}, 0, 0, 0, 0, 1, 2.5, 0)\n",
    )
    with Area(os.dup(area.descriptor)) as reader:
        [whole] = reader.traffic({})
        assert (whole.written, whole.messages, whole.size) == (12, 10, 6000)
        [last] = reader.traffic({whole.pid: 8})
        assert (last.written, last.messages, last.size) == (12, 2, 5200)
        [none] = reader.traffic({whole.pid: 12})
        assert (none.messages, none.size) == (0, 0)


def test_traffic_beyond_the_ring_is_an_estimate(area: RecordingArea) -> None:
    _record(area, f"for i in range(20_000): n.record_event({Kind.SENT:d}, 0, 0, 0, 0, i, 10, 0)")
    with Area(os.dup(area.descriptor)) as reader:
        [whole] = reader.traffic({})
    assert whole.messages == pytest.approx(20_000)
    assert whole.size == pytest.approx(200_000)


def test_rates_are_those_between_two_looks(running: subprocess.Popen[str]) -> None:
    meter = RateMeter(lambda: select(str(running.pid)))
    assert meter.look()[1] == {}
    [program], rates = meter.look()
    assert set(rates) == {("", process.pid) for process in program.processes}
    assert all(each.messages_per_second == 0 and each.bytes_per_second == 0 for each in rates.values())


SENDER = f"""
import sys
from monarch_backend._telemetry import recorder
recorder.area()
print("up", flush=True)
for line in sys.stdin:
    for number in range(100):
        recorder.event({Kind.SENT:d}, "actor", "endpoint", reference=number, value=1000)
    print("sent", flush=True)
"""


def test_rates_count_messages_since_the_last_look() -> None:
    command = [sys.executable, "-c", SENDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            assert process.stdout.readline() == "up\n"
            meter = RateMeter(lambda: select(str(process.pid)))
            meter.look()
            meter.look()
            process.stdin.write("go\n")
            process.stdin.flush()
            assert process.stdout.readline() == "sent\n"
            own = meter.look()[1]["", process.pid]
        finally:
            process.kill()
    assert own.messages_per_second > 0
    assert own.bytes_per_second == pytest.approx(1000 * own.messages_per_second)


def test_table_has_a_line_per_process(running: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", str(running.pid), "--once", "--interval", "0.05"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == ["PID", "CPU%", "MEMORY", "MSG/S", "BYTES/S", "QUEUE", "PROCESS"]
    assert [line.split()[0] for line in lines] == [str(p.pid) for p in select(str(running.pid))[0].processes]
    assert re.search(r" MiB +0 +0 +0    gpus 1.*: running (worker.sleep|concurrent.wait) for .* and 1 more$", lines[2])


def test_json_has_rates_of_each_process(running: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", str(running.pid), "--json", "--interval", "0.05"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["program"] for row in rows] == [running.pid] * 3
    assert set(rows[2]["rates"]) == {"messages_per_second", "bytes_per_second", "cpu"}


def test_screen_without_a_terminal_is_an_error(
    running: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["top", str(running.pid)]) == 1
    assert "needs a terminal; --once" in capsys.readouterr().err


class _Terminal:
    """A pseudo-terminal with `monarch-backend top` in it."""

    def __init__(self, *arguments: str) -> None:
        self._controller, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 160, 0, 0))
        os.set_blocking(self._controller, False)
        self._modes = termios.tcgetattr(terminal)
        self._terminal = terminal
        command = [sys.executable, "-m", "monarch_backend.cli", "top", *arguments]
        self.process = subprocess.Popen(
            command, stdin=terminal, stdout=terminal, stderr=terminal, env={**os.environ, "TERM": "xterm"}
        )
        self.shown = ""

    def wait_for(self, text: str) -> None:
        """Wait until new output has the text, and drop what came before its end."""
        wait_until(lambda: self._read() and text in self.shown)
        self.shown = self.shown.partition(text)[2]

    def _read(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self.shown += os.read(self._controller, 1 << 16).decode(errors="replace")
        return True

    def press(self, keys: str) -> None:
        os.write(self._controller, keys.encode())

    @property
    def modes_are_restored(self) -> bool:
        """Whether the terminal echoes again."""
        return termios.tcgetattr(self._terminal) == self._modes

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)
        os.close(self._controller)


@contextlib.contextmanager
def _screen(*arguments: str) -> Iterator[_Terminal]:
    terminal = _Terminal(*arguments)
    try:
        yield terminal
    finally:
        terminal.close()


DOWN = "\x1bOB"


def test_screen_shows_stack_and_last_lines_of_the_chosen_process(running: subprocess.Popen[str]) -> None:
    with _screen(str(running.pid), "--interval", "0.1") as screen:
        screen.wait_for("gpus 1")
        screen.wait_for("k: kill")
        screen.press(DOWN + DOWN + "s")
        screen.wait_for("in sleep")
        screen.wait_for("any key: back")
        screen.press(" ")
        screen.wait_for("gpus 1")
        screen.press("l")
        screen.wait_for(": sleeps")
        screen.press(" ")
        screen.wait_for("gpus 1")
        screen.press("k")
        screen.wait_for("kill gpus 1")
        screen.press("n")
        screen.wait_for("gpus 1")
        screen.press("q")
        assert screen.process.wait(30) == 0
        assert screen.modes_are_restored
    assert [process.exit_code for process in select(str(running.pid))[0].processes] == [None] * 3


def test_screen_kills_the_program_after_a_question(tmp_path: Path) -> None:
    with busy_program(str(tmp_path)) as process, _screen(str(process.pid), "--interval", "0.1") as screen:
        screen.wait_for("k: kill")
        screen.press("k")
        screen.wait_for("with all its processes?")
        screen.press("9")
        screen.wait_for("and its 2 processes ended")
        assert process.wait(30) == -signal.SIGKILL
        screen.press(" ")
        screen.wait_for("no running program is")
        screen.press("q")
        assert screen.process.wait(30) == 0
