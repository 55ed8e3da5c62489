"""The simulator behaves as the real transport and processes do, and the same seed gives the same run."""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import monarch_backend.actor as public
import monarch_backend.testing
from monarch_backend import _testing
from monarch_backend._actor import actor_mesh_owner, current_runtime, runtime
from monarch_backend._actor import context as actor_context
from monarch_backend._actor.processes import restarts as process_restarts
from monarch_backend._transport.local import tuning
from monarch_backend._transport.local.frames import Kind, Replaced
from monarch_backend._transport.local.peer import CreditWaiter
from monarch_backend.actor import (
    Actor,
    ActorError,
    CancelledError,
    Channel,
    Restart,
    SupervisionError,
    context,
    current_rank,
    endpoint,
    this_host,
)
from monarch_backend.testing import Conditions, Simulation, SimulationError
from tests.testing import random_world
from tests.testing.run_digest import digest_of

QUIET = Conditions(late=0.0, kept_back=0.0, crossing=0.0)


class Recorder(Actor):
    """Actor that records its messages."""

    def __init__(self) -> None:
        self.taken: list[Any] = []

    @endpoint
    def take(self, what: Any) -> int:
        self.taken.append(bytes(what) if isinstance(what, (memoryview, bytearray)) else what)
        return current_rank().rank

    @endpoint
    def as_rank(self, rank: int, i: int) -> tuple[int, int]:
        return rank, i

    @endpoint
    def give(self) -> list[Any]:
        return self.taken

    @endpoint
    def fail(self) -> None:
        raise ValueError("as told")

    @endpoint
    def end(self) -> None:
        context().actor_instance.kill("told to")

    @endpoint
    def ask(self, other: Any) -> Any:
        self.taken.append("asking")
        answer = other.take.call_one(current_rank().rank).get()
        self.taken.append("asked")
        return answer, current_rank().rank

    @endpoint
    def wait(self, seconds: float | None) -> None:
        """Wait for a message that never arrives."""
        _, receiver = Channel.open()
        receiver.recv().get(seconds)

    @endpoint
    def count(self, most: int) -> Any:
        yield from range(most)


class Parent(Actor):
    """Actor that owns processes."""

    def __init__(self) -> None:
        self.procs = this_host().spawn_procs({"gpus": 2}, name="children")
        self.children = self.procs.spawn("children", Recorder)

    @endpoint
    def ask(self) -> list[int]:
        return list(self.children.take.call(1).get().values())


class Friend(Actor):
    """Actor that gets a mesh of other actors when it is constructed."""

    def __init__(self, others: Any) -> None:
        self.others = others

    @endpoint
    def ask(self) -> list[int]:
        return list(self.others.take.call(1).get().values())


class Later(Actor):
    """Actor with an async endpoint, which the simulator does not run."""

    @endpoint
    async def take(self) -> None: ...


def _mesh(count: int, cls: type = Recorder, **options: Any) -> tuple[Any, Any]:
    procs = this_host().spawn_procs({"gpus": count}, name="workers", **options)
    return procs, procs.spawn("recorders", cls)


# ---- one seed, one run


def _digest(seed: int) -> str:
    return digest_of(random_world, seed, 24)


def test_the_same_seed_is_the_same_run() -> None:
    assert _digest(3) == _digest(3)
    assert _digest(3) != _digest(4)


@pytest.mark.slow
def test_the_same_seed_is_the_same_run_in_another_process() -> None:
    """Another hash seed changes the order of sets."""
    code = "from tests.testing.test_simulator import _digest; print(_digest(3))"
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", code]

    def digest(hashes: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hashes}
        return subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=120, check=True
        ).stdout

    assert digest("4711") == digest("0")


