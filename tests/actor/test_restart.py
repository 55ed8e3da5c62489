"""`Restart` policies: failed actors and processes are replaced on the same ranks, with limits and back-off."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._actor.runtime import program
from monarch_backend._mesh.extent import Extent
from monarch_backend._mesh.proc_mesh import ProcMeshState
from monarch_backend._transport.local.peer import Peer
from monarch_backend.actor import (
    Actor,
    ActorMesh,
    MeshFailure,
    ProcMesh,
    Restart,
    SupervisionError,
    context,
    current_rank,
    endpoint,
    this_host,
    this_proc,
)
from tests.actor.actors import comes_back, until
from tests.actor.failing_actors import Owner, Supervisor, Victim, lines
from tests.actor.support import PATIENCE, Faults, begun, gate
from tests.processes.spawning import Watch

SOON = Restart(max_restarts=50, backoff=0.0)


@pytest.fixture(scope="module")
def lasting() -> Iterator[ProcMesh]:
    """Yield three processes for tests in which only actors fail."""
    with this_host().spawn_procs({"gpus": 3}, name="lasting") as procs:
        procs.initialized.get(PATIENCE)
        yield procs


def pids_of(mesh: ActorMesh) -> list[int]:
    return list(mesh.pid.call().get(PATIENCE).values())


class Counted(Victim):
    """Actor that logs each construction."""

    def __init__(self, log: str) -> None:
        super().__init__(log, f"rank {current_rank().rank}")
        self.say("built")

    @endpoint
    def rank(self) -> int:
        return context().actor_instance.rank.rank


def built(log: Path) -> int:
    """Return how often the actors of this log were built."""
    return sum(line.endswith(": built") for line in lines(log))


class FailsToBeBuilt(Actor):
    """Actor whose constructor fails this number of times, counted in a file."""

    def __init__(self, log: str, times: int) -> None:
        with open(log, "a") as file:
            file.write("tried\n")
        if len(lines(Path(log))) <= times:
            raise ValueError("not yet")

    @endpoint
    def echo(self, value: Any) -> Any:
        return value


# Actors


def test_failed_actor_is_recreated_and_others_are_unaffected(lasting: ProcMesh, faults: Faults) -> None:
    victims = lasting.spawn("victims", Victim, restart=SOON)
    victims.note.broadcast("before")
    before = pids_of(victims)
    victims.slice(gpus=1).raises.broadcast(ValueError("die"))
    comes_back(victims.slice(gpus=1))
    assert list(victims.all_notes.call().get(PATIENCE).values()) == [["before"], [], ["before"]]
    assert pids_of(victims) == before, "the process goes on"
    assert victims.failed_ranks == ()
    assert victims.initialized.exception(PATIENCE) is None
    victims.stop().get(PATIENCE)


def test_messages_wait_for_the_recreated_actor(lasting: ProcMesh, faults: Faults) -> None:
    """Messages are kept in order and run at most once.

    The message that the dying actor had begun is lost, with an error.
    """
    victim = lasting.slice(gpus=0).spawn("victim", Victim, restart=Restart(backoff=0.2, max_restarts=3))
    victim.note.broadcast("old")
    lost = victim.raises.call_one(SystemExit(1))
    for i in range(100):
        victim.note.broadcast(i)
    value = victim.echo.call_one("kept")
    values = list(victim.count.call_one(200))
    error = lost.exception(PATIENCE)
    assert isinstance(error, SupervisionError) and error.delivery == "unknown"
    assert value.get(PATIENCE) == "kept"
    assert values == list(range(200))
    assert victim.all_notes.call_one().get(PATIENCE) == list(range(100))
    victim.stop().get(PATIENCE)


def test_whole_mesh_is_restarted(lasting: ProcMesh, faults: Faults, tmp_path: Path) -> None:
    log = tmp_path / "log"
    policy = Restart(strategy="all", max_restarts=3, backoff=0.0)
    victims = lasting.spawn("victims", Counted, str(log), restart=policy)
    victims.initialized.get(PATIENCE)
    victims.slice(gpus=2).raises.broadcast(ValueError("die"))
    until(lambda: built(log) == 6, "all were built twice")
    for rank in range(3):
        comes_back(victims.slice(gpus=rank))
        said = [line for line in lines(log) if line.startswith(f"rank {rank}")]
        error = "ValueError" if rank == 2 else "RuntimeError"
        assert said == [f"rank {rank}: built", f"rank {rank}: cleanup {error}", f"rank {rank}: built"]
    assert list(victims.rank.call().get(PATIENCE).values()) == [0, 1, 2]
    assert victims.failed_ranks == ()
    victims.stop().get(PATIENCE)


def test_whole_mesh_is_restarted_while_one_actor_is_busy(lasting: ProcMesh, faults: Faults, tmp_path: Path) -> None:
    """The busy actor's message ends before its restart, so one rank never has two instances."""
    log = tmp_path / "log"
    policy = Restart(strategy="all", max_restarts=3, backoff=0.0)
    victims = lasting.spawn("victims", Counted, str(log), restart=policy)
    victims.initialized.get(PATIENCE)
    with gate(tmp_path) as (name, open_gate):
        busy = begun(victims.slice(gpus=0).wait.call_one, name)
        victims.slice(gpus=1).raises.broadcast(ValueError("die"))
        until(lambda: lines(log).count("rank 2: built") == 2, "the one that is idle was built again")
        comes_back(victims.slice(gpus=1))
        kept = victims.slice(gpus=0).echo.call_one("kept")
        open_gate()
        assert busy.get(PATIENCE) == "waited"
    assert kept.get(PATIENCE) == "kept"
    said = [line.removeprefix("rank 0: ") for line in lines(log) if line.startswith("rank 0")]
    assert said == ["built", "waited", "cleanup RuntimeError", "built"]
    victims.stop().get(PATIENCE)


