"""Host tensors in operations with remote tensors: in-place changes reach the host tensor, and each is sent once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

from monarch_backend.dtensor import shard_batch
from monarch_backend.dtensor._controller import host_tensor_cache
from tests.dtensor.conftest import workers_of
from tests.dtensor.values import same


@pytest.fixture
def remote(mesh_of: Any) -> Any:
    return distribute_tensor(torch.arange(6.0), mesh_of("2"), [Replicate()]).to_local()


def test_host_tensor_is_changed_in_place_by_a_remote_tensor(remote: Any) -> None:
    host = torch.ones(6)
    before = host._version
    assert host.add_(remote, alpha=2) is host
    assert host.tolist() == [1, 3, 5, 7, 9, 11]
    assert host._version > before
    assert host.copy_(remote) is host
    assert host.tolist() == list(range(6))


def test_view_of_a_host_tensor(remote: Any) -> None:
    host = torch.zeros(3, 6)
    host[1].add_(remote)
    host[:, 2].mul_(remote[:3])
    assert host.tolist() == [[0] * 6, [0, 1, 2, 3, 4, 5], [0] * 6]


def test_foreach_operation_changes_host_tensors(remote: Any) -> None:
    hosts = [torch.ones(6), torch.zeros(6)]
    torch._foreach_add_(hosts, [remote, remote])
    assert [each.tolist() for each in hosts] == [[1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5]]


def test_sums_of_a_programs_own(mesh_of: Any) -> None:
    """Update host tensors in place: a summed loss, a table of counts, rows set from a DTensor. Autograd works."""
    weight = distribute_tensor(torch.arange(4.0), mesh_of("2"), [Shard(0)]).requires_grad_()
    loss, counts, rows = torch.zeros(()), torch.zeros(3, dtype=torch.long), torch.zeros(2, 4)
    for _ in range(2):
        loss += (weight * 2).sum()
    classes = distribute_tensor(torch.tensor([2, 0, 2, 1]), mesh_of("2"), [Shard(0)])
    counts.index_put_((classes,), torch.tensor(1), accumulate=True)
    rows[1] = weight.detach()
    loss.backward()
    assert (loss.item(), counts.tolist(), rows.tolist()) == (24, [1, 1, 2], [[0] * 4, [0, 1, 2, 3]])
    same(weight.grad, torch.full((4,), 4.0))


def test_rows_of_a_table_here_by_indices_there(mesh_of: Any) -> None:
    table, index = torch.randn(5, 2), torch.tensor([3, 0, 4, 3])
    there = distribute_tensor(index, mesh_of("2"), [Shard(0)])
    same(table[there], table[index])
    same(table[: len(index)][there > 2], table[: len(index)][index > 2])
    same(table[:, 0].gather(0, there.to_local()[:1]), table[:, 0].gather(0, index[:1]))


def test_out_argument_can_be_a_host_tensor(remote: Any) -> None:
    out = torch.empty(6)
    assert torch.mul(remote, 2, out=out) is out
    assert out.tolist() == [0, 2, 4, 6, 8, 10]


def test_remote_tensor_is_changed_in_place_by_a_host_tensor(remote: Any) -> None:
    host = torch.ones(6)
    assert remote.add_(host) is remote
    same(remote, torch.arange(6.0) + 1, 0)
    assert host.tolist() == [1] * 6


def test_a_parameter_that_no_plan_names_is_trained(remote: Any) -> None:
    """As for a norm that a plan leaves out: the parameter stays on the controller, and its gradient is remote."""
    weight = nn.Parameter(torch.ones(6))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        (remote * weight).sum().backward()
        optimizer.step()
    torch.testing.assert_close(weight.detach(), 1 - torch.arange(6.0) * (0.1 + 0.19))


def test_running_values_of_a_norm_that_stays_here(mesh_of: Any) -> None:
    alone, ours, x = nn.BatchNorm1d(4), nn.BatchNorm1d(4), torch.randn(6, 4)
    remote = distribute_tensor(x, mesh_of("2"), [Replicate()]).to_local()
    for _ in range(2):
        same(ours(remote), alone(x))
    assert isinstance(ours.running_mean, torch.Tensor)
    torch.testing.assert_close(ours.running_mean, alone.running_mean)
    torch.testing.assert_close(ours.running_var, alone.running_var)
    assert not torch.equal(ours.running_mean, torch.zeros(4))


# Transfers to the workers ---------------------------------------------------------------------------------------


class Sent(list[Any]):
    """Sizes of host tensors sent to workers: a number for a tensor sent to all, a list for one tensor per worker."""

    def __init__(self, mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        line = workers_of(mesh).line
        put, put_by_rank = line.put, line.put_by_rank

        def to_all(number: int, tensor: torch.Tensor) -> None:
            self.append(tensor.numel())
            put(number, tensor)

        def to_each(number: int, tensors: Any) -> None:
            self.append([None if each is None else each.numel() for each in tensors])
            put_by_rank(number, tensors)

        monkeypatch.setattr(line, "put", to_all)
        monkeypatch.setattr(line, "put_by_rank", to_each)


def test_each_worker_is_sent_its_shard_and_no_other(
    mesh_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size, placements, shards in (
        ("2", 7, [Shard(0)], [12, 9]),
        ("3", 7, [Shard(0)], [9, 9, 3]),
        ("2x2", 4, [Shard(0), Shard(1)], [4, 2, 4, 2]),
        ("2x2", 4, [Replicate(), Shard(0)], [6, 6, 6, 6]),
    ):
        whole, mesh = torch.randn(size, 3), mesh_of(name)
        with monkeypatch.context() as patch:
            sent = Sent(mesh, patch)
            x = distribute_tensor(whole, mesh, placements)
            assert sent == [shards]
        same(x, whole, 0)


def test_a_local_tensor_beside_a_distributed_one_is_sent_once_and_by_shards(
    mesh_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, host = mesh_of("2"), torch.arange(24.0).view(6, 4)
    x = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])
    sent = Sent(mesh, monkeypatch)
    for calculate, parts in (
        (lambda x: x * host, [12, 12]),
        (lambda x: host - x, [12, 12]),
        (lambda x: torch.cat([x, host], 1), [12, 12]),
        (lambda x: host.t() @ x, [12, 12]),
        (lambda x: torch.nn.functional.mse_loss(x, host), [12, 12]),
        (lambda x: x + host[0], 4),  # each worker needs all elements
    ):
        same(calculate(x), calculate(torch.ones(6, 4)))
        assert sent == [parts]
        sent.clear()
    once = distribute_tensor(host, mesh, [Shard(0)])
    same(x + once * 2 - once, host + 1)
    assert sent == [[12, 12]]


def test_backward_reuses_host_tensors_of_its_forward(
    mesh_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, host, labels = mesh_of("2"), torch.arange(24.0).view(4, 6), torch.tensor([1, 0, 2, 1])
    for calculate, placement, parts in (
        (lambda w: nn.functional.cross_entropy(nn.functional.linear(host, w), labels), Shard(0), [24, 4]),
        (lambda w: nn.functional.mse_loss(w, host), Shard(0), [[12, 12]]),
        (lambda w: (w.to_local() * host[0]).square().mean(), Replicate(), [6]),
    ):
        alone = torch.randn(4, 6, requires_grad=True)
        w = distribute_tensor(alone.detach(), mesh, [placement]).requires_grad_()
        with monkeypatch.context() as patch:
            sent = Sent(mesh, patch)
            loss = calculate(w)
            assert sent == parts
            loss.backward()
            assert sent == parts
        alone.to_local = lambda of=alone: of  # type: ignore[attr-defined]
        calculate(alone).backward()
        same(w.grad, alone.grad)


def test_host_tensor_changed_without_a_new_version_is_sent_again(
    mesh_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a batch that a loader fills in place: torch's version is unchanged, but each forward gets new values."""
    mesh, array = mesh_of("2"), np.ones((4, 3), dtype=np.float32)
    host, w = torch.from_numpy(array), distribute_tensor(torch.ones(2, 3), mesh, [Shard(0)]).requires_grad_()
    sent, version = Sent(mesh, monkeypatch), host._version
    for value in (1, 2, 3):
        array[:] = value
        w.grad = None
        nn.functional.linear(host, w).sum().backward()
        same(w.grad, torch.full((2, 3), 4.0 * value))
    assert (sent, host._version) == ([12] * 3, version)


