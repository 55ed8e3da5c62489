"""Train a byte-level transformer with FSDP and tensor parallelism from one program, and survive a worker's death.

    python examples/one_controller.py                     4 processes on this machine: 2 x fsdp, 2 x tp
    python examples/one_controller.py --dp 1 --tp 2       2 processes, tensor parallelism only

This program runs once, without torchrun and without ranks. The model's parameters are torch's DTensors, with shards in
the processes of a mesh. `fully_shard`, `parallelize_module`, AdamW and torch.distributed.checkpoint are torch's own.

Half-way the program kills one of the processes (--kill-at 0: none). The next read of a value raises an error that names
the dead process. The program then starts new processes, loads the newest checkpoint into them and continues from there.

The batch depends only on the seed and the step, so the losses equal those of a run without a failure.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from train_lm import Transformer, load_corpus, tensor_parallel

import monarch_backend.actor as actor
from monarch_backend.actor import SupervisionError, this_host
from monarch_backend.dtensor import MeshClosedError, RemoteOpError, run, shard_batch

CONTEXT = 64


class Training:
    """A mesh of processes, and the model and optimizer sharded over it."""

    def __init__(self, args: argparse.Namespace, text: Tensor):
        self.args, self.text, self.step = args, text, 0
        self.procs = this_host().spawn_procs({"dp": args.dp, "tp": args.tp}, name="trainers")
        self.mesh = self.procs.device_mesh("cpu")
        torch.manual_seed(args.seed)
        self.model = Transformer(dim=args.dim, layers=args.layers, heads=4, context=CONTEXT)
        tensor_parallel(self.model, self.mesh["tp"])
        for block in self.model.blocks:
            fully_shard(block, mesh=self.mesh["dp"])
        fully_shard(self.model, mesh=self.mesh["dp"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of this step. Each process has its slice of the global batch."""
        rng = torch.Generator().manual_seed(self.args.seed * 1_000_003 + self.step)
        starts = torch.randint(len(self.text) - CONTEXT, (self.args.batch,), generator=rng)
        tokens = self.text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
        local = shard_batch(tokens, self.mesh["dp"])
        return local[:, :-1], local[:, 1:]

    def train_step(self) -> Tensor:
        """Send one step to the workers and return the loss of the global batch without waiting for its value."""
        tokens, targets = self.batch()
        loss = F.nll_loss(self.model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return DTensor.from_local(loss.detach(), self.mesh["dp"], [Partial("avg")]).full_tensor()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path) -> None:
        """Write a checkpoint. Each process writes its shards."""
        partial = folder / f"step-{self.step}.tmp"
        dcp.save(self.state(), checkpoint_id=partial)
        partial.rename(folder / f"step-{self.step}")

    def load(self, folder: Path) -> None:
        """Load the newest checkpoint. It may have been saved from a mesh of another shape."""
        newest = max(folder.glob("step-*[0-9]"), key=lambda path: int(path.name.removeprefix("step-")))
        state = self.state()
        dcp.load(state, checkpoint_id=newest)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = int(newest.name.removeprefix("step-"))


def train(training: Training, args: argparse.Namespace, losses: dict[int, float], folder: Path) -> None:
    """Train to the last step. Raises if a process dies."""
    while training.step < args.steps:
        loss = training.train_step()
        if training.step == args.kill_at:
            args.kill_at = 0
            victim = list(run(training.mesh, os.getpid).get().values())[-1]
            print(f"step {training.step}: killing process {victim}")
            os.kill(victim, signal.SIGKILL)
        losses[training.step] = loss.item()
        if training.step % args.checkpoint_every == 0:
            training.save(folder)
        if training.step % 10 == 0:
            print(f"step {training.step}: loss {losses[training.step]:.4f}")


def learn(args: argparse.Namespace, text: Tensor, losses: dict[int, float], folder: Path) -> None:
    """Train to the last step. After a failure, start new processes and continue from the newest checkpoint."""
    training = Training(args, text)
    training.save(folder)
    start = time.perf_counter()
    while True:
        try:
            train(training, args, losses, folder)
            break
        except (SupervisionError, MeshClosedError, RemoteOpError) as error:
            print(f"step {training.step}: {str(error).splitlines()[0]}")
            training.procs.stop("one of them has died").get()
            training = Training(args, text)
            training.load(folder)
            print(f"step {training.step}: new processes go on from the checkpoint")
    seconds = time.perf_counter() - start
    print(f"{args.steps} steps in {seconds:.1f} s, last loss {losses[args.steps]:.4f}")
    training.procs.stop().get()


def main(argv: list[str] | None = None) -> dict[int, float]:
    """Train and return the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dp", type=int, default=2, help="processes that share a batch")
    add("--tp", type=int, default=2, help="processes that share each layer")
    add("--steps", type=int, default=60)
    add("--batch", type=int, default=16)
    add("--dim", type=int, default=64)
    add("--layers", type=int, default=2)
    add("--seed", type=int, default=0)
    add("--checkpoint-every", type=int, default=10, help="steps")
    add("--kill-at", type=int, default=-1, help="step after which a process is killed; default: half-way, 0: none")
    args = parser.parse_args(argv)
    args.kill_at = args.steps // 2 + 3 if args.kill_at < 0 else args.kill_at

    actor.unhandled_fault_hook = lambda _: None  # the read of a value raises the failure, and learn() handles it
    text, _ = load_corpus()
    losses: dict[int, float] = {}
    with tempfile.TemporaryDirectory(prefix="one_controller-") as folder:
        learn(args, text, losses, Path(folder))
    return losses


if __name__ == "__main__":
    main(sys.argv[1:])
