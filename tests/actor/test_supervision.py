"""Failures of actors and of processes: which owner and which caller get them, and what continues.

Restarts are in test_restart.py, whole programs in test_program_lifecycle.py.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._actor.execution.message_queue import MessageQueue
from monarch_backend._actor.processes import stop as process_stop
from monarch_backend._actor.processes import stuck_readers
from monarch_backend._actor.runtime import program
from monarch_backend._core import platform
from monarch_backend._processes.spawner import Exited
from monarch_backend._transport.local import tuning
from monarch_backend.actor import (
    Accumulator,
    ActorError,
    ActorMesh,
    CancelledError,
    Channel,
    Future,
    MeshFailure,
    PeerGoneError,
    ProcMesh,
    Restart,
    SupervisionError,
    context,
    get_or_spawn_controller,
    this_host,
    this_proc,
)
from tests.actor.actors import stopped_processes, until
from tests.actor.failing_actors import (
    AsyncSupervisor,
    AsyncVictim,
    FailsInConstructor,
    Owner,
    SlowSupervisor,
    SlowToBuild,
    Supervisor,
    Victim,
    lines,
)
from tests.actor.support import PATIENCE, Faults, begun, gate
from tests.processes.spawning import Watch

HOST = socket.gethostname()
DEATHS = {
    "SIGKILL": -signal.SIGKILL,
    "SIGTERM": -signal.SIGTERM,
    "segfault": -signal.SIGSEGV,
    "abort": -signal.SIGABRT,
    "0": 0,
    "3": 3,
}
SIGNAL_SEEN_BY_OTHERS = {signal.SIGKILL} if platform.HAS_PROC else {signal.SIGKILL, None}
"""What a process that is not the owner learns of a kill. On macOS it sees the end of a connection only."""


@pytest.fixture
def pair(faults: Faults) -> Iterator[ProcMesh]:
    """Yield two processes for one test, which may kill them."""
    with this_host().spawn_procs({"gpus": 2}, name="pair") as procs:
        yield procs


@pytest.fixture
def single(faults: Faults) -> Iterator[ProcMesh]:
    """Yield one process for one test, which may kill it."""
    with this_host().spawn_procs({"gpus": 1}, name="single") as procs:
        yield procs


@pytest.fixture(scope="module")
def lasting() -> Iterator[ProcMesh]:
    """Yield two processes for tests in which only actors fail."""
    with this_host().spawn_procs({"gpus": 2}, name="lasting") as procs:
        procs.initialized.get(PATIENCE)
        yield procs


def failed(future: Future[Any]) -> SupervisionError:
    """Return the error of a call to a failed actor."""
    error = future.exception(PATIENCE)
    assert isinstance(error, SupervisionError), error
    return error


def wait_for_failures(owner: ActorMesh, count: int) -> list[tuple[str, tuple[int, ...], bool]]:
    """Wait until a `Supervisor` has received this number of failures.

    It may learn of a death later than this process.
    """
    until(lambda: len(owner.received_failures.call_one().get(PATIENCE)) >= count, f"{count} failures told")
    return list(owner.received_failures.call_one().get(PATIENCE))


# A process dies


@pytest.mark.parametrize("how", DEATHS)
def test_death_of_a_process_fails_all_waits_with_its_cause(
    how: str, pair: ProcMesh, faults: Faults, tmp_path: Path
) -> None:
    victims = pair.spawn("victims", Victim)
    pid = victims.slice(gpus=1).pid.call_one().get(PATIENCE)
    one = victims.slice(gpus=1)
    with gate(tmp_path) as (name, open_gate):
        running = begun(one.wait.call_one, name)
        waiting: dict[str, Future[Any]] = {
            "end_process": one.end_process.call_one(how),
            "echo": one.echo.call_one(1),
            "pid": victims.pid.call(),
            "note": one.note.choose(1),
            "all_notes": Accumulator(victims.all_notes, [], lambda total, more: total + more).accumulate(),
            "answers_never": one.answers_never.call_one(),
        }
        values = one.count.call_one(3)
        both = victims.echo.stream("here")
        open_gate()
        assert running.get(PATIENCE) == "waited"
    errors = {endpoint: failed(future) for endpoint, future in waiting.items()}
    with pytest.raises(SupervisionError) as stopped:
        next(values)
    errors["count"] = stopped.value
    answers = list(both)
    assert [future.get() for future in answers if future.exception() is None] == ["here"]
    errors["echo of both"] = failed(next(future for future in answers if future.exception()))
    for endpoint, error in errors.items():
        assert (error.rank, error.host, error.pid, error.delivery) == (1, HOST, pid, "unknown")
        assert error.signal == (-DEATHS[how] if DEATHS[how] < 0 else None)
        assert error.failure is not None and error.failure.deaths[0].returncode == DEATHS[how]
        assert error.endpoint == f"victims.{endpoint.split()[0]}"
    text = str(errors["echo"])
    number = abs(DEATHS[how])
    ended = f"killed by signal {number} ({signal.Signals(number).name})" if DEATHS[how] < 0 else f"status {number}"
    for part in ("victims.echo", "it may have run", "gpus 1", HOST, str(pid), ended):
        assert part in text
    failure = faults.next()
    assert (failure.mesh_name, failure.ranks) == ("pair", (1,))
    assert isinstance(failure.mesh, ProcMesh) and failure.mesh.sizes == {"gpus": 2}


def test_calls_to_a_dead_process_fail_and_others_continue(pair: ProcMesh, faults: Faults) -> None:
    victims = pair.spawn("victims", Victim)
    failed(victims.slice(gpus=1).end_process.call_one("SIGKILL"))
    faults.next()
    assert victims.failed_ranks == (1,)
    dead, alive = victims.slice(gpus=1), victims.without(victims.failed_ranks)
    for future in (dead.echo.call_one(1), victims.echo.call(1), dead.echo.choose(1), next(dead.echo.stream(1))):
        error = failed(future)
        assert (error.delivery, error.rank, error.signal) == ("not sent", 1, signal.SIGKILL)
        assert "it was not sent" in str(error)
    with pytest.raises(SupervisionError, match="not sent"):
        next(dead.count.call_one(3))
    for mesh in (dead, victims):
        with pytest.raises(SupervisionError, match=r"victims\.note .* not sent"):
            mesh.note.broadcast("nobody hears it")
        with pytest.raises(SupervisionError, match=r"not sent"):
            mesh.note.send(("nobody hears it",))
    assert alive.sizes == {"gpus": 1} and alive.failed_ranks == ()
    assert list(alive.echo.call("on").get(PATIENCE).values()) == ["on"]
    assert alive.all_notes.call_one().get(PATIENCE) == [], "a broadcast that raised was sent to some"
    assert [victims.echo.choose(i).get(PATIENCE) for i in range(4)] == [0, 1, 2, 3], "choose takes one that lives"
    more = pair.slice(gpus=0).spawn("more", Victim)
    assert more.echo.call_one(5).get(PATIENCE) == 5


def test_actors_spawned_on_a_dead_process_fail(pair: ProcMesh, faults: Faults) -> None:
    pair.initialized.get(PATIENCE)
    first = pair.spawn("first", Victim)
    failed(first.slice(gpus=1).end_process.call_one("SIGKILL"))
    faults.next()
    late = pair.spawn("late", Victim)
    failure = faults.next()
    assert (failure.mesh_name, failure.ranks) == ("late", (1,))
    assert isinstance(late.initialized.exception(PATIENCE), MeshFailure)
    assert failed(late.slice(gpus=1).echo.call_one(1)).signal == signal.SIGKILL
    assert late.slice(gpus=0).echo.call_one(1).get(PATIENCE) == 1
    later = pair.slice(gpus=1).spawn("later", Victim)
    failure = faults.next()
    assert (failure.mesh_name, failure.ranks) == ("later", (0,)), "ranks of the mesh that it names"
    assert later.failed_ranks == (0,)
    assert isinstance(pair.initialized.exception(PATIENCE), MeshFailure)


def test_generator_values_arrive_until_its_process_dies(single: ProcMesh, faults: Faults) -> None:
    """The stream yields all values that have arrived, then the error. No value is repeated or missing."""
    victim = single.spawn("victim", Victim)
    pid = victim.pid.call_one().get(PATIENCE)
    values = victim.count.call_one(10**9)
    taken = [next(values) for _ in range(100)]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SupervisionError) as told:
        taken.extend(values)
    assert len(taken) >= 100 and taken == list(range(len(taken)))
    assert (told.value.pid, told.value.delivery) == (pid, "unknown")
    assert list(values) == []
    faults.next()


def test_generator_is_closed_when_its_reader_dies(pair: ProcMesh, faults: Faults, tmp_path: Path) -> None:
    log = tmp_path / "log"
    victims = pair.spawn("victims", Victim, str(log))
    reader, counter = victims.slice(gpus=0), victims.slice(gpus=1)
    pid = reader.pid.call_one().get(PATIENCE)
    with gate(tmp_path) as (name, _):
        reading = begun(lambda port: reader.take_some.call_one(counter, port, name))
        os.kill(pid, signal.SIGKILL)
        failed(reading)
    faults.next()
    until(lambda: "victim: counted" in lines(log), "the generator is closed")
    assert counter.echo.call_one(1).get(PATIENCE) == 1


@pytest.mark.parametrize("verb", ["call_one", "broadcast", "call"])
def test_blocked_sender_is_released_by_the_death_of_the_receiver(verb: str, single: ProcMesh, faults: Faults) -> None:
    """The receiver is stopped, so the sender must wait. Then the receiver is killed."""
    victim = single.spawn("victim", Victim)
    pid = victim.pid.call_one().get(PATIENCE)
    os.kill(pid, signal.SIGSTOP)
    sent, ended = [], threading.Event()

    def send_until_it_fails() -> None:
        for _ in range(100_000):
            try:
                future = getattr(victim.echo, verb)(b"x" * 100_000)
                sent.append(future)
                if future is not None and future.done():
                    break
            except (SupervisionError, PeerGoneError):
                break
        ended.set()

    sender = threading.Thread(target=send_until_it_fails)
    sender.start()
    peer = victim._core.peer(0)
    until(lambda: peer.credit == 0 and peer.credit_waiter is not None, "the sender waits")
    assert not ended.is_set()
    os.kill(pid, signal.SIGKILL)
    sender.join(PATIENCE)
    assert not sender.is_alive()
    if verb != "broadcast":
        for future in sent:
            assert failed(future).pid == pid
    faults.next()


def test_send_to_a_port_of_a_dead_process_fails(pair: ProcMesh, faults: Faults) -> None:
    victims = pair.spawn("victims", Victim)
    port = victims.slice(gpus=1).open_port.call_one().get(PATIENCE)
    sender = victims.slice(gpus=0)
    sender.send_to.call_one(port, 1).get(PATIENCE)
    pid = victims.slice(gpus=1).pid.call_one().get(PATIENCE)
    failed(victims.slice(gpus=1).end_process.call_one("SIGKILL"))
    faults.next()
    with pytest.raises(PeerGoneError, match=str(pid)):
        port.send(2)

    def refused() -> bool:  # the other process learns of the death by its own link
        error = sender.send_to.call_one(port, 3).exception(PATIENCE)
        return isinstance(error, ActorError) and isinstance(error.__cause__, PeerGoneError)

    until(refused, "the sender is told")


def test_death_is_detected_at_once(faults: Faults) -> None:
    times: list[float] = []
    # repeat, since the machine may be busy: one fast detection is enough
    while not times or (min(times) >= 0.1 and len(times) < 40):
        with this_host().spawn_procs({"gpus": 4}) as procs:
            victims = procs.spawn("victims", Victim)
            pids = [victims.slice(gpus=i).pid.call_one().get(PATIENCE) for i in range(4)]
            for rank, pid in enumerate(pids):
                future = victims.slice(gpus=rank).answers_never.call_one()
                start = time.monotonic()
                os.kill(pid, signal.SIGKILL)
                failed(future)
                times.append(time.monotonic() - start)
                assert faults.next().deaths[0].pid == pid
    assert min(times) < 0.1, f"from SIGKILL to the error: {times}"


def test_death_during_startup_fails_the_mesh(faults: Faults) -> None:
    """The process is killed before it connects and before its actor is built."""

    def bootstrap() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with this_host().spawn_procs({"gpus": 1}, bootstrap=bootstrap, name="fails_at_start") as procs:
        victim = procs.spawn("victim", Victim)
        future = victim.echo.call_one(1)
        error = failed(future)
        assert (error.signal, error.rank, error.delivery) == (signal.SIGKILL, 0, "not sent")
        assert isinstance(procs.initialized.exception(PATIENCE), MeshFailure)
        assert isinstance(victim.initialized.exception(PATIENCE), MeshFailure)
        assert "SIGKILL" in faults.next().report()


def test_process_that_reads_nothing_is_logged_and_not_killed(
    single: ProcMesh, faults: Faults, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The process is stopped. C code that keeps the interpreter's lock looks the same."""
    monkeypatch.setattr(stuck_readers, "STUCK_READER_TIMEOUT_S", 0.1)
    victim = single.spawn("victim", Victim)
    pid = victim.pid.call_one().get(PATIENCE)
    with stopped_processes(pid):
        future = victim.echo.call_one("after all")
        until(lambda: "has not read its messages" in caplog.text, "the report")
        assert f"gpus 0 of single (pid {pid})" in caplog.text and "not killed" in caplog.text
        with pytest.raises(TimeoutError):
            future.get(0.05)
    assert future.get(PATIENCE) == "after all"


