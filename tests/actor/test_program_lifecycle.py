"""Whole programs: how they start and end, and that they leave no processes behind."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_backend._actor.runtime import program
from monarch_backend._actor.shutdown import Shutdown
from monarch_backend._core import platform
from monarch_backend.actor import this_host
from tests.actor.script_runner import PATIENCE, Run, WarmInterpreter, python
from tests.actor.support import gate
from tests.processes.spawning import Watch

QUICKLY = 2.0
"""Seconds within which the processes of a dead controller end: promise 8 of docs/architecture.md."""

Start = Callable[..., Run]


@pytest.fixture(scope="module")
def server() -> str:
    """Return the address of a running fork server."""
    with this_host().spawn_procs({"gpus": 1}) as procs:
        procs.initialized.get(PATIENCE)
    return str(program().owner.starter.spawner.address)


@pytest.fixture(scope="module")
def interpreter(server: str) -> Iterator[WarmInterpreter]:
    with WarmInterpreter(server) as interpreter:
        yield interpreter


@pytest.fixture
def start(interpreter: WarmInterpreter, tmp_path: Path) -> Iterator[Start]:
    """Return ``start(source, more)``, which starts a script."""

    def begin(source: str, more: str = "", **options: Any) -> Run:
        whole = HEAD + textwrap.dedent(source) + more + "\n"
        return interpreter.start(tmp_path / "script.py", whole, **options)

    yield begin
    interpreter.drop()


@pytest.fixture
def finish(start: Start, interpreter: WarmInterpreter) -> Start:
    """Return ``finish(source, more)``, which runs a script to its end."""

    def run(source: str, more: str = "", **options: Any) -> Run:
        start(source, more, **options)
        return interpreter.finish()

    return run


HEAD = """
import asyncio, os, signal, subprocess, sys, threading, time
import monarch_backend.actor as ma
from monarch_backend._actor import runtime, shutdown
from monarch_backend.actor import Actor, ActorError, MeshFailure, Restart, SupervisionError, endpoint, this_host

class Victim(Actor):
    @endpoint
    def echo(self, value):
        return value
    @endpoint
    def pid(self):
        return os.getpid()
    @endpoint
    def die(self, number=9):
        os.kill(os.getpid(), number)
        threading.Event().wait()
    @endpoint
    def busy(self, seconds):
        print("busy", os.getpid())
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.01)
        return "done"
    @endpoint
    def hold(self, gate):
        print("busy", os.getpid())
        with open(gate, "rb", buffering=0) as file:
            file.read(1)
        return "done"
    def __cleanup__(self, exc):
        print("cleaned up", exc)

# A busy machine is not what these programs wait for at their end.
shutdown.SHUTDOWN_NOTICE_S, shutdown.SHUTDOWN_KILL_S = 50, 55
"""


def pids_in(run: Run) -> dict[str, int]:
    """Return the pids that a script has printed as ``name=pid``."""
    words = [word.partition("=") for line in run.out.splitlines() for word in line.split()]
    return {name: int(pid) for name, equals, pid in words if equals and pid.isdigit()}


def cleaned_up(run: Run) -> set[int]:
    """Return the ranks that have reported their cleanup.

    Lines of two ranks at about the same time are merged into one.
    """
    ranks = re.findall(r"^\[gpus (\d)(?:-(\d))?\] cleaned up None$", run.out, re.MULTILINE)
    return {int(rank) for pair in ranks for rank in pair if rank}


# How programs are started

PLAIN = """
import sys
from monarch_backend._actor import shutdown as _shutdown
from monarch_backend.actor import Actor, endpoint, this_host

_shutdown.SHUTDOWN_NOTICE_S, _shutdown.SHUTDOWN_KILL_S = 50, 55

GREETING = "hello"

def greet(name):
    return f"{GREETING}, {name}"

class Greeter(Actor):
    def __init__(self, how):
        self.how = how

    @endpoint
    def greet(self, name):
        return self.how(name)

    @endpoint
    def make(self):
        return Card(2)

    def __cleanup__(self, exc):
        print("cleaned up", exc)

class Card:
    def __init__(self, number):
        self.number = number

