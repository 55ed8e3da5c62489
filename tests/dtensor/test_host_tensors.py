"""Tensors of the controller that an operation with remote ones changes: it is they that change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor

from tests.dtensor.values import same


@pytest.fixture
def remote(mesh_of: Any) -> Any:
    return distribute_tensor(torch.arange(6.0), mesh_of("2"), [Replicate()]).to_local()


def test_in_place(remote: Any) -> None:
    host = torch.ones(6)
    before = host._version
    assert host.add_(remote, alpha=2) is host
    assert host.tolist() == [1, 3, 5, 7, 9, 11]
    assert host._version > before
    assert host.copy_(remote) is host
    assert host.tolist() == list(range(6))


def test_a_view_of_it(remote: Any) -> None:
    host = torch.zeros(3, 6)
    host[1].add_(remote)
    host[:, 2].mul_(remote[:3])
    assert host.tolist() == [[0] * 6, [0, 1, 2, 3, 4, 5], [0] * 6]


def test_lists(remote: Any) -> None:
    hosts = [torch.ones(6), torch.zeros(6)]
    torch._foreach_add_(hosts, [remote, remote])
    assert [each.tolist() for each in hosts] == [[1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5]]


def test_results_that_are_given(remote: Any) -> None:
    out = torch.empty(6)
    assert torch.mul(remote, 2, out=out) is out
    assert out.tolist() == [0, 2, 4, 6, 8, 10]


def test_a_remote_one_that_changes_by_a_host_s(remote: Any) -> None:
    host = torch.ones(6)
    assert remote.add_(host) is remote
    same(remote, torch.arange(6.0) + 1, 0)
    assert host.tolist() == [1] * 6


def test_a_parameter_that_no_plan_names_is_trained(remote: Any) -> None:
    """As a norm that a plan leaves out: it stays on the controller, its gradient is remote."""
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
