"""Profiles of running processes: torch's operators beside messages, and processes without a profile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_backend import cli
from monarch_backend._core import extension_points, platform
from monarch_backend._telemetry import process_requests, profile_result, profiles, py_spy, request_answers, stacks
from monarch_backend._telemetry.process_requests import Request
from monarch_backend._telemetry.programs import Process, select
from monarch_backend._telemetry.request_answers import RequestError
from tests.support.running_script import running_script
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(
    not platform.HAS_MEMFD or "t" in sys.abiflags, reason="requests need memory files and the stack signal"
)

SCRIPT = """
import sys, threading, time
import torch
from torch.profiler import ProfilerActivity, profile
from monarch_backend.actor import Actor, endpoint, this_host
from monarch_backend.telemetry import step


class Trainer(Actor):
    def __init__(self):
        self.a = torch.randn(64, 64)

    @endpoint
    def multiply(self):
        (self.a @ self.a).sum().item()
        step()


class Plain(Actor):
    @endpoint
    def profiles_itself(self, port):
        with profile(activities=[ProfilerActivity.CPU]):
            torch.ones(2) @ torch.ones(2)
            print("profiles itself", flush=True)
            threading.Event().wait()


def main():
    procs = this_host().spawn_procs({"gpus": 2}, name="trainers")
    trainers = procs.spawn("trainer", Trainer)
    trainers.multiply.call().get()
    others = this_host().spawn_procs({"others": 1}, name="others")
    others.spawn("plain", Plain).profiles_itself.broadcast(None)
    print("ready", flush=True)
    while True:
        trainers.multiply.call().get()
        time.sleep(0.002)


if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    with running_script(tmp_path_factory.mktemp("program") / "profiled.py", SCRIPT) as process:
        assert process.stdout is not None
        seen = {process.stdout.readline().split("] ")[-1].strip() for _ in range(2)}
        assert seen == {"ready", "profiles itself"}, seen
        yield process


def _ranks(running: subprocess.Popen[str]) -> dict[str, Process]:
    [program] = select(str(running.pid))
    return {each.label: each for each in program.processes}


