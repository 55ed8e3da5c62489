"""Training script for `python -m torch.distributed.run` that names the backend and imports nothing of this project.

It trains a few steps, writes a checkpoint after each, and resumes from an existing checkpoint. One rank kills itself
once, in the middle of a step. test_elastic.py runs the script, and calls `train` for the expected losses.
"""

import argparse
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, WIDTH = 6, 8


def _batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * rank + step))
    return x, torch.tanh(x.flip(-1))


def _write(state: object, path: Path) -> None:
    torch.save(state, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)  # atomic, so a rank that is killed leaves no partial checkpoint


def train(checkpoint: Path, die_at: int = -1) -> list[float]:
    """Train and return the losses of all steps and ranks, including those from before a restart."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses: list[list[float]] = []
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        losses = state["losses"]
    for step in range(len(losses), STEPS):
        x, y = _batch(step, rank)
        loss = nn.functional.mse_loss(model(x), y)
        if step == die_at and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)  # the other rank is waiting for this rank's gradients now
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        shown = [torch.zeros(1) for _ in range(dist.get_world_size())]
        dist.all_gather(shown, loss.detach().reshape(1))
        losses.append([entry.item() for entry in shown])
        if rank == 0:
            _write({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}, checkpoint)
        dist.barrier()
    return [float(mine[rank]) for mine in losses]


def main() -> None:
    """Train as one rank of the run that torchrun's environment describes, and write a report to --out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--die-at", type=int, default=-1)
    args = parser.parse_args()
    dist.init_process_group(args.backend)
    rank = dist.get_rank()
    losses = train(args.out / "checkpoint.pt", args.die_at if rank == 1 else -1)
    report = {
        "losses": losses,
        "backend": dist.get_backend(),
        "group": type(dist.group.WORLD).__name__,
        "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
    }
    (args.out / f"{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
