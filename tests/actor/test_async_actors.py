"""Actors with async endpoints, and programs that await calls."""

from __future__ import annotations

import asyncio
import contextvars
import importlib.util
import threading
import time
import warnings
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from monarch_backend._actor import current_runtime
from monarch_backend.actor import (
    Actor,
    ActorError,
    ActorMesh,
    Channel,
    Port,
    ProcMesh,
    concurrent_endpoint,
    context,
    current_actor_name,
    current_rank,
    endpoint,
    this_host,
    this_proc,
)
from tests.actor.actors import Async, Gate, Sync, running, until
from tests.actor.support import PATIENCE, gate, pass_gate

pytestmark = pytest.mark.usefixtures("faults")


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    with running({"gpus": 3}) as mesh:
        yield mesh


class BodyRecorder(Actor):
    """Records the beginning and the end of each endpoint body."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.at_once = self.most_at_once = 0
        self.done = asyncio.Event()

    async def _body(self, name: Any, turns: int) -> None:
        self.lines.append(f"{name} begins")
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        for _ in range(turns):
            await asyncio.sleep(0)
        self.at_once -= 1
        self.lines.append(f"{name} ends")

    @endpoint
    async def in_turn(self, name: Any, turns: int = 3) -> None:
        await self._body(name, turns)

    @concurrent_endpoint
    async def at_once_with_others(self, name: Any, turns: int = 3) -> None:
        await self._body(name, turns)

    @concurrent_endpoint
    async def until_done(self, name: Any) -> Any:
        self.lines.append(f"{name} begins")
        await self.done.wait()
        self.lines.append(f"{name} ends")
        return name

    @endpoint
    async def finish(self) -> None:
        self.done.set()

    @endpoint
    async def read(self) -> tuple[list[str], int]:
        found, most = self.lines, self.most_at_once
        self.lines, self.most_at_once = [], 0
        return found, most


@pytest.fixture
def body_recorder(procs: ProcMesh) -> Iterator[ActorMesh]:
    mesh = procs.slice(gpus=0).spawn("body_recorder", BodyRecorder)
    yield mesh
    mesh.stop().get(PATIENCE)


# ---- the order of bodies


def test_async_endpoint_bodies_run_one_after_the_other(body_recorder: ActorMesh) -> None:
    calls = [body_recorder.in_turn.call_one(i, turns=5 - i % 5) for i in range(50)]
    for call in calls:
        call.get(PATIENCE)
    lines, most = body_recorder.read.call_one().get(PATIENCE)
    assert lines == [line for i in range(50) for line in (f"{i} begins", f"{i} ends")]
    assert most == 1


def test_concurrent_bodies_interleave_and_start_in_order(body_recorder: ActorMesh) -> None:
    calls = [body_recorder.until_done.call_one(i) for i in range(50)]
    body_recorder.finish.call_one().get(PATIENCE)
    assert [call.get(PATIENCE) for call in calls] == list(range(50))
    lines, _ = body_recorder.read.call_one().get(PATIENCE)
    assert lines[:50] == [f"{i} begins" for i in range(50)]
    assert sorted(lines[50:]) == sorted(f"{i} ends" for i in range(50))


def test_one_actor_has_sequential_and_concurrent_endpoints(body_recorder: ActorMesh) -> None:
    waiting = body_recorder.until_done.call_one("long")
    body_recorder.in_turn.call_one("a").get(PATIENCE)  # a sequential endpoint runs while a concurrent one waits
    assert not waiting.done()
    body_recorder.finish.broadcast()
    body_recorder.in_turn.broadcast("b")
    assert waiting.get(PATIENCE) == "long"
    lines, most = body_recorder.read.call_one().get(PATIENCE)
    assert lines[:3] == ["long begins", "a begins", "a ends"]
    assert lines.index("b begins") + 1 == lines.index("b ends") or "long ends" in lines
    assert most == 1  # counts only the sequential bodies


def test_many_concurrent_broadcasts_all_run(body_recorder: ActorMesh) -> None:
    for i in range(200):
        body_recorder.at_once_with_others.broadcast(i)
    ends: list[str] = []

    def all_ended() -> bool:
        lines, _ = body_recorder.read.call_one().get(PATIENCE)
        ends.extend(line for line in lines if line.endswith("ends"))
        return len(ends) == 200

    until(all_ended, "all have ended")
    assert sorted(ends) == sorted(f"{i} ends" for i in range(200))


# ---- the actor's loop


class Loop(Actor):
    """Reports about its own event loop, and starts tasks and threads."""

    def __init__(self) -> None:
        self.task: asyncio.Task[Any] | None = None
        self.thread = threading.get_ident()

    @endpoint
    async def modules(self) -> list[str]:
        """Return the modules of the event loop's classes."""
        return [each.__module__ for each in type(asyncio.get_running_loop()).__mro__]

    @endpoint
    async def same_thread(self) -> bool:
        return threading.get_ident() == self.thread

    @endpoint
    async def ranks(self) -> list[tuple[str, int]]:
        """Return the actor name and rank that a task, a thread and a coroutine under ``wait_for`` see."""

        def here() -> tuple[str, int]:
            return current_actor_name(), current_rank().rank

        async def there() -> tuple[str, int]:
            await asyncio.sleep(0)
            return here()

        return [await asyncio.create_task(there()), await asyncio.to_thread(here), await asyncio.wait_for(there(), 10)]

    @endpoint
    async def start_task(self, port: Port[Any]) -> None:
        """Start a task that continues after the endpoint has returned."""

        async def work() -> None:
            for i in range(3):
                await asyncio.sleep(0.001)
                port.send(i)

        self.task = asyncio.create_task(work())

    @endpoint
    async def call_with_timeout(self, gate: ActorMesh) -> str:
        waiting = gate.wait.call_one()
        while (await gate.counts.call_one())[1] == 0:
            await asyncio.sleep(0)
        try:
            await asyncio.wait_for(waiting, 0.02)
        except asyncio.TimeoutError:
            return "late"
        return "in time"

    @endpoint
    async def call_many(self, mesh: ActorMesh, n: int) -> list[Any]:
        return list(await asyncio.gather(*[mesh.echo.choose(i) for i in range(n)]))

    @endpoint
    async def get_in_the_loop(self, mesh: ActorMesh) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            future = mesh.hold.call_one()
            try:
                future.get(0.01)
            except TimeoutError:
                future.cancel()
        return [f"{warning.category.__name__}: {warning.message}" for warning in caught]

    @endpoint
    async def block(self, begun: Port[Any], gate: str) -> None:
        """Block the actor's own event loop."""
        begun.send(None)
        pass_gate(gate)

    @endpoint
    async def fail(self) -> None:
        await asyncio.sleep(0)
        raise LookupError("from a coroutine")

    @endpoint
    async def subtask_fails(self) -> None:
        async def work() -> None:
            raise LookupError("from a task")

        await asyncio.gather(work(), asyncio.sleep(10))

    @endpoint
    async def subtask_is_cancelled(self) -> None:
        task = asyncio.create_task(asyncio.sleep(10))
        task.cancel()
        await task


