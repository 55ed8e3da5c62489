"""Training steps: their recording, and the ranks whose steps are slow."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from monarch_backend import cli
from monarch_backend._core import platform
from monarch_backend._telemetry import jobs, program_recording, sql, sql_filters, step_window, steps, stragglers
from monarch_backend._telemetry.kinds import Kind, SlotState
from monarch_backend._telemetry.reader import RecordedEvent, RecordedProcess
from monarch_backend.telemetry import step
from tests.support.ranks import run_ranks
from tests.support.running_script import running_script
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="recording areas need memfd_create")

SCRIPT = """
import sys, time
from monarch_backend.actor import Actor, current_rank, endpoint, this_host
from monarch_backend.telemetry import step


class Trainer(Actor):
    @endpoint
    def train(self, steps, slow):
        for _ in range(steps):
            time.sleep(0.15 if slow and current_rank()["gpus"] == slow else 0.03)
            step()


def main():
    procs = this_host().spawn_procs({"gpus": 4}, name="trainers")
    trainers = procs.spawn("trainer", Trainer)
    trainers.train.call(12, 2).get()
    trainers.slice(gpus=0).train.call_one(10000, None).get()
    sys.stdin.readline()


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def slow_mesh(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with running_script(tmp_path / "slow_mesh.py", SCRIPT, stderr=subprocess.PIPE) as process:
        yield process


def test_slow_rank_of_a_mesh_is_named_by_the_log_ps_and_sql(
    slow_mesh: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert slow_mesh.stderr is not None
    line = next(line for line in slow_mesh.stderr if "is slow" in line)
    assert "gpus 2 of trainers (pid " in line and "times the median of 4 ranks (" in line
    assert cli.main(["ps", str(slow_mesh.pid)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("is slow") == 1 and "gpus 2 of trainers" in shown.splitlines()[-1]
    assert "step 11 done, median of the last 11 " in shown
    assert cli.main(["ps", str(slow_mesh.pid), "--json"]) == 0
    [program] = json.loads(capsys.readouterr().out)
    [slow] = program["slow"]
    assert (slow["label"], slow["name"], slow["steps"], slow["ranks"]) == ("gpus 2 of trainers", "step", 11, 4)
    recording = program_recording.read(str(slow_mesh.pid))
    rows = sql.answer("select process, is_slow, median_us from step_times order by process", recording).rows
    assert [row[:2] for row in rows] == [(f"gpus {rank} of trainers", int(rank == 2)) for rank in range(4)]
    assert all(row[2] >= 30000 for row in rows)
    [(steps, timed, last)] = sql.answer(
        "select count(*), count(duration_us), max(number) from steps where process = 'gpus 2 of trainers'", recording
    ).rows
    assert (steps, timed, last) == (12, 11, 12)


def _train(rank: int) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("monarch_backend")
    log.addHandler(handler)
    x = torch.ones(4)
    for _ in range(8):
        if rank == 1:
            time.sleep(0.04)
        dist.all_reduce(x)
        step("train")
    if rank == 0:
        wait_until(lambda: lines)
    dist.barrier()
    if rank == 0:
        [job] = [job for job in jobs.running(*stragglers.KINDS).values() if any(p.pid == os.getpid() for p in job)]
        times = {each.label: each for each in stragglers.of_job(job)}
        assert {label: each.is_slow for label, each in times.items()} == {
            "rank 0": False, "rank 1": True, "rank 2": False,
        }  # fmt: skip
        # All ranks wait for the slow one, so their steps are equally long.
        assert min(each.median_ns for each in times.values()) > 35e6
        assert times["rank 1"].own_ns > 35e6 > 4 * times["rank 0"].own_ns
    dist.barrier()
    return lines


def test_rank_for_which_others_wait_in_a_collective_is_named_by_rank_0() -> None:
    lines = run_ranks(_train, 3)
    assert len(lines[0]) == 1 and lines[0][0].startswith("rank 1 (pid ") and "train takes" in lines[0][0]
    assert lines[1:] == [[], []]


def _recorded(rank: int, steps: list[tuple[int, int]], waits: list[tuple[int, int]]) -> RecordedProcess:
    def event(kind: Kind, start: int, end: int) -> RecordedEvent:
        return RecordedEvent(0, end * 10**6, (end - start) * 10**6, kind, 0, 0, "step", "", 0, 0, 0)

    events = [event(Kind.STEP, *each) for each in steps] + [event(Kind.COLLECTIVE, *each) for each in waits]
    return RecordedProcess(rank, 100 + rank, f"gpus {rank} of m", SlotState.ALIVE, 0, 0, 0, [], events)


def _slow(ranks: list[RecordedProcess], **options: Any) -> list[int]:
    return [each.pid - 100 for each in stragglers.of_job(ranks, **options) if each.is_slow]


def test_slow_ranks_are_those_beyond_the_factor() -> None:
    def rank(number: int, step_ms: int, count: int = 6, wait_ms: int = 0) -> RecordedProcess:
        starts = [step_ms * n for n in range(count)]
        waits = [(start, start + wait_ms) for start in starts] * 2  # of two groups at the same time
        return _recorded(number, [(start, start + step_ms) for start in starts], waits if wait_ms else [])

    assert _slow([rank(0, 10), rank(1, 16)], limit=1.5) == [1]
    assert _slow([rank(0, 10), rank(1, 15)], limit=1.5) == []
    assert _slow([rank(0, 10), rank(1, 16)], limit=2.0) == []
    assert _slow([rank(0, 10), rank(1, 16)], limit=0.0) == []
    assert _slow([rank(0, 10), rank(1, 90, count=4)], limit=1.5) == []  # too few steps
    assert _slow([rank(0, 100, wait_ms=70), rank(1, 100, wait_ms=10), rank(2, 100, wait_ms=68)], limit=1.5) == [1]
    assert _slow([rank(0, 100, wait_ms=99), rank(1, 100, wait_ms=95)], limit=1.5) == []  # 4 ms of 100


def test_query_of_step_times_reads_collectives_too() -> None:
    assert set(sql_filters.filter_of("select * from step_times").kinds) == set(stragglers.KINDS)


def test_step_records_nothing_where_nothing_is_recorded() -> None:
    code = (
        "from monarch_backend._telemetry import steps\n"
        "for _ in range(3): steps.step()\n"
        "assert not steps._steps\n"
    )  # fmt: skip
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "MONARCH_TELEMETRY": "0"}, check=True, timeout=60)


BLOCKS = """
import time
from monarch_backend.actor import this_proc
from monarch_backend._telemetry import steps
from monarch_backend.telemetry import query, step

procs = this_proc()
with steps.watched() as watch:
    for number in range(4):
        with step("block"):
            pass
        time.sleep(0.3)  # a validation, which is no part of a step
try:
    with step("block"):
        raise ValueError
except ValueError:
    pass
for number in range(3):
    step("call")
print(query("select number, duration_us < 250000 from steps where duration_us and name = 'block'").rows)
print(query("select number, duration_us is null from steps where name = 'call'").rows)
print(watch.count, query("select name, ended from activities where kind = 'step'").rows)
"""


def test_with_step_ends_a_step_at_the_end_of_the_block() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[(1, 1), (2, 1), (3, 1), (4, 1)]",
        "[(1, 1), (2, 0), (3, 0)]",
        "4 [('block', 4), ('call', 2)]",
    ]


def test_with_step_has_no_effect_where_nothing_is_recorded() -> None:
    code = "from monarch_backend._telemetry import steps\nwith steps.step(): pass\nassert not steps._steps\n"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "MONARCH_TELEMETRY": "0"}, check=True, timeout=60)