def test_restart_backoff_grows(lasting: ProcMesh, faults: Faults, tmp_path: Path) -> None:
    log = tmp_path / "log"
    policy = Restart(max_restarts=3, backoff=0.05, most_backoff=0.1)
    victim = lasting.slice(gpus=0).spawn("victim", Counted, str(log), restart=policy)
    took = []
    for _ in range(3):
        start = time.monotonic()
        victim.raises.broadcast(ValueError("die"))
        assert victim.echo.call_one(1).get(PATIENCE) == 1
        took.append(time.monotonic() - start)
    for seconds, least in zip(took, (0.05, 0.1, 0.1), strict=True):
        assert least <= seconds, took
    assert built(log) == 4
    victim.stop().get(PATIENCE)


def test_too_many_restarts_fail_the_mesh(lasting: ProcMesh, faults: Faults) -> None:
    victims = lasting.spawn("victims", Victim, restart=Restart(max_restarts=2, within=60, backoff=0.0))
    doomed = victims.slice(gpus=1)
    for _ in range(2):
        doomed.raises.broadcast(ValueError("again"))
        comes_back(doomed)
    faults.none()
    doomed.raises.broadcast(ValueError("once too often"))
    queued = doomed.echo.call_one(1)
    failure = faults.next()
    assert (failure.mesh_name, failure.ranks) == ("victims", (1,))
    assert "once too often" in failure.report()
    error = queued.exception(PATIENCE)
    assert isinstance(error, SupervisionError) and error.delivery == "not sent"
    assert victims.failed_ranks == (1,)
    rest = victims.without(victims.failed_ranks)
    assert len(rest.echo.call(1).get(PATIENCE)) == 2
    victims.stop().get(PATIENCE)


