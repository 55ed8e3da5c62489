"""A pending call on two nodes of Slurm with this project: `ours.py FOLDER`. slurm_jobs.py has the protocol."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import monarch_backend.actor
from monarch_backend.actor import Actor, endpoint
from monarch_backend.job import SlurmJob


class Sleeper(Actor):
    @endpoint
    def pid(self) -> int:
        """Import torch, as a training process does, and return this process's pid."""
        import torch  # noqa: F401

        return os.getpid()

    @endpoint
    def sleep(self) -> None:
        time.sleep(600)


def main() -> None:
    monarch_backend.actor.unhandled_fault_hook = lambda _: None
    begun = time.time()
    job = SlurmJob(name="ours", path=Path(sys.argv[1]) / "ours.json", tether=30).add_mesh("workers", 2)
    job.apply()
    sleepers = job.state().workers.spawn_procs({"gpus": 1}).spawn("sleepers", Sleeper)
    pids = list(sleepers.pid.call().get().values())
    print(json.dumps([time.time() - begun, pids]), flush=True)
    future = sleepers.sleep.call()
    if sys.stdin.readline() != "end\n":
        try:
            future.get()
        except Exception as error:
            print(json.dumps([time.time(), str(error)]), flush=True)
        sys.stdin.readline()
    begun = time.time()
    job.kill()
    print(json.dumps(time.time() - begun), flush=True)


if __name__ == "__main__":
    main()
