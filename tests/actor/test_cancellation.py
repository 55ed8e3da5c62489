"""Cancellation of a call in any state: the caller is notified, the endpoint ends, other messages are unaffected."""

from __future__ import annotations

import asyncio
import contextvars
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch_backend._actor.context import runner as runner_of_context
from monarch_backend.actor import (
    Actor,
    ActorError,
    ActorMesh,
    CancelledError,
    Channel,
    Future,
    Port,
    ProcMesh,
    concurrent_endpoint,
    context,
    current_rank,
    endpoint,
)
from tests.actor.actors import Gate, Sync, pid_of, running, stopped_processes, until
from tests.actor.script_runner import python
from tests.actor.support import PATIENCE

pytestmark = pytest.mark.usefixtures("faults")


class Busy(Actor):
    """Actor with endpoints that run until their calls are cancelled."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @endpoint
    def run(self, begun: Port[Any], name: Any = "run") -> None:
        """Run Python code until the call is cancelled."""
        try:
            self.seen.append(f"{name} begins")
            begun.send(current_rank().rank)
            while True:
                time.sleep(0.001)
        finally:
            self.seen.append(f"{name} ends")

    @endpoint
    def wait_for(self, begun: Port[Any], gate: ActorMesh) -> None:
        """Wait in a nested ``get`` until the call is cancelled."""
        try:
            self.seen.append("wait begins")
            future = gate.wait.call_one()
            begun.send(os.getpid())
            future.get()
        finally:
            self.seen.append("wait ends")

    @endpoint
    def wait_beside(self, begun: Port[Any], gate: ActorMesh, limit: float | None, end: Port[str]) -> None:
        """Wait in a nested ``get`` on another thread, which has the actor's context. Send its error to ``end``."""
        future, runner = gate.wait.call_one(), runner_of_context.get()
        assert runner is not None

        def wait() -> None:
            try:
                future.get(limit)
            except BaseException as error:
                end.send(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=contextvars.copy_context().run, args=(wait,))
        thread.start()
        try:
            while runner.code.waiting_for is None:
                time.sleep(0.001)
            begun.send(os.getpid())
            thread.join()
        finally:
            thread.join()

    @endpoint
    def swallow(self, begun: Port[Any], gate: ActorMesh) -> str:
        """Catch the cancellation, wait for a reply of another actor, and return."""
        try:
            begun.send(current_rank().rank)  # the caller may cancel before this call returns
            while True:
                time.sleep(0.001)
        except CancelledError:
            self.seen.append(("cancelled", context().actor_instance.cancelled))
        self.seen.append(gate.echo.call_one("went on").get(PATIENCE))
        return "nobody waits for this"

    @endpoint
    def turn(self, begun: Port[Any]) -> None:
        """Raise another exception when cancelled."""
        try:
            begun.send(current_rank().rank)
            while True:
                time.sleep(0.001)
        except CancelledError as error:
            raise ValueError("out of order") from error

    @endpoint
    def note(self, value: Any) -> None:
        self.seen.append(value)

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def take_seen(self) -> list[Any]:
        seen, self.seen = self.seen, []
        return seen