procs = this_host().spawn_procs({"gpus": 2})
procs.logging_option(aggregate_window_sec=60)
greeters = procs.spawn("greeters", Greeter, greet)
print(list(greeters.greet.call("you").get().values()), flush=True)
card = greeters.slice(gpus=1).make.call_one().get()
print(card.number, isinstance(card, Card))
print(greeters.slice(gpus=0).greet.call_one("me").get(), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def plain(server: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[Any]]:
    """Run the program in each way, at the same time: each imports torch."""
    path = tmp_path_factory.mktemp("plain") / "script.py"
    path.write_text(PLAIN)
    source = f"from tests.actor.script_runner import use_server; use_server({server!r})\n{PLAIN}"
    with ThreadPoolExecutor(3) as pool:
        return {
            "script.py": pool.submit(python, str(path)),  # with a fork server of its own
            "-": pool.submit(python, "-", stdin=source),
            "-c": pool.submit(python, "-c", source),
        }


@pytest.mark.parametrize("way", ["script.py", "-", "-c"])
def test_program_without_main_guard_and_stop_ends_well(way: str, plain: dict[str, Future[Any]]) -> None:
    """Classes and functions of ``__main__`` work.

    The program ends with status 0, cleans up, and leaves no processes.
    """
    ended = plain[way].result()
    assert (ended.returncode, ended.stderr) == (0, "hello, me\n")
    assert ended.stdout.splitlines() == ["['hello, you', 'hello, you']", "2 True", "[gpus 0-1] cleaned up None"]


def test_repl_can_spawn_actors(server: str) -> None:
    """Classes typed at the prompt work. A failure is reported and does not end the session."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHON_BASIC_REPL": "1", "TERM": "dumb"}
    repl = subprocess.Popen(
        [sys.executable, "-q"], stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
    )
    os.close(theirs)
    seen = ""

    def type_in(line: str, *until: str) -> str:
        nonlocal seen
        os.write(ours, line.encode() + b"\n")
        seen, deadline = "", time.monotonic() + PATIENCE
        while not all(text in seen.replace("\r\n", "\n").partition("\n")[2] for text in until):
            assert select.select([ours], [], [], max(0.0, deadline - time.monotonic()))[0], seen
            seen += os.read(ours, 4096).decode()
        return seen

    try:
        type_in(f"from tests.actor.script_runner import use_server; use_server({server!r})", ">>> ")
        type_in("from monarch_backend.actor import *; import os, signal", ">>> ")
        type_in("class A(Actor):", "... ")
        type_in("    @endpoint", "... ")
        type_in("    def twice(self, x): return helper(x)", "... ")
        type_in("    @endpoint", "... ")
        type_in("    def die(self): os._exit(7)", "... ")
        type_in("", ">>> ")
        type_in("def helper(x): return 2 * x", "... ")
        type_in("", ">>> ")
        type_in('a = this_host().spawn_procs({"gpus": 2}).spawn("a", A)', ">>> ")
        assert "ValueMesh(gpus=2: 42, 42)" in type_in("a.twice.call(21).get()", ">>> ")
        report = type_in("a.slice(gpus=1).die.broadcast()", ">>> ", "unhandled_fault_hook.\n")  # in either order
        assert "exited with status 7" in report
        assert "[2]" in type_in("[f.get() for f in a.without([1]).twice.stream(1)]", ">>> ")
        os.write(ours, b"exit()\n")
        assert repl.wait(PATIENCE) == 0
    finally:
        repl.kill()
        repl.wait(PATIENCE)
        os.close(ours)


def test_spawning_without_fork_works(finish: Start) -> None:
    """Without fork, workers import all modules anew, and ``__main__`` still needs no guard."""
    ended = finish(
        """
        procs = this_host().spawn_procs({"gpus": 1})
        victim = procs.spawn("victim", Victim)
        print(victim.echo.call_one("spawned").get())
        """,
        env={"MONARCH_START_METHOD": "spawn"},
    )
    assert (ended.returncode, ended.err) == (0, "")
    assert ended.out.splitlines() == ["spawned", "[gpus 0] cleaned up None"]


def test_program_stopped_during_startup_continues(finish: Start) -> None:
    """The controller may stop in a debugger or be slow on a busy machine. Its workers wait for it."""
    ended = finish(
        """
        def hold_up():
            os.kill(int(os.environ["CONTROLLER"]), signal.SIGSTOP)
            subprocess.Popen(["sh", "-c", f"sleep 1.5; kill -CONT {os.environ['CONTROLLER']}"])

        procs = this_host().spawn_procs({"gpus": 1}, bootstrap=hold_up, env={"CONTROLLER": str(os.getpid())})
        print(procs.spawn("victim", Victim).echo.call_one("waited").get())
        """
    )
    assert (ended.returncode, ended.err) == (0, "")
    assert ended.out.splitlines() == ["waited", "[gpus 0] cleaned up None"]


def test_wrong_start_method_error_lists_methods(finish: Start) -> None:
    ended = finish('this_host().spawn_procs({"gpus": 1})', env={"MONARCH_START_METHOD": "magic"})
    assert ended.returncode == 1 and "it can be fork or spawn" in ended.err


# How they end

ENDINGS = {
    "its last line": ("", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "an exception": ("raise ValueError('of the program')", 1),
    "an exception while actors are busy": ("v.slice(gpus=0).busy.call_one(0.3); raise ValueError('of the program')", 1),
    "stop, then its last line": ("procs.stop().get()", 0),
    "an exception in a with": ("\nwith procs: raise ValueError('of the program')", 1),
    "asyncio": ("asyncio.run(main())", 0),
    "an exception in asyncio": ("asyncio.run(main(ValueError('of the program')))", 1),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_actors_clean_up_at_every_kind_of_program_end(ending: str, finish: Start) -> None:
    code, status = ENDINGS[ending]
    ended = finish(
        """
        async def main(error=None):
            assert len(await v.echo.call(2)) == 2
            if error:
                raise error
        procs = this_host().spawn_procs({"gpus": 2})
        v = procs.spawn("v", Victim)
        v.echo.call(1).get()
        """,
        code,
    )
    assert ended.returncode == status
    assert cleaned_up(ended) == {0, 1}
    assert ("ValueError: of the program" in ended.err) is (status == 1)
    assert "monarch" not in ended.err.replace("monarch_backend/", "")


FAILURES = {
    "nobody looks": "v.die.broadcast(); threading.Event().wait()",
    "waiting for the dead": "v.slice(gpus=1).die.call_one().get()",
    "waiting for another": "v.slice(gpus=1).die.broadcast(); v.slice(gpus=0).busy.call_one(1000).get()",
    "catching everything": """
try:
    v.slice(gpus=1).die.call_one().get()
except BaseException:
    sys.exit(5)
""",
    "asyncio": "asyncio.run(waiting())",
    "computing": "v.slice(gpus=1).die.broadcast()\nwhile True: sum(range(1000))",
    "both at once": "v.die.call().get()",
    "a thread waits": "threading.Thread(target=lambda: v.slice(gpus=1).die.call_one().get()).start()",
}


@pytest.mark.parametrize("how", FAILURES)
def test_unhandled_failure_ends_the_program_with_its_cause_first(how: str, finish: Start) -> None:
    ended = finish(
        """
        async def waiting():
            await v.slice(gpus=1).die.call_one()
        procs = this_host().spawn_procs({"gpus": 2}, name="workers")
        v = procs.spawn("v", Victim)
        v.echo.call(1).get()
        print("all are there", flush=True)
        """,
        FAILURES[how],
    )
    said = ended.err.splitlines()
    assert ended.returncode == 1
    assert said[0] == "monarch_backend: unhandled failure of mesh 'workers'; the program ends"
    assert said[1].startswith("root cause: mesh 'workers' lost 1 of its ranks")
    assert "killed by signal 9 (SIGKILL)" in said[2] and "gpus" in said[2] and "pid" in said[2]
    *messages, cure = said[3:]
    assert bool(messages) == platform.HAS_MEMFD and all(line.startswith("    - ") for line in messages)
    assert "To handle it: __supervise__" in cure and "Restart(" in cure, "one failure is told, and once"
    assert ended.out.splitlines()[0] == "all are there"


UNWOUND = {
    "waiting": "v.slice(gpus=1).die.call_one().get()",
    "sleeping": "v.slice(gpus=1).die.broadcast(); time.sleep(600)",
    "computing": "v.slice(gpus=1).die.broadcast()\nwhile True: sum(range(1000))",
    "asyncio": "asyncio.run(waiting())",
    "in a with block": "with procs: v.slice(gpus=1).die.call_one().get()",
    "with a handler of SIGINT": """
signal.signal(signal.SIGINT, lambda *_: print("not a Ctrl-C"))
v.slice(gpus=1).die.broadcast(); time.sleep(600)
""",
    "catching the exit": """
try:
    v.slice(gpus=1).die.call_one().get()
except BaseException:
    sys.exit(5)
""",
    "an actor fails": "procs.spawn('broken', Broken); time.sleep(600)",
}


@pytest.mark.parametrize("how", UNWOUND)
def test_unhandled_failure_runs_finally_blocks_and_atexit_hooks(how: str, finish: Start) -> None:
    ended = finish(
        """
        import atexit
        class Broken(Actor):
            def __init__(self):
                raise RuntimeError("no accelerator here")
        async def waiting():
            try:
                await v.slice(gpus=1).die.call_one()
            finally:
                print("async finally")
        procs = this_host().spawn_procs({"gpus": 2}, name="workers")
        v = procs.spawn("v", Victim)
        v.echo.call(1).get()
        atexit.register(print, "hook")
        try:
        """,
        textwrap.indent(UNWOUND[how], "    ") + "\nfinally: print('finally')",
    )
    assert ended.returncode == 1, ended.err
    assert ended.out.splitlines() == ["async finally"] * (how == "asyncio") + ["finally", "hook"]
    assert ended.err.count("Traceback") == (how == "an actor fails"), ended.err
    assert ended.err.startswith("monarch_backend: unhandled failure of mesh")


@pytest.mark.parametrize("code", ["finally: time.sleep(600)", "except BaseException: time.sleep(600)"])
def test_unhandled_failure_with_blocks_that_hang_ends_in_time(code: str, finish: Start) -> None:
    ended = finish(
        f"""
        from monarch_backend._actor import program_exit
        program_exit.UNWIND_TIMEOUT_S = 0.5
        v = this_host().spawn_procs({{"gpus": 1}}).spawn("v", Victim)
        try: v.die.call_one().get()
        {code}
        """
    )
    assert ended.returncode == 1
    assert "`finally` blocks and atexit hooks have run for 0.5 s" in ended.err


@pytest.mark.slow
def test_unhandled_failure_runs_hooks_that_are_older_than_the_package(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import atexit, os
        atexit.register(print, "first hook")
        from monarch_backend.actor import Actor, endpoint, this_host

        class Victim(Actor):
            @endpoint
            def die(self):
                os._exit(3)

        atexit.register(print, "last hook")
        this_host().spawn_procs({"gpus": 1}).spawn("victim", Victim).die.call_one().get()
        """)
    )
    ended = python(str(script))
    assert ended.returncode == 1
    assert ended.stdout.splitlines() == ["last hook", "first hook"]


