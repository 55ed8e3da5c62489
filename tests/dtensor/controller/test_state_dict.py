"""torch.distributed.checkpoint.state_dict: stored values do not change with the model, and meta tensors are filled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.dtensor.values import same, value

FULL = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
TIMES = 5  # repetitions, because a worker may by chance finish a collective before its input changes


class Net(nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.register_buffer("scale", torch.rand(6) + 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(self.up(x * self.scale).relu())


def planned(mesh: Any) -> Any:
    return parallelize_module(Net(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def sharded(mesh: Any) -> Any:
    return fully_shard(Net(), mesh=mesh)


KINDS: dict[str, Callable[[Any], Any]] = {
    "plan": planned,
    "fsdp": sharded,
    "module of this process": lambda _mesh: Net(),
}


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


# Inputs of collectives ------------------------------------------------------------------------------------------

GATHERED: dict[str, Callable[[Any, Any], Any]] = {
    "whole": lambda x, mesh: x.redistribute(mesh, [Replicate()]),
    "rows of a sum": lambda x, mesh: DTensor.from_local(x.to_local(), mesh, [Partial()]).redistribute(mesh, [Shard(0)]),
    "gathered": lambda x, mesh: funcol.wait_tensor(
        torch.ops._c10d_functional.all_gather_into_tensor(x.to_local(), 2, mesh.get_group().group_name)
    ),
}
CHANGED: dict[str, Callable[[Any, Any], Any]] = {
    "itself": lambda x, view: x.add_(1),
    "a view from before": lambda x, view: view.add_(1),
}


@pytest.mark.parametrize("how", CHANGED)
@pytest.mark.parametrize("what", GATHERED)
def test_redistributed_tensor_may_be_changed_at_once(mesh_of: Callable[[str], Any], what: str, how: str) -> None:
    mesh, whole = mesh_of("2"), torch.randn(40, 60)
    with torch.no_grad():
        wanted = value(GATHERED[what](distribute_tensor(whole, mesh, [Shard(0)]), mesh))
        for _ in range(TIMES):
            tensors = [distribute_tensor(whole, mesh, [Shard(0)]) for _ in range(4)]
            views = [each.to_local().view(-1) for each in tensors]
            found = [GATHERED[what](each, mesh) for each in tensors]
            for each, view in zip(tensors, views, strict=True):
                CHANGED[how](each, view)
            for each in found:
                same(each, wanted)
            same(tensors[0], whole + 1)


def test_full_state_dict_is_independent_of_the_model(mesh_of: Callable[[str], Any]) -> None:
    model = sharded(mesh_of("2"))
    trained(model)
    for _ in range(TIMES):
        found = get_model_state_dict(model, options=FULL)
        with torch.no_grad():
            for each in model.parameters():
                each.add_(1)
        for name, each in model.named_parameters():
            same(found[name], value(each) - 1)


# From rank 0 ----------------------------------------------------------------------------------------------------


def test_optimizer_does_not_change_a_loaded_full_state(mesh_of: Callable[[str], Any]) -> None:
    """torch writes the loaded state into existing DTensors, including replicated ones."""
    model, other = planned(mesh_of("2")), planned(mesh_of("2"))
    optimizer, its_optimizer = trained(model), trained(other)
    whole: Any = get_optimizer_state_dict(model, optimizer, options=FULL)
    before = value(whole["state"]["down.bias"]["exp_avg"]).clone()
    set_optimizer_state_dict(other, its_optimizer, whole, options=FROM_RANK_0)
    same(its_optimizer.state[other.down.bias]["exp_avg"], before, 0)
    step(other, its_optimizer)
    same(whole["state"]["down.bias"]["exp_avg"], before, 0)
    same(optimizer.state[model.down.bias]["exp_avg"], before, 0)


# Tensors without values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [FULL, FROM_RANK_0], ids=["full", "from rank 0"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_module_on_meta_gets_a_whole_state_dict(
    mesh_of: Callable[[str], Any], kind: str, options: StateDictOptions
) -> None:
    """`to_empty` is not needed, because torch assigns the loaded tensors."""
    mesh = mesh_of("2")
    wanted = Net().state_dict()
    with torch.device("meta"):
        model = KINDS[kind](mesh)
    set_model_state_dict(model, {**wanted}, options=options)
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        assert not each.is_meta
        assert isinstance(each, DTensor) == (kind != "module of this process" and name != "scale")
        same(each, wanted[name], 0)


def test_copy_into_a_meta_tensor_does_nothing(mesh_of: Callable[[str], Any]) -> None:
    """As for a tensor of this process. load_state_dict() copies, and warns that the copy does nothing."""
    meta, larger = torch.empty(4, device="meta"), torch.empty(5, device="meta")
    x = distribute_tensor(torch.ones(4), mesh_of("2"), [Replicate()]).to_local()
    assert meta.copy_(x) is meta and meta.is_meta
    with pytest.raises(RuntimeError, match=r"expanded size|must match"):
        larger.copy_(x)
    saved = planned(mesh_of("2"))
    trained(saved)  # the first call places the buffer on the workers
    with torch.device("meta"):
        model = Net()
    with pytest.warns(UserWarning, match="no-op"):
        model.load_state_dict({"scale": saved.scale}, strict=False)
    assert model.scale.is_meta
