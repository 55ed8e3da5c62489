"""Data-parallel training that outlives its hosts: no checkpoint, no restart of the job, the same loss curve.

    python examples/elastic.py                                   3 hosts on this machine; one is killed and one hangs
    python examples/elastic.py --hosts tcp://a tcp://b tcp://c   machines where `monarch-backend up` runs

One controller drives a byte-level transformer on all hosts. When a host dies or falls silent, the survivors form a new
group and go on with the next step from what they have in memory; a replacement is started on a host that is left, gets
weights and optimizer state from a peer, and joins. The global batch depends on the seed and the step alone, so the loss
is that of an undisturbed run up to float rounding; at the end one process trains undisturbed, and both are compared.

What it shows: `attach_to_workers`, `Restart` on another host of the mesh, process groups of slices, typed failures that
name hosts. How long each phase took is printed: detect, regroup, restore, and when the replacement was in.
"""

import argparse
import contextlib
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from train_lm import BYTES, Transformer, load_corpus

from monarch_backend.actor import Actor, ActorError, ActorMesh, Restart, SupervisionError, endpoint
from monarch_backend.hosts import attach_to_workers

CONTEXT, BATCH = 64, 24
MOST_FAILURES = 20
SILENCE = 1.5  # seconds after which a host that says nothing is lost


class Trainer(Actor):
    """One replica. What it has in memory is all there is."""

    def __init__(self, seed: int):
        torch.manual_seed(seed)
        self.model = Transformer(dim=64, layers=2, heads=4, context=CONTEXT)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.text, _ = load_corpus()
        self.seed, self.steps, self.loss = seed, 0, 0.0

    def batch(self, step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(
            len(self.text) - CONTEXT, (BATCH,), generator=torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        ).tensor_split(size)[rank]
        tokens = self.text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
        return tokens[:, :-1], tokens[:, 1:]

    @endpoint
    def ready(self) -> tuple[int, int, float]:
        """Steps that this replica has behind it, which process it is (a replacement is another one), the last loss."""
        return self.steps, os.getpid(), self.loss

    @endpoint
    def train(self, step: int) -> float:
        """One step of the group; nothing has changed if it raises."""
        tokens, targets = self.batch(step, dist.get_rank(), dist.get_world_size())
        self.optimizer.zero_grad()
        loss = -self.model(tokens).gather(-1, targets[..., None]).sum() / (BATCH * CONTEXT)
        loss.backward()
        total = torch.cat([loss.detach()[None], *(weight.grad.flatten() for weight in self.model.parameters())])
        dist.all_reduce(total)
        at = 1
        for weight in self.model.parameters():
            weight.grad.copy_(total[at : at + weight.numel()].view_as(weight))
            at += weight.numel()
        self.optimizer.step()
        self.steps, self.loss = step + 1, total[0].item()
        return self.loss

    @endpoint
    def restore(self, source: int) -> None:
        """Weights, optimizer state and step of this rank of the group."""
        for weight in self.model.parameters():
            state = self.optimizer.state[weight]
            if not state:
                state.update(
                    step=torch.zeros(()), exp_avg=torch.zeros_like(weight), exp_avg_sq=torch.zeros_like(weight)
                )
            for tensor in (weight.data, *(state[name] for name in ("step", "exp_avg", "exp_avg_sq"))):
                dist.broadcast(tensor, source)
        steps = torch.tensor(self.steps)
        dist.broadcast(steps, source)
        self.steps = int(steps)


# ---- the controller


@dataclass
class Team:
    """The replicas that take part, and what became of them."""

    procs: Any
    trainers: ActorMesh
    ranks: list[int]
    pids: dict[int, int] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)  # by step

    def members(self, mesh: Any) -> Any:
        """Of a mesh, those that take part; any two of three are a slice."""
        first, last = self.ranks[0], self.ranks[-1]
        stride = self.ranks[1] - first if len(self.ranks) > 1 else 1
        return mesh.slice(hosts=slice(first, last + 1, stride))

    def regroup(self, ranks: Sequence[int]) -> int:
        """A new group, in which all have what the most advanced one has; the step that comes next."""
        self.ranks = sorted(ranks)
        begun = time.monotonic()
        self.members(self.procs).process_group(timeout=30).get()
        grouped = time.monotonic()
        steps, pids, losses = zip(*self.members(self.trainers).ready.call().get(timeout=30).values(), strict=True)
        self.pids |= dict(zip(self.ranks, pids, strict=True))
        last = steps.index(max(steps))
        if steps[last]:  # a step may have ended well for some, and nobody could say so
            self.losses[steps[last] - 1] = losses[last]
        self.members(self.trainers).restore.call(last).get(timeout=30)
        self.phases |= {"regroup": grouped - begun, "restore": time.monotonic() - grouped}
        return max(steps)

    def step(self, step: int) -> float:
        return float(next(iter(self.members(self.trainers).train.call(step).get(timeout=60).values())))


def survivors(team: Team, error: SupervisionError | ActorError) -> list[int]:
    """Those that answer and are who they were.

    A call to a dead one would wait for its replacement. The error names it, or, where a survivor's collective has
    failed before anybody knew why, the bound for that knowledge says when to stop.
    """
    failure = getattr(error, "failure", None)
    dead = {death.rank for death in failure.deaths} if failure is not None else set()
    calls = {rank: team.trainers.slice(hosts=rank).ready.call_one() for rank in team.ranks if rank not in dead}
    end, alive = time.monotonic() + 2 * SILENCE, []
    for rank, call in calls.items():
        try:
            _, pid, _ = call.get(timeout=max(0.0, end - time.monotonic()))
        except (SupervisionError, TimeoutError):
            continue
        if pid == team.pids[rank]:
            alive.append(rank)
    return alive