def test_simulation_uses_one_thread_and_no_real_time() -> None:
    before, started = threading.active_count(), time.process_time()
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    processes = children.read_text() if children.exists() else ""
    with Simulation(1) as simulation:
        _, actors = _mesh(256)
        assert list(actors.take.call(0).get().values()) == list(range(256))
        assert threading.active_count() == before
        assert not children.exists() or children.read_text() == processes
        assert len(simulation.processes) == 257
        simulation.run(24 * 3600.0)
        assert simulation.now > 24 * 3600.0
    assert time.process_time() - started < 60.0  # a day of simulated time


def test_all_substitutions_are_undone() -> None:
    def state() -> list[Any]:
        sizes = [
            tuning.CREDIT_WINDOW,
            tuning.BYTES_PER_CREDIT,
            tuning.MOST_IN_ONE,
            tuning.SHARED_COPY_MIN_BYTES,
        ]
        constants = [*sizes, tuning.TREE_FANOUT, tuning.MAX_DIRECT_RECEIVERS, actor_mesh_owner.secrets]
        seams = [current_runtime._program, public.unhandled_fault_hook, actor_context.runner.get()]
        return [*constants, *seams, signal.getsignal(signal.SIGINT)]

    before = state()
    one = Simulation(9, window=2, fanout=3, direct=4, most_in_one=5, place=6, large=7)
    with pytest.raises(ZeroDivisionError) as caught:
        _fail_in(one, state)
    assert state() == before
    assert caught.value.__notes__[0].startswith("seed 9, at 0.000000 s")  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="a simulation runs once"):
        one.__enter__()


def _fail_in(simulation: Simulation, state: Callable[[], list[Any]]) -> None:
    with simulation:
        assert state()[:6] == [2, 6, 5, 7, 3, 4]
        assert runtime.program() is simulation.controller.program
        # this first wait installs the simulated program's SIGINT handler
        simulation.controller.program.wait(CreditWaiter(), 0.0)
        raise ZeroDivisionError


def test_simulation_ends_with_its_with_block() -> None:
    with Simulation() as simulation:
        _, actors = _mesh(1)
        waiting = actors.take.call_one(1)
    with pytest.raises(SimulationError, match="the simulation is over"):
        waiting.get()
    with pytest.raises(SimulationError, match="the simulation is over"):
        simulation.run(1.0)


# ---- frames


def test_messages_are_ordered_within_each_pair_only() -> None:
    with Simulation(5, Conditions(late=0.5)) as simulation:
        _, actors = _mesh(8)
        port, receiver = Channel.open()
        heard: list[tuple[int, int]] = []

        def listen() -> None:
            receiver.recv().add_done_callback(lambda future: (heard.append(future.result()), listen()))

        listen()
        actors.initialized.get()
        for i in range(20):
            for rank in range(8):
                actors.slice(gpus=rank).as_rank.send((rank, i), port=port)
        assert simulation.run(until=lambda: len(heard) == 160)
        for i in range(20):
            actors.take.broadcast(i)
        assert list(actors.give.call().get().values()) == [list(range(20))] * 8
    for rank in range(8):
        assert [i for r, i in heard if r == rank] == list(range(20))
    assert heard != sorted(heard, key=lambda answer: answer[1])  # the ranks did not run in turn


def test_payloads_are_copies() -> None:
    with Simulation() as simulation:
        _, actors = _mesh(2)
        buffer, few = bytearray(b"a" * 20_000), [1]
        actors.take.broadcast(memoryview(buffer))
        actors.take.broadcast(few)
        buffer[:] = b"b" * 20_000
        few.append(2)
        simulation.run()
        first, second = actors.give.call().get().values()
        assert first == second == [b"a" * 20_000, [1]]
        assert first is not second


class _Sink:
    """Receives the events of a process in place of its router."""

    def __init__(self, process: Any) -> None:
        self.events: list[Any] = []
        process.program.router.handle = self.events.extend

    @property
    def told(self) -> list[Any]:
        """Return the kind of each event, or the content of a frame."""
        return [event[8] if event[1] > 0 else Kind(event[1]).name for event in self.events]