def test_failing_bootstrap_is_a_death_with_its_output(faults: Faults) -> None:
    def bootstrap() -> None:
        raise RuntimeError("no accelerator here")

    with this_host().spawn_procs({"gpus": 1}, bootstrap=bootstrap) as procs:
        assert isinstance(procs.initialized.exception(PATIENCE), MeshFailure)
        failure = faults.next()
    assert failure.deaths[0].returncode == 1
    report = failure.report()
    assert "RuntimeError: no accelerator here" in report
    assert re.search(rf'File "{re.escape(__file__)}", line \d+, in bootstrap', report)


def test_out_of_memory_kill_is_reported_as_such(
    single: ProcMesh, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This tests the report. tests/processes/test_resource_limits.py tests the detection."""
    spawner = program().owner.starter.spawner
    told = spawner._on_event

    def starved(event: Any) -> None:
        told(replace_exited(event) if isinstance(event, Exited) else event)

    def replace_exited(event: Exited) -> Any:
        import msgspec

        return msgspec.structs.replace(event, oom_killed=True)

    monkeypatch.setattr(spawner, "_on_event", starved)
    victim = single.spawn("victim", Victim)
    future = victim.echo.call_one(1)
    failed(victim.end_process.call_one("SIGKILL"))
    assert future.get(PATIENCE) == 1
    failure = faults.next()
    assert failure.deaths[0].what == "killed by signal 9 (SIGKILL): out of memory"
    assert "out of memory" in str(failed(victim.echo.call_one(2)))


def test_death_in_a_multicast_tree_fails_calls_below_it(
    faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages to this mesh go down a tree. Rank 0 relays them to ranks 8 to 15."""
    monkeypatch.setattr(tuning, "MAX_DIRECT_RECEIVERS", 4)
    assert tuning.TREE_FANOUT == 8
    count = 20
    with this_host().spawn_procs({"gpus": count}) as procs:
        victims = procs.spawn("victims", Victim)
        pids = list(victims.pid.call().get(PATIENCE).values())
        for kill in (0, 8):
            alive = [rank for rank in range(count) if rank not in victims.failed_ranks]
            rest = victims.without(victims.failed_ranks)
            with gate(tmp_path) as (name, open_gate):
                blocked = begun(victims.slice(gpus=kill).wait.call_one, name)
                stream = rest.echo.stream(kill)
                os.kill(pids[kill], signal.SIGKILL)
                failed(blocked)
                open_gate()
            answers = list(stream)
            good = [future for future in answers if future.exception(PATIENCE) is None]
            assert len(answers) == len(alive)
            assert len(good) == len(alive) - 1 and all(future.get() == kill for future in good)
            assert faults.next().ranks == (kill,)
        rest = victims.without(victims.failed_ranks)
        assert len(rest) == count - 2
        rest.note.broadcast("all of us")
        assert list(rest.all_notes.call().get(PATIENCE).values()) == [["all of us"]] * (count - 2)


def test_death_reaches_actors_of_the_main_program(single: ProcMesh, faults: Faults, tmp_path: Path) -> None:
    """The caller is an actor of the main program, which owns the dead process."""
    victim = single.spawn("victim", Victim)
    is_cause = this_proc().spawn("is_cause", Victim)
    pid = victim.pid.call_one().get(PATIENCE)
    with gate(tmp_path) as (name, _):
        future = begun(lambda port: is_cause.wait_for_other.call_one(victim, port, name))
        os.kill(pid, signal.SIGKILL)
        error = future.exception(PATIENCE)
    assert isinstance(error, ActorError) and isinstance(error.__cause__, SupervisionError)
    assert (error.__cause__.pid, error.__cause__.signal) == (pid, signal.SIGKILL)
    assert faults.next().mesh_name == "single"
    is_cause.stop().get(PATIENCE)


def test_death_reaches_third_parties_in_other_processes(pair: ProcMesh, faults: Faults, tmp_path: Path) -> None:
    victims = pair.spawn("victims", Victim)
    is_cause, victim = victims.slice(gpus=0), victims.slice(gpus=1)
    pid = victim.pid.call_one().get(PATIENCE)
    with gate(tmp_path) as (name, _):
        future = begun(lambda port: is_cause.wait_for_other.call_one(victim, port, name))
        os.kill(pid, signal.SIGKILL)
        error = future.exception(PATIENCE)
    assert isinstance(error, ActorError) and isinstance(error.__cause__, SupervisionError)
    cause = error.__cause__
    assert (cause.rank, cause.pid, cause.host) == (1, pid, HOST)
    assert cause.signal in SIGNAL_SEEN_BY_OTHERS
    assert cause.delivery == "unknown"
    faults.next()
    again = is_cause.wait_for_other.call_one(victim, Channel.open()[0], "unused").exception(PATIENCE)
    assert isinstance(again, ActorError) and isinstance(again.__cause__, SupervisionError)
    assert again.__cause__.delivery == "not sent"


@pytest.mark.parametrize("dies", [False, True])
def test_third_party_waits_for_a_stopped_process(dies: bool, pair: ProcMesh, faults: Faults, tmp_path: Path) -> None:
    """The caller has not contacted the process before. A process that does not answer is not taken for dead."""
    victims = pair.spawn("victims", Victim)
    is_cause, victim = victims.slice(gpus=0), victims.slice(gpus=1)
    pid = victim.pid.call_one().get(PATIENCE)
    with gate(tmp_path) as (name, open_gate):
        with stopped_processes(pid):
            future = begun(lambda port: is_cause.wait_for_other.call_one(victim, port, name))
            if dies:
                os.kill(pid, signal.SIGKILL)
                error = future.exception(PATIENCE)
                assert isinstance(error, ActorError) and isinstance(error.__cause__, SupervisionError)
                assert error.__cause__.rank == 1
                assert error.__cause__.signal in SIGNAL_SEEN_BY_OTHERS
                faults.next()
                return
        open_gate()
        assert future.get(PATIENCE) == "waited"


# An endpoint raises


class NeedsTwo(Exception):
    """An exception whose ``args`` are not the arguments of its constructor."""

    def __init__(self, what: str, number: int) -> None:
        super().__init__(f"{what} number {number}")
        self.what, self.number = what, number


class HoldsLock(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class BadText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even that")


class RaisesInText(Exception):
    """Error whose text raises another one in the process of the actor: the first time, or always."""

    def __init__(self, kind: type[BaseException], is_always: bool, caller: int) -> None:
        super().__init__(kind, is_always, caller)
        self.kind, self.is_always, self.caller = kind, is_always, caller
        self.times = 0

    def __str__(self) -> str:
        self.times += 1
        if os.getpid() != self.caller and (self.is_always or self.times == 1):
            raise self.kind("in the text")
        return "readable"


def test_exception_reaches_the_caller_with_cause_and_traceback(lasting: ProcMesh) -> None:
    victims = lasting.spawn("victims", Victim)
    one = victims.slice(gpus=1)
    one.note.broadcast("before")
    error = one.raises.call_one(KeyError("rank")).exception(PATIENCE)
    assert isinstance(error, ActorError)
    assert isinstance(error.__cause__, KeyError) and error.__cause__.args == ("rank",)
    assert (error.actor, error.endpoint, error.rank, error.delivery) == ("victims", "raises", 0, "ran")
    pid = one.pid.call_one().get(PATIENCE)
    for part in (
        "victims.raises",
        "gpus 1",
        HOST,
        f"pid {pid}",
        "KeyError: 'rank'",
        "raise error",
        "failing_actors.py",
    ):
        assert part in str(error)
    assert "monarch_backend/actor" not in str(error), "only the user's frames"
    assert one.all_notes.call_one().get(PATIENCE) == ["before"], "it lives on, as it was"
    many = victims.raises.call(ValueError("of all")).exception(PATIENCE)
    assert isinstance(many, ActorError) and isinstance(many.__cause__, ValueError)
    streamed = list(victims.raises.stream(ValueError("of each")))
    assert sorted(future.exception().rank for future in streamed) == [0, 1]
    victims.stop().get(PATIENCE)


@pytest.mark.parametrize("kind", [Victim, AsyncVictim])
def test_unpicklable_exception_reaches_the_caller(kind: type, lasting: ProcMesh) -> None:
    class Local(ValueError):
        pass

    class LocksItself(RuntimeError):
        def __reduce__(self) -> Any:
            raise TypeError("no way")

    def raising(make: Callable[[], BaseException]) -> Any:
        class Raiser(kind):  # type: ignore[misc, valid-type]
            def plain(self) -> None:
                raise make()

        return Raiser

    from monarch_backend.actor import as_endpoint

    for make, text in (
        (lambda: Local("a local class"), "Local: a local class"),
        (lambda: NeedsTwo("ticket", 7), "NeedsTwo: ticket number 7"),
        (lambda: HoldsLock("held"), "HoldsLock: held"),
        (lambda: LocksItself("for ever"), "LocksItself: for ever"),
        (lambda: BadText("x"), "BadText"),
    ):
        actors = lasting.slice(gpus=0).spawn("raisers", raising(make))
        error = as_endpoint(actors.plain).call_one().exception(PATIENCE)
        assert isinstance(error, ActorError) and text in str(error)
        assert re.search(rf'File "{re.escape(__file__)}", line \d+, in plain', str(error)), "also of a class by value"
        assert type(error.__cause__).__name__ == text.split(":")[0]
        assert actors.echo.call_one(1).get(PATIENCE) == 1
        actors.stop().get(PATIENCE)


def test_causes_and_exception_groups_reach_the_caller(lasting: ProcMesh) -> None:
    one = lasting.spawn("victims", Victim).slice(gpus=0)
    error = one.raises_from.call_one(NeedsTwo, ("outer", 1)).exception(PATIENCE)
    assert isinstance(error.__cause__, NeedsTwo) and error.__cause__.number == 1
    assert isinstance(error.__cause__.__cause__, FileNotFoundError)


def test_exceptions_with_special_meaning_are_plain_errors_of_the_call(lasting: ProcMesh) -> None:
    """No such exception is taken for the end of a generator, a timeout of the call or the actor's death."""
    one = lasting.spawn("victims", Victim).slice(gpus=0)
    other = lasting.spawn("others", AsyncVictim).slice(gpus=0)
    for error in (StopIteration(3), TimeoutError("its own"), MemoryError(), ConnectionError("lost")):
        for mesh in (one, other):
            raised = mesh.raises.call_one(error).exception(PATIENCE)
            assert isinstance(raised, ActorError) and type(error).__name__ in str(raised)
            assert mesh.echo.call_one(1).get(PATIENCE) == 1
    raised = one.recurse.call_one().exception(PATIENCE)
    assert isinstance(raised.__cause__, RecursionError) and len(str(raised)) < 100_000
    assert one.echo.call_one(1).get(PATIENCE) == 1


@pytest.mark.parametrize("actor", [Victim, AsyncVictim])
@pytest.mark.parametrize(("kind", "is_always"), [(SystemExit, True), (CancelledError, False)])
def test_error_whose_text_cannot_be_read_reaches_the_caller(
    lasting: ProcMesh, actor: Any, kind: type[BaseException], is_always: bool
) -> None:
    """An interruption, too, can arrive while the text is made."""
    one = lasting.slice(gpus=0).spawn("victims", actor)
    error = one.raises.call_one(RaisesInText(kind, is_always, os.getpid())).exception(PATIENCE)
    assert isinstance(error, ActorError) and "RaisesInText: readable" in str(error)
    assert one.echo.call_one(1).get(PATIENCE) == 1


def test_error_through_two_actors_names_both(lasting: ProcMesh) -> None:
    class Relay(Victim):
        def plain(self, other: ActorMesh) -> None:
            other.raises.call_one(ValueError("far away")).get()

    from monarch_backend.actor import as_endpoint

    victims = lasting.spawn("victims", Victim)
    relay = lasting.slice(gpus=0).spawn("relay", Relay)
    error = as_endpoint(relay.plain).call_one(victims.slice(gpus=1)).exception(PATIENCE)
    assert isinstance(error, ActorError) and isinstance(error.__cause__, ActorError)
    assert isinstance(error.__cause__.__cause__, ValueError)
    assert (error.actor, error.__cause__.actor) == ("relay", "victims")
    assert "relay.plain" in str(error) and "victims.raises" in str(error) and "far away" in str(error)


# An actor dies


@pytest.mark.parametrize("kind", [Victim, AsyncVictim])
def test_exception_in_a_broadcast_ends_the_actor_not_its_process(kind: type, lasting: ProcMesh, faults: Faults) -> None:
    doomed, others = lasting.spawn("doomed", kind), lasting.spawn("others", Victim)
    doomed.slice(gpus=1).raises.broadcast(ValueError("nobody waits for this"))
    failure = faults.next()
    assert (failure.mesh_name, failure.ranks) == ("doomed", (1,))
    assert isinstance(failure.mesh, ActorMesh)
    pid = others.slice(gpus=1).pid.call_one().get(PATIENCE)
    death = failure.deaths[0]
    assert (death.pid, death.signal, death.returncode, death.host) == (pid, None, None, HOST)
    assert "ValueError: nobody waits for this" in death.what and "ValueError: nobody waits" in failure.report()
    assert isinstance(failure.__cause__, ValueError)
    error = failed(doomed.slice(gpus=1).echo.call_one(1))
    assert (error.delivery, error.rank, error.pid) == ("not sent", 1, pid)
    assert isinstance(error.__cause__, ValueError)
    assert doomed.failed_ranks == (1,)
    assert doomed.slice(gpus=0).echo.call_one(2).get(PATIENCE) == 2
    assert len(others.echo.call(3).get(PATIENCE)) == 2


@pytest.mark.parametrize("kind", [Victim, AsyncVictim])
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit("odd")], ids=lambda e: type(e).__name__
)
def test_base_exception_in_a_call_ends_the_actor(
    error: BaseException, kind: type, lasting: ProcMesh, faults: Faults
) -> None:
    doomed = lasting.spawn("doomed", kind).slice(gpus=1)
    other = lasting.spawn("other", Victim).slice(gpus=1)
    running, behind = doomed.raises.call_one(error), doomed.echo.call_one(1)
    assert failed(running).delivery == "unknown" and "doomed.raises" in str(failed(running))
    assert failed(behind).delivery == "not sent"
    failure = faults.next()
    assert failure.ranks == (1,) and type(error).__name__ in failure.report()
    assert type(failure.__cause__) is type(error)
    assert other.echo.call_one(1).get(PATIENCE) == 1


