"""Reinforcement learning with generators and a learner in one script: an actor-learner loop on CartPole.

    python examples/actor_learner.py                                2 generators, 1 learner
    python examples/actor_learner.py --generators 4 --ahead 2       more of them, each two rollouts ahead
    python examples/actor_learner.py --out build/reward.png         also draw the reward

Generators play games with the newest policy that they have, and send rollouts to the learner. The learner trains on one
rollout at a time. Then it sends the new weights to all generators and requests the next rollout from the generator of
the last one. While the learner trains, the other generators play.

So rollouts are a little off-policy. Each generator has at most `--ahead` requested rollouts that the learner has not
trained on yet. This back-pressure bounds the lag: a rollout is at most generators x ahead - 1 versions of the weights
old. More lag means less waiting and slower learning. The learner takes rollouts in the order of its requests, so a run
gives the same numbers every time, however busy the machine is.

The example shows:

- two slices of one mesh of processes, one for each kind of actor
- an actor that receives an actor mesh and calls it: rollouts go from generators to learner, not through this program
- the order of messages: `broadcast` and calls from one actor to another arrive in the order in which they were sent
- a generator endpoint that sends reports to the program
"""

import argparse
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

from monarch_backend.actor import Actor, ActorMesh, context, endpoint, this_host

LONGEST = 200  # steps of a game


class CartPole:
    """A batch of games: a pole on a cart must be kept upright by pushing the cart (Barto, Sutton, Anderson 1983)."""

    def __init__(self, games: int, rng: torch.Generator):
        self.state = torch.rand(games, 4, generator=rng) * 0.1 - 0.05

    def step(self, action: Tensor) -> Tensor:
        """Push each cart left (0) or right (1) for 20 ms. Return True for each game that has not ended."""
        _, speed, angle, turning = self.state.unbind(1)
        sin, cos = angle.sin(), angle.cos()
        force = (action * 20.0 - 10.0 + 0.05 * turning**2 * sin) / 1.1
        turn = (9.8 * sin - cos * force) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        push = force - 0.05 * turn * cos / 1.1
        self.state = self.state + 0.02 * torch.stack((speed, push, turning, turn), 1)
        return (self.state[:, 0].abs() < 2.4) & (self.state[:, 2].abs() < 0.2095)