class Holding(Actor):
    """Runs until its call is cancelled."""

    @endpoint
    def hold(self) -> None:
        while True:
            time.sleep(0.001)


@pytest.fixture
def loops(procs: ProcMesh) -> Iterator[ActorMesh]:
    mesh = procs.spawn("loops", Loop)
    yield mesh
    mesh.stop().get(PATIENCE)


@pytest.fixture
def one(loops: ActorMesh) -> ActorMesh:
    return loops.slice(gpus=1)


def test_uvloop_is_used_where_installed(one: ActorMesh) -> None:
    expected = "uvloop" if importlib.util.find_spec("uvloop") else "asyncio.unix_events"
    assert expected in one.modules.call_one().get(PATIENCE)


def test_asyncio_loop_is_used_without_uvloop() -> None:
    with this_host().spawn_procs({"gpus": 1}, bootstrap=hide_uvloop) as procs:
        plain = procs.spawn("loops", Loop)
        assert "asyncio.unix_events" in plain.modules.call_one().get(PATIENCE)
        assert plain.ranks.call_one().get(PATIENCE) == [("loops", 0)] * 3


def hide_uvloop() -> None:
    import sys

    sys.modules["uvloop"] = None  # type: ignore[assignment] # importing it fails


def test_constructor_runs_on_the_thread_of_the_loop(loops: ActorMesh) -> None:
    assert list(loops.same_thread.call().get(PATIENCE).values()) == [True] * 3