def test_calls_to_an_actor_that_is_not_restarted_fail(lasting: ProcMesh, faults: Faults) -> None:
    """The messages were kept for the next instance, which never comes."""
    victim = lasting.slice(gpus=0).spawn("victim", Victim, restart=Restart(max_restarts=0, backoff=0.0))
    lost = victim.raises.call_one(SystemExit(1))
    waiting = [victim.echo.call_one(i) for i in range(20)]
    faults.next()
    for future in (lost, *waiting):
        assert isinstance(future.exception(PATIENCE), SupervisionError)


def test_old_failures_do_not_count_as_restarts(lasting: ProcMesh, faults: Faults) -> None:
    victim = lasting.slice(gpus=0).spawn("victim", Victim, restart=Restart(max_restarts=1, within=0.05, backoff=0.0))
    for _ in range(3):
        victim.raises.broadcast(ValueError("again"))
        comes_back(victim)
        died = time.monotonic()
        until(lambda died=died: time.monotonic() > died + 0.06, "the time within which deaths count is over")
    victim.stop().get(PATIENCE)


def test_failing_constructor_is_retried(lasting: ProcMesh, faults: Faults, tmp_path: Path) -> None:
    log = tmp_path / "log"
    actor = lasting.slice(gpus=0).spawn("slow to start", FailsToBeBuilt, str(log), 2, restart=SOON)
    assert actor.echo.call_one("up").get(PATIENCE) == "up"
    assert actor.initialized.get(PATIENCE) is None
    assert len(lines(log)) == 3
    actor.stop().get(PATIENCE)


def test_constructor_that_always_fails_fails_the_mesh(lasting: ProcMesh, faults: Faults, tmp_path: Path) -> None:
    log = tmp_path / "log"
    policy = Restart(max_restarts=2, backoff=0.0)
    actor = lasting.slice(gpus=0).spawn("never", FailsToBeBuilt, str(log), 99, restart=policy)
    queued = actor.echo.call_one(1)
    assert isinstance(actor.initialized.exception(PATIENCE), MeshFailure)
    assert "not yet" in faults.next().report()
    assert isinstance(queued.exception(PATIENCE), SupervisionError)
    assert len(lines(log)) == 3


def test_stopped_actor_is_not_restarted(lasting: ProcMesh, faults: Faults, tmp_path: Path) -> None:
    log = tmp_path / "log"
    victims = lasting.spawn("victims", Counted, str(log), restart=Restart(max_restarts=9, backoff=0.05))
    victims.initialized.get(PATIENCE)
    died = time.monotonic()
    victims.slice(gpus=0).raises.broadcast(ValueError("die"))  # stopped in its back-off, or before
    stopped = victims.stop("enough")
    in_time = time.monotonic() < died + 0.05  # otherwise the machine was slow, and the restart came before the stop
    stopped.get(PATIENCE)
    before, waited = built(log), time.monotonic()
    until(lambda: time.monotonic() > waited + 0.1, "the back-off is over")
    error = victims.slice(gpus=0).echo.call_one(1).exception(PATIENCE)
    assert isinstance(error, SupervisionError) and "enough" in str(error)
    assert built(log) == before and (before == 3 or not in_time)


def test_actor_that_stops_itself_is_not_restarted(lasting: ProcMesh, faults: Faults, tmp_path: Path) -> None:
    log = tmp_path / "log"
    victim = lasting.slice(gpus=0).spawn("victim", Counted, str(log), restart=SOON)
    victim.end_itself.call_one("stop", "done here").get(PATIENCE)
    error = victim.echo.call_one(1).exception(PATIENCE)
    assert isinstance(error, SupervisionError) and "done here" in str(error)
    until(lambda: "rank 0: cleanup NoneType" in lines(log), "it has cleaned up")
    assert built(log) == 1


def test_cleanup_runs_before_the_next_constructor(lasting: ProcMesh, faults: Faults, tmp_path: Path) -> None:
    log = tmp_path / "log"
    victim = lasting.slice(gpus=0).spawn("victim", Counted, str(log), restart=SOON)
    for _ in range(3):
        victim.raises.broadcast(ValueError("die"))
        comes_back(victim)
    assert lines(log) == ["rank 0: built", *["rank 0: cleanup ValueError", "rank 0: built"] * 3]
    victim.stop().get(PATIENCE)