def test_sys_exit_in_an_endpoint_ends_the_actor(lasting: ProcMesh, faults: Faults) -> None:
    doomed = lasting.slice(gpus=0).spawn("doomed", Victim)
    failed(doomed.exits.call_one(5))
    assert "SystemExit: 5" in faults.next().report()
    assert lasting.spawn("next", Victim).slice(gpus=0).echo.call_one(1).get(PATIENCE) == 1


def test_exception_in_an_explicit_port_endpoint_ends_the_actor(lasting: ProcMesh, faults: Faults) -> None:
    doomed = lasting.slice(gpus=0).spawn("doomed", Victim)
    error = failed(doomed.answers_by_raising.call_one())
    assert isinstance(error.__cause__, ValueError)
    assert "instead of an answer" in faults.next().report()


def test_message_during_the_death_of_an_actor_fails(faults: Faults) -> None:
    """This includes a message that is queued after the dying actor has read its queue for the last time."""
    victim = this_proc().spawn("victim", Victim)
    assert victim.echo.call_one(1).get(PATIENCE) == 1
    runner = program().runners[victim._core.actor]

    class Queue(MessageQueue):
        def append(self, item: Any) -> None:
            if runner.failure is None:
                runner.die(ValueError("meanwhile"))
            super().append(item)

    runner.inbox = Queue(program())
    assert failed(victim.echo.call_one(2)).delivery == "not sent"
    runner._wake()
    assert "meanwhile" in faults.next().report()