def test_context_is_available_in_tasks_and_threads(loops: ActorMesh) -> None:
    assert list(loops.ranks.call().get(PATIENCE).values()) == [[("loops", rank)] * 3 for rank in range(3)]
    assert list(loops.slice(gpus=slice(1, 3)).ranks.call().get(PATIENCE).values()) == [
        [("loops", r)] * 3 for r in range(2)
    ]


def test_task_outlives_its_endpoint(one: ActorMesh) -> None:
    port, receiver = Channel.open()
    one.start_task.call_one(port).get(PATIENCE)
    assert [receiver.recv().get(PATIENCE) for _ in range(3)] == [0, 1, 2]
    receiver.close()


def test_calls_from_an_actors_loop_can_be_awaited(one: ActorMesh, procs: ProcMesh) -> None:
    helpers = procs.spawn("helpers", Async)
    gates = procs.slice(gpus=2).spawn("gate", Gate)
    assert one.call_many.call_one(helpers, 300).get(PATIENCE) == list(range(300))
    assert one.call_with_timeout.call_one(gates).get(PATIENCE) == "late"
    until(lambda: gates.counts.call_one().get(PATIENCE) == (1, 0), "the late call is cancelled at the gate")
    for mesh in (helpers, gates):
        mesh.stop().get(PATIENCE)


def test_get_in_the_loop_of_an_actor_warns(one: ActorMesh, procs: ProcMesh) -> None:
    holding = procs.slice(gpus=2).spawn("holding", Holding)
    found = one.get_in_the_loop.call_one(holding).get(PATIENCE)
    assert found == ["RuntimeWarning: Future.get() blocks the running event loop: await the future instead"]
    holding.stop().get(PATIENCE)


def test_blocked_loop_does_not_block_other_actors(procs: ProcMesh, tmp_path: Any) -> None:
    proc = procs.slice(gpus=0)
    held, beside, plain = proc.spawn("held", Loop), proc.spawn("beside", Async), proc.spawn("plain", Sync)
    port, receiver = Channel.open(once=True)
    with gate(tmp_path) as (name, open_gate):
        blocked = held.block.call_one(port, name)
        receiver.recv().get(PATIENCE)
        assert beside.echo.call_one(1).get(PATIENCE) == 1
        assert plain.echo.call_one(2).get(PATIENCE) == 2
        assert beside.relay.call_one(plain, 3).get(PATIENCE) == 3
        assert not blocked.done()
        open_gate()
        blocked.get(PATIENCE)
    for mesh in (held, beside, plain):
        mesh.stop().get(PATIENCE)


def test_error_of_a_coroutine_reaches_the_caller(one: ActorMesh) -> None:
    with pytest.raises(ActorError, match=r"(?s)loops\.fail raised on gpus 1.*LookupError: from a coroutine") as caught:
        one.fail.call_one().get(PATIENCE)
    assert isinstance(caught.value.__cause__, LookupError)
    with pytest.raises(ActorError, match="from a task"):
        one.subtask_fails.call_one().get(PATIENCE)
    assert one.same_thread.call_one().get(PATIENCE)


def test_cancelled_subtask_is_an_error_reply(one: ActorMesh) -> None:
    """The caller has not cancelled the call, so the cancellation inside the endpoint must reach it as an error."""
    error = one.subtask_is_cancelled.call_one().exception(PATIENCE)
    assert error is not None
    assert "CancelledError" in str(error)


# ---- rules for actor classes


def test_sync_and_async_endpoints_in_one_class_are_refused(procs: ProcMesh) -> None:
    class Half(Actor):
        @endpoint
        def plain(self) -> None: ...

        @endpoint
        async def other(self) -> None: ...

    with pytest.raises(ValueError, match=r"Half mixes `def` and `async def` endpoints.*Make these async, too: plain"):
        procs.spawn("half", Half)


