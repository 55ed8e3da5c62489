"""torch.distributed code inside actors: process groups, DDP and FSDP as in one process, and the death of a rank."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from monarch_backend._core import platform
from monarch_backend.actor import (
    ActorError,
    ActorMesh,
    Channel,
    ProcMesh,
    Restart,
    SupervisionError,
    this_host,
)
from monarch_backend.process_group import GroupClosedError, RankFailedError
from tests.actor import process_group_actors
from tests.actor.actors import until
from tests.actor.process_group_actors import Trainer
from tests.actor.support import PATIENCE, Faults, gate

HOST = socket.gethostname()
WORLD = 3


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    with this_host().spawn_procs({"gpus": WORLD}, name="world") as procs:
        procs.process_group().get(PATIENCE)
        yield procs


@pytest.fixture(scope="module")
def trainers(procs: ProcMesh) -> ActorMesh:
    trainers = procs.spawn("trainers", Trainer)
    trainers.initialized.get(PATIENCE)
    return trainers


def pids_of(mesh: ActorMesh) -> list[int]:
    return list(mesh.pid.call().get(PATIENCE).values())


def values(future: Any) -> list[Any]:
    return list(future.get(PATIENCE).values())


def test_mesh_is_one_process_group(trainers: ActorMesh) -> None:
    for rank, told in enumerate(values(trainers.world.call())):
        assert (told["rank"], told["size"], told["backend"], told["actor"]) == (rank, WORLD, "monarch", rank)
        assert told["environment"] == {
            "RANK": str(rank),
            "WORLD_SIZE": str(WORLD),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(WORLD),
        }
    assert values(trainers.all_reduce.call(1.0)) == [[6.0]] * WORLD
    assert values(trainers.subgroup.call([0, 2])) == [[2.0], [1.0], [2.0]]


def test_two_meshes_are_two_process_groups(trainers: ActorMesh, faults: Faults) -> None:
    """Both groups work at the same time, and neither waits for the other."""
    with this_host().spawn_procs({"gpus": 2}) as others:
        others.process_group().get(PATIENCE)
        more = others.spawn("more", Trainer)
        both = [trainers.all_reduce.call(0.0, 200), more.all_reduce.call(10.0, 200)]
        assert values(both[1]) == [[21.0] * 200] * 2
        assert values(both[0]) == [[3.0] * 200] * WORLD


def in_one_process() -> tuple[list[float], dict[str, torch.Tensor]]:
    network = process_group_actors.model()
    return process_group_actors.train(network, range(WORLD)), network.state_dict()


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_training_equals_a_single_process(how: str, trainers: ActorMesh) -> None:
    """One process that trains on the whole batch has the mean of the ranks' losses, and the same parameters."""
    losses, state = in_one_process()
    results = values(getattr(trainers, how).call())
    for step, loss in enumerate(losses):
        assert sum(result[0][step] for result in results) / WORLD == pytest.approx(loss, rel=1e-5)
    for _, found in results:
        assert set(found) == set(state)
        for name, value in found.items():
            torch.testing.assert_close(value, state[name], rtol=1e-5, atol=1e-6)
            assert torch.equal(value, results[0][1][name]), "the ranks have the same bits"
    assert losses[-1] < losses[0]


def test_slice_is_its_own_process_group(faults: Faults) -> None:
    with this_host().spawn_procs({"gpus": WORLD}) as procs:
        part = procs.slice(gpus=slice(1, 3))
        part.process_group().get(PATIENCE)
        trainers = procs.spawn("trainers", Trainer)
        inside = trainers.slice(gpus=slice(1, 3))
        assert values(trainers.is_initialized.call()) == [False, True, True]
        assert [told["rank"] for told in values(inside.world.call())] == [0, 1]
        assert values(inside.all_reduce.call(5.0)) == [[11.0]] * 2
        procs.process_group().get(PATIENCE)  # then the whole mesh, which ends the group of the slice
        assert [told["size"] for told in values(trainers.world.call())] == [WORLD] * WORLD
        assert values(trainers.all_reduce.call(0.0)) == [[3.0]] * WORLD


def test_another_backend_can_be_chosen(faults: Faults) -> None:
    with this_host().spawn_procs({"gpus": 2}) as procs:
        procs.process_group(backend="gloo").get(PATIENCE)
        trainers = procs.spawn("trainers", Trainer)
        assert {told["backend"] for told in values(trainers.world.call())} == {"gloo"}
        assert values(trainers.all_reduce.call(1.0)) == [[3.0]] * 2


def test_unknown_backend_raises(faults: Faults) -> None:
    with this_host().spawn_procs({"gpus": 2}) as procs:
        error = procs.process_group(backend="carrier_pigeon").exception(PATIENCE)
        assert isinstance(error, ActorError) and "carrier_pigeon" in str(error).lower()
        procs.process_group().get(PATIENCE)  # the failed attempt does not affect the next one


def test_late_rank_of_a_failed_init_joins_the_next(faults: Faults, tmp_path: Path) -> None:
    """The first error ends the call. The call's store must remain, because other ranks still connect to it."""
    with gate(tmp_path) as (name, open_gate):

        def held() -> None:
            import torch._C._distributed_c10d as c10d

            from tests.actor.support import pass_gate

            class StoreAfterTheGate(c10d.TCPStore):
                def __init__(self, *args: Any, is_master: bool = False, **options: Any) -> None:
                    if not is_master:
                        pass_gate(name)
                    super().__init__(*args, is_master=is_master, **options)

            c10d.TCPStore = StoreAfterTheGate  # type: ignore[misc]

        with this_host().spawn_procs({"gpus": 2}, bootstrap=held) as procs:
            error = procs.process_group(backend="carrier_pigeon").exception(PATIENCE)
            assert isinstance(error, ActorError) and "carrier_pigeon" in str(error).lower()
            again = procs.process_group()
            with pytest.raises(TimeoutError):
                again.get(0.2)
            open_gate()
            again.get(PATIENCE)


