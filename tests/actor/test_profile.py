"""`ProcMesh.profile`: profiles of a mesh and of a slice, and ranks without one."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from monarch_backend._core import platform
from monarch_backend.actor import Actor, ProcMesh, endpoint, this_host
from monarch_backend.telemetry import step
from tests.actor.actors import stopped_processes
from tests.actor.support import PATIENCE, Faults

pytestmark = pytest.mark.skipif(
    not platform.HAS_MEMFD or "t" in sys.abiflags, reason="requests need memory files and the stack signal"
)


class Trainer(Actor):
    @endpoint
    def multiply(self) -> None:
        (torch.ones(8, 8) @ torch.ones(8, 8)).sum().item()
        step()


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    with this_host().spawn_procs({"gpus": 2}, name="trainers") as procs:
        procs.initialized.get(PATIENCE)
        yield procs


def _profiled(procs: ProcMesh, **options: object) -> object:
    trainers = procs.spawn("trainer", Trainer)
    future = procs.profile(**options)  # type: ignore[arg-type]
    while not future.done():
        trainers.multiply.call().get(PATIENCE)
    trainers.stop().get(PATIENCE)
    return future.get(PATIENCE)


@pytest.mark.slow
def test_mesh_is_profiled_while_the_program_goes_on(procs: ProcMesh, tmp_path: Path) -> None:
    result = _profiled(procs, steps=10)
    assert result.problems == {} and result.labels == ["gpus 0 of trainers", "gpus 1 of trainers"]  # type: ignore[attr-defined]
    assert 0 < result.clock_error_bound_ns < 10**6  # type: ignore[attr-defined]
    result.save(str(tmp_path / "trace.json"))  # type: ignore[attr-defined]
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert {each["pid"] for each in trace["traceEvents"] if each["name"] == "aten::mm"} == {
        each["pid"] for each in trace["otherData"]["profiles"]
    }
    assert trace["otherData"]["profiles"][0]["steps"] >= 10


@pytest.mark.slow
def test_slice_and_ranks_choose_processes(procs: ProcMesh) -> None:
    assert _profiled(procs, seconds=0.1, ranks=[1]).labels == ["gpus 1 of trainers"]  # type: ignore[attr-defined]
    assert _profiled(procs.slice(gpus=1), seconds=0.1).labels == ["gpus 1 of trainers"]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_stopped_and_dead_ranks_are_named(procs: ProcMesh, faults: Faults) -> None:
    with this_host().spawn_procs({"gpus": 3}, name="lossy") as lossy:
        trainers = lossy.spawn("trainer", Trainer)
        trainers.multiply.call().get(PATIENCE)
        lossy.slice(gpus=2).spawn("killer", Killer).kill.broadcast()
        faults.next()
        with stopped_processes(lossy._core.peer(1).pid):
            result = lossy.profile(seconds=0.1).get(PATIENCE)
    assert result.labels == ["gpus 0 of lossy"]
    assert result.problems["gpus 1 of lossy"] == "it does not answer: it is stopped"
    assert result.problems["gpus 2 of lossy"].startswith("it has ended: killed by signal 9")


class Killer(Actor):
    @endpoint
    def kill(self) -> None:
        signal.raise_signal(signal.SIGKILL)


def test_wrong_arguments_raise_at_once(procs: ProcMesh) -> None:
    for options, text in (
        ({}, "either seconds or steps"),
        ({"seconds": 1, "steps": 1}, "either seconds or steps"),
        ({"seconds": -1}, "more than 0"),
        ({"steps": True}, "1 to 1000000 steps"),
        ({"seconds": 1, "ranks": [2]}, "rank 2 is not one of the 2 ranks"),
        ({"seconds": 1, "ranks": []}, "at least one rank"),
    ):
        with pytest.raises(ValueError, match=text):
            procs.profile(**options)