def test_actors_of_the_main_program_are_restarted(faults: Faults) -> None:
    victim = this_proc().spawn("victim", Victim, restart=SOON)
    victim.note.broadcast("before")
    victim.raises.broadcast(ValueError("die"))
    comes_back(victim)
    assert victim.all_notes.call_one().get(PATIENCE) == []
    victim.stop().get(PATIENCE)


def test_actor_restarts_its_own_actors(faults: Faults) -> None:
    """The owner is an actor with a policy. Its ``__supervise__`` runs only after the last restart."""
    with this_host().spawn_procs({"gpus": 1}) as procs:
        owner = procs.spawn("owner", Supervisor, True)
        nested = owner.spawn.call_one(2, Restart(max_restarts=1, backoff=0.0)).get(PATIENCE)
        first = pids_of(nested)
        os.kill(first[1], signal.SIGKILL)
        comes_back(nested.slice(nested=1))
        second = pids_of(nested)
        assert second[0] == first[0] and second[1] != first[1]
        assert owner.received_failures.call_one().get(PATIENCE) == []
        assert owner.call_nested.call_one("on").get(PATIENCE) == ["on", "on"]
        os.kill(second[1], signal.SIGKILL)
        until(lambda: owner.received_failures.call_one().get(PATIENCE), "the owner is asked")
        assert owner.received_failures.call_one().get(PATIENCE) == [("nested-procs", (1,), True)]


# Processes


def test_dead_process_is_replaced_and_others_are_unaffected(faults: Faults) -> None:
    with this_host().spawn_procs({"gpus": 3}, restart=SOON) as procs:
        victims = procs.spawn("victims", Victim)
        more = procs.spawn("more", Victim)
        victims.note.broadcast("before")
        before = pids_of(victims)
        one = victims.slice(gpus=1)
        waiting = one.answers_never.call_one()
        os.kill(before[1], signal.SIGKILL)
        error = waiting.exception(PATIENCE)
        assert isinstance(error, SupervisionError)
        assert (error.rank, error.pid, error.signal, error.delivery) == (1, before[1], signal.SIGKILL, "unknown")
        comes_back(one)
        after = pids_of(victims)
        assert after[0] == before[0] and after[2] == before[2] and after[1] not in before
        assert pids_of(more) == after, "all its actors are there again"
        assert list(victims.all_notes.call().get(PATIENCE).values()) == [["before"], [], ["before"]]
        assert victims.failed_ranks == () and procs.initialized.get(PATIENCE) is None


def test_messages_wait_for_the_replacement_process(faults: Faults) -> None:
    """The messages are sent after the death is known and before the new process exists."""
    with this_host().spawn_procs({"gpus": 1}, restart=Restart(backoff=0.2)) as procs:
        victim = procs.spawn("victim", Victim)
        dying = victim.end_process.call_one("SIGKILL")
        assert isinstance(dying.exception(PATIENCE), SupervisionError)
        for i in range(100):
            victim.note.broadcast(i)
        value, values = victim.echo.call_one("kept"), victim.count.call_one(100)
        many = victim.echo.call("all")
        assert value.get(PATIENCE) == "kept"
        assert list(values) == list(range(100))
        assert list(many.get(PATIENCE).values()) == ["all"]
        assert victim.all_notes.call_one().get(PATIENCE) == list(range(100))


