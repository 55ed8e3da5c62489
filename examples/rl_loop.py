"""Reinforcement learning with generators and a trainer, whose weights the generators read from its memory.

    python examples/rl_loop.py                          2 generators, 60 steps
    python examples/rl_loop.py --overlap                generators sample while the trainer trains
    python examples/rl_loop.py --out build/reward.svg   also draw the reward over steps

The policy is a small language model. It writes lines of letters, and the reward of a line is the share of its letters
that follow their predecessor in the alphabet. A run gives the same numbers every time. docs/tutorials/rl.md explains
it step by step.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from monarch_backend.actor import Actor, ActorMesh, current_rank, endpoint, this_host
from monarch_backend.rdma import RDMABuffer

LETTERS, LENGTH = 16, 12


class Policy(nn.Module):
    """Logits of the next letter, for each letter of a line."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(LETTERS, 32), nn.Tanh(), nn.Linear(32, LETTERS))

    def forward(self, lines: Tensor) -> Tensor:
        return self.layers(lines)


def one_tensor(policy: Policy) -> Tensor:
    """Return all weights as one tensor. The parameters become views of it, so an optimizer updates it in place."""
    weights = parameters_to_vector(policy.parameters()).detach()
    vector_to_parameters(weights, policy.parameters())
    return weights


class Batch(NamedTuple):
    """Sampled lines and their rewards: (lines, LENGTH) and (lines,)."""

    lines: Tensor
    rewards: Tensor


class Trainer(Actor):
    def __init__(self, lr: float) -> None:
        torch.manual_seed(0)
        self.policy = Policy()
        self.weights = one_tensor(self.policy)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=lr)

    @endpoint
    def offer(self) -> RDMABuffer:
        return RDMABuffer(self.weights)

    @endpoint
    def train(self, batches: list[Batch]) -> list[float]:
        """Take one policy-gradient step and return the mean reward of each batch."""
        lines, rewards = map(torch.cat, zip(*batches, strict=True))
        advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        log_probs = self.policy(lines[:, :-1]).log_softmax(-1)
        chosen = log_probs.gather(-1, lines[:, 1:, None]).squeeze(-1)
        loss = -(advantage[:, None] * chosen).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return [batch.rewards.mean().item() for batch in batches]


class Generator(Actor):
    def __init__(self, source: RDMABuffer, lines: int) -> None:
        self.policy, self.source, self.lines = Policy(), source, lines
        self.weights = one_tensor(self.policy)
        self.rng = torch.Generator().manual_seed(current_rank().rank)

    @endpoint
    def sync(self) -> None:
        """Copy the trainer's weights into the policy."""
        self.source.read_into(self.weights, timeout=30).get()

    @endpoint
    @torch.no_grad()
    def generate(self) -> Batch:
        line = [torch.randint(LETTERS, (self.lines,), generator=self.rng)]
        while len(line) < LENGTH:
            probabilities = self.policy(line[-1]).softmax(-1)
            line.append(torch.multinomial(probabilities, 1, generator=self.rng).squeeze(1))
        lines = torch.stack(line, 1)
        follows = lines[:, 1:] == (lines[:, :-1] + 1) % LETTERS
        return Batch(lines, follows.float().mean(1))

    @endpoint
    def route(self) -> str:
        return self.source.backend


def loop(trainer: ActorMesh, generators: ActorMesh, steps: int) -> list[list[float]]:
    """Return the mean reward of each generator in each step."""
    rewards = []
    for _ in range(steps):
        generators.sync.call().get()
        batches = generators.generate.call().get()
        rewards.append(trainer.train.call_one(list(batches.values())).get())
    return rewards


def overlapped_loop(trainer: ActorMesh, generators: ActorMesh, steps: int) -> list[list[float]]:
    """Return the same as `loop`, but sample each batch while the trainer trains on the one before."""
    rewards = []
    generators.sync.call().get()
    sampling = generators.generate.call()
    for _ in range(steps):
        batches = sampling.get()
        sampling = generators.generate.call()
        rewards.append(trainer.train.call_one(list(batches.values())).get())
        generators.sync.call().get()  # each generator handles this call after `generate`
    sampling.cancel()
    return rewards


def plot(rewards: list[list[float]], path: Path) -> None:
    """Write a picture of the reward over steps: a line for each generator, and their mean."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "rl_loop"  # the same run gives the same file
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    steps = range(1, len(rewards) + 1)
    for number, each in enumerate(zip(*rewards, strict=True)):
        label = None if number else "each generator"
        axes.plot(steps, each, color="#9ecae1", linewidth=1, label=label)
    axes.plot(steps, [sum(step) / len(step) for step in rewards], color="#d6541b", label="mean")
    axes.axhline(1, color="#999999", linestyle="--", linewidth=1)
    axes.set(xlabel="step", ylabel="reward", ylim=(0, 1.05))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generators", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lines", type=int, default=64, help="lines of a batch, for each generator")
    parser.add_argument("--lr", type=float, default=0.015)
    parser.add_argument("--overlap", action="store_true", help="sample a batch while the one before is trained on")
    parser.add_argument("--out", type=Path, help="a picture of the reward over steps, SVG or PNG")
    args = parser.parse_args()

    with this_host().spawn_procs({"gpus": 1 + args.generators}) as procs:
        trainer = procs.slice(gpus=0).spawn("trainer", Trainer, args.lr)
        source = trainer.offer.call_one().get()
        generators = procs.slice(gpus=slice(1, None)).spawn("generators", Generator, source, args.lines)
        print("route of the weights:", ", ".join(sorted(set(generators.route.call().get().values()))))
        start = time.perf_counter()
        rewards = (overlapped_loop if args.overlap else loop)(trainer, generators, args.steps)
        seconds = time.perf_counter() - start
    first, last = (sum(step) / len(step) for step in (rewards[0], rewards[-1]))
    print(f"reward {first:.2f} in the first step, {last:.2f} in the last; {args.steps} steps in {seconds:.1f} s")
    if args.out:
        plot(rewards, args.out)
        print(f"picture: {args.out}")


if __name__ == "__main__":
    main()
