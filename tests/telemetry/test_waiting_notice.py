"""Notice of a long wait, and the text of timeouts: the missing ranks, their lines, and what they wait for."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_backend import cli
from monarch_backend._core import platform
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="places of other processes need memfd_create")

SCRIPT = """
import asyncio, functools, os, signal, sys, threading, time
from monarch_backend.actor import Actor, Channel, concurrent_endpoint, current_rank, endpoint, this_host


class Worker(Actor):
    def __init__(self):
        self.guard = threading.Lock()
        self.guard.acquire()

    @endpoint
    def set(self, other):
        self.other = other
        return os.getpid()

    @endpoint
    def step(self, slow, seconds):
        if current_rank()["gpus"] == slow:
            self.load(seconds)

    def load(self, seconds):
        time.sleep(seconds)  # line A

    @endpoint
    def lock(self, seconds):
        self.guard.acquire(timeout=seconds)  # line B

    @endpoint
    def reduce(self, back):
        import torch, torch.distributed as dist
        if dist.get_rank() == 1:
            back.slice(gpus=0).lock.call_one(0).get()
        dist.all_reduce(torch.ones(2))  # line D

    @endpoint
    def ask(self, seconds):
        return self.other.slice(gpus=2).lock.call_one(seconds).get()  # line C


def wait_for_something_else(procs, workers, case):
    one = workers.slice(gpus=1)
    if case == "port":
        Channel.open()[1].recv().get()
    elif case == "awaited port":
        asyncio.run(main_that_awaits_a_port())
    elif case == "awaited call":
        asyncio.run(main_that_awaits_a_call(one))
    elif case == "queue":
        one.lock.broadcast(1000)
        while True:
            one.step.broadcast(1, 0)
    elif case == "end":
        one.lock.call_one(1000).ignore()
        procs.stop().get()


async def main_that_awaits_a_port():
    await Channel.open()[1].recv()


async def main_that_awaits_a_call(one):
    await one.lock.call_one(1000)


def decorated(method):
    @functools.wraps(method)
    def wrapper(*args):
        return method(*args)

    return wrapper


class Decorated(Actor):
    @endpoint
    @decorated
    def step(self):
        time.sleep(1000)  # line H


class Slow(Actor):
    def __init__(self):
        time.sleep(1000)  # line I

    @endpoint
    def step(self):
        pass


class AsyncWorker(Actor):
    def __init__(self):
        self.opened = asyncio.Event()

    @concurrent_endpoint
    async def wait(self):
        await self.load()

    async def load(self):
        await self.opened.wait()  # line E

    @endpoint
    async def ask(self, other):
        await other.slice(gpus=2).wait.call_one()  # line F

    @endpoint
    async def cycle(self, workers, rank):
        # Deadlocks are not detected where an actor has another task.
        self.other = asyncio.create_task(self.opened.wait())
        await workers.slice(gpus=rank).cycle.call_one(workers, 3 - rank)  # line J

    @concurrent_endpoint
    async def values(self):
        yield 1
        await self.load()

    @concurrent_endpoint
    async def block(self, seconds):
        time.sleep(seconds)  # line G


