"""A parameter server with asynchronous trainers, on scikit-learn's handwritten digits.

    python examples/parameter_server.py                        4 trainers, a server of 2 shards
    python examples/parameter_server.py --kill                 the same, and one trainer is killed half-way
    python examples/parameter_server.py --out build/ps.png     also draw accuracy and staleness

Each trainer repeats three steps: pull the weights, compute the gradient of one batch, push the gradient. Trainers do
not wait for one another, so other trainers may have updated the weights since the pull. The staleness of a gradient is
the number of these updates. The server divides the learning rate by 1 + staleness, so that one learning rate suits any
number of trainers.

The example shows:

- two meshes in one script
- actors that call other actors
- a tensor that is sharded over a mesh
- a generator endpoint (`Trainer.train`) that sends results while it runs
- `Restart`, which starts a new process after one has died
"""

import argparse
import asyncio
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from monarch_backend.actor import Actor, ActorMesh, Restart, SupervisionError, context, endpoint, gather, this_host


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def load_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return 1,347 images and digits for training, and 450 for testing. An image of 8 x 8 pixels is one row."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:450], order[450:]
    return images[train], labels[train], images[test], labels[test]


# ---- actors


class ParameterServer(Actor):
    """One shard of the weights. It applies each gradient on arrival, without synchronization with other shards."""

    def __init__(self, weights: Tensor, lr: float):
        rank = context().actor_instance.rank
        self.shard = weights.tensor_split(len(rank.extent))[rank.rank].clone()
        self.momentum = torch.zeros_like(self.shard)
        self.lr, self.version = lr, 0

    @endpoint
    def pull(self) -> tuple[int, Tensor]:
        return self.version, self.shard

    @endpoint
    def push(self, gradient: Tensor, version: int) -> int:
        """Apply a gradient that was computed with weights of `version`. Return its staleness."""
        staleness = self.version - version
        lr = self.lr / (1 + staleness) / math.sqrt(1 + self.version / 100)
        self.momentum.mul_(0.5).add_(gradient)
        self.shard.sub_(self.momentum, alpha=lr)
        self.version += 1
        return staleness


class Trainer(Actor):
    """Trains on its own part of the data. The weights are on the server, so a trainer can be replaced at any time."""

    def __init__(self, server: ActorMesh, images: Tensor, labels: Tensor, batch: int):
        rank = context().actor_instance.rank
        self.server, self.batch = server, batch
        self.shards = [server.slice(shards=i) for i in range(len(server))]
        self.images, self.labels = (data[rank.rank :: len(rank.extent)] for data in (images, labels))
        self.rng = torch.Generator().manual_seed(rank.rank)
        self.model = make_model()
        torch.set_num_threads(1)  # the model is too small for a second thread to pay off

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def train(self, steps: int) -> Iterator[tuple[float, int]]:
        """Yield the loss of each step and the staleness of its gradient."""
        for _ in range(steps):
            versions, weights = zip(*self.server.pull.call().get().values(), strict=True)
            vector_to_parameters(torch.cat(weights), self.model.parameters())
            chosen = torch.randint(len(self.labels), (self.batch,), generator=self.rng)
            loss = F.cross_entropy(self.model(self.images[chosen]), self.labels[chosen])
            gradient = parameters_to_vector(torch.autograd.grad(loss, list(self.model.parameters())))
            parts = zip(self.shards, gradient.tensor_split(len(self.shards)), versions, strict=True)
            staleness = gather(shard.push.call_one(part, version) for shard, part, version in parts)
            yield loss.item(), max(staleness)


# ---- main program


