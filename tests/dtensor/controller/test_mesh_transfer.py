"""Transfers between meshes: values arrive in any placements, and go from worker to worker."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, zeros

from monarch_backend._actor.calls import pending_calls
from monarch_backend._transport.local.frames import size_of
from monarch_backend._transport.local.router import Router
from monarch_backend.dtensor import RemoteOpError, RemoteTensorError, move, run
from monarch_backend.dtensor._worker.control_actor import MAX_FORGOTTEN, ControlInbox
from tests.dtensor import failing_lookup, worker_functions
from tests.dtensor.conftest import DEVICE, workers_of
from tests.dtensor.values import same, value

ONE = [Shard(0), Shard(1), Replicate()]


@pytest.mark.parametrize(("source", "target"), [("2", "3"), ("3", "2x2"), ("2x2", "2")])
def test_from_any_placements_to_any(mesh_of: Callable[[str], Any], source: str, target: str) -> None:
    here, there, whole = mesh_of(source), mesh_of(target), torch.randn(10, 7)
    for before in itertools.product(ONE, repeat=here.ndim):
        x = distribute_tensor(whole, here, list(before))
        for after in itertools.product(ONE, repeat=there.ndim):
            moved = move(x, there, list(after))
            assert moved.device_mesh == there
            assert moved.placements == tuple(after)
            assert value(moved).equal(whole)


def test_partial_tensor_is_reduced_before_its_transfer(mesh_of: Callable[[str], Any]) -> None:
    a, b = torch.randn(4, 6), torch.randn(6, 3)
    partial = distribute_tensor(a, mesh_of("2"), [Shard(1)]) @ distribute_tensor(b, mesh_of("2"), [Shard(0)])
    assert partial.placements == (Partial(),)
    same(move(partial, mesh_of("3")), a @ b)


def test_transfer_moves_the_values_at_its_call(mesh_of: Callable[[str], Any]) -> None:
    whole = torch.randn(6, 4)
    x = distribute_tensor(whole, mesh_of("2"), [Shard(0)])
    moved = move(x, mesh_of("3"), [Shard(0)])
    x.zero_()
    moved.add_(1)
    same(moved, whole + 1)
    same(x, whole * 0)


def test_gradients_go_back(mesh_of: Callable[[str], Any]) -> None:
    a, b = torch.randn(6, 4), torch.randn(4, 5)
    x = distribute_tensor(a, mesh_of("2"), [Shard(0)]).requires_grad_()
    w = distribute_tensor(b, mesh_of("3"), [Shard(1)]).requires_grad_()
    (move(x * 2, mesh_of("3"), [Replicate()]) @ w).square().sum().backward()
    p, q = a.clone().requires_grad_(), b.clone().requires_grad_()
    ((p * 2) @ q).square().sum().backward()
    same(x.grad, p.grad)  # type: ignore[arg-type]
    same(w.grad, q.grad)  # type: ignore[arg-type]


def test_to_another_mesh_of_the_same_processes(all_procs: Any) -> None:
    procs, whole = all_procs["2x2"], torch.randn(4, 5)
    first, second = (procs.slice(dp=i).device_mesh(DEVICE) for i in range(2))
    moved = move(distribute_tensor(whole, first, [Shard(0)]), second, [Shard(1)])
    assert value(moved).equal(whole)
    assert value(move(moved, procs.device_mesh(DEVICE), [Shard(0), Shard(0)])).equal(whole)


class Traffic:
    """Counts the bytes of messages that this process sends and of replies that it receives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes = 0
        for name, at in (("send", 7), ("multicast", 6)):
            self._count(monkeypatch, Router, name, lambda args, at=at: args[at : at + 2])
        self._count(monkeypatch, pending_calls, "loads", lambda args: args)

    def _count(self, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, of: Callable[[Any], Any]) -> None:
        own = getattr(where, name)

        def counting(*args: Any, **options: Any) -> Any:
            self.nbytes += size_of(*of(args))
            return own(*args, **options)

        monkeypatch.setattr(where, name, counting)