def main():
    if sys.argv[1] == "collective":  # else DeadlockError ends the wait
        os.environ["MONARCH_DEADLOCK_DETECTION"] = "0"
    procs = this_host().spawn_procs({"gpus": 3}, name="trainers")
    case = sys.argv[1]
    if case.startswith("async"):
        main_of_async(procs.spawn("worker", AsyncWorker), case)
        return
    if case in ("decorated", "constructor"):
        procs.initialized.get()
        procs.spawn("worker", {"decorated": Decorated, "constructor": Slow}[case]).step.call().get()
    workers = procs.spawn("worker", Worker)
    workers.set.call(workers).get()
    if case == "missing":
        workers.step.call(1, 1000).get()
    elif case == "queued":
        workers.slice(gpus=0).lock.broadcast(1000)
        workers.slice(gpus=0).set.call_one(None).get()
    elif case == "chain":
        workers.slice(gpus=0).ask.call_one(1000).get()
    elif case == "collective":
        procs.process_group(timeout=100.0).get()
        workers.reduce.call(workers).get()
    elif case == "several":
        workers.lock.call(1000).get()
    elif sys.argv[2:] == ["else"]:
        wait_for_something_else(procs, workers, case)
    elif case == "short":
        workers.step.call(1, 1.2).get()
    elif case == "controller":
        import torch
        from torch.distributed.tensor import Shard, distribute_tensor
        pid = workers.slice(gpus=2).set.call_one(None).get()
        x = distribute_tensor(torch.ones(6, 2), procs.device_mesh("cpu"), [Shard(0)])
        x.sum().item()
        os.kill(pid, signal.SIGSTOP)
        x.sum().item()
    elif case == "stopped":
        pid = workers.slice(gpus=1).set.call_one(None).get()
        os.kill(pid, signal.SIGSTOP)
        workers.slice(gpus=1).lock.call_one(0).get()
    elif case == "timeout":
        for seconds in (0.3, 1.2):
            try:
                workers.slice(gpus=2).lock.call_one(1000).get(timeout=seconds)
            except TimeoutError as error:
                print(error)
        try:
            workers.slice(gpus=1).lock.options(timeout=1.2).call_one(1000).get()
        except TimeoutError as error:
            print(error)


async def main_that_awaits(one):
    await asyncio.gather(one.wait.call_one(), one.block.call_one(0))


async def main_that_awaits_many(one):
    await asyncio.gather(*(one.wait.call_one() for _ in range(30)))


async def main_that_gives_up(one):
    try:
        await asyncio.wait_for(one.wait.call_one(), 1.3)
    except asyncio.TimeoutError:
        print("gave up")


async def main_that_reads(one):
    async for value in one.values.call_one():
        pass


def main_of_async(workers, case):
    workers.block.call(0).get()  # all processes have started
    one = workers.slice(gpus=1)
    if case == "async wait":
        one.wait.call_one().get()
    elif case == "async ask":
        one.ask.call_one(workers).get()
    elif case == "async block":
        future = one.wait.call_one()
        one.block.call_one(1000).ignore()
        future.get()
    elif case == "async cycle":
        one.cycle.call_one(workers, 2).get()
    elif case == "async main":
        asyncio.run(main_that_awaits(one))
    elif case == "async many":
        asyncio.run(main_that_awaits_many(one))
    elif case == "async short":
        asyncio.run(main_that_gives_up(one))
    elif case == "async stream":
        asyncio.run(main_that_reads(one))
    elif case == "async timeout":
        try:
            one.wait.call_one().get(timeout=1.2)
        except TimeoutError as error:
            print(error)


if __name__ == "__main__":
    main()