def test_cancelled_error_raised_by_an_endpoint_is_a_reply(lasting: ProcMesh, faults: Faults) -> None:
    """The caller has not cancelled the call. It must end with an error, and not as cancelled."""
    actors = lasting.slice(gpus=0).spawn("actors", AsyncVictim)
    error = actors.cancels_itself.call_one().exception(PATIENCE)
    assert isinstance(error, (ActorError, SupervisionError)) and "CancelledError" in str(error)
    if isinstance(error, SupervisionError):
        faults.next()
    else:
        assert actors.echo.call_one(1).get(PATIENCE) == 1


def test_concurrent_calls_of_a_failing_async_actor_end(lasting: ProcMesh, faults: Faults) -> None:
    actors = lasting.slice(gpus=0).spawn("actors", AsyncVictim)
    waiting = [begun(actors.wait.call_one) for _ in range(3)]
    actors.raises.broadcast(ValueError("all of it"))
    for future in waiting:
        assert failed(future).delivery == "unknown"
    faults.next()


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
def test_death_of_the_process_of_an_async_actor_fails_its_calls(how: str, single: ProcMesh, faults: Faults) -> None:
    actors = single.spawn("actors", AsyncVictim)
    waiting = [begun(actors.wait.call_one) for _ in range(2)]

    async def both() -> list[Any]:
        return await asyncio.gather(*waiting, actors.end_process.call_one(how), return_exceptions=True)

    for error in asyncio.run(asyncio.wait_for(both(), PATIENCE)):
        assert isinstance(error, SupervisionError) and error.signal == signal.Signals[how]
    faults.next()


def test_failing_constructor_fails_the_mesh(lasting: ProcMesh, faults: Faults) -> None:
    mesh = lasting.spawn("fails_at_start", FailsInConstructor, ValueError("not today"), (1,))
    future = mesh.slice(gpus=1).echo.call_one(1)
    with pytest.raises(MeshFailure, match="ValueError: not today") as told:
        mesh.initialized.get(PATIENCE)
    assert told.value.ranks == (1,)
    failure = faults.next()
    assert (failure.mesh_name, failure.ranks) == ("fails_at_start", (1,))
    assert isinstance(failure.__cause__, ValueError)
    assert "root cause: ValueError: not today" in failure.report()
    error = failed(future)
    assert (error.delivery, error.rank) == ("not sent", 1) and "not today" in str(error)
    assert mesh.slice(gpus=0).echo.call_one(2).get(PATIENCE) == 2, "the other rank is built"
    faults.none()