def _pair(simulation: Simulation) -> tuple[Any, Any, _Sink, _Sink]:
    one, other = simulation.new_process("1" * 32, "one"), simulation.new_process("2" * 32, "other")
    one.begin()
    other.begin()
    return one, other, _Sink(one), _Sink(other)


def _send(process: Any, link: int, body: bytes) -> bool:
    sent: bool = process.links.send(link, int(Kind.CALL), 1, 0, 1, 0, 0, b"", body, None)
    return sent


def test_last_frames_of_a_process_precede_its_exit() -> None:
    with Simulation(0, QUIET) as simulation:
        one, _, _, heard = _pair(simulation)
        link = one.links.connect("2" * 32)
        for word in (b"famous", b"last", b"words"):
            _send(one, link, word)
        one.die(-9)
        assert _send(one, link, b"from beyond")  # a send by a dead process has no effect
        simulation.run()
        assert heard.told == ["MET", b"famous", b"last", b"words", "GONE"]
        assert heard.events[-1][2:] == ("killed by signal 9", False)


def test_backlog_of_a_dying_sender_is_lost_from_the_end() -> None:
    seen = set()
    for seed in range(40):
        with Simulation(seed, Conditions(kept_back=1.0)) as simulation:
            one, _, _, heard = _pair(simulation)
            link = one.links.connect("2" * 32)
            for i in range(3):
                _send(one, link, bytes([i]))
            one.die(-9)
            simulation.run()
            assert heard.told in [["MET", *[bytes([i]) for i in range(n)], "GONE"] for n in range(4)]
            seen.add(len(heard.told))
    assert seen == {2, 3, 4, 5}


def test_messages_to_dead_and_unknown_processes() -> None:
    with Simulation(0, QUIET) as simulation:
        one, other, heard, _ = _pair(simulation)
        link = one.links.connect("2" * 32)
        assert one.links.connect("2" * 32) == link
        assert one.links.connect("3" * 32) == -1
        _send(one, link, b"too late")
        other.die(0, orderly=True)
        assert one.links.connect("2" * 32) == link  # it has not noticed the end
        assert _send(one, link, b"to nobody")
        simulation.run()
        assert heard.told == ["MET", "GONE"]
        assert heard.events[-1][2:] == ("", True)
        assert one.links.connect("2" * 32) == -1
        with pytest.raises(IndexError):
            _send(one, -1, b"")


def test_both_may_connect_at_the_same_time() -> None:
    with Simulation(0, Conditions(crossing=1.0)) as simulation:
        one, other, heard, _ = _pair(simulation)
        mine, theirs = one.links.connect("2" * 32), other.links.connect("1" * 32)
        assert (mine, theirs) == (0, 1)
        _send(other, theirs, b"on the second")
        other.die(-9)
        simulation.run()
        assert sorted(map(str, heard.told)) == ["GONE", "GONE", "MET", "MET", "b'on the second'"]


def test_full_shared_memory() -> None:
    with Simulation(0, Conditions(no_room=0.5, most_inline=100)) as simulation:
        one, *_ = _pair(simulation)
        link = one.links.connect("2" * 32)
        assert all(_send(one, link, bytes(100)) for _ in range(50))
        assert 0 < sum(_send(one, link, bytes(101)) for _ in range(50)) < 50
        assert one.links.unread(link) > 5000
        simulation.run()
        assert one.links.unread(link) == 0
        one.links.drop(link)
        _send(one, link, b"dropped")
        assert one.links.unread(link) == 0


# ---- processes