class AsyncBusy(Actor):
    """Some endpoints of `Busy` as ``async`` functions."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @endpoint
    async def run(self, begun: Port[Any], name: Any = "run") -> None:
        self.seen.append(f"{name} begins")
        try:
            begun.send(current_rank().rank)
            await asyncio.Event().wait()
        finally:
            self.seen.append(f"{name} ends")

    @endpoint
    async def wait_for(self, begun: Port[Any], gate: ActorMesh) -> None:
        self.seen.append("wait begins")
        future = gate.wait.call_one()
        try:
            begun.send(os.getpid())
            await future
        finally:
            self.seen.append("wait ends")

    @endpoint
    async def swallow(self, begun: Port[Any], gate: ActorMesh) -> str:
        begun.send(current_rank().rank)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.seen.append(("cancelled", True))
        self.seen.append(await gate.echo.call_one("went on"))
        return "nobody waits for this"

    @endpoint
    async def turn(self, begun: Port[Any]) -> None:
        begun.send(current_rank().rank)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            raise ValueError("out of order") from error

    @endpoint
    async def note(self, value: Any) -> None:
        self.seen.append(value)

    @endpoint
    async def echo(self, value: Any) -> Any:
        return value

    @endpoint
    async def take_seen(self) -> list[Any]:
        seen, self.seen = self.seen, []
        return seen


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    with running({"gpus": 3}) as mesh:
        yield mesh


@pytest.fixture(params=[Busy, AsyncBusy])
def busy(procs: ProcMesh, request: pytest.FixtureRequest) -> Iterator[ActorMesh]:
    """Yield actors in processes 0 and 1."""
    mesh = procs.slice(gpus=slice(0, 2)).spawn("busy", request.param)
    yield mesh
    mesh.stop().get(PATIENCE)


@pytest.fixture
def one(busy: ActorMesh) -> ActorMesh:
    return busy.slice(gpus=0)


@pytest.fixture
def gate(procs: ProcMesh) -> Iterator[ActorMesh]:
    """Yield an actor in process 2 whose gate stays closed."""
    mesh = procs.slice(gpus=2).spawn("gate", Gate)
    yield mesh
    mesh.stop().get(PATIENCE)


@pytest.fixture
def helper(procs: ProcMesh) -> Iterator[ActorMesh]:
    mesh = procs.slice(gpus=2).spawn("helper", Sync)
    yield mesh
    mesh.stop().get(PATIENCE)


def begin(verb: Callable[..., Any], *args: Any, ranks: int = 1) -> Any:
    """Make a call, and wait until its endpoint runs on this number of ranks."""
    port, receiver = Channel.open()
    future = verb(port, *args)
    for _ in range(ranks):
        receiver.recv().get(PATIENCE)
    receiver.close()
    return future


def seen(one: ActorMesh) -> list[Any]:
    found: list[Any] = one.take_seen.call_one().get(PATIENCE)
    return found


def is_cancelled(future: Future[Any], reason: str = "cancelled by the caller") -> None:
    assert future.done()
    for _ in range(2):
        with pytest.raises(CancelledError, match=reason):
            future.get(PATIENCE)


# ---- cancellation in each state of a call


def test_cancel_of_a_queued_call_drops_it(one: ActorMesh) -> None:
    running_one = begin(one.run.call_one)
    port, receiver = Channel.open()
    before, waiting, after = one.echo.call_one(1), one.run.call_one(port, "never"), one.echo.call_one(2)
    assert waiting.cancel()
    is_cancelled(waiting)
    assert not before.done()
    running_one.cancel()
    assert (before.get(PATIENCE), after.get(PATIENCE)) == (1, 2)
    assert seen(one) == ["run begins", "run ends"]
    receiver.close()


def test_cancel_of_a_running_call_interrupts_it(one: ActorMesh) -> None:
    future = begin(one.run.call_one)
    assert future.cancel("no longer wanted")
    is_cancelled(future, "no longer wanted")
    assert seen(one) == ["run begins", "run ends"]


def test_cancel_of_a_call_that_waits_for_another_ends_both(one: ActorMesh, gate: ActorMesh) -> None:
    future = begin(one.wait_for.call_one, gate)
    assert future.cancel()
    is_cancelled(future)
    assert seen(one) == ["wait begins", "wait ends"]


@pytest.mark.parametrize("limit", [None, PATIENCE])
def test_wait_of_another_thread_names_the_cancellation_that_ends_it(
    procs: ProcMesh, gate: ActorMesh, limit: float | None
) -> None:
    one = procs.slice(gpus=0).spawn("beside", Busy)
    end, ends = Channel.open()
    future = begin(one.wait_beside.call_one, gate, limit, end)
    assert future.cancel("no longer wanted")
    is_cancelled(future, "no longer wanted")
    text = ends.recv().get(PATIENCE)
    why = "the message that the actor runs was cancelled (no longer wanted), and this wait ends with it"
    assert text == f"CancelledError: {why}"
    one.stop().get(PATIENCE)


def test_wait_of_another_thread_names_the_end_of_its_actor(procs: ProcMesh, gate: ActorMesh) -> None:
    one = procs.slice(gpus=0).spawn("beside", Busy)
    end, ends = Channel.open()
    future = begin(one.wait_beside.call_one, gate, PATIENCE, end)
    one.stop("enough", timeout=0.1).get(PATIENCE)
    text = ends.recv().get(PATIENCE)
    assert re.fullmatch(r"CancelledError: the actor was ended \(enough.*\), and this wait ends with it", text)
    future.exception(PATIENCE)  # none if the endpoint returned before it was interrupted


def test_cancel_propagates_along_awaited_calls(procs: ProcMesh, gate: ActorMesh) -> None:
    middle = procs.slice(gpus=1).spawn("middle", AsyncBusy)
    future = begin(middle.wait_for.call_one, gate)
    until(lambda: gate.counts.call_one().get(PATIENCE) == (1, 1), "the gate holds the call")
    future.cancel()
    until(lambda: gate.counts.call_one().get(PATIENCE) == (1, 0), "the call at the gate is cancelled, too")
    middle.stop().get(PATIENCE)


def test_cancel_after_completion_is_false(one: ActorMesh) -> None:
    future = one.echo.call_one(1)
    assert future.get(PATIENCE) == 1
    assert not future.cancel()
    assert future.get() == 1
    failed = one.turn.call_one(None)
    assert isinstance(failed.exception(PATIENCE), ActorError)
    assert not failed.cancel()
    assert isinstance(failed.exception(), ActorError)


def test_second_cancel_returns_false(one: ActorMesh) -> None:
    future = begin(one.run.call_one)
    assert future.cancel()
    assert not future.cancel()
    assert seen(one) == ["run begins", "run ends"]


def test_cancel_of_a_broadcast_call_ends_it_on_all_ranks(busy: ActorMesh) -> None:
    future = begin(busy.run.call, ranks=2)
    assert future.cancel()
    is_cancelled(future)
    assert list(busy.take_seen.call().get(PATIENCE).values()) == [["run begins", "run ends"]] * 2


def test_cancel_after_some_replies_ends_the_others(busy: ActorMesh) -> None:
    blocking = begin(busy.slice(gpus=1).run.call_one)
    future = busy.echo.call(5)
    # rank 0 runs messages in order, so it has answered the call before
    assert busy.slice(gpus=0).echo.call_one(6).get(PATIENCE) == 6
    assert future.cancel()
    is_cancelled(future)
    blocking.cancel()
    assert list(busy.take_seen.call().get(PATIENCE).values()) == [[], ["run begins", "run ends"]]


def test_cancel_of_choose_ends_the_call(busy: ActorMesh) -> None:
    for _ in range(4):
        future = begin(busy.run.choose)
        assert future.cancel()
        is_cancelled(future)
    assert sum(len(found) for found in busy.take_seen.call().get(PATIENCE).values()) == 8


def test_cancel_of_a_stream_closes_the_generator(busy: ActorMesh) -> None:
    stream = begin(busy.run.stream, ranks=2)
    stream.cancel()
    assert list(stream) == []
    assert list(busy.take_seen.call().get(PATIENCE).values()) == [["run begins", "run ends"]] * 2


def test_endpoint_that_ignores_cancellation_keeps_its_turn(one: ActorMesh, helper: ActorMesh) -> None:
    future = begin(one.swallow.call_one, helper)
    after = one.note.call_one("next")
    future.cancel()
    is_cancelled(future)
    after.get(PATIENCE)
    assert seen(one) == [("cancelled", True), "went on", "next"]
    is_cancelled(future)  # the value that the endpoint has returned is dropped


def test_endpoint_that_raises_another_error_on_cancellation(one: ActorMesh) -> None:
    future = begin(one.turn.call_one)
    future.cancel()
    is_cancelled(future)
    assert one.echo.call_one(1).get(PATIENCE) == 1


class Interleaved(Actor):
    """Actor whose bodies run concurrently."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.open = asyncio.Event()

    @concurrent_endpoint
    async def run(self, begun: Port[Any], name: Any) -> Any:
        begun.send(name)
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.seen.append(name)
            raise
        return name

    @endpoint
    async def let_pass(self) -> list[Any]:
        self.open.set()
        return self.seen