def fails_with(future: Any) -> BaseException:
    """Return the cause of the error that an endpoint has raised."""
    error = future.exception(PATIENCE)
    assert isinstance(error, ActorError), error
    assert error.__cause__ is not None
    return error.__cause__


@pytest.mark.parametrize("where", ["in collectives", "in a barrier", "elsewhere"])
def test_death_of_a_rank_ends_collectives_of_others(where: str, faults: Faults) -> None:
    with this_host().spawn_procs({"gpus": WORLD}, name="world") as procs:
        procs.process_group().get(PATIENCE)
        trainers = procs.spawn("trainers", Trainer)
        pids = pids_of(trainers)
        dead, survivors = 1, [trainers.slice(gpus=rank) for rank in (0, 2)]
        port, begun = Channel.open()
        waiting = []
        if where == "in collectives":
            waiting = [trainers.slice(gpus=rank).all_reduce_for_ever.call_one(port) for rank in range(WORLD)]
        elif where == "in a barrier":
            waiting = [survivor.barrier.call_one(port) for survivor in survivors]
        for _ in waiting:
            begun.recv().get(PATIENCE)
        os.kill(pids[dead], signal.SIGKILL)
        failure = faults.next()
        assert (failure.ranks, failure.deaths[0].pid) == ((dead,), pids[dead])
        ends = waiting if where != "in collectives" else [waiting[0], waiting[2]]
        for future in ends:
            cause = fails_with(future)
            assert isinstance(cause, (RankFailedError, GroupClosedError)), cause
            assert_names(str(cause), dead, pids[dead])
        if where == "in collectives":
            assert isinstance(waiting[dead].exception(PATIENCE), SupervisionError)
        for survivor in survivors:  # later calls fail, too: an aborted group is never used again
            closed: list[BaseException] = []

            def is_closed(survivor: ActorMesh = survivor, closed: list[BaseException] = closed) -> bool:
                closed.append(fails_with(survivor.all_reduce.call_one(0.0)))
                assert_names(str(closed[-1]), dead, pids[dead])
                return isinstance(closed[-1], GroupClosedError)

            until(is_closed, "its group is closed")
            assert all(isinstance(error, (RankFailedError, GroupClosedError)) for error in closed)
            assert survivor.pid.call_one().get(PATIENCE) in pids, "the actor lives on"
        begun.close()


def assert_names(text: str, rank: int, pid: int) -> None:
    """Assert that the text names the rank, the host, the pid and the signal.

    Without a pidfd the fork server may have reaped the process, and the signal is not known.
    """
    assert str(rank) in text and HOST in text and str(pid) in text, text
    unknown = not platform.HAS_PIDFD and "gone (how it ended is not known here)" in text
    assert "signal 9" in text or "SIGKILL" in text or unknown, text


def test_survivors_form_a_smaller_group(faults: Faults) -> None:
    with this_host().spawn_procs({"gpus": WORLD}) as procs:
        procs.process_group().get(PATIENCE)
        trainers = procs.spawn("trainers", Trainer)
        os.kill(pids_of(trainers)[0], signal.SIGKILL)
        assert faults.next().ranks == (0,)
        error = procs.process_group().exception(PATIENCE)
        assert isinstance(error, SupervisionError) and "SIGKILL" in str(error)
        rest = trainers.without(trainers.failed_ranks)
        procs.without([0]).process_group().get(PATIENCE)
        assert [told["rank"] for told in values(rest.world.call())] == [0, 1]
        assert values(rest.all_reduce.call(1.0)) == [[3.0]] * 2


@pytest.mark.parametrize("strategy", ["one_for_one", "all"])
def test_restarted_mesh_forms_its_group_again(strategy: Any, faults: Faults) -> None:
    policy = Restart(strategy=strategy, max_restarts=5, backoff=0.0)
    with this_host().spawn_procs({"gpus": WORLD}, restart=policy) as procs:
        procs.process_group().get(PATIENCE)
        trainers = procs.spawn("trainers", Trainer)
        for victim in (2, 0):
            before = pids_of(trainers)
            assert values(trainers.all_reduce.call(0.0)) == [[3.0]] * WORLD
            os.kill(before[victim], signal.SIGKILL)
            until(lambda victim=victim, before=before: changed(trainers, victim, before), "the process is there again")
            procs.process_group().get(PATIENCE)
            assert [told["rank"] for told in values(trainers.world.call())] == list(range(WORLD))
            assert values(trainers.all_reduce.call(1.0)) == [[6.0]] * WORLD


def changed(trainers: ActorMesh, rank: int, before: list[int]) -> bool:
    try:
        return bool(pids_of(trainers)[rank] != before[rank])
    except SupervisionError:
        return False


def test_processes_with_a_live_group_end_quietly(faults: Faults, capfd: pytest.CaptureFixture[str]) -> None:
    with this_host().spawn_procs({"gpus": 2}) as procs:
        procs.process_group().get(PATIENCE)
        trainers = procs.spawn("trainers", Trainer)
        assert values(trainers.all_reduce.call(0.0)) == [[1.0]] * 2
    out, err = capfd.readouterr()
    assert not err
    # Gloo of torch 2.9 prints a line in each rank.
    assert not [line for line in out.splitlines() if "[Gloo] Rank" not in line]