def test_names_of_steps_are_bounded() -> None:
    code = (
        "from monarch_backend.actor import this_proc\n"
        "from monarch_backend._telemetry import steps\n"
        "from monarch_backend.telemetry import query, step\n"
        "procs = this_proc()\n"
        "for number in range(100):\n"
        "    step(f'step {number}')\n"
        "print(len(steps._steps), query('select count(*) from activities').rows)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{steps.MAX_NAMES} [({steps.MAX_NAMES},)]\n"


def test_one_look_at_a_time_whose_pause_follows_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    running, goes_on, looks = threading.Event(), threading.Event(), []

    def seen_by(pid: int) -> list[Any]:
        looks.append(pid)
        running.set()
        goes_on.wait(60)
        return []

    monkeypatch.setattr(stragglers, "seen_by", seen_by)
    monkeypatch.setattr(steps, "FIRST_LOOK_S", 0.0)
    made = steps._Steps("looked at")
    made._pause = 0.0
    for _ in range(step_window.MIN_STEPS + 3):
        made.end()
    assert running.wait(60)
    for _ in range(10):
        made.end()
    assert len(looks) == 1
    goes_on.set()
    deadline = time.monotonic() + 60
    while made._is_looking:
        assert time.monotonic() < deadline
    assert looks[0] == os.getpid() and made._pause < 60