def test_output_of_a_crash_is_in_the_report(finish: Start) -> None:
    ended = finish(
        """
        v = this_host().spawn_procs({"gpus": 1}).spawn("v", Victim)
        v.die.call_one(signal.SIGSEGV).get()
        """
    )
    assert ended.returncode == 1
    report = ended.err[ended.err.index("root cause") :]
    assert "SIGSEGV" in report and "Fatal Python error: Segmentation fault" in report
    assert '"' + str(Path("script.py")) not in report


def test_unhandled_failure_leaves_no_partial_file(finish: Start, tmp_path: Path) -> None:
    ended = finish(
        f"""
        import logging, threading
        records, raw = open({str(tmp_path / "records")!r}, "w"), open({str(tmp_path / "raw")!r}, "wb")
        pipe = open(os.pipe()[1], "wb", buffering=1 << 20)
        full = open(os.pipe()[1], "wb", buffering=1 << 20)
        v = this_host().spawn_procs({{"gpus": 1}}).spawn("v", Victim)
        records.write("a line that nobody has flushed")
        raw.write(b"bytes, too")
        full.write(bytes(1 << 19))  # a pipe that nobody reads: its flush never ends
        print("on stdout", end="")
        v.die.call_one().get()
        """
    )
    assert ended.returncode == 1
    assert (tmp_path / "records").read_text() == "a line that nobody has flushed"
    assert (tmp_path / "raw").read_bytes() == b"bytes, too"
    assert ended.out == "on stdout"


