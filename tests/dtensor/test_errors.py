"""What goes wrong on workers, and on the controller: where it is raised, what it says, and what it leaves alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import monarch_backend.actor as ma
from monarch_backend.actor import MeshFailure, SupervisionError, this_host
from monarch_backend.dtensor import (
    MeshClosedError,
    MeshMismatchError,
    NotReadableError,
    RankDependentError,
    RemoteOpError,
    RemoteTensor,
    RemoteTensorError,
    _group,
)
from tests.dtensor import failing
from tests.dtensor.conftest import DEVICE, workers_of
from tests.dtensor.values import same


def out_of_range(mesh: Any, rows: list[int]) -> Any:
    """Each rank looks up its own row in a table of three: those who have a 5 fail."""
    workers = workers_of(mesh)
    indices = workers.put_by_rank([torch.tensor([row]) for row in rows])
    return failing.look_up(indices, workers.put(torch.randn(3, 2)))


def test_an_error_comes_with_the_line_that_issued_it_and_the_workers_traceback(mesh_of: Callable[[str], Any]) -> None:
    failed = out_of_range(mesh_of("2"), [5, 5])
    with pytest.raises(RemoteOpError) as caught:
        failed.tolist()
    error = caught.value
    assert "return failing.look_up(indices" in error.issued_at
    assert "in test_an_error_comes_with_the_line" in error.issued_at
    assert error.operation == failing.OPERATION
    assert error.rank == 0
    assert "index out of range" in str(error)
    assert "Traceback (most recent call last)" in error.remote_traceback
    os.kill(error.pid, 0)


def test_what_depends_on_it_fails_and_nothing_else(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2")
    failed = out_of_range(mesh, [5, 5])
    dependent = (failed * 2).sum()
    other = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    same(other * 3, torch.ones(4) * 3)
    with pytest.raises(RemoteOpError, match=failing.OPERATION):
        dependent.item()
    with pytest.raises(RemoteOpError, match=failing.OPERATION):
        print(failed)
    same(other + 1, torch.ones(4) + 1)


def test_one_rank_fails_before_a_collective_and_nobody_hangs(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("3")
    failed = out_of_range(mesh, [0, 5, 1])
    whole = DTensor.from_local(failed, mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
    with pytest.raises(RemoteOpError, match="raised on rank 1 "):
        whole.tolist()  # rank 0 has a value, and it is not the right one
    with pytest.raises(RemoteOpError, match="raised on rank 1 "):
        (whole + 1).sum().item()
    same(distribute_tensor(torch.ones(6), mesh, [Shard(0)]).sum(), torch.tensor(6.0))


def test_what_shares_memory_with_what_a_failed_operation_was_to_write_has_failed(
    mesh_of: Callable[[str], Any],
) -> None:
    mesh = mesh_of("2")
    whole = workers_of(mesh).put(torch.zeros(4, 2))
    first, rest = whole[:1], whole[1:]
    first.copy_(out_of_range(mesh, [0, 5]))
    for each in (first, whole, whole.view(8), whole + 1):
        with pytest.raises(RemoteOpError, match="raised on rank 1 "):
            each.tolist()
    if DEVICE != "xla":  # whose tensors do not say where in a storage they are
        same(rest, torch.zeros(3, 2))


def test_what_was_changed_in_place_by_what_failed_has_failed(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2")
    target = workers_of(mesh).put(torch.zeros(1, 2))
    target.add_(out_of_range(mesh, [5, 5]))
    with pytest.raises(RemoteOpError, match=failing.OPERATION):
        target.tolist()


def test_synchronous_operations_raise_at_themselves(mesh_of: Callable[[str], Any], monkeypatch: Any) -> None:
    mesh = mesh_of("2")
    monkeypatch.setattr(workers_of(mesh), "debug", True)
    with pytest.raises(RemoteOpError, match=failing.OPERATION):
        out_of_range(mesh, [0, 5])
    same(distribute_tensor(torch.ones(4), mesh, [Shard(0)]), torch.ones(4))


def test_wrong_arguments_are_refused_at_once_by_torchs_own_words(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2")
    x = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]).to_local()
    with pytest.raises(RuntimeError, match="broadcast"):
        x + workers_of(mesh).put(torch.ones(7))
    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        x @ x


def test_a_branch_on_the_rank_is_refused(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2x2")
    with pytest.raises(RankDependentError, match=r"true on some ranks.*monarch_backend\.dtensor\.run"):
        bool(mesh.get_rank() == workers_of(mesh).first)
    with pytest.raises(RankDependentError, match="another value on each rank"):
        range(mesh.get_local_rank("tp"))
    assert mesh.get_local_rank("tp") < 2


def test_nobody_gets_at_the_memory(mesh_of: Callable[[str], Any]) -> None:
    x = workers_of(mesh_of("2")).put(torch.ones(4))
    with pytest.raises(NotReadableError, match="in other processes"):
        x.data_ptr()
    with pytest.raises(RuntimeError):
        x.untyped_storage().data_ptr()
    assert x.tolist() == [1.0] * 4


def test_tensors_of_two_meshes(mesh_of: Callable[[str], Any]) -> None:
    one, other = (workers_of(mesh_of(name)).put(torch.ones(2)) for name in ("2", "3"))
    with pytest.raises(MeshMismatchError, match="move one of them first"):
        one + other


def test_a_program_that_is_a_rank_already_is_no_controller(monkeypatch: Any) -> None:
    assert dist.is_initialized()
    monkeypatch.setattr(_group, "_universe", None)  # so the default group is somebody else's
    with pytest.raises(RemoteTensorError, match="destroy_process_group"):
        _group.universe()


def test_a_dead_worker_fails_what_waits_and_names_itself(monkeypatch: Any) -> None:
    told: list[MeshFailure] = []
    monkeypatch.setattr(ma, "unhandled_fault_hook", told.append)
    procs = this_host().spawn_procs({"x": 2}, name="victims")
    mesh = procs.device_mesh("cpu")
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    victim = workers_of(mesh).line.ask("pid")()[1]
    os.kill(victim, signal.SIGSTOP)
    waiting = workers_of(mesh).read((x * 2).redistribute(mesh, [Replicate()]).to_local())
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(SupervisionError, match="victims: x 1 "):
        waiting()
    with pytest.raises((SupervisionError, MeshClosedError)):
        (x + 1).sum().item()
    procs.stop().get(30)
    assert told


def test_a_value_whose_mesh_is_gone() -> None:
    procs = this_host().spawn_procs({"x": 2})
    mesh = procs.device_mesh("cpu")
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    procs.stop().get(30)
    with pytest.raises(MeshClosedError, match="have ended"):
        (x + 1).sum().item()
    assert isinstance(x.to_local(), RemoteTensor)
    with pytest.raises(MeshClosedError, match="have ended"):
        print(x)


def test_what_nobody_has_read_is_told_at_the_end_if_it_has_failed(capfd: pytest.CaptureFixture[str]) -> None:
    procs = this_host().spawn_procs({"x": 2})
    mesh = procs.device_mesh("cpu")
    failed = out_of_range(mesh, [0, 5])
    workers_of(mesh).line.ask("pid")()  # they have come here
    procs.stop().get(30)
    said = capfd.readouterr().err
    assert f"{failing.OPERATION} raised on rank 1 " in said
    assert "nobody has read what depends on it: IndexError" in said
    del failed


def test_an_end_in_the_middle_of_things_is_no_failure(capfd: pytest.CaptureFixture[str]) -> None:
    """Some workers have come further than others by then, and wait for them."""
    for _ in range(3):
        procs = this_host().spawn_procs({"x": 2})
        x = distribute_tensor(torch.ones(8, 4), procs.device_mesh("cpu"), [Shard(0)])
        sums = [(x * i).sum().redistribute(placements=[Replicate()]) for i in range(100)]
        procs.stop().get(30)
        del sums
    assert "nobody has read" not in capfd.readouterr().err
