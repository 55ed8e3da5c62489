"""Errors on workers and on the controller: where they are raised, their text, and what they leave unaffected."""

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
)
from monarch_backend.dtensor._controller import controller_process_group
from monarch_backend.dtensor._worker import failures
from tests.actor.actors import until
from tests.actor.script_runner import Run
from tests.dtensor import failing_lookup
from tests.dtensor.conftest import DEVICE, workers_of
from tests.dtensor.values import same


def out_of_range(mesh: Any, rows: list[int]) -> Any:
    """Look up one row for each rank in a table of three rows. Ranks with row 5 fail."""
    workers = workers_of(mesh)
    indices = workers.put_by_rank([torch.tensor([row]) for row in rows])
    return failing_lookup.look_up(indices, workers.put(torch.randn(3, 2)))


def test_error_has_the_issuing_line_and_the_workers_traceback(mesh_of: Callable[[str], Any]) -> None:
    failed = out_of_range(mesh_of("2"), [5, 5])
    with pytest.raises(RemoteOpError) as caught:
        failed.tolist()
    error = caught.value
    assert "return failing_lookup.look_up(indices" in error.issued_at
    assert "in test_error_has_the_issuing_line_and_the_workers_traceback" in error.issued_at
    assert error.operation == failing_lookup.OPERATION
    assert error.rank == 0
    assert "index out of range" in str(error)
    assert "Traceback (most recent call last)" in error.remote_traceback
    os.kill(error.pid, 0)


