"""A pending call on two nodes of a scheduler with PyTorch Monarch: `torchmonarch_peer.py KIND FOLDER`.

KIND is "slurm" or "attached", for pods of others. _job_faults.py has the protocol. It runs in .envs/peer-torchmonarch,
and imports nothing from this project.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import monarch.actor
from _protocol import Started, serve
from monarch.actor import Actor, endpoint


class Sleeper(Actor):
    @endpoint
    def pid(self) -> int:
        """Import torch, as a training process does, and return this process's pid."""
        import torch  # noqa: F401

        return os.getpid()

    @endpoint
    def sleep(self) -> None:
        time.sleep(600)


def job_of(kind: str, folder: str, *options: str) -> Any:
    if kind == "slurm":
        from monarch._src.job.slurm import SlurmJob

        return SlurmJob({"workers": 2}, python_exe=sys.executable, exclusive=False, log_dir=folder)
    from monarch.job.kubernetes import KubernetesJob

    [namespace] = options
    job = KubernetesJob(namespace)
    job.add_mesh("workers", 2)
    return job


def start() -> Started:
    job = job_of(*sys.argv[1:])
    job.apply()
    procs = job.state(cached_path=None).workers.spawn_procs(per_host={"gpus": 1}, name="workers")
    sleepers: Any = procs.spawn("sleepers", Sleeper)
    pids = [pid for _, pid in sleepers.pid.call().get().items()]
    return pids, lambda: sleepers.sleep.call().get, job.kill


if __name__ == "__main__":
    monarch.actor.unhandled_fault_hook = lambda _: None
    serve(start)
    os._exit(0)
