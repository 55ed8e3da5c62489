"""Model of controller.py: the transformer of examples/train_lm.py with tensor parallelism, built in four ways."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
BATCH, CONTEXT, DIM, LAYERS, HEADS = 16, 128, 128, 4, 4


@dataclass(frozen=True)
class Built:
    """A training step; ``step().item()`` is the loss. ``records()`` is the number of records written by the controller.

    ``records`` is None without a controller.
    """

    step: Callable[[], Any]
    records: Callable[[], int] | None = None


def build(how: str, size: int) -> Built:
    """Build the model. ``how`` is "torchrun", "torchrun-compiled", or with one controller "one" or "compiled"."""
    if how.startswith("torchrun"):
        return _under_torchrun(compiled=how == "torchrun-compiled")
    return _one_controller(size, captured=how == "compiled")


def _model(mesh: Any) -> Any:
    import train_lm

    torch.manual_seed(0)
    model = train_lm.Transformer(DIM, LAYERS, HEADS, CONTEXT)
    train_lm.tensor_parallel(model, mesh)
    return model


def _step(model: Any, tokens: Any, targets: Any, compiled: Callable[[Any], Any] = lambda part: part) -> Any:
    """Return a training step. ``compiled`` wraps its forward and its optimizer step, but not the backward."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @compiled
    def loss_of() -> Any:
        return F.nll_loss(model(tokens).flatten(0, 1), targets.flatten())

    update = compiled(optimizer.step)

    def step() -> Any:
        loss = loss_of()
        loss.backward()
        update()
        optimizer.zero_grad()
        return loss

    return step


def _batch() -> Any:
    return torch.randint(256, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(0))


def _under_torchrun(*, compiled: bool) -> Built:
    torch.set_num_threads(1)
    dist.init_process_group("monarch")
    model = _model(dist.init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("tp",)))
    batch = _batch()
    # Compile in parts: for a whole step, torch's dynamo (2.13) fails on the backward of DTensors.
    parts = {"compiled": torch.compile} if compiled else {}
    return Built(_step(model, batch[:, :-1], batch[:, 1:], **parts))


def _one_controller(size: int, *, captured: bool) -> Built:
    from torch.distributed.tensor import Replicate, distribute_tensor

    from monarch_backend.actor import this_host
    from monarch_backend.dtensor._controller import controller_mesh

    mesh = this_host().spawn_procs({"tp": size}).device_mesh("cpu")
    model = _model(mesh)

    def there(tensor: torch.Tensor) -> Any:
        return distribute_tensor(tensor, mesh, [Replicate()]).to_local()

    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            module._buffers[name] = there(buffer)
    batch = there(_batch())
    step = _step(model, batch[:, :-1], batch[:, 1:])
    return Built(
        torch.compile(step, backend="monarch") if captured else step, _counted(controller_mesh.workers_of(mesh))
    )


def _counted(workers: Any) -> Callable[[], int]:
    return lambda: int(workers.sink.records)