def test_a_killed_process() -> None:
    with Simulation(2, QUIET) as simulation:
        procs, actors = _mesh(4)
        assert procs.initialized.get() is None
        waiting = actors.slice(gpus=2).take.call_one(1)
        simulation.kill(procs.slice(gpus=2), signal=11)
        started = simulation.now
        error = waiting.exception()
        assert isinstance(error, SupervisionError)
        assert (error.rank, error.signal, error.delivery) == (2, 11, "unknown")
        assert simulation.now - started < 0.1
        assert actors.failed_ranks == (2,)
        assert list(actors.without([2]).take.call(1).get().values()) == [0, 1, 2]
        simulation.run()
        (fault,) = simulation.faults
        assert fault.deaths[0].what == "killed by signal 11 (SIGSEGV)"
        process = simulation.processes_of(procs)[2]
        assert (process.alive, process.returncode, process.mesh, process.rank) == (False, -11, "workers", 2)
        assert repr(process) == f"<SimulatedProcess gpus 2 of workers (pid {process.pid}): {process.end}>"
        with pytest.raises(ValueError, match="the main program is the caller"):
            simulation.kill(simulation.controller)


def test_actor_that_kills_its_process_is_reported() -> None:
    with Simulation() as simulation:
        _, actors = _mesh(2)
        error = actors.slice(gpus=1).end.call_one().exception()
        assert isinstance(error, SupervisionError)
        assert error.signal == 9
        simulation.run()
        assert [process.returncode for process in simulation.processes] == [None, None, -9]


def test_restarts() -> None:
    with Simulation() as simulation:
        procs, actors = _mesh(2, restart=Restart(max_restarts=2, backoff=1.0))
        actors.take.call(1).get()
        simulation.kill(procs.slice(gpus=0))
        simulation.run(0.5)
        assert [process.rank for process in simulation.processes_of(procs)] == [1]  # the successor has not started yet
        simulation.run(2.0)
        assert actors.give.call().get().item(gpus=0) == []
        assert len(simulation.processes) == 4
        assert not simulation.faults