def test_traceback_of_a_failed_actor_is_in_the_report(finish: Start) -> None:
    ended = finish(
        """
        class Broken(Actor):
            def __init__(self):
                self.build()
            def build(self):
                raise RuntimeError("no accelerator here")
        broken = this_host().spawn_procs({"gpus": 2}).spawn("broken", Broken)
        threading.Event().wait()
        """
    )
    assert ended.returncode == 1
    said = ended.err.splitlines()
    assert said[0] == "monarch_backend: unhandled failure of mesh 'broken'; the program ends"
    assert said[1] == "root cause: RuntimeError: no accelerator here"
    assert "in build" in ended.err
    assert 'script.py", line' in ended.err


def test_root_cause_of_a_nested_failure_comes_first(finish: Start) -> None:
    ended = finish(
        """
        class Owner(Actor):
            @endpoint
            def spawn(self):
                self.nested = this_host().spawn_procs({"nested": 2}, name="deep").spawn("nested", Victim)
                self.nested.slice(nested=1).die.broadcast()
        owner = this_host().spawn_procs({"gpus": 1}, name="workers").spawn("owner", Owner)
        owner.spawn.call_one().get()
        threading.Event().wait()
        """
    )
    assert ended.returncode == 1
    heads = [line for line in ended.err.splitlines() if not line.startswith((" ", "["))]
    assert heads[:3] == [
        "monarch_backend: unhandled failure of mesh 'owner'; the program ends",
        "root cause: mesh 'deep' lost 1 of its ranks",
        "therefore: mesh 'owner' lost 1 of its ranks",
    ]


