"""Steps of training_steps.py. They use the default process group, two ranks and one thread each.

The transformer and its parallel forms are those of examples/train_lm.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

Step = Callable[[], object]

DIM, LAYERS, HEADS, CONTEXT, BATCH = 256, 4, 4, 64, 2
"""Of the transformer: 3.3 million parameters. BATCH is of each rank."""


def _without_all_reduce(model: DistributedDataParallel) -> DistributedDataParallel:
    """Give DDP on the fake backend a hook that does nothing, because the backend's futures hold no tensor."""
    if dist.get_backend() == "fake":
        model.register_comm_hook(None, noop_hook)
    return model


def _wide_ddp() -> Step:
    blocks = [nn.Sequential(nn.Linear(1024, 3584), nn.ReLU(), nn.Linear(3584, 1024)) for _ in range(4)]
    model = _without_all_reduce(DistributedDataParallel(nn.Sequential(*blocks)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(16, 1024)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def _gradients_alone() -> Step:
    buckets = [torch.zeros(size) for size in (1 << 18, *(25 << 18,) * 4, 1 << 21)]  # as DDP's

    def step() -> None:
        for bucket in buckets:
            dist.all_reduce(bucket)

    return step


def _train_lm() -> Any:
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import train_lm

    return train_lm


def _transformer() -> Any:
    return _train_lm().Transformer(DIM, LAYERS, HEADS, CONTEXT)


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(256, (BATCH, CONTEXT + 1))
    return tokens[:, :-1], tokens[:, 1:]


def _loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.nll_loss(scores.flatten(0, 1), targets.flatten())


def _language_model(parallel: str, compiled: bool = False) -> Step:
    shape = (1, 2) if parallel == "tp" else (2, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = _train_lm().parallelize(_transformer(), parallel, mesh)
    if parallel == "ddp":
        _without_all_reduce(model)
    if compiled:
        model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens, targets = _batch()

    def step() -> None:
        optimizer.zero_grad()
        _loss(model(tokens), targets).backward()
        optimizer.step()

    return step


class _FirstStage(nn.Module):
    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.embed, self.blocks = whole.embed, whole.blocks[: LAYERS // 2]

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.blocks(self.embed(tokens))


class _LastStage(nn.Module):
    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.blocks, self.norm, self.output = whole.blocks[LAYERS // 2 :], whole.norm, whole.output

    def forward(self, x: torch.Tensor) -> Any:
        return self.output(self.norm(self.blocks(x))).log_softmax(-1)


def _pipeline() -> Step:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, parts = dist.get_rank(), 4
    module = (_FirstStage, _LastStage)[rank](_transformer())
    tokens, targets = (x.repeat(parts, 1) for x in _batch())
    hidden = torch.zeros(BATCH, CONTEXT, DIM, requires_grad=True)  # so that its gradient goes back
    given = tokens[:BATCH] if rank == 0 else hidden
    made = hidden if rank == 0 else torch.empty(BATCH, CONTEXT, 256)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"), input_args=(given,), output_args=(made,))
    schedule = Schedule1F1B(stage, parts, loss_fn=_loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def alone() -> None:  # a stage without the other one and without waiting for it
        for _ in range(parts):
            scores = module(given)
            (scores.sum() if rank == 0 else _loss(scores, targets[:BATCH])).backward()

    def step() -> None:
        optimizer.zero_grad()
        if dist.get_backend() == "fake":
            alone()
        elif rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=targets)
        optimizer.step()

    return step


def _redistribute() -> Step:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = init_device_mesh("cpu", (2,))
    rows = DTensor.from_local(torch.randn(256, 512), mesh, [Shard(0)])  # 1 MiB in all
    sums = DTensor.from_local(torch.randn(512, 512), mesh, [Partial()])

    def step() -> None:
        rows.redistribute(placements=[Replicate()]).to_local()
        rows.redistribute(placements=[Shard(1)]).to_local()
        sums.redistribute(placements=[Replicate()]).to_local()
        sums.redistribute(placements=[Shard(0)]).to_local()

    return step


def _accelerate() -> Step:
    from accelerate import Accelerator
    from transformers import GPT2Config, GPT2LMHeadModel

    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")  # else it does not wrap in DDP
    sizes = {"n_embd": DIM, "n_layer": LAYERS, "n_head": HEADS, "n_positions": CONTEXT, "vocab_size": 256}
    accelerator = Accelerator(cpu=True)
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    _without_all_reduce(model)
    tokens, _ = _batch()

    def step() -> None:
        optimizer.zero_grad()
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()

    return step


STEPS: dict[str, Callable[[], Step]] = {
    "DDP, 29 M parameters": _wide_ddp,
    "all_reduce of 29 M gradients": _gradients_alone,
    "DDP": lambda: _language_model("ddp"),
    "DDP, compiled": lambda: _language_model("ddp", compiled=True),
    "FSDP2": lambda: _language_model("fsdp"),
    "TP": lambda: _language_model("tp"),
    "TP, compiled": lambda: _language_model("tp", compiled=True),
    "pipeline, 4 micro-batches": _pipeline,
    "four redistributions of 1 MiB": _redistribute,
    "Accelerate, GPT-2": _accelerate,
}


def training_step(kind: str) -> Step:
    """Make the model and everything else that the step needs. All ranks call it."""
    torch.manual_seed(0)
    return STEPS[kind]()