def test_cancel_of_one_concurrent_call_leaves_the_others(procs: ProcMesh) -> None:
    mesh = procs.slice(gpus=0).spawn("interleaved", Interleaved)
    futures = [begin(mesh.run.call_one, i) for i in range(5)]
    futures[1].cancel()
    futures[3].cancel()
    assert mesh.let_pass.call_one().get(PATIENCE) == [1, 3]
    assert [future.get(PATIENCE) for future in futures[::2]] == [0, 2, 4]
    is_cancelled(futures[1])
    mesh.stop().get(PATIENCE)


# ---- cancellation by a timeout


def has_ended(name: str, found: list[str]) -> bool:
    """Return whether the body ended where the timeout hit it: in its middle, in its first line, or before it began."""
    return found in ([f"{name} begins", f"{name} ends"], [f"{name} ends"], [])


@pytest.mark.parametrize("verb", ["call_one", "choose", "call"])
def test_timeout_cancels_the_call_at_the_actor(busy: ActorMesh, verb: str) -> None:
    port, receiver = Channel.open()
    mesh = busy if verb == "call" else busy.slice(gpus=0)
    future = getattr(mesh.run.options(timeout=0.05), verb)(port)
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"busy\.run took longer than 0.05 s; it was cancelled at the actor"):
            future.get(PATIENCE)
    assert not future.cancel()
    assert all(has_ended("run", found) for found in mesh.take_seen.call().get(PATIENCE).values())
    receiver.close()