@pytest.mark.parametrize("error", [SystemExit(2), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_sys_exit_in_a_constructor_fails_the_mesh(error: BaseException, lasting: ProcMesh, faults: Faults) -> None:
    mesh = lasting.slice(gpus=0).spawn("fails_at_start", FailsInConstructor, error, (0,))
    assert type(error).__name__ in str(mesh.initialized.exception(PATIENCE))
    assert faults.next().ranks == (0,)
    assert lasting.spawn("next", Victim).slice(gpus=0).echo.call_one(1).get(PATIENCE) == 1


# Supervision


@pytest.mark.parametrize("kind", [Supervisor, SlowSupervisor])
def test_handled_failure_leaves_other_actors_running(kind: type, single: ProcMesh, faults: Faults) -> None:
    owner = single.spawn("owner", kind, True)
    nested = owner.spawn.call_one().get(PATIENCE)
    failed(nested.slice(nested=1).end_process.call_one("SIGKILL"))
    assert wait_for_failures(owner, 1) == [("nested-procs", (1,), True)]
    assert owner.go_on.call_one("on").get(PATIENCE) == ["on"]
    nested.slice(nested=0).raises.broadcast(ValueError("now an actor"))
    failed(nested.slice(nested=0).echo.call_one(1))
    assert wait_for_failures(owner, 2)[1:] == [("nested", (0,), True)]
    again = owner.spawn.call_one().get(PATIENCE)
    assert len(again.echo.call(1).get(PATIENCE)) == 2, "the owner can begin again"
    here = owner.spawn_here.call_one().get(PATIENCE)
    here.raises.broadcast(ValueError("in the owner's own process"))
    assert wait_for_failures(owner, 3)[2:] == [("nested", (0,), True)]
    faults.none()


@pytest.mark.parametrize("kind", [Owner, Supervisor, SlowSupervisor])
def test_unhandled_failure_goes_to_the_next_owner(kind: type, single: ProcMesh, faults: Faults) -> None:
    owner = single.spawn("owner", kind, *(() if kind is Owner else (False,)))
    nested = owner.spawn.call_one().get(PATIENCE)
    pids = nested.pid.call().get(PATIENCE)
    with Watch({str(rank): pid for rank, pid in enumerate(pids.values())}) as watch:
        failed(nested.slice(nested=1).end_process.call_one("SIGABRT"))
        failure = faults.next()
        assert watch.left_after(PATIENCE) == [], "what it owns ends with it"
    assert (failure.mesh_name, failure.ranks) == ("owner", (0,))
    cause = failure.__cause__
    assert isinstance(cause, MeshFailure)
    assert (cause.mesh_name, cause.ranks, cause.deaths[0].signal) == ("nested-procs", (1,), signal.SIGABRT)
    report = failure.report().splitlines()
    assert report[0] == "root cause: mesh 'nested-procs' lost 1 of its ranks"
    assert "nested 1" in report[1] and "SIGABRT" in report[1] and str(cause.deaths[0].pid) in report[1]
    assert any(line == "therefore: mesh 'owner' lost 1 of its ranks" for line in report)
    error = failed(owner.echo.call_one(1))
    assert error.delivery == "not sent" and isinstance(error.__cause__, MeshFailure)


@pytest.mark.parametrize("kind", [Supervisor, SlowSupervisor])
def test_supervisor_that_raises_is_a_second_failure(kind: type, single: ProcMesh, faults: Faults) -> None:
    owner = single.spawn("owner", kind, ZeroDivisionError("in the handler"))
    nested = owner.spawn.call_one(1).get(PATIENCE)
    failed(nested.end_process.call_one("SIGKILL"))
    failure = faults.next()
    assert failure.mesh_name == "owner"
    assert isinstance(failure.__cause__, ZeroDivisionError)
    assert isinstance(failure.__cause__.__cause__, MeshFailure)
    report = failure.report()
    positions = [report.index(part) for part in ("'nested-procs' lost", "in the handler", "'owner' lost")]
    assert positions == sorted(positions) and report.startswith("root cause: mesh 'nested-procs'")


@pytest.mark.parametrize("answer", [True, False, ZeroDivisionError("in the handler")], ids=str)
def test_async_supervisor_runs_during_a_message(answer: Any, single: ProcMesh, faults: Faults) -> None:
    owner = single.spawn("owner", AsyncSupervisor, answer)
    nested = owner.spawn.call_one().get(PATIENCE)
    waiting = begun(owner.wait_until_asked.call_one)
    failed(nested.end_process.call_one("SIGKILL"))
    if answer is True:
        assert waiting.get(PATIENCE) == ["nested-procs"]
        assert owner.echo.call_one(1).get(PATIENCE) == 1
        return
    assert waiting.exception(PATIENCE) is None or isinstance(waiting.exception(), SupervisionError)
    failure = faults.next()
    assert failure.mesh_name == "owner" and failure.report().startswith("root cause: mesh 'nested-procs'")
    assert ("in the handler" in failure.report()) is (answer is not False)


def test_owner_that_waits_gets_the_error_before_supervise(single: ProcMesh, faults: Faults, tmp_path: Path) -> None:
    owner = single.spawn("owner", Supervisor, True)
    nested = owner.spawn.call_one(1).get(PATIENCE)
    pid = nested.pid.call_one().get(PATIENCE)
    with gate(tmp_path) as (name, _):
        waiting = begun(owner.wait_for_nested.call_one, name)
        os.kill(pid, signal.SIGKILL)
        error = waiting.exception(PATIENCE)
    assert isinstance(error, ActorError) and isinstance(error.__cause__, SupervisionError)
    assert error.__cause__.pid == pid
    assert wait_for_failures(owner, 1) == [("nested-procs", (0,), True)]


def test_owner_without_supervise_fails_while_it_waits(single: ProcMesh, faults: Faults, tmp_path: Path) -> None:
    owner = single.spawn("owner", Owner)
    nested = owner.spawn.call_one(2).get(PATIENCE)
    with gate(tmp_path) as (name, open_gate):
        waiting = begun(owner.wait_for_nested.call_one, name)  # waits for rank 0, which has not failed
        failed(nested.slice(nested=1).end_process.call_one("SIGKILL"))
        failure = faults.next()
        open_gate()
        assert failure.mesh_name == "owner" and failure.report().startswith("root cause: mesh 'nested-procs'")
        waiting.exception(PATIENCE)  # ends with a value or an error
        assert failed(owner.echo.call_one(1)).delivery == "not sent"


def test_mesh_spawned_by_a_failed_actor_ends(single: ProcMesh, faults: Faults, tmp_path: Path) -> None:
    """A failed actor's message runs to its end. A mesh that it spawns then must end, too."""
    owner = single.spawn("owner", Owner)
    nested = owner.spawn.call_one(1).get(PATIENCE)
    port, receiver = Channel.open()
    with gate(tmp_path) as (name, open_gate):
        owner.spawn_behind.broadcast(port, name)
        assert receiver.recv().get(PATIENCE) == "begun"
        failed(nested.end_process.call_one("SIGKILL"))
        assert faults.next().mesh_name == "owner"
        open_gate()
        came = receiver.recv().get(PATIENCE)
    if isinstance(came, int):
        try:
            with Watch({"the late one": came}) as watch:
                assert watch.left_after(5.0) == []
        except ProcessLookupError:
            pass  # the process has ended already


def test_failure_reaches_the_owner_of_actors_on_foreign_processes(pair: ProcMesh, faults: Faults) -> None:
    """The failure is reported to the owner of the processes and to the owner of the actors."""
    owner = pair.slice(gpus=0).spawn("owner", Supervisor, True)
    actors = owner.spawn_on.call_one(pair.slice(gpus=1)).get(PATIENCE)
    actors.raises.broadcast(ValueError("only the actor"))
    failed(actors.echo.call_one(1))
    assert wait_for_failures(owner, 1) == [("nested", (0,), True)]
    faults.none()
    again = owner.spawn_on.call_one(pair.slice(gpus=1)).get(PATIENCE)
    failed(again.end_process.call_one("SIGKILL"))
    assert faults.next().mesh_name == "pair"
    assert wait_for_failures(owner, 2)[1:] == [("nested", (0,), True)], "it hears of it, too, by its own link"


def test_nested_mesh_ends_with_the_process_of_its_owner(single: ProcMesh, faults: Faults) -> None:
    owner = single.spawn("owner", Owner, "", 2)
    pids = owner.deepest.call_one().get(PATIENCE)
    assert len(set(pids)) == 3
    nested = owner.spawn.call_one(2).get(PATIENCE)
    pids += list(nested.pid.call().get(PATIENCE).values())
    with Watch({str(pid): pid for pid in pids}) as watch:
        os.kill(pids[0], signal.SIGKILL)
        failed(nested.slice(nested=0).answers_never.call_one())
        assert watch.left_after(2.0) == []
    assert faults.next().deaths[0].pid == pids[0]


def test_failure_three_levels_down_has_its_root_cause(single: ProcMesh, faults: Faults) -> None:
    owner = single.spawn("owner", Owner, "", 2)
    pids = owner.deepest.call_one().get(PATIENCE)
    with Watch({str(pid): pid for pid in pids[1:]}) as watch:
        os.kill(pids[2], signal.SIGBUS)
        failure = faults.next()
        assert watch.left_after(PATIENCE) == []
    heads = [line for line in failure.report().splitlines() if not line.startswith(" ")]
    assert heads == [
        "root cause: mesh 'depth-1' lost 1 of its ranks",
        "therefore: mesh 'owner-2' lost 1 of its ranks",
        "therefore: mesh 'owner' lost 1 of its ranks",
    ]
    assert str(pids[2]) in failure.report() and "SIGBUS" in failure.report()


def test_reference_can_be_used_before_its_actors_exist(single: ProcMesh, faults: Faults) -> None:
    """The caller's message may reach the new process before the owner's message. It waits there."""
    owner = single.spawn("owner", Owner)
    for _ in range(5):
        nested = owner.spawn_at_once.call_one().get(PATIENCE)
        assert list(nested.echo.call("hello").get(PATIENCE).values()) == ["hello", "hello"]


def test_child_death_during_the_constructor_of_its_owner(single: ProcMesh, faults: Faults) -> None:
    class LosesChildInConstructor(Owner):
        def __init__(self) -> None:
            super().__init__()
            mesh = this_host().spawn_procs({"nested": 1}, name="nested-procs").spawn("nested", Victim)
            failed = mesh.end_process.call_one("SIGKILL").exception(30)
            assert isinstance(failed, SupervisionError)

    owner = single.spawn("owner", LosesChildInConstructor)
    failure = faults.next()
    assert failure.mesh_name == "owner"
    report = failure.report()
    assert report.startswith("root cause: mesh 'nested-procs' lost 1") and "SIGKILL" in report
    assert "AttributeError" not in report
    assert failed(owner.echo.call_one(1)).delivery == "not sent"


def test_second_failure_during_handling_is_handled_next(single: ProcMesh, faults: Faults) -> None:
    """The handler kills the other rank, and is called for that failure next."""

    class KillsChildInSupervise(Supervisor):
        def __supervise__(self, failure: MeshFailure) -> bool:
            self.told.append(failure)
            if len(self.told) == 1:
                assert self.actors is not None
                self.actors.slice(nested=0).end_process.call_one("SIGKILL").exception(30)
            return True

    owner = single.spawn("owner", KillsChildInSupervise, True)
    nested = owner.spawn.call_one(2).get(PATIENCE)
    failed(nested.slice(nested=1).end_process.call_one("SIGKILL"))
    assert wait_for_failures(owner, 2) == [("nested-procs", (1,), True), ("nested-procs", (0,), True)]
    faults.none()


def test_named_actor_is_created_again_after_its_death(faults: Faults) -> None:
    first = get_or_spawn_controller("registry", Victim).get(PATIENCE)
    first.note.call_one("before").get(PATIENCE)
    first.raises.broadcast(ValueError("the end"))
    assert faults.next().mesh_name == "registry"
    failed(first.echo.call_one(1))
    second = get_or_spawn_controller("registry", Victim).get(PATIENCE)
    assert second.all_notes.call_one().get(PATIENCE) == []
    second.stop().get(PATIENCE)


def test_simultaneous_deaths_are_all_reported(faults: Faults) -> None:
    with this_host().spawn_procs({"gpus": 6}) as procs:
        victims = procs.spawn("victims", Victim)
        futures = list(victims.end_process.stream("SIGKILL"))
        assert sorted(failed(future).rank for future in futures) == list(range(6))
        assert sorted(faults.next().ranks[0] for _ in range(6)) == list(range(6))
        assert victims.failed_ranks == tuple(range(6))


# __cleanup__


@pytest.mark.parametrize("end", ["stop", "failure"])
@pytest.mark.parametrize("where", ["spawn", "spawn_here"])
def test_owned_actors_clean_up_before_their_owner(
    where: str, end: str, single: ProcMesh, faults: Faults, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    owner = single.spawn("owner", Owner, str(log))
    nested = getattr(owner, where).call_one().get(PATIENCE)
    nested.echo.call(1).get(PATIENCE)
    if end == "stop":
        owner.stop("the test ends").get(PATIENCE)
    else:
        owner.raises.broadcast(ValueError("the end"))
        faults.next()
        until(lambda: "owner: cleanup ValueError" in lines(log), "the owner has cleaned up")
    said = lines(log)
    assert len(said) == len(nested) + 1 and all(line.startswith("nested: cleanup ") for line in said[:-1])
    if end == "stop":
        assert said == [*["nested: cleanup NoneType"] * len(nested), "owner: cleanup NoneType"]


def test_cleanup_gets_the_failure(lasting: ProcMesh, faults: Faults, tmp_path: Path) -> None:
    log = tmp_path / "log"
    doomed = lasting.slice(gpus=0).spawn("doomed", Victim, str(log))
    doomed.raises.broadcast(ValueError("the end"))
    faults.next()
    until(lambda: lines(log) == ["victim: cleanup ValueError"], "the first actor has cleaned up")
    asynchronous = lasting.slice(gpus=0).spawn("asynchronous", AsyncVictim, str(log))
    asynchronous.stop().get(PATIENCE)
    assert lines(log) == ["victim: cleanup ValueError", "async: cleanup NoneType"]


def test_cleanup_that_raises_does_not_delay_the_end(capfd: pytest.CaptureFixture[str], faults: Faults) -> None:
    class RaisesInCleanup(Victim):
        def __cleanup__(self, exc: BaseException | None) -> None:
            raise ValueError("can't clean up")

    with this_host().spawn_procs({"gpus": 1}) as procs:
        failing = procs.spawn("failing", RaisesInCleanup)
        failing.echo.call_one(1).get(PATIENCE)
        failing.stop().get(PATIENCE)
        program().flush_logs()
    err = capfd.readouterr().err
    assert "__cleanup__ of failing failed" in err and "ValueError: can't clean up" in err


def test_endless_cleanup_is_not_waited_for(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_stop, "SHUTDOWN_GRACE_S", 0.3)

    class Endless(Victim):
        def __init__(self) -> None:
            from monarch_backend._actor.execution import runner

            runner.CLEANUP_TIMEOUT_S = 0.5

        def __cleanup__(self, exc: BaseException | None) -> None:
            threading.Event().wait()

    procs = this_host().spawn_procs({"gpus": 2})
    pids = procs.spawn("endless", Endless).pid.call().get(PATIENCE)
    with Watch({str(pid): pid for pid in pids.values()}) as watch:
        procs.stop().get(PATIENCE)
        assert watch.left_after(PATIENCE) == []


# stop, abort, kill


@pytest.mark.parametrize("how", ["stop", "abort", "kill"])
@pytest.mark.parametrize("state", ["at once", "idle", "twice", "after death", "from two threads"])
def test_process_in_every_state_can_be_ended(how: str, state: str, faults: Faults) -> None:
    procs = this_host().spawn_procs({"gpus": 2}, name="ending")
    end = getattr(procs, how)
    if state == "at once":
        end("too early").get(PATIENCE)
        with pytest.raises(RuntimeError, match="stopped: too early"):
            procs.spawn("late", Victim)
        return
    victims = procs.spawn("victims", Victim)
    pids = victims.pid.call().get(PATIENCE)
    with Watch({str(pid): pid for pid in pids.values()}) as watch:
        if state == "after death":
            failed(victims.slice(gpus=1).end_process.call_one("SIGKILL"))
            faults.next()
        if state == "from two threads":
            others = [threading.Thread(target=lambda: end("me too").get(PATIENCE)) for _ in range(2)]
            for thread in others:
                thread.start()
            for thread in others:
                thread.join(PATIENCE)
                assert not thread.is_alive()
        first = end("it is over")
        if state == "twice":
            end("really").get(PATIENCE)
        first.get(PATIENCE)
        assert watch.left_after(2.0) == [], "they have gone when the future is done"
    end("again").get(PATIENCE)
    error = failed(victims.slice(gpus=0).echo.call_one(1))
    assert error.delivery == "not sent" and "it was stopped: " in str(error)
    with pytest.raises(SupervisionError, match="it was stopped"):
        victims.note.broadcast(1)


@pytest.mark.parametrize("how", ["stop", "abort", "kill"])
def test_stop_of_a_process_mesh_fails_waiting_calls(how: str, faults: Faults) -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    victims = procs.spawn("victims", Victim)
    waiting = [procs.initialized, victims.initialized]
    call = victims.echo.call(1)
    getattr(procs, how)("too early").get(PATIENCE)
    for future in (*waiting, procs.initialized, victims.initialized):
        error = future.exception(PATIENCE)
        assert error is None or (isinstance(error, MeshFailure) and "too early" in str(error))
    if call.exception(PATIENCE) is not None:
        assert isinstance(call.exception(), SupervisionError) and "too early" in str(call.exception())


def test_stop_of_actors_fails_waiting_calls(lasting: ProcMesh, faults: Faults, tmp_path: Path) -> None:
    with gate(tmp_path) as (name, open_gate):
        slow = lasting.slice(gpus=0).spawn("slow", SlowToBuild, name)
        waiting = slow.initialized
        stopped = slow.stop("too early")
        open_gate()
        stopped.get(PATIENCE)
        for future in (waiting, slow.initialized):
            error = future.exception(PATIENCE)
            assert error is None or (isinstance(error, MeshFailure) and "too early" in str(error))


def test_stop_lets_actors_finish_queued_messages(faults: Faults, tmp_path: Path) -> None:
    log = tmp_path / "log"
    procs = this_host().spawn_procs({"gpus": 1})
    victim = procs.spawn("victim", Victim, str(log))
    with gate(tmp_path) as (name, open_gate):
        running = begun(victim.wait.call_one, name)
        queued = [victim.echo.call_one(i) for i in range(50)]
        victim.note.broadcast("the last")
        stopped = procs.stop()
        assert not stopped.done()
        open_gate()
        assert running.get(PATIENCE) == "waited"
        assert [future.get(PATIENCE) for future in queued] == list(range(50))
        stopped.get(PATIENCE)
    assert lines(log) == ["victim: waited", "victim: the last", "victim: cleanup NoneType"]


def test_stop_lets_starting_processes_finish_queued_messages(faults: Faults, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with this_host().spawn_procs({"gpus": 1}) as procs:
        victim = procs.spawn("victim", Victim, str(log))
        value = victim.echo.call_one("early")
        victim.note.broadcast("nobody has waited for it")
    assert value.get(PATIENCE) == "early"
    assert lines(log) == ["victim: nobody has waited for it", "victim: cleanup NoneType"]


def test_message_during_connection_is_received(faults: Faults) -> None:
    """The reading thread may receive the first and last message before the connecting thread has finished."""

    def read_first() -> None:
        import time

        from monarch_backend._actor import runtime

        start = runtime.start

        def started(*args: Any) -> Any:
            program = start(*args)
            link_to = program.router.link_to

            def link_slowly(peer: Any) -> int:
                link = int(link_to(peer))
                while link >= 0 and not peer.received:
                    time.sleep(0.001)
                return link

            program.router.link_to = link_slowly
            return program

        runtime.start = started

    procs = this_host().spawn_procs({"gpus": 1}, bootstrap=read_first)
    procs.stop().get(PATIENCE)


def test_abort_lets_only_the_running_message_end(faults: Faults, tmp_path: Path) -> None:
    log = tmp_path / "log"
    procs = this_host().spawn_procs({"gpus": 1})
    victim, other = procs.spawn("victim", Victim, str(log)), procs.spawn("other", Victim)
    with gate(tmp_path) as (name, open_gate):
        running = begun(victim.wait.call_one, name)
        queued = victim.echo.call_one(1)
        victim.note.broadcast("never")
        aborted = procs.abort("enough")
        failed(other.echo.call_one(1))  # sent after the abort, so the abort has arrived
        open_gate()
        assert running.get(PATIENCE) == "waited"
        assert "enough" in str(failed(queued))
        aborted.get(PATIENCE)
    assert lines(log)[:1] == ["victim: waited"]
    assert "victim: never" not in lines(log)


def test_kill_does_not_wait(faults: Faults, tmp_path: Path) -> None:
    log = tmp_path / "log"
    procs = this_host().spawn_procs({"gpus": 1})
    victim = procs.spawn("victim", Victim, str(log))
    with gate(tmp_path) as (name, _):
        running = begun(victim.wait.call_one, name)
        procs.kill("now").get(PATIENCE)
        error = failed(running)
    assert error.delivery == "unknown" and "it was stopped: now" in str(error)
    assert lines(log) == []


@pytest.mark.parametrize("how", ["stop", "abort"])
def test_process_that_ignores_stop_is_killed(
    how: str, faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_stop, "SHUTDOWN_GRACE_S", 0.3)
    procs = this_host().spawn_procs({"gpus": 1})
    victim = procs.spawn("victim", Victim)
    with gate(tmp_path) as (name, _):
        running = begun(victim.wait.call_one, name)
        limit = {"timeout": 0.2} if how == "stop" else {}
        getattr(procs, how)("it is over", **limit).get(PATIENCE)
        assert failed(running).delivery == "unknown"


def test_busy_process_is_waited_for_and_named(faults: Faults, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    procs = this_host().spawn_procs({"gpus": 1}, name="patient")
    victim = procs.spawn("victim", Victim)
    with gate(tmp_path) as (name, open_gate):
        running = begun(victim.wait.call_one, name)
        stopping = procs.stop()
        links, link = program().links, procs._core.peer(0).link
        until(lambda: links.unread(link) == 0, "it has read that it is to stop")  # otherwise it would be killed
        program().call_soon(lambda: program().owner.stops._hurry(procs._core.owned, "stop", None))  # as after GRACE
        until(lambda: "patient is to stop and still has messages to finish" in caplog.text, "the report")
        assert "gpus 0 of patient" in caplog.text and not stopping.done()
        open_gate()
        assert running.get(PATIENCE) == "waited"
    stopping.get(PATIENCE)


def test_busy_process_of_a_failed_mesh_is_killed(
    faults: Faults, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The busy process may be in a collective with the dead one. That collective would never end."""
    procs = this_host().spawn_procs({"gpus": 2}, name="waits_for_dead")
    victims = procs.spawn("victims", Victim)
    pids = victims.pid.call().get(PATIENCE)
    with gate(tmp_path) as (name, _):
        running = begun(victims.slice(gpus=0).wait.call_one, name)
        os.kill(pids.item(gpus=1), signal.SIGKILL)
        assert "SIGKILL" in faults.next().report()
        stopping = procs.stop()
        links, link = program().links, procs._core.peer(0).link
        until(lambda: links.unread(link) == 0, "it has read that it is to stop")
        program().call_soon(lambda: program().owner.stops._hurry(procs._core.owned, "stop", None))  # as after GRACE
        stopping.get(PATIENCE)
        assert failed(running).delivery == "unknown"
    assert "it is still at work, and another process of its mesh has died" in caplog.text


def test_stopped_process_is_killed_by_stop(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_stop, "SHUTDOWN_GRACE_S", 0.3)
    procs = this_host().spawn_procs({"gpus": 1})
    os.kill(procs.spawn("victim", Victim).pid.call_one().get(PATIENCE), signal.SIGSTOP)
    procs.stop().get(PATIENCE)


def test_hanging_cleanup_is_abandoned(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hangs(Victim):
        def __cleanup__(self, exc: BaseException | None) -> None:
            time.sleep(3 * PATIENCE)

    def hurry() -> None:
        from monarch_backend._actor.execution import runner

        runner.CLEANUP_TIMEOUT_S = 0.1

    procs = this_host().spawn_procs({"gpus": 1}, bootstrap=hurry)
    first, second = procs.spawn("first", Hangs), procs.spawn("second", Hangs)
    first.echo.call_one(1).get(PATIENCE)
    second.stop().get(PATIENCE)
    procs.stop().get(PATIENCE)


def test_death_during_a_stop_ends_the_stop(faults: Faults, tmp_path: Path) -> None:
    """A process that dies after the request to stop counts as stopped. No failure is reported."""
    procs = this_host().spawn_procs({"gpus": 2}, restart=Restart(backoff=0.0))
    victims = procs.spawn("victims", Victim)
    pid = victims.slice(gpus=0).pid.call_one().get(PATIENCE)
    with gate(tmp_path) as (name, _):
        running = begun(victims.slice(gpus=0).wait.call_one, name)
        stopping = procs.stop("please")
        os.kill(pid, signal.SIGKILL)
        failed(running)
        stopping.get(PATIENCE)
    faults.none()


def test_kill_ends_a_long_stop(faults: Faults, tmp_path: Path) -> None:
    procs = this_host().spawn_procs({"gpus": 1})
    victim = procs.spawn("victim", Victim)
    with gate(tmp_path) as (name, _):
        running = begun(victim.wait.call_one, name)
        stopping = procs.stop("please")
        procs.kill("now").get(PATIENCE)
        stopping.get(PATIENCE)
        failed(running)


@pytest.mark.parametrize("how", ["stop", "abort"])
@pytest.mark.parametrize("state", ["at once", "idle", "twice", "after death"])
def test_actors_in_every_state_end_and_their_processes_stay(
    how: str, state: str, lasting: ProcMesh, faults: Faults
) -> None:
    victims, others = lasting.spawn("victims", Victim), lasting.spawn("others", Victim)
    end = getattr(victims, how)
    if state != "at once":
        victims.echo.call(1).get(PATIENCE)
    if state == "after death":
        failed(victims.slice(gpus=0).exits.call_one(1))
        faults.next()
    if state == "twice":
        end("soon")
    end("it is over").get(PATIENCE)
    error = failed(victims.slice(gpus=1).echo.call_one(1))
    assert error.delivery == "not sent" and "it was stopped: " in str(error)
    assert len(others.echo.call(1).get(PATIENCE)) == 2
    faults.none()


def test_stop_and_abort_of_busy_actors_end_them(lasting: ProcMesh, faults: Faults, tmp_path: Path) -> None:
    other = lasting.slice(gpus=0).spawn("other", Victim)
    for how, answered in (("stop", True), ("abort", False)):
        log = tmp_path / how
        victim = lasting.slice(gpus=0).spawn("victim", Victim, str(log))
        with gate(tmp_path) as (name, open_gate):
            running = begun(victim.wait.call_one, name)
            queued = victim.echo.call_one(1)
            ended = getattr(victim, how)("it is over")
            other.echo.call_one(1).get(PATIENCE)  # sent after the request to end, so that has arrived
            assert not ended.done()
            open_gate()
            assert running.get(PATIENCE) == "waited"
            ended.get(PATIENCE)
            if answered:
                assert queued.get(PATIENCE) == 1
            else:
                assert failed(queued).delivery == "not sent"
        assert lines(log)[-1].startswith("victim: cleanup")


def test_actor_can_stop_itself(lasting: ProcMesh, faults: Faults, tmp_path: Path) -> None:
    log = tmp_path / "log"
    victim = lasting.slice(gpus=0).spawn("victim", Victim, str(log))
    last = victim.end_itself.call_one("stop", "done here")
    assert last.get(PATIENCE) == "the rest of the message"
    error = failed(victim.echo.call_one(1))
    assert error.delivery == "not sent" and "done here" in str(error)
    until(lambda: lines(log), "it has cleaned up")
    assert lines(log) == ["victim: cleanup NoneType"]
    faults.none()


def test_actor_can_abort_itself(lasting: ProcMesh, faults: Faults) -> None:
    victim = lasting.slice(gpus=0).spawn("victim", Victim)
    assert victim.end_itself.call_one("abort", "no use").get(PATIENCE) == "the rest of the message"
    failure = faults.next()
    assert failure.mesh_name == "victim" and "no use" in failure.report()
    assert "no use" in str(failed(victim.echo.call_one(1)))


def test_actor_can_kill_its_process(single: ProcMesh, faults: Faults) -> None:
    victim = single.spawn("victim", Victim)
    error = failed(victim.end_itself.call_one("kill", "at once"))
    assert error.signal == signal.SIGKILL
    failure = faults.next()
    assert "victim was killed: at once" in failure.report(), "its last words"


def test_only_owners_stop_a_mesh(single: ProcMesh, faults: Faults) -> None:
    owner = single.spawn("owner", Owner)
    nested = owner.spawn.call_one(1).get(PATIENCE)
    with pytest.raises(RuntimeError, match="only the program or actor that has spawned"):
        nested.stop()
    with pytest.raises(RuntimeError, match="only the program or actor that has spawned"):
        nested.proc_mesh.stop()
    with pytest.raises(RuntimeError, match="the main program is not an actor and cannot be stopped so"):
        context().actor_instance.stop()
    assert nested.echo.call_one(1).get(PATIENCE) == 1


def test_public_errors_pickle() -> None:
    """Users send them through queues and pools, and store them in files."""
    failure = MeshFailure("mesh", [make_death(3)])
    failure.__cause__ = ValueError("the root")
    for error in (
        failure,
        ActorError("text", "actor", "endpoint", 2),
        SupervisionError("text", "actor.endpoint", failure, "not sent"),
        PeerGoneError.of(program().router.me),
        CancelledError("enough"),
    ):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy)) == (type(error), str(error))
        for name, value in vars(error).items():
            if isinstance(value, (str, int, tuple)):
                assert getattr(copy, name) == value
    assert str(pickle.loads(pickle.dumps(failure)).__cause__) == "the root"


def test_report_has_a_bounded_length() -> None:
    """The report of a thousand dead ranks does not have a thousand lines."""
    one = make_death(0)
    failure = MeshFailure("large", [replace(one, rank=rank, where=f"gpus {rank}") for rank in range(1000)])
    assert len(failure.report().splitlines()) < 20 and "992 more" in failure.report()
    assert len(str(failure)) < 1000
    assert re.search(r"lost 1000 of its ranks", failure.report())


def make_death(rank: int) -> Any:
    from monarch_backend.actor import Death

    return Death(rank, f"gpus {rank}", HOST, 1, "killed by signal 9 (SIGKILL)", -9)