def test_all_processes_of_the_mesh_are_restarted(faults: Faults) -> None:
    policy = Restart(strategy="all", max_restarts=3, backoff=0.0)
    with this_host().spawn_procs({"gpus": 3}, restart=policy) as procs:
        victims = procs.spawn("victims", Victim)
        before = pids_of(victims)
        waiting = [victims.slice(gpus=rank).answers_never.call_one() for rank in range(3)]
        os.kill(before[1], signal.SIGKILL)
        errors = [future.exception(PATIENCE) for future in waiting]
        assert all(isinstance(error, SupervisionError) for error in errors)
        for rank in range(3):
            comes_back(victims.slice(gpus=rank))
        after = pids_of(victims)
        assert not set(before) & set(after) and len(set(after)) == 3


def test_process_that_dies_too_often_fails_the_mesh(faults: Faults) -> None:
    with this_host().spawn_procs({"gpus": 2}, name="frail", restart=Restart(max_restarts=1, backoff=0.0)) as procs:
        victims = procs.spawn("victims", Victim)
        first = pids_of(victims)
        os.kill(first[0], signal.SIGKILL)
        comes_back(victims.slice(gpus=0))
        faults.none()
        second = pids_of(victims)
        os.kill(second[0], signal.SIGKILL)
        failure = faults.next()
        assert (failure.mesh_name, failure.ranks) == ("frail", (0,))
        assert failure.deaths[0].pid == second[0]
        assert victims.failed_ranks == (0,)
        assert victims.without(victims.failed_ranks).echo.call_one(1).get(PATIENCE) == 1
        assert isinstance(victims.slice(gpus=0).echo.call_one(1).exception(PATIENCE), SupervisionError)


def test_bootstrap_that_always_fails_fails_the_mesh(faults: Faults) -> None:
    def bootstrap() -> None:
        raise RuntimeError("no accelerator here")

    policy = Restart(max_restarts=2, backoff=0.0)
    with this_host().spawn_procs({"gpus": 1}, bootstrap=bootstrap, restart=policy) as procs:
        victim = procs.spawn("victim", Victim)
        assert isinstance(procs.initialized.exception(PATIENCE), MeshFailure)
        assert "no accelerator here" in faults.next().report()
        assert isinstance(victim.echo.call_one(1).exception(PATIENCE), SupervisionError)


def test_bootstrap_that_fails_once_is_retried(faults: Faults, tmp_path: Path) -> None:
    log = str(tmp_path / "log")

    def bootstrap() -> None:
        import os
        import pathlib

        with open(log, "a") as file:
            file.write("tried\n")
        if len(pathlib.Path(log).read_text().splitlines()) == 1:
            os._exit(7)

    with this_host().spawn_procs({"gpus": 1}, bootstrap=bootstrap, restart=SOON) as procs:
        victim = procs.spawn("victim", Victim)
        early = victim.echo.call_one("up").exception(PATIENCE)
        assert early is None or (isinstance(early, SupervisionError) and early.delivery == "not sent")
        procs.initialized.get(PATIENCE)
        assert victim.echo.call_one("up").get(PATIENCE) == "up"
    assert lines(Path(log)) == ["tried", "tried"]


def test_actors_stopped_during_a_restart_end(faults: Faults) -> None:
    with this_host().spawn_procs({"gpus": 1}) as procs:
        victim = procs.spawn("victim", Dies, restart=Restart(backoff=0.3))
        victim.initialized.get(PATIENCE)
        victim.die.broadcast()
        until(lambda: victim._core.owned.generations == [1], "its owner has heard of it")
        victim.stop().get(PATIENCE)
        assert procs.spawn("another", Victim).echo.call_one("there").get(PATIENCE) == "there"


def test_actors_of_processes_stopped_during_a_restart_end(faults: Faults) -> None:
    procs = this_host().spawn_procs({"gpus": 2}, restart=Restart(backoff=30.0, most_backoff=30.0))
    victims = procs.spawn("victims", Victim)
    victims.slice(gpus=0).end_process.call_one("SIGKILL").exception(PATIENCE)
    others = procs.spawn("others", Victim)  # spawned while the replacement waits to be started
    actors = victims.stop()
    procs.stop().get(PATIENCE)
    actors.get(PATIENCE)
    assert isinstance(others.initialized.exception(PATIENCE), MeshFailure)
    others.stop().get(PATIENCE)