def test_timeout_of_a_call_that_waits_for_another(one: ActorMesh, gate: ActorMesh) -> None:
    port, receiver = Channel.open()
    with pytest.raises(TimeoutError, match="cancelled at the actor"):
        one.wait_for.options(timeout=0.05).call_one(port, gate).get(PATIENCE)
    assert has_ended("wait", seen(one))
    receiver.close()


def test_timeout_of_a_queued_call_drops_it(one: ActorMesh) -> None:
    blocking = begin(one.run.call_one)
    waiting = one.note.options(timeout=0.02).call_one("never")
    with pytest.raises(TimeoutError):
        waiting.get(PATIENCE)
    blocking.cancel()
    assert seen(one) == ["run begins", "run ends"]


@pytest.mark.parametrize("verb", ["stream", "stream of one"])
def test_timeout_of_a_stream_of_replies(busy: ActorMesh, verb: str) -> None:
    port, receiver = Channel.open()
    mesh = busy if verb == "stream" else busy.slice(gpus=0)
    futures = []
    for future in mesh.run.options(timeout=0.05).stream(port):
        futures.append(future)
        with pytest.raises(TimeoutError, match=r"busy\.run took longer than 0.05 s"):
            future.get(PATIENCE)
    assert len(futures) == len(mesh)
    assert all(has_ended("run", found) for found in mesh.take_seen.call().get(PATIENCE).values())
    receiver.close()


def test_timeout_does_not_affect_calls_in_time(one: ActorMesh) -> None:
    quick = one.echo.options(timeout=PATIENCE)
    assert [quick.call_one(i).get(PATIENCE) for i in range(10)] == list(range(10))
    assert one.echo.call_one("without").get(PATIENCE) == "without"  # options() leaves the original endpoint unchanged


def test_timeout_of_get_does_not_cancel_the_call(one: ActorMesh) -> None:
    future = begin(one.run.call_one)
    with pytest.raises(TimeoutError, match=r"the call goes on, see Future\.cancel"):
        future.get(0.01)
    assert not future.done()
    assert future.cancel()
    assert seen(one) == ["run begins", "run ends"]


# ---- cancellation from asyncio


def test_cancel_of_a_task_cancels_the_call_at_the_actor(one: ActorMesh) -> None:
    port, receiver = Channel.open()

    async def main() -> None:
        async def look() -> Any:
            return await one.run.call_one(port)

        task = asyncio.create_task(look())
        await receiver.recv()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await one.take_seen.call_one() == ["run begins", "run ends"]

    asyncio.run(main())
    receiver.close()


