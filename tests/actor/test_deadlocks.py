"""Actors that wait for each other: each one raises DeadlockError and goes on. Waits that end raise nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._actor.current_runtime import program
from monarch_backend._transport.local.tuning import CREDIT_WINDOW
from monarch_backend.actor import (
    Actor,
    ActorError,
    ActorMesh,
    CancelledError,
    DeadlockError,
    Future,
    Port,
    ProcMesh,
    concurrent_endpoint,
    endpoint,
    this_proc,
)
from tests.actor.actors import running
from tests.actor.support import PATIENCE
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("faults")

LONGER_THAN_A_PROBE_S = 0.5
"""Seconds of a wait that is checked for a deadlock at least once."""


class Node(Actor):
    """Calls the next actor of a route and waits for it. It keeps the errors that it gets, with their times."""

    def __init__(self) -> None:
        self.seen: list[tuple[BaseException, float]] = []

    @endpoint
    def hop(self, route: list[ActorMesh], limit: float | None = None) -> str:
        if not route:
            return "end"
        try:
            return str(route[0].hop.call_one(route[1:], limit).get(limit))
        except Exception as error:
            self.seen.append((error, time.monotonic()))
            raise

    @endpoint
    def hop_over_mesh(self, mesh: ActorMesh, route: list[ActorMesh]) -> int:
        try:
            return len(mesh.hop.call(route).get())
        except Exception as error:
            self.seen.append((error, time.monotonic()))
            raise

    @endpoint
    def hop_with_limit(self, target: ActorMesh, route: list[ActorMesh], limit: float) -> str:
        return str(target.hop.options(timeout=limit).call_one(route).get())

    @endpoint
    def hop_when_there(self, mine: str, theirs: str, target: ActorMesh) -> None:
        """Make a file, wait for the file of another actor, and call the target."""
        Path(mine).touch()
        wait_until(Path(theirs).exists, PATIENCE)
        try:
            target.hop.call_one([]).get()
        except Exception as error:
            self.seen.append((error, time.monotonic()))
            raise

    @endpoint
    def sleep_and_hop(self, seconds: float, route: list[ActorMesh]) -> str:
        time.sleep(seconds)
        return "end" if not route else str(route[0].sleep_and_hop.call_one(seconds, route[1:]).get())

    @endpoint(explicit_response_port=True)
    def reply_through(self, port: Port[str], other: ActorMesh, back: ActorMesh) -> None:
        """Leave the reply to another actor, and wait for the caller meanwhile."""
        other.reply_later.broadcast(port)
        back.hop.call_one([]).get()

    @endpoint
    def reply_later(self, port: Port[str]) -> None:
        time.sleep(LONGER_THAN_A_PROBE_S)
        port.send("from another")

    @endpoint
    def ask_for_reply_through(self, target: ActorMesh, other: ActorMesh, me: ActorMesh) -> str:
        return str(target.reply_through.call_one(other, me).get())

    @endpoint
    def flood(self, mine: str, theirs: str, target: ActorMesh, count: int) -> int:
        """Make a file, wait for the file of another actor, and send it messages. Return how many were sent."""
        Path(mine).touch()
        wait_until(Path(theirs).exists, PATIENCE)
        for sent in range(count):
            try:
                target.hop.broadcast([])
            except DeadlockError as error:
                self.seen.append((error, time.monotonic()))
                return sent
        return count

    @endpoint
    def taken(self) -> list[tuple[str, str, float]]:
        """Return the types and texts of the errors, and forget them."""
        seen, self.seen = self.seen, []
        return [(type(error).__name__, str(error), when) for error, when in seen]

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Concurrent(Actor):
    @concurrent_endpoint
    async def hop(self, route: list[ActorMesh]) -> str:
        return "end" if not route else str(await route[0].hop.call_one(route[1:]))


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    with running({"gpus": 3}) as made:
        yield made


@pytest.fixture(scope="module")
def nodes(procs: ProcMesh) -> list[ActorMesh]:
    """Return one actor in each process, and one in this process."""
    made = [procs.slice(gpus=rank).spawn(f"node{rank}", Node) for rank in range(3)]
    return [*made, this_proc().spawn("here", Node)]


@pytest.fixture(autouse=True)
def _no_leftover() -> Iterator[None]:
    yield
    detector = program().deadlocks
    wait_until(lambda: not detector._waits and not detector._claimed, PATIENCE)


def _call(mesh: ActorMesh, *route: ActorMesh) -> Future[str]:
    future: Future[str] = mesh.hop.call_one(list(route))
    return future


def _check(members: list[ActorMesh], start: float) -> None:
    """Check that each member has raised one DeadlockError that names all of them, and answers again."""
    pids = [mesh.pid.call_one().get(PATIENCE) for mesh in members]
    for place, mesh in enumerate(members):
        [(kind, text, when)] = mesh.taken.call_one().get(PATIENCE)
        assert kind == "DeadlockError", text
        print(f"raised {when - start:.3f} s after the start")
        assert when - start < PATIENCE
        lines = text.splitlines()
        assert f"cycle of {len(members)} actors" in lines[0]
        for each, pid in zip(members, pids, strict=True):
            assert f"{each.name}.hop" in lines[0]
            assert sum(line.startswith(f"  {each.name}.hop") and f"pid {pid}" in line for line in lines) == 1
        assert lines[1].startswith(f"  {members[place].name}.hop")
        assert "self.method(...)" in text


@pytest.mark.parametrize("ranks", [[0, 1], [0, 1, 2], [0, 3], [3, 0, 1]], ids=["two", "three", "here", "three_here"])
def test_cycle_raises_in_each_of_its_actors(ranks: list[int], nodes: list[ActorMesh]) -> None:
    members = [nodes[rank] for rank in ranks]
    start = time.monotonic()
    with pytest.raises(ActorError) as raised:
        _call(members[0], *members[1:], members[0]).get(PATIENCE)
    assert isinstance(raised.value.__cause__, DeadlockError)
    assert len(raised.value.__cause__.members) == len(members)
    _check(members, start)
    assert _call(members[0], *members[1:]).get(PATIENCE) == "end"


def test_cycle_that_closes_from_both_sides_raises_in_both(nodes: list[ActorMesh], tmp_path: Path) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    start = time.monotonic()
    calls = [
        nodes[0].hop_when_there.call_one(first, second, nodes[1]),
        nodes[1].hop_when_there.call_one(second, first, nodes[0]),
    ]
    for call in calls:
        with pytest.raises(ActorError) as raised:
            call.get(PATIENCE)
        assert isinstance(raised.value.__cause__, DeadlockError)
    _check(nodes[:2], start)


def test_cycles_at_once_raise_in_all_and_leave_nothing() -> None:
    pairs = [[this_proc().spawn(f"{side}{number}", Node) for side in "ab"] for number in range(20)]
    pending = len(program().pending)
    for _ in range(2):
        start = time.monotonic()
        calls = [_call(a, b, a) for a, b in pairs]
        assert all(isinstance(call.exception(PATIENCE), ActorError) for call in calls)
        for pair in pairs:
            _check(pair, start)
    wait_until(lambda: len(program().pending) == pending, PATIENCE)
    for pair in pairs:
        for mesh in pair:
            mesh.stop().get(PATIENCE)


def test_cycle_through_one_rank_of_a_called_mesh_raises(procs: ProcMesh, nodes: list[ActorMesh]) -> None:
    mesh, caller = procs.slice(gpus=slice(0, 2)).spawn("both", Node), this_proc().spawn("caller", Node)
    start = time.monotonic()
    with pytest.raises(ActorError) as raised:
        caller.hop_over_mesh.call_one(mesh, [caller]).get(PATIENCE)
    assert isinstance(raised.value.__cause__, DeadlockError)
    [(kind, text, _)] = caller.taken.call_one().get(PATIENCE)
    assert kind == "DeadlockError" and "both.hop waits for caller.hop" in text
    seen = mesh.taken.call().get(PATIENCE)
    assert "DeadlockError" in [kind for each in seen.values() for kind, _, _ in each]
    assert time.monotonic() - start < PATIENCE
    caller.stop().get(PATIENCE)
    mesh.stop().get(PATIENCE)


def _full_queue_of_a_busy_actor(nodes: list[ActorMesh]) -> None:
    busy = nodes[1].sleep_and_hop.call_one(LONGER_THAN_A_PROBE_S, [])
    flood = nodes[0].flood.call_one(os.devnull, os.devnull, nodes[1], 2 * CREDIT_WINDOW)
    assert flood.get(PATIENCE) == 2 * CREDIT_WINDOW
    assert busy.get(PATIENCE) == "end"


def _slow_chain(nodes: list[ActorMesh]) -> None:
    call = nodes[0].sleep_and_hop.call_one(LONGER_THAN_A_PROBE_S / 2, [nodes[1], nodes[3], nodes[2]])
    assert call.get(PATIENCE) == "end"


def _waits_for_busy_actor(nodes: list[ActorMesh]) -> None:
    busy = nodes[1].sleep_and_hop.call_one(LONGER_THAN_A_PROBE_S, [])
    assert _call(nodes[0], nodes[1]).get(PATIENCE) == "end"
    assert busy.get(PATIENCE) == "end"


def _timeout_of_get_ends_a_cycle(nodes: list[ActorMesh]) -> None:
    with pytest.raises(ActorError) as raised:
        nodes[0].hop.call_one([nodes[1], nodes[0]], LONGER_THAN_A_PROBE_S).get(PATIENCE)
    assert isinstance(raised.value.__cause__, TimeoutError)
    for node in nodes[:2]:
        assert "DeadlockError" not in [kind for kind, _, _ in node.taken.call_one().get(PATIENCE)]


def _timeout_of_call_ends_a_cycle(nodes: list[ActorMesh]) -> None:
    with pytest.raises(ActorError) as raised:
        nodes[0].hop_with_limit.call_one(nodes[1], [nodes[0]], LONGER_THAN_A_PROBE_S).get(PATIENCE)
    assert isinstance(raised.value.__cause__, TimeoutError)


def _concurrent_endpoints(nodes: list[ActorMesh]) -> None:
    a, b = (this_proc().spawn(name, Concurrent) for name in "ab")
    assert a.hop.call_one([b, a, b, a]).get(PATIENCE) == "end"
    # The last actor is slow: all others wait longer than a probe.
    busy = nodes[3].sleep_and_hop.call_one(LONGER_THAN_A_PROBE_S, [])
    assert a.hop.call_one([b, a, nodes[0]]).get(PATIENCE) == "end"
    busy.get(PATIENCE)
    for mesh in (a, b):
        mesh.stop().get(PATIENCE)


def _reply_through_another_actor(nodes: list[ActorMesh]) -> None:
    call = nodes[0].ask_for_reply_through.call_one(nodes[1], nodes[2], nodes[0])
    assert call.get(PATIENCE) == "from another"


@pytest.mark.parametrize(
    "scenario",
    [
        _full_queue_of_a_busy_actor,
        _slow_chain,
        _waits_for_busy_actor,
        _timeout_of_get_ends_a_cycle,
        _timeout_of_call_ends_a_cycle,
        _concurrent_endpoints,
        _reply_through_another_actor,
    ],
)
def test_waits_that_end_raise_no_deadlock_error(scenario: Any, nodes: list[ActorMesh]) -> None:
    scenario(nodes)
    for node in nodes:
        assert "DeadlockError" not in [kind for kind, _, _ in node.taken.call_one().get(PATIENCE)]


def test_cancelled_wait_raises_cancelled_error(nodes: list[ActorMesh]) -> None:
    busy = nodes[1].sleep_and_hop.call_one(60.0, [])
    waiting = _call(nodes[0], nodes[1])
    time.sleep(LONGER_THAN_A_PROBE_S)
    waiting.cancel()
    with pytest.raises(CancelledError):
        waiting.get(PATIENCE)
    busy.cancel()
    assert _call(nodes[0], nodes[1]).get(PATIENCE) == "end"


def test_setting_turns_the_detection_off(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (this_proc().spawn(name, Node) for name in "ab")
    monkeypatch.setattr(program().deadlocks, "_is_on", False)
    call = _call(a, b, a)
    with pytest.raises(TimeoutError):
        call.get(2 * LONGER_THAN_A_PROBE_S)
    call.cancel()
    for mesh in (a, b):
        mesh.stop("abort").get(PATIENCE)
