"""Actors that wait for each other: each one raises DeadlockError and goes on. Waits that end raise nothing."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._actor import context, deadlocks
from monarch_backend._actor.current_runtime import program
from monarch_backend._core import platform
from monarch_backend._transport.local.tuning import CREDIT_WINDOW
from monarch_backend.actor import (
    Accumulator,
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
    this_host,
    this_proc,
)
from tests.actor.actors import running
from tests.actor.support import PATIENCE, Faults
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("faults")

LONGER_THAN_A_PROBE_S = 0.5
"""Seconds of a wait that is checked for a deadlock at least once."""


class Node(Actor):
    """Calls the next actor of a route and waits for it. It keeps the errors that it gets, with their times."""

    def __init__(self) -> None:
        self.seen: list[tuple[BaseException, float]] = []
        self.counted = 0

    @contextlib.contextmanager
    def _noted(self, kind: type[Exception] = Exception) -> Iterator[None]:
        """Keep an error of the block, and raise it."""
        try:
            yield
        except kind as error:
            self.seen.append((error, time.monotonic()))
            raise

    @endpoint
    def hop(self, route: list[ActorMesh], limit: float | None = None) -> str:
        if not route:
            return "end"
        with self._noted():
            return str(route[0].hop.call_one(route[1:], limit).get(limit))

    @endpoint
    def hop_over_mesh(self, mesh: ActorMesh, route: list[ActorMesh]) -> int:
        with self._noted():
            return len(mesh.hop.call(route).get())

    @endpoint
    def hop_with_limit(self, target: ActorMesh, route: list[ActorMesh], limit: float) -> str:
        return str(target.hop.options(timeout=limit).call_one(route).get())

    @endpoint
    def hop_when_there(self, mine: str, theirs: str, target: ActorMesh) -> None:
        """Make a file, wait for the file of another actor, and call the target."""
        Path(mine).touch()
        wait_until(Path(theirs).exists, PATIENCE)
        with self._noted():
            target.hop.call_one([]).get()

    @endpoint
    def hop_with_alarm(self, target: ActorMesh, route: list[ActorMesh], seconds: float) -> str:
        """Wait for a call until a signal handler raises. The actor has the main thread of its process."""

        def expire(*_: object) -> None:
            raise TimeoutError("the alarm has rung")

        before = signal.signal(signal.SIGALRM, expire)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            return str(target.hop.call_one(route).get())
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)

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
    def die_at_claim(self, passes_on: bool) -> None:
        """Kill the process when it has claimed its wait in a cycle, before or after it passes the message on."""
        detector = program().deadlocks
        claim = detector._claim

        def die(*args: Any) -> None:
            if not passes_on:
                detector._tell_next = lambda _: None  # type: ignore[method-assign]
            claim(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        detector._claim = die  # type: ignore[method-assign]

    @endpoint
    def wait_for_last_step(self, probes: bool) -> None:
        """Raise only at the last message about a cycle, and find no cycle without ``probes``."""
        deadlocks.RAISE_AFTER_S = 10 * PATIENCE
        if not probes:
            deadlocks.FIRST_PROBE_S = 10 * PATIENCE

    @endpoint
    def flood(self, mine: str, theirs: str, target: ActorMesh, count: int) -> int:
        """Make a file, wait for the file of another actor, and send it messages. Return how many were sent."""
        Path(mine).touch()
        wait_until(Path(theirs).exists, PATIENCE)
        return self._send_many(count, target.count.broadcast)

    def _send_many(self, count: int, send: Callable[[], object]) -> int:
        """Send messages. Return how many were sent before a DeadlockError."""
        self.sent = []
        for sent in range(count):
            try:
                self.sent.append(send())
            except DeadlockError as error:
                self.seen.append((error, time.monotonic()))
                return sent
        return count

    @endpoint
    def count(self) -> None:
        self.counted += 1

    @endpoint
    def take_count(self) -> int:
        counted, self.counted = self.counted, 0
        return counted

    @endpoint
    def fill_when_called(self, target: ActorMesh, me: ActorMesh) -> int:
        """Have an actor call back, and fill its queue once the call is in the own queue."""
        target.hop_noted.broadcast(me)
        runner = context.runner.get()
        assert runner is not None
        wait_until(lambda: bool(runner.inbox), PATIENCE)
        return self._send_many(CREDIT_WINDOW, target.count.broadcast)

    @endpoint
    def take_count_of(self, target: ActorMesh) -> int:
        """Return the count of an actor after the messages that this actor has sent it."""
        return int(target.take_count.call_one().get())

    @endpoint
    def fill_after_call(self, target: ActorMesh, me: ActorMesh, before: int, after: int) -> int:
        """Send messages to an actor that calls back after some of them. Return how many of the others were sent."""
        for _ in range(before):
            target.count.broadcast()
        target.hop_noted.broadcast(me)
        return self._send_many(after, target.count.broadcast)

    @endpoint
    def hop_noted(self, target: ActorMesh) -> None:
        with contextlib.suppress(DeadlockError):
            self._hop_noted(target)

    def _hop_noted(self, target: ActorMesh) -> None:
        with self._noted(DeadlockError):
            target.hop.call_one([]).get()

    @endpoint
    def fill_with_calls(self, target: ActorMesh, me: ActorMesh, calls: int, limit: float | None) -> int:
        """Have an actor call back, and fill its queue, at last with calls that are not waited for. One does not fit."""
        target.hop_noted.broadcast(me)
        for _ in range(CREDIT_WINDOW - calls):
            target.count.broadcast()
        return self._send_many(calls + 1, target.count.options(timeout=limit).call_one)

    @endpoint
    def fill_and_stream(self, target: ActorMesh, me: ActorMesh) -> tuple[int, int]:
        """Have an actor call back, fill its queue, and begin a stream. Return the numbers of sent and of left calls."""
        target.hop_noted.broadcast(me)
        for _ in range(CREDIT_WINDOW):
            target.count.broadcast()
        before = len(program().pending)
        return self._send_many(1, target.count.stream), len(program().pending) - before

    @endpoint
    def values(self, target: ActorMesh, before: int, after: int) -> Iterator[int]:
        """Yield values, call an actor, and yield more values even if that fails."""
        yield from range(before)
        with contextlib.suppress(DeadlockError):
            self._hop_noted(target)
        yield from range(after)

    @endpoint
    def read(self, source: ActorMesh, me: ActorMesh, before: int, as_futures: bool) -> int:
        """Read the values of a generator that calls this actor after some of them. Return how many have arrived."""
        arguments = (me, before, 1000)
        stream = source.values.stream(*arguments) if as_futures else source.values.call_one(*arguments)
        count = 0
        try:
            for value in stream:
                if as_futures:
                    value.get()
                count += 1
        except DeadlockError as error:
            self.seen.append((error, time.monotonic()))
        return count

    @endpoint
    def collect(self, source: ActorMesh, me: ActorMesh, before: int) -> int:
        """Call a generator that calls this actor after some values. Return how many values have arrived."""
        with self._noted():
            return sum(map(len, source.values.call(me, before, 10).get().values()))

    @endpoint
    def accumulate(self, mesh: ActorMesh, me: ActorMesh) -> int:
        """Fold the replies of a mesh that calls this actor."""
        with self._noted():
            return int(Accumulator(mesh.hop, 0, lambda total, _: total + 1).accumulate([me]).get())

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


class Partner(Actor):
    """Actor of a pair: `ask` of one needs `relay` of the other, which needs the first one again."""

    @endpoint
    def meet(self, other: ActorMesh) -> None:
        self.other = other

    @endpoint
    def ask(self) -> int:
        return int(self.other.relay.call_one().get())

    @endpoint
    def relay(self) -> int:
        return int(self.other.value.call_one().get())

    @endpoint
    def value(self) -> int:
        return 1

    @endpoint
    def lock_twice(self) -> None:
        guard = threading.Lock()
        guard.acquire()
        guard.acquire()  # the place


@pytest.mark.skipif(not platform.HAS_MEMFD, reason="places of other processes need memfd_create")
def test_hang_of_a_pair_is_explained_to_a_caller_with_a_timeout() -> None:
    procs = this_host().spawn_procs({"gpus": 2}, name="pair")
    try:
        left, right = (procs.slice(gpus=rank).spawn(name, Partner) for rank, name in enumerate(("left", "right")))
        left.meet.call_one(right).get(PATIENCE)
        right.meet.call_one(left).get(PATIENCE)
        with pytest.raises(ActorError) as raised:
            left.ask.call_one().get(timeout=PATIENCE)
        assert isinstance(raised.value.__cause__, DeadlockError)
        first = str(raised.value.__cause__).splitlines()[0]
        assert "left.ask" in first and "right.relay" in first
        with pytest.raises(TimeoutError) as late:
            left.lock_twice.call_one().ignore().get(timeout=1.2)
        assert re.search(
            r"left\.lock_twice of pair waits for rank 0 of 1 \(pid \d+\): "
            r"it is at \S+\.py:\d+ in lock_twice \(guard\.acquire\(\)  # the place\)",
            str(late.value),
        )
    finally:
        procs.kill().get(PATIENCE)


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


@pytest.mark.parametrize(("dying", "passes_on"), [(1, True), (3, False)])
def test_member_that_dies_after_its_claim_lets_the_others_raise_at_once(
    dying: int, passes_on: bool, faults: Faults
) -> None:
    with contextlib.ExitStack() as stack:
        members = [stack.enter_context(running({"gpus": 1})).spawn(f"member{number}", Node) for number in range(4)]
        for place, member in enumerate(members):  # member 0 finds the cycle
            member.wait_for_last_step.call_one(probes=place == 0).get(PATIENCE)
        members[dying].die_at_claim.call_one(passes_on).get(PATIENCE)
        assert isinstance(_call(members[0], *members[1:], members[0]).exception(PATIENCE), ActorError)
        for place, mesh in enumerate(members):
            if place != dying:
                [(kind, text, _)] = mesh.taken.call_one().get(PATIENCE)
                # The error of a former member may reach a later one before its claim does.
                assert kind == "DeadlockError" or (place > dying and kind == "ActorError"), text
        faults.next()


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


def _check_flood(members: list[ActorMesh], endpoints: list[str], start: float) -> None:
    """Check that each member has raised one DeadlockError that names all of them with their endpoints."""
    for place, mesh in enumerate(members):
        [(kind, text, when)] = mesh.taken.call_one().get(PATIENCE)
        assert kind == "DeadlockError", text
        print(f"raised {when - start:.3f} s after the start")
        assert when - start < PATIENCE
        lines = text.splitlines()
        for each, name in zip(members, endpoints, strict=True):
            assert sum(line.startswith(f"  {each.name}.{name} (") for line in lines) == 1, text
        assert lines[1].startswith(f"  {members[place].name}.{endpoints[place]}")


def _flood_round(members: list[ActorMesh], folder: Path) -> list[Future[int]]:
    """Have each actor fill the queue of the next one, once that one has begun to do so."""
    following = [*members[1:], members[0]]
    files = {mesh.name: str(folder / mesh.name) for mesh in members}
    return [
        mesh.flood.call_one(files[mesh.name], files[other.name], other, 2 * CREDIT_WINDOW)
        for mesh, other in zip(members, following, strict=True)
    ]


@pytest.mark.parametrize("ranks", [[0, 1], [0, 1, 2], [0, 3], [3, 0, 1]], ids=["two", "three", "here", "three_here"])
def test_actors_that_fill_each_others_queues_raise(ranks: list[int], nodes: list[ActorMesh], tmp_path: Path) -> None:
    members = [nodes[rank] for rank in ranks]
    start = time.monotonic()
    sent = [call.get(PATIENCE) for call in _flood_round(members, tmp_path)]
    assert all(CREDIT_WINDOW <= each < 2 * CREDIT_WINDOW for each in sent)
    _check_flood(members, ["flood"] * len(members), start)
    # The message that has raised is not sent later.
    following = [*members[1:], members[0]]
    counts = [a.take_count_of.call_one(b).get(PATIENCE) for a, b in zip(members, following, strict=True)]
    assert counts == sent
    assert _call(members[0], *members[1:]).get(PATIENCE) == "end"


def test_actors_of_one_process_that_fill_its_queues_end(tmp_path: Path) -> None:
    """Their messages share one window of credits. So one queue may hold all of it, and one actor waits for itself."""
    members = [this_proc().spawn(name, Node) for name in "ab"]
    for call in _flood_round(members, tmp_path):
        call.get(PATIENCE)
    seen = [each for mesh in members for each in mesh.taken.call_one().get(PATIENCE)]
    assert {kind for kind, _, _ in seen} == {"DeadlockError"}
    for mesh in members:
        mesh.stop().get(PATIENCE)


@pytest.mark.parametrize("ranks", [(0, 1), (3, 0), (0, 3)])
def test_actor_that_fills_the_queue_of_one_that_calls_it_raises(
    ranks: tuple[int, int], nodes: list[ActorMesh], tmp_path: Path
) -> None:
    a, b = nodes[ranks[0]], nodes[ranks[1]]
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    start = time.monotonic()
    calls = [a.flood.call_one(first, second, b, 2 * CREDIT_WINDOW), b.hop_when_there.call_one(second, first, a)]
    assert calls[0].get(PATIENCE) == CREDIT_WINDOW
    assert isinstance(calls[1].exception(PATIENCE), ActorError)
    _check_flood([a, b], ["flood", "hop_when_there"], start)
    assert a.take_count_of.call_one(b).get(PATIENCE) == CREDIT_WINDOW


def test_actor_that_fills_the_queue_of_a_caller_in_its_process_raises() -> None:
    """The call in its own queue holds credit of the process, too."""
    a, b = (this_proc().spawn(name, Node) for name in "ab")
    start = time.monotonic()
    assert a.fill_when_called.call_one(b, a).get(PATIENCE) == CREDIT_WINDOW - 1
    _check_flood([a, b], ["fill_when_called", "hop_noted"], start)
    assert a.take_count_of.call_one(b).get(PATIENCE) == CREDIT_WINDOW - 1
    for mesh in (a, b):
        mesh.stop().get(PATIENCE)


@pytest.mark.parametrize("before", [0, 1, CREDIT_WINDOW // 16 - 2, CREDIT_WINDOW // 16 - 1, 100])
@pytest.mark.parametrize("is_full", [False, True], ids=["fits", "full"])
def test_queue_is_full_after_a_whole_window_of_messages(nodes: list[ActorMesh], before: int, is_full: bool) -> None:
    """Credit of messages that the called actor has taken is no proof, also where it was not returned yet."""
    start = time.monotonic()
    sent = nodes[0].fill_after_call.call_one(nodes[1], nodes[0], before, CREDIT_WINDOW + is_full).get(PATIENCE)
    assert sent == CREDIT_WINDOW
    if is_full:
        _check_flood([nodes[0], nodes[1]], ["fill_after_call", "hop_noted"], start)
    assert nodes[0].take_count_of.call_one(nodes[1]).get(PATIENCE) == before + CREDIT_WINDOW


def test_queue_full_of_calls_raises(nodes: list[ActorMesh]) -> None:
    start = time.monotonic()
    assert nodes[0].fill_with_calls.call_one(nodes[1], nodes[0], CREDIT_WINDOW, None).get(PATIENCE) == CREDIT_WINDOW
    _check_flood([nodes[0], nodes[1]], ["fill_with_calls", "hop_noted"], start)
    assert nodes[0].take_count_of.call_one(nodes[1]).get(PATIENCE) == CREDIT_WINDOW


def test_stream_that_finds_a_full_queue_raises_and_leaves_no_call(nodes: list[ActorMesh]) -> None:
    start = time.monotonic()
    assert nodes[0].fill_and_stream.call_one(nodes[1], nodes[0]).get(PATIENCE) == (0, 0)
    _check_flood([nodes[0], nodes[1]], ["fill_and_stream", "hop_noted"], start)


@pytest.mark.parametrize("as_futures", [False, True])
@pytest.mark.parametrize("before", [0, 3, 100])
def test_reader_of_a_generator_that_calls_it_raises(nodes: list[ActorMesh], before: int, as_futures: bool) -> None:
    start = time.monotonic()
    assert nodes[0].read.call_one(nodes[1], nodes[0], before, as_futures).get(PATIENCE) == before
    _check_flood([nodes[0], nodes[1]], ["read", "values"], start)
    assert _call(nodes[1], nodes[0]).get(PATIENCE) == "end"  # the generator has ended


@pytest.mark.parametrize(
    "before", [pytest.param(0, marks=pytest.mark.slow), 3, pytest.param(100, marks=pytest.mark.slow)]
)
def test_call_of_a_generator_that_calls_back_raises(nodes: list[ActorMesh], before: int) -> None:
    start = time.monotonic()
    error = nodes[0].collect.call_one(nodes[1], nodes[0], before).exception(PATIENCE)
    assert isinstance(error, ActorError) and isinstance(error.__cause__, DeadlockError)
    _check_flood([nodes[0], nodes[1]], ["collect", "values"], start)
    assert _call(nodes[1], nodes[0]).get(PATIENCE) == "end"  # the generator has ended


def test_fold_of_replies_of_an_actor_that_calls_back_raises(nodes: list[ActorMesh]) -> None:
    start = time.monotonic()
    error = nodes[0].accumulate.call_one(nodes[1], nodes[0]).exception(PATIENCE)
    assert isinstance(error, ActorError) and isinstance(error.__cause__, DeadlockError)
    _check_flood([nodes[0], nodes[1]], ["accumulate", "hop"], start)


def _full_queue_of_calls_with_a_limit(nodes: list[ActorMesh]) -> None:
    call = nodes[0].fill_with_calls.call_one(nodes[1], nodes[0], 3, 2 * LONGER_THAN_A_PROBE_S)
    assert call.get(PATIENCE) == 4


def _full_queue_of_another_actors_calls(nodes: list[ActorMesh]) -> None:
    """Calls of the main program fill the queue. It cancels them, which no actor can know."""
    with tempfile.TemporaryDirectory() as folder:
        begun, go = Path(folder) / "begun", Path(folder) / "go"
        flood = nodes[3].flood.call_one(str(begun), str(go), nodes[1], CREDIT_WINDOW // 16)
        wait_until(begun.exists, PATIENCE)
        nodes[1].hop_noted.broadcast(nodes[3])
        peer, calls = nodes[1]._core.peer(0), []
        while peer.credit > 0:
            calls.append(nodes[1].count.call_one())
        go.touch()
        with pytest.raises(TimeoutError):
            flood.get(3 * LONGER_THAN_A_PROBE_S)
        for call in calls:
            call.cancel()
        assert flood.get(PATIENCE) == CREDIT_WINDOW // 16


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
    # The wait of the second actor may end first.
    assert "TimeoutError: no answer within 0.5 s" in str(raised.value)
    for node in nodes[:2]:
        assert "DeadlockError" not in [kind for kind, _, _ in node.taken.call_one().get(PATIENCE)]


def _timeout_of_call_ends_a_cycle(nodes: list[ActorMesh]) -> None:
    with pytest.raises(ActorError) as raised:
        nodes[0].hop_with_limit.call_one(nodes[1], [nodes[0]], LONGER_THAN_A_PROBE_S).get(PATIENCE)
    assert isinstance(raised.value.__cause__, TimeoutError)


def _slow_generator(nodes: list[ActorMesh]) -> None:
    """All values arrive while the caller waits, and after probes."""
    busy = nodes[2].sleep_and_hop.call_one(LONGER_THAN_A_PROBE_S, [])
    assert nodes[0].collect.call_one(nodes[1], nodes[2], 3).get(PATIENCE) == 13
    busy.get(PATIENCE)


def _alarm_ends_a_cycle(nodes: list[ActorMesh]) -> None:
    with pytest.raises(ActorError) as raised:
        nodes[0].hop_with_alarm.call_one(nodes[1], [nodes[0]], 2 * LONGER_THAN_A_PROBE_S).get(PATIENCE)
    assert "the alarm has rung" in str(raised.value)


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
        _full_queue_of_calls_with_a_limit,
        _full_queue_of_another_actors_calls,
        _full_queue_of_a_busy_actor,
        _slow_chain,
        _waits_for_busy_actor,
        _timeout_of_get_ends_a_cycle,
        _timeout_of_call_ends_a_cycle,
        _alarm_ends_a_cycle,
        _slow_generator,
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
    monkeypatch.setattr(program().deadlocks, "is_on", False)
    call = _call(a, b, a)
    with pytest.raises(TimeoutError):
        call.get(2 * LONGER_THAN_A_PROBE_S)
    call.cancel()
    for mesh in (a, b):
        mesh.stop("abort").get(PATIENCE)