"""


def _line(mark: str) -> int:
    return next(number for number, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith(f"# line {mark}"))


@contextlib.contextmanager
def _running(folder: Path, case: str, notice: str) -> Iterator[Iterator[str]]:
    """Run a case of the script. It yields the lines that the script prints and logs, and ends with the block."""
    (folder / "train.py").write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, "train.py", case], cwd=folder, env={**os.environ, "MONARCH_WAIT_NOTICE": notice},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            yield process.stdout
        finally:
            process.kill()


def _line_of(folder: Path, case: str, beginning: str) -> str:
    """Return the first line of a case that has this text."""
    with _running(folder, case, "1") as lines:
        return next(line.rstrip() for line in lines if beginning in line)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "logged", "shown"),
    [
        ("port", r"the program has waited 1 s for a message on port \d+", r"a message on port \d+"),
        ("awaited port", r"the program has waited 1 s for a message on port \d+", r"a message on port \d+"),
        ("awaited call", r"worker\.lock of trainers has waited 1 s for .* in lock .*", r"worker\.lock"),
        ("end", r"the program has waited 1 s for the end of trainers", r"the end of trainers"),
        (
            "queue",
            r"the program has waited 1 s for room in the queue of worker: rank 1 .*queued behind lock, .* in lock .*",
            r"room in the queue of worker \(gpus 1\)",
        ),
    ],
)
@pytest.mark.parametrize("notice", ["1", "0"])
def test_each_wait_has_a_name(
    case: str, logged: str, shown: str, notice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, "train.py", case, "else"], cwd=tmp_path, env={**os.environ, "MONARCH_WAIT_NOTICE": notice},
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        try:

            def is_shown() -> bool:
                cli.main(["ps", str(process.pid)])
                return re.search(rf"^    waits for {shown} for ", capsys.readouterr().out, re.MULTILINE) is not None

            wait_until(is_shown)
            if notice == "1":
                next(line for line in process.stderr if re.fullmatch(logged, line.rstrip()))
        finally:
            process.kill()
        assert notice == "1" or " has waited " not in process.stderr.read()


@pytest.mark.slow
def test_wait_for_one_rank_names_its_line(tmp_path: Path) -> None:
    line = _line_of(tmp_path, "missing", "worker.step of")
    assert re.fullmatch(
        r"worker\.step of trainers has waited 1 s for rank 1 of 3 \(gpus 1, pid \d+\): "
        rf"it is at .*train\.py:{_line('A')} in load \(time\.sleep\(seconds\)  # line A\), running step for 1 s",
        line,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("case", "mark", "function"), [("decorated", "H", "step"), ("constructor", "I", "__init__")])
def test_wait_for_a_decorated_endpoint_or_a_constructor_names_its_line(
    case: str, mark: str, function: str, tmp_path: Path
) -> None:
    line = _line_of(tmp_path, case, "worker.step of")
    assert _ranks_at(line, rf"train\.py:{_line(mark)} in {function} \(time\.sleep\(1000\)") == 3


STARTING = """
import time
from monarch_backend.actor import Actor, endpoint, this_host


def bootstrap():
    time.sleep(1000)  # it imports something


class Worker(Actor):
    @endpoint
    def step(self):
        pass


if __name__ == "__main__":
    procs = this_host().spawn_procs({"gpus": 1}, name="trainers", bootstrap=bootstrap)
    procs.spawn("worker", Worker).step.call_one().get()
