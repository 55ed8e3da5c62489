"""Benchmark of the package's entry point: its share of `import torch` in new interpreters.

    python benchmarks/import_hook.py [--rounds 15]

Ours is the time to load and call the entry point, measured inside `import torch`. The limit is 1 ms. For comparison the
same import runs with TORCH_DEVICE_BACKEND_AUTOLOAD=0, where torch calls no entry points. Both are interleaved, and
figures are medians. The difference of two whole imports is much noisier than the direct measurement. It is printed as a
cross-check.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

# Program that times `EntryPoint.load` and the call of the loaded function, for our entry point only.
PROBE = """
import importlib.metadata as md, time
cost = {}
plain = md.EntryPoint.load
def load(self):
    if not self.value.startswith("monarch_backend."):
        return plain(self)
    start = time.perf_counter()
    hook = plain(self)
    cost["load"] = time.perf_counter() - start
    def timed():
        start = time.perf_counter()
        hook()
        cost["call"] = time.perf_counter() - start
    return timed
md.EntryPoint.load = load
start = time.perf_counter()
import torch
print(time.perf_counter() - start, cost.get("load", 0.0), cost.get("call", 0.0))
"""


def once(autoload: bool) -> tuple[float, float]:
    """Return (seconds of the whole import, seconds of our entry point) in a new interpreter."""
    env = dict(os.environ, TORCH_DEVICE_BACKEND_AUTOLOAD="1" if autoload else "0")
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has cached byte code
    out = subprocess.run([sys.executable, "-c", PROBE], env=env, check=True, capture_output=True, text=True)
    total, load, call = map(float, out.stdout.split())
    return total, load + call


def main() -> None:
    """Run the benchmark and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    once(True)  # writes the byte code and warms the page cache
    with_us, without, hook = [], [], []
    for _ in range(rounds):
        total, ours = once(True)
        with_us.append(total)
        hook.append(ours)
        without.append(once(False)[0])
    ours_ms = statistics.median(hook) * 1e3
    print(f"entry point, median of {rounds}: {ours_ms:.2f} ms (limit 1 ms; max {max(hook) * 1e3:.2f})")
    print(
        f"import torch with it: {statistics.median(with_us):.2f} s, without any entry point: "
        f"{statistics.median(without):.2f} s, ratio {statistics.median(with_us) / statistics.median(without):.3f}"
    )


if __name__ == "__main__":
    main()
