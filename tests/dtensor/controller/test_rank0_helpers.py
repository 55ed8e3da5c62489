"""torch's helpers that run on rank 0 or on each rank: the controller runs them, or its error names an alternative."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import visualize_sharding
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from monarch_backend.dtensor import RemoteTensorError
from tests.dtensor.conftest import DEVICE
from tests.dtensor.values import same, value

FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

# State dicts ----------------------------------------------------------------------------------------------------


def test_a_whole_state_dict_is_the_controllers(mesh_of: Callable[[str], Any]) -> None:
    """The controller sends each worker its shard, and broadcasts nothing."""
    mesh = mesh_of("2")
    kinds: dict[str, Callable[[], nn.Module]] = {
        "plan": lambda: parallelize_module(nn.Linear(6, 5), mesh, ColwiseParallel()),
        "fsdp": lambda: fully_shard(nn.Linear(6, 5), mesh=mesh),
        "module of this process": lambda: nn.Linear(6, 5),
    }
    for make in kinds.values():
        module, wanted = make(), nn.Linear(6, 5).state_dict()
        set_model_state_dict(module, {**wanted}, options=FROM_RANK_0)
        for name, parameter in module.named_parameters():
            same(parameter, wanted[name])


def test_a_whole_state_dict_of_a_module_without_values(mesh_of: Callable[[str], Any]) -> None:
    with torch.device("meta"):
        module = nn.Linear(6, 5)
    module, wanted = parallelize_module(module, mesh_of("2"), ColwiseParallel()), nn.Linear(6, 5).state_dict()
    set_model_state_dict(module.to_empty(device="cpu"), {**wanted}, options=FROM_RANK_0)
    same(module.weight, wanted["weight"])


def test_keys_of_a_whole_state_dict(mesh_of: Callable[[str], Any]) -> None:
    """torch checks the keys as usual."""
    module = parallelize_module(nn.Linear(6, 4), mesh_of("2"), ColwiseParallel())
    wanted = nn.Linear(6, 4).state_dict()
    with pytest.raises(RuntimeError, match="bias"):
        set_model_state_dict(module, {"weight": wanted["weight"]}, options=FROM_RANK_0)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(module, {"weight": wanted["weight"] + 1}, options=options)
    same(module.weight, wanted["weight"] + 1)


def test_a_whole_state_of_an_optimizer(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2")

    def trained(module: nn.Module, x: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        module(x).square().sum().backward()
        optimizer.step()
        return module, optimizer

    alone, state = trained(nn.Linear(6, 4), torch.ones(2, 6))
    whole = get_optimizer_state_dict(alone, state, options=StateDictOptions(full_state_dict=True))
    x = distribute_tensor(torch.zeros(2, 6), mesh, [Replicate()])
    module, optimizer = trained(parallelize_module(nn.Linear(6, 4), mesh, ColwiseParallel()), x.to_local())
    set_optimizer_state_dict(module, optimizer, whole, options=FROM_RANK_0)
    for ours, reference in zip(module.parameters(), alone.parameters(), strict=True):
        same(optimizer.state[ours]["exp_avg"], state.state[reference]["exp_avg"])


# Visualisation --------------------------------------------------------------------------------------------------

DRAWN = importlib.import_module("torch.distributed.tensor.debug._visualize_sharding")


@pytest.mark.parametrize(
    ("sizes", "placements", "expected"),
    [
        ((5, 6), [Shard(0), Replicate()], {(0, 2): {0, 1}, (3, 4): {2, 3}}),
        ((4,), [Shard(0), Shard(0)], {(0, 0): {0}, (1, 1): {1}, (2, 2): {2}, (3, 3): {3}}),
        ((4, 4), [Replicate(), Replicate()], {(0, 3): {0, 1, 2, 3}}),
    ],
)
def test_a_picture_of_a_dtensor_is_drawn_once(
    mesh_of: Callable[[str], Any], monkeypatch: Any, capsys: Any, sizes: Any, placements: Any, expected: Any
) -> None:
    """The picture shows the ranks that hold each range of rows. A fake replaces tabulate, which torch uses to draw."""
    fake = types.ModuleType("tabulate")
    fake.__spec__ = importlib.util.spec_from_loader("tabulate", None)
    monkeypatch.setitem(sys.modules, "tabulate", fake)
    drawn: list[Any] = []
    monkeypatch.setattr(DRAWN, "_create_table", lambda shards, **_: drawn.append(shards) or "a table")
    mesh = mesh_of("2x2")
    first = int(mesh.mesh.min())
    visualize_sharding(distribute_tensor(torch.zeros(sizes), mesh, placements))
    assert capsys.readouterr().out == "a table\n"
    rows: dict[Any, set[int]] = {}
    for each, _, rank in drawn[0]:
        rows.setdefault(each, set()).add(rank - first)
    assert rows == expected


# Data parallel modules, and losses that are not DTensors --------------------------------------------------------


def test_distributed_data_parallel_error_has_a_remedy(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2")
    for options in ({}, {"device_mesh": mesh}, {"process_group": mesh.get_group()}):
        with pytest.raises(RemoteTensorError, match=r"distribute_module\(module, mesh\).*fully_shard"):
            nn.parallel.DistributedDataParallel(nn.Linear(2, 2), **options)


def test_remedy_for_distributed_data_parallel_works(mesh_of: Callable[[str], Any]) -> None:
    alone, x = nn.Linear(3, 2), torch.randn(5, 3)
    alone(x).square().mean().backward()
    module = nn.Linear(3, 2)
    module.load_state_dict(alone.state_dict())
    module = distribute_module(module, mesh_of("2"))
    module(distribute_tensor(x, mesh_of("2"), [Shard(0)])).square().mean().backward()
    for ours, reference in zip(module.parameters(), alone.parameters(), strict=True):
        same(ours.grad, reference.grad)


def test_error_for_a_plain_loss_with_a_dtensor_has_a_remedy(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2")
    x = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)]).requires_grad_()
    for add in (lambda plain, whole: plain + whole, lambda plain, whole: whole + plain):
        loss = add(x.to_local().square().sum(), x.sum())
        with pytest.raises(RemoteTensorError, match=r"In a backward.*DTensor\.from_local\(plain, mesh, \[Partial\(\)"):
            loss.backward()
    x.grad = None
    plain = x.to_local().square().sum()
    (DTensor.from_local(plain, mesh, [Partial()]) + x.sum()).backward()
    same(x.grad, 2 * value(x) + 1)


def test_a_plain_loss_that_all_ranks_have_beside_a_dtensor(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2")
    x = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Replicate()]).requires_grad_()
    plain = x.to_local().square().sum()
    (DTensor.from_local(plain, mesh, [Replicate()]) + x.sum()).backward()
    same(x.grad, 2 * value(x) + 1)
    assert x.device.type == DEVICE


def test_a_tensor_of_a_size_that_differs_by_rank(mesh_of: Callable[[str], Any]) -> None:
    """The tensor is made from an existing one, because torch's factory functions in C++ take one size for all ranks."""
    mesh = mesh_of("2")
    x = distribute_tensor(torch.ones(5), mesh, [Shard(0)]).to_local()
    made = DTensor.from_local(x.new_zeros(x.shape[0]) + 1, mesh, [Shard(0)], shape=(5,), stride=(1,))
    same(made, torch.ones(5))
