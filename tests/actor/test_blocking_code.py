"""Interruption of blocking code: at once on the main thread of a process, elsewhere a log line names the place.

The matrix: kind of blocking x (first actor of a process, later actor) x (cancel, options(timeout=), abort).
"""

from __future__ import annotations

import asyncio
import os
import queue
import select
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._actor import actor_mesh_owner
from monarch_backend._actor.execution import interruption
from monarch_backend._actor.runtime import program
from monarch_backend.actor import (
    Actor,
    ActorMesh,
    CancelledError,
    Port,
    ProcMesh,
    SupervisionError,
    endpoint,
    this_proc,
)
from tests.actor.actors import pid_of, running, until
from tests.actor.support import PATIENCE, begun

pytestmark = pytest.mark.usefixtures("faults")

LONG_S = 300.0

FREE_S = 2.0
"""Seconds within which an actor must be free for its next message."""


def in_sleep(seconds: float) -> None:
    time.sleep(seconds)


def in_select(seconds: float) -> None:
    reader, writer = os.pipe()
    try:
        select.select([reader], [], [], seconds)
    finally:
        os.close(reader)
        os.close(writer)


def in_subprocess(seconds: float) -> None:
    subprocess.run(["sleep", str(seconds)], check=True)


def in_lock(seconds: float) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=seconds)


def in_event(seconds: float) -> None:
    threading.Event().wait(seconds)


def in_queue(seconds: float) -> None:
    try:
        queue.Queue[int]().get(timeout=seconds)
    except queue.Empty:
        return


def in_socket(seconds: float) -> None:
    left, right = socket.socketpair()
    with left, right:
        left.settimeout(seconds)
        try:
            left.recv(1)
        except TimeoutError:
            return


def in_join(seconds: float) -> None:
    thread = threading.Thread(target=time.sleep, args=(min(seconds, 5),), daemon=True)
    thread.start()
    thread.join(seconds)