def test_processes_stopped_during_a_restart_are_not_started(faults: Faults, tmp_path: Path) -> None:
    procs = this_host().spawn_procs({"gpus": 2}, restart=Restart(backoff=0.1))
    victims = procs.spawn("victims", Victim)
    dying = victims.slice(gpus=0).end_process.call_one("3")
    assert isinstance(dying.exception(PATIENCE), SupervisionError)
    procs.stop("enough").get(PATIENCE)  # the leak check would find a restarted process
    error = victims.slice(gpus=0).echo.call_one(1).exception(PATIENCE)
    assert isinstance(error, SupervisionError) and "enough" in str(error)


def test_replacement_process_has_environment_and_bootstrap_of_the_mesh(faults: Faults) -> None:
    def bootstrap() -> None:
        import os

        os.environ["FROM_BOOTSTRAP"] = "yes"

    class Reader(Victim):
        @endpoint
        def read(self, *names: str) -> list[str | None]:
            return [os.environ.get(name) for name in names]

    with this_host().spawn_procs({"gpus": 1}, bootstrap=bootstrap, env={"FROM_ENV": "too"}, restart=SOON) as procs:
        reader = procs.spawn("reader", Reader)
        for _ in range(2):
            assert reader.read.call_one("FROM_BOOTSTRAP", "FROM_ENV").get(PATIENCE) == ["yes", "too"]
            reader.end_process.call_one("SIGKILL").exception(PATIENCE)
            comes_back(reader)


class Dies(Victim):
    @endpoint
    def die(self) -> None:
        raise SystemExit(3)


class Knows(Victim):
    @endpoint
    def remember(self, other: ActorMesh) -> None:
        self.other = other

    @endpoint
    def ask(self, value: Any) -> Any:
        return self.other.echo.call_one(value).get(PATIENCE)

    @endpoint
    def comes_back(self) -> None:
        comes_back(self.other)

    @endpoint
    def take_one(self, other: ActorMesh) -> str:
        """Call a mesh without keeping the reference to it."""
        comes_back(other)
        del other
        gc.collect()
        return "back"


def test_third_party_without_link_to_the_owner_finds_the_replacement(faults: Faults) -> None:
    """An actor owns the processes. A third party got the reference from the main program."""
    with this_host().spawn_procs({"gpus": 2}) as procs:
        owner = procs.slice(gpus=0).spawn("owner", Owner)
        friend = procs.slice(gpus=1).spawn("friend", Knows)
        nested = owner.spawn.call_one(1, SOON).get(PATIENCE)
        friend.remember.call_one(nested).get(PATIENCE)
        for value in ("first", "second"):
            assert friend.ask.call_one(value).get(PATIENCE) == value
            nested.end_process.call_one("SIGKILL").exception(PATIENCE)
            friend.comes_back.call_one().get(2 * PATIENCE)
        assert friend.ask.call_one("third").get(PATIENCE) == "third"


def test_callee_of_a_process_finds_its_replacement(faults: Faults, tmp_path: Path) -> None:
    """The callee has the reference, has never used it, and has no link to the owner."""
    with this_host().spawn_procs({"gpus": 2}) as procs, gate(tmp_path) as (name, open_gate):
        owner = procs.slice(gpus=0).spawn("owner", Owner)
        friend = procs.slice(gpus=1).spawn("friend", Knows)
        nested = owner.spawn.call_one(1, SOON).get(PATIENCE)
        friend.remember.call_one(nested).get(PATIENCE)
        asked = begun(lambda port: nested.wait_for_other.call_one(friend, port, name))
        open_gate()
        asked.get(PATIENCE)
        nested.end_process.call_one("SIGKILL").exception(PATIENCE)
        comes_back(nested)
        friend.comes_back.call_one().get(2 * PATIENCE)