def train(team: Team, steps: int, faults: dict[int, Any]) -> list[float]:
    """All steps, whatever happens; the loss of each."""
    returning: dict[int, Any] = {}
    begun, failures = 0.0, 0
    step = team.regroup(team.ranks)
    while step < steps:
        if step in faults:
            fault = faults.pop(step)
            begun = time.monotonic()
            print(f"step {step}: {fault()}", flush=True)
        try:
            back = [rank for rank, call in returning.items() if call.done()]
            if back:
                for rank in back:
                    call, returning[rank] = returning[rank], team.trainers.slice(hosts=rank).ready.call_one()
                    call.get()  # the replacement may have died as well; then there will be another one
                step = team.regroup([*team.ranks, *back])
                for rank in back:
                    del returning[rank]
                after = (
                    f"after {time.monotonic() - begun:.2f} s, restored from a peer in {team.phases['restore']:.3f} s"
                )
                print(f"step {step}: ranks {back} are back {after}", flush=True)
            loss = team.step(step)
        except (SupervisionError, ActorError) as error:
            detected = time.monotonic() - begun
            alive = survivors(team, error)
            dead = [rank for rank in team.ranks if rank not in alive]
            failures += 1
            if not alive or failures > MOST_FAILURES:
                raise
            print(f"step {step}: {str(error).splitlines()[0]}", flush=True)
            for rank in dead:
                returning[rank] = team.trainers.slice(hosts=rank).ready.call_one()
            step = team.regroup(alive)
            phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in team.phases.items())
            print(f"step {step}: goes on with ranks {alive}; detect {detected:.2f} s, {phases}", flush=True)
            continue
        team.losses[step] = loss
        step += 1
        if step % 20 == 0:
            print(f"step {step}: loss {loss:.4f} on {len(team.ranks)} hosts", flush=True)
    return [team.losses[step] for step in range(steps)]


# ---- hosts of this machine


class LocalHosts:
    """Daemons of their own sessions, which can be killed or made to hang with all that runs there."""

    def __init__(self, count: int):
        # They end when their standard input does, however this program ends.
        command = [sys.executable, "-m", "monarch_backend", "up", "--address", "127.0.0.1:0", "--exit-with-stdin"]
        self.daemons = []
        for number in range(count):
            environment = {**os.environ, "MONARCH_HOST_NAME": f"local{number}"}
            self.daemons.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=environment,
                    start_new_session=True,
                )
            )
        self.addresses = [daemon.stdout.readline().split()[-1] for daemon in self.daemons if daemon.stdout]

    def kill(self, number: int) -> str:
        self.daemons[number].kill()
        return f"host {number} is killed"

    def hang(self, number: int) -> str:
        for pid in below(self.daemons[number].pid):
            os.kill(pid, signal.SIGSTOP)
        return f"host {number} hangs"

    def close(self) -> None:
        for daemon in self.daemons:
            for pid in below(daemon.pid):
                os.kill(pid, signal.SIGCONT)
            daemon.terminate()
        for daemon in self.daemons:
            daemon.wait(20)


def below(pid: int) -> list[int]:
    """The process and its descendants."""
    children: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += map(int, thread.read_text().split())
    return [pid, *(other for child in children for other in below(child))]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", nargs=3, metavar="ADDRESS", help="three machines; nothing is killed there")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    local = None if args.hosts else LocalHosts(3)
    rng = random.Random(args.seed)
    try:
        hosts = attach_to_workers(args.hosts or local.addresses, heartbeat=SILENCE / 5, silence=SILENCE)
        procs = hosts.spawn_procs({"gpus": 1}, name="trainers", restart=Restart(max_restarts=1000)).slice(gpus=0)
        trainers = procs.spawn("trainer", Trainer, args.seed)
        victims = rng.sample(range(3), 2)
        when = sorted(rng.sample(range(args.steps // 6, args.steps * 2 // 3), 2))
        faults = {} if local is None else {
            when[0]: lambda: local.kill(victims[0]),
            when[1]: lambda: local.hang(victims[1]),
        }  # fmt: skip
        losses = train(Team(procs, trainers, [0, 1, 2]), args.steps, faults)
        procs_alone = hosts.slice(hosts=survivor(victims)).spawn_procs({"gpus": 1}, name="alone")
        procs_alone.process_group().get()
        alone = procs_alone.slice(gpus=0).spawn("alone", Trainer, args.seed)
        expected = [alone.train.call_one(step).get() for step in range(args.steps)]
        worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        print(f"final loss {losses[-1]:.4f}; undisturbed {expected[-1]:.4f}; largest difference on the way {worst:.2e}")
        print(f"a byte costs {losses[-1] / math.log(2):.2f} bits, of {math.log2(BYTES):.0f}")
        hosts.shutdown().get()
    finally:
        if local is not None:
            local.close()


def survivor(victims: Sequence[int]) -> int:
    return next(number for number in range(3) if number not in victims)


if __name__ == "__main__":
    main()
