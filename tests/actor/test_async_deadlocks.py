"""Actors with `async def` endpoints that wait for each other raise DeadlockError. Waits that may end raise nothing."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import anyio
import pytest

from monarch_backend._actor.current_runtime import program
from monarch_backend.actor import (
    Accumulator,
    Actor,
    ActorError,
    ActorMesh,
    DeadlockError,
    ProcMesh,
    concurrent_endpoint,
    endpoint,
    this_proc,
)
from tests.actor.actors import running
from tests.actor.support import PATIENCE
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("faults")

LONGER_THAN_A_PROBE_S = 0.6
"""Seconds of an await that is checked for a deadlock at least once."""


class Plain(Actor):
    """Member of a cycle that blocks its thread."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float]] = []

    @endpoint
    def hop(self, route: list[ActorMesh]) -> str:
        try:
            return "end" if not route else str(route[0].hop.call_one(route[1:]).get())
        except DeadlockError as error:
            self.seen.append((str(error), time.monotonic()))
            raise

    @endpoint
    def taken(self) -> list[tuple[str, float]]:
        seen, self.seen = self.seen, []
        return seen


class Async(Actor):
    """Member of a cycle that awaits. It keeps the errors that it gets, with their times."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float]] = []
        self.tasks: list[asyncio.Task[Any]] = []

    async def _noted(self, awaitable: Awaitable[Any]) -> Any:
        """Keep a DeadlockError, and raise it."""
        try:
            return await awaitable
        except DeadlockError as error:
            self.seen.append((str(error), time.monotonic()))
            raise

    @endpoint
    async def hop(self, route: list[ActorMesh]) -> str:
        return "end" if not route else str(await self._noted(route[0].hop.call_one(route[1:])))

    @endpoint
    async def hop_through_coroutines(self, route: list[ActorMesh]) -> str:
        async def inner() -> str:
            return str(await route[0].hop.call_one(route[1:]).as_asyncio())

        return str(await self._noted(inner()))

    @endpoint
    async def hop_blocking(self, route: list[ActorMesh]) -> str:
        call = route[0].hop.call_one(route[1:])
        try:
            with pytest.warns(RuntimeWarning, match="blocks the running event loop"):
                return str(call.get())
        except DeadlockError as error:
            self.seen.append((str(error), time.monotonic()))
            raise

    @endpoint
    async def hop_over_mesh(self, route: list[ActorMesh]) -> int:
        return len(await self._noted(route[0].hop.call(route[1:])))

    @endpoint
    async def fold(self, route: list[ActorMesh]) -> int:
        total = Accumulator(route[0].hop, 0, lambda count, _: count + 1).accumulate(route[1:])
        return int(await self._noted(total))

    @endpoint
    async def values(self, route: list[ActorMesh]) -> AsyncIterator[str]:
        yield "first"
        yield str(await self._noted(route[0].hop.call_one(route[1:])))

    @endpoint
    async def read(self, route: list[ActorMesh]) -> list[str]:
        async def values() -> list[str]:
            return [value async for value in route[0].values.call_one(route[1:])]

        return list(await self._noted(values()))

    # ---- awaits that may end

    @endpoint
    async def hop_with_timeout(self, kind: str, route: list[ActorMesh]) -> str:
        call = route[0].hop.call_one(route[1:])
        if kind == "asyncio.timeout":
            async with asyncio.timeout(LONGER_THAN_A_PROBE_S):
                return str(await call)
        if kind == "asyncio.wait_for":
            return str(await asyncio.wait_for(call.as_asyncio(), LONGER_THAN_A_PROBE_S))
        if kind == "anyio":
            with anyio.fail_after(LONGER_THAN_A_PROBE_S):
                return str(await call)
        if kind == "options":
            return str(await route[0].hop.options(timeout=LONGER_THAN_A_PROBE_S).call_one(route[1:]))
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        reader, writer = os.pipe()

        async def watch() -> None:
            await asyncio.to_thread(time.sleep, LONGER_THAN_A_PROBE_S)  # no timer of the loop
            task.cancel()

        if kind == "another task":
            self.tasks.append(asyncio.create_task(watch()))
        elif kind == "equal timers":
            at = loop.time() + LONGER_THAN_A_PROBE_S
            first, _ = loop.call_at(at, task.cancel), loop.call_at(at, task.cancel)
            first.cancel()
        else:
            assert kind == "reader"
            loop.add_reader(reader, task.cancel)
            threading.Timer(LONGER_THAN_A_PROBE_S, os.write, (writer, b"x")).start()
        try:
            return str(await call)
        except asyncio.CancelledError:
            raise TimeoutError from None
        finally:
            loop.remove_reader(reader)
            os.close(reader)
            os.close(writer)

    @endpoint
    async def hop_beside_a_task(self, seconds: float, route: list[ActorMesh]) -> str:
        """Await while another task sleeps, and after it has ended."""
        self.tasks.append(asyncio.create_task(asyncio.sleep(seconds)))
        kept = asyncio.get_running_loop().call_later(0, str)
        try:
            return str(await self._noted(route[0].hop.call_one(route[1:])))
        finally:
            kept.cancel()

    @endpoint
    async def first_of_two(self, route: list[ActorMesh]) -> str:
        """Await the first of a cycle and a sleep."""
        cycle = asyncio.ensure_future(route[0].hop.call_one(route[1:]).as_asyncio())
        other = asyncio.create_task(asyncio.sleep(LONGER_THAN_A_PROBE_S))
        done, _ = await asyncio.wait({cycle, other}, return_when=asyncio.FIRST_COMPLETED)
        cycle.cancel()
        return "sleep" if other in done else "cycle"

    @endpoint
    async def sleep(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "end"

    @endpoint
    async def sleep_then_hop(self, route: list[ActorMesh]) -> str:
        await asyncio.sleep(LONGER_THAN_A_PROBE_S)
        return "end" if not route else str(await route[0].sleep_then_hop.call_one(route[1:]))

    @endpoint
    async def taken(self) -> list[tuple[str, float]]:
        for task in self.tasks:
            task.cancel()
        self.tasks.clear()
        seen, self.seen = self.seen, []
        return seen


class Concurrent(Actor):
    @concurrent_endpoint
    async def hop(self, route: list[ActorMesh]) -> str:
        return "end" if not route else str(await route[0].hop.call_one(route[1:]))


def _hide_uvloop() -> None:
    sys.modules["uvloop"] = None  # type: ignore[assignment] # importing it fails


@pytest.fixture(scope="module", params=[pytest.param("asyncio", marks=pytest.mark.slow), "uvloop"])
def procs(request: pytest.FixtureRequest) -> Iterator[ProcMesh]:
    if request.param == "uvloop":
        pytest.importorskip("uvloop")
    with running({"gpus": 3}, bootstrap=_hide_uvloop if request.param == "asyncio" else None) as made:
        yield made


@pytest.fixture(scope="module")
def actors(procs: ProcMesh) -> dict[str, ActorMesh]:
    """Return three async and two plain actors, in three processes, and an async one in this process."""
    made = {f"async{rank}": procs.slice(gpus=rank).spawn(f"async{rank}", Async) for rank in range(3)}
    made |= {f"plain{rank}": procs.slice(gpus=rank).spawn(f"plain{rank}", Plain) for rank in range(2)}
    made["here"] = this_proc().spawn("here", Async)
    for mesh in made.values():
        mesh.initialized.get(PATIENCE)
    return made


@pytest.fixture(autouse=True)
def _no_leftover() -> Iterator[None]:
    yield
    detector, awaits = program().deadlocks, program().awaits
    wait_until(lambda: not (detector._waits or detector._awaits or detector._claimed or awaits._begun), PATIENCE)


def _check(members: list[ActorMesh], start: float) -> None:
    """Check that each member has raised one DeadlockError that names all of them, and answers again."""
    for mesh in members:
        [(text, when)] = mesh.taken.call_one().get(PATIENCE)
        print(f"raised {when - start:.3f} s after the start")
        first = text.splitlines()[0]
        assert "waits for itself" in first if len(members) == 1 else f"cycle of {len(members)} actors" in first
        assert all(f"{each.name}." in first for each in members)


@pytest.mark.parametrize(
    "names",
    [
        ["async0", "async1"],
        ["async0", "plain1"],
        ["plain0", "async1"],
        ["async0", "async1", "async2"],
        ["async0", "plain1", "async2"],
        ["async0", "plain0"],
        ["here", "async1"],
        ["async0"],
    ],
    ids="-".join,
)
def test_cycle_raises_in_each_of_its_actors(names: list[str], actors: dict[str, ActorMesh]) -> None:
    members, start = [actors[name] for name in names], time.monotonic()
    error = members[0].hop.call_one([*members[1:], members[0]]).exception(PATIENCE)
    assert isinstance(error, ActorError) and isinstance(error.__cause__, DeadlockError)
    _check(members, start)


@pytest.mark.parametrize("way", ["hop_through_coroutines", "hop_blocking", "hop_over_mesh", "fold"])
def test_cycle_raises_in_each_way_of_waiting(way: str, actors: dict[str, ActorMesh]) -> None:
    first, second, start = actors["async0"], actors["async1"], time.monotonic()
    error = getattr(first, way).call_one([second, first]).exception(PATIENCE)
    assert isinstance(error, ActorError) and isinstance(error.__cause__, DeadlockError)
    _check([first, second], start)


def test_reader_of_a_generator_that_calls_it_raises(actors: dict[str, ActorMesh]) -> None:
    first, second, start = actors["async0"], actors["async1"], time.monotonic()
    error = first.read.call_one([second, first]).exception(PATIENCE)
    assert isinstance(error, ActorError) and isinstance(error.__cause__, DeadlockError)
    _check([first, second], start)


def test_broadcast_that_closes_a_cycle_is_found(actors: dict[str, ActorMesh]) -> None:
    """Both wait before either has called the other: the cycle closes from both sides."""
    first, second, start = actors["async0"], actors["async1"], time.monotonic()
    calls = [first.sleep_then_hop.call_one([second]), second.sleep_then_hop.call_one([first])]
    for call in calls:
        assert isinstance(call.exception(PATIENCE).__cause__, DeadlockError)
    print(f"raised {time.monotonic() - start - LONGER_THAN_A_PROBE_S:.3f} s after the cycle has closed")


def test_cycle_raises_once_the_other_task_has_ended(actors: dict[str, ActorMesh]) -> None:
    first, second, start = actors["async0"], actors["async1"], time.monotonic()
    call = first.hop_beside_a_task.call_one(LONGER_THAN_A_PROBE_S, [second, first])
    assert isinstance(call.exception(PATIENCE).__cause__, DeadlockError)
    assert time.monotonic() - start >= LONGER_THAN_A_PROBE_S
    _check([first, second], start)


TIMEOUTS = ["asyncio.wait_for", "anyio", "options", "another task", "equal timers", "reader"]


@pytest.mark.parametrize("kind", ["asyncio.timeout", *TIMEOUTS] if sys.version_info >= (3, 11) else TIMEOUTS)
def test_limit_of_time_ends_a_cycle_without_deadlock_error(kind: str, actors: dict[str, ActorMesh]) -> None:
    first, second = actors["async0"], actors["async1"]
    error = first.hop_with_timeout.call_one(kind, [second, first]).exception(PATIENCE)
    assert isinstance(error, ActorError) and isinstance(error.__cause__, TimeoutError)
    assert [mesh.taken.call_one().get(PATIENCE) for mesh in (first, second)] == [[], []]


def _first_of_two(actors: dict[str, ActorMesh]) -> None:
    first, second = actors["async0"], actors["async1"]
    assert first.first_of_two.call_one([second, first]).get(PATIENCE) == "sleep"


def _slow_chain(actors: dict[str, ActorMesh]) -> None:
    route = [actors[name] for name in ("async1", "here", "async2")]
    assert actors["async0"].sleep_then_hop.call_one(route).get(PATIENCE) == "end"


def _busy_actor(actors: dict[str, ActorMesh]) -> None:
    busy = actors["async1"].sleep.call_one(2 * LONGER_THAN_A_PROBE_S)
    assert actors["async0"].hop.call_one([actors["async1"]]).get(PATIENCE) == "end"
    assert busy.get(PATIENCE) == "end"


def _concurrent_endpoints(actors: dict[str, ActorMesh]) -> None:
    a, b = (this_proc().spawn(name, Concurrent) for name in "ab")
    busy = actors["async1"].sleep.call_one(2 * LONGER_THAN_A_PROBE_S)
    assert a.hop.call_one([b, a, b, actors["async1"]]).get(PATIENCE) == "end"
    busy.get(PATIENCE)
    for mesh in (a, b):
        mesh.stop().get(PATIENCE)


@pytest.mark.parametrize("scenario", [_first_of_two, _slow_chain, _busy_actor, _concurrent_endpoints])
def test_awaits_that_end_raise_no_deadlock_error(
    scenario: Callable[[dict[str, ActorMesh]], None], actors: dict[str, ActorMesh]
) -> None:
    scenario(actors)
    assert all(mesh.taken.call_one().get(PATIENCE) == [] for mesh in actors.values())