def test_copies_are_forgotten(mesh_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, host = mesh_of("2"), torch.ones(4, 3)
    w = distribute_tensor(torch.ones(2, 3), mesh, [Shard(0)]).requires_grad_()
    nn.functional.linear(host, w).sum().backward()
    loss = nn.functional.linear(host, w).sum()
    copies = workers_of(mesh).kept["host copies"].copies
    assert len(copies._known) == 1, "older ones are gone with the first forward after a backward"
    loss.backward()
    assert not copies._known, "its backward has had it"
    loss = nn.functional.linear(host, w).sum()
    del host, loss
    assert not copies._known, "nobody can go back any more"
    monkeypatch.setattr(host_tensor_cache, "MAX_CACHED_BYTES", 100)
    hosts = [torch.ones(4, 3) for _ in range(5)]
    for each in hosts:
        nn.functional.linear(each, w)
    assert len(copies._known) == 3, "of many that nobody asks for the last ones"
    copies.clear()


def test_expanded_host_tensor_counts_with_its_bytes_on_workers(
    mesh_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host tensor holds one number, and its copy on a worker holds a matrix."""
    monkeypatch.setattr(host_tensor_cache, "MAX_CACHED_BYTES", 4000)
    mesh, one = mesh_of("2"), torch.ones(1, 1)
    x = distribute_tensor(torch.ones(20, 20), mesh, [Replicate()]).requires_grad_()
    (x * one.expand(20, 20)).sum().backward()
    for _ in range(10):
        x + one.expand(20, 20)
    copies = workers_of(mesh).kept["host copies"].copies
    assert len(copies._known) <= 3
    copies.clear()


def test_batches_of_a_data_loader_are_sent_by_rows(
    mesh_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, data = mesh_of("2x2"), TensorDataset(torch.randn(8, 3), torch.arange(8))
    sent = Sent(mesh, monkeypatch)
    loader = DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))
    seen = []
    for x, labels in loader:
        mine = shard_batch({"x": x, "labels": labels}, mesh["dp"])
        same(DTensor.from_local(mine["x"], mesh["dp"], [Shard(0)]), x, 0)
        seen += DTensor.from_local(mine["labels"], mesh["dp"], [Shard(0)]).tolist()
    assert sorted(seen) == list(range(8)) != seen
    assert sent == [[6, 6, 6, 6], [2, 2, 2, 2]] * 2
