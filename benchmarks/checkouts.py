"""Benchmark of two checkouts of this project: hot paths before and after a change, in one interleaved run.

    git worktree add build/before COMMIT            # then compile its core: python setup.py build_ext --inplace
    python benchmarks/checkouts.py build/before [--rounds 30] [--only group actors dtensor] [--json FILE]

The contenders are the old checkout, the old checkout a second time, and this one. Each has its own processes, which
sleep between requests. A round measures all contenders, in random order. A figure is the least of the rounds' means in
microseconds. A ratio is the median of the rounds' ratios to the first contender. The ratio of the two old contenders
shows the noise of the machine. Smaller differences mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUNNER = Path(__file__).with_name("_checkout_runner.py")
# Kind of runner -> number of processes.
PROCESSES = {"group": 2, "actors": 1, "dtensor": 1}
# Case -> number of calls in one round.
COUNTS = {"all_reduce 8 B": 3000, "all_reduce 1 MiB": 200, "call_one": 500, "call of two": 300, "100 x call_one": 10}
COUNT = 500  # the number of calls in all other cases


def free_port() -> int:
    """Return a port of loopback that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Contender:
    """The runner of a checkout: one process, or one for each rank. ``variables`` are added to their environment."""

    def __init__(self, checkout: Path, kind: str, runner: Path = RUNNER, **variables: str) -> None:
        size, port = PROCESSES[kind], free_port()
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(runner), kind],
                env={
                    **os.environ,
                    "PYTHONPATH": str(checkout),
                    "OMP_NUM_THREADS": "1",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "RANK": str(rank),
                    "WORLD_SIZE": str(size),
                    **variables,
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        self.cases: list[str] = self._read()

    def _read(self) -> list[str]:
        lines = [process.stdout.readline() for process in self._processes if process.stdout]
        if not all(lines):
            raise SystemExit("a runner has ended; its error is above")
        return list(json.loads(lines[0]))

    def measure(self, case: str, **more: object) -> float:
        """Return the mean time of a call in seconds. ``more`` is added to the request."""
        order = json.dumps({"case": case, "count": COUNTS.get(case, COUNT), **more})
        for process in self._processes:
            print(order, file=process.stdin, flush=True)
        return max(float(process.stdout.readline()) for process in self._processes if process.stdout)

    def close(self) -> None:
        """End the runner."""
        for process in self._processes:
            if process.stdin:
                process.stdin.close()
        for process in self._processes:
            process.wait(60)


def line(case: str, found: dict[str, list[float]]) -> str:
    """Return a line with the least time of each contender in a case, and its ratio to the first contender."""
    cells = [f"{case:18}"]
    for name, times in found.items():
        ratio = statistics.median(time / first for time, first in zip(times, found["before"], strict=True))
        cells.append(f"{name} {min(times) * 1e6:9.2f} us  x {ratio:5.3f}")
    return "   ".join(cells)


def main() -> None:
    """Run the benchmark and print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout, with its core compiled")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", nargs="+", choices=list(PROCESSES), default=list(PROCESSES))
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    names = {"before": options.before.resolve(), "before again": options.before.resolve(), "now": ROOT}
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: {name: [] for name in names})
    for kind in options.only:
        with contextlib.ExitStack() as stack:
            contenders = {name: Contender(checkout, kind) for name, checkout in names.items()}
            for each in contenders.values():
                stack.callback(each.close)
            for case in contenders["now"].cases:
                for name in names:  # warm-up
                    contenders[name].measure(case)
                for _ in range(options.rounds):
                    for name in random.sample(list(names), len(names)):
                        found[case][name].append(contenders[name].measure(case))
                print(line(case, found[case]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