def in_python(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def start(actor: ActorMesh, verb: Any, kind: str, seconds: float = LONG_S) -> Any:
    """Make a call, and wait until its endpoint blocks.

    This includes the start of a child: an interrupted Popen() leaks it.
    """
    future = begun(verb.call_one, kind, seconds)
    pid = pid_of(actor)
    if kind == "in_subprocess":
        until(lambda: f"(sleep) S {pid} " in "".join(map(_stat, Path("/proc").glob("[0-9]*/stat"))), "a child sleeps")
    return future


def _stat(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the process has ended
        return ""


KINDS: dict[str, Callable[[float], None]] = {
    function.__name__: function
    for function in (
        in_sleep, in_select, in_subprocess, in_lock, in_event, in_queue, in_socket, in_join, in_python
    )
}  # fmt: skip


class BlockingDestructor:
    def __init__(self, kind: str, seconds: float) -> None:
        self.kind, self.seconds = kind, seconds

    def __del__(self) -> None:
        KINDS[self.kind](self.seconds)


class Blocking(Actor):
    """Actor whose endpoint blocks in code of a given kind."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    @endpoint
    def block(self, begin: Port[int] | None, kind: str, seconds: float = LONG_S) -> None:
        try:
            if begin is not None:
                begin.send(1)
            KINDS[kind](seconds)
            self.seen.append("returned")
        except CancelledError:
            self.seen.append("cancelled")
            raise

    @endpoint
    def block_in_destructor(self, begin: Port[int], kind: str) -> None:
        try:
            begin.send(1)
            BlockingDestructor(kind, LONG_S)
            KINDS[kind](LONG_S)
        except CancelledError:
            self.seen.append("cancelled")
            raise

    @endpoint
    def generate(self, begin: Port[int], kind: str) -> Iterator[int]:
        try:
            yield 1
            begin.send(1)
            KINDS[kind](LONG_S)
        except CancelledError:
            self.seen.append("cancelled")
            raise

    @endpoint
    def block_with_own_handler(self, begin: Port[int], seconds: float) -> None:
        former = signal.signal(signal.SIGURG, signal.SIG_IGN)
        try:
            begin.send(1)
            time.sleep(seconds)
        finally:
            signal.signal(signal.SIGURG, former)

    @endpoint
    def compute_in_standard_library(self, begin: Port[int]) -> None:
        numbers = range(300_000)
        try:
            begin.send(1)
            statistics.mean(numbers)
            self.seen.append("computed")
            in_python(LONG_S)
        except CancelledError:
            self.seen.append("cancelled")
            raise

    @endpoint
    def swallow(self, begin: Port[int]) -> str:
        begin.send(1)
        try:
            time.sleep(LONG_S)
        except CancelledError:
            self.seen.append("cancelled")
        time.sleep(0.01)
        self.seen.append("went on")
        return "value"

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def take_seen(self) -> list[str]:
        seen, self.seen = self.seen, []
        return seen

    @endpoint
    def count_traced_calls(self) -> int:
        """Return the number of calls that a trace function sees, as a debugger's would."""
        calls = 0

        def trace(*_: Any) -> None:
            nonlocal calls
            calls += 1

        sys.settrace(trace)
        try:
            for _ in range(3):
                in_lock(0)
        finally:
            sys.settrace(None)
        return calls

    @endpoint
    def thread_is_main(self) -> bool:
        return threading.current_thread() is threading.main_thread()


class AsyncBlocking(Actor):
    """Actor whose endpoint blocks its event loop."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    @endpoint
    async def block(self, begin: Port[int] | None, kind: str) -> None:
        try:
            if begin is not None:
                begin.send(1)
            KINDS[kind](LONG_S)
        except asyncio.CancelledError:
            self.seen.append("cancelled")
            raise

    @endpoint
    async def block_in_destructor(self, begin: Port[int], kind: str) -> None:
        try:
            begin.send(1)
            BlockingDestructor(kind, LONG_S)
            KINDS[kind](LONG_S)
        except asyncio.CancelledError:
            self.seen.append("cancelled")
            raise

    @endpoint
    async def take_seen(self) -> list[str]:
        seen, self.seen = self.seen, []
        return seen


class StuckInConstructor(Actor):
    def __init__(self, kind: str) -> None:
        KINDS[kind](LONG_S)

    @endpoint
    def echo(self, value: Any) -> Any:
        return value


class BlocksInUnpickling:
    """An argument whose unpickling blocks."""

    def __setstate__(self, state: Any) -> None:
        time.sleep(LONG_S)

    def __getstate__(self) -> Any:
        return {"any": "thing"}


class TakesArgument(Actor):
    def __init__(self, argument: Any) -> None:
        self.argument = argument

    @endpoint
    def take(self, argument: Any) -> Any:
        return argument


class SwallowsInConstructor(Actor):
    def __init__(self) -> None:
        while True:
            try:
                time.sleep(LONG_S)
            except CancelledError:
                continue

    @endpoint
    async def echo(self, value: Any) -> Any:
        return value


def be_quick() -> None:
    """Shorten the delays of interruptions, as the bootstrap of a mesh."""
    from monarch_backend._actor.execution import interruption

    interruption.INTERRUPT_AFTER_S = interruption.REPORT_AFTER_S = 0.2
    interruption.KILL_AFTER_S = PATIENCE


def kill_soon() -> None:
    """Shorten the delays of interruptions and the delay before a kill."""
    from monarch_backend._actor.execution import interruption

    be_quick()
    interruption.KILL_AFTER_S = 0.5


def never_interrupt_standard_library() -> None:
    from monarch_backend._actor.execution import blocking_calls

    blocking_calls.STILL_S = blocking_calls.MAX_MOVING_S = LONG_S


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    with running({"gpus": 1}, bootstrap=be_quick) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def first(procs: ProcMesh) -> Iterator[ActorMesh]:
    """The first actor of its process: it runs on the main thread."""
    mesh = procs.spawn("first", Blocking)
    assert mesh.thread_is_main.call_one().get(PATIENCE)
    yield mesh
    mesh.stop().get(PATIENCE)


@pytest.fixture
def later(first: ActorMesh) -> Iterator[ActorMesh]:
    """A second actor of that process, on another thread."""
    mesh = first.proc_mesh.spawn("later", Blocking)
    assert not mesh.thread_is_main.call_one().get(PATIENCE)
    yield mesh
    mesh.stop().get(PATIENCE)


def errors_of_processes(capfd: pytest.CaptureFixture[str], text: str) -> str:
    """Wait until this text is in the processes' stderr. Return their stderr."""
    found = ""

    def look() -> bool:
        nonlocal found
        program().flush_logs()
        found += capfd.readouterr().err
        return text in found

    until(look, f"{text!r} on stderr")
    return found


# First actor


@pytest.mark.parametrize("kind", KINDS)
def test_cancel_of_blocking_code_on_main_thread_frees_actor(first: ActorMesh, kind: str) -> None:
    taken = []
    for _ in range(5):  # retry: on a busy machine it may take longer
        future = start(first, first.block, kind)
        began = time.monotonic()
        future.cancel("enough")
        assert first.echo.call_one(kind).get(PATIENCE) == kind
        taken.append(time.monotonic() - began)
        assert first.take_seen.call_one().get(PATIENCE) == ["cancelled"]
        with pytest.raises(CancelledError, match="enough"):
            future.get(PATIENCE)
        if taken[-1] < FREE_S:
            return
    raise AssertionError(f"the actor was free after {taken} s")


@pytest.mark.parametrize("kind", KINDS)
def test_timeout_of_blocking_code_on_main_thread_frees_actor(first: ActorMesh, kind: str) -> None:
    for _ in range(5):  # retry: on a busy machine the timeout may end before the code begins
        late = first.block.options(timeout=1.0 if kind == "in_subprocess" else 0.1).call_one(None, kind)
        assert first.echo.call_one(kind).get(PATIENCE) == kind
        with pytest.raises(TimeoutError, match="it was cancelled at the actor"):
            late.get(PATIENCE)
        if first.take_seen.call_one().get(PATIENCE) == ["cancelled"]:
            return
    raise AssertionError("the time was never over while the code blocked")


def test_abort_of_blocking_code_on_main_thread_ends_actor() -> None:
    with running({"gpus": len(KINDS)}, bootstrap=be_quick) as mesh:
        actors = mesh.spawn("actors", Blocking)
        calls = [start(one := actors.slice(gpus=rank), one.block, kind) for rank, kind in enumerate(KINDS)]
        aborted = actors.abort("enough")
        for call in calls:
            error = call.exception(PATIENCE)
            assert isinstance(error, SupervisionError), error
            assert error.delivery == "unknown"
            assert "aborted: enough" in str(error)
        aborted.get(PATIENCE)
        again = mesh.spawn("again", Blocking)  # the processes still run, and their main threads are free
        assert set(again.thread_is_main.call().get(PATIENCE).values()) == {True}


@pytest.mark.parametrize("kind", ["in_sleep", "in_lock", "in_python"])
def test_abort_of_blocking_constructor_ends_actor(kind: str) -> None:
    with running({"gpus": 1}, bootstrap=be_quick) as mesh:
        stuck = mesh.spawn("stuck", StuckInConstructor, kind)
        waiting = stuck.echo.call_one(1)
        stuck.abort("enough").get(PATIENCE)
        assert isinstance(waiting.exception(PATIENCE), SupervisionError)
        assert "enough" in str(stuck.initialized.exception(PATIENCE))
        assert mesh.spawn("next", Blocking).echo.call_one(2).get(PATIENCE) == 2, "the process lives"


def test_abort_of_blocking_unpickling_ends_actor() -> None:
    with running({"gpus": 1}, bootstrap=be_quick) as mesh:
        mesh.spawn("stuck", TakesArgument, BlocksInUnpickling()).abort("enough").get(PATIENCE)
        actor = mesh.spawn("next", TakesArgument, 1)
        actor.take.options(timeout=0.1).call_one(BlocksInUnpickling()).ignore()
        assert actor.take.call_one(2).get(PATIENCE) == 2


@pytest.mark.parametrize("how", ["abort", "stop"])
def test_end_of_blocking_actor_of_the_program_leaves_the_program(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(interruption, "INTERRUPT_AFTER_S", 0.1)
    monkeypatch.setattr(interruption, "KILL_AFTER_S", 0.4)
    monkeypatch.setattr(actor_mesh_owner, "KILL_AFTER_S", 0.1)
    release = threading.Event()
    monkeypatch.setitem(KINDS, "in_program", release.wait)
    here = this_proc().spawn("here", Blocking)
    call = begun(here.block.call_one, "in_program")
    ended = here.abort("enough") if how == "abort" else here.stop("enough", timeout=0.1)
    ended.get(PATIENCE)
    assert not call.done()
    release.set()
    error = call.exception(PATIENCE)
    assert isinstance(error, SupervisionError), "it is answered when the code returns"
    assert "it goes on in this program" in caplog.text and "in block" in caplog.text
    assert "not started yet" not in caplog.text


def test_stop_with_timeout_of_blocking_constructor_ends_actor() -> None:
    with running({"gpus": 1}, bootstrap=be_quick) as mesh:
        mesh.spawn("stuck", StuckInConstructor, "in_event").stop("enough", timeout=0.1).get(PATIENCE)
        assert mesh.spawn("next", Blocking).echo.call_one(2).get(PATIENCE) == 2, "the process lives"


def test_stop_with_timeout_lets_actor_finish_in_time(first: ActorMesh) -> None:
    """Messages sent before the stop are answered."""
    mesh = first.proc_mesh.spawn("stops", Blocking)
    answers = [mesh.echo.call_one(i) for i in range(10)]
    mesh.stop(timeout=PATIENCE).get(PATIENCE)
    assert [answer.get(PATIENCE) for answer in answers] == list(range(10))


def test_stop_with_timeout_after_stop_interrupts() -> None:
    with running({"gpus": 1}, bootstrap=be_quick) as mesh:
        actor = mesh.spawn("actor", Blocking)
        call = begun(actor.block.call_one, "in_sleep")
        first_stop = actor.stop()
        actor.stop("enough", timeout=0.1).get(PATIENCE)
        first_stop.get(PATIENCE)
        assert isinstance(call.exception(PATIENCE), SupervisionError)


def test_code_that_swallows_cancellation_keeps_its_turn(first: ActorMesh) -> None:
    future = begun(first.swallow.call_one)
    future.cancel()
    assert first.take_seen.call_one().get(PATIENCE) == ["cancelled", "went on"]


def test_cancellation_never_hits_the_next_message(first: ActorMesh, later: ActorMesh) -> None:
    for i in range(100):
        actor = later if i % 2 else first
        future = begun(actor.block.call_one, "in_sleep", 0.0005 * (i // 2 % 4))
        following = actor.echo.call_one(i)
        future.cancel()
        assert following.get(PATIENCE) == i
    for actor in (first, later):
        assert set(actor.take_seen.call_one().get(PATIENCE)) <= {"cancelled", "returned"}


def test_debugger_works_after_cancelled_message(first: ActorMesh, later: ActorMesh) -> None:
    """An interruption must not leave the interpreter's flag set. In Python 3.11 a traced call would then never end."""
    for actor in (first, later):
        begun(actor.block.call_one, "in_python").cancel()
        assert actor.count_traced_calls.call_one().get(PATIENCE) == 3
        assert actor.take_seen.call_one().get(PATIENCE) == ["cancelled"]


def test_cancel_in_destructor_frees_actor(first: ActorMesh, later: ActorMesh) -> None:
    """Python ignores exceptions in destructors, so the interruption is repeated."""
    for actor, kind in ((first, "in_sleep"), (first, "in_python"), (later, "in_python")):
        begun(actor.block_in_destructor.call_one, kind).cancel()
        assert actor.take_seen.call_one().get(PATIENCE) == ["cancelled"]


def test_cancel_of_blocking_generator_frees_actor(first: ActorMesh) -> None:
    begun(first.generate.stream, "in_sleep").cancel()
    assert first.take_seen.call_one().get(PATIENCE) == ["cancelled"]


def test_cancel_in_moving_standard_library_interrupts_after_it() -> None:
    with running({"gpus": 1}, bootstrap=never_interrupt_standard_library) as mesh:
        for name in ("first", "later"):
            actor = mesh.spawn(name, Blocking)
            begun(actor.compute_in_standard_library.call_one).cancel()
            assert actor.take_seen.call_one().get(PATIENCE) == ["computed", "cancelled"], name


def test_blocking_code_with_another_handler_is_reported(first: ActorMesh, capfd: pytest.CaptureFixture[str]) -> None:
    errors = ""
    for attempt in range(5):  # retry: on a busy machine the cancellation may arrive after the code has ended
        begun(first.block_with_own_handler.call_one, 2.0**attempt).cancel()
        assert first.echo.call_one(1).get(2 * PATIENCE) == 1
        program().flush_logs()
        errors += capfd.readouterr().err
        if "is still busy" in errors:
            break
    assert "SIGURG, which has another handler" in errors


@pytest.mark.parametrize("kind", ["in_sleep", "in_socket"])
def test_cancel_of_coroutine_that_blocks_its_loop_frees_actor(kind: str) -> None:
    with running({"gpus": 1}, bootstrap=be_quick) as mesh:
        actor = mesh.spawn("actor", AsyncBlocking)
        begun(actor.block.call_one, kind).cancel()
        assert actor.take_seen.call_one().get(PATIENCE) == ["cancelled"]
        late = actor.block.options(timeout=0.1).call_one(None, kind)
        assert actor.take_seen.call_one().get(PATIENCE) in (["cancelled"], [])
        assert isinstance(late.exception(PATIENCE), TimeoutError)
        begun(actor.block_in_destructor.call_one, kind).cancel()
        assert actor.take_seen.call_one().get(PATIENCE) == ["cancelled"]
        call = begun(actor.block_in_destructor.call_one, kind)
        actor.abort("enough").get(PATIENCE)
        assert "aborted: enough" in str(call.exception(PATIENCE))


# Later actors


@pytest.mark.parametrize("how", ["cancel", "timeout"])
@pytest.mark.parametrize(
    "kind", [kind if kind in ("in_sleep", "in_lock") else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_blocking_code_on_other_thread_is_reported(
    later: ActorMesh, kind: str, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    errors = ""
    # retry: on a busy machine the cancellation may arrive before the code begins or after it has ended
    for attempt in range(5):
        longer = 2.0**attempt
        if how == "cancel":
            future = start(later, later.block, kind, longer)
            future.cancel()
        else:
            seconds = longer if kind == "in_subprocess" else 0.1 * longer
            future = later.block.options(timeout=seconds).call_one(None, kind, seconds + longer)
        with pytest.raises(CancelledError if how == "cancel" else TimeoutError):
            future.get(PATIENCE)
        seen = later.take_seen.call_one().get(2 * PATIENCE)  # answered after the code has returned
        program().flush_logs()
        errors += capfd.readouterr().err
        if seen == ["cancelled"] if kind == "in_python" else "is still busy" in errors:
            break
    else:
        raise AssertionError(f"neither interrupted nor reported: {errors}")
    if kind != "in_python":  # Python code is interrupted on any thread
        assert "actor later (gpus 0, host " in errors
        assert f"in {kind}" in errors
        assert "this is another thread" in errors


@pytest.mark.slow
@pytest.mark.parametrize("how", ["abort", "stop"])
@pytest.mark.parametrize("what", ["message", "constructor", "swallows"])
def test_end_of_uninterruptible_actor_kills_process(
    how: str, what: str, capfd: pytest.CaptureFixture[str], faults: Any
) -> None:
    with running({"gpus": 1}, bootstrap=kill_soon) as mesh:
        lasting = mesh.spawn("lasting", Blocking)
        lasting.echo.call_one(1).get(PATIENCE)
        if what == "swallows":
            lasting.stop().get(PATIENCE)
        if what == "message":
            stuck = mesh.spawn("stuck", Blocking)
            begun(stuck.block.call_one, "in_lock").ignore()
        elif what == "constructor":
            stuck = mesh.spawn("stuck", StuckInConstructor, "in_lock")
        else:
            stuck = mesh.spawn("stuck", SwallowsInConstructor)
        ended = stuck.abort("enough") if how == "abort" else stuck.stop("enough", timeout=0.1)
        ended.get(PATIENCE)
        errors = errors_of_processes(capfd, "the process is killed")
        assert "actor stuck (gpus 0, host " in errors
        assert ("its running message" if what == "message" else "its constructor") in errors
        assert ("test_blocking_code.py:" in errors) and (
            "in __init__" if what == "swallows" else "in in_lock"
        ) in errors
        if what != "swallows":  # the process is killed with its other actor
            assert "SIGKILL" in faults.next().report()
        faults.none()


def test_stop_of_processes_names_the_line_that_is_waited_for(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from monarch_backend._actor.processes import stop as process_stop

    monkeypatch.setattr(process_stop, "SHUTDOWN_GRACE_S", 0.2)
    with running({"gpus": 1}) as mesh:
        stuck = mesh.spawn("stuck", StuckInConstructor, "in_select")
        asynchronous = mesh.spawn("async", AsyncBlocking)
        assert asynchronous.take_seen.call_one().get(PATIENCE) == []
        stopping = mesh.stop()
        errors = errors_of_processes(capfd, "is to end, and its constructor runs")
        assert "in in_select" in errors
        mesh.kill().get(PATIENCE)
        stopping.get(PATIENCE)
        assert stuck.initialized.exception(PATIENCE) is not None
