"""Real processes from the fork server: their state, the reports of their ends, and that none is left over.

The tests of messages and limits call the functions directly. All other tests use a spawner.
"""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec
import pytest

from monarch_backend._processes import child_table, fork_server_client, resource_limits, spawn_protocol
from monarch_backend._processes.spawn_protocol import Kill, Spawn, frame
from monarch_backend._processes.spawner import Exited, Spawner, SpawnFailed, SpawnLimitError, Started
from tests.processes import spawning
from tests.processes.spawning import PATIENCE, Host, Pipe, Watch, parent_of, spec

pytestmark = pytest.mark.needs("fork")

# Children unpickle functions of these two modules by value, so that they do not import pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(spawning)

QUICKLY = 2.0  # promise 8 of docs/architecture.md: seconds until no process is left


def nothing() -> None:
    pass


# State of a child


def test_forked_process_reports_its_output_and_exit(host: Host) -> None:
    outcome = host.run(lambda: print("hello"))
    assert (outcome.out, outcome.err, outcome.exited.returncode) == ("hello\n", "", 0)
    assert (outcome.started.method, outcome.started.reason) == ("fork", "")
    assert outcome.started.pid == outcome.exited.pid
    assert not outcome.exited.core_dumped and not outcome.exited.oom_killed


def test_eight_have_one_parent_and_their_own_sessions(host: Host) -> None:
    def main() -> None:
        facts = [os.getpid(), os.getppid(), os.getsid(0), os.getpgid(0), "torch" in sys.modules]
        # in one write, so that lines of several processes do not mix
        os.write(1, (" ".join(map(str, facts)) + "\n").encode())

    with Pipe() as pipe:
        ids = host.spawner.spawn([spec(main, f"gpus {rank}", stdout=pipe.write) for rank in range(8)])
        lines = [pipe.line().split() for _ in ids]
    started = {str(host.wait(number, Started).pid) for number in ids}
    assert [host.wait(number, Exited).returncode for number in ids] == [0] * 8
    assert {line[0] for line in lines} == started and len(started) == 8
    assert len({line[1] for line in lines}) == 1
    assert all(line[0] == line[2] == line[3] and line[4] == "True" for line in lines)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_process_gets_environment_arguments_and_directory(
    host: Host, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONARCH_START_METHOD", method)
    monkeypatch.setenv("LEFT_OUT", "1")
    (tmp_path / "a_module_of_the_user.py").write_text("value = 7\n")
    environment = {"PATH": "/bin", "GREETING": "hé", "NOT_UTF8": os.fsdecode(b"\xff")}

    def main() -> None:
        import a_module_of_the_user

        files = resource.getrlimit(resource.RLIMIT_NOFILE)
        print(json.dumps([dict(os.environ), sys.argv, os.getcwd(), sys.path[0], a_module_of_the_user.value, files]))

    path = [str(tmp_path), *sys.path]
    outcome = host.run(main, environment=environment, argv=["prog", "-x"], cwd=str(tmp_path), path=path)
    assert outcome.err == ""
    assert outcome.started.method == method
    found, *rest = json.loads(outcome.out)
    found.pop("LC_CTYPE", None)  # an interpreter that starts in the C locale sets it
    assert found == environment
    files = list(resource.getrlimit(resource.RLIMIT_NOFILE))
    assert rest == [["prog", "-x"], str(tmp_path), str(tmp_path), 7, files]


def signal_all() -> None:
    """Send SIGTERM to the fork server, to this process, and to a fork and a program of it. Print how these two end."""
    read, write = os.pipe()
    fork = os.fork()
    if fork == 0:
        os.write(write, b"up")
        while True:
            signal.pause()
    os.read(read, 2)
    program = subprocess.Popen(["sleep", "600"])
    for pid in (os.getppid(), os.getpid(), fork, program.pid):
        os.kill(pid, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), program.wait())


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_ignore_sigterm_where_it_is_for_their_starter(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_START_METHOD", method)
    host = Host(ignores_sigterm=True)
    try:
        for _ in range(2):  # the server goes on
            outcome = host.run(signal_all)
            assert (outcome.out, outcome.err, outcome.exited.returncode) == ("-15 -15\n", "", 0)
    finally:
        host.spawner.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_bootstrap_comes_first(host: Host, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_START_METHOD", method)

    def bootstrap() -> None:
        import torch

        print(os.environ["IT"], os.getcwd(), torch.cuda.is_initialized())
        os.environ["OMP_NUM_THREADS"] = "3"
        os.environ["IT"] = "after"

    def main() -> None:
        import torch

        print(os.environ["IT"], torch.get_num_threads())

    environment = {**os.environ, "IT": "before"}
    environment.pop("OMP_NUM_THREADS", None)
    outcome = host.run(main, bootstrap=bootstrap, environment=environment, cwd="/", threads=1)
    assert outcome.out == "before / False\nafter 3\n", outcome.err


def test_a_failing_bootstrap_is_the_end(host: Host) -> None:
    def bootstrap() -> None:
        raise RuntimeError("no accelerator")

    outcome = host.run(lambda: print("main"), bootstrap=bootstrap)
    assert (outcome.out, outcome.exited.returncode) == ("", 1)
    assert outcome.err.endswith("RuntimeError: no accelerator\n")


def test_forked_process_has_the_state_of_a_new_interpreter(host: Host) -> None:
    def main() -> None:
        import faulthandler
        import gc
        import multiprocessing

        process = multiprocessing.current_process()
        facts = {
            "main": sorted(n for n in vars(sys.modules["__main__"]) if not n.startswith("__")),
            "handlers": len(logging.getLogger().handlers),
            "threads": len(os.listdir("/proc/self/task")),
            "python threads": [thread.name for thread in threading.enumerate()],
            "descriptors": [n for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")],
            "stdin": os.readlink("/proc/self/fd/0"),
            "input": sys.stdin.read(),
            "collector": gc.isenabled(),
            "faulthandler": faulthandler.is_enabled(),
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "wakeup": signal.set_wakeup_fd(-1),
            "signals": [signal.getsignal(n) == signal.SIG_DFL for n in (signal.SIGTERM, signal.SIGCHLD)],
            "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            "process": [process.name, process.daemon, multiprocessing.parent_process()],
            "lines": [sys.stdout.line_buffering, sys.stderr.line_buffering],
            "name": Path("/proc/self/comm").read_text(),
            "title": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode(),
            "stack": [frame.f_code.co_name for frame in _stack()],
        }
        print(json.dumps(facts))

    def _stack() -> Iterator[object]:
        frame = sys._getframe(2)
        while frame is not None:
            yield frame
            frame = frame.f_back

    outcome = host.run(main, "trainers 12", threads=1)
    assert outcome.err == ""
    assert json.loads(outcome.out) == {
        "main": [],
        "handlers": 0,
        "threads": 2,  # one of the stack signal (_telemetry/stack_signal.py)
        "python threads": ["MainThread"],
        "descriptors": ["0", "1", "2", "3"],  # the last one is of the stack signal
        "stdin": "/dev/null",
        "input": "",
        "collector": True,
        "faulthandler": True,
        "blocked": [],
        "wakeup": -1,
        "signals": [True, True],
        "interrupt": True,
        "process": ["trainers 12", False, None],
        "lines": [True, True],
        "name": "monarch trainer\n",
        "title": "monarch trainers 12",
        "stack": ["main", "run", "main", "<module>"],
    }


def test_siblings_share_no_random_numbers(host: Host) -> None:
    def main() -> None:
        import multiprocessing
        import random
        import secrets
        import uuid

        import numpy
        import torch

        print(random.random(), numpy.random.rand(), torch.initial_seed(), torch.rand(1).item())
        print(secrets.token_hex(), uuid.uuid4(), multiprocessing.current_process().authkey.hex())

    one, other = (host.run(main).out.split() for _ in range(2))
    assert len(one) == len(other) == 7
    assert [a == b for a, b in zip(one, other, strict=True)] == [False] * 7


THREADS: list[tuple[dict[str, str], dict[str, Any], str]] = [
    ({}, {"threads": 2}, "2 2"),
    ({}, {"threads": 1}, "1 1"),
    ({"OMP_NUM_THREADS": "3"}, {"threads": 1}, "3 3"),
    ({"OMP_NUM_THREADS": "3,1", "OPENBLAS_NUM_THREADS": "2"}, {}, "3 2"),
    ({}, {"cpus": frozenset({min(os.sched_getaffinity(0))})}, "1 1"),
]


@pytest.mark.parametrize(
    ("method", "cases"),
    [("fork", THREADS), pytest.param("spawn", THREADS, marks=pytest.mark.slow)],
    ids=["fork", "spawn"],
)
def test_threads(
    host: Host, method: str, cases: list[tuple[dict[str, str], dict[str, Any], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONARCH_START_METHOD", method)

    def main() -> None:
        import numpy
        import torch

        from monarch_backend._processes import child_bootstrap

        square = numpy.ones((64, 64))
        assert (square @ square)[0, 0] == 64
        x = torch.ones(3, requires_grad=True)
        (x * 2).sum().backward()
        assert x.grad is not None
        ((get, _),) = child_bootstrap.openblas()
        print(torch.get_num_threads(), get())
        print(sorted(os.sched_getaffinity(0)))

    plain = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    with ThreadPoolExecutor(len(cases)) as pool:  # at the same time, because a spawned process imports torch
        outcomes = pool.map(lambda case: host.run(main, environment={**plain, **case[0]}, **case[1]), cases)
    for (environment, options, expected), outcome in zip(cases, outcomes, strict=True):
        counts, cpus = outcome.out.splitlines()
        assert counts == expected, (environment, options, outcome.err)
        assert cpus == str(sorted(options.get("cpus", os.sched_getaffinity(0))))


def test_server_without_torch_starts_processes_that_import_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_PRELOAD_TORCH", "0")

    def main() -> None:
        import sys

        had_torch = "torch" in sys.modules
        import torch

        print(had_torch, torch.get_num_threads(), "OMP_NUM_THREADS" in os.environ, torch.initial_seed())

    plain = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    host = Host()
    try:
        outcomes = [host.run(main, environment=plain, threads=2) for _ in range(2)]
        *facts, one = outcomes[0].out.split()
        *others, other = outcomes[1].out.split()
        assert facts == others == ["False", "2", "False"], outcomes[0].err
        assert one != other, "siblings have the same random numbers"
    finally:
        host.spawner.close()


def test_a_large_main_and_many_files(host: Host) -> None:
    data = os.urandom(5 << 20)
    outcome = host.run(lambda: print(len(data), data[-8:].hex()))
    assert outcome.out == f"{len(data)} {data[-8:].hex()}\n"
    with Pipe() as pipe:
        specs = [
            spec(lambda line=b"%d\n" % rank: os.write(1, line), stdout=pipe.write, stderr=pipe.write)
            for rank in range(40)
        ]
        ids = host.spawner.spawn(specs)
        assert sorted(int(pipe.line()) for _ in ids) == list(range(40))
    for number in ids:
        assert host.wait(number, Exited).returncode == 0


# End of a child


def _segfault() -> None:
    import ctypes
    import faulthandler

    faulthandler.disable()
    ctypes.string_at(0)


def _interrupted() -> None:
    raise KeyboardInterrupt


def _raises() -> None:
    raise ValueError("wrong")


@pytest.mark.parametrize(
    ("main", "returncode", "err"),
    [
        (nothing, 0, ""),
        (lambda: sys.exit(), 0, ""),
        (lambda: sys.exit(3), 3, ""),
        (lambda: sys.exit(256 + 4), 4, ""),
        (lambda: sys.exit("sorry"), 1, "sorry\n"),
        (_raises, 1, "ValueError: wrong\n"),
        (lambda: os._exit(7), 7, ""),
        (_interrupted, -signal.SIGINT, "KeyboardInterrupt\n"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), -signal.SIGTERM, ""),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL, ""),
        (_segfault, -signal.SIGSEGV, ""),
        (os.abort, -signal.SIGABRT, "most recent call first"),
    ],
)
def test_returncodes(host: Host, main: Callable[[], object], returncode: int, err: str) -> None:
    outcome = host.run(main)
    assert outcome.exited.returncode == returncode
    assert (err in outcome.err) if err else outcome.err == ""
    assert "_processes/child_bootstrap.py" not in outcome.err or "most recent call first" in err
    assert not outcome.exited.oom_killed


def test_forked_process_joins_threads_and_runs_atexit_hooks(host: Host) -> None:
    def main() -> None:
        import atexit
        import threading

        atexit.register(lambda: sys.stdout.write("atexit"))
        gate = threading.Event()
        threading.Thread(target=lambda: (gate.wait(), print("thread"))).start()
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        print("main")
        gate.set()

    outcome = host.run(main)
    assert (outcome.out, outcome.exited.returncode) == ("main\nthread\natexit", 0)


def test_core_dumps_are_reported(host: Host, tmp_path: Path) -> None:
    if Path("/proc/sys/kernel/core_pattern").read_text().startswith("|"):
        pytest.skip("cores go to a program here")

    def main() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (1 << 20, 1 << 20))
        os.abort()

    exited = host.run(main, cwd=str(tmp_path)).exited
    assert (exited.returncode, exited.core_dumped) == (-signal.SIGABRT, any(tmp_path.iterdir()))


def test_kill(host: Host) -> None:
    with host.staying() as started:
        host.spawner.kill(started.id, signal.SIGTERM)
        assert host.wait(started.id, Exited).returncode == -signal.SIGTERM
    host.spawner.kill(started.id)  # the process has ended, so this has no effect
    with pytest.raises(ValueError, match="999 is not a valid Signals"):
        host.spawner.kill(started.id, 999)


def test_process_killed_before_its_start(own_host: Host) -> None:
    first, second = own_host.spawner.spawn([spec(nothing), spec(nothing)])
    own_host.spawner.kill(second)  # the server still imports torch and has not read the request
    assert "signal 9 was sent to it before it was started" in own_host.wait(second, SpawnFailed).reason
    assert own_host.wait(first, Exited).returncode == 0


def test_an_unready_process_can_be_killed(host: Host) -> None:
    for _ in range(10):
        number = host.spawn(nothing, bootstrap=lambda: threading.Event().wait())
        host.wait(number, Started)
        host.spawner.kill(number, signal.SIGTERM)
        assert host.wait(number, Exited).returncode == -signal.SIGTERM


# No process is left over


def _with_descendants() -> None:
    """Start a child, one in another session, and one whose parent has ended.

    Write their pids. SIGUSR1 ends the function.
    """
    import subprocess

    ended, end = os.pipe()
    signal.signal(signal.SIGUSR1, lambda *_: os.write(end, b"x"))  # not lost if it comes before the wait
    sleep = ["sleep", "1000"]
    child = subprocess.Popen(sleep)
    session = subprocess.Popen(sleep, start_new_session=True)
    orphan = subprocess.run(["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True)
    pids = {"child": child.pid, "session": session.pid, "orphan": int(orphan.stdout)}
    os.write(1, f"{json.dumps(pids)}\n".encode())
    os.read(ended, 1)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1])
def test_descendants_end_with_their_process(host: Host, end: signal.Signals) -> None:
    with Pipe() as pipe:
        number = host.spawn(_with_descendants, stdout=pipe.write)
        pids = json.loads(pipe.line())
        with host.staying() as other, Watch(pids) as watch, Watch({"other": other.pid}) as others:
            assert parent_of(pids["orphan"]) == host.wait(number, Started).pid
            host.spawner.kill(number, end)
            assert host.wait(number, Exited).returncode == (0 if end == signal.SIGUSR1 else -end)
            assert watch.left_after(QUICKLY) == []
            assert others.left_after(0) == ["other"]


# One process imports torch and forks the controllers. Each controller starts a fork server of its own.
CONTROLLERS = """
import ctypes, json, os, signal, sys
sys.path.insert(0, {root!r})
import cloudpickle
from tests.processes import spawning, test_fork_server
for module in (spawning, test_fork_server):
    cloudpickle.register_pickle_by_value(module)

def controller(end):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # with its parent
    host, pids = spawning.Host(), {{"controller": os.getpid()}}
    with spawning.Pipe() as pipe:
        numbers = [host.spawn(test_fork_server._with_descendants, stdout=pipe.write) for _ in range(3)]
        for rank, number in enumerate(numbers):
            started = host.wait(number, spawning.Started)
            pids["worker %d" % rank] = started.pid
            for name, pid in json.loads(pipe.line()).items():
                pids["%s %d" % (name, rank)] = pid
        pids["server"] = spawning.parent_of(started.pid)
        if end == "copied":
            if not (copy := os.fork()):  # holds whatever the controller had open
                while True:
                    signal.pause()
            pids["copy"] = copy
        os.write(1, (json.dumps([end, pids]) + "\\n").encode())  # in one piece, among others
        signal.pause()

for end in sys.argv[1:]:
    if not os.fork():
        controller(end)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system takes note of their ends
sys.stdin.read()
"""


def run_program(arguments: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)  # type: ignore[call-overload,no-any-return]


DEADLY = (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV)


@pytest.fixture(scope="module")
def controllers() -> Iterator[dict[str, dict[str, int]]]:
    """Start a controller for each signal, and one that forks a copy of itself.

    Return the pids of each and of its children.
    """
    script = CONTROLLERS.format(root=str(Path(__file__).parents[2]))
    ends = [number.name for number in DEADLY] + ["copied"]
    with subprocess.Popen(
        [sys.executable, "-c", script, *ends], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        found: dict[str, dict[str, int]] = dict(json.loads(process.stdout.readline()) for _ in ends)
        yield found
        process.kill()  # ends the controllers whose tests did not run


@pytest.mark.parametrize("number", DEADLY)
def test_no_process_outlives_the_controller(number: signal.Signals, controllers: dict[str, dict[str, int]]) -> None:
    pids = controllers[number.name]
    assert len(pids) == 14
    with Watch(pids) as watch:
        os.kill(pids["controller"], number)
        assert watch.left_after(QUICKLY) == []


def test_only_a_fork_outlives_the_controller(controllers: dict[str, dict[str, int]]) -> None:
    pids = dict(controllers["copied"])
    copy = pids.pop("copy")
    with Watch(pids) as watch, Watch({"copy": copy}) as copies:
        os.kill(pids["controller"], signal.SIGKILL)
        left = watch.left_after(QUICKLY), copies.left_after(0)
        os.kill(copy, signal.SIGKILL)
        assert left == ([], ["copy"])


def test_a_server_that_still_imports_dies_with_its_controller() -> None:
    script = """
        import signal
        from monarch_backend._processes.spawner import Spawner
        spawner = Spawner(print)
        spawner.start()
        while spawner._process is None:
            pass
        print(spawner._process.pid, flush=True)
        signal.pause()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        server = int(process.stdout.readline())
        with Watch({"server": server}) as watch:
            process.kill()
            assert watch.left_after(QUICKLY) == []


def test_the_server_dies(own_host: Host) -> None:
    with Pipe() as pipe:
        number = own_host.spawn(_with_descendants, stdout=pipe.write)
        pids = json.loads(pipe.line())
    pids["worker"] = own_host.wait(number, Started).pid
    server = parent_of(pids["worker"])
    # in sessions of their own: no living process knows them any more
    outsiders = [pids.pop("session"), pids.pop("orphan")]
    with Watch(pids | {"server": server}) as watch:
        os.kill(server, signal.SIGKILL)
        exited = own_host.wait(number, Exited)
        assert watch.left_after(QUICKLY) == []
    for pid in outsiders:
        os.kill(pid, signal.SIGKILL)
    assert (exited.pid, exited.returncode) == (pids["worker"], -signal.SIGKILL)
    assert exited.reason == f"the fork server (pid {server}) ended: killed by SIGKILL"
    assert own_host.run(lambda: print("again")).out == "again\n"  # from a new server


def test_server_that_dies_before_its_reply_is_an_error(own_host: Host) -> None:
    number = own_host.spawn(nothing)
    while own_host.spawner._process is None:
        threading.Event().wait(0.001)
    os.kill(own_host.spawner._process.pid, signal.SIGKILL)
    assert "ended: killed by SIGKILL" in own_host.wait(number, SpawnFailed).reason


def test_the_server_is_asked_to_end(own_host: Host) -> None:
    with own_host.staying() as started:
        os.kill(parent_of(started.pid), signal.SIGTERM)
        exited = own_host.wait(started.id, Exited)
        assert (exited.returncode, exited.reason) == (-signal.SIGKILL, "")


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_process_in_any_state_dies_with_the_server(
    own_host: Host, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONARCH_START_METHOD", method)
    with Pipe() as pipe:
        number = own_host.spawn(lambda: os.write(1, b"up\n") and signal.pause(), stdout=pipe.write)
        pid = own_host.wait(number, Started).pid
        assert pipe.line() == "up"
    with Watch({"worker": pid}) as watch:
        os.kill(pid, signal.SIGSTOP)
        os.kill(parent_of(pid), signal.SIGKILL)
        assert watch.left_after(QUICKLY) == []


# Clients


def test_close_of_one_client_ends_only_its_processes(host: Host) -> None:
    second = Host(host.spawner.address)
    try:
        with host.staying() as ours:
            theirs = second.wait(second.spawn(signal.pause), Started)
            assert parent_of(theirs.pid) == parent_of(ours.pid)
            with Watch({"theirs": theirs.pid}) as watch, Watch({"ours": ours.pid}) as others:
                second.spawner.close()
                assert watch.left_after(0) == []
                assert others.left_after(0) == ["ours"]
            assert second.wait(theirs.id, Exited).returncode == -signal.SIGKILL
        assert host.run(lambda: print("still there")).out == "still there\n"
    finally:
        second.spawner.close()


def test_a_worker_that_spawns(host: Host) -> None:
    address = host.spawner.address

    def main() -> None:
        inner = Host(address)
        with inner.staying() as started:
            print(started.pid, parent_of(started.pid) == os.getppid(), flush=True)
            signal.pause()

    with Pipe() as pipe:
        number = host.spawn(main, stdout=pipe.write)
        pid, sibling = pipe.line().split()
        assert sibling == "True"
        with Watch({"inner": int(pid)}) as watch:
            host.spawner.kill(number)
            assert watch.left_after(QUICKLY) == []
            host.wait(number, Exited)


def test_a_client_of_a_server_that_ended(own_host: Host) -> None:
    own_host.run(nothing)
    address = own_host.spawner.address
    second = Host(address)
    number = second.spawn(signal.pause)
    second.wait(number, Started)
    own_host.spawner.close()
    exited = second.wait(number, Exited)
    assert exited.returncode == -signal.SIGKILL
    while not second.spawner._unusable:  # the connection ends after the process
        threading.Event().wait(0.001)
    with pytest.raises(RuntimeError, match="closed the connection: no process can be started here any more"):
        second.spawn(nothing)
    second.spawner.close()
    with pytest.raises(
        ConnectionRefusedError, match=r"no fork server listens at @monarch-.*: has its controller ended"
    ):
        Spawner(print, address)
    with pytest.raises(ValueError, match="'tcp://x' is not an address of a Spawner"):
        Spawner(print, "tcp://x")


def connect(host: Host) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("\0" + host.spawner.address[1:])
    sock.settimeout(PATIENCE)
    return sock


SPAWN = Spawn(1, "x", b"", {}, [], [], b"/", None, None, None, True, False, None)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x05\0\0\0hello",
        b"\xff\xff\xff\xff",
        random.Random(1).randbytes(300_000),  # begins with an impossible length
        (4).to_bytes(4, "little") + msgspec.msgpack.encode("abc"),
        frame(Kill(1, 9)).replace(b"kill", b"skip"),
        frame(SPAWN),  # announces a descriptor and does not send it
        frame(msgspec.structs.replace(SPAWN, stdout=False)) * 2,  # the same id twice
    ],
)
def test_garbage_ends_its_connection_only(host: Host, garbage: bytes) -> None:
    with host.staying() as bystander, connect(host) as sock, Watch({"bystander": bystander.pid}) as watch:
        sock.sendall(frame(Kill(77, 9)))  # valid: there is no such process
        try:
            sock.sendall(garbage)
            while sock.recv(4096):
                pass
        except (ConnectionResetError, BrokenPipeError):
            pass  # the server has closed the connection before reading everything
        assert watch.left_after(0) == ["bystander"]
    assert host.run(lambda: print("fine")).out == "fine\n"


def test_unexpected_descriptors_of_a_message_are_closed(host: Host) -> None:
    read, write = os.pipe()
    with connect(host) as sock:
        socket.send_fds(sock, [frame(Kill(77, 9))], [write] * 5)
        os.close(write)
    ended, _, _ = select.select([read], [], [], PATIENCE)
    assert ended and os.read(read, 1) == b""
    os.close(read)


def test_an_impossible_request_is_only_its_child_s_failure(host: Host) -> None:
    outcome = host.run(nothing, cwd="/no/such/directory")
    assert outcome.exited.returncode == 1
    assert "FileNotFoundError" in outcome.err
    assert host.run(nothing).exited.returncode == 0


def test_malformed_requests_do_not_end_the_server(host: Host) -> None:
    sound = msgspec.structs.replace(
        SPAWN, stdout=False, environment={b"PATH": b"/bin"}, main=cloudpickle.dumps(nothing)
    )
    with connect(host) as sock:
        sock.sendall(frame(msgspec.structs.replace(sound, id=5, method="spawn", environment={b"A=B": b"C"})))
        answer = sock.recv(4096)
        event = msgspec.msgpack.decode(answer[4:], type=SpawnFailed)
        assert event == SpawnFailed(5, "the process could not be made: illegal environment variable name")
    with connect(host) as sock:
        sock.sendall(frame(msgspec.structs.replace(sound, id=6, main=cloudpickle.dumps(signal.pause))))
        assert msgspec.msgpack.decode(sock.recv(4096)[4:], type=Started).id == 6
        sock.sendall(frame(Kill(6, 1 << 40)) + frame(Kill(6, -1)))
        deep = b"\x82\xa4type\xa4kill\xa1x" + b"\x91" * 500_000 + b"\0"
        sock.sendall(len(deep).to_bytes(4, "little") + deep)
        exited = sock.recv(4096)
        assert msgspec.msgpack.decode(exited[4:], type=Exited).returncode == -signal.SIGKILL
        assert sock.recv(4096) == b""
    assert host.run(nothing).exited.returncode == 0


# Start methods


@pytest.mark.slow
def test_forced_spawn(host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("MONARCH_START_METHOD", "spawn")
    outcome = host.run(lambda: print(os.getppid(), [n for n in os.listdir("/proc/self/fd") if int(n) > 4]))
    assert (outcome.started.method, outcome.started.reason) == ("spawn", "")
    assert outcome.exited.returncode == 0, outcome.err
    with host.staying() as started:
        assert outcome.out == f"{parent_of(started.pid)} []\n"
    assert not caplog.records  # no warning, because spawn was requested
    monkeypatch.setenv("MONARCH_START_METHOD", "forkserver")
    with pytest.raises(ValueError, match="MONARCH_START_METHOD='forkserver': it can be fork or spawn"):
        host.spawn(nothing)


@pytest.mark.slow
def test_unsafe_to_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    host = Host(preload=("starts_a_thread",))
    try:
        with caplog.at_level(logging.WARNING, "monarch_backend"):
            with ThreadPoolExecutor(2) as pool:
                outcomes = list(pool.map(lambda _: host.run(lambda: print("fine")), range(2)))
        for outcome in outcomes:
            assert (outcome.out, outcome.started.method) == ("fine\n", "spawn")
            assert "has threads besides its main one" in outcome.started.reason
        assert [record.getMessage() for record in caplog.records] == [
            f"processes are started one by one, and each imports torch itself: {outcomes[0].started.reason}"
        ]
        monkeypatch.setenv("MONARCH_START_METHOD", "fork")
        failed = host.wait(host.spawn(nothing), SpawnFailed)
        assert failed.reason.startswith("MONARCH_START_METHOD=fork, but the fork server has threads")
    finally:
        host.spawner.close()


def test_modules_of_processes_are_imported_once_before_the_first_fork(host: Host) -> None:
    name = "monarch_backend.cli"

    def tell() -> None:
        fds = [n for n in os.listdir("/proc/self/fd") if int(n) > 4]  # of the stack signal, and of this call
        print(name in sys.modules, name in sys.modules and id(sys.modules[name]), fds)

    assert host.run(tell).out == "False False []\n"
    first, second = [host.run(tell, imports=[name]) for _ in range(2)]
    assert first.started.method == second.started.method == "fork"
    assert first.out.startswith("True ") and first.out.endswith(" []\n")
    assert second.out == first.out  # the same module, and no descriptors of the server
    assert host.run(tell).out == first.out


def test_server_imports_only_modules_of_the_package(host: Host) -> None:
    reason = host.wait(host.spawn(nothing, imports=["antigravity"]), SpawnFailed).reason
    assert reason == "the fork server imports modules of monarch_backend only, not antigravity"
    reason = host.wait(host.spawn(nothing, imports=["monarch_backend.no_such_room"]), SpawnFailed).reason
    assert reason.startswith("the fork server can't import monarch_backend.no_such_room: ModuleNotFoundError(")
    assert host.run(nothing).exited.returncode == 0


def test_a_variable_that_is_read_at_start_only(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    outcome = host.run(lambda: print(hash("monarch")), environment={**os.environ, "PYTHONHASHSEED": "1"})
    fresh = run_program(["-c", "print(hash('monarch'))"], env={**os.environ, "PYTHONHASHSEED": "1"})
    assert outcome.out == fresh.stdout
    assert outcome.started.method == "spawn"
    assert outcome.started.reason.startswith("PYTHONHASHSEED has changed")


def test_an_initialised_accelerator_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(child_table.os, "listdir", lambda _: ["1"])
    assert child_table.why_not_fork({}, {}) is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert "torch.cuda is initialized in the fork server" in str(child_table.why_not_fork({}, {}))
    monkeypatch.setattr(child_table.platform, "HAS_SAFE_FORK", False)
    assert str(child_table.why_not_fork({}, {})).startswith("fork is not safe on")


# The user's program


QUICK_END = """
import gc
gc.freeze()  # what torch has made is not looked through for garbage at the end: half a second of each of these
"""

PROGRAM = """
import os, sys, threading
import cloudpickle
from monarch_backend._processes.spawner import *

print("the program runs")
done = threading.Semaphore(0)

class Greeting:
    text = "hello from"
    def __call__(self):
        print(self.text, os.environ["RANK"])
        print("and to stderr", file=sys.stderr)

def function():
    Greeting()()

def spec(main, rank):
    environment = dict(os.environ, RANK=str(rank))
    return ProcessSpec(f"gpus {rank}", cloudpickle.dumps(main), environment, sys.path, sys.argv, os.getcwd())

spawner = Spawner(lambda event: isinstance(event, (Exited, SpawnFailed)) and done.release())
for rank, main in enumerate([Greeting(), function, lambda: function()]):
    # Kept: what an interactive loop prints of a value, it writes in two pieces, and a process may write between them.
    ids = spawner.spawn([spec(main, rank)])
    done.acquire(timeout=60)

""" + QUICK_END  # fmt: skip

ENDS = """
import os, sys, cloudpickle, queue, signal
from monarch_backend._processes.spawner import *
events = queue.SimpleQueue()
spawner = Spawner(events.put)
main = cloudpickle.dumps(signal.pause)
spawner.spawn([ProcessSpec("gpus 0", main, os.environ, sys.path, sys.argv, os.getcwd())])
print(events.get().pid)
""" + QUICK_END  # fmt: skip

BLOCKS = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
from tests.processes.spawning import Host
host = Host()
outcome = host.run(lambda: print(len(signal.pthread_sigmask(signal.SIG_BLOCK, []))))
print(outcome.exited.returncode, outcome.out)
host.spawner.close()
""" + QUICK_END  # fmt: skip

Programs = dict[str, "Future[Any]"]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """Run several programs at the same time, to their ends.

    Each imports torch twice: in itself and in its fork server.
    """
    folder = tmp_path_factory.mktemp("programs")
    (folder / "types.py").write_text("raise RuntimeError('a file of the user was taken for the standard library')")
    (folder / "torch.py").write_text("raise RuntimeError('not this one either')")
    script, typed = folder / "elsewhere" / "program.py", PROGRAM.replace("\n\ndef", "\n\n\ndef")
    script.parent.mkdir()
    script.write_text(PROGRAM)

    def ends() -> tuple[subprocess.CompletedProcess[str], bool]:
        out = run_program(["-W", "error", "-c", ENDS])
        return out, Path(f"/proc/{int(out.stdout or 0)}").exists()

    with ThreadPoolExecutor(3) as pool:
        return {
            "script": pool.submit(run_program, [str(script)], input=PROGRAM, cwd=folder),
            "-": pool.submit(run_program, ["-"], input=PROGRAM, cwd=folder.parent),
            "-c": pool.submit(run_program, ["-c", PROGRAM], input=PROGRAM, cwd=folder.parent),
            "-i": pool.submit(run_program, ["-i", "-q"], input=typed, cwd=folder.parent),
            "ends": pool.submit(ends),
            "blocks": pool.submit(run_program, ["-c", BLOCKS], cwd=Path(__file__).parents[2]),
        }


@pytest.mark.slow
@pytest.mark.parametrize("way", ["script", "-", "-c", "-i"])
def test_programs_without_a_guard(way: str, programs: Programs) -> None:
    out = programs[way].result()
    assert out.returncode == 0, out.stderr
    lines = [line for line in out.stdout.splitlines() if "hello" in line or "runs" in line]
    assert lines == ["the program runs", "hello from 0", "hello from 1", "hello from 2"], out


def test_process_without_pipes_writes_to_the_callers_output(programs: Programs) -> None:
    out = programs["-c"].result()
    hellos = "".join(f"hello from {rank}\n" for rank in range(3))
    assert (out.stdout, out.stderr) == ("the program runs\n" + hellos, "and to stderr\n" * 3)


def test_the_end_of_a_program_is_the_end_of_its_processes(programs: Programs) -> None:
    out, still_there = programs["ends"].result()
    assert (out.returncode, out.stderr) == (0, "")
    assert out.stdout and not still_there


def test_a_program_that_blocks_signals(programs: Programs) -> None:
    out = programs["blocks"].result()
    assert out.stdout.split() == ["0", "0"], out.stderr


def test_a_fork_waits_until_a_server_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, forked = threading.Event(), threading.Event()
    too_early: list[bool] = []
    popen = subprocess.Popen

    def start_slowly(*args: Any, **options: Any) -> Any:
        begun.set()
        too_early.append(forked.wait(0.2))
        return popen(*args, **options)

    monkeypatch.setattr(fork_server_client.subprocess, "Popen", start_slowly)
    with ThreadPoolExecutor(1) as starter:
        start = starter.submit(fork_server_client.start_server, None, [])
        assert begun.wait(PATIENCE)
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        forked.set()
        os.waitpid(pid, 0)
        server = start.result(PATIENCE)
    assert too_early == [False]
    assert server.process is not None
    server.process.kill()
    server.process.wait(PATIENCE)
    server.close()


def test_a_forked_copy_of_the_controller_has_no_spawner(host: Host) -> None:
    with host.staying() as started, Watch({"worker": started.pid}) as watch:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                host.spawner.spawn([spec(nothing)])
            except RuntimeError as error:
                code = 0 if "was forked from the one that has the spawner" in str(error) else 2
                host.spawner.close()
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert watch.left_after(0) == ["worker"]
    assert host.run(nothing).exited.returncode == 0


# Close and failures


def test_close_reports_all_exits() -> None:
    host = Host()
    ids = host.spawner.spawn([spec(signal.pause) for _ in range(5)])
    pids = {str(number): host.wait(number, Started).pid for number in ids}
    with Watch(pids | {"server": parent_of(pids["1"])}) as watch:
        host.spawner.close()
        assert watch.left_after(0) == []
    assert [host.wait(number, Exited, 0).returncode for number in ids] == [-signal.SIGKILL] * 5
    host.spawner.close()
    with pytest.raises(RuntimeError, match="the spawner is closed: no process can be started"):
        host.spawner.spawn([spec(nothing)])
    with pytest.raises(RuntimeError, match="the spawner is closed"):
        _ = host.spawner.address
    host.spawner.kill(ids[0])


def test_close_of_an_unused_spawner() -> None:
    spawner = Spawner(print)
    spawner.close()
    spawner.close()


def test_close_does_not_wait_for_the_import() -> None:
    times: list[float] = []
    # repeat, since the machine may be busy: one fast close is enough
    while not times or (min(times) >= 1.5 and len(times) < 5):
        host = Host()
        numbers = host.spawner.spawn([spec(nothing), spec(nothing)])
        before = time.monotonic()
        host.spawner.close()
        times.append(time.monotonic() - before)
        for number in numbers:
            assert "fork server" in host.wait(number, SpawnFailed, 0).reason
    assert min(times) < 1.5


def test_close_from_an_event() -> None:
    ended = threading.Event()

    def on_event(event: object) -> None:
        if isinstance(event, Started):
            spawner.close()
        if isinstance(event, Exited):
            ended.set()

    spawner = Spawner(on_event)
    spawner.spawn([spec(signal.pause)])
    assert ended.wait(PATIENCE)
    thread = spawner._thread
    spawner.close()
    assert thread is not None and not thread.is_alive()


def test_an_event_that_raises_is_logged(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    told = threading.Event()

    def on_event(event: object) -> None:
        if isinstance(event, Exited):
            told.set()
        raise ZeroDivisionError

    spawner = Spawner(on_event, host.spawner.address)
    with caplog.at_level(logging.ERROR, "monarch_backend"):
        spawner.spawn([spec(nothing)])
        assert told.wait(PATIENCE)
    spawner.close()
    assert [record.getMessage()[:35] for record in caplog.records] == [
        "on_event of a Spawner raised on Sta",
        "on_event of a Spawner raised on Exi",
    ]


def test_spawning_from_many_threads(host: Host) -> None:
    ids: list[int] = []

    def several() -> None:
        for _ in range(5):
            ids.extend(host.spawner.spawn([spec(nothing)]))

    threads = [threading.Thread(target=several) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 20
    assert {host.wait(number, Exited).returncode for number in ids} == {0}


def test_a_server_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(preload=("no_such_module",))
    reason = host.wait(host.spawn(nothing), SpawnFailed).reason
    assert "ended: exit code 1; it wrote:\n" in reason
    assert reason.endswith("ModuleNotFoundError: No module named 'no_such_module'")
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    reason = host.wait(host.spawn(nothing), SpawnFailed).reason
    assert "could not be started: " in reason and "/no/such/python" in reason
    monkeypatch.setattr(sys, "executable", "")
    assert "sys.executable is empty" in host.wait(host.spawn(nothing), SpawnFailed).reason
    host.spawner.close()


def test_invalid_spawn_arguments_are_refused_at_once(host: Host) -> None:
    with pytest.raises(ValueError, match="spawn needs at least one process"):
        host.spawner.spawn([])
    with pytest.raises(ValueError, match=r"process 'big 1' can't be sent to the fork server: 6\d+ bytes, and 6\d+ are"):
        host.spawn(nothing, "big 1", bootstrap=lambda data=bytes(65 << 20): data)
    with pytest.raises(ValueError, match=r"'gpus 0' can't be sent to the fork server: Expected .* - at `\$.threads`"):
        host.spawn(nothing, threads="2")
    with pytest.raises(ValueError, match=r"can't be sent to the fork server: .* surrogates not allowed"):
        host.spawn(nothing, "\udcff")
    with pytest.raises(ValueError, match="'gpus 0': its environment has a variable named 'A=B'"):
        host.spawn(nothing, environment={"A=B": "C"})
    with pytest.raises(TypeError, match="process 'gpus 0' can't be sent to the fork server: expected str"):
        host.spawn(nothing, environment={"A": 1})
    with pytest.raises(OSError, match="Bad file descriptor"):
        host.spawn(nothing, stdout=9999)


def test_failed_fork_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(child_table, "_fork", fail)
    monkeypatch.setattr(child_table, "why_not_fork", lambda *_: None)
    processes = child_table.Processes.__new__(child_table.Processes)
    processes._environment, processes._open_files = {}, resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(processes, "_allow_open_files", lambda: None)
    with pytest.raises(child_table.StartError, match=r"the system allows no more processes .*: raise `ulimit -u`"):
        processes.start(SPAWN, 1, 2)


def test_spawn_beyond_the_process_limit_is_refused(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [resource_limits.Limit("pids.max of the control group /x", 100, 2, "processes and threads")]
    monkeypatch.setattr(resource_limits.System, "limits", lambda *_: limits)
    with pytest.raises(
        SpawnLimitError,
        match=r"can't start 10000 processes: they need 20000 processes and threads, and pids.max of the control group "
        "/x leaves 100. Start at most 50",
    ):
        host.spawner.spawn([spec(nothing)] * 10_000)


# Messages


def test_messages_arrive_whole_and_with_their_files() -> None:
    ours, theirs = socket.socketpair()
    sender = spawn_protocol.Channel(ours, msgspec.msgpack.Decoder(spawn_protocol.Event))
    receiver = spawn_protocol.Channel(theirs, msgspec.msgpack.Decoder(spawn_protocol.Request))
    requests = [msgspec.structs.replace(SPAWN, id=n, main=os.urandom(200_000 * n)) for n in range(4)]
    with tempfile.TemporaryFile() as file:
        for request in requests:
            sender.put(frame(request), (os.dup(file.fileno()),))
        received: list[object] = []
        while sender.has_unsent:
            sender.flush()
            received += receiver.receive()
        while len(received) < 4:
            received += receiver.receive()
        for _ in requests:
            descriptor = receiver.take_descriptor()
            assert os.path.sameopenfile(descriptor, file.fileno())
            assert not os.get_inheritable(descriptor)
            os.close(descriptor)
    assert received == requests
    sender.close()
    with pytest.raises(EOFError):
        receiver.receive()
    receiver.close()
