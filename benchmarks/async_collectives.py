"""Benchmark of all_reduce in the ways that programs call it: synchronous, asynchronous, functional, overlapped.

    python benchmarks/async_collectives.py [--rounds 30] [--sizes 8 65536 1048576] [--out FILE]

Two forked ranks have a monarch, a gloo and a fake group at once and alternate between them, so that noise of the
machine affects all alike. The fake group moves nothing: its time is torch's own part. Each round times a burst of calls
of each kind on each group. The time of a burst is the median of its calls, on the slower rank. Figures are medians over
rounds; a ratio is the median of the rounds' ratios.

| kind | a call |
| --- | --- |
| synchronous | `dist.all_reduce(x)` |
| asynchronous | `dist.all_reduce(x, async_op=True).wait()` |
| ten under way | ten asynchronous calls, then ten waits; a tenth of the time |
| functional | `wait_tensor(all_reduce(x, "sum", group))` of `torch.distributed._functional_collectives` |
| overlapped | an asynchronous call, a product of matrices on the same rank, the wait; less the product alone |
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from _machine_report import Others, machine
from _rank_pair import GROUPS, Kinds, Times, measure

KINDS = ("synchronous", "asynchronous", "ten under way", "functional", "overlapped")


def _kinds(_rank: int, size: int) -> Callable[[Any], Kinds]:
    x = torch.zeros(max(size // 4, 1))
    return lambda group: _kinds_of(x, group)


def _kinds_of(x: torch.Tensor, group: Any) -> Kinds:
    side = 256
    a, b, c = torch.ones(side, side), torch.ones(side, side), torch.empty(side, side)

    def ten() -> None:
        for work in [dist.all_reduce(x, group=group, async_op=True) for _ in range(10)]:
            work.wait()

    def overlapped() -> None:
        work = dist.all_reduce(x, group=group, async_op=True)
        torch.mm(a, b, out=c)
        work.wait()

    return {
        "synchronous": (lambda: dist.all_reduce(x, group=group), 1),
        "asynchronous": (lambda: dist.all_reduce(x, group=group, async_op=True).wait(), 1),
        "ten under way": (ten, 10),
        "functional": (lambda: functional.wait_tensor(functional.all_reduce(x, "sum", group)), 1),
        "overlapped": (overlapped, 1),
        "product": (lambda: torch.mm(a, b, out=c), 1),
    }


def _ratio(first: list[float], second: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(first, second, strict=True))


def report(times: Times, sizes: list[int]) -> str:
    """Return the table: microseconds of each group, gloo's time relative to ours, ours relative to synchronous."""
    lines = ["| kind | size | monarch us | gloo us | fake us | gloo / monarch | monarch / its synchronous call |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for kind in KINDS:
        for size in sizes:
            series = {name: times[name][size, kind] for name in GROUPS}
            if kind == "overlapped":  # without the product
                alone = {name: statistics.median(times[name][size, "product"]) for name in GROUPS}
                series = {name: [max(one - alone[name], 0.01) for one in of] for name, of in series.items()}
            cells = [f"{statistics.median(series[name]):.1f}" for name in GROUPS]
            own = times["monarch"][size, "synchronous"]
            cells += [f"{_ratio(series['gloo'], series['monarch']):.1f}", f"{_ratio(series['monarch'], own):.2f}"]
            lines.append(f"| {kind} | {size} B | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark and print the table; with --out also write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 64 << 10, 1 << 20])
    parser.add_argument("--out", type=Path, help="write a page with the table to this file")
    args = parser.parse_args()
    others = Others()
    table = report(measure(_kinds, args.sizes, args.rounds), args.sizes)
    notes = f"{machine()}; torch {torch.__version__}; {args.rounds} rounds; {others.note()}."
    print(f"{table}\n\n{notes}")
    if args.out:
        title = (
            "# Measured: all_reduce as programs call it\n\n2 ranks, medians, from `benchmarks/async_collectives.py`."
        )
        args.out.write_text(f"{title}\n\n{table}\n\n{notes}\n")


if __name__ == "__main__":
    main()
