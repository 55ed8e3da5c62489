"""Trainers with FSDP2 and tensor parallelism, and generators with other shards. Each rank has its own process."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Iterator

import pytest

from monarch_backend.actor import ActorError, ActorMesh, this_host
from monarch_backend.rdma import DroppedError, OwnerLostError, ShardedState
from tests.actor.support import PATIENCE, Faults
from tests.rdma.actors import take
from tests.rdma.weight_sync_actors import Generator, Trainer


def trainers_of(shape: dict[str, int], route: str = "kernel") -> ActorMesh:
    procs = this_host().spawn_procs(shape, name="trainers", bootstrap=functools.partial(take, route))
    procs.process_group().get(PATIENCE)
    return procs.spawn("trainers", Trainer)


def generators_of(count: int, route: str = "kernel") -> ActorMesh:
    shape = {"tp": count} if count else {}
    procs = this_host().spawn_procs(shape, name="generators", bootstrap=functools.partial(take, route))
    if count:
        procs.process_group().get(PATIENCE)
    generators = procs.spawn("generators", Generator)
    generators.shard.call().get(PATIENCE)
    return generators


@pytest.fixture(scope="module", params=[{"dp": 2, "tp": 2}, {"dp": 3}], ids=["2d", "fsdp"])
def trainers(request: pytest.FixtureRequest) -> Iterator[ActorMesh]:
    mesh = trainers_of(request.param)
    told = mesh.shard.call().get(PATIENCE)
    if "tp" in request.param:
        assert any("_S" in placements for placements in next(iter(told.values()))), told
    yield mesh
    mesh.proc_mesh.stop().get(PATIENCE)


@pytest.mark.parametrize(
    "count",
    [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(0, marks=pytest.mark.slow)],
    ids=["three", "two", "one whole"],
)
def test_every_step_arrives_bit_for_bit_and_once(count: int, trainers: ActorMesh) -> None:
    generators = generators_of(count)
    state = ShardedState.merge(trainers.register.call().get(PATIENCE))
    for step in range(3):
        trainers.step.call(step).get(PATIENCE)
        fetched = generators.load.call(state).get(PATIENCE)
        whole = next(iter(trainers.whole.call().get(PATIENCE).values()))
        needed = generators.compare.call(whole).get(PATIENCE)
        for by_rank, nbytes in zip(fetched.values(), needed.values(), strict=True):
            assert sum(by_rank.values()) == nbytes
            assert set(by_rank) <= set(range(len(trainers)))
    trainers.drop.call().get(PATIENCE)
    error = generators.load.call(state).exception(PATIENCE)
    assert isinstance(error, ActorError) and isinstance(error.__cause__, DroppedError)
    generators.proc_mesh.stop().get(PATIENCE)


@pytest.mark.slow
@pytest.mark.parametrize("route", ["thread", "tcp", "tls"])  # other routes: the tests above, and test_sharded_state.py
def test_every_route(route: str) -> None:
    trainers, reader = trainers_of({"dp": 2}, route), generators_of(0, route)
    trainers.shard.call().get(PATIENCE)
    state = ShardedState.merge(trainers.register.call().get(PATIENCE))
    for step in range(2):
        trainers.step.call(step).get(PATIENCE)
        fetched = reader.load.call_one(state).get(PATIENCE)
        whole = next(iter(trainers.whole.call().get(PATIENCE).values()))
        assert sum(fetched.values()) == reader.compare.call_one(whole).get(PATIENCE)
    reader.proc_mesh.stop().get(PATIENCE)
    trainers.proc_mesh.stop().get(PATIENCE)


@pytest.mark.slow
def test_an_owner_that_dies(faults: Faults) -> None:
    trainers, generators = trainers_of({"dp": 2}), generators_of(2)
    trainers.shard.call().get(PATIENCE)
    pids = list(trainers.pid.call().get(PATIENCE).values())
    state = ShardedState.merge(trainers.register.call().get(PATIENCE))
    generators.load.call(state).get(PATIENCE)
    os.kill(pids[1], signal.SIGKILL)
    assert faults.next().ranks == (1,)
    begun = time.monotonic()
    error = generators.load.call(state).exception(PATIENCE)
    assert isinstance(error, ActorError) and isinstance(error.__cause__, OwnerLostError)
    assert str(pids[1]) in str(error)
    assert time.monotonic() - begun < 10
    generators.proc_mesh.stop().get(PATIENCE)
    trainers.proc_mesh.stop().get(PATIENCE)
