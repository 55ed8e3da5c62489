"""Processes that a program starts by itself: workers of a data loader, of multiprocessing, and other programs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_backend import cli
from monarch_backend._core import platform
from monarch_backend._telemetry import child_processes, programs, py_spy, stacks
from monarch_backend._telemetry.folded_stacks import fold
from tests.support.running_script import running_script
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="programs are found by their memory files")

SCRIPT = """
import multiprocessing, os, pathlib, subprocess, sys
from torch.utils.data import DataLoader, Dataset
from monarch_backend.actor import Actor, endpoint, this_host


GO = os.path.join(os.path.dirname(os.path.abspath(__file__)), "go")


class Images(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return read_image()


def read_image():
    while multiprocessing.parent_process().is_alive() and not os.path.exists(GO):
        multiprocessing.parent_process().join(0.05)


def start_two():
    multiprocessing.get_context("fork").Process(target=read_image, daemon=True).start()
    read_image()


class Trainer(Actor):
    @endpoint
    def step(self):
        for batch in DataLoader(Images(), num_workers=1):
            pass

    @endpoint
    def step_with(self, method):
        for batch in DataLoader(Images(), num_workers=1, multiprocessing_context=method):
            pass


if __name__ == "__main__":
    procs = this_host().spawn_procs({"gpus": 2}, name="trainers")
    calls = [procs.spawn("trainer", Trainer).step.call()]
    others = this_host().spawn_procs({"others": 2}, name="others")
    for rank, method in enumerate(["spawn", "forkserver"]):
        calls.append(others.slice(others=rank).spawn(f"trainer_{method}", Trainer).step_with.call(method))
    fresh = multiprocessing.get_context("spawn").Process(target=read_image, daemon=True)
    fresh.start()
    nested = multiprocessing.get_context("fork").Process(target=start_two)
    nested.start()
    other = subprocess.Popen(["cat"], stdin=subprocess.PIPE)  # like all others, it ends with its starter
    print(fresh.pid, nested.pid, other.pid, flush=True)
    sys.stdin.readline()
    pathlib.Path(GO).touch()
    for each in calls:  # all end by themselves: a killed worker leaves its semaphores
        each.exception(60)
    fresh.join()
    nested.join()
"""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Yield a program, and the pids of three processes that it has started: spawned, forked, of another program."""
    with running_script(tmp_path_factory.mktemp("program") / "loader.py", SCRIPT) as program:
        assert program.stdout is not None
        pids = [int(each) for each in program.stdout.readline().split()]
        wait_until(lambda: len(_children(program.pid)) == 8)
        yield program, pids
        program.communicate("\n", timeout=90)


def _children(pid: int) -> list[programs.ChildProcess]:
    found = programs.select(str(pid))
    child_processes.add_to(found)
    return found[0].children


def _output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(list(words)) == 0
    return capsys.readouterr().out


def _function(pid: int) -> str:
    threads = stacks.read(pid, with_py_spy=False).threads
    return threads[-1].innermost.function if threads and threads[-1].innermost else ""


def test_ps_lists_child_processes_below_their_starter(
    started: tuple[subprocess.Popen[str], list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    program, (fresh, nested, other) = started
    [facts] = json.loads(_output(capsys, "ps", str(program.pid), "--json"))
    below: dict[str, list[dict[str, Any]]] = {each["label"]: [] for each in facts["processes"]}
    for child in facts["children"]:
        parent = next(each for each in facts["processes"] if each["pid"] == child["parent"])
        below[parent["label"]].append(child)
    assert [len(each) for each in below.values()] == [4, 1, 1, 1, 1]
    own = {child["pid"]: child for child in below["program loader.py"]}
    assert {fresh, nested, other} < set(own)
    assert own[other]["label"] == "cat of program loader.py" and not own[other]["is_python"]
    assert all(child["is_python"] for pid, child in own.items() if pid != other)
    assert all(child["memory"] > 0 and child["state"] == "running" and child["age"] < 600 for child in own.values())
    text = _output(capsys, "ps", str(program.pid))
    assert f"\n    1 child process cat (pid {other}, running)\n" in text
    loader = below["gpus 0 of trainers"][0]
    assert f"\n      1 child process {loader['label'].split(' of ')[0]} (pid {loader['pid']}, running)\n" in text


def test_stack_names_the_line_of_a_data_loaders_worker(
    started: tuple[subprocess.Popen[str], list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    program, (_, nested, other) = started
    workers = [each for each in _children(program.pid) if "gpus" in each.label]
    wait_until(lambda: all(_function(each.pid) == "read_image" for each in workers))
    blocks = _output(capsys, "stack", str(program.pid)).split("\n\n")
    [block] = [each for each in blocks if f"pids {workers[0].pid}, {workers[1].pid})" in each]
    assert "in __getitem__\n        return read_image()\n" in block
    assert "in step" not in block, "these calls are the parent's"
    assert "another thread" not in block, "the feeder of a queue"
    [block] = [each for each in blocks if each.startswith("gpus 0-1 of trainers")]
    assert "for batch in DataLoader(Images(), num_workers=1):" in block and "another thread" not in block
    [block] = [each for each in blocks if f"(pid {nested})" in each]
    assert "in start_two" in block and "<module>" not in block
    assert not any(str(other) in each.splitlines()[0] for each in blocks)
    whole = _output(capsys, "stack", str(program.pid), "--all-threads", "--rank", "gpus 0")
    assert "in _feed" in whole and str(workers[1].pid) not in whole


def test_stack_of_a_rank_has_its_workers(
    started: tuple[subprocess.Popen[str], list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    program, _ = started
    [facts] = json.loads(_output(capsys, "stack", str(program.pid), "--rank", "gpus 1", "--json"))
    rank, worker = facts["processes"]
    assert rank["label"] == "gpus 1 of trainers" and worker["label"].endswith(" of gpus 1 of trainers")
    assert worker["problem"] == "" and worker["threads"]


def test_stack_of_spawned_workers_needs_py_spy(started: tuple[subprocess.Popen[str], list[int]]) -> None:
    program, (fresh, _, _) = started
    others = [each.pid for each in _children(program.pid) if "others" in each.label]
    assert len(others) == 2
    assert "it writes no stacks" in stacks.read(fresh, with_py_spy=False).problem
    if py_spy.find() is not None:
        for pid in [fresh, *others]:
            wait_until(lambda pid=pid: "read_image" in str(stacks.read(pid).threads))  # type: ignore[misc]
            assert "spawn_main" not in str(stacks.read(pid).threads), "calls that start the interpreter"


def test_stack_of_a_workers_worker_begins_at_its_own_start(started: tuple[subprocess.Popen[str], list[int]]) -> None:
    program, (_, nested, _) = started
    with open(f"/proc/{nested}/task/{nested}/children") as file:
        [inner] = [int(each) for each in file.read().split()]
    assert inner in {each.pid for each in _children(program.pid)}
    wait_until(lambda: _function(inner) == "read_image")
    [main] = [each for each in stacks.read(inner, with_py_spy=False).threads if each.innermost]
    assert "start_two" not in str(main)


def test_folded_name_of_workers_chooses_them(
    started: tuple[subprocess.Popen[str], list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    program, _ = started
    [name] = {each.label.split(" of ")[0] for each in _children(program.pid) if "gpus" in each.label}
    folded = _output(capsys, "stack", str(program.pid), "--rank", f"{name} of gpus 0-1 of trainers", "--json")
    assert len(json.loads(folded)[0]["processes"]) == 2
    assert cli.main(["stack", str(program.pid), "--rank", "cat"]) == 1
    error = capsys.readouterr().err
    assert f"{name} of gpus 0-1 of trainers" in error and "cat of" not in error


def test_child_process_that_has_ended_is_not_listed(tmp_path_factory: pytest.TempPathFactory) -> None:
    script = """
import subprocess, sys
from monarch_backend import telemetry
with telemetry.span("work"):
    print(subprocess.run(["true"]).returncode, flush=True)
    sys.stdin.readline()
"""
    with running_script(tmp_path_factory.mktemp("program") / "ends.py", script) as program:
        assert program.stdout is not None and program.stdout.readline() == "0\n"
        assert _children(program.pid) == []


HANGS_IN_FORK = """
import multiprocessing, os, sys
from monarch_backend import telemetry


def wait():
    print(os.getpid(), flush=True)
    os.read(READ, 1)


def wait_in_child():
    os.close(WRITE)
    wait()


def train():
    multiprocessing.get_context("fork").Process(target=print).start()


READ, WRITE = os.pipe()
if sys.argv[1] == "parent":
    os.register_at_fork(before=wait)
else:
    os.register_at_fork(after_in_child=wait_in_child)
with telemetry.span("work"):
    train()
    sys.stdin.readline()
"""


@pytest.mark.parametrize("where", ["parent", "child"])
def test_process_that_hangs_in_a_fork_is_shown(where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if where == "child" and py_spy.find() is None:
        pytest.skip("it has no handler of its own yet: py-spy reads it")
    (tmp_path / "forks.py").write_text(HANGS_IN_FORK)
    command = [sys.executable, str(tmp_path / "forks.py"), where]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as program:
        try:
            assert program.stdout is not None
            pid = int(program.stdout.readline())
            assert (pid == program.pid) == (where == "parent")
            wait_until(lambda: [each.pid for each in _children(program.pid)] == [pid] * (where == "child"))
            wait_until(lambda: "in wait\n" in _output(capsys, "stack", str(program.pid), "--rank", str(pid)))
            text = _output(capsys, "stack", str(program.pid), "--rank", str(pid))
            assert "in train\n" in text and "in <module>\n" in text
        finally:
            program.kill()


def test_thread_of_the_program_in_multiprocessing_is_shown() -> None:
    def thread(*functions: str) -> stacks.Thread:
        return stacks.Thread(tuple(stacks.Frame(f"{stacks._MULTIPROCESSING}queues.py", 1, each) for each in functions))

    process = programs.Process(7, "worker", "running", 1, 0.0, None, None, None, [])
    feeder, reader, main = thread("_feed"), thread("get"), thread("join")
    assert feeder.is_of_multiprocessing and not reader.is_of_multiprocessing
    [text] = fold([(process, stacks.Stacks(7, [feeder, reader, main]))])
    assert "in get" in text and "in join" in text and "in _feed" not in text
