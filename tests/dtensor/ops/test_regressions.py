"""Regression tests: values that were silently wrong, and calls that crashed workers or the controller."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from monarch_backend._core.torch_version import torch_version
from monarch_backend.actor import ProcMesh
from monarch_backend.dtensor import MeshClosedError, NotReadableError, RemoteOpError, RemoteTensor, RemoteTensorError
from tests.dtensor.conftest import DEVICE, workers_of
from tests.dtensor.values import same, value


def test_a_complex_number_is_not_the_int_that_it_equals(mesh_of: Callable[[str], Any]) -> None:
    x = workers_of(mesh_of("2")).put(torch.ones(3))
    assert ((x * 2).dtype, (x * (2 + 0j)).dtype, (x * 2).dtype) == (torch.float32, torch.complex64, torch.float32)


def test_a_tensor_of_the_controller_that_is_changed_has_the_new_values(mesh_of: Callable[[str], Any]) -> None:
    x = workers_of(mesh_of("2")).put(torch.ones(4))
    host, out = torch.zeros(4), torch.zeros(4)
    host[:2] = x[:2]
    assert host.tolist() == [1, 1, 0, 0]
    assert host.add_(x) is host
    assert host.tolist() == [2, 2, 1, 1]
    assert torch.add(x, x, out=out) is out
    assert out.tolist() == [2] * 4


def test_a_parameter_of_the_controller_is_trained(mesh_of: Callable[[str], Any]) -> None:
    norms = [nn.LayerNorm(4), nn.LayerNorm(4)]
    x = torch.randn(3, 4)
    for norm, data in zip(norms, [workers_of(mesh_of("2")).put(x), x], strict=True):
        optimizer = torch.optim.AdamW(norm.parameters(), lr=0.1)
        for _ in range(3):
            norm(data).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert norms[1].weight[0] != 1
    torch.testing.assert_close(norms[0].weight, norms[1].weight)


def test_new_sizes_of_a_detached_tensor_are_its_own(mesh_of: Callable[[str], Any]) -> None:
    x = workers_of(mesh_of("2")).put(torch.arange(6.0).view(2, 3))
    detached = x.detach()
    detached.t_()
    same(detached, torch.arange(6.0).view(2, 3).t())
    same(x, torch.arange(6.0).view(2, 3))
    detached.zero_()
    same(x, torch.zeros(2, 3))


def test_a_module_of_the_controller_stays_itself_in_another_dtype(mesh_of: Callable[[str], Any]) -> None:
    mesh_of("2")
    module, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)), torch.randn(2, 3)
    weights, y = list(module.parameters()), module(x)  # the graph of y refers to the weights
    for to in ((torch.float64,), ("cpu",), (torch.device("cpu"), torch.float64), (torch.zeros(1),)):
        assert module.to(*to) is module
        assert all(now is before for now, before in zip(module.parameters(), weights, strict=True))
    same(module(x), y)


def test_a_view_of_the_controller_arrives_in_a_storage_of_its_own(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2")
    x = workers_of(mesh).put(torch.arange(10.0)[2:5])
    assert x.storage_offset() == 0
    same(x.as_strided((2,), (1,), 1), torch.tensor([3.0, 4.0]))
    columns = distribute_tensor(torch.arange(24.0).view(4, 6), mesh, [Shard(1)]).to_local()
    same(columns.as_strided((4,), (1,), 1), torch.tensor([1.0, 2.0, 6.0, 7.0]))


def test_new_data_are_the_values(mesh_of: Callable[[str], Any]) -> None:
    x = workers_of(mesh_of("2")).put(torch.ones(2, 3))
    x.data = x[:1] * 2
    same(x + 0, torch.full((1, 3), 2.0))
    x.data = torch.zeros(5)
    same(x, torch.zeros(5))


def test_new_data_of_a_dtensor_are_the_values(mesh_of: Callable[[str], Any]) -> None:
    weight = torch.nn.Parameter(distribute_tensor(torch.arange(6.0), mesh_of("2"), [Shard(0)]))
    weight.data = weight.data * 2
    weight.data = weight.data.clamp(max=8).redistribute(placements=[Replicate()])
    same(weight * 1, torch.tensor([0.0, 2, 4, 6, 8, 8]))
    assert weight.placements == (Replicate(),)
    weight.data[1:3] = 1
    same(weight, torch.tensor([0.0, 1, 1, 6, 8, 8]))
    weight.data = torch.ones(6)
    (weight * 3).sum().backward()
    same(weight, torch.ones(6))
    weight.grad.data = weight.grad.data / 3  # type: ignore[union-attr]
    same(weight.grad, torch.ones(6))
    torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector([weight]) * 5, [weight])
    same(weight, torch.full((6,), 5.0))


def test_format_of_a_single_number(mesh_of: Callable[[str], Any]) -> None:
    x = distribute_tensor(torch.arange(6.0), mesh_of("2"), [Shard(0)])
    assert f"{x.mean():.2f} {x.argmax():d} {x.sum().full_tensor():6.1f}" == "2.50 5   15.0"
    with pytest.raises(TypeError, match="format"):
        f"{x:.2f}"


def test_copies_are_on_the_same_processes_and_pickles_are_refused(mesh_of: Callable[[str], Any]) -> None:
    x = distribute_tensor(torch.arange(15.0).view(5, 3), mesh_of("2"), [Shard(0)])
    copied = copy.deepcopy(x)
    copied.add_(1)
    same(copied - x, torch.ones(5, 3))
    with pytest.raises(RemoteTensorError, match="full_tensor"):
        pickle.dumps(x)


def test_memory_can_not_be_shared(mesh_of: Callable[[str], Any]) -> None:
    with pytest.raises(NotReadableError):
        workers_of(mesh_of("2")).put(torch.ones(2)).share_memory_()


def test_slices_that_overlap(all_procs: dict[str, ProcMesh]) -> None:
    procs = all_procs["2x2"]
    for where in ({"tp": 1}, {"dp": 1}, {"dp": 0}, {"tp": 0}):
        mesh = procs.slice(**where).device_mesh(DEVICE)
        x = distribute_tensor(torch.arange(7.0), mesh, [Shard(0)])
        same(x * 2, torch.arange(7.0) * 2)
        assert x.sum().item() == 21


def test_an_operator_that_workers_lack_fails_alone(mesh_of: Callable[[str], Any]) -> None:
    library = torch.library.Library("monarch_reviewed", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    x = workers_of(mesh_of("2")).put(torch.ones(2))
    twice = torch.ops.monarch_reviewed.twice(x)
    with pytest.raises(RemoteOpError, match="monarch_reviewed"):
        value(twice)
    same(x + 1, torch.full((2,), 2.0))


def test_a_group_of_the_program(mesh_of: Callable[[str], Any]) -> None:
    first = workers_of(mesh_of("2")).first
    if torch_version() < (2, 13):
        with pytest.raises(RemoteTensorError, match=r"needs torch 2\.13"):
            dist.new_group([first, first + 1])
    else:
        assert dist.new_group([first, first + 1]).size() == 2


def test_one_thread_in_a_function_for_one_rank_leaves_others_alone(mesh_of: Callable[[str], Any]) -> None:
    from monarch_backend.dtensor._controller.controller_mesh import _mode

    seen: list[bool] = []
    with _mode.disable():
        thread = threading.Thread(target=lambda: seen.append(_mode.disabled))
        thread.start()
        thread.join()
    assert seen == [False]


def test_forked_child_sends_no_commands(mesh_of: Callable[[str], Any]) -> None:
    x = workers_of(mesh_of("2")).put(torch.ones(2))
    kept: list[RemoteTensor] = [x + i for i in range(3)]
    child = os.fork()
    if not child:
        said = 1
        try:
            kept.clear()
            _ = [x * 2 for _ in range(50)]
            x.tolist()
        except MeshClosedError as error:
            said = 0 if "forked" in str(error) else 2
        finally:
            os._exit(said)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    same(kept[2], torch.full((2,), 3.0))