def test_wait_for_timeout_cancels_the_call_at_the_actor(one: ActorMesh) -> None:
    port, receiver = Channel.open()

    async def main() -> None:
        future = one.run.call_one(port)
        await receiver.recv()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(future, 0.02)
        assert await one.take_seen.call_one() == ["run begins", "run ends"]
        assert isinstance(future.exception(), CancelledError)

    asyncio.run(main())
    receiver.close()


# ---- other messages are unaffected


@pytest.mark.parametrize("how", ["run", "wait_for"])
def test_messages_during_cancellation_are_all_handled(one: ActorMesh, gate: ActorMesh, how: str) -> None:
    for turn in range(5):
        port, receiver = Channel.open()
        future = one.run.call_one(port) if how == "run" else one.wait_for.call_one(port, gate)
        receiver.recv().get(PATIENCE)
        receiver.close()
        with stopped_processes(pid_of(one)):
            before = [one.echo.call_one(i) for i in range(10)]
            future.cancel()
            one.note.broadcast(turn)
            after = [one.echo.call_one(i) for i in range(10)]
        assert [reply.get(PATIENCE) for reply in before + after] == [*range(10), *range(10)]
        assert seen(one)[-1] == turn


def test_cancellation_does_not_hit_the_next_message(one: ActorMesh) -> None:
    for i in range(300):
        given_up, next_one = one.echo.call_one(("cancelled", i)), one.note.call_one(i)
        given_up.cancel()
        next_one.get(PATIENCE)
    assert seen(one) == list(range(300))


def test_cancelled_messages_return_their_credit(one: ActorMesh) -> None:
    for _ in range(3):  # 2,700 messages with a window of 1,024 credits
        blocking = begin(one.run.call_one)
        waiting = [one.note.call_one(i) for i in range(900)]
        assert all(future.cancel() for future in waiting)
        blocking.cancel()
    assert seen(one) == ["run begins", "run ends"] * 3


class Flooding(Actor):
    """Sends messages until it is interrupted. Records the number of the interrupted message."""

    def __init__(self, to: ActorMesh) -> None:
        self.to = to
        self.n = 0
        self.interrupted: list[int] = []

    @endpoint
    def note(self, begun: Port[Any]) -> None:
        begun.send(None)
        try:
            while True:
                self.n += 1
                self.to.note.broadcast(self.n)
        except CancelledError:
            self.interrupted.append(self.n)
            raise

    @endpoint
    def ask(self, begun: Port[Any]) -> None:
        begun.send(None)
        while True:
            self.n += 1
            answer = self.to.echo.call_one(self.n).get()
            assert answer == self.n, (answer, self.n)

    @endpoint
    def tell(self, begun: Port[Any], port: Port[Any]) -> None:
        begun.send(None)
        try:
            while True:
                self.n += 1
                port.send(self.n)
        except CancelledError:
            self.interrupted.append(self.n)
            raise

    @endpoint
    def tell_last(self, port: Port[Any]) -> None:
        port.send(None)

    @endpoint
    def told(self) -> tuple[int, list[int]]:
        return self.n, self.interrupted

    @endpoint
    def still_well(self, value: Any) -> Any:
        return self.to.echo.call_one(value).get(PATIENCE)


@pytest.fixture
def flooding(procs: ProcMesh) -> Iterator[tuple[ActorMesh, ActorMesh]]:
    """Yield the sending actor, in process 0, and the receiving actor, in process 1."""
    to = procs.slice(gpus=1).spawn("flooded", Sync)
    source = procs.slice(gpus=0).spawn("flooding", Flooding, to)
    yield source, to
    source.stop().get(PATIENCE)
    to.stop().get(PATIENCE)


def interrupt_often(verb: Callable[..., Any], *args: Any, times: int = 30) -> None:
    rng = random.Random(1)
    for _ in range(times):
        future = begin(verb, *args)
        for _ in range(rng.randrange(2000)):  # interrupt at a different moment each time
            pass
        assert future.cancel()


def assert_only_interrupted_missing(found: list[int], last: int, interrupted: list[int]) -> None:
    """Assert that the numbers are in order and unique. Only numbers whose sending was interrupted may be missing."""
    assert found == sorted(set(found))
    assert set(range(1, last + 1)) - set(found) <= set(interrupted)


