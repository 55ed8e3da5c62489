"""Distributed checkpoints over "monarch" equal those over "gloo", and load on the other backend.

Two ranks save; one, two and four ranks load. Also: state dicts of FSDP2 and DDP with their optimizers, saves in the
background, and a failing save.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.ecosystem.support import batch, differences, freeze, mlp, on_both
from tests.support.ranks import run_ranks


def _folder(root: str, saved_by: str = "") -> Path:
    return Path(root) / (saved_by or dist.get_backend())


def _model(kind: str, seed: int = 0) -> nn.Module:
    model: nn.Module = mlp()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1 + seed)  # so that the parameters differ from those to be loaded
    if kind == "fsdp":
        fully_shard(model)
    elif kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    return model


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        x, y = batch(step, rows=8)  # the same batch on every rank, so that the number of ranks does not matter
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _whole(value: Any) -> Any:
    """Return a state dict with its DTensors gathered."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return value


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "step": 3, "note": "café"}


def _save(rank: int, root: str, kind: str) -> Any:
    model = _model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    _steps(model, optimizer, 0, 3)
    state = _state(model, optimizer)
    dcp.save(state, checkpoint_id=_folder(root))
    return _whole(state)


def _load(rank: int, root: str, kind: str, saved_by: str = "") -> Any:
    model = _model(kind, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    state = {**_state(model, optimizer), "step": 0, "note": ""}
    dcp.load(state, checkpoint_id=_folder(root, saved_by))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    loaded = _whole({**_state(model, optimizer), "step": state["step"], "note": state["note"]})
    return {"loaded": freeze(loaded), "losses": _steps(model, optimizer, state["step"], 2)}


@pytest.mark.parametrize("kind", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_save_on_two_ranks_load_on_any(kind: str, tmp_path: Path) -> None:
    saved = on_both(_save, 2, str(tmp_path), kind)[0]
    loads = [(1, kind), (2, kind), (4, kind), (2, "ddp" if kind == "fsdp" else "fsdp")]
    loads += [(4, "hsdp")] if kind == "fsdp" else []
    for ranks, into in loads:
        for result in on_both(_load, ranks, str(tmp_path), into):
            assert not differences(result["loaded"], saved), f"loaded on {ranks} ranks into {into}"
            assert all(loss == loss for loss in result["losses"])


def _save_then_go_on(rank: int, root: str) -> list[float]:
    model = _model("fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    _steps(model, optimizer, 0, 3)
    dcp.save(_state(model, optimizer), checkpoint_id=_folder(root))
    return _steps(model, optimizer, 3, 2)


def test_resumed_training_is_undisturbed_training(tmp_path: Path) -> None:
    undisturbed = on_both(_save_then_go_on, 2, str(tmp_path))
    resumed = on_both(_load, 2, str(tmp_path), "fsdp")
    assert [result["losses"] for result in resumed] == undisturbed


@pytest.mark.slow
def test_from_one_backend_to_the_other(tmp_path: Path) -> None:
    saved = on_both(_save, 2, str(tmp_path), "fsdp")[0]
    for saver, loader in (("gloo", "monarch"), ("monarch", "gloo")):
        results = run_ranks(_load, 4, str(tmp_path), "fsdp", saver, backend=loader)
        assert not differences(results[0]["loaded"], saved), f"saved by {saver}, loaded by {loader}"


def _without_a_group(rank: int, _address: str, folder: str) -> Any:
    model = mlp()
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return freeze(state["model"])


# torch warns that it reads without a process group, which the test asks for by no_dist=True.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_load_without_a_group(tmp_path: Path) -> None:
    saved = on_both(_save, 2, str(tmp_path), "fsdp")[0]
    loaded = run_ranks(_without_a_group, 1, str(tmp_path / "monarch"), backend=None)[0]
    assert loaded == saved["model"]


# DTensors without a module --------------------------------------------------------------------------------

PLACEMENTS = {
    "rows": (Shard(0),),
    "columns": (Shard(1),),
    "copies": (Replicate(),),
    "grid": (Shard(0), Shard(1)),
    "rows twice": (Shard(0), Shard(0)),
}


def _tensor(rank: int, name: str, scale: float) -> DTensor:
    placements = PLACEMENTS[name]
    shape = (2, 2) if len(placements) == 2 else (dist.get_world_size(),)
    numbers = torch.arange(35.0).reshape(5, 7).sin() * scale
    return distribute_tensor(numbers, init_device_mesh("cpu", shape), placements)


def _save_tensors(rank: int, root: str) -> None:
    dcp.save({name: _tensor(rank, name, 1.0) for name in ("rows", "columns")}, checkpoint_id=_folder(root))


def _load_tensors(rank: int, root: str, source: str, target: str) -> Any:
    state = {source: _tensor(rank, target, 0.0)}
    dcp.load(state, checkpoint_id=_folder(root))
    return [state[source], state[source].full_tensor()]


@pytest.mark.slow
def test_resharding(tmp_path: Path) -> None:
    on_both(_save_tensors, 2, str(tmp_path))
    expected = torch.arange(35.0).reshape(5, 7).sin()
    for source, target, ranks in [
        ("rows", "columns", 3),
        ("columns", "rows", 4),
        ("rows", "grid", 4),
        ("columns", "rows twice", 4),
        ("rows", "copies", 1),
    ]:
        for _, full in on_both(_load_tensors, ranks, str(tmp_path), source, target):
            assert torch.equal(full.tensor(), expected), (source, target)


# Other ways to save and load ------------------------------------------------------------------------------


def _whole_state_dicts(rank: int) -> Any:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model = _model("fsdp")
    _steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 0, 1)
    full = get_model_state_dict(model, options=options)
    other = _model("fsdp", seed=1)
    # Only rank 0 has the state dict. The other ranks get their shards from rank 0.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, dict(full) if rank == 0 else {}, options=options)
    return [full, _whole(other.state_dict()), _whole(model.state_dict())]


def test_full_state_dicts_from_rank_0() -> None:
    results = on_both(_whole_state_dicts, 2)
    assert results[0][0] == results[0][1] == results[0][2] == results[1][1]
    assert results[1][0] == {}


def _save_behind(rank: int, root: str) -> Any:
    model = _model("fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    _steps(model, optimizer, 0, 3)
    # a separate group, because its collectives run at the same time as those of the training
    future = dcp.async_save(_state(model, optimizer), checkpoint_id=_folder(root), process_group=dist.new_group())
    losses = _steps(model, optimizer, 3, 5)
    future.result()
    return losses


def test_async_save(tmp_path: Path) -> None:
    losses = on_both(_save_behind, 2, str(tmp_path))
    resumed = on_both(_load, 2, str(tmp_path), "fsdp")
    assert [result["losses"] for result in resumed] == [these[:2] for these in losses]


def _failing(rank: int, root: str) -> Any:
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save({f"of {rank}": (lambda: None) if rank == 1 else 1}, checkpoint_id=_folder(root))
    after = torch.ones(1)
    dist.all_reduce(after)  # the group must still work
    return [{rank: type(error).__name__ for rank, (error, _) in caught.value.failures.items()}, after]


def test_failing_save_raises_on_all_ranks(tmp_path: Path) -> None:
    results = on_both(_failing, 2, str(tmp_path))
    assert list(results[0][0]) == [1] and results[0] == results[1]
