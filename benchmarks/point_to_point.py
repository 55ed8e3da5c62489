"""Benchmark of messages between two ranks in the ways that programs send them: send, isend, batch_isend_irecv.

    python benchmarks/point_to_point.py [--rounds 30] [--sizes 8 65536 1048576] [--quantile 0.5] [--out FILE]

Two forked ranks have a monarch, a gloo and a fake group at once and alternate between them, so that noise of the
machine affects all alike. The fake group moves nothing: its time is torch's own part of a call. Each round times a
burst of exchanges of each kind on each group. The time of a burst is the median of its exchanges, on the slower rank.
Figures are medians over rounds; a ratio is the median of the rounds' ratios. On a machine that other programs load,
`--quantile 0.1` takes the fast tenth of the exchanges and of the rounds instead: those without a switch of processes.

| kind | an exchange |
| --- | --- |
| send, recv | ping-pong: a rank sends and receives, the other rank receives and sends back; half of the time |
| isend, irecv | the same with `isend(x).wait()` and `irecv(x).wait()`; half of the time |
| batch_isend_irecv | the same with batches of one message; half of the time |
| early irecv | ping-pong whose receive is posted before the send; half of the time |
| swap | both ranks send and receive in one batch of two, and wait for both |
| ten under way | both ranks call ten `irecv` and ten `isend`, then wait for all; a tenth of the time |
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _machine_report import Others, machine
from _rank_pair import GROUPS, Kinds, Times, measure, quantile_of

KINDS = ("send, recv", "isend, irecv", "batch_isend_irecv", "early irecv", "swap", "ten under way")


def _kinds(rank: int, size: int) -> Callable[[Any], Kinds]:
    x, y = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    return lambda group: _kinds_of(rank, x, y, group)


def _kinds_of(rank: int, x: torch.Tensor, y: torch.Tensor, group: Any) -> Kinds:
    peer = 1 - rank

    def in_turn(send: Callable[[], object], receive: Callable[[], object]) -> Callable[[], object]:
        first, second = (send, receive) if rank == 0 else (receive, send)
        return lambda: (first(), second())

    def batch(*ops: tuple[Any, torch.Tensor]) -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(op, tensor, peer, group) for op, tensor in ops]):
            work.wait()

    def early() -> None:
        work = dist.irecv(y, peer, group)
        if rank == 0:
            dist.send(x, peer, group)
            work.wait()
        else:
            work.wait()
            dist.send(x, peer, group)

    def ten() -> None:
        works = [dist.irecv(y, peer, group) for _ in range(10)]
        works += [dist.isend(x, peer, group) for _ in range(10)]
        for work in works:
            work.wait()

    return {
        "send, recv": (in_turn(lambda: dist.send(x, peer, group), lambda: dist.recv(y, peer, group)), 2),
        "isend, irecv": (
            in_turn(lambda: dist.isend(x, peer, group).wait(), lambda: dist.irecv(y, peer, group).wait()),
            2,
        ),
        "batch_isend_irecv": (in_turn(lambda: batch((dist.isend, x)), lambda: batch((dist.irecv, y))), 2),
        "early irecv": (early, 2),
        "swap": (lambda: batch((dist.isend, x), (dist.irecv, y)), 1),
        "ten under way": (ten, 10),
    }


def report(times: Times, sizes: list[int], quantile: float) -> str:
    """Return the table: microseconds of each group, gloo's time relative to ours, and ours beyond twice the fake's."""
    lines = ["| kind | size | monarch us | gloo us | fake us | gloo / monarch | monarch less twice fake, us |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for kind in KINDS:
        for size in sizes:
            series = {name: times[name][size, kind] for name in GROUPS}
            cells = [f"{quantile_of(series[name], quantile):.1f}" for name in GROUPS]
            ratio = statistics.median(a / b for a, b in zip(series["gloo"], series["monarch"], strict=True))
            beyond = quantile_of([a - 2 * b for a, b in zip(series["monarch"], series["fake"], strict=True)], quantile)
            cells += [f"{ratio:.1f}", f"{beyond:.1f}"]
            lines.append(f"| {kind} | {size} B | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark and print the table; with --out also write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 64 << 10, 1 << 20])
    parser.add_argument("--quantile", type=float, default=0.5)
    parser.add_argument("--out", type=Path, help="write a page with the table to this file")
    args = parser.parse_args()
    others = Others()
    table = report(measure(_kinds, args.sizes, args.rounds, args.quantile), args.sizes, args.quantile)
    notes = f"{machine()}; torch {torch.__version__}; {args.rounds} rounds; quantile {args.quantile}; {others.note()}."
    print(f"{table}\n\n{notes}")
    if args.out:
        title = "# Measured: messages between two ranks\n\n2 ranks, from `benchmarks/point_to_point.py`."
        args.out.write_text(f"{title}\n\n{table}\n\n{notes}\n")


if __name__ == "__main__":
    main()