def test_generator_endpoints_count_as_sync_or_async(procs: ProcMesh) -> None:
    class Half(Actor):
        @endpoint
        def plain(self) -> Iterator[int]:
            yield 1

        @endpoint
        async def other(self) -> AsyncIterator[int]:
            yield 1

    with pytest.raises(ValueError, match="Make these async, too: plain"):
        procs.spawn("half", Half)


def test_concurrent_endpoint_must_be_async() -> None:
    with pytest.raises(TypeError, match=r"@concurrent_endpoint needs an `async def` method"):

        class Wrong(Actor):
            @concurrent_endpoint
            def plain(self) -> None: ...


@pytest.mark.parametrize("name", ["slice", "stop", "size", "without", "initialized", "name"])
def test_endpoint_with_a_mesh_attribute_name_is_refused(procs: ProcMesh, name: str) -> None:
    def method(self: Any) -> None: ...

    cls = type("Clash", (Actor,), {name: endpoint(method)})
    with pytest.raises(
        ValueError, match=rf"Clash\.{name}: every mesh has an attribute '{name}'; give the endpoint another"
    ):
        procs.spawn("clash", cls)


# ---- programs that await


def test_every_call_can_be_awaited(procs: ProcMesh) -> None:
    mesh = procs.spawn("async", Async)

    async def main() -> None:
        await mesh.initialized
        one = mesh.slice(gpus=2)
        assert await one.square.call_one(3) == (0, 9)
        assert list((await mesh.square.call(3)).values()) == [(rank, 9) for rank in range(3)]
        assert (await mesh.square.choose(3))[1] == 9
        assert sorted([await future async for future in mesh.square.stream(3)]) == [(rank, 9) for rank in range(3)]
        assert [value async for value in one.count.call_one(3)] == [(0, 0), (0, 1), (0, 2)]
        mesh.note.broadcast(4)
        assert 4 in await one.take_seen.call_one()
        port, receiver = Channel.open()
        mesh.square.send((3,), port=port)
        assert sorted([await receiver.recv() for _ in range(3)]) == [(rank, 9) for rank in range(3)]
        receiver.close()
        with pytest.raises(ActorError):
            await one.relay.call_one("no mesh", 1)
        await mesh.stop()

    asyncio.run(main())


def test_await_that_has_ended_is_not_kept(procs: ProcMesh) -> None:
    mesh, kept = procs.spawn("async", Async), current_runtime.program().awaits.notices._begun
    one, gate = mesh.slice(gpus=2), procs.slice(gpus=2).spawn("gate", Gate)

    async def main() -> None:
        waiting = asyncio.ensure_future(one.relay.call_one(mesh.slice(gpus=1), 1))
        await asyncio.sleep(0)
        assert len(kept) == 1
        await waiting
        assert len(await mesh.square.call(3)) == 3
        assert len([value async for value in one.count.call_one(3)]) == 3
        with pytest.raises(ActorError):
            await one.relay.call_one("no mesh", 1)
        given_up = asyncio.ensure_future(gate.wait.call_one())
        await asyncio.sleep(0)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert not kept
        await gate.stop()
        await mesh.stop()

    asyncio.run(main())


def test_gather_wait_and_as_completed_take_calls(procs: ProcMesh) -> None:
    mesh = procs.spawn("async", Async)

    async def main() -> None:
        gathered = await asyncio.gather(*[mesh.echo.choose(i) for i in range(100)])
        assert gathered == list(range(100))
        done, pending = await asyncio.wait([mesh.echo.choose(i).as_asyncio() for i in range(10)])
        assert ({future.result() for future in done}, pending) == (set(range(10)), set())
        completed = [
            await future for future in asyncio.as_completed([mesh.echo.choose(i).as_asyncio() for i in range(10)])
        ]
        assert sorted(completed) == list(range(10))
        assert await asyncio.wait_for(mesh.echo.choose(5), PATIENCE) == 5
        assert await asyncio.shield(mesh.echo.choose(6).as_asyncio()) == 6
        async with asyncio.timeout(PATIENCE) if hasattr(asyncio, "timeout") else _nothing():
            assert await mesh.echo.choose(7) == 7
        await mesh.stop()

    asyncio.run(main())