def _command(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "monarch_backend.cli", "profile", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_operators_of_both_ranks_are_within_their_messages(running: subprocess.Popen[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    done = _command(str(running.pid), "--seconds", "0.5", "--ranks", "gpus=0-1", "-o", str(path))
    assert done.returncode == 0, done.stderr
    assert "profiles of 2 of 2 processes, times within" in done.stdout
    trace = json.loads(path.read_text())
    about = trace["otherData"]
    bound = about["clock_error_bound_ns"]
    assert 0 < bound < 10**6
    pids = {_ranks(running)[f"gpus {rank} of trainers"].pid for rank in range(2)}
    assert {each["pid"] for each in about["profiles"] if not each["problem"]} == pids
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    products = [each for each in slices if each["name"] == "aten::mm"]
    messages = [each for each in slices if each["name"] == "trainer.multiply"]
    assert {each["pid"] for each in products} == pids
    assert all(sum(each["pid"] == pid for each in products) >= 5 for pid in pids)
    slack = bound / 1000 + 0.001
    for each in products:
        assert any(
            message["pid"] == each["pid"]
            and message["ts"] - slack <= each["ts"]
            and each["ts"] + each["dur"] <= message["ts"] + message["dur"] + slack
            for message in messages
        ), each
    assert not any(str(each["name"]).startswith("monarch clock") for each in slices)
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert all(tracks[each["pid"], each["tid"]].startswith("torch thread ") for each in products)
    assert any(event["ph"] == "s" for event in trace["traceEvents"])


@pytest.mark.slow
def test_profile_of_steps_ends_after_them(running: subprocess.Popen[str], tmp_path: Path) -> None:
    ranks = [(each.pid, label) for label, each in _ranks(running).items() if "trainers" in label]
    result = profile_result.take(ranks, steps=4)
    assert result.problems == {} and result.labels == [label for _, label in ranks]
    counts = result.save(str(tmp_path / "trace.json"))
    assert counts["X"] > 8 and result.shortfalls(4) == [] and len(result.shortfalls(10**6)) == 2


@pytest.mark.slow
def test_ranks_without_a_profile_are_named_and_others_are_kept(running: subprocess.Popen[str], tmp_path: Path) -> None:
    ranks = _ranks(running)
    stopped = ranks["gpus 1 of trainers"].pid
    path = tmp_path / "trace.json"
    os.kill(stopped, signal.SIGSTOP)
    try:
        done = _command(str(running.pid), "--seconds", "0.2", "-o", str(path))
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert done.returncode == 0, done.stderr
    assert "profiles of 1 of 3 processes" in done.stdout
    assert "no profile of gpus 1 of trainers: it does not answer: it is stopped" in done.stdout
    assert "no profile of others 0 of others: its program uses torch.profiler itself at the moment" in done.stdout
    assert [each["label"] for each in json.loads(path.read_text())["otherData"]["profiles"] if not each["problem"]] == [
        "gpus 0 of trainers"
    ]


def _python(code: str, *arguments: str) -> subprocess.Popen[str]:
    start = "from monarch_backend._telemetry import recorder; recorder.area()\n"
    return subprocess.Popen(
        [sys.executable, "-c", start + code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


HOLDS_THE_GIL = """
import ctypes
mutex, lock = ctypes.create_string_buffer(64), ctypes.PyDLL(None).pthread_mutex_lock
print("ready", flush=True)
lock(mutex), lock(mutex)
"""


def _ask(pid: int, **about: Any) -> str:
    with Request(pid, **about) as request:
        try:
            answer = wait_until(request.answer)
        except RequestError as error:
            return str(error)
        assert answer is not None
        return str(answer[0])


def test_process_without_torch_says_so() -> None:
    with _python("print('ready', flush=True); input()") as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        assert _ask(process.pid, do="profile", seconds=0.1) == "it has not imported torch"
        assert _ask(process.pid, do="profile", seconds=0.1) == "it has not imported torch", "it answers again"
        assert _ask(process.pid, do="unheard of") == "it does not know the request unheard of: it is of another release"
        process.kill()


PROFILES_ITSELF = """
import sys, torch
from torch.profiler import ProfilerActivity, profile
print("ready", flush=True)
sys.stdin.readline()
with profile(activities=[ProfilerActivity.CPU]) as mine:
    print("profiles", flush=True)
    torch.ones(2, 2) @ torch.ones(2, 2)
    if sys.argv[1] == "long":
        sys.stdin.readline()
print([each.key for each in mine.key_averages() if each.key == "aten::mm"], flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["short", "long"])
def test_profile_that_the_program_starts_meanwhile_is_the_programs(how: str) -> None:
    """Two sessions of torch's profiler at the same time can crash a process."""
    with _python(PROFILES_ITSELF, how) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with Request(process.pid, do="profile", steps=1, limit_s=3.0) as request:
            wait_until(lambda: os.pread(request._descriptor, 6, 0) == b"taken\n")
            wait_until(lambda: _is_profiling(process.pid))
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "profiles\n"
            with pytest.raises(RequestError, match=r"its program has started torch\.profiler meanwhile"):
                wait_until(request.answer)
        process.stdin.write("\n\n")
        process.stdin.flush()
        assert process.stdout.readline() == "['aten::mm']\n"
        assert process.wait(60) == 0


def _is_profiling(pid: int) -> bool:
    """Return whether a profile waits for steps."""
    return any(frame.function == "_wait" for thread in stacks.read(pid).threads for frame in thread.frames)


def test_process_whose_c_code_has_the_gil_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_requests, "ANSWER_TIMEOUT_S", 0.5)
    with _python(HOLDS_THE_GIL) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        with Request(process.pid, do="profile", seconds=0.1) as request:
            with pytest.raises(RequestError, match=r"it does not answer within 0\.5 s: it sleeps"):
                wait_until(request.answer)
        process.kill()


def test_process_that_ends_meanwhile_is_named() -> None:
    [profile] = profiles.take([(2**22 + 1, "ended")], seconds=0.1)
    assert profile.problem.startswith("it can't be asked")
    with _python(HOLDS_THE_GIL) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        with Request(process.pid, do="profile", seconds=0.1) as request:
            process.kill()
            process.wait()
            with pytest.raises(RequestError, match="it has ended meanwhile"):
                wait_until(request.answer)


WAITS_WITH_THE_GIL = """
import ctypes
print("ready", flush=True)
ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)  # PyDLL keeps the GIL
print("free", flush=True)
input()
"""

REQUESTS = """
import sys
from monarch_backend._telemetry.process_requests import Request
from monarch_backend._telemetry.request_answers import RequestError
with Request(int(sys.argv[1]), do="nothing") as request:
    print("sent", flush=True)
    input()
    try:
        while request.answer() is None:
            pass
    except RequestError as error:
        print(error)
"""


def test_requests_of_the_same_moment_are_all_answered() -> None:
    """The process takes no request before it has three: of two processes, and two of one process."""
    with _python(WAITS_WITH_THE_GIL) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        with _python(REQUESTS, str(process.pid)) as other:
            assert other.stdout is not None and other.stdout.readline() == "sent\n"
            with Request(process.pid, do="nothing") as first, Request(process.pid, do="nothing") as second:
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
                assert process.stdout.readline() == "free\n"
                for request in (first, second):
                    with pytest.raises(RequestError, match="it does not know the request nothing"):
                        wait_until(request.answer)
                assert "it does not know the request nothing" in other.communicate("\n", timeout=60)[0]


def test_request_of_an_absent_file_is_ignored() -> None:
    request_answers.answer(os.getpid(), 0)  # this process has no request for itself
    request_answers.answer(2**22 + 1, 3)


def test_work_ends_with_its_requester(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def handler(_request: dict[str, Any], asked: request_answers.Asked) -> tuple[dict[str, Any], bytes]:
        wait_until(lambda: not asked.is_wanted())
        ended.set()
        return {}, b""

    monkeypatch.setitem(extension_points._loaders, "request waits", lambda: handler)
    monkeypatch.setattr(Request, "_send", lambda self: None)
    request = Request(os.getpid(), do="waits")
    thread = threading.Thread(target=request_answers.answer, args=(os.getpid(), request._descriptor))
    thread.start()
    assert wait_until(lambda: os.pread(request._descriptor, 6, 0) == b"taken\n")
    request.close()
    assert ended.wait(30)
    thread.join(30)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--seconds", "0"], "more than 0"),
        (["--seconds", "nan"], "more than 0"),
        (["--steps", "0"], "1 to 1000000 steps"),
        (["--seconds", "1", "--ranks", "gpus=x"], "is not a list of indices"),
        (["--seconds", "1", "--ranks", "gpus=7"], "no process is 'gpus=7'; there are: "),
        (["--seconds", "1", "-o", "/absent/trace.json"], "No such file"),
        (["--steps", "1", "--flame", "f.svg"], "--flame needs --seconds"),
    ],
)
def test_wrong_arguments_are_one_line(
    words: list[str], text: str, running: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["profile", str(running.pid), *words]) == 1
    error = capsys.readouterr().err
    assert error.startswith("monarch-backend profile: ") and text in error and error.count("\n") == 1


def test_flame_graph_without_py_spy_says_what_to_install(
    running: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(py_spy, "find", lambda: None)
    assert cli.main(["profile", str(running.pid), "--seconds", "1", "--flame", "f.svg"]) == 1
    assert 'pip install "monarch_backend[stacks]"' in capsys.readouterr().err
    with pytest.raises(py_spy.PySpyError, match=r"monarch_backend\[stacks\]"):
        py_spy.record(running.pid, 1, "f.svg")


def test_refused_ptrace_says_what_to_allow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = tmp_path / "py-spy"
    refusing.write_text("#!/bin/sh\necho 'Error: Permission Denied: Try again with elevated permissions' >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setattr(py_spy, "find", lambda: str(refusing))
    with pytest.raises(py_spy.PySpyError, match=r"may not read the process .*SYS_PTRACE.*ptrace_scope"):
        py_spy.dump(os.getpid())


BUSY = """
from monarch_backend.actor import Actor, endpoint, this_host


class Busy(Actor):
    @endpoint
    def multiply(self):
        product = 1
        while True:  # most samples are in it
            product = product * 3 % 7


def main():
    future = this_host().spawn_procs({"gpus": 2}, name="busy").spawn("busy", Busy).multiply.call()
    print("ready", flush=True)
    future.get()


if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.skipif(py_spy.find() is None, reason="py-spy is not installed")
def test_flame_graphs_have_the_endpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "f.svg"
    with running_script(tmp_path / "busy.py", BUSY) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        wait_until(
            lambda: cli.main(["ps", str(process.pid)]) == 0 and capsys.readouterr().out.count("running mul") == 2
        )
        words = ["profile", str(process.pid), "--seconds", "1", "--flame", str(path), "--ranks"]
        code = cli.main([*words, "gpus 0"])
        out = capsys.readouterr().out
        if "SYS_PTRACE" in out:
            pytest.skip("py-spy needs SYS_PTRACE")
        assert code == 0 and "multiply (" in path.read_text()
        assert cli.main([*words, "gpus=0-1"]) == 0
        assert len(list(tmp_path.glob("f.*.svg"))) == 2


def test_range_named_like_a_mark_of_the_clock_is_ignored() -> None:
    mark = {"ph": "X", "name": "monarch clock 0", "ts": 1.0, "dur": 2.0}
    events = [{**mark, "name": "monarch clock sync", "ts": 9.0}, {**mark, "name": "monarch clock"}, mark]
    assert profiles._offset(events, [(5000, 8000)]) == (4500, 500)
