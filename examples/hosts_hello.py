"""Hello from several hosts: a job starts them, the program calls actors on them, and a later run can end them.

    python examples/hosts_hello.py
    python examples/hosts_hello.py --keep        # leaves the hosts running; the next run finds them at once
    python examples/hosts_hello.py --end         # ends the hosts that --keep left

The hosts are processes of this machine, so the example runs anywhere. For other machines one line changes:
`job = SSHJob(name="hello").add_mesh("workers", ["node1", "node2"])`, with SSHJob from monarch_backend.job.
"""

from __future__ import annotations

import argparse
import os
import time

import torch

from monarch_backend.actor import Actor, endpoint
from monarch_backend.hosts import host_name
from monarch_backend.job import ProcessJob


class Greeter(Actor):
    @endpoint
    def greet(self) -> str:
        return f"process {os.getpid()} of {host_name()}"

    @endpoint
    def norm(self, x: torch.Tensor) -> float:
        return float(x.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="leave the hosts running for the next time")
    parser.add_argument("--end", action="store_true", help="end hosts that were left running, and do nothing else")
    args = parser.parse_args()

    job = ProcessJob({"workers": args.hosts}, name="hello")
    if args.end:
        job.kill()
        return
    started = time.perf_counter()
    job.apply()  # starts the hosts that do not run yet
    print(f"{args.hosts} hosts are up after {time.perf_counter() - started:.1f} s")
    try:
        workers = job.state().workers
        greeters = workers.spawn_procs({"gpus": 2}).spawn("greeters", Greeter)
        for point, text in greeters.greet.call().get().items():
            print(point, text)
        x = torch.arange(1 << 20, dtype=torch.float32)
        norms = greeters.norm.call(x).get()
        print("all agree about a tensor of 4 MiB:", set(norms.values()) == {float(x.norm())})
    finally:
        if not args.keep:
            job.kill()


if __name__ == "__main__":
    main()
