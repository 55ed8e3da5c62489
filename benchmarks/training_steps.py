"""Benchmark of whole training steps: their time, and the share of communication in it.

    python benchmarks/training_steps.py [--rounds 8] [--steps DDP FSDP2 ...] [--out FILE]

Two ranks with monarch, two with gloo, and two with torch's fake backend, which moves nothing: its step is all that is
not communication. The three pairs are started once and take turns, so that noise of the machine affects all alike. The
time of a step is that of the slower rank. Communication is the time beyond the fake backend's in the same round, so it
includes waiting for the other rank, and a pipeline's bubble. Figures are medians over rounds. By noise a share can be
below 0.

The step of a framework needs that framework: install accelerate and transformers, or use the environment of
`make test-clients`. Compiled steps need a C++ compiler. What is missing is left out, with a line that says so.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from _collective_peers import COMMON, FAKE, PEERS
from _machine_report import machine
from _peer_runner import Effort, Others, Runner, started
from _report import Series
from _training_steps import STEPS

OURS, PEER, FLOOR = "monarch", "gloo", FAKE.name


def _milliseconds(series: Series) -> list[float]:
    """Return the median of each round."""
    return [statistics.median(times) / 1e3 for times in series.rounds]


def row(kind: str, measured: dict[str, Series]) -> str:
    """Return the table's row: milliseconds, shares of communication, and the ratio of both communications."""
    if {OURS, PEER, FLOOR} - measured.keys():
        return f"| {kind} | not measured | | | | | |"
    ours, peer, floor = (_milliseconds(measured[name]) for name in (OURS, PEER, FLOOR))
    cells = [f"{statistics.median(times):.2f}" for times in (ours, peer, floor)]
    for times in (ours, peer):
        shares = [(time - base) / time for time, base in zip(times, floor, strict=True)]
        cells.append(f"{statistics.median(shares):.0%}")
    beyond = [[time - base for time, base in zip(times, floor, strict=True)] for times in (ours, peer)]
    cells.append(f"{statistics.median(beyond[0]) / statistics.median(beyond[1]):.2f}")
    return f"| {kind} | {' | '.join(cells)} |"


def measure(kinds: list[str], rounds: int, notes: list[str]) -> list[str]:
    """Return a row for each kind of step. ``notes`` gets a line for what failed, and for the noise."""
    peers = [*(peer for peer in PEERS if peer.name in (OURS, PEER)), FAKE]
    rows = []
    with tempfile.TemporaryDirectory(prefix="monarch-bench-") as folder:
        for kind in kinds:  # each has ranks of its own: a model leaves threads and memory behind
            print(kind, file=sys.stderr)
            run = Path(folder) / str(len(rows))
            run.mkdir()
            with contextlib.ExitStack() as stack:
                rank_sets = started(peers, 2, run, stack, notes)
                others = Others(list(rank_sets))
                runner = Runner(rank_sets, Effort(rounds, 0.4, most_calls=50), notes)
                rows.append(row(kind, runner.measure(runner.step(kind))))
                print(f"{rows[-1]} {others.note()}", file=sys.stderr)
    return rows


def _stop(*_: Any) -> None:
    sys.exit(143)


def main() -> None:
    """Run the benchmark and print the table; with --out also write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--out", type=Path, help="write a page with the table to this file")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _stop)
    notes: list[str] = []
    rows = measure(args.steps, args.rounds, notes)
    header = (
        "| step | monarch ms | gloo ms | no communication ms | share, monarch | share, gloo | communication / gloo's |"
    )
    common = " ".join(f"{name}={value}" for name, value in COMMON.items())
    lines = [header, "| --- | --- | --- | --- | --- | --- | --- |", *rows, ""]
    lines += [f"{machine()}; torch {torch.__version__}; {args.rounds} rounds. All ranks: {common}"]
    lines += [f"- {note}" for note in notes]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out:
        title = "# Measured: training steps\n\nTwo ranks, medians, from `benchmarks/training_steps.py`."
        args.out.write_text(f"{title}\n\n{text}")


if __name__ == "__main__":
    main()
