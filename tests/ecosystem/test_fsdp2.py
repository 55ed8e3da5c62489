"""FSDP2 (`fully_shard`): "monarch" equals "gloo" bit by bit in 1-D, HSDP, mixed precision and accumulation.

With tensor parallelism: test_tensor_parallel.py. State dicts: test_checkpoint.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from tests.ecosystem.support import batch, learns, mlp, on_both, train_step
from tests.support.tiers import slow_except

STEPS = 4


def _second_dim(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.dim() == 2 else None


POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "keep-gathered": {"reshard_after_forward": False},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "bf16-reduce": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)},
    "fp16-output": {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.float16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
    },
    "second-dim": {"shard_placement_fn": _second_dim},
    "no-offload": {"offload_policy": OffloadPolicy()},
}


def shard(model: nn.Module, **options: Any) -> FSDPModule:
    """Shard ``model`` layer by layer and then as a whole, as the documentation of FSDP2 does."""
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    fully_shard(model, **options)
    assert isinstance(model, FSDPModule)
    return model


def _train(model: Any, rank: int, clip: float = 0.5, steps: int = STEPS) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, norms = [], []
    for _ in range(steps):
        x, y = batch(0, rank)
        loss = nn.functional.mse_loss(model(x).float(), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = {name: (t, t.full_tensor()) for name, t in model.state_dict().items()}
    moments = [entry["exp_avg"] for entry in optimizer.state.values()]
    return {"losses": losses, "norms": norms, "state": state, "moments": moments}


def _check(results: list[Any]) -> None:
    assert all(learns(result["losses"]) for result in results)
    assert results[0]["losses"] != results[1]["losses"], "the ranks saw the same data"
    for result in results:
        assert result["norms"] == results[0]["norms"]
        for name, (_, full) in result["state"].items():
            assert full == results[0]["state"][name][1]


def _one_dim(rank: int, policy: str) -> Any:
    return _train(shard(mlp(), **POLICIES[policy]), rank)


@pytest.mark.parametrize("policy", slow_except(POLICIES, "plain", "bf16"))
def test_fully_shard(policy: str) -> None:
    results = on_both(_one_dim, 2, policy)
    _check(results)
    assert results[0]["state"]["0.weight"][0]["local"] != results[1]["state"]["0.weight"][0]["local"]


def _uneven(rank: int) -> Any:
    # 3 ranks get 3, 3 and 2 of the 8 rows. The same is true of the biases of a layer with width 8.
    return _train(shard(mlp(layers=2)), rank)


def test_uneven_shards() -> None:
    results = on_both(_uneven, 3)
    _check(results)
    assert [r["state"]["0.bias"][0]["local"].shape for r in results] == [(3,), (3,), (2,)]


def _hybrid(rank: int, policy: str) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return _train(shard(mlp(), mesh=mesh, **POLICIES[policy]), rank)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", ["bf16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("plain", "keep-gathered"))]
)
def test_hybrid_sharding(policy: str) -> None:
    results = on_both(_hybrid, 4, policy)
    _check(results)
    local = [r["state"]["0.weight"][0]["local"] for r in results]
    assert local[0] == local[2] != local[1] == local[3], "replicas of a shard differ, or the shards are equal"


def _accumulate(rank: int, reduce: bool) -> Any:
    model: Any = shard(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        for part in range(2):
            last = part == 1
            model.set_is_last_backward(last)
            model.set_requires_gradient_sync(last or reduce)
            model.set_reshard_after_backward(last)
            x, y = batch(part, rank)
            loss = nn.functional.mse_loss(model(x), y) / 2
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "state": model.state_dict()}


@pytest.mark.parametrize("reduce", [False, True], ids=["no-sync", "sync"])
def test_gradient_accumulation(reduce: bool) -> None:
    assert all(learns(result["losses"]) for result in on_both(_accumulate, 2, reduce))


def _tuned(rank: int) -> Any:
    model: Any = shard(mlp())
    layers = [layer for layer in model.children() if isinstance(layer, nn.Linear)]
    layers[0].set_modules_to_forward_prefetch([layers[1]])
    layers[2].set_modules_to_backward_prefetch([layers[1]])
    model.set_gradient_divide_factor(4.0)
    handle = model.unshard(async_op=True)
    handle.wait()
    return _train(model, rank)


def test_prefetch_unshard_and_divide_factor() -> None:
    _check(on_both(_tuned, 2))


def _same_as_ddp(rank: int) -> Any:
    sharded: Any = shard(mlp())
    replicated = nn.parallel.DistributedDataParallel(mlp())
    losses = []
    for model in (sharded, replicated):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            losses.append(train_step(model, optimizer, *batch(0, rank)))
    return losses


def test_sharded_training_is_replicated_training() -> None:
    losses = on_both(_same_as_ddp, 2)[0]
    assert losses[:STEPS] == pytest.approx(losses[STEPS:], rel=1e-5)


def _subgroup_mesh(rank: int) -> Any:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mesh = DeviceMesh.from_group(groups[rank % 2], "cpu")
    return _train(shard(mlp(), mesh=mesh), rank)


def test_mesh_from_a_group() -> None:
    results = on_both(_subgroup_mesh, 4)
    assert results[0]["state"]["0.bias"][1] == results[2]["state"]["0.bias"][1]
    assert results[0]["state"]["0.bias"][1] != results[1]["state"]["0.bias"][1]
