"""Benchmark of failure detection: time until the survivors of a collective raise, with monarch and Gloo.

    python benchmarks/failure_detection.py [--ranks 3] [--rounds 20]

Every round starts new ranks for each backend in turn. They run some all_reduces. Then the last rank records the time
and kills itself with SIGKILL, while the others wait for it in the next all_reduce. The result is the time from then
until the slowest survivor's error. The floor is the time until the kernel wakes a parent that sleeps on the child's
pidfd.
"""

from __future__ import annotations

import argparse
import mmap
import os
import re
import select
import signal
import statistics
import struct
import sys
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist

BACKENDS = ("monarch", "gloo")


def _rank(backend: str, rank: int, ranks: int, address: str, times: mmap.mmap) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    x = torch.ones(16)
    for _ in range(20):
        dist.all_reduce(x)
    if rank == ranks - 1:
        time.sleep(0.05)  # time for the other ranks to enter all_reduce; a late rank detects the death too
        struct.pack_into("d", times, 8 * rank, time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(x)
    except Exception as error:
        struct.pack_into("d", times, 8 * rank, time.monotonic())
        text = str(error)
        named = re.search(rf"rank {ranks - 1}\b", text) and "signal 9" in text
        struct.pack_into("d", times, 8 * (ranks + rank), 1.0 if named else 0.0)


def _round(backend: str, ranks: int) -> tuple[float, float, bool]:
    """Return seconds until the slowest survivor's error, seconds until the pidfd is readable, and a bool.

    The bool is True if all errors name the dead rank and its signal.
    """
    times = mmap.mmap(-1, 16 * ranks)
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                try:
                    _rank(backend, rank, ranks, f"file://{folder}/store", times)
                finally:
                    os._exit(0)
            pids.append(pid)
        watch = os.pidfd_open(pids[-1])
        select.select([watch], [], [])
        knew = time.monotonic()
        os.close(watch)
        for pid in pids:
            os.waitpid(pid, 0)
    at = struct.unpack(f"{2 * ranks}d", times[:])
    death, errors = at[ranks - 1], at[: ranks - 1]
    return max(errors) - death, knew - death, all(at[ranks : 2 * ranks - 1])


def main() -> None:
    """Run the benchmark and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    if sys.platform != "linux":
        sys.exit("pidfds are Linux's")
    found: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    named, floor = dict.fromkeys(BACKENDS, 0), []
    for number in range(args.rounds):
        for backend in BACKENDS[:: 1 if number % 2 else -1]:
            seconds, knew, all_name = _round(backend, args.ranks)
            found[backend].append(seconds * 1e3)
            floor.append(knew * 1e3)
            named[backend] += all_name
    print(f"{args.ranks} ranks, {args.rounds} deaths each, torch {torch.__version__}; milliseconds to the last error")
    for backend in BACKENDS:
        ms = sorted(found[backend])
        print(
            f"{backend:8s} median {statistics.median(ms):7.2f}  max {ms[-1]:7.2f}  "
            f"rank and signal named {named[backend]} of {args.rounds}"
        )
    print(f"{'floor':8s} median {statistics.median(floor):7.2f}  max {max(floor):7.2f}  (a parent asleep on the pidfd)")


if __name__ == "__main__":
    main()