def test_interrupt_anywhere_in_a_broadcast_keeps_state_consistent(flooding: tuple[ActorMesh, ActorMesh]) -> None:
    source, to = flooding
    interrupt_often(source.note.call_one)
    assert source.still_well.call_one("well").get(PATIENCE) == "well"
    assert_only_interrupted_missing(seen(to), *source.told.call_one().get(PATIENCE))


def test_interrupt_anywhere_in_a_port_send_keeps_state_consistent(flooding: tuple[ActorMesh, ActorMesh]) -> None:
    source, _ = flooding
    port, receiver = Channel.open()
    found: list[int] = []

    def read() -> None:
        while (value := receiver.recv().get(PATIENCE)) is not None:
            found.append(value)

    reader = threading.Thread(target=read)  # reads all the time: unread values would block the sender
    reader.start()
    interrupt_often(source.tell.call_one, port)
    last, interrupted = source.told.call_one().get(PATIENCE)
    source.tell_last.call_one(port).get(PATIENCE)
    reader.join(PATIENCE)
    assert_only_interrupted_missing(found, last, interrupted)
    receiver.close()


def test_interrupt_anywhere_in_a_call_keeps_state_consistent(flooding: tuple[ActorMesh, ActorMesh]) -> None:
    source, _ = flooding
    interrupt_often(source.ask.call_one)
    assert [source.still_well.call_one(i).get(PATIENCE) for i in range(20)] == list(range(20))


# ---- all calls of a mesh or of a cell

PROGRAM = """
import os, signal, time
from monarch_backend.actor import Actor, CancelledError, endpoint, this_host

MAIN = os.getpid()


class Sleeper(Actor):
    @endpoint
    def interrupt(self):
        os.kill(MAIN, signal.SIGINT)
        time.sleep(1e6)

    @endpoint
    def sleep(self):
        time.sleep(1e6)


procs = this_host().spawn_procs({"gpus": 2})
first, second = (procs.slice(gpus=rank).spawn(f"sleeper{rank}", Sleeper) for rank in range(2))
"""


def test_cancel_of_a_mesh_ends_its_calls_and_no_others(procs: ProcMesh) -> None:
    first, second = (procs.slice(gpus=rank) for rank in range(2))
    gates = [mesh.spawn(f"gate{number}", Gate) for number, mesh in enumerate((first, second))]
    held = [gate.wait.call_one() for gate in gates]
    queued = gates[0].wait.call()
    for gate, count in zip(gates, (2, 1), strict=True):
        until(lambda gate=gate, count=count: gate.counts.call_one().get()[0] == count, "the calls have come")  # type: ignore[misc]
    assert first.cancel("enough") == 2
    for future in (held[0], queued):
        with pytest.raises(CancelledError, match="enough"):
            future.get(PATIENCE)
    until(lambda: gates[0].counts.call_one().get() == (2, 0), "the endpoints have ended")
    assert not held[1].done()
    assert procs.cancel() == 1
    assert isinstance(held[1].exception(PATIENCE), CancelledError)
    assert procs.cancel() == 0


def test_interrupted_get_says_what_still_runs() -> None:
    done = python("-c", PROGRAM + "first.interrupt.call_one().get()")
    assert "KeyboardInterrupt" in done.stderr
    assert "The call goes on: sleeper0.interrupt of procs-0 waits for rank 0 of 1 (" in done.stderr
    assert "Future.cancel() or ProcMesh.cancel() ends it" in done.stderr


def test_interrupted_cell_cancels_its_own_calls() -> None:
    pytest.importorskip("IPython")
    cells = [
        PROGRAM,
        "before = second.sleep.call_one()",
        "mine = first.interrupt.call_one(); mine.get()",
        "print(type(mine.exception(60)).__name__, before.done())",
    ]
    code = f"""
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in {cells!r}:
    shell.run_cell(cell)
"""
    done = python("-c", code, env={"MONARCH_CANCEL_ON_INTERRUPT": "1"})
    assert "CancelledError False" in done.stdout, done.stdout + done.stderr
    assert "1 call of this cell cancelled" in done.stderr