@dataclass
class Run:
    """State of the main program, which follows all trainers concurrently and tests the weights at intervals."""

    args: argparse.Namespace
    server: ActorMesh
    images: Tensor
    labels: Tensor
    model: nn.Module = field(default_factory=make_model)
    updates: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    accuracy: list[tuple[float, float]] = field(default_factory=list)  # (seconds, accuracy)
    deaths: list[float] = field(default_factory=list)  # seconds
    start: float = 0.0

    def seconds(self) -> float:
        return time.perf_counter() - self.start

    async def test(self) -> None:
        updates = self.updates
        replies = await self.server.pull.call()
        vector_to_parameters(torch.cat([shard for _, shard in replies.values()]), self.model.parameters())
        with torch.no_grad():
            right = self.model(self.images).argmax(1) == self.labels
        self.accuracy.append((self.seconds(), right.float().mean().item()))
        print(f"{updates:6} updates {self.seconds():6.2f} s  test accuracy {self.accuracy[-1][1]:.3f}", flush=True)

    async def follow(self, trainer: ActorMesh, name: str, victim: int | None) -> None:
        """Run all steps of one trainer. If it dies, its replacement runs the remaining steps."""
        done, steps = 0, self.args.steps
        while done < steps:
            try:
                async for _, staleness in trainer.train.call_one(steps - done):
                    done += 1
                    self.updates += 1
                    self.staleness[staleness] += 1
                    if self.updates % self.args.test_every == 0 or self.updates == steps * self.args.trainers:
                        await self.test()
                    if victim and done == steps // 2:
                        os.kill(victim, signal.SIGKILL)
            except SupervisionError as error:
                self.deaths.append(self.seconds())
                print(f"{name} died after {done} of {steps} steps, its successor does the rest: {error}", flush=True)

    async def follow_all(self, trainers: ActorMesh) -> None:
        pids = await trainers.pid.call()
        self.start = time.perf_counter()
        await self.test()
        follows = []
        for point, pid in pids.items():
            victim = pid if self.args.kill and point.rank == len(pids) - 1 else None
            follows.append(self.follow(trainers.slice(**point), str(point), victim))
        await asyncio.gather(*follows)


def plot(run: Run, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    left.plot(*zip(*run.accuracy, strict=True), "o-", markersize=3, color="#3182bd")
    for i, seconds in enumerate(run.deaths):
        left.axvline(seconds, color="#d6541b", linestyle="--", label="a trainer is killed" if i == 0 else None)
    left.set(xlabel="seconds", ylabel="test accuracy", ylim=(0, 1))
    left.set_title(f"{run.args.trainers} trainers, {run.updates:,} updates")
    if run.deaths:
        left.legend(frameon=False, loc="lower right")
    right.bar(list(run.staleness), list(run.staleness.values()), color="#9ecae1")
    right.set(xlabel="updates missed by a gradient", ylabel="gradients", title="staleness", yscale="log")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", type=int, default=4)
    parser.add_argument("--shards", type=int, default=2, help="ranks of the server, which share the weights")
    parser.add_argument("--steps", type=int, default=400, help="of each trainer")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--test-every", type=int, default=100, help="updates")
    parser.add_argument("--kill", action="store_true", help="SIGKILL the last trainer after half of its steps")
    parser.add_argument("--out", type=Path, help="a PNG of accuracy and staleness")
    args = parser.parse_args()

    torch.manual_seed(0)
    images, labels, test_images, test_labels = load_data()
    weights = parameters_to_vector(make_model().parameters()).detach()

    server_procs = this_host().spawn_procs({"shards": args.shards}, name="server")
    trainer_procs = this_host().spawn_procs({"trainers": args.trainers}, name="trainers", restart=Restart())
    server = server_procs.spawn("server", ParameterServer, weights, args.lr)
    trainers = trainer_procs.spawn("trainers", Trainer, server, images, labels, args.batch)

    run = Run(args, server, test_images, test_labels)
    asyncio.run(run.follow_all(trainers))
    seconds, accuracy = run.accuracy[-1]
    print(f"{run.updates:,} updates in {seconds:.2f} s, {run.updates / seconds:,.0f} per second")
    print(f"staleness {sum(run.staleness.elements()) / run.updates:.2f} on average, {max(run.staleness)} at most")
    print(f"test accuracy {accuracy:.3f}")
    if args.out:
        plot(run, args.out)
        print(f"accuracy over time: {args.out}")
    gather([trainer_procs.stop(), server_procs.stop()])


main()  # needs no `if __name__ == "__main__"`: worker processes do not run this file
