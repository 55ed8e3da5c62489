"""A mesh of this package in a Ray cluster: the driver of a Ray program calls actors on a host for each node.

The first argument is the number of nodes, by default 1. Ray starts on this machine if no cluster runs.
"""

import sys

import ray
import torch

from monarch_backend.actor import Actor, current_rank, endpoint
from monarch_backend.job import RayJob


class Trainer(Actor):
    @endpoint
    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x * (current_rank().rank + 1)


@ray.remote
def load(step: int) -> torch.Tensor:
    return torch.full((2,), float(step))


def main(nodes: int) -> None:
    job = RayJob({"trainers": nodes}, resources_per_host={"CPU": 1}, tether=True)
    job.apply()
    procs = job.state().trainers.spawn_procs({"gpus": 2})
    trainers = procs.spawn("trainer", Trainer)
    for step in range(1, 3):
        batch = ray.get(load.remote(step))  # from Ray's object store to actors of this package
        for point, value in trainers.step.call(batch).get().items():
            print(f"step {step} {dict(point)} {value.tolist()}")
    procs.stop().get()
    job.kill()


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False) if len(sys.argv) < 2 else ray.init("auto")
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    ray.shutdown()