def test_hook_that_handles_a_failure_keeps_the_program_running(finish: Start) -> None:
    ended = finish(
        r"""
        told = threading.Event()
        def hook(failure):
            sys.stdout.write(f"told of {failure.mesh_name} {failure.ranks}\n")
            told.set()
        ma.unhandled_fault_hook = hook
        v = this_host().spawn_procs({"gpus": 2}, name="workers").spawn("v", Victim)
        error = v.slice(gpus=1).die.call_one().exception()
        told.wait()
        print(type(error).__name__)
        print(v.without(v.failed_ranks).echo.call_one("on").get())
        """
    )
    assert (ended.returncode, ended.err) == (0, "")
    assert ended.out.splitlines() == ["told of workers (1,)", "SupervisionError", "on", "[gpus 0] cleaned up None"]


def test_hook_that_raises_ends_the_program(finish: Start) -> None:
    ended = finish(
        """
        def hook(failure):
            raise ZeroDivisionError("in the hook")
        ma.unhandled_fault_hook = hook
        v = this_host().spawn_procs({"gpus": 1}, name="workers").spawn("v", Victim)
        v.die.broadcast()
        threading.Event().wait()
        """
    )
    assert ended.returncode == 1
    said = ended.err.splitlines()
    assert said[0] == "monarch_backend: unhandled_fault_hook raised ZeroDivisionError: in the hook"
    assert "root cause: mesh 'workers' lost 1 of its ranks" in said


# Ctrl-C

INTERRUPTED = """
procs = this_host().spawn_procs({"gpus": 2})
v = procs.spawn("v", Victim)
print(*(f"rank{i}={pid}" for i, pid in enumerate(v.pid.call().get().values())), flush=True)
"""


def interrupt(run: Run) -> None:
    """Send SIGINT as a terminal does: to the process group of the program, which does not include its workers."""
    os.killpg(run.pid, signal.SIGINT)


@pytest.mark.parametrize("where", ["get", "asyncio", "computing"])
def test_ctrl_c_ends_the_program(where: str, start: Start, interpreter: WarmInterpreter, tmp_path: Path) -> None:
    with gate(tmp_path) as (name, open_gate):
        code = {
            "get": f"v.hold.call({name!r}).get()",
            "asyncio": f"async def main(): await v.hold.call({name!r})\nasyncio.run(main())",
            "computing": f"f = v.hold.call({name!r})\nwhile True: sum(range(1000))",
        }[where]
        run = start(INTERRUPTED + code)
        run.read_until("busy")
        interrupt(run)
        run.read_until("KeyboardInterrupt")
        open_gate()
        ended = interpreter.finish()
    assert ended.returncode == -signal.SIGINT, "as Python ends after Ctrl-C"
    last = [line for line in ended.err.splitlines() if not line.startswith("The call goes on: ")][-1]
    assert last == "KeyboardInterrupt"
    assert cleaned_up(ended) == {0, 1}
    assert "monarch_backend:" not in ended.err


