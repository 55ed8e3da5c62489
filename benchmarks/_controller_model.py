"""The step of controller.py's model: examples/train_lm.py's transformer with tensor parallelism, built three ways."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
BATCH, CONTEXT, DIM, LAYERS, HEADS = 16, 128, 128, 4, 4


def build(how: str, size: int) -> tuple[Callable[[], Any], Callable[[Any], float]]:
    """``(step, value)``: ``value(step())`` is the loss. ``how``: "torchrun", "one" or "compiled"."""
    return _under_torchrun() if how == "torchrun" else _one_controller(size, captured=how == "compiled")


def _model(mesh: Any) -> Any:
    import train_lm

    torch.manual_seed(0)
    model = train_lm.Transformer(DIM, LAYERS, HEADS, CONTEXT)
    train_lm.tensor_parallel(model, mesh)
    return model


def _step(model: Any, tokens: Any, targets: Any) -> Callable[[], Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> Any:
        loss = F.nll_loss(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _batch() -> Any:
    return torch.randint(256, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(0))


def _under_torchrun() -> tuple[Callable[[], Any], Callable[[Any], float]]:
    torch.set_num_threads(1)
    dist.init_process_group("monarch")
    model = _model(dist.init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("tp",)))
    batch = _batch()
    return _step(model, batch[:, :-1], batch[:, 1:]), lambda loss: loss.item()


def _one_controller(size: int, *, captured: bool) -> tuple[Callable[[], Any], Callable[[Any], float]]:
    from torch.distributed.tensor import Replicate, distribute_tensor

    from monarch_backend.actor import this_host

    mesh = this_host().spawn_procs({"tp": size}).device_mesh("cpu")
    model = _model(mesh)

    def there(tensor: torch.Tensor) -> Any:
        return distribute_tensor(tensor, mesh, [Replicate()]).to_local()

    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            module._buffers[name] = there(buffer)
    batch = there(_batch())
    step = _step(model, batch[:, :-1], batch[:, 1:])
    return torch.compile(step, backend="monarch") if captured else step, lambda loss: loss.item()