def test_failure_affects_dependent_tensors_only(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2")
    failed = out_of_range(mesh, [5, 5])
    dependent = (failed * 2).sum()
    other = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    same(other * 3, torch.ones(4) * 3)
    with pytest.raises(RemoteOpError, match=failing_lookup.OPERATION):
        dependent.item()
    with pytest.raises(RemoteOpError, match=failing_lookup.OPERATION):
        print(failed)
    same(other + 1, torch.ones(4) + 1)


def test_failure_of_one_rank_before_a_collective_does_not_hang(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("3")
    failed = out_of_range(mesh, [0, 5, 1])
    whole = DTensor.from_local(failed, mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
    with pytest.raises(RemoteOpError, match="raised on rank 1 "):
        whole.tolist()  # rank 0 has a value, but a wrong one
    with pytest.raises(RemoteOpError, match="raised on rank 1 "):
        (whole + 1).sum().item()
    same(distribute_tensor(torch.ones(6), mesh, [Shard(0)]).sum(), torch.tensor(6.0))


def test_failed_write_invalidates_aliases(
    mesh_of: Callable[[str], Any],
) -> None:
    mesh = mesh_of("2")
    whole = workers_of(mesh).put(torch.zeros(4, 2))
    first, rest = whole[:1], whole[1:]
    first.copy_(out_of_range(mesh, [0, 5]))
    for each in (first, whole, whole.view(8), whole + 1):
        with pytest.raises(RemoteOpError, match="raised on rank 1 "):
            each.tolist()
    if DEVICE != "xla":  # an XLA tensor has no known offset in a storage
        same(rest, torch.zeros(3, 2))


def test_failed_inplace_op_invalidates_its_tensor(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2")
    target = workers_of(mesh).put(torch.zeros(1, 2))
    target.add_(out_of_range(mesh, [5, 5]))
    with pytest.raises(RemoteOpError, match=failing_lookup.OPERATION):
        target.tolist()


def check(mesh: Any, held: list[bool]) -> None:
    """Start a check that fails on the ranks with False. It has no result."""
    torch._assert_async(workers_of(mesh).put_by_rank([torch.tensor(each) for each in held]))


CHECK = "aten._assert_async.default"


@pytest.mark.parametrize("held", [[False, False], [True, False]])
def test_failed_check_raises_once_at_the_next_read(mesh_of: Callable[[str], Any], held: list[bool]) -> None:
    mesh = mesh_of("2")
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    check(mesh, held)
    with pytest.raises(RemoteOpError, match=f"{CHECK} raised on rank {held.index(False)} ") as caught:
        x.tolist()
    assert "torch._assert_async(workers_of(mesh)" in caught.value.issued_at
    assert "raised as well" not in str(caught.value)  # equal failures on both ranks are reported as one
    same(x, torch.ones(4))
    workers_of(mesh).synchronize()


@pytest.mark.parametrize("read", ["item", "bool", "equal", "nonzero", "synchronize"])
def test_every_wait_for_a_value_raises_a_failed_check(mesh_of: Callable[[str], Any], read: str) -> None:
    mesh = mesh_of("2")
    x = workers_of(mesh).put(torch.ones(1))
    reads: dict[str, Callable[[], Any]] = {
        "item": x.item, "bool": lambda: bool(x), "equal": lambda: torch.equal(x, x), "nonzero": x.nonzero,
        "synchronize": workers_of(mesh).synchronize,
    }  # fmt: skip
    check(mesh, [True, False])
    with pytest.raises(RemoteOpError, match=f"{CHECK} raised on rank 1 "):
        reads[read]()
    reads[read]()


def test_singular_matrix_on_one_rank_raises(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2")
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    factors = torch.linalg.cholesky(workers_of(mesh).put_by_rank([torch.eye(2), -torch.eye(2)]))
    with pytest.raises(RemoteOpError, match=r"raised on rank 1 .*not positive-definite") as caught:
        factors.tolist()
    assert "factors = torch.linalg.cholesky(" in caught.value.issued_at
    same(x, torch.ones(4))


def test_singular_matrix_in_a_captured_step_raises(mesh_of: Callable[[str], Any]) -> None:
    matrix = distribute_tensor(-torch.eye(2), mesh_of("2"), [Replicate()])
    step = torch.compile(lambda a: torch.linalg.cholesky(a) * 2, backend="monarch", options={"inductor": False})
    with pytest.raises(RemoteOpError, match="not positive-definite"):
        step(matrix).tolist()
    same(step(-matrix), torch.eye(2) * 2)


@pytest.mark.parametrize("first", [0, 1])
def test_one_of_several_pending_reads_raises_a_failed_check(mesh_of: Callable[[str], Any], first: int) -> None:
    mesh = mesh_of("2")
    workers = workers_of(mesh)
    tensors = [workers.put(torch.full((2,), float(i))) for i in range(2)]
    check(mesh, [True, False])
    waits = [workers.read(each) for each in tensors]
    with pytest.raises(RemoteOpError, match=CHECK):
        waits[first]()
    assert waits[1 - first]().tolist() == [1.0 - first] * 2
    assert waits[first]().tolist() == [float(first)] * 2


def test_several_failed_checks_are_one_error(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2")
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    check(mesh, [True, False])
    check(mesh, [False, True])
    with pytest.raises(RemoteOpError, match=f"{CHECK} raised on rank 1 ") as caught:
        x.tolist()
    assert f"{CHECK} raised as well, on rank 0: RuntimeError" in str(caught.value)
    same(x, torch.ones(4))
    check(mesh, [True, False])
    with pytest.raises(RemoteOpError, match=f"{CHECK} raised on rank 1 "):
        x.tolist()


def test_first_failure_on_any_rank_is_the_cause(mesh_of: Callable[[str], Any]) -> None:
    """Rank 0 receives zeros for the failed values of rank 1, so its check fails too."""
    mesh = mesh_of("2")
    whole = DTensor.from_local(out_of_range(mesh, [0, 5]), mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
    torch._assert_async((whole != 0).all().to_local())
    with pytest.raises(RemoteOpError, match=f"{failing_lookup.OPERATION} raised on rank 1 ") as caught:
        whole.tolist()
    assert f"{CHECK} raised as well, on rank 0" in str(caught.value)
    same(distribute_tensor(torch.ones(4), mesh, [Shard(0)]), torch.ones(4))


def test_synchronous_check_raises_at_its_line_only(mesh_of: Callable[[str], Any], monkeypatch: Any) -> None:
    mesh = mesh_of("2")
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with monkeypatch.context() as patch:
        patch.setattr(workers_of(mesh).sink, "debug", True)
        with pytest.raises(RemoteOpError, match=CHECK):
            check(mesh, [True, False])
    same(x, torch.ones(4))


def test_invalid_values_of_a_data_dependent_op_raise(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2")
    with pytest.raises(RemoteOpError, match=r"aten\.bincount\.default raised on rank 0 "):
        torch.bincount(workers_of(mesh).put(torch.tensor([-1])))
    workers_of(mesh).synchronize()


def test_synchronous_operation_raises_at_its_line(mesh_of: Callable[[str], Any], monkeypatch: Any) -> None:
    mesh = mesh_of("2")
    monkeypatch.setattr(workers_of(mesh).sink, "debug", True)
    with pytest.raises(RemoteOpError, match=failing_lookup.OPERATION):
        out_of_range(mesh, [0, 5])
    same(distribute_tensor(torch.ones(4), mesh, [Shard(0)]), torch.ones(4))


def test_wrong_arguments_raise_torchs_error_at_once(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2")
    x = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]).to_local()
    with pytest.raises(RuntimeError, match="broadcast"):
        x + workers_of(mesh).put(torch.ones(7))
    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        x @ x


def test_branch_on_the_rank_is_refused(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2x2")
    with pytest.raises(RankDependentError, match=r"true on some ranks.*monarch_backend\.dtensor\.run"):
        bool(mesh.get_rank() == workers_of(mesh).first)
    with pytest.raises(RankDependentError, match="another value on each rank"):
        range(mesh.get_local_rank("tp"))
    assert mesh.get_local_rank("tp") < 2


def test_memory_of_a_remote_tensor_is_refused(mesh_of: Callable[[str], Any]) -> None:
    x = workers_of(mesh_of("2")).put(torch.ones(4))
    with pytest.raises(NotReadableError, match="in other processes"):
        x.data_ptr()
    with pytest.raises(RuntimeError):
        x.untyped_storage().data_ptr()
    assert x.tolist() == [1.0] * 4


def test_operation_on_tensors_of_two_meshes_is_refused(mesh_of: Callable[[str], Any]) -> None:
    one, other = (workers_of(mesh_of(name)).put(torch.ones(2)) for name in ("2", "3"))
    with pytest.raises(MeshMismatchError, match="move one of them first"):
        one + other


def test_program_that_is_a_rank_cannot_be_a_controller(monkeypatch: Any) -> None:
    assert dist.is_initialized()
    monkeypatch.setattr(controller_process_group, "_universe", None)  # as if the program had made the default group
    with pytest.raises(RemoteTensorError, match="destroy_process_group"):
        controller_process_group.universe()


def test_dead_worker_fails_waits_and_is_named(monkeypatch: Any) -> None:
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


def test_read_of_a_tensor_of_an_ended_mesh_raises() -> None:
    procs = this_host().spawn_procs({"x": 2})
    mesh = procs.device_mesh("cpu")
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    procs.stop().get(30)
    with pytest.raises(MeshClosedError, match="have ended"):
        (x + 1).sum().item()
    assert isinstance(x.to_local(), RemoteTensor)
    with pytest.raises(MeshClosedError, match="have ended"):
        print(x)


def test_unread_failure_is_logged_at_the_end_of_the_mesh(capfd: pytest.CaptureFixture[str]) -> None:
    procs = this_host().spawn_procs({"x": 2})
    mesh = procs.device_mesh("cpu")
    failed = out_of_range(mesh, [0, 5])
    workers_of(mesh).line.ask("pid")()  # wait until the workers have executed the lookup
    procs.stop().get(30)
    said = [""]

    def is_reported() -> bool:
        said[0] += capfd.readouterr().err
        return "no read has reported it: IndexError" in said[0]

    until(is_reported, "what has failed: a process's last words come behind its end")
    assert f"{failing_lookup.OPERATION} raised on rank 1 " in said[0]
    del failed


ENDS = """
import os, signal, threading, torch
import monarch_backend.actor as ma
from monarch_backend._actor import shutdown
from monarch_backend.dtensor._controller import command_stream
from torch.distributed.tensor import Replicate, distribute_tensor

if __name__ == "__main__":
    shutdown.SHUTDOWN_NOTICE_S, shutdown.SHUTDOWN_KILL_S = 50, 55  # a busy machine is not what this waits for
    command_stream.IDLE_FLUSH_S = 3600.0  # what the end does not send is never sent
    died = threading.Event()
    ma.unhandled_fault_hook = lambda failure: died.set()
    mesh = ma.this_host().spawn_procs({"x": 2}).device_mesh("cpu")
    table, row = (distribute_tensor(each, mesh, [Replicate()]) for each in (torch.ones(3, 2), torch.tensor([9])))
    table.tolist()  # the workers are there
"""


@pytest.mark.parametrize("end", ["", "raise ValueError"])
def test_unread_failure_is_logged_at_program_end(run_script: Callable[..., Run], end: str) -> None:
    ended = run_script(f"{ENDS}    torch.nn.functional.embedding(row, table)\n    {end}\n")
    for rank in range(2):
        assert f"aten.embedding.default raised on rank {rank} " in ended.err
    assert ended.err.count("no read has reported it: IndexError") == 2


def test_program_with_dead_workers_ends(run_script: Callable[..., Run]) -> None:
    """The commands that were not sent before the death are dropped without an error."""
    kill = """
    from monarch_backend.dtensor import run
    os.kill(list(run(mesh, os.getpid).get().values())[1], signal.SIGKILL)
    died.wait()
    table + 1
"""
    ended = run_script(ENDS + kill)
    assert ended.returncode == 0, ended.err
    assert "Traceback" not in ended.err


def test_end_with_pending_operations_is_no_failure(capfd: pytest.CaptureFixture[str]) -> None:
    """At that time some workers have executed more operations than others, and wait for them."""
    for _ in range(3):
        procs = this_host().spawn_procs({"x": 2})
        x = distribute_tensor(torch.ones(8, 4), procs.device_mesh("cpu"), [Shard(0)])
        sums = [(x * i).sum().redistribute(placements=[Replicate()]) for i in range(100)]
        procs.stop().get(30)
        del sums
    assert "no read has reported" not in capfd.readouterr().err


def test_long_unread_error_is_logged_shortened() -> None:
    assert failures._shortly("ValueError: no") == "ValueError: no"
    assert failures._shortly("ValueError: no\n" + "a line of a table\n" * 100) == "ValueError: no ..."
    assert failures._shortly("x" * 1000) == "x" * failures.MAX_MESSAGE_LENGTH + " ..."
