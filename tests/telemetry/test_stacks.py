"""Stacks of processes that hang: what a reader sees, and that the processes go on afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from monarch_backend import cli
from monarch_backend._actor.execution import task_stacks
from monarch_backend._core import platform
from monarch_backend._telemetry import folded_stacks, process_stacks, programs, py_spy, stacks
from monarch_backend._telemetry.stack_signal import stack_signal
from tests.support.waiting import wait_until
from tests.telemetry.programs import busy_program

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="the stack signal needs memfd_create")

START = """
import os, signal, sys, threading, time
from monarch_backend._telemetry import stack_signal
assert stack_signal.install()
"""
MAIN = """
def main():
    print("begins", flush=True)
    {}


main()
print("ends", flush=True)
"""


@contextlib.contextmanager
def _process(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run code in a process that has printed a line. It is killed with the block."""
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "begins\n"
            yield process
        finally:
            process.kill()


def _wait_for(pid: int, *places: str) -> None:
    """Wait until the threads of a process are exactly in these functions and lines."""
    wait_until(lambda: _places(pid) == set(places))


def _places(pid: int) -> set[str]:
    found = stacks.read(pid, timeout=20.0, with_py_spy=False)
    assert found.problem == ""
    return {f"{thread.innermost.function}:{thread.innermost.line}" for thread in found.threads if thread.innermost}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    with busy_program(str(tmp_path_factory.mktemp("program"))) as process:
        yield process


def test_stack_prints_the_line_of_each_process(
    running: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["stack", str(running.pid)]) == 0
    text = capsys.readouterr().out
    main, idle, busy = text.split("\n\n")[1:]
    assert main.startswith(f"program busy_program.py (pid {running.pid}):") and "sys.stdin.readline()" in main
    assert idle.startswith("gpus 0 of trainers (pid ") and "    async endpoint wait of concurrent:\n" in idle
    assert "in wait\n        await asyncio.sleep(1e6)\n" in idle and "waits for messages" not in idle
    assert busy.startswith("gpus 1 of trainers (pid ") and "in sleep\n        time.sleep(60)" in busy
    assert "event_loop.py" not in text


