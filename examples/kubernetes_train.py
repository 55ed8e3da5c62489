"""Train a byte-level transformer on pods of a Kubernetes cluster, through failures and changes of their number.

    python examples/kubernetes_train.py --image registry.example/train:1 --pods 4
    python examples/kubernetes_train.py --image registry.example/train:1 --pods 2 --resize 20=4 40=3

The image has this package, its versions of Python and torch, and examples/train_lm.py on PYTHONPATH, because the pods
import the model from there. docs/guides/kubernetes.md explains the job step by step.

Each pod has one replica of the model. The program keeps the weights of the last snapshot. If a process, a pod or a node
is lost, it waits until Kubernetes has replaced the pod, and trains on from the snapshot. The batch depends only on the
seed and the step, so the losses equal those of a run without failures. The program ends with an error if another
program has ended the job, and after ten failures without a new step.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from train_lm import Transformer, load_corpus

import monarch_backend.actor
from monarch_backend.actor import Actor, ActorError, MeshFailure, SupervisionError, endpoint
from monarch_backend.job import Job, JobError, KubernetesJob

CONTEXT, BATCH, SNAPSHOT_EVERY = 32, 24, 5
MAX_FAILURES = 10
"""Failures in a row without a new step, after which the training ends."""


class Trainer(Actor):
    """One replica of the model. ``snapshot``: steps, and the bytes of weights and optimizer state."""

    def __init__(self, seed: int, snapshot: tuple[int, bytes] | None):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        self.model = Transformer(dim=32, layers=1, heads=2, context=CONTEXT)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.text, _ = load_corpus()
        self.seed = seed
        if snapshot is not None:
            model, optimizer = torch.load(io.BytesIO(snapshot[1]), weights_only=True)
            self.model.load_state_dict(model)
            self.optimizer.load_state_dict(optimizer)

    @endpoint
    def train(self, step: int) -> float:
        """Train one step on this rank's part of the global batch. Return the loss of the whole batch."""
        draws = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(self.text) - CONTEXT, (BATCH,), generator=draws)
        starts = starts.tensor_split(dist.get_world_size())[dist.get_rank()]
        tokens = self.text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
        self.optimizer.zero_grad()
        scores = self.model(tokens[:, :-1]).gather(-1, tokens[:, 1:, None])
        loss = -scores.sum() / (BATCH * CONTEXT)
        loss.backward()
        total = torch.cat([loss.detach()[None], *(weight.grad.flatten() for weight in self.model.parameters())])
        dist.all_reduce(total)
        at = 1
        for weight in self.model.parameters():
            weight.grad.copy_(total[at : at + weight.numel()].view_as(weight))
            at += weight.numel()
        self.optimizer.step()
        return total[0].item()

    @endpoint
    def snapshot(self) -> bytes:
        """Return the bytes of weights and optimizer state."""
        file = io.BytesIO()
        torch.save((self.model.state_dict(), self.optimizer.state_dict()), file)
        return file.getvalue()


@dataclass
class Run:
    """A training run on the mesh "trainers" of a job. ``losses`` by step, and ``failures`` with their reasons."""

    job: Job
    steps: int
    seed: int = 0
    sizes: dict[int, int] = field(default_factory=dict)  # number of hosts from a step on
    losses: dict[int, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)  # seconds from a failed step to the next one
    procs: Any = None
    trainers: Any = None
    kept: tuple[int, bytes] | None = None

    def states(self) -> set[str]:
        """Return the states of the hosts. Raises RuntimeError if another program has ended the job."""
        states = {each.state for each in self.job.status()}
        if "not started" in states:
            raise RuntimeError(f"job {self.job.name!r} was ended by another program: start the training again")
        return states

    def start(self) -> None:
        """Attach the hosts that the scheduler runs now, and start a replica on each, from the last snapshot."""
        self.states()
        mesh = self.job.state(timeout=300).trainers
        self.procs = mesh.spawn_procs({"gpus": 1})
        self.procs.process_group(timeout=60).get()
        self.trainers = self.procs.spawn("trainers", Trainer, self.seed, self.kept)
        self.trainers.initialized.get(timeout=120)

    def stop(self) -> None:
        """Stop the replicas, as far as their hosts still exist."""
        procs, self.procs, self.trainers = self.procs, None, None
        if procs is not None:
            # A part of them may be lost.
            with contextlib.suppress(SupervisionError, ActorError, MeshFailure, RuntimeError, TimeoutError):
                procs.stop().get(timeout=30)

    def keep(self, step: int) -> None:
        self.kept = step, self.trainers.slice(hosts=0).snapshot.call_one().get(timeout=60)

    def train(self, after_step: Callable[[Run, int], None] = lambda *_: None) -> None:
        """Train to the last step. ``after_step(run, step)`` is called after each step.

        Raises RuntimeError if another program has ended the job, and after MAX_FAILURES failures without a new step.
        """
        step, furthest, failures, failed_at = 0, 0, 0, 0.0
        while step < self.steps:
            try:
                if self.procs is None:
                    self.start()
                if (size := self.sizes.pop(step, None)) is not None:
                    self.keep(step)
                    self.stop()
                    self.job.resize("trainers", size)
                    self.start()
                self.losses[step] = next(iter(self.trainers.train.call(step).get(timeout=120).values()))
                step += 1
                if step > furthest:
                    furthest, failures = step, 0
                if step % SNAPSHOT_EVERY == 0:
                    self.keep(step)
                if failed_at:
                    self.recoveries.append(time.monotonic() - failed_at)
                    failed_at = 0.0
                after_step(self, step)
            except (SupervisionError, ActorError, MeshFailure, JobError) as error:
                failed_at = failed_at or time.monotonic()
                self.failures.append(str(error).splitlines()[0])
                print(f"step {step}: {self.failures[-1]}", flush=True)
                self.stop()
                failures += 1
                if failures == MAX_FAILURES:
                    raise RuntimeError(
                        f"no step after step {furthest} within {failures} attempts, the last one: {error}"
                    ) from error
                step = 0 if self.kept is None else self.kept[0]
        self.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--image", required=True)
    parser.add_argument("--namespace")
    parser.add_argument("--pods", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--resize", nargs="*", default=[], metavar="STEP=PODS")
    args = parser.parse_args()

    monarch_backend.actor.unhandled_fault_hook = lambda failure: print(f"failure: {failure}", flush=True)
    job = KubernetesJob(args.namespace, name="lm", force_delete=True).add_mesh("trainers", args.pods, image=args.image)
    job.apply()
    try:
        sizes = {int(step): int(pods) for step, pods in (text.split("=") for text in args.resize)}
        run = Run(job, args.steps, sizes=sizes)
        run.train(lambda run, step: print(f"step {step}: loss {run.losses[step - 1]:.4f}", flush=True))
    finally:
        job.kill()


if __name__ == "__main__":
    main()