def test_replacement_is_announced_before_messages_to_it(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    replace, expected = ProcMeshState.replace, []

    def replaced(core: ProcMeshState, rank: int, token: str) -> None:
        peer = program().router.peers.get(token)
        expected.append(peer is not None and peer.expected)
        replace(core, rank, token)

    monkeypatch.setattr(ProcMeshState, "replace", replaced)
    with this_host().spawn_procs({"gpus": 1}, restart=SOON) as procs:
        victim = procs.spawn("victim", Victim)
        victim.end_process.call_one("SIGKILL").exception(PATIENCE)
        comes_back(victim)
    assert expected == [True]


def test_process_replaced_during_a_lookup_is_found() -> None:
    def find(core: ProcMeshState, rank: int) -> Peer:
        found = Peer(core.tokens[rank], 1)
        if found.token == "former":
            core.replace(rank, "successor")
        return found

    core = ProcMeshState("id", "name", Extent(("gpus",), (2,)), Peer("owner", 1), ["former", "other"], find)
    assert core.peer(0).token == "successor"
    assert core.peer(0) is core.known[0]
    assert [core.rank_of(token) for token in ("former", "successor", "other", "stranger")] == [0, 0, 1, None]


def test_old_reference_leads_to_the_replacement_process(faults: Faults, tmp_path: Path) -> None:
    """The actor's process did not hold the mesh when the owner announced the replacement."""
    with this_host().spawn_procs({"gpus": 1}) as home, this_host().spawn_procs({"gpus": 1}, restart=SOON) as procs:
        friend = home.spawn("friend", Knows)
        victim = procs.spawn("victim", Victim)
        friend.take_one.call_one(victim).get(PATIENCE)  # connects the processes
        with gate(tmp_path) as (name, open_gate):
            begun(friend.wait.call_one, name)
            asked = friend.take_one.call_one(victim)  # queued, with a reference to the old process
            victim.end_process.call_one("SIGKILL").exception(PATIENCE)
            comes_back(victim)
            open_gate()
            assert asked.get(2 * PATIENCE) == "back"


@pytest.mark.parametrize("reference", ["new", "old"])
def test_third_parties_find_the_replacement_process(reference: str, faults: Faults) -> None:
    """The actor has a reference from before the death, or is sent one afterwards."""
    with this_host().spawn_procs({"gpus": 2}, restart=SOON) as procs:
        friends = procs.spawn("friends", Knows)
        friend, other = friends.slice(gpus=0), friends.slice(gpus=1)
        friend.remember.call_one(other).get(PATIENCE)
        assert friend.ask.call_one("first").get(PATIENCE) == "first"
        other.end_process.call_one("SIGKILL").exception(PATIENCE)
        comes_back(other)
        if reference == "new":
            friend.remember.call_one(other).get(PATIENCE)
        assert friend.ask.call_one("second").get(PATIENCE) == "second"


def test_many_deaths_in_sequence_are_all_restarted(faults: Faults) -> None:
    """No table fills up. The leak check looks for descriptors that accumulate."""
    with this_host().spawn_procs({"gpus": 2}, restart=SOON) as procs:
        victims = procs.spawn("victims", Victim)
        seen = set()
        for i in range(10):
            one = victims.slice(gpus=i % 2)
            seen.add(one.pid.call_one().get(PATIENCE))
            one.end_process.call_one(("SIGKILL", "0", "SIGTERM")[i % 3]).exception(PATIENCE)
            comes_back(one, i)
        assert len(seen) == 10


def test_owner_restarts_with_its_own_meshes(faults: Faults) -> None:
    """The owner's meshes end with it. The new owner starts without meshes."""
    with this_host().spawn_procs({"gpus": 1}) as procs:
        owner = procs.spawn("owner", Owner, restart=SOON)
        nested = owner.spawn.call_one(2).get(PATIENCE)
        with Watch({str(pid): pid for pid in pids_of(nested)}) as watch:
            nested.slice(nested=0).end_process.call_one("SIGKILL").exception(PATIENCE)
            assert watch.left_after(PATIENCE) == []
        until(lambda: not owner.has_meshes.call_one().exception(PATIENCE), "there is an owner")
        until(lambda: not owner.has_meshes.call_one().get(PATIENCE), "it is the new one")
        again = owner.spawn.call_one(1).get(PATIENCE)
        assert again.echo.call_one("anew").get(PATIENCE) == "anew"


# Reports of restarts


class DiesInConstructor(Actor):
    def __init__(self) -> None:
        os._exit(3)

    @endpoint
    def echo(self, value: Any) -> Any:
        return value


class RaisesInConstructor(Actor):
    def __init__(self) -> None:
        raise ValueError("no data")

    @endpoint
    def echo(self, value: Any) -> Any:
        return value


def restarts_logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]