def test_stack_of_one_rank_as_json(running: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stack", str(running.pid), "--rank", "gpus 1", "--json"]) == 0
    [program] = json.loads(capsys.readouterr().out)
    [process] = program["processes"]
    assert process["label"] == "gpus 1 of trainers" and process["problem"] == ""
    task, thread = [each for each in process["threads"] if not each["runtime"]]
    assert (task["name"], task["awaits"]) == ("async endpoint wait of concurrent", "") and task["frames"][-1][
        "function"
    ] == "sleep"
    assert thread["frames"][-1]["source"] == "time.sleep(60)"


def test_stack_of_all_threads_shows_the_runtime(
    running: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["stack", str(running.pid), "--rank", "gpus 0", "--all-threads"]) == 0
    assert "event_loop.py" in capsys.readouterr().out


def test_unknown_rank_is_an_error_with_the_known_ones(
    running: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["stack", str(running.pid), "--rank", "gpus 7"]) == 1
    assert "no process is 'gpus 7'; there are: program busy_program.py; gpus 0-1 of trainers" in capsys.readouterr().err


def test_equal_stacks_are_one_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "equal.py"
    script.write_text(
        "import sys, time\n"
        "from monarch_backend.actor import Actor, endpoint, this_host\n"
        "class Worker(Actor):\n"
        "    @endpoint\n"
        "    def sleep(self):\n"
        "        time.sleep(1e6)\n"
        "if __name__ == '__main__':\n"
        "    procs = this_host().spawn_procs({'gpus': 3}, name='workers')\n"
        "    procs.slice(gpus=slice(0, 2)).spawn('w', Worker).sleep.broadcast()\n"
        "    print('begins', flush=True)\n"
        "    sys.stdin.readline()\n"
    )
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "begins\n"

            def blocks() -> tuple[tuple[str, str], ...]:
                cli.main(["stack", str(process.pid)])
                return tuple(re.findall(r"^(gpus .*) \(pids? .*\):\n(.*)", capsys.readouterr().out, re.MULTILINE))

            wait_until(lambda: [each[0] for each in blocks()] == ["gpus 0-1 of workers", "gpus 2 of workers"])
            assert blocks()[1][1] == "    runs no code of the program: it waits for messages"
        finally:
            process.kill()


@pytest.mark.parametrize(
    "wait",
    [
        "time.sleep(0.4)",
        "threading.Lock().acquire() and sys.stdin.readline()",
        "assert os.read(0, 5) == b'line' + b'\\n'",
        "lock = threading.Lock(); lock.acquire(); assert not lock.acquire(timeout=0.4)",
        "import select; assert select.select([0], [], [])[0]",
        "import numpy; a = numpy.ones((100, 100)); [a @ a for _ in range(1000)]",
        "sum(range(30_000_000))",
    ],
)
def test_dump_does_not_disturb_what_the_process_does(wait: str) -> None:
    with _process(START + MAIN.format(wait)) as process:
        _wait_for(process.pid, "main:8")
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # one that reads nothing may have ended
            os.write(process.stdin.fileno(), b"line\n")
        for _ in range(5):
            with contextlib.suppress(stacks.NoAnswerError):  # it may have ended
                stacks.dump(process.pid)
        assert process.stdout.readline() == "ends\n"
        assert process.wait() == 0


def test_code_that_keeps_the_gil_is_seen() -> None:
    other = "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    hang = "threading.Thread(target=pow, args=(7, 10**8), daemon=True).start(); 3 ** 10**8"
    with _process(START + other + MAIN.format(hang)) as process:
        wait_until(lambda: "main:9" in _places(process.pid))


def test_thread_that_begins_after_the_request_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = [iter([])]  # the request finds the main thread alone
    threads = stacks._threads
    monkeypatch.setattr(stacks, "_threads", lambda pid: earlier.pop() if earlier else threads(pid))
    hang = "threading.Thread(target=pow, args=(7, 10**8), daemon=True).start(); time.sleep(1000)"
    with _process(START + MAIN.format(hang)) as process:
        wait_until(lambda: stacks.state_of(process.pid) == "it sleeps (in futex_do_wait)")
        earlier[0] = iter([process.pid])
        assert _places(process.pid)


def test_thread_that_sleeps_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each signal to it would be one more dump, written when the GIL is free."""
    code = (
        "import ctypes\n"
        "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {stack_signal.stack_signal()})\n"
    )
    ask, asked = stacks._ask, list[int]()

    def noted(pid: int, thread: int) -> bool:
        if is_asked := ask(pid, thread):
            asked.append(thread)
        return is_asked

    status = stacks._status

    def asleep(path: str) -> dict[str, str]:  # a busy machine may show a thread awake
        found = status(path)
        return {**found, "State": "S (sleeping)"} if "/task/" in path and found else found

    monkeypatch.setattr(stacks, "_ask", noted)
    monkeypatch.setattr(stacks, "_status", asleep)
    with _process(START + code + MAIN.format("ctypes.PyDLL(None).sleep(1000)  # has the GIL")) as process:
        wait_until(lambda: "nanosleep" in stacks.state_of(process.pid))
        with pytest.raises(stacks.NoAnswerError, match="it does not answer"):
            stacks.dump(process.pid, timeout=1.5)
    assert asked and len(asked) == len(set(asked))


def test_code_of_another_thread_that_keeps_the_gil_is_seen() -> None:
    code = (
        "def hang():\n"
        "    print('begins', flush=True)\n"
        "    3 ** 10**8\n"
        "threading.Thread(target=hang, daemon=True).start()\n"
        "threading.Lock().acquire()\n"
        "time.sleep(1000)\n"
    )
    with _process(START + code) as process:
        wait_until(lambda: "hang:7" in _places(process.pid))


@pytest.mark.slow
def test_dumps_beside_running_python_code_end_no_process() -> None:
    """A dump without the GIL ends one such process in about 140 dumps."""
    code = (
        "import json\n"
        "def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)\n"
        "def hot():\n"
        "    while True:\n"
        "        fib(12); json.dumps({'a': [1, {'b': 3}]}, indent=1)\n"
        "def spawn():\n"
        "    while True:\n"
        "        t = threading.Thread(target=fib, args=(9,)); t.start(); t.join()\n"
        "for f in (hot, hot, spawn): threading.Thread(target=f, daemon=True).start()\n"
    )
    with _process(START + code + MAIN.format("time.sleep(1000)")) as process:
        for _ in range(1000):
            assert "in main" in stacks.dump(process.pid, timeout=20.0)
        assert process.poll() is None


def test_readers_at_once_get_whole_dumps() -> None:
    with _process(START + MAIN.format("time.sleep(1000)")) as process, ThreadPoolExecutor(4) as pool:
        _wait_for(process.pid, "main:8")
        texts = list(pool.map(lambda _: stacks.dump(process.pid, timeout=20.0), range(40)))
    assert [[str(each.innermost) for each in stacks.parse(text) if each.frames] for text in texts] == [
        ["<string>:8 in main"]
    ] * 40


def test_dumps_leave_an_empty_file() -> None:
    with _process(START + MAIN.format("time.sleep(1000)")) as process:
        stacks.dump(process.pid, timeout=20.0)
        [size] = [
            os.stat(f"/proc/{process.pid}/fd/{name}").st_size
            for name in os.listdir(f"/proc/{process.pid}/fd")
            if "monarch-stacks" in os.readlink(f"/proc/{process.pid}/fd/{name}")
        ]
        assert size == 0


def test_stopped_process_is_named_with_its_state() -> None:
    with _process(START + MAIN.format("time.sleep(1000)")) as process:
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: "stopped" in stacks.state_of(process.pid))
        found = stacks.read(process.pid, with_py_spy=False)
        assert found.threads == [] and found.problem == "it does not answer: it is stopped"
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: "stopped" not in stacks.state_of(process.pid))
        _wait_for(process.pid, "main:8")


def test_blocked_signal_is_said() -> None:
    block = "signal.pthread_sigmask(signal.SIG_BLOCK, {stack_signal.stack_signal()})\n"
    with _process(START + block + MAIN.format("time.sleep(1000)")) as process:
        # The thread that takes the GIL blocks all signals.
        with pytest.raises(stacks.NoAnswerError, match="its threads block the signal, and it "):
            stacks.dump(process.pid)


def test_handler_of_the_program_stays() -> None:
    code = (
        "import signal; from monarch_backend._telemetry import stack_signal\n"
        "signal.signal(stack_signal.stack_signal(), lambda *_: None)\n"
        "before = signal.getsignal(stack_signal.stack_signal())\n"
        "assert not stack_signal.install()\n"
        "assert signal.getsignal(stack_signal.stack_signal()) is before\n"
        "print('begins', flush=True); input()"
    )
    with (
        _process(code) as process,
        pytest.raises(stacks.NoAnswerError, match="its own handler of the stack signal"),
    ):
        stacks.dump(process.pid)


def test_process_that_executes_another_program_gets_no_signal() -> None:
    code = START + "print('begins', flush=True); os.execv('/bin/sleep', ['sleep', '1000'])"
    with _process(code) as process:
        wait_until(lambda: b"sleep\0" in Path(f"/proc/{process.pid}/cmdline").read_bytes())
        with pytest.raises(stacks.NoAnswerError, match="it writes no stacks"):
            stacks.dump(process.pid)
        assert process.poll() is None


def test_fork_gets_a_file_of_its_own() -> None:
    code = (
        "if os.fork() == 0:\n"
        "    def child():\n"
        "        assert stack_signal.install()\n"
        "        print('begins', flush=True)\n"
        "        os.read(0, 1)\n"
        "    child()\n"
        "    os._exit(0)\n"
        "def parent(): os.wait()\n"
        "parent()\n"
    )
    with _process(START + code) as process:
        [child] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        _wait_for(int(child), "child:9")
        _wait_for(process.pid, "parent:12")
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait() == 0


def test_ended_process_is_said() -> None:
    with _process(START + MAIN.format("pass")) as process:
        process.wait()
        with pytest.raises(stacks.NoAnswerError):
            stacks.dump(process.pid)


def test_signal_is_not_one_of_libc() -> None:
    assert 34 < stack_signal() < 64


def test_escapes_of_a_dump_are_undone() -> None:
    [thread] = stacks.parse(
        "Thread 0x01 [worker] (most recent call first):\n"
        '  File "\\xe4/\\u20ac.py", line 3 in f\n  File "b", line ??? in g\n'
    )
    assert (thread.name, [str(each) for each in thread.frames]) == ("worker", ["b:0 in g", "\xe4/\u20ac.py:3 in f"])


def test_rank_where_no_program_runs_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("monarch_backend._telemetry.programs.programs", list)
    assert cli.main(["stack", "--rank", "gpus 1"]) == 1
    expected = "no process is 'gpus 1'; no program of this user runs on this machine\n"
    assert capsys.readouterr().err.endswith(expected)


def test_native_stacks_without_py_spy_are_an_error(
    running: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(py_spy, "find", lambda: None)
    assert cli.main(["stack", str(running.pid), "--native"]) == 1
    assert "pip install py-spy" in capsys.readouterr().err


@pytest.mark.skipif(py_spy.find() is None, reason="py-spy is not installed")
def test_native_stacks_have_c_frames(running: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stack", str(running.pid), "--native", "--json"]) == 0
    found = [process for program in json.loads(capsys.readouterr().out) for process in program["processes"]]
    if any("SYS_PTRACE" in each["problem"] for each in found):
        pytest.skip("py-spy needs SYS_PTRACE")
    names = {frame["file"] for each in found for thread in each["threads"] for frame in thread["frames"]}
    assert any(".so" in name for name in names), names


@pytest.mark.skipif(py_spy.find() is None, reason="py-spy is not installed")
def test_py_spy_reads_a_stopped_process() -> None:
    with _process(START + MAIN.format("time.sleep(1000)")) as process:
        _wait_for(process.pid, "main:8")
        process.send_signal(signal.SIGSTOP)
        found = stacks.read(process.pid)
        if "ermission" in found.problem:
            pytest.skip("py-spy needs SYS_PTRACE")
        assert [str(each.innermost) for each in found.threads] == ["<string>:8 in main"]


ASYNC = """
import asyncio, sys, time
from monarch_backend.actor import Actor, concurrent_endpoint, endpoint, this_host


class Worker(Actor):
    def __init__(self, loop):
        if loop == "asyncio":
            sys.modules["uvloop"] = None
        self.opened = asyncio.Event()

    @concurrent_endpoint
    async def loop(self):
        modules = [each.__module__.partition(".")[0] for each in type(asyncio.get_running_loop()).__mro__]
        return "uvloop" if "uvloop" in modules else "asyncio"

    @concurrent_endpoint
    async def wait(self):
        await self.load()

    async def load(self):
        await self.opened.wait()  # line A

    @endpoint
    async def ask(self, other):
        await other.wait.call_one()  # line B

    @concurrent_endpoint
    async def gather(self, other):
        await asyncio.gather(other.wait.call_one(), self.load())  # line C

    @concurrent_endpoint
    async def values(self):
        yield 1
        await self.load()  # line D

    @concurrent_endpoint
    async def read(self, other):
        async for value in other.values.call_one():  # line E
            pass

    @concurrent_endpoint
    async def step(self):
        values = self.values()
        assert await anext(values, None) == 1
        await anext(values, None)  # line G

    @concurrent_endpoint
    async def block(self):
        time.sleep(1e6)  # line F


if __name__ == "__main__":
    procs = this_host().spawn_procs({"gpus": 2}, name="workers")
    caller, other = (procs.slice(gpus=i).spawn(f"w{i}", Worker, sys.argv[1]) for i in range(2))
    assert {caller.loop.call_one().get(), other.loop.call_one().get()} == {sys.argv[1]}
    call = getattr(caller, sys.argv[2])
    asked = (other,) if sys.argv[2] in ("ask", "gather", "read") else ()
    first = caller.wait.call_one() if sys.argv[2] == "block" else None
    futures = [call.call_one(*asked) for _ in range(int(sys.argv[3]))]
    print("begins", flush=True)
    sys.stdin.readline()
"""


def _async_line(mark: str) -> int:
    return next(number for number, line in enumerate(ASYNC.splitlines(), 1) if line.endswith(f"# line {mark}"))


@contextlib.contextmanager
def _async_program(folder: Path, *arguments: str) -> Iterator[int]:
    """Run the program, and give its pid. It ends with the block."""
    script = folder / "waits.py"
    script.write_text(ASYNC)
    with subprocess.Popen(
        [sys.executable, str(script), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "begins\n"
            yield process.pid
        finally:
            process.kill()


def _block_of(pid: int, rank: str, text: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the stacks of a rank once they have this text."""

    def block() -> str:
        cli.main(["stack", str(pid), "--rank", rank])
        found = capsys.readouterr().out
        return found if text in found else ""

    return wait_until(block)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_stack_of_an_async_endpoint_names_each_awaiting_line(
    loop: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if loop == "uvloop":
        pytest.importorskip("uvloop")
    with _async_program(tmp_path, loop, "wait", "3") as pid:
        text = _block_of(pid, "gpus 0", "3 times", capsys)
    assert "    async endpoint wait of w0, 3 times:\n" in text
    assert f"waits.py:{_async_line('A')} in load\n        await self.opened.wait()  # line A\n" in text
    assert text.index("in wait\n        await self.load()") < text.index("in load\n")


def test_stack_of_an_async_endpoint_names_the_awaited_endpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with _async_program(tmp_path, "asyncio", "ask", "1") as pid:
        text = _block_of(pid, "gpus 0", "waits for w1.wait", capsys)
        assert f"waits.py:{_async_line('B')} in ask\n" in text
        assert "async endpoint wait of w1:" in _block_of(pid, "gpus 1", "in load", capsys)


def test_stack_names_the_tasks_that_an_async_endpoint_gathers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with _async_program(tmp_path, "asyncio", "gather", "1") as pid:
        text = _block_of(pid, "gpus 0", "waits for w1.wait", capsys)
    assert f"async endpoint gather of w0:\n      {tmp_path}/waits.py:{_async_line('C')} in gather\n" in text
    assert "    another task of w0:\n      waits for w1.wait" in text
    assert f"    another task of w0:\n      {tmp_path}/waits.py:{_async_line('A')} in load\n" in text


def test_stack_of_an_async_generator_and_of_its_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with _async_program(tmp_path, "asyncio", "read", "1") as pid:
        assert f"waits.py:{_async_line('E')} in read" in _block_of(pid, "gpus 0", "waits for w1.values", capsys)
        assert f"waits.py:{_async_line('D')} in values" in _block_of(pid, "gpus 1", "in load", capsys)


def test_stack_of_one_step_of_an_async_generator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with _async_program(tmp_path, "asyncio", "step", "1") as pid:
        text = _block_of(pid, "gpus 0", "in load", capsys)
    assert f"waits.py:{_async_line('G')} in step" in text and f"waits.py:{_async_line('D')} in values" in text


def test_generator_that_an_awaited_object_refers_to_is_not_in_its_stack() -> None:
    def numbers() -> Iterator[int]:
        yield 1

    class Reply:
        def __init__(self) -> None:
            self.unrelated = numbers()

        def __await__(self) -> Reply:
            return self

        def __iter__(self) -> Reply:
            return self

        def __next__(self) -> None:
            return None

    async def wait() -> None:
        await Reply()

    coroutine = wait()
    coroutine.send(None)
    assert [frame.f_code.co_name for frame in task_stacks._frames(coroutine)] == ["wait"]
    coroutine.close()


def test_stack_of_a_blocked_event_loop_names_the_blocking_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with _async_program(tmp_path, "asyncio", "block", "1") as pid:
        text = _block_of(pid, "gpus 0", "in block", capsys)
    assert f"    main thread:\n      {tmp_path}/waits.py:{_async_line('F')} in block\n" in text
    assert "async endpoint wait of w0:" in text and "async endpoint block" not in text


def test_async_endpoint_has_one_line_in_ps_with_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with _async_program(tmp_path, "asyncio", "ask", "1") as pid:

        def lines() -> list[str]:
            cli.main(["ps", str(pid)])
            found = [line.strip() for line in capsys.readouterr().out.splitlines() if "w0 rank 0: " in line]
            return found if "waits for w1.wait" in found[-1] else []

        [line] = wait_until(lines)
        wait_until(
            lambda: "in load (await self.opened.wait()" in (cli.main(["ps", str(pid)]), capsys.readouterr())[1].out
        )
    assert re.fullmatch(
        rf"w0 rank 0: running ask for .*, 1 done, at {tmp_path}/waits\.py:{_async_line('B')} in ask "
        r"\(await other\.wait\.call_one\(\)  # line B\), waits for w1\.wait",
        line,
    )


def test_tasks_of_a_process_that_keeps_the_gil_are_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with _async_program(tmp_path, "asyncio", "wait", "1") as pid:
        _block_of(pid, "gpus 0", "in load", capsys)
        monkeypatch.setattr(process_stacks, "MIN_TASKS_TIMEOUT_S", 0.0)
        monkeypatch.setattr(process_stacks.Request, "answer", lambda _: None)  # as it is then
        [program] = programs.select(str(pid))
        [rank] = [each.pid for each in program.processes if each.label.startswith("gpus 0")]
        found = process_stacks.read(rank, timeout=0.3)
    assert "it does not answer: it sleeps" in found.unread_tasks
    [text] = folded_stacks.fold([(program.processes[0], found)])
    assert text.startswith("    the tasks of its async actors are unknown: it does not answer")


def test_tasks_beyond_the_first_ones_are_counted_as_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with _async_program(tmp_path, "asyncio", "wait", "1005") as pid:
        text = _block_of(pid, "gpus 0", "1000 times", capsys)
    assert text.endswith("    its async actors have more tasks than these 1000\n")
