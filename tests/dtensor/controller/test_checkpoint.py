"""torch.distributed.checkpoint on the controller: each worker writes and reads its own shards."""

from __future__ import annotations

import copy
import importlib
import io
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException, format_utils
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, zeros
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from monarch_backend.dtensor import MeshMismatchError, RemoteOpError
from tests.dtensor.conftest import DEVICE, workers_of
from tests.dtensor.values import same, value

ONE = [Shard(0), Shard(1), Replicate()]


def test_saved_from_one_mesh_and_loaded_into_any_other_bit_for_bit(
    mesh_of: Callable[[str], Any], tmp_path: Path
) -> None:
    whole = torch.randn(10, 7)
    for source, placements in (("2", [Shard(0)]), ("2x2", [Shard(1), Shard(0)]), ("3", [Replicate()])):
        there = tmp_path / source
        dcp.save({"x": distribute_tensor(whole, mesh_of(source), placements)}, checkpoint_id=there)
        for target, ndim in (("3", 1), ("2x2", 2)):
            for after in itertools.product(ONE, repeat=ndim):
                state = {"x": zeros(10, 7, device_mesh=mesh_of(target), placements=list(after))}
                dcp.load(state, checkpoint_id=there)
                assert value(state["x"]).equal(whole)


def test_each_worker_writes_its_shard_and_no_other(mesh_of: Callable[[str], Any], tmp_path: Path) -> None:
    metadata = dcp.save(
        {"x": distribute_tensor(torch.zeros(6, 1000), mesh_of("2"), [Shard(0)])}, checkpoint_id=tmp_path
    )
    assert len(metadata.state_dict_metadata["x"].chunks) == 2
    sizes = [each.stat().st_size for each in tmp_path.glob("*.distcp")]
    assert len(sizes) == 2
    assert all(12_000 < size < 15_000 for size in sizes)


def test_plain_values_are_saved_and_loaded(mesh_of: Callable[[str], Any], tmp_path: Path) -> None:
    mesh = mesh_of("2")
    x, host = distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)]), torch.randn(5)
    local = distribute_tensor(torch.randn(2), mesh, [Replicate()]).to_local()
    saved = {"x": x, "host": host, "local": local, "step": 7, "nested": {"names": ["a", "b"], "rate": 0.5}}
    dcp.save(saved, checkpoint_id=tmp_path)
    mine = torch.zeros(5)
    state = {"x": x * 0, "host": mine, "local": local * 0, "step": 0, "nested": {"names": ["", ""], "rate": 0.0}}
    dcp.load(state, checkpoint_id=tmp_path)
    assert state["host"] is mine
    assert mine.equal(host)
    same(state["x"], value(x), 0)
    same(state["local"], value(local), 0)
    assert (state["step"], state["nested"]) == (7, {"names": ["a", "b"], "rate": 0.5})


def test_a_checkpoint_is_torchs_own(mesh_of: Callable[[str], Any], tmp_path: Path) -> None:
    """A program without a controller can read and write such a checkpoint. Here host tensors act for that program."""
    whole = torch.randn(5, 3)
    dcp.save({"x": distribute_tensor(whole, mesh_of("2"), [Shard(0)])}, checkpoint_id=tmp_path / "a")
    plain = {"x": torch.zeros(5, 3)}
    dcp.load(plain, checkpoint_id=tmp_path / "a")
    assert plain["x"].equal(whole)
    dcp.save({"x": whole + 1}, checkpoint_id=tmp_path / "b")
    state = {"x": zeros(5, 3, device_mesh=mesh_of("2"), placements=[Shard(1)])}
    dcp.load(state, checkpoint_id=tmp_path / "b")
    assert value(state["x"]).equal(whole + 1)


def test_checkpoint_converts_to_and_from_a_torch_save_file(mesh_of: Callable[[str], Any], tmp_path: Path) -> None:
    """The planners of format_utils start with an empty state dict and fill it from the checkpoint."""
    whole, one, two = torch.randn(4, 3), tmp_path / "one.pt", tmp_path / "two"
    saved = {"model": {"w": distribute_tensor(whole, mesh_of("2"), [Shard(0)])}, "step": 3}
    dcp.save(saved, checkpoint_id=tmp_path)
    importlib.reload(format_utils)  # as in a program that imports it after a mesh exists
    format_utils.dcp_to_torch_save(tmp_path, one)
    loaded = torch.load(one)
    assert loaded["step"] == 3 and loaded["model"]["w"].equal(whole)
    assert _load_state_dict_from_keys({"model"}, checkpoint_id=tmp_path)["model"]["w"].equal(whole)
    format_utils.torch_save_to_dcp(one, two)
    state = {"model": {"w": zeros(4, 3, device_mesh=mesh_of("3"), placements=[Shard(1)])}, "step": 0}
    dcp.load(state, checkpoint_id=two)
    assert value(state["model"]["w"]).equal(whole)  # type: ignore[index]
    assert state["step"] == 3


