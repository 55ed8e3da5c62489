"""Checkpoints of a sharded model: save it, load it on another number of ranks, and under another launcher.

    torchrun --standalone --nproc-per-node=2 examples/checkpoints.py --steps 20
    python examples/checkpoints.py --ranks 3 --steps 40 --resume                           one controller, 3 workers
    torchrun --standalone --nproc-per-node=4 examples/checkpoints.py --steps 60 --resume

Each run continues from the newest checkpoint in --out. Batches depend on the step alone, so the losses are those of one
run of 60 steps up to float rounding. docs/tutorials/checkpoints.md explains it step by step.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from monarch_backend.actor import this_host

BATCH = 48  # rows over all ranks; 2, 3 and 4 ranks divide it


@contextmanager
def device_mesh(ranks: int) -> Iterator[DeviceMesh]:
    """Yield a mesh of the ranks that torchrun started, or without torchrun of worker processes that it starts."""
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend="monarch")
        yield init_device_mesh("cpu", (dist.get_world_size(),))
        dist.destroy_process_group()
    else:
        with this_host().spawn_procs({"ranks": ranks}) as procs:
            yield procs.device_mesh("cpu")


class Training:
    """A model and its optimizer, sharded over a mesh: a Stateful for torch.distributed.checkpoint."""

    def __init__(self, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        self.mesh, self.step = mesh, 0
        self.model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts)
        self.step = state["step"]

    def loss(self, seed: int) -> Tensor:
        """Return the mean loss over this rank's rows of the batch with this seed."""
        points = 2 * torch.rand(BATCH, 2, generator=torch.Generator().manual_seed(seed)) - 1
        rows = distribute_tensor(points, self.mesh, [Shard(0)], src_data_rank=None).to_local()
        target = (3 * rows[:, :1]).sin() * rows[:, 1:]
        return (self.model(rows) - target).square().mean()

    def mean(self, loss: Tensor) -> float:
        """Return the mean over all ranks."""
        return DTensor.from_local(loss.detach(), self.mesh, [Partial("avg")]).full_tensor().item()

    def train(self, steps: int) -> float:
        """Train up to step `steps` and return the loss of the last batch."""
        while self.step < steps:
            self.step += 1
            loss = self.loss(self.step)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self.mean(loss)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the loss of a held-out batch."""
        return self.mean(self.loss(0))


def save(training: Training, folder: Path) -> Path:
    """Write a checkpoint. Each rank writes its shards."""
    path = folder / f"step-{training.step}"
    dcp.save({"training": training}, checkpoint_id=path)
    return path


def load(training: Training, folder: Path) -> Path:
    """Load the newest checkpoint. Each rank reads the parts of its shards from the files of all ranks that saved."""
    path = max(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    dcp.load({"training": training}, checkpoint_id=path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="last step, counted from the start of training")
    parser.add_argument("--ranks", type=int, default=2, help="workers, without torchrun")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    parser.add_argument("--out", type=Path, default=Path("build/checkpoints"))
    args = parser.parse_args()

    with device_mesh(args.ranks) as mesh:
        training = Training(mesh)
        lines = []
        if args.resume:
            lines.append(f"loaded {load(training, args.out).name}, held-out loss {training.evaluate():.4f}")
        lines.append(f"trained to step {args.steps} on {mesh.size()} ranks, loss {training.train(args.steps):.4f}")
        lines.append(f"saved {save(training, args.out).name}, held-out loss {training.evaluate():.4f}")
        if not dist.is_torchelastic_launched() or dist.get_rank() == 0:
            print(*lines, sep="\n")


if __name__ == "__main__":
    main()
