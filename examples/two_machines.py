"""One program on several machines: start processes on each, train together, and go on when a machine is lost.

    python examples/two_machines.py tcp://10.0.0.2:26600 tcp://10.0.0.3:26600

`monarch-backend up` runs on each machine, and MONARCH_SECRET_FILE names the same secret everywhere.
docs/tutorials/two_machines.md explains it step by step.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist

import monarch_backend.actor
from monarch_backend.actor import Actor, ActorError, MeshFailure, SupervisionError, endpoint
from monarch_backend.hosts import attach_to_workers, host_name


class Worker(Actor):
    @endpoint
    def where(self) -> str:
        return f"process {os.getpid()} on {host_name()}"

    @endpoint
    def step(self) -> float:
        """Sum ones over all ranks of the process group."""
        total = torch.ones(4)
        dist.all_reduce(total)
        return total[0].item()


def report(failure: MeshFailure) -> None:
    """Print a failure that no owner handles. Without this hook it would end the program."""
    print(f"failure: {failure}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("addresses", nargs="+", help="of `monarch-backend up` on each machine")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two steps")
    args = parser.parse_args()

    monarch_backend.actor.unhandled_fault_hook = report
    hosts = attach_to_workers(args.addresses)
    procs = hosts.spawn_procs({"gpus": 2})
    workers = procs.spawn("workers", Worker)
    for point, text in workers.where.call().get().items():
        print(point, text, flush=True)
    procs.process_group().get()  # one torch.distributed world over all machines

    step = 0
    while step < args.steps:
        try:
            if failed := workers.failed_ranks:
                procs, workers = procs.without(failed), workers.without(failed)
                procs.process_group().get()  # a new world of the ranks that are left
            sums = workers.step.call().get()
        except (SupervisionError, ActorError) as error:
            print(f"step {step}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
        else:
            print(f"step {step}: the sum is {next(iter(sums.values()))} on {len(sums)} ranks", flush=True)
            step += 1
        time.sleep(args.pause)


if __name__ == "__main__":
    main()
