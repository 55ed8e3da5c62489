"""Reports of failures: what the process was doing, its last messages, its stack, and kills for lack of memory."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_backend._actor.processes import exits
from monarch_backend._core import platform
from monarch_backend._processes import cgroup
from monarch_backend._telemetry import last_messages
from monarch_backend.actor import Actor, endpoint, span, this_host
from tests.actor.failing_actors import end_process
from tests.actor.support import PATIENCE, Faults
from tests.support.waiting import wait_until

recorded = pytest.mark.skipif(not platform.HAS_MEMFD, reason="recording areas need memfd_create")


class Worker(Actor):
    @endpoint
    def echo(self, value: int) -> int:
        return value

    @endpoint
    def die(self, how: str) -> None:
        with span("load"):
            end_process(how)

    @endpoint
    def print_and_die(self) -> None:
        print("warning: slow disk", file=sys.stderr, flush=True)
        print("shard 17 is corrupt", flush=True)
        end_process("SIGKILL")

    @endpoint
    def raises(self) -> None:
        self.deep(20)

    def deep(self, levels: int) -> None:
        if levels:
            self.deep(levels - 1)
        raise ValueError("too deep")

    @endpoint
    def end_with_traceback(self) -> None:
        try:
            self.deep(20)
        except ValueError:
            traceback.print_exc()
            print("the end", file=sys.stderr, flush=True)
        os._exit(3)


def test_last_words_have_no_lines_of_the_profiler() -> None:
    of_profiler = "USDT:2026-11-30 06:21:11 14355:15667 SyncActivityProfilerHandler.cpp:59] profiler_stop"
    both = ["no data", of_profiler, of_profiler.replace("stop", "start")]
    assert exits._last_words(both, both) == ("no data",)
    assert exits._last_words([of_profiler], [of_profiler]) == ()


def test_report_of_a_killed_process_has_its_last_lines_of_both_streams(faults: Faults) -> None:
    with this_host().spawn_procs({"gpus": 1}) as procs:
        procs.spawn("worker", Worker).print_and_die.broadcast()
        report = faults.next().report()
    assert sorted(re.findall(r"^ *\| (.*)$", report, re.MULTILINE)) == ["shard 17 is corrupt", "warning: slow disk"]


@recorded
def test_report_of_a_killed_process_has_its_last_messages(faults: Faults) -> None:
    with this_host().spawn_procs({"gpus": 2}, name="pair") as procs:
        workers = procs.spawn("worker", Worker)
        for number in range(7):
            workers.echo.call(number).get(PATIENCE)
        workers.slice(gpus=1).die.broadcast("SIGKILL")
        failure = faults.next()
    [death] = failure.deaths
    first = rf"pair: gpus 1 \(host \S+, pid {death.pid}\): killed by signal 9 \(SIGKILL\)"
    assert re.fullmatch(first, str(failure))
    time = r"[\d.]+ (us|ms|s)"
    running, inside, *ended = death.messages
    assert re.fullmatch(rf"it was running worker\.die for {time}", running)
    assert re.fullmatch(rf"it was in the span load for {time}", inside)
    assert len(ended) == 5
    assert all(re.fullmatch(rf"worker\.echo: ok after {time}, ended {time} ago", line) for line in ended)
    lines = failure.report().splitlines()
    assert lines[2:9] == [f"    - {line}" for line in death.messages]
    assert pickle.loads(pickle.dumps(failure)).deaths[0].messages == death.messages


@recorded
def test_report_of_a_failed_actor_has_its_stack_and_messages(faults: Faults) -> None:
    with this_host().spawn_procs({"gpus": 1}, name="one") as procs:
        worker = procs.spawn("worker", Worker)
        procs.spawn("other", Worker).echo.call_one(1).get(PATIENCE)
        worker.echo.call_one(1).get(PATIENCE)
        worker.raises.broadcast()
        failure = faults.next()
    report = failure.report()
    assert "- it was running worker.raises for " in report and "- worker.echo: ok after " in report
    assert "- construction of worker: ok after" in report and "other" not in report
    assert "in deep" in report and "ValueError: too deep" in report


def test_report_of_a_process_has_the_whole_last_traceback(faults: Faults) -> None:
    with this_host().spawn_procs({"gpus": 1}, name="one") as procs:
        procs.spawn("worker", Worker).end_with_traceback.broadcast()
        report = faults.next().report()
    assert "| Traceback (most recent call last):" in report and "in end_with_traceback" in report
    assert "| ValueError: too deep" in report and "| the end" in report


def test_process_without_recording_has_no_messages() -> None:
    assert last_messages.of_started(os.getppid()) == ()
    assert isinstance(last_messages.of_actor("none"), tuple)


def test_no_recording_is_no_failure_of_the_report() -> None:
    code = (
        "from monarch_backend._telemetry import last_messages\n"
        "assert last_messages.of_started(1) == () == last_messages.of_actor('x')\n"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "MONARCH_TELEMETRY": "0"}, check=True, timeout=60)


STARVED = """
import os, sys
with open(sys.argv[1], "w") as file:
    file.write(str(os.getpid()))
from monarch_backend.actor import Actor, endpoint, this_host


class Worker(Actor):
    @endpoint
    def echo(self):
        return 1

    @endpoint
    def fill(self):
        kept = []
        while True:
            kept.append(b"x" * (1 << 20))


def main():
    worker = this_host().spawn_procs({"gpus": 1}, name="starved").spawn("worker", Worker)
    worker.echo.call_one().get()
    worker.fill.call_one().get()


if __name__ == "__main__":
    main()
"""


@contextlib.contextmanager
def _memory_group(limit: int) -> Iterator[Path]:
    """Make a control group below that of this process, of either version. Skip the test where that is not allowed."""
    base = next(cgroup.directories("memory"), None)
    if base is None:
        pytest.skip("this process has no control group of memory")
    group = base / f"monarch-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        name = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
        try:
            (group / name).write_text(str(limit))
        except OSError as error:
            pytest.skip(f"the memory of a control group can't be limited: {error}")
        yield group
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


@recorded
@pytest.mark.slow
def test_kill_for_lack_of_memory_is_reported_with_what_it_was_doing(tmp_path: Path) -> None:
    (tmp_path / "starved.py").write_text(STARVED)
    with _memory_group(600 << 20) as group:
        words = [sys.executable, str(tmp_path / "starved.py"), str(group / "cgroup.procs")]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    if "Permission" in done.stderr or "PermissionError" in done.stderr:
        pytest.skip("this process may not be moved to another control group")
    assert done.returncode == 1
    assert "killed by signal 9 (SIGKILL): out of memory" in done.stderr, done.stderr
    assert "- it was running worker.fill for " in done.stderr