class Policy(nn.Module):
    """Policy and value network: a distribution over the two actions, and the expected return."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh())
        self.action, self.value = nn.Linear(64, 2), nn.Linear(64, 1)

    def forward(self, state: Tensor) -> tuple[Categorical, Tensor]:
        hidden = self.body(state)
        return Categorical(logits=self.action(hidden), validate_args=False), self.value(hidden).squeeze(-1)


class Rollout(NamedTuple):
    """A batch of complete games. Tensors have the shape (steps, games); ``alive`` is 0 after the end of a game."""

    version: int  # of the generator's weights
    state: Tensor
    action: Tensor
    log_prob: Tensor
    alive: Tensor


class Report(NamedTuple):
    version: int
    reward: float  # mean length of a game in steps
    lag: int
    frames: int


# ---- actors


class Generator(Actor):
    def __init__(self, games: int):
        self.policy, self.version, self.games = Policy(), -1, games
        self.rng = torch.Generator().manual_seed(1 + context().actor_instance.rank.rank)

    @endpoint
    def load(self, version: int, weights: dict[str, Tensor]) -> None:
        self.policy.load_state_dict(weights)
        self.version = version

    @endpoint
    @torch.no_grad()
    def play(self) -> Rollout:
        game, alive = CartPole(self.games, self.rng), torch.ones(self.games, dtype=torch.bool)
        steps: list[tuple[Tensor, ...]] = []
        while alive.any() and len(steps) < LONGEST:
            choice, _ = self.policy(game.state)
            action = torch.multinomial(choice.probs, 1, generator=self.rng).squeeze(1)
            steps.append((game.state, action, choice.log_prob(action), alive.float()))
            alive = alive & game.step(action)
        return Rollout(self.version, *map(torch.stack, zip(*steps, strict=True)))


class Learner(Actor):
    def __init__(self, generators: ActorMesh, lr: float):
        self.generators = generators
        torch.manual_seed(0)
        self.policy, self.version = Policy(), 0
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=lr)

    @endpoint
    def train(self, updates: int, ahead: int) -> Iterator[Report]:
        """Yield a report of each update."""
        everyone = [self.generators.slice(gpus=i) for i in range(len(self.generators))]
        self.publish()
        asked = deque((generator, generator.play.call_one()) for _ in range(ahead) for generator in everyone)
        for _ in range(updates):
            generator, reply = asked.popleft()
            rollout = reply.get()
            lag = self.version - rollout.version
            self.learn(rollout)
            self.publish()
            asked.append((generator, generator.play.call_one()))
            frames = int(rollout.alive.sum())
            yield Report(self.version, frames / rollout.alive.shape[1], lag, frames)
        for _, reply in asked:
            reply.cancel("the training is over")

    def publish(self) -> None:
        # Messages from one sender to one actor keep their order: rollouts requested later use these weights.
        self.generators.load.broadcast(self.version, self.policy.state_dict())

    def learn(self, rollout: Rollout) -> None:
        """Take four PPO steps on a rollout. PPO's clipped ratio corrects for the lag."""
        returns = torch.zeros_like(rollout.alive)
        following = torch.zeros(rollout.alive.shape[1])
        for step in reversed(range(len(returns))):
            following = returns[step] = rollout.alive[step] * (1 + 0.98 * following)
        played = rollout.alive.bool()
        state, action, old = (part[played] for part in (rollout.state, rollout.action, rollout.log_prob))
        returns = returns[played] / 10  # scaled to about the range of the value network's outputs
        with torch.no_grad():
            gain = returns - self.policy(state)[1]
            gain = (gain - gain.mean()) / (gain.std() + 1e-6)
        for _ in range(4):
            choice, value = self.policy(state)
            ratio = (choice.log_prob(action) - old).exp()
            loss = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            loss = loss + 0.5 * F.mse_loss(value, returns) - 0.01 * choice.entropy().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self.version += 1


# ---- main program


def mean_reward(reports: list[Report]) -> float:
    return sum(report.reward for report in reports) / len(reports)


def plot(reports: list[Report], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot([report.version for report in reports], [report.reward for report in reports], color="#3182bd")
    axes.axhline(LONGEST, color="#999999", linestyle="--", linewidth=1)
    axes.set(xlabel="version of the weights", ylabel="steps that the pole stays up", title="CartPole", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generators", type=int, default=2)
    parser.add_argument("--ahead", type=int, default=1, help="rollouts of a generator that wait to be learnt from")
    parser.add_argument("--games", type=int, default=32, help="of a rollout, played at once")
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--out", type=Path, help="a PNG of the reward over time")
    args = parser.parse_args()

    with this_host().spawn_procs({"gpus": 1 + args.generators}) as procs:
        generators = procs.slice(gpus=slice(1, None)).spawn("generators", Generator, args.games)
        learner = procs.slice(gpus=0).spawn("learner", Learner, generators, args.lr)
        learner.initialized.get()
        start, reports = time.perf_counter(), []
        for report in learner.train.call_one(args.updates, args.ahead):
            reports.append(report)
            if report.version % 10 == 0:
                pace = sum(r.frames for r in reports) / (time.perf_counter() - start)
                reward = f"reward {mean_reward(reports[-10:]):6.1f}"
                print(f"weights {report.version:4}  {reward}  lag {report.lag}  {pace:8,.0f} frames/s", flush=True)
    first, last = mean_reward(reports[:5]), mean_reward(reports[-10:])
    print(f"reward {first:.1f} at the start, {last:.1f} at the end; the most lag was {max(r.lag for r in reports)}")
    if args.out:
        plot(reports, args.out)
        print(f"reward over time: {args.out}")


main()
