"""State that a program keeps of ended meshes does not grow."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import pytest

from monarch_backend._actor.runtime import program
from monarch_backend.actor import (
    Actor,
    ActorMesh,
    MeshFailure,
    ProcMesh,
    Restart,
    SupervisionError,
    endpoint,
    this_host,
    this_proc,
)
from tests.actor.actors import comes_back, until
from tests.actor.failing_actors import Victim
from tests.actor.support import PATIENCE, Faults

MIB = 1 << 20


def records() -> dict[str, int]:
    """Return the number of records that the program keeps, by kind."""
    gc.collect()
    here = program()
    owner = here.owner
    kinds: dict[str, Any] = {
        "meshes of processes": here.procs,
        "meshes of actors": here.actors,
        "children": here.main_children,
        "peers": here.router.peers,
        "links": here.router.by_link,
        "pending": here.pending,
        "meshes that run": owner.records.meshes,
        "members by number": owner.records.by_number,
        "members by token": owner.records.by_token,
        "early": owner.starter.early,
        "unread": owner.stuck.unread,
    }
    return {name: len(kind) for name, kind in kinds.items()}


def counts_have_not_grown(before: dict[str, int]) -> bool:
    """Return whether no count has grown.

    ``before`` may still count records of the first mesh, but not of three meshes.
    """
    return all(count <= before[name] for name, count in records().items())


def play(ending: str) -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    victims = procs.spawn("victims", Victim, "", "v" * MIB)
    others = procs.slice(gpus=1).spawn("others", Victim)
    victims.note.call(others).get(PATIENCE)
    if ending == "kill":
        procs.kill().get(PATIENCE)
    else:
        if ending == "actors first":
            victims.stop().get(PATIENCE)
        procs.stop().get(PATIENCE)


@pytest.mark.parametrize(
    "ending", ["stop", *(pytest.param(how, marks=pytest.mark.slow) for how in ("actors first", "kill"))]
)
def test_ended_mesh_leaves_no_state(ending: str) -> None:
    play(ending)
    before = records()
    for _ in range(3):
        play(ending)
    until(lambda: counts_have_not_grown(before), f"{records()} to be as {before}")


def test_failed_mesh_leaves_no_state_after_stop(faults: Faults) -> None:
    def fail() -> None:
        procs = this_host().spawn_procs({"gpus": 1})
        victim = procs.spawn("victim", Victim)
        assert isinstance(victim.end_process.call_one("3").exception(PATIENCE), SupervisionError)
        assert isinstance(faults.next(), MeshFailure)
        procs.stop().get(PATIENCE)

    fail()
    before = records()
    for _ in range(3):
        fail()
    until(lambda: counts_have_not_grown(before), f"{records()} to be as {before}")


def test_restarted_mesh_leaves_no_state(faults: Faults) -> None:
    def restarted() -> None:
        with this_host().spawn_procs({"gpus": 1}, restart=Restart(backoff=0.0)) as procs:
            victim = procs.spawn("victim", Victim)
            victim.end_process.call_one("SIGKILL").exception(PATIENCE)
            comes_back(victim)

    restarted()
    before = records()
    for _ in range(3):
        restarted()
    until(lambda: all(records()[kind] <= before[kind] for kind in before), f"{records()} to be as {before}")


def test_ended_actors_of_a_live_mesh_leave_no_state() -> None:
    with this_host().spawn_procs({"gpus": 1}) as procs:
        for home in (procs, this_proc()):

            def play(home: ProcMesh = home) -> None:
                victim = home.spawn("victim", Victim)
                victim.pid.call_one().get(PATIENCE)
                victim.stop().get(PATIENCE)

            play()
            before = records()
            for _ in range(3):
                play()
            until(lambda before=before: counts_have_not_grown(before), f"{records()} to be as {before}")


def test_constructor_arguments_are_released_after_construction() -> None:
    with this_host().spawn_procs({"gpus": 1}) as procs:
        victim = procs.spawn("victim", Victim, "", "v" * MIB)
        victim.initialized.get(PATIENCE)
        owned = victim._core.owned
        assert (owned.body, owned.buffers) == (b"", None)


def test_reference_to_a_forgotten_mesh_raises_a_clear_error() -> None:
    with this_host().spawn_procs({"gpus": 1}) as home:
        keeper = home.spawn("keeper", Victim)

        def play() -> weakref.ref[Any]:
            with this_host().spawn_procs({"gpus": 1}) as procs:
                victim = procs.spawn("victim", Victim)
                keeper.note.call_one(victim).get(PATIENCE)
                return weakref.ref(procs._core)

        forgotten = play()
        until(lambda: gc.collect() >= 0 and forgotten() is None, "the mesh to be forgotten")
        (victim,) = keeper.all_notes.call_one().get(PATIENCE)
        assert isinstance(victim, ActorMesh)
        error = victim.pid.call_one().exception(PATIENCE)
        assert isinstance(error, SupervisionError) and "its mesh has ended" in str(error)


class PeerReporter(Actor):
    @endpoint
    def peers(self, _mesh: ActorMesh) -> int:
        return len(program().router.peers)

    @endpoint
    def pid_of(self, mesh: ActorMesh) -> int:
        return mesh.pid.call_one().get(PATIENCE)

    @endpoint
    def keep(self, mesh: ActorMesh) -> None:
        self.mesh = mesh

    @endpoint
    def names(self) -> list[str]:
        """Return the names of the peers that this process knows."""
        return sorted(str(peer) for peer in program().router.peers.values())

    @endpoint
    def pid(self) -> int:
        return os.getpid()


def test_process_keeps_state_of_its_peers_only() -> None:
    with this_host().spawn_procs({"gpus": 8}) as procs:
        mesh = procs.spawn("peer_reporter", PeerReporter)
        assert set(mesh.peers.call(mesh).get(PATIENCE).values()) == {2}  # the process itself and its owner
        one, other = mesh.slice(gpus=3), mesh.slice(gpus=5)
        assert one.pid_of.call_one(other).get(PATIENCE) == other.pid.call_one().get(PATIENCE)
        other.keep.call_one(mesh).get(PATIENCE)
        name = f"gpus 3 of {procs.name} (pid {one.pid.call_one().get(PATIENCE)})"
        assert name in other.names.call_one().get(PATIENCE)  # rank 3 has called rank 5
        assert [future.get(PATIENCE) for future in (one.peers.call_one(mesh), other.peers.call_one(mesh))] == [3, 3]
