"""Tensor parallel modules, alone and with FSDP2 on a 2-D mesh: "monarch" equals "gloo" bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tests.ecosystem.support import learns, on_both

WIDTH, WORDS, LENGTH, STEPS = 8, 12, 6, 4


class Block(nn.Module):
    """The part of a transformer that tensor parallelism shards: norm, up projection, down projection, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Words(nn.Module):
    """A language model without attention: embedding, two blocks, a norm and logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x)).clone()  # the copy avoids FSDP2's warning about an output that is a view


def _cut_columns_and_rows(model: Words, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)


def _cut_sequences(model: Words, mesh: DeviceMesh, loss_cut: bool) -> None:
    """Shard norms along the sequence. With ``loss_cut`` the logits stay sharded by word, for ``loss_parallel``."""
    for block in model.blocks:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1),
            output_layouts=Shard(-1) if loss_cut else Replicate(),
            use_local_output=not loss_cut,
        ),
    }
    parallelize_module(model, mesh, plan)


def _tokens(step: int, part: int = 0) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(1000 * part + step))
    return tokens, (tokens + 1) % WORDS


def _train(model: nn.Module, part: int = 0, loss_cut: bool = False) -> Any:
    # With foreach, one call would get DTensors of different meshes: of the 2-D mesh, and norms of FSDP's mesh only.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)
    losses, logits = [], None
    for _ in range(STEPS):
        tokens, targets = _tokens(0, part)
        logits = model(tokens)
        loss_of = nn.functional.cross_entropy
        if loss_cut:
            with loss_parallel():
                loss = loss_of(logits.flatten(0, 1), targets.flatten())
                loss.backward()
        else:
            loss = loss_of(logits.flatten(0, 1), targets.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.full_tensor() if isinstance(loss, DTensor) else loss).item())
    state = {name: (t, _full(t)) for name, t in model.state_dict().items()}
    return {"losses": losses, "logits": _full(logits), "state": state}


def _full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _whole_model(rank: int) -> Any:
    return _train(Words())


def _parallel(rank: int, plan: str) -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = Words()
    if plan == "columns and rows":
        _cut_columns_and_rows(model, mesh)
    else:
        _cut_sequences(model, mesh, loss_cut=plan == "loss")
    return _train(model, loss_cut=plan == "loss")


SLOW = [pytest.param(plan, marks=pytest.mark.slow) for plan in ("columns and rows", "loss")]


@pytest.mark.parametrize("plan", ["sequence", *SLOW])
def test_parallelize_module(plan: str) -> None:
    results = on_both(_parallel, 2, plan)
    whole = on_both(_whole_model, 1)[0]
    assert learns(whole["losses"])
    for result in results:
        assert result["losses"] == pytest.approx(whole["losses"], rel=1e-4), "not the model that was cut"
        assert result["logits"] == results[0]["logits"]
    up = [result["state"]["blocks.0.up.weight"][0]["local"] for result in results]
    assert up[0] != up[1] and up[0].shape == (2 * WIDTH, WIDTH)


def _prepared(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    plan = {
        "": PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),)),
        "0": ColwiseParallel(use_local_output=False),
        "1": PrepareModuleOutput(output_layouts=(Shard(-1),), desired_output_layouts=(Shard(0),)),
    }
    parallelize_module(block, mesh, plan)
    x = torch.randn(4, WIDTH)[2 * rank : 2 * rank + 2].requires_grad_()
    y = block(x)
    y.pow(2).sum().backward()
    return [y, x.grad, block[0].weight.grad]


def test_prepared_inputs_and_outputs() -> None:
    results = on_both(_prepared, 2)
    assert [result[0].shape for result in results] == [(2, WIDTH)] * 2


def _two_dims(rank: int, plan: str, options: dict[str, Any]) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Words()
    if plan == "columns and rows":
        _cut_columns_and_rows(model, mesh["tp"])
    else:
        _cut_sequences(model, mesh["tp"], loss_cut=plan == "loss")
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"], **options)
    fully_shard(model, mesh=mesh["dp"], **options)
    return _train(model, part=mesh["dp"].get_local_rank(), loss_cut=plan == "loss")


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["columns and rows", "sequence", "loss"])
def test_with_fsdp2(plan: str) -> None:
    results = on_both(_two_dims, 4, plan, {"reshard_after_forward": plan != "sequence"})
    assert all(learns(result["losses"]) for result in results)
    assert results[0]["losses"] == results[1]["losses"] != results[2]["losses"] == results[3]["losses"]
    for name, (_, full) in results[0]["state"].items():
        assert all(result["state"][name][1] == full for result in results), name
    up = {result["state"]["blocks.0.up.weight"][0]["local"] for result in results}
    assert len(up) == 4 and {bits.shape for bits in up} == {(WIDTH, WIDTH)}