def test_saved_while_the_controller_goes_on(mesh_of: Callable[[str], Any], tmp_path: Path) -> None:
    whole = torch.randn(6, 4)
    x = distribute_tensor(whole, mesh_of("2"), [Shard(0)])
    saved = dcp.async_save({"x": x}, checkpoint_id=tmp_path)
    x.zero_()
    assert saved.result(30) is not None  # type: ignore[union-attr]
    dcp.load({"x": x}, checkpoint_id=tmp_path)
    assert value(x).equal(whole)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(self.up(x).relu())


def trained(mesh: Any, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = parallelize_module(Net(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer, steps)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, times: int = 1) -> None:
    for _ in range(times):
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
def test_training_goes_on_from_a_checkpoint_of_another_mesh(
    mesh_of: Callable[[str], Any], tmp_path: Path, full: bool
) -> None:
    options = StateDictOptions(full_state_dict=full)
    model, optimizer = trained(mesh_of("2"), 3)
    names = ("model", "optimizer")
    dcp.save(dict(zip(names, get_state_dict(model, optimizer, options=options), strict=True)), checkpoint_id=tmp_path)
    step(model, optimizer)
    other, its_optimizer = trained(mesh_of("3"), 1)
    state = dict(zip(names, get_state_dict(other, its_optimizer, options=options), strict=True))
    dcp.load(state, checkpoint_id=tmp_path)
    set_state_dict(
        other, its_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
    )
    step(other, its_optimizer)
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        same(another, value(one))


def test_a_stateful_object_saves_and_loads_itself(mesh_of: Callable[[str], Any], tmp_path: Path) -> None:
    model, _ = trained(mesh_of("2"), 1)
    before = copy.deepcopy({name: value(each) for name, each in model.state_dict().items()})
    dcp.save({"model": model}, checkpoint_id=tmp_path)
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    dcp.load({"model": model}, checkpoint_id=tmp_path)
    for name, each in model.state_dict().items():
        assert isinstance(each, DTensor)
        assert value(each).equal(before[name])


def test_a_slice_of_the_processes_saves_by_itself(all_procs: Any, tmp_path: Path) -> None:
    half = all_procs["2x2"].slice(dp=1).device_mesh(DEVICE)
    whole = torch.randn(5, 2)
    x = distribute_tensor(whole, half, [Shard(0)])
    dcp.save({"x": x}, checkpoint_id=tmp_path)
    assert len(list(tmp_path.glob("*.distcp"))) == 2
    x.zero_()
    dcp.load({"x": x}, checkpoint_id=tmp_path)
    assert value(x).equal(whole)


def test_mismatched_checkpoint_is_an_error_and_the_mesh_stays_usable(
    mesh_of: Callable[[str], Any], tmp_path: Path
) -> None:
    mesh = mesh_of("2")
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    dcp.save({"x": x}, checkpoint_id=tmp_path)
    with pytest.raises(RemoteOpError, match="Missing key"):
        dcp.load({"y": x}, checkpoint_id=tmp_path)
    with pytest.raises(MeshMismatchError, match="several sets of processes"):
        dcp.save({"x": x, "y": distribute_tensor(torch.ones(6), mesh_of("3"), [Shard(0)])}, checkpoint_id=tmp_path)
    with pytest.raises((RemoteOpError, CheckpointException)):
        dcp.load({"x": x}, checkpoint_id=tmp_path / "nothing")
    assert x.sum().item() == 4


@pytest.mark.parametrize("how", ["save", "async_save"])
@pytest.mark.parametrize("held", [[False, True], [True, False]])
def test_after_a_check_that_failed_the_earlier_checkpoint_stays(
    mesh_of: Callable[[str], Any], tmp_path: Path, held: list[bool], how: str
) -> None:
    """A failed check means that the values may be wrong, so they must not replace the earlier checkpoint."""
    mesh = mesh_of("2")
    whole = torch.arange(6.0)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    dcp.save({"x": x}, checkpoint_id=tmp_path)
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    x.fill_(-1)
    torch._assert_async(workers_of(mesh).put_by_rank([torch.tensor(each) for each in held]))
    with pytest.raises(RemoteOpError, match=rf"_assert_async.* raised on rank {held.index(False)} "):
        saved(how, {"x": x}, tmp_path)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before
    if how == "async_save":  # its future is not a read, so the failure has not been raised yet
        with pytest.raises(RemoteOpError, match="_assert_async"):
            workers_of(mesh).synchronize()
    saved(how, {"x": x}, tmp_path)  # the failure is raised only once
    x.zero_()
    dcp.load({"x": x}, checkpoint_id=tmp_path)
    same(x, torch.full((6,), -1.0), 0)


def saved(how: str, state: dict[str, Any], folder: Path) -> None:
    if how == "save":
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.async_save(state, checkpoint_id=folder).result(30)  # type: ignore[union-attr]


def test_torch_save_of_a_full_tensor(mesh_of: Callable[[str], Any]) -> None:
    whole = torch.randn(5, 3)
    x = distribute_tensor(whole, mesh_of("2"), [Shard(0)])
    file = io.BytesIO()
    torch.save({"x": x.full_tensor(), "host": whole, "step": 3}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert type(loaded["x"]) is torch.Tensor
    assert loaded["x"].equal(whole)
    assert loaded["host"].equal(whole)
