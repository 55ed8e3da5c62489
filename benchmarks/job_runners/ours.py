"""A pending call on two nodes of a scheduler with this project: `ours.py KIND FOLDER`. _job_faults.py has the protocol.

KIND is "slurm", or one of Kubernetes: "pods", "tethered", or "attached SELECTOR RANK_LABEL SECRET_FILE" for pods of
others.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from _protocol import Started, serve

import monarch_backend.actor
from monarch_backend.actor import Actor, endpoint
from monarch_backend.job import Job, KubernetesJob, SlurmJob

IMAGE, RESOURCES = "testbed/monarch:1", {"example.com/slot": 1}
TETHER_S = 30
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"


class Sleeper(Actor):
    @endpoint
    def pid(self) -> int:
        """Import torch, as a training process does, and return this process's pid."""
        import torch  # noqa: F401

        return os.getpid()

    @endpoint
    def sleep(self) -> None:
        time.sleep(600)


def job_of(kind: str, folder: Path, *options: str) -> tuple[Job, list[str]]:
    """Return the job, and the names of its meshes. They have two hosts together."""
    path, meshes = folder / "ours.json", ["workers"]
    if kind == "slurm":
        return SlurmJob(name="ours", path=path, tether=TETHER_S).add_mesh("workers", 2), meshes
    if kind == "attached":
        selector, rank_label, secret = options
        job = KubernetesJob(name="ours", path=path, in_cluster=True, secret_file=secret)
        return job.attach_mesh("workers", 2, selector, rank_label=rank_label), meshes
    if kind == "pods":
        job = KubernetesJob(name="ours", path=path, in_cluster=True)
        return job.add_mesh("workers", 2, image=IMAGE, resources=RESOURCES), meshes
    # Two Jobs of one pod each, with its index: the testbed's Kubernetes 1.20 has no indexed Jobs.
    job, meshes = KubernetesJob(name="ours", path=path, in_cluster=True, controller="job", tether=TETHER_S), ["a", "b"]
    for each in meshes:
        job.add_mesh(each, 1, image=IMAGE, resources=RESOURCES, labels={COMPLETION_INDEX: "0"})
    return job, meshes


def start() -> Started:
    job, meshes = job_of(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
    job.apply()
    state = job.state()
    sleepers = [getattr(state, each).spawn_procs({"gpus": 1}).spawn("sleepers", Sleeper) for each in meshes]
    pids = [pid for each in [each.pid.call() for each in sleepers] for pid in each.get().values()]

    def call() -> Callable[[], object]:
        futures = [each.sleep.call() for each in sleepers]
        return lambda: futures[0].get()

    return pids, call, job.kill


if __name__ == "__main__":
    monarch_backend.actor.unhandled_fault_hook = lambda _: None
    serve(start)