def test_ctrl_c_can_be_caught(start: Start, interpreter: WarmInterpreter, tmp_path: Path) -> None:
    with gate(tmp_path) as (name, open_gate):
        run = start(
            INTERRUPTED
            + f"""
try:
    v.hold.call({name!r}).get()
except KeyboardInterrupt:
    print("caught", flush=True)
    print(f"go on {{list(v.echo.call(1).get().values())}}")
"""
        )
        run.read_until("busy")
        interrupt(run)
        run.read_until("caught")
        open_gate()
        ended = interpreter.finish()
    assert (ended.returncode, ended.err) == (0, "")
    assert "go on [1, 1]" in ended.out


@pytest.mark.parametrize("way", ["call", "pipeline", "port"])
def test_repeated_ctrl_c_loses_nothing(way: str, finish: Start) -> None:
    """As in a notebook, an interrupt does not end the program. Whatever it hits, the next call is answered."""
    ended = finish(
        """
class Many(Victim):
    @endpoint
    def fill(self, port, n):
        for i in range(n):
            port.send(i)

v = this_host().spawn_procs({"gpus": 2}).spawn("v", Many)
one, armed, ended, hits = v.slice(gpus=0), threading.Event(), False, 0

def interrupt():
    while armed.wait() and not ended:
        time.sleep(0.002)
        if armed.is_set():
            armed.clear()
            os.kill(os.getpid(), signal.SIGINT)

def use(way):
    if way == "call":
        while True:
            v.echo.call(1).get(20)
    elif way == "pipeline":
        while True:
            for future in [one.echo.call_one(i) for i in range(100)]:
                future.get(20)
    else:
        while True:
            port, receiver = ma.Channel.open()
            one.fill.broadcast(port, 300)
            for i in range(300):
                assert receiver.recv().get(20) == i

v.echo.call(0).get()
sender = threading.Thread(target=interrupt)
sender.start()
while hits < 150:
    try:
        armed.set()
        use("""
        + repr(way)
        + """)
    except KeyboardInterrupt:
        hits += 1
    assert list(v.echo.call(hits).get(20).values()) == [hits, hits]
ended = True
armed.set()
sender.join()
print("fine")
"""
    )
    assert (ended.returncode, ended.err) == (0, "")
    assert ended.out.startswith("fine\n")


def test_objects_of_main_unpickle_in_actors(finish: Start) -> None:
    """torch.save, all_gather_object and forked data loaders pickle classes by name."""
    ended = finish(
        """
import enum, multiprocessing, pickle

class Color(enum.Enum):
    RED = 1

class Config:
    color = Color.RED

def square(x):
    return x * x

class Trainer(Actor):
    @endpoint
    def save(self, config):
        with multiprocessing.get_context("fork").Pool(1) as pool:
            return pickle.dumps((config, Color.RED)), pool.map(square, [1, 2])

saved, squares = this_host().spawn_procs({"gpus": 1}).spawn("trainer", Trainer).save.call_one(Config()).get()
config, color = pickle.loads(saved)
print(type(config) is Config, color is Color.RED, squares)
"""
    )
    assert (ended.returncode, ended.out) == (0, "True True [1, 4]\n"), ended.err


def test_unfinished_work_at_the_end_is_named(finish: Start) -> None:
    ended = finish(
        """
import monarch_backend._actor.shutdown as _shutdown
_shutdown.SHUTDOWN_NOTICE_S, _shutdown.SHUTDOWN_KILL_S = 0.1, 0.2
class Saver(Victim):
    @endpoint
    def save(self):
        time.sleep(60)

v = this_host().spawn_procs({"gpus": 1}).spawn("v", Saver)
v.echo.call(0).get()
v.save.broadcast()
"""
    )
    assert ended.returncode == 0
    assert "0.2 s later gpus 0 of procs-0" in ended.err and "wait for their futures" in ended.err