def test_processes_that_die_in_constructor_report_their_restarts(
    faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "monarch_backend")
    with this_host().spawn_procs({"gpus": 1}, name="frail", restart=Restart(max_restarts=2, backoff=0.01)) as procs:
        actor = procs.spawn("doomed", DiesInConstructor)
        failure = faults.next()
        last = actor.echo.call_one(1).exception(PATIENCE)
    logged = restarts_logged(caplog)
    assert len(logged) == 2
    for number, line in enumerate(logged, start=1):
        assert re.fullmatch(
            r"gpus 0 of frail \(pid \d+\): exited with status 3 in the constructor of doomed; "
            rf"restart {number} of 2 within 60 s, in 0\.0\d s",
            line,
        )
    for text in (str(failure), str(last)):
        assert re.search(
            r"exited with status 3 in the constructor of doomed; 2 restarts were used up in \d+\.\d s "
            r"\(max_restarts=2, within=60 s\)",
            text,
        )


def test_mesh_that_is_restarted_as_a_whole_logs_one_line_per_restart(
    faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "monarch_backend")
    policy = Restart(strategy="all", max_restarts=1, backoff=0.0)
    with this_host().spawn_procs({"gpus": 2}, name="frail", restart=policy) as procs:
        victims = procs.spawn("victims", Victim)
        victims.pid.call().get(PATIENCE)
        victims.slice(gpus=1).end_process.call_one("3").exception(PATIENCE)
        comes_back(victims.slice(gpus=1))
        victims.slice(gpus=1).end_process.call_one("3").exception(PATIENCE)
        failure = faults.next()
    assert [line.partition(": ")[2] for line in restarts_logged(caplog)] == [
        "exited with status 3; restart 1 of 1 within 60 s, in 0 s"
    ]
    assert re.search(r"exited with status 3; 1 restart was used up in \d+\.\d s", str(failure))


def test_actor_that_raises_in_constructor_reports_its_restarts(
    lasting: ProcMesh, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "monarch_backend")
    actor = lasting.slice(gpus=0).spawn("doomed", RaisesInConstructor, restart=Restart(max_restarts=2, backoff=0.0))
    failure = faults.next()
    assert restarts_logged(caplog) == [
        f"rank 0 of doomed: its actor failed: ValueError: no data; restart {number} of 2 within 60 s, in 0 s"
        for number in (1, 2)
    ]
    assert re.search(r"ValueError: no data; 2 restarts were used up in \d+\.\d s \(max_restarts=2", str(failure))
    assert "used up" in str(actor.echo.call_one(1).exception(PATIENCE))


def test_policy_without_restarts_is_named_in_the_error(lasting: ProcMesh, faults: Faults) -> None:
    lasting.slice(gpus=0).spawn("doomed", RaisesInConstructor, restart=Restart(max_restarts=0))
    assert "it is not restarted (max_restarts=0, within=60 s)" in str(faults.next())
