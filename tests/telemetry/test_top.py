"""`monarch-backend top`: rates of processes, and the tree as a table. test_top_screen.py has the screen."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from monarch_backend import cli
from monarch_backend._core import platform
from monarch_backend._telemetry.kinds import Kind
from monarch_backend._telemetry.programs import Process, Program, select
from monarch_backend._telemetry.rates import RateMeter, Rates
from monarch_backend._telemetry.reader import Area
from monarch_backend._telemetry.recording_area import RecordingArea
from monarch_backend.cli import ps
from monarch_backend.cli.top_rows import COLUMNS, Row, chosen, rows_of
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


def _recorded(kind: str, name: str, rank: int = 0, **others: Any) -> dict[str, Any]:
    activity = {"state": "running", "detail": "", "seconds": 3.21, "ended": 5, "call": "", "queue": 0}
    return {"kind": kind, "name": name, "rank": rank, **activity, **others}


def _process(pid: int, label: str, *activities: dict[str, Any], **others: Any) -> Process:
    facts = {"state": "running", "parent": 1, "age": 1.0, "exit_code": None, "memory": 1 << 30, "cpu_seconds": 1.0}
    return Process(pid=pid, label=label, activities=list(activities), **{**facts, **others})


def test_table_is_the_tree_of_ps_with_rates(running: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", str(running.pid), "--once", "--interval", "0.05"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == [
        "PROCESS", "PID", "STATE", "ENDPOINT", "FOR", "DONE", "CPU%", "MEMORY", "MSG/S", "BYTES/S",
    ]  # fmt: skip
    own, _, _, _, process, worker, concurrent = lines
    assert own.startswith(f"{select(str(running.pid))[0].command} ")
    assert re.fullmatch(r"  gpus 1 of trainers +\d+  running +\d+\.\d +\d+ MiB +0 +0", process)
    assert re.fullmatch(r"    worker rank 1 +running +sleep +\d.* m?s +21", worker)
    assert re.fullmatch(r"    concurrent rank 1 +running +wait +\d.* m?s +0", concurrent)


def test_rows_have_the_facts_of_ps() -> None:
    controller = _process(
        1, "program 1", _recorded("wait", "trainer", detail="check", state="waiting", seconds=1.2, call="a.5"),
        _recorded("wait", "breakpoint", detail="train.py:7"), _recorded("span", "load"),
        _recorded("step", "epoch", median_seconds=0.5, window=10), parent=0,
    )  # fmt: skip
    worker = _process(
        2,
        "gpus 0",
        _recorded("message", "trainer", 3, detail="check", queue=17, call="a.5"),
        restarts=2,
        gpu_memory=3 << 30,
    )
    dead = _process(
        3, "gpus 1", _recorded("message", "trainer", 1, state="lost"), state="ended", exit_code=-9, memory=None
    )
    program = Program(1, "train.py", [controller, worker, dead])
    found = [
        dict(zip(COLUMNS, row.cells, strict=True)) for row in rows_of([program], {("", 2): Rates(1500.4, 2e6, 0.254)})
    ]
    assert [{name: cell for name, cell in row.items() if cell} for row in found] == [
        {"PROCESS": "train.py", "PID": "1", "STATE": "running", "MEMORY": "1024 MiB"},
        {"PROCESS": "  call", "STATE": "waiting", "ENDPOINT": "trainer.check, rank 3 missing", "FOR": "1.2 s"},
        {"PROCESS": "  breakpoint", "STATE": "running", "ENDPOINT": "train.py:7", "FOR": "3.2 s"},
        {"PROCESS": "  load", "STATE": "running", "FOR": "3.2 s", "DONE": "5"},
        {"PROCESS": "  epoch", "ENDPOINT": "median of the last 10", "FOR": "500 ms", "DONE": "5"},
        {
            "PROCESS": "  gpus 0", "PID": "2", "STATE": "running", "MEMORY": "1024 MiB", "GPU": "3072 MiB",
            "CPU%": "25.4", "MSG/S": "1500", "BYTES/S": "2.0 M", "RESTARTS": "2",
        },
        {
            "PROCESS": "    trainer rank 3", "STATE": "running", "ENDPOINT": "check", "FOR": "3.2 s", "QUEUE": "17",
            "DONE": "5",
        },
        {"PROCESS": "  gpus 1", "PID": "3", "STATE": "ended with -9"},
        {"PROCESS": "    trainer rank 1", "STATE": "lost", "FOR": "3.2 s", "DONE": "5"},
    ]  # fmt: skip
    text = ps.as_text(program)
    for cell in ("trainer.check", ", rank 3 missing", "1.2 s", "3072 MiB", "17 in the queue", "ended with -9"):
        assert cell in text


def test_hosts_of_a_job_are_the_roots() -> None:
    here = Program(1, "train.py", [_process(1, "program 1", parent=0)])
    there = Program(
        1, "daemon", [_process(1, "agent", parent=0), _process(2, "gpus 0", exit_code=1)], host="hosts[0] (a)"
    )
    rows = rows_of([there, here], {})
    assert [row.cells[0] for row in rows] == [
        "hosts[0] (a)", "  agent of daemon", "    gpus 0", "this machine", "  train.py",
    ]  # fmt: skip
    assert rows[0].cells[2] == "1 running"
    assert [row.member and row.member[1].pid for row in rows] == [None, 1, 2, None, 1]


def test_rows_keep_their_keys_and_no_two_have_the_same() -> None:
    def look(seconds: float) -> list[Row]:
        concurrent = [_recorded("message", "a", seconds=seconds, detail=each) for each in ("f", "g")]
        processes = [
            _process(1, "program 1", parent=0),
            _process(2, "gpus 0", exit_code=1),
            _process(2, "gpus 0", *concurrent),
        ]
        return rows_of([Program(1, "x", processes)], {})

    keys = [row.key for row in look(1.0)]
    assert len(set(keys)) == 5
    assert keys == [row.key for row in look(2.0)]


def test_control_characters_are_replaced_in_rows() -> None:
    [row] = rows_of([Program(1, "x\x1b[2J\x9b5m\ny", [_process(1, "program 1", parent=0)])], {})
    assert row.cells[0] == "x\ufffd[2J\ufffd5m\ufffdy"


def test_rows_with_a_text_have_those_above_and_below() -> None:
    processes = [
        _process(1, "program 1", parent=0), _process(2, "gpus 0", _recorded("message", "actor", detail="step")),
        _process(3, "gpus 1", _recorded("message", "actor"), _recorded("message", "other")),
    ]  # fmt: skip
    rows = rows_of([Program(1, "train.py", processes)], {})
    assert [row.cells[0].strip() for row in chosen(rows, "Actor rank")] == [
        "train.py", "gpus 0", "actor rank 0", "gpus 1", "actor rank 0",
    ]  # fmt: skip
    assert [row.cells[0].strip() for row in chosen(rows, "gpus 1")] == [
        "train.py",
        "gpus 1",
        "actor rank 0",
        "other rank 0",
    ]
    assert chosen(rows, "") == chosen(rows, "train") == rows
    assert chosen(rows, "absent") == []


def test_json_has_rates_of_each_process(running: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", str(running.pid), "--json", "--interval", "0.05"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["program"] for row in rows] == [running.pid] * 3
    assert set(rows[2]["rates"]) == {"messages_per_second", "bytes_per_second", "cpu"}
    assert [row["restarts"] for row in rows] == [0, 0, 0] and rows[2]["activities"][0]["detail"] == "sleep"


def test_screen_without_a_terminal_is_an_error(
    running: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["top", str(running.pid)]) == 1
    assert "needs a terminal; --once" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "nan", "-1", "soon", "3601"])
def test_interval_that_is_no_time_is_an_error(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["top", f"--interval={seconds}"])
    assert "argument --interval: " in capsys.readouterr().err


WITHOUT_TEXTUAL = """
import sys
sys.modules["textual"] = None
sys.stdin.isatty = sys.stdout.isatty = lambda: True
from monarch_backend.cli import main
sys.exit(main(["top", *sys.argv[1:]]))
"""


def test_screen_without_textual_says_what_to_install(running: subprocess.Popen[str]) -> None:
    words = [sys.executable, "-c", WITHOUT_TEXTUAL, str(running.pid)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "monarch-backend top: the screen needs textual: pip install 'monarch_backend[top]'; --once prints one table "
        "without it\n"
    )
    done = subprocess.run([*words, "--once", "--interval", "0.01"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "worker rank 1" in done.stdout, done.stderr
