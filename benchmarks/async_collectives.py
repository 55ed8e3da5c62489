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
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.testing._internal.distributed.fake_pg  # registers "fake"
from _machine_report import Others, machine

GROUPS = ("monarch", "gloo", "fake")
KINDS = ("synchronous", "asynchronous", "ten under way", "functional", "overlapped")
Times = dict[str, dict[tuple[int, str], list[float]]]


def _kinds(x: torch.Tensor, group: Any) -> dict[str, tuple[Callable[[], object], int]]:
    """Return kind -> (function, calls that it makes)."""
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


def _burst(call: Callable[[], object], calls: int) -> float:
    """Return the median of the microseconds of a call, in a burst of ``calls``."""
    dist.barrier()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def _rank(rank: int, address: str, sizes: list[int], rounds: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("monarch", init_method=address, rank=rank, world_size=2)
    groups = {name: dist.new_group([0, 1], backend=name) for name in GROUPS}
    times: Times = {name: {} for name in GROUPS}
    for size in sizes:
        x = torch.zeros(max(size // 4, 1))
        calls = max(4, min(100, (8 << 20) // size))
        kinds = {name: _kinds(x, group) for name, group in groups.items()}
        for turn in range(rounds + 1):
            for kind in (*KINDS, "product"):
                for name in GROUPS[turn % 3 :] + GROUPS[: turn % 3]:
                    call, many = kinds[name][kind]
                    took = _burst(call, calls) / many
                    if turn:  # the first round warms up
                        times[name].setdefault((size, kind), []).append(took)
    results.send(times)
    dist.barrier()
    dist.destroy_process_group()


def measure(sizes: list[int], rounds: int) -> Times:
    """Run both ranks; return for each group and (bytes, kind) the microseconds of each round."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        ranks = [
            context.Process(target=_rank, args=(rank, f"file://{folder}/store", sizes, rounds, pipes[rank][1]))
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        for _, sender in pipes:
            sender.close()  # so that recv fails when its rank has ended
        both = [receiver.recv() for receiver, _ in pipes]
        for process in ranks:
            process.join()
    return {
        name: {
            case: [max(pair) for pair in zip(series, both[1][name][case], strict=True)] for case, series in of.items()
        }
        for name, of in both[0].items()
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
    table = report(measure(args.sizes, args.rounds), args.sizes)
    notes = f"{machine()}; torch {torch.__version__}; {args.rounds} rounds; {others.note()}."
    print(f"{table}\n\n{notes}")
    if args.out:
        title = (
            "# Measured: all_reduce as programs call it\n\n2 ranks, medians, from `benchmarks/async_collectives.py`."
        )
        args.out.write_text(f"{title}\n\n{table}\n\n{notes}\n")


if __name__ == "__main__":
    main()