"""


@pytest.mark.slow
def test_wait_for_a_process_in_its_bootstrap_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "starting.py"
    path.write_text(STARTING)
    command, environment = [sys.executable, str(path)], {**os.environ, "MONARCH_WAIT_NOTICE": "10"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            line = next(each for each in process.stderr if "has waited" in each)
        finally:
            process.kill()
    where = r"its process is starting, it is at .*starting\.py:7 in bootstrap \(time\.sleep\(1000\)"
    assert re.search(rf"rank 0 \(gpus 0, pid \d+\): {where}", line) or re.search(where, line), line


@pytest.mark.slow
def test_wait_for_a_queued_message_names_what_is_before_it(tmp_path: Path) -> None:
    line = _line_of(tmp_path, "queued", "rank 0 of 3")
    assert re.search(
        r"worker\.set of trainers has waited 1 s for rank 0 of 3 \(gpus 0, pid \d+\): "
        rf"the call is queued behind lock, which runs for 1 s; it is at .*train\.py:{_line('B')} in lock",
        line,
    )


@pytest.mark.slow
def test_wait_for_an_actor_that_waits_names_both(tmp_path: Path) -> None:
    with _running(tmp_path, "chain", "1") as output:
        found: list[str] = []
        while not all(any(name in line for line in found) for name in ("worker.ask of", "worker.lock of")):
            found.append(next(output))
    lines = "".join(found)
    assert re.search(
        r"worker\.ask of trainers has waited 1 s for rank 0 of 3 \(gpus 0, pid \d+\): "
        rf"it is at .*train\.py:{_line('C')} in ask .*, running ask for \d s, and waits for worker\.lock for \d s",
        lines,
    )
    assert re.search(
        r"worker \(gpus 0\S*\): worker\.lock of trainers has waited 1 s for rank 2 of 3 .*"
        rf"train\.py:{_line('B')} in lock",
        lines,
    )


@pytest.mark.slow
def test_wait_for_a_rank_in_a_collective_names_the_late_ranks(tmp_path: Path) -> None:
    with _running(tmp_path, "collective", "5") as output:
        found: list[str] = []
        while not all(any(name in line for line in found) for name in ("worker.reduce of", "worker.lock of")):
            found.append(next(output))
    lines = "".join(found)
    place = rf"it is at .*train\.py:{_line('D')} in reduce"
    late = r"in all_reduce #\d+ of group \S+, which"
    assert re.search(rf"worker\.reduce of .*{place}.*, {late} rank 1 \(pid \d+\) has not entered", lines)
    assert re.search(
        rf"worker \(gpus 1\S*\): worker\.lock of .* the call is queued behind reduce.*; {place}.*, {late} this process "
        r"has not entered as rank 1\. Each waits for the other, until the timeout of the group",
        lines,
    )


def _ranks_at(line: str, place: str) -> int:
    """Return the number of ranks at a place. Those with equal texts are folded; their durations may differ."""
    found = re.findall(rf"\(gpus [\d, -]+, pids? ([\d, ]+)\): (?:(?!\(gpus).)*?{place}", line)
    return len(", ".join(found).split(", "))


@pytest.mark.slow
def test_wait_for_several_ranks_names_each(tmp_path: Path) -> None:
    line = _line_of(tmp_path, "several", "worker.lock of")
    assert line.startswith("worker.lock of trainers has waited 1 s for 3 of 3 ranks (gpus 0-2): (gpus 0")
    assert _ranks_at(line, rf"train\.py:{_line('B')} in lock") == 3
    assert line.count("train.py") < 3 or len(set(re.findall(r"for \d s", line))) > 1


@pytest.mark.slow
def test_wait_for_a_stopped_process_names_its_state(tmp_path: Path) -> None:
    line = _line_of(tmp_path, "stopped", "worker.lock of")
    assert "has waited 1 s for rank 1 of 3" in line
    assert "it is stopped" in line or "it has not read the call" in line


@pytest.mark.slow
def test_wait_for_a_controllers_worker_in_a_collective_names_its_line(tmp_path: Path) -> None:
    line = _line_of(tmp_path, "controller", "in all_reduce #")
    assert _ranks_at(line, r"the call is queued behind run, which runs for \d s; it is at ") == 2
    assert "which rank 2 (pid " in line and "between two lines" not in line


@pytest.mark.slow
def test_notice_can_be_switched_off(tmp_path: Path) -> None:
    with _running(tmp_path, "short", "0") as lines:
        assert list(lines) == []


@pytest.mark.slow
def test_timeout_names_the_rank_and_its_line(tmp_path: Path) -> None:
    with _running(tmp_path, "timeout", "0") as lines:
        short, long, limited = (next(lines).rstrip() for _ in range(3))
    assert re.fullmatch(
        r"no answer within 0\.3 s; the call goes on, see Future\.cancel\(\): "
        r"worker\.lock of trainers waits for rank 2 of 3 \(gpus 2, pid \d+\)",
        short,
    )
    assert re.search(rf"rank 2 of 3 .*: .*train\.py:{_line('B')} in lock", long)
    assert limited.startswith(
        "worker.lock took longer than 1.2 s; it was cancelled at the actor: worker.lock of trainers"
    )
    assert f"train.py:{_line('B')} in lock" in limited


_WAITS = rf"it is at .*train\.py:{_line('E')} in load \(await self\.opened\.wait\(\)  # line E\)"


@pytest.mark.slow
def test_wait_for_an_async_endpoint_names_its_awaiting_line(tmp_path: Path) -> None:
    line = _line_of(tmp_path, "async wait", "worker.wait of")
    start = r"worker\.wait of trainers has waited 1 s for rank 1 of 3 \(gpus 1, pid \d+\)"
    assert re.fullmatch(rf"{start}: {_WAITS}, running wait for \d s", line)


@pytest.mark.slow
def test_wait_for_an_async_endpoint_names_the_endpoint_that_it_awaits(tmp_path: Path) -> None:
    line = _line_of(tmp_path, "async ask", "worker.ask of")
    assert re.search(
        rf"rank 1 of 3 .*: it is at .*train\.py:{_line('F')} in ask \(.*\), running ask for \d s, and waits for "
        r"worker\.wait$",
        line,
    )


@pytest.mark.slow
def test_wait_for_an_async_endpoint_of_a_blocked_event_loop_names_both_lines(tmp_path: Path) -> None:
    line = _line_of(tmp_path, "async block", "worker.wait of")
    assert re.search(
        rf"{_WAITS} while its event loop is at .*train\.py:{_line('G')} in block \(time\.sleep\(seconds\)", line
    )


@pytest.mark.slow
def test_timeout_of_an_async_endpoint_names_its_awaiting_line(tmp_path: Path) -> None:
    with _running(tmp_path, "async timeout", "0") as lines:
        text = next(lines).rstrip()
    assert re.search(rf"no answer within 1\.2 s.*worker\.wait of trainers waits for rank 1 of 3 .*: {_WAITS}", text)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "endpoint"), [("async main", "wait"), ("async stream", "values")])
def test_await_of_a_program_that_lasts_is_logged(case: str, endpoint: str, tmp_path: Path) -> None:
    line = _line_of(tmp_path, case, f"worker.{endpoint} of")
    start = rf"worker\.{endpoint} of trainers has waited 1 s for rank 1 of 3 \(gpus 1, pid \d+\): {_WAITS}, running"
    assert re.match(start, line)


@pytest.mark.slow
def test_await_of_an_async_endpoint_that_lasts_is_logged_with_its_actor(tmp_path: Path) -> None:
    line = _line_of(tmp_path, "async ask", "worker.wait of")
    start = r"worker \(gpus 1\S*\): worker\.wait of trainers has waited 1 s for rank 2 of 3"
    assert re.search(rf"{start} \(gpus 2, pid \d+\): {_WAITS}, running wait for \d s$", line)


@pytest.mark.slow
def test_notice_of_awaits_can_be_switched_off(tmp_path: Path) -> None:
    with _running(tmp_path, "async short", "0") as lines:
        assert list(lines) == ["gave up\n"]


@pytest.mark.slow
def test_only_a_few_of_many_long_awaits_have_a_line(tmp_path: Path) -> None:
    with _running(tmp_path, "async many", "1") as output:
        found = []
        while not found or "more awaits" not in found[-1]:
            found.append(next(output))
    lines = [line for line in found if "worker.wait of trainers has waited" in line]
    assert (len(lines), found[-1]) == (4, "26 more awaits of calls have lasted 1 s\n")


@pytest.mark.slow
def test_async_actors_that_wait_for_each_other_log_both_awaits(tmp_path: Path) -> None:
    with _running(tmp_path, "async cycle", "1") as output:
        found: list[str] = []
        while not all(any(f"worker (gpus {rank}" in line for line in found) for rank in (1, 2)):
            found.append(next(output))
    lines = "".join(found)
    place = rf"it is at .*train\.py:{_line('J')} in cycle \(.*\)"
    waits = r"worker \(gpus {}\S*\): worker\.cycle of trainers has waited 1 s for rank {} of 3 \(gpus {}, pid \d+\): "
    assert re.search(rf"{waits.format(1, 2, 2)}{place}, running cycle for \d s, and waits for worker\.cycle", lines)
    queued = r"the call is queued behind cycle, which runs for \d s; "
    assert re.search(rf"{waits.format(2, 1, 1)}{queued}{place}, and waits for worker\.cycle", lines)