def test_ctrl_c_again_kills_at_once(start: Start, interpreter: WarmInterpreter) -> None:
    """The first Ctrl-C lets actors finish, and these actors never do. An impatient user sends more of them."""
    run = start(INTERRUPTED + "v.busy.call(1000).get()")
    run.read_until("busy")
    with Watch(pids_in(run)) as watch:
        interrupt(run)
        run.read_until("KeyboardInterrupt")  # the program waits for the actors now, or in a moment
        for _ in range(20):
            interrupt(run)
            if interpreter.ends_within(0.1):
                break
        ended = interpreter.finish()
        assert watch.left_after(QUICKLY) == []
    assert ended.returncode not in (0, None)
    assert "interrupted again: the processes are killed" in ended.err


def test_interrupted_kill_of_processes_ends_their_starter() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    closed: list[str] = []
    starter = SimpleNamespace(close=lambda: closed.append("starter"))
    runtime: Any = SimpleNamespace(
        closing=False, extensions=[SimpleNamespace(kill=interrupted)], owner=SimpleNamespace(starter=starter)
    )
    with pytest.raises(KeyboardInterrupt):
        Shutdown(runtime).kill_all()
    assert closed == ["starter"]


# A controller that dies

DYING = """
class Parent(Victim):
    @endpoint
    def spawn(self):
        self.child = subprocess.Popen(["sleep", "1000"])
        self.daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        self.nested = this_host().spawn_procs({"nested": 1}).spawn("nested", Victim)
        return self.child.pid, self.daemon.pid, self.nested.pid.call_one().get()
procs = this_host().spawn_procs({"gpus": 2})
v = procs.spawn("v", Parent)
for i, pid in enumerate(v.pid.call().get().values()):
    print(f"rank{i}={pid}")
print("child={} daemon={} nested={}".format(*v.slice(gpus=0).spawn.call_one().get()))
server = runtime.program().owner.starter.spawner._process
print(f"server={server.pid}" if server else "", flush=True)
v.slice(gpus=0).busy.call_one(1000)
print("ready", flush=True)
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGABRT", "os._exit"])
def test_killed_controller_leaves_no_process(how: str, start: Start, interpreter: WarmInterpreter) -> None:
    """Workers, their child processes and nested workers end; after SIGKILL also the controller's own fork server.

    A program in a session of its own ends, too, except on macOS.
    """
    number = signal.SIGUSR1 if how == "os._exit" else signal.Signals[how]
    begin = "signal.signal(signal.SIGUSR1, lambda *_: os._exit(4))\n"
    # Short waits: Python calls no handler for a signal that comes just before the system call of a wait, until it ends.
    wait = "import time\nwhile True: time.sleep(0.1)"
    run = start(begin + DYING, wait, own_server=how == "SIGKILL")
    run.read_until("ready")
    pids = pids_in(run)
    assert set(pids) == {"rank0", "rank1", "child", "daemon", "nested"} | ({"server"} if how == "SIGKILL" else set())
    left = [] if platform.HAS_PRCTL else [pids.pop("daemon")]
    with Watch(pids) as watch:
        run.signal(number)
        ended = interpreter.finish()
        assert watch.left_after(QUICKLY) == []
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert ended.returncode == (4 if how == "os._exit" else -number)


def test_controller_killed_during_spawn_leaves_no_process(finish: Start) -> None:
    """The processes are still starting. They belong to the fork server, so the leak check sees them."""
    ended = finish(
        """
        this_host().spawn_procs({"gpus": 4}).spawn("v", Victim)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert ended.returncode == -signal.SIGKILL


def test_dead_fork_server_is_the_root_cause(start: Start, interpreter: WarmInterpreter) -> None:
    """The server's processes end with it, and the report names it as the cause."""
    run = start(
        """
        v = this_host().spawn_procs({"gpus": 1}).spawn("v", Victim)
        worker = v.pid.call_one().get()  # so that there is a server
        print(f"server={runtime.program().owner.starter.spawner._process.pid} worker={worker}", flush=True)
        threading.Event().wait()
        """,
        own_server=True,
    )
    run.read_until("worker=")
    pids = pids_in(run)
    with Watch(pids) as watch:
        os.kill(pids["server"], signal.SIGKILL)
        ended = interpreter.finish()
        assert watch.left_after(QUICKLY) == []
    assert ended.returncode == 1
    assert "root cause: mesh 'procs-0' lost" in ended.err and "fork server" in ended.err


