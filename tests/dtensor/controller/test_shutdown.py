"""End of a mesh's processes: issued operations are executed, failures are reported, and nothing blocks the end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import monarch_backend.actor as ma
from monarch_backend.actor import MeshFailure, ProcMesh, this_host
from monarch_backend.dtensor import MeshClosedError, RemoteOpError, move, run
from tests.actor.actors import until
from tests.dtensor import worker_functions
from tests.dtensor.conftest import workers_of
from tests.dtensor.values import same

FAILURE_TEXT = "aten._assert_async.default raised on rank {} "


@pytest.fixture
def procs() -> Iterator[ProcMesh]:
    """Two processes. Only a read or their stop sends their operations."""
    made = this_host().spawn_procs({"x": 2})
    workers_of(made.device_mesh("cpu")).line.later = lambda *_: None  # no timer sends operations
    yield made
    made.stop(timeout=0.1).get(30)


def ones(procs: ProcMesh) -> DTensor:
    """Return a tensor after the workers have executed all earlier commands."""
    x = distribute_tensor(torch.ones(4), procs.device_mesh("cpu"), [Shard(0)])
    same(x, torch.ones(4))
    return x


def wait_for_failures(capfd: pytest.CaptureFixture[str], *ranks: int) -> str:
    """Return the output of the processes, once it has the failures of these ranks.

    The output may arrive after the processes have ended.
    """
    output = ""

    def found() -> bool:
        nonlocal output
        output += capfd.readouterr().err
        return all(FAILURE_TEXT.format(rank) in output for rank in ranks)

    until(found, "the failures are printed")
    return output


def check(x: DTensor, wanted: float) -> None:
    torch._assert_async((x == wanted).all().to_local())


def write(folder: Path, x: DTensor) -> None:
    """Write the values of this rank's shard into the folder."""
    (folder / str(dist.get_rank())).write_text(str(x.to_local().tolist()))


def written(folder: Path) -> dict[str, str]:
    return {each.name: each.read_text() for each in folder.iterdir()}


def wait_and_write(folder: Path, gate: Path, x: DTensor) -> None:
    """Wait until the gate file exists, then write."""
    while not gate.exists():
        time.sleep(0.01)
    write(folder, x)


def in_a_with(procs: ProcMesh) -> None:
    with procs:
        pass


def on_another_thread(procs: ProcMesh) -> None:
    thread = threading.Thread(target=lambda: procs.stop().get(30))
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


def twice(procs: ProcMesh) -> None:
    for each in (procs.stop(), procs.stop()):
        each.get(30)
    procs.stop().get(30)


STOPS: dict[str, Callable[[ProcMesh], Any]] = {
    "stop": lambda procs: procs.stop().get(30), "with": in_a_with, "thread": on_another_thread, "twice": twice,
}  # fmt: skip


@pytest.mark.parametrize("how", STOPS)
def test_last_operations_run_and_their_failures_are_reported(
    procs: ProcMesh, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    x = ones(procs)
    x.add_(1)
    check(x, 2.0)
    check(x, 3.0)
    STOPS[how](procs)
    wait_for_failures(capfd, 0, 1)
    with pytest.raises(MeshClosedError, match="have ended"):
        x.tolist()


def test_collectives_before_stop_are_executed(procs: ProcMesh, capfd: pytest.CaptureFixture[str]) -> None:
    """The groups end after the last collectives have used them."""
    x = ones(procs)
    for _ in range(30):
        total = (x + 1).sum().redistribute(placements=[Replicate()])
    torch._assert_async(total.to_local() != 8)
    procs.stop().get(30)
    wait_for_failures(capfd, 0, 1)


def test_the_end_right_after_a_function_that_has_failed(procs: ProcMesh) -> None:
    """After the failure the workers are about to form new groups."""
    x = ones(procs)
    with pytest.raises(RemoteOpError, match="on purpose"):
        run(x.device_mesh, worker_functions.fails_on, 1, x).get(30)
    procs.stop().get(9)


def test_last_remote_call_runs_to_its_end(procs: ProcMesh, tmp_path: Path) -> None:
    x = ones(procs)
    x.add_(1)
    run(x.device_mesh, write, tmp_path, x)
    procs.stop().get(30)
    assert written(tmp_path) == {"0": "[2.0, 2.0]", "1": "[2.0, 2.0]"}


def test_operations_after_a_running_call_are_executed(
    procs: ProcMesh, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The workers are informed of the call's end before they receive the message to stop."""
    folder, gate = tmp_path / "written", tmp_path / "gate"
    folder.mkdir()
    x = ones(procs)
    run(x.device_mesh, wait_and_write, folder, gate, x)
    x.add_(1)
    check(x, 1.0)
    run(x.device_mesh, write, tmp_path, x)
    stopped = [procs.stop(), procs.stop()]
    assert not stopped[0].ready and not stopped[1].ready
    gate.touch()
    for each in stopped:
        each.get(9)  # otherwise the stop would wait for 10 seconds without effect
    assert written(folder) == {"0": "[1.0, 1.0]", "1": "[1.0, 1.0]"}
    assert (tmp_path / "1").read_text() == "[2.0, 2.0]"
    wait_for_failures(capfd, 0)


def test_tensors_in_mesh_transfer_arrive(procs: ProcMesh, mesh_of: Callable[[str], Any]) -> None:
    x = ones(procs)
    moved = move(x * 3, mesh_of("3"), [Shard(0)])
    procs.stop().get(9)
    same(moved, torch.full((4,), 3.0))


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> list[MeshFailure]:
    told: list[MeshFailure] = []
    monkeypatch.setattr(ma, "unhandled_fault_hook", told.append)
    return told


def pids(procs: ProcMesh) -> list[int]:
    return list(run(procs.device_mesh("cpu"), os.getpid).get(30).values())


def test_dead_worker_does_not_delay_stop(procs: ProcMesh, deaths: list[MeshFailure]) -> None:
    x = ones(procs)
    os.kill(pids(procs)[1], signal.SIGKILL)
    x.sum().full_tensor()
    procs.stop().get(30)
    procs.stop().get(30)


def test_call_on_a_dead_worker_does_not_delay_shutdown(
    procs: ProcMesh, tmp_path: Path, deaths: list[MeshFailure]
) -> None:
    x = ones(procs)
    victim = pids(procs)[1]
    gate = tmp_path / "gate"
    run(x.device_mesh, wait_and_write, tmp_path, gate, x).ignore()
    stopped = procs.stop()
    os.kill(victim, signal.SIGKILL)
    gate.touch()
    stopped.get(30)


def test_stuck_worker_delays_shutdown_only_until_the_timeout(procs: ProcMesh, tmp_path: Path) -> None:
    """One worker is stopped by a signal, and both are in the middle of a function."""
    x = ones(procs)
    victim = pids(procs)[0]
    run(x.device_mesh, wait_and_write, tmp_path, tmp_path / "never", x).ignore()
    os.kill(victim, signal.SIGSTOP)
    x.add_(1)
    procs.stop(timeout=0.1).get(30)


def test_full_command_stream_does_not_delay_shutdown(
    procs: ProcMesh, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """No further message fits into the stream, and the last operations are executed nevertheless."""
    gate = tmp_path / "gate"
    x = ones(procs)
    run(x.device_mesh, wait_and_write, tmp_path, gate, x)
    line = workers_of(x.device_mesh).line
    while line.has_room():
        line.raised(0)
    x.add_(1)
    check(x, 3.0)
    stopped = procs.stop()
    gate.touch()
    stopped.get(30)
    wait_for_failures(capfd, 0)
