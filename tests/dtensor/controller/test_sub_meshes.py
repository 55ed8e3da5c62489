"""DTensors on a sub-mesh exist only on its ranks. The other processes hold no values of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, ones, zeros
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module

from monarch_backend.actor import ProcMesh
from monarch_backend.dtensor import RemoteTensorError, move, put_module, run
from monarch_backend.dtensor._controller import controller_mesh
from tests.dtensor.conftest import DEVICE, workers_of
from tests.dtensor.values import same

FIVE = torch.arange(5.0)


@pytest.fixture(params=[{"dp": 0}, {"dp": 1}, {"tp": 1}], ids=["first row", "last row", "last column"])
def part(request: pytest.FixtureRequest, all_procs: dict[str, ProcMesh]) -> Any:
    """A mesh of two of the four processes."""
    if "2x2" not in all_procs:
        pytest.skip("there are no 2x2 processes in this run")
    return all_procs["2x2"].slice(**request.param).device_mesh(DEVICE)


MADE: dict[str, Callable[[Any], Any]] = {
    "distributed": lambda mesh: distribute_tensor(torch.zeros(5), mesh, [Replicate()]),
    "made there": lambda mesh: zeros(5, device_mesh=mesh, placements=[Replicate()]),
    "of what is there": lambda mesh: distribute_tensor(
        distribute_tensor(torch.zeros(5), mesh, [Replicate()]).full_tensor(), mesh, [Replicate()]
    ),
    "gathered": lambda mesh: distribute_tensor(torch.zeros(5), mesh, [Shard(0)]).redistribute(mesh, [Replicate()]),
    "without values": lambda mesh: nn.init.zeros_(
        torch.empty_like(distribute_tensor(torch.empty(5, device="meta"), mesh, [Replicate()]), device=DEVICE)
    ),
}


def _copy(x: Any, values: torch.Tensor) -> None:
    x.to_local().copy_(values)


def _fill(x: Any, mesh: Any) -> None:
    run(mesh, _copy, x, FIVE).get()


def _all_reduce(x: Any, mesh: Any) -> None:
    dist.all_reduce(x.to_local().add_(FIVE / 2), group=mesh.get_group())


def _step(x: Any, mesh: Any) -> None:
    x.requires_grad_()
    (x * distribute_tensor(-FIVE, mesh, [Shard(0)])).sum().backward()
    torch.optim.SGD([x], lr=1.0).step()
    x.requires_grad_(False)


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "run": _fill,
    "a collective": _all_reduce,
    "a step": _step,
    "copy_": lambda x, mesh: x.copy_(distribute_tensor(FIVE, mesh, [Shard(0)])),
    "rows": lambda x, mesh: x[1:].copy_(distribute_tensor(FIVE, mesh, [Shard(0)])[1:]),
    "add_": lambda x, mesh: x.add_(distribute_tensor(FIVE, mesh, [Shard(0)])),
    "out": lambda x, mesh: torch.mul(distribute_tensor(FIVE, mesh, [Shard(0)]), 1, out=x),
}


@pytest.mark.parametrize("how", MADE)
@pytest.mark.parametrize("change", CHANGES)
def test_value_changed_by_members_is_read_from_members(part: Any, how: str, change: str) -> None:
    x = MADE[how](part)
    same(x, torch.zeros(5))
    CHANGES[change](x, part)
    for each in (x, x + 0, x.to_local() * 1, x.full_tensor()):
        same(each, FIVE)
    assert x.sum().item() == FIVE.sum()


def test_a_checkpoint_is_loaded_by_members(part: Any, tmp_path: Path) -> None:
    dcp.save({"x": FIVE}, checkpoint_id=tmp_path)
    loaded = {"x": zeros(5, device_mesh=part, placements=[Replicate()])}
    dcp.load(loaded, checkpoint_id=tmp_path)
    same(loaded["x"], FIVE)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
def test_tensors_of_the_controller_that_members_change(part: Any, placement: Any) -> None:
    x = distribute_tensor(FIVE, part, [placement])
    added, copied, rows, masked, out = (torch.zeros(5) for _ in range(5))
    added.add_(x)
    copied.copy_(x)
    rows[1:3] = x[1:3]
    masked[x > 2] = 1
    torch.add(x, 1, out=out)
    for found, expected in (
        (added, FIVE), (copied, FIVE), (rows, torch.tensor([0.0, 1, 2, 0, 0])), (masked, (FIVE > 2).float()),
        (out, FIVE + 1),
    ):  # fmt: skip
        assert torch.equal(found, expected)


@pytest.mark.parametrize("there", [Replicate(), Shard(0)])
def test_a_transfer_from_all_to_members(part: Any, mesh_of: Callable[[str], Any], there: Any) -> None:
    whole = distribute_tensor(FIVE, mesh_of("2x2"), [Replicate(), Shard(0)])
    moved = move(whole, part, [there])
    same(moved + 1, FIVE + 1)
    same(move(moved, mesh_of("2x2"), [Shard(0), Replicate()]), FIVE)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        return self.last(self.norm(self.first(x)).relu())


def _trained(model: nn.Module, x: Any) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    return [*model.parameters(), *model.buffers()]


@pytest.mark.parametrize("how", ["plain", "fsdp"])
def test_training(part: Any, how: str) -> None:
    """Parameters, running values and optimizer state equal those of a single process. Each member has all rows."""
    torch.manual_seed(3)
    expected, model, x = Model(), Model(), torch.randn(8, 4)
    model.load_state_dict(expected.state_dict())
    if how == "plain":
        put_module(model, part)
        given = DTensor.to_local(distribute_tensor(x, part, [Replicate()]))
    else:
        fully_shard(model.first, mesh=part)
        fully_shard(model, mesh=part)
        given = distribute_tensor(x, part, [Replicate()]).to_local()
    for found, single in zip(_trained(model, given), _trained(expected, x), strict=True):
        same(found, single, 1e-5)


@pytest.mark.parametrize("where", ["of the controller", "of all workers", "of its own members"])
def test_plain_tensor_on_a_sub_mesh(part: Any, where: str) -> None:
    """As SequenceParallel does with a norm's parameters. The gradient goes to the plain tensor's own place."""
    plain = torch.zeros(5)
    if where == "of all workers":
        plain = workers_of(part).put(plain)
    elif where == "of its own members":
        plain = zeros(5, device_mesh=part, placements=[Replicate()]).to_local()
    plain.requires_grad_()
    x = DTensor.from_local(plain, part, [Replicate()])
    (x * distribute_tensor(FIVE, part, [Shard(0)])).sum().backward()
    same(plain.grad, FIVE)
    with torch.no_grad():
        x.add_(distribute_tensor(FIVE, part, [Shard(0)]))
    same(x, FIVE)


def test_a_norm_between_sharded_layers_is_trained(part: Any) -> None:
    torch.manual_seed(3)
    expected = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4))
    plan: dict[str, Any] = {
        "0": ColwiseParallel(output_layouts=Shard(0)), "1": SequenceParallel(sequence_dim=0),
        "2": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
    }  # fmt: skip
    model = parallelize_module(copy.deepcopy(expected), part, plan)
    x = torch.randn(8, 4)
    for found, single in zip(_trained(model, x), _trained(expected, x), strict=True):
        same(found, single, 1e-4)


def test_a_tensor_of_all_is_not_changed_by_members_only(part: Any) -> None:
    """The other ranks would keep the old values, and a read could return those."""
    x, of_all = distribute_tensor(FIVE, part, [Replicate()]).to_local(), workers_of(part).put(torch.zeros(5))
    for change in (lambda: of_all.add_(x), lambda: of_all[:].copy_(x), lambda: torch._foreach_mul_([of_all], [x])):
        with pytest.raises(RemoteTensorError, match=r"they would keep the old values\. Make a new"):
            change()
    step = torch.compile(lambda y, x: y.add_(x), backend="monarch", options={"inductor": False})
    with pytest.raises(RemoteTensorError, match="a captured step changes a tensor of all workers"):
        step(of_all, x)
    same(of_all + x, FIVE)
    of_all.add_(1)
    same(of_all, torch.ones(5))


def test_a_list_of_tensors_of_all_and_of_members_is_changed(part: Any) -> None:
    x, of_all = distribute_tensor(FIVE, part, [Replicate()]).to_local(), workers_of(part).put(torch.zeros(5))
    for _ in range(2):
        torch._foreach_add_([of_all, x], 1.0)
        torch._foreach_addcmul_([of_all, x], [of_all, x], [of_all, x], value=0.0)
        torch._foreach_mul_([of_all, x], [2.0, 1.0])
    same(of_all, torch.full((5,), 6.0))
    same(x, FIVE + 2)


def test_tensors_of_two_slices(all_procs: dict[str, ProcMesh]) -> None:
    if "2x2" not in all_procs:
        pytest.skip("there are no 2x2 processes in this run")
    x, y = (
        distribute_tensor(FIVE, all_procs["2x2"].slice(dp=row).device_mesh(DEVICE), [Replicate()]).to_local()
        for row in range(2)
    )
    with pytest.raises(RemoteTensorError, match=r"of several slices of procs-\d+: move them to one mesh"):
        x + y


def test_a_module_that_all_have_is_put_on_members(part: Any, mesh_of: Callable[[str], Any]) -> None:
    torch.manual_seed(3)
    expected, x = Model(), torch.randn(8, 4)
    model = put_module(copy.deepcopy(expected), mesh_of("2x2"))
    model.first.weight.mine = "here"
    put_module(model, part)
    assert model.first.weight.mine == "here"
    given = distribute_tensor(x, part, [Replicate()]).to_local()
    for found, single in zip(_trained(model, given), _trained(expected, x), strict=True):
        same(found, single, 1e-5)


@pytest.mark.parametrize("where", ["of this process", "of all workers"])
@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "plain"])
def test_overflow_on_a_member_is_known_to_all(part: Any, where: str, distributed: bool) -> None:
    """As GradScaler does. On a mesh of GPUs its flag is a tensor of all workers."""
    gradient: Any = distribute_tensor(torch.tensor([1.0, torch.inf]), part, [Shard(0)])
    if not distributed:
        gradient = gradient.full_tensor()
    flag, factor = torch.zeros(1), torch.full((1,), 0.5)
    if where == "of all workers":
        flag, factor = workers_of(part).put(flag), workers_of(part).put(factor)
    torch._amp_foreach_non_finite_check_and_unscale_([gradient], flag, factor)
    assert flag.tolist() == [1.0] and flag.mul(2).tolist() == [2.0]
    assert gradient[:1].tolist() == [0.5]


def test_a_captured_step_of_a_module_that_was_put(part: Any) -> None:
    torch.manual_seed(3)
    expected = Model()
    model = put_module(copy.deepcopy(expected), part)
    x = torch.randn(8, 4)
    given = distribute_tensor(x, part, [Replicate()]).to_local()
    step = torch.compile(model, backend="monarch", fullgraph=True, options={"inductor": False})
    for found, single in zip(_trained(step, given), _trained(expected, x), strict=True):
        same(found, single, 1e-5)


def test_parameters_of_fully_shard_are_the_members_only(part: Any) -> None:
    with torch.device("meta"):
        empty = fully_shard(Model(), mesh=part)
    for each in (*fully_shard(Model(), mesh=part).parameters(), *empty.to_empty(device=DEVICE).parameters()):
        assert each._local_tensor._meta.outside == controller_mesh.outside(part)  # type: ignore[attr-defined]


def test_all_processes_have_the_same_as_before(mesh_of: Callable[[str], Any]) -> None:
    """Tensors of a mesh with all processes have no rank classes."""
    local = ones(5, device_mesh=mesh_of("2x2"), placements=[Replicate()] * 2).to_local()
    assert local._meta.classes is None  # type: ignore[attr-defined]
