"""Runner of many random worlds in separate interpreters, without pytest. A crash prints its stacks.

``python -m tests.testing.seed_runner FIRST LAST [SIZE...] [--wide]`` runs the seeds before LAST, with each size in
turn. A size is a number of processes, "any" for a size from the seed, or a number of hosts, as "hosts:64" or
"hosts:any". "probes:12" and "probes:any" are worlds of processes whose actors wait for each other. With ``--wide``, it
starts one interpreter for each processor.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.testing import random_deadlock_world, random_hosts_world, random_world

MODULE = "tests.testing.seed_runner"
SECONDS = 900
HOSTS = "hosts:"
PROBES = "probes:"


def run(first: int, last: int, *sizes: str) -> None:
    """Run the seeds in this interpreter, one after the other."""
    for seed in range(first, last):
        size = sizes[seed % len(sizes)] if sizes else "any"
        try:
            _run_one(seed, size)
        except BaseException:
            print(f"again: python -m tests.testing.seed_runner {seed} {seed + 1} {size}", flush=True)
            raise


def _run_one(seed: int, size: str) -> None:
    count = size.removeprefix(HOSTS).removeprefix(PROBES)
    number = None if count == "any" else int(count)
    if size.startswith(HOSTS):
        random_hosts_world.run(seed, number)
    elif size.startswith(PROBES):
        random_deadlock_world.run(seed, number)
    else:
        random_world.run(seed, number)


def run_in_interpreters(seeds: range, *sizes: str, seconds: float | None = SECONDS) -> None:
    """Run the seeds in one interpreter for each processor. Raise AssertionError with the output of one that failed."""
    count = len(os.sched_getaffinity(0))

    def part(number: int) -> None:
        mine = seeds[len(seeds) * number // count : len(seeds) * (number + 1) // count]
        command = [sys.executable, "-X", "faulthandler", "-m", MODULE, str(mine.start), str(mine.stop), *sizes]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds)
        assert done.returncode == 0, f"{mine} ended with {done.returncode}:\n{done.stdout}"

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(part, range(count)))


def main() -> None:
    """Run the command line."""
    first, last, *sizes = [word for word in sys.argv[1:] if word != "--wide"]
    if "--wide" in sys.argv:
        run_in_interpreters(range(int(first), int(last)), *sizes, seconds=None)
    else:
        run(int(first), int(last), *sizes)


if __name__ == "__main__":
    main()
