"""Many random worlds, in interpreters of their own: nothing of pytest's process is in them, and a crash has a stack.

``python -m tests.testing.seeds FIRST LAST [SIZE...]``: up to LAST, the sizes in turn, "any" for what the seed draws.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.testing import world

SECONDS = 900


def run(first: int, last: int, *sizes: str) -> None:
    """One after the other."""
    for seed in range(first, last):
        size = sizes[seed % len(sizes)] if sizes else "any"
        try:
            world.run(seed, None if size == "any" else int(size))
        except BaseException:
            print(f"again: python -m tests.testing.seeds {seed} {seed + 1} {size}", flush=True)
            raise


def run_in_interpreters(seeds: range, *sizes: str) -> None:
    """All of them, in as many interpreters as there are processors. Raises AssertionError with what one said."""
    count = len(os.sched_getaffinity(0))

    def part(number: int) -> None:
        mine = seeds[len(seeds) * number // count : len(seeds) * (number + 1) // count]
        command = [sys.executable, "-X", "faulthandler", "-m", __name__, str(mine.start), str(mine.stop), *sizes]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS)
        assert done.returncode == 0, f"{mine} ended with {done.returncode}:\n{done.stdout}"

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(part, range(count)))


if __name__ == "__main__":
    run(*map(int, sys.argv[1:3]), *sys.argv[3:])
