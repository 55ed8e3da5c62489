"""A pending call on two nodes of Slurm with PyTorch Monarch: `torchmonarch_peer.py FOLDER`.

slurm_jobs.py has the protocol. It runs in .envs/peer-torchmonarch, and imports nothing from this project.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import monarch.actor
from monarch._src.job.slurm import SlurmJob
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


def main() -> None:
    monarch.actor.unhandled_fault_hook = lambda _: None
    begun = time.time()
    job = SlurmJob({"workers": 2}, python_exe=sys.executable, exclusive=False, log_dir=sys.argv[1])
    job.apply()
    procs = job.state(cached_path=None).workers.spawn_procs(per_host={"gpus": 1}, name="workers")
    sleepers: Any = procs.spawn("sleepers", Sleeper)
    pids = [pid for _, pid in sleepers.pid.call().get().items()]
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
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
