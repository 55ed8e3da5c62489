"""Data-parallel training that survives failures of hosts, without checkpoints and without a restart of the job.

    python examples/elastic.py                                   3 hosts on this machine; one is killed and one hangs
    python examples/elastic.py --hosts tcp://a tcp://b tcp://c   machines where `monarch-backend up` runs

One controller trains a replica of a byte-level transformer on each host. When a host dies or hangs, the surviving
replicas form a new process group and continue from the weights in their memory. A replacement is started on one of the
remaining hosts. It receives weights and optimizer state from a peer and joins the group.

The global batch depends only on the seed and the step, so the loss equals that of a run without failures up to float
rounding. At the end one process trains without failures, and the program compares both losses.

The example shows `attach_to_workers`, `Restart` on another host of the mesh, process groups of slices, and errors that
name the failed hosts. It prints the duration of each phase: detect, regroup, restore, and the return of the
replacement.
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
SILENCE = 1.5  # seconds without a heartbeat after which a host counts as failed


class Trainer(Actor):
    """One replica of the model. Its state exists only in memory."""

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
        """Return the number of steps done, the pid (a replacement has another one) and the last loss."""
        return self.steps, os.getpid(), self.loss

    @endpoint
    def train(self, step: int) -> float:
        """Train one step with all replicas of the group. If it raises, the weights are unchanged."""
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
        """Copy weights, optimizer state and step of the group's rank `source` to all ranks of the group."""
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


# ---- controller


@dataclass
class Team:
    """The replicas that train now, with their process ids, phase durations and losses."""

    procs: Any
    trainers: ActorMesh
    ranks: list[int]
    pids: dict[int, int] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)  # by step

    def members(self, mesh: Any) -> Any:
        """Return the slice of `mesh` with the ranks that train. Any two of three ranks form a slice."""
        first, last = self.ranks[0], self.ranks[-1]
        stride = self.ranks[1] - first if len(self.ranks) > 1 else 1
        return mesh.slice(hosts=slice(first, last + 1, stride))

    def regroup(self, ranks: Sequence[int]) -> int:
        """Make a new process group, copy the state of the most advanced replica to all, and return the next step."""
        self.ranks = sorted(ranks)
        begun = time.monotonic()
        self.members(self.procs).process_group(timeout=30).get()
        grouped = time.monotonic()
        steps, pids, losses = zip(*self.members(self.trainers).ready.call().get(timeout=30).values(), strict=True)
        self.pids |= dict(zip(self.ranks, pids, strict=True))
        last = steps.index(max(steps))
        if steps[last]:  # a replica may have ended a step whose call failed: its loss has not been recorded yet
            self.losses[steps[last] - 1] = losses[last]
        self.members(self.trainers).restore.call(last).get(timeout=30)
        self.phases |= {"regroup": grouped - begun, "restore": time.monotonic() - grouped}
        return max(steps)

    def step(self, step: int) -> float:
        return float(next(iter(self.members(self.trainers).train.call(step).get(timeout=60).values())))


def survivors(team: Team, error: SupervisionError | ActorError) -> list[int]:
    """Return the ranks that reply and still have the same process.

    A call to a dead rank would wait for its replacement, so ranks that the error names as dead are not called. The
    error of a failed collective may come before the death is detected and names no rank. Therefore the calls have a
    timeout of twice the detection time.
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
    """Train all steps in spite of failures and return the loss of each step."""
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
                    call.get()  # raises if the replacement has died too; Restart then starts another one
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


# ---- local hosts


class LocalHosts:
    """Host daemons on this machine. Each can be killed or stopped, together with its processes."""

    def __init__(self, count: int):
        # With --exit-with-stdin a daemon exits when this program has ended, even after SIGKILL.
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
        for pid in process_tree(self.daemons[number].pid):
            os.kill(pid, signal.SIGSTOP)
        return f"host {number} hangs"

    def close(self) -> None:
        for daemon in self.daemons:
            for pid in process_tree(daemon.pid):
                os.kill(pid, signal.SIGCONT)
            daemon.terminate()
        for daemon in self.daemons:
            daemon.wait(20)


def process_tree(pid: int) -> list[int]:
    """Return the pids of a process and its descendants."""
    children: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += map(int, thread.read_text().split())
    return [pid, *(other for child in children for other in process_tree(child))]


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