class _nothing:  # replaces asyncio.timeout, which Python 3.10 lacks
    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *exc: object) -> None: ...


def test_loop_runs_while_a_call_is_awaited(procs: ProcMesh) -> None:
    gates = procs.slice(gpus=0).spawn("gate", Gate)

    async def main() -> int:
        waiting = asyncio.ensure_future(gates.wait.call_one().as_asyncio())
        turns = 0
        while (await gates.counts.call_one())[1] == 0:
            turns += 1
        for _ in range(10):
            await asyncio.sleep(0)
            turns += 1
        assert not waiting.done()
        await gates.let_pass.call_one()
        await waiting
        await gates.stop()
        return turns

    assert asyncio.run(main()) >= 10


def test_get_in_the_main_loop_warns(procs: ProcMesh) -> None:
    gates = procs.slice(gpus=0).spawn("gate", Gate)

    async def main() -> None:
        future = gates.wait.call_one()
        with pytest.warns(RuntimeWarning, match="await the future instead") as caught:
            with pytest.raises(TimeoutError):
                future.get(0.001)
        assert caught[0].filename == __file__
        future.cancel()
        await gates.stop()

    asyncio.run(main())


def test_loops_in_several_threads_await_calls(procs: ProcMesh) -> None:
    mesh = procs.spawn("async", Async)

    async def main(name: int) -> list[Any]:
        return [await mesh.echo.choose((name, i)) for i in range(50)]

    results: list[Any] = [None] * 4
    threads = [
        threading.Thread(target=lambda t=t: results.__setitem__(t, asyncio.run(main(t))))  # type: ignore[misc]
        for t in range(4)
    ]
    for thread in threads:
        thread.start()
    assert [future.get(PATIENCE) for future in [mesh.echo.choose(i) for i in range(50)]] == list(range(50))
    for thread in threads:
        thread.join(PATIENCE)
    assert results == [[(t, i) for i in range(50)] for t in range(4)]
    mesh.stop().get(PATIENCE)


def test_mesh_is_an_async_context_manager() -> None:
    async def main() -> Any:
        async with this_host().spawn_procs({"gpus": 1}) as procs:
            return await procs.spawn("async", Async).echo.call_one("inside")

    assert asyncio.run(main()) == "inside"


def test_context_variables_of_the_program_are_not_sent() -> None:
    mine: contextvars.ContextVar[str] = contextvars.ContextVar("mine", default="default")
    mesh = this_proc().spawn("async", Async)

    async def main() -> str:
        mine.set("of the program")
        await mesh.echo.call_one(1)
        return f"{mine.get()} {context().actor_instance.name}"

    assert asyncio.run(main()) == "of the program main"
    mesh.stop().get(PATIENCE)


# ---- the end of an async actor


class Ending(Actor):
    """Reports its cancellation and its cleanup when it is stopped."""

    def __init__(self, port: Port[Any]) -> None:
        self.port = port

    @concurrent_endpoint
    async def wait(self, begun: Port[Any]) -> None:
        begun.send(None)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.port.send("cancelled")
            raise

    @endpoint
    async def quick(self) -> None:
        self.port.send("quick")

    async def __cleanup__(self, exc: BaseException | None) -> None:
        await asyncio.sleep(0)
        self.port.send(f"cleanup {exc}")


def test_concurrent_bodies_are_cancelled_before_cleanup(procs: ProcMesh) -> None:
    port, receiver = Channel.open()
    begun, has_begun = Channel.open()
    mesh = procs.slice(gpus=0).spawn("ending", Ending, port)
    waiting = [mesh.wait.call_one(begun) for _ in range(2)]
    for _ in range(2):
        has_begun.recv().get(PATIENCE)
    mesh.quick.broadcast()
    stopped = mesh.stop()
    assert [receiver.recv().get(PATIENCE) for _ in range(4)] == ["quick", "cancelled", "cancelled", "cleanup None"]
    stopped.get(PATIENCE)
    for future in waiting:
        assert future.exception(PATIENCE) is not None
    receiver.close()
    has_begun.close()
