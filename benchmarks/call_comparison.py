"""Benchmark of the check that all ranks make the same call: the C++ core with and without the check.

    python benchmarks/call_comparison.py [--rounds 8]

It compiles csrc/shm/ with and without this check. Two C++ processes run batches of all_reduces of 8 bytes, with each
version in turn. It prints the medians of the batches' means.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ["-std=c++20", "-O3", "-ffp-contract=off", "-pthread", f"-I{ROOT / 'csrc'}"]


def _build(folder: str, name: str, *flags: str) -> str:
    program = os.path.join(folder, name)
    sources = sorted(path for part in ("shm", "platform") for path in (ROOT / "csrc" / part).glob("*.cpp"))
    compiler = os.environ.get("CXX", "g++")
    subprocess.run(
        [
            compiler,
            *FLAGS,
            *flags,
            *map(str, sources),
            str(ROOT / "benchmarks" / "_call_comparison.cpp"),
            "-o",
            program,
        ],
        check=True,
    )
    return program


def main() -> None:
    """Run the benchmark and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    rounds = parser.parse_args().rounds
    if sys.platform != "linux":
        sys.exit("the shared-memory core is Linux's")
    with tempfile.TemporaryDirectory() as folder:
        programs = {
            "compared": _build(folder, "with"),
            "not compared": _build(folder, "without", "-DMONARCH_UNCHECKED"),
        }
        times: dict[str, list[float]] = {name: [] for name in programs}
        for turn in range(rounds):
            for name in sorted(programs, reverse=bool(turn % 2)):
                out = subprocess.run([programs[name]], check=True, capture_output=True, text=True).stdout
                times[name] += map(float, out.split()[2:])  # the first two batches are warm-up
    medians = {name: statistics.median(series) for name, series in times.items()}
    for name, median in medians.items():
        print(f"all_reduce of 8 B, 2 processes, headers {name}: {median:7.1f} ns (best {min(times[name]):.1f})")
    print(f"the comparison costs {medians['compared'] - medians['not compared']:.1f} ns; the limit is 200")


if __name__ == "__main__":
    main()