# Forks of the controller

FORKS = {
    "that ends at once": "os._exit(0)",
    "that ends as Python does": "sys.exit(0)",
    "that raises": "raise ValueError('of the fork')",
    "with a mesh of its own": """
    w = this_host().spawn_procs({"gpus": 1}).spawn("w", Victim)
    print("in the fork", w.echo.call_one(5).get(), flush=True)
    sys.exit(0)""",
}


@pytest.mark.parametrize("kind", FORKS)
def test_fork_of_the_controller_does_not_disturb_actors(kind: str, finish: Start) -> None:
    ended = finish(
        """
        procs = this_host().spawn_procs({"gpus": 2})
        procs.logging_option(aggregate_window_sec=60)
        v = procs.spawn("v", Victim)
        v.echo.call(1).get()
        pid = os.fork()
        """,
        f"""
if pid == 0:
    {FORKS[kind].strip()}
_, status = os.waitpid(pid, 0)
print("fork ended with", os.waitstatus_to_exitcode(status))
print(list(v.echo.call("still here").get().values()), flush=True)
""",
    )
    assert ended.returncode == 0
    said = ended.out.splitlines()
    assert f"fork ended with {1 if kind == 'that raises' else 0}" in said
    assert "['still here', 'still here']" in said and said[-1] == "[gpus 0-1] cleaned up None"
    assert said.count("[gpus 0-1] cleaned up None") == 1
    assert ("in the fork 5" in said) is (kind == "with a mesh of its own")


def test_forked_child_gets_an_error_for_meshes_of_its_parent(finish: Start) -> None:
    ended = finish(
        """
        v = this_host().spawn_procs({"gpus": 1}).spawn("v", Victim)
        v.echo.call_one(1).get()
        pid = os.fork()
        if pid == 0:
            try:
                print("in the fork:", v.echo.call_one(2).get(5))
            except TimeoutError:
                print("it hangs")
            except Exception as error:
                print("in the fork:", type(error).__name__, error)
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(pid, 0)
        print(v.echo.call_one(3).get(), flush=True)
        """
    )
    assert ended.returncode == 0
    assert "3" in ended.out.splitlines()
    assert "it hangs" not in ended.out
    assert "fork" in ended.out.partition("in the fork: ")[2].lower(), ended.out


def test_controller_can_use_multiprocessing(finish: Start) -> None:
    ended = finish(
        """
        import multiprocessing
        v = this_host().spawn_procs({"gpus": 1}).spawn("v", Victim)
        v.echo.call_one(1).get()
        with multiprocessing.get_context("fork").Pool(2) as pool:
            print(pool.map(abs, [-1, -2]))
        print(v.echo.call_one(3).get(), flush=True)
        """
    )
    assert (ended.returncode, ended.err) == (0, "")
    assert ended.out.splitlines() == ["[1, 2]", "3", "[gpus 0] cleaned up None"]


def test_subprocess_of_the_controller_does_not_delay_the_end(start: Start, interpreter: WarmInterpreter) -> None:
    """The subprocess outlives the controller but has inherited no descriptors, so the workers see their owner's end."""
    run = start(
        """
        child = subprocess.Popen(["sleep", "1000"], close_fds=False, stdin=subprocess.DEVNULL,
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        v = this_host().spawn_procs({"gpus": 1}).spawn("v", Victim)
        later = subprocess.Popen(["sleep", "1000"], close_fds=False, stdin=subprocess.DEVNULL,
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        print(f"child={child.pid} later={later.pid} worker={v.pid.call_one().get()}", flush=True)
        threading.Event().wait()
        """
    )
    run.read_until("worker=")
    pids = pids_in(run)
    try:
        with Watch({"worker": pids["worker"]}) as watch:
            run.signal(signal.SIGKILL)
            interpreter.finish()
            assert watch.left_after(QUICKLY) == []
    finally:
        for name in ("child", "later"):
            os.kill(pids[name], signal.SIGKILL)