def test_no_value_passes_the_controller(mesh_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller's messages and replies are about as long for a tensor of 4 MiB as for one of 384 bytes."""
    here, there = mesh_of("2"), mesh_of("3")
    seen = Traffic(monkeypatch)
    lengths = []
    for rows in (6, 1 << 16):
        x = zeros(rows, 16, device_mesh=here, placements=[Shard(0)])
        move(x, there, [Shard(0)])  # the first move connects, defines and imports
        workers_of(there).synchronize()
        before = seen.nbytes
        x.add_(1)
        moved = move(x, there, [Shard(0)])
        workers_of(there).synchronize()
        lengths.append(seen.nbytes - before)
        assert moved.sum().item() == rows * 16
    before = seen.nbytes
    distribute_tensor(torch.ones(1 << 16, 16), here, [Shard(0)])
    assert seen.nbytes - before > 4 << 20  # the count includes values that the controller does send
    assert lengths[0] > 100
    assert lengths[1] < lengths[0] + 10_000


def test_earlier_failure_is_raised_where_the_moved_tensor_is_read(mesh_of: Callable[[str], Any]) -> None:
    x = distribute_tensor(torch.ones(2, 3), mesh_of("2"), [Replicate()])
    index = distribute_tensor(torch.tensor([7]), mesh_of("2"), [Replicate()])
    broken = DTensor.from_local(failing_lookup.look_up(index.to_local(), x.to_local()), mesh_of("2"), [Replicate()])
    moved = move(broken, mesh_of("3"), [Replicate()]) + 1
    with pytest.raises(RemoteOpError, match=f"have not come: .*{failing_lookup.OPERATION}"):
        moved.tolist()
    assert (move(x, mesh_of("3")) + 1).sum().item() == 12
    assert_inboxes_are_empty(mesh_of("2"), mesh_of("3"))
    with contextlib.suppress(RemoteOpError):  # the mesh on which it failed raises it, too, if it has not done so
        workers_of(mesh_of("2")).synchronize()


def test_failed_transfer_leaves_no_buffers_on_other_workers() -> None:
    inbox, released, gone = ControlInbox(), [], threading.Event()
    inbox.deliver(1, 0, "a part")
    inbox.refuse(1, "the other part has failed")
    inbox.keep(1, 2, lambda: (released.append(1), gone.set()))
    inbox.finish_read(1)
    inbox.keep(2, 1, lambda: released.append(2))
    inbox.forget(1, "another one could not take it")
    assert gone.wait(10)
    assert released == [1]
    inbox.deliver(1, 1, "what was on its way")
    inbox.refuse(1, "so was this")
    inbox.finish_read(1)
    assert not (inbox._parts or inbox._refused or 1 in inbox._kept or 1 in inbox._readers)
    with pytest.raises(RuntimeError, match="have not come: another one could not take it"):
        inbox.take(1, 2)
    assert not inbox._parts
    inbox.finish_read(2)
    assert released == [1, 2]
    inbox.keep(1, 2, lambda: released.append(1))
    assert released == [1, 2, 1]
    failed: list[str] = []

    def wait() -> None:
        try:
            inbox.take(3, 1)
        except RuntimeError as error:
            failed.append(str(error))

    waits = threading.Thread(target=wait)
    waits.start()
    inbox.forget(3, "no")
    waits.join(10)
    assert failed == ["the data of a transfer to this rank have not come: no"]
    for transfer_id in range(3, 3 + 2 * MAX_FORGOTTEN):
        inbox.forget(transfer_id, "")
    assert len(inbox._forgotten) == MAX_FORGOTTEN


def assert_inboxes_are_empty(*meshes: Any) -> None:
    """Assert that no transfer is left in the inboxes. The message that ends the last read may still be on its way."""
    for mesh in meshes:
        assert any(set(run(mesh, worker_functions.left_in_inboxes).get().values()) == {0} for _ in range(1000))


def test_transfers_leave_no_buffers(mesh_of: Callable[[str], Any]) -> None:
    here, there = mesh_of("2"), mesh_of("3")
    x = zeros(8, 8, device_mesh=here, placements=[Shard(0)])
    for _ in range(3):
        assert move(x, there, [Shard(0)]).sum().item() == 0
    assert_inboxes_are_empty(here, there)


def test_transfers_that_are_refused(mesh_of: Callable[[str], Any]) -> None:
    x = distribute_tensor(torch.ones(4), mesh_of("2"), [Shard(0)])
    with pytest.raises(RemoteTensorError, match="takes DTensors of this controller"):
        move(torch.ones(4), mesh_of("3"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give a Shard or Replicate for each dimension"):
        move(x, mesh_of("3"), [Partial()])
    with pytest.raises(ValueError, match="give a Shard or Replicate for each dimension"):
        move(x, mesh_of("2x2"), [Shard(0)])
    for other in ("cpu", torch.device("cpu"), None):
        with pytest.raises(TypeError, match=r"takes the DeviceMesh that the tensor goes to, as ProcMesh\.device_mesh"):
            move(x, other)  # type: ignore[arg-type]