@pytest.mark.parametrize("most", [process_restarts.MAX_REPLACED_RANKS, 10])
def test_restart_of_all_is_reported_once_to_each(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each other process gets one report for all ranks. One report for each rank would be quadratic in the mesh's size.

    Killed processes get no report.
    """
    monkeypatch.setattr(process_restarts, "MAX_REPLACED_RANKS", most)
    told: dict[str, list[int]] = {}
    with Simulation(1, QUIET) as simulation:
        procs, actors = _mesh(24, restart=Restart("all", backoff=0.01))
        friends = this_host().spawn_procs({"gpus": 3}, name="friends").spawn("friends", Friend, actors)
        assert friends.ask.call().get().item(gpus=2) == list(range(24))
        router = simulation.controller.program.router
        tell = router.tell

        def telling(peer: Any, message: Any, *rest: Any) -> None:
            if isinstance(message, Replaced):
                told.setdefault(peer.token, []).extend(message.ranks)
                assert len(message.ranks) <= most
            tell(peer, message, *rest)

        monkeypatch.setattr(router, "tell", telling)
        before = {process.token for process in simulation.processes_of(procs)}
        simulation.kill(procs.slice(gpus=3))
        simulation.run(until=lambda: bool(told))
        assert told == {process.token: list(range(24)) for process in simulation.processes_of(friends)}
        simulation.run(1.0)
        assert not before & {process.token for process in simulation.processes_of(procs)}
        assert friends.ask.call().get().item(gpus=2) == list(range(24))
        assert not simulation.faults


def test_killed_process_ends_before_its_successor_starts() -> None:
    """Like a fork server, the simulator kills and starts processes in the order of its commands."""
    for seed in range(20):
        with Simulation(seed, Conditions(late=0.5, starting=0.0)) as simulation:
            procs, actors = _mesh(4, restart=Restart("all", max_restarts=9, backoff=0.0))

            def look(simulation: Simulation = simulation) -> None:
                there = [(p.mesh, p.rank) for p in simulation.processes if p.alive]
                assert len(there) == len(set(there)), "a rank and its successor run at the same time"

            simulation.on_step.append(look)
            for rank in range(4):
                actors.initialized.get()
                simulation.kill(procs.slice(gpus=rank))
                simulation.run(0.1)
            assert len(simulation.processes) == 1 + 5 * 4


@pytest.mark.parametrize("what", ["unstartable", "dies_at_start"])
def test_process_that_fails_to_start_is_reported(what: str) -> None:
    with Simulation(0, Conditions(**{what: 1.0})) as simulation:  # type: ignore[arg-type]
        procs, actors = _mesh(1)
        assert isinstance(actors.take.call_one(1).exception(), SupervisionError)
        assert procs.initialized.exception() is not None
        simulation.run()
        (fault,) = simulation.faults
        words = "it could not be started: Conditions.unstartable" if what == "unstartable" else "exited with status 1"
        assert fault.deaths[0].what == words


def test_process_killed_before_it_starts() -> None:
    with Simulation() as simulation:
        procs, _ = _mesh(1)
        simulation.kill(procs)
        simulation.run()
        assert "signal 9 was sent to it before it was started" in simulation.faults[0].deaths[0].what
        assert simulation.processes_of(procs)[0].returncode is None


def test_children_end_with_their_parent() -> None:
    with Simulation() as simulation:
        procs, parents = _mesh(1, Parent)
        assert parents.ask.call_one().get() == [0, 1]
        assert [process.label for process in simulation.processes[2:]] == ["gpus 0 of children", "gpus 1 of children"]
        simulation.kill(procs)
        simulation.run(0.1)
        assert not any(process.alive for process in simulation.processes[1:])


def test_stop_without_failure() -> None:
    with Simulation() as simulation:
        procs, parents = _mesh(2, Parent)
        parents.initialized.get()
        procs.stop().get()
        simulation.run()
        assert [process.returncode for process in simulation.processes] == [None, 0, 0, 0, 0, 0, 0]
        assert not simulation.faults


# ---- waits


def test_time_limits_are_of_simulated_time() -> None:
    with Simulation() as simulation:
        _, receiver = Channel.open()
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            receiver.recv().get(timeout=3600.0)
        assert simulation.now == 3600.0
        _, actors = _mesh(1)
        assert isinstance(actors.wait.call_one(7200.0).exception(), ActorError)
        assert simulation.now == pytest.approx(3 * 3600.0, abs=1.0)
        assert time.monotonic() - started < 60.0


def test_an_actor_may_wait_for_others() -> None:
    with Simulation(3) as simulation:
        _, actors = _mesh(4)
        asks = [actors.slice(gpus=i).ask.call_one(actors.slice(gpus=3)) for i in range(3)]
        assert [ask.get() for ask in asks] == [(0, 0), (0, 0), (0, 0)]
        assert sorted(map(str, actors.give.call().get().item(gpus=3))) == ["0", "0", "0"]
        assert not simulation.errors


def test_bootstrap_of_a_mesh_is_not_run() -> None:
    with Simulation():
        procs = this_host().spawn_procs({"gpus": 2}, bootstrap=lambda: 1 / 0)
        assert procs.initialized.get() is None


def test_a_wait_that_is_cancelled() -> None:
    with Simulation() as simulation:
        _, actors = _mesh(1)
        call = actors.wait.call_one(None)
        simulation.later(1.0, call.cancel)
        simulation.run()
        assert simulation.now == pytest.approx(1.0, abs=0.1)
        assert isinstance(call.exception(), CancelledError)
        assert actors.take.call_one(1).get() == 0  # the actor handles the next message


def test_process_that_dies_while_waiting() -> None:
    with Simulation() as simulation:
        procs, actors = _mesh(2)
        call = actors.slice(gpus=0).wait.call_one(None)
        simulation.later(1.0, lambda: simulation.kill(procs.slice(gpus=0)))
        assert isinstance(call.exception(), SupervisionError)
        assert actors.slice(gpus=1).take.call_one(1).get() == 0


def test_generators_that_wait_for_their_readers() -> None:
    with Simulation():
        _, actors = _mesh(2)
        assert actors.count.call(500).get().item(gpus=1) == list(range(500))


def test_deadlock_is_reported() -> None:
    with Simulation():
        _, actors = _mesh(2)
        asks = actors.slice(gpus=0).wait.call_one(None)
        with pytest.raises(SimulationError) as caught:
            asks.get()
    text = str(caught.value)
    assert "no event is scheduled, so no wait can end" in text
    assert "the main program waits for <Future waiting>" in text
    assert "gpus 0 of workers waits for <Future waiting>" in text


def test_a_callback_must_not_wait() -> None:
    with Simulation() as simulation:
        _, actors = _mesh(1)
        actors.take.call_one(1).add_done_callback(lambda _: _never().get())
        simulation.run()
        (text,) = simulation.errors
        assert "a callback runs on the thread that reads messages, and can't wait" in text


def _never() -> Any:
    _, receiver = Channel.open()
    return receiver.recv()


def test_async_actors_are_refused() -> None:
    with Simulation(), pytest.raises(TypeError, match="Later has `async def` endpoints: the simulator runs"):
        _mesh(1, Later)


# ---- inspection of a simulation


def test_run_and_step() -> None:
    with Simulation() as simulation:
        assert not simulation.step()
        _, actors = _mesh(2)
        steps: list[float] = []
        simulation.on_step.append(lambda: steps.append(simulation.now))
        assert not simulation.run(1e-9, until=lambda: actors.initialized.ready)
        assert simulation.now == 1e-9
        assert simulation.run(until=lambda: actors.initialized.ready)
        assert len(steps) > 10
        assert steps == sorted(steps)
        actors.take.broadcast(1)
        assert simulation.step()
        assert simulation.run()
        assert not simulation.step()


def test_error_of_an_invariant_check_ends_the_run() -> None:
    with Simulation() as simulation:
        _, actors = _mesh(2)
        actors.initialized.get()
        actors.slice(gpus=0).ask.call_one(actors.slice(gpus=1))

        def look() -> None:
            assert not simulation._waits, "while an actor waits"

        simulation.on_step.append(look)
        with pytest.raises(AssertionError, match="while an actor waits"):
            simulation.run()
        with pytest.raises(AssertionError, match="while an actor waits"):
            simulation.step()


def test_deaths_are_reported() -> None:
    with Simulation() as simulation:
        procs, actors = _mesh(2)
        dead: list[str] = []
        simulation.on_death.append(lambda process: dead.append(process.label))
        actors.initialized.get()
        simulation.kill(procs.slice(gpus=1))
        assert dead == ["gpus 1 of workers"]


def test_trace_names_messages_and_events() -> None:
    with Simulation(steps=400, direct=2, fanout=2) as simulation:
        procs, actors = _mesh(7)
        actors.take.call(1).get()
        actors.take.call(2).get()
        simulation.kill(procs.slice(gpus=0))
        simulation.run()
        trace = simulation.trace()
    for piece in (
        "MET",
        "Construct(actor=",
        "MULTICAST target=0",
        "multicast 1 of 7 combined",
        "REPLIES",
        "GONE killed by signal",
    ):
        assert piece in trace, piece


def test_conditions_can_be_drawn() -> None:
    drawn = {Conditions.draw(random.Random(seed)) for seed in range(50)}
    assert len(drawn) > 45
    assert {conditions.no_room for conditions in drawn} == {0.0, 0.3}


@pytest.mark.parametrize("name", sorted(m.name for m in pkgutil.iter_modules(_testing.__path__)))
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"monarch_backend._testing.{name}")).failed == 0


def test_the_example_of_the_package() -> None:
    ran = doctest.testmod(monarch_backend.testing)
    assert ran.failed == 0
    assert ran.attempted > 3
