"""Benchmark of backend="monarch" against Gloo: its cost where it calls Gloo, its gain where it uses shared memory.

    python benchmarks/c10d_overhead.py [--rounds 16] [--pairs 5] [--json FILE]

The same calls run on a gloo group, on a monarch group with MONARCH_SHM=0 ("over gloo") and on a monarch group with
shared memory ("monarch"). Two forked ranks have all groups at once and alternate between them, so that noise of the
machine affects all alike. Each round measures a burst of calls on each group. Figures are medians over rounds of the
burst's mean. A ratio is the median of the rounds' ratios.

The scheduler's placement of a group's threads matters as much as their work. So there is a second gloo group, whose
ratio to the first one shows the effect of noise alone. Several pairs of ranks run one after the other, and each creates
the groups in another order. The floor is a bare TCP round trip over loopback with the same bytes each way. Gloo's
all-reduce of two ranks needs at least that.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Contender -> (backend, MONARCH_SHM). The first one is the base of the ratios.
GROUPS = {"gloo": ("gloo", ""), "over gloo": ("monarch", "0"), "monarch": ("monarch", "1"), "gloo again": ("gloo", "")}
Step = Callable[[], object]


def _ddp_step(group: Any) -> Step:
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)), process_group=group
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(32, 512)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def _cases(group: Any) -> dict[str, tuple[Step, int]]:
    """Return case -> (function to call, calls per burst) for one group."""
    small, large = torch.ones(2), torch.ones(1 << 18)
    half, whole = torch.ones(1 << 17), torch.ones(1 << 18)
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # name from torch 2.13 on
    return {
        "all_reduce 8 B": (lambda: dist.all_reduce(small, group=group), 200),
        "all_reduce 1 MiB": (lambda: dist.all_reduce(large, group=group), 30),
        "all_gather_into_tensor 1 MiB": (lambda: gather(whole, half, group=group), 30),
        "DDP step, 1 M parameters": (_ddp_step(group), 10),
    }


def _burst(step: Step, calls: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - start) / calls


def _floor(link: socket.socket, size: int, calls: int, first: bool) -> float:
    """Return the seconds of a round trip of ``size`` bytes each way over a bare loopback connection."""
    payload, view = bytes(size), memoryview(bytearray(size))
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        for sends in (first, not first):
            if sends:
                link.sendall(payload)
            else:
                got = 0
                while got < size:
                    got += link.recv_into(view[got:])
    return (time.perf_counter() - start) / calls


def _turned(names: Sequence[str], turn: int) -> list[str]:
    turn %= len(names)
    return [*names[turn:], *names[:turn]]


def _rank(rank: int, address: str, link: socket.socket, rounds: int, pair: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    names = _turned(list(GROUPS), pair)
    groups = {}
    for name in names:
        backend, os.environ["MONARCH_SHM"] = GROUPS[name]
        groups[name] = dist.new_group([0, 1], backend=backend)
    cases = {name: _cases(group) for name, group in groups.items()}
    times: dict[str, dict[str, list[float]]] = {}
    for case, (_, calls) in cases["gloo"].items():
        series: dict[str, list[float]] = {name: [] for name in GROUPS}
        for name in names:
            _burst(cases[name][case][0], calls)  # warm-up
        for turn in range(rounds):
            for name in _turned(names, turn):
                series[name].append(_burst(cases[name][case][0], calls))
        times[case] = series
    floors = {size: [_floor(link, size, 50, rank == 0) for _ in range(10)] for size in (8, 1 << 20)}
    dist.barrier()
    dist.destroy_process_group()
    return {"times": times, "floors": floors}


def _pair(rounds: int, pair: int) -> dict[str, Any]:
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far = listener.accept()[0]
    for link in (near, far):
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with tempfile.TemporaryDirectory() as folder:
        address = f"file://{folder}/store"
        child = os.fork()
        if child == 0:
            _rank(1, address, far, rounds, pair)
            os._exit(0)
        result = _rank(0, address, near, rounds, pair)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit("rank 1 failed")
    near.close()
    far.close()
    listener.close()
    return result


def _run(rounds: int, pairs: int) -> dict[str, Any]:
    """Measure with all pairs of ranks, one after the other, and return their joined series."""
    result = _pair(rounds, 0)
    for pair in range(1, pairs):
        more = _pair(rounds, pair)
        for size, floors in more["floors"].items():
            result["floors"][size] += floors
        for case, series in more["times"].items():
            for name, times in series.items():
                result["times"][case][name] += times
    return result


def _report(result: dict[str, Any]) -> dict[str, Any]:
    table = {}
    floor = {size: statistics.median(series) * 1e6 for size, series in result["floors"].items()}
    head = "".join(f"{name:>12}" for name in GROUPS)
    head += f"{'over/gloo':>11}{'monarch/gloo':>14}{'again/gloo':>12}"
    print(f"{'2 ranks, median us per call':<32}{head}{'TCP floor':>11}")
    for case, series in result["times"].items():
        row = {name: statistics.median(series[name]) * 1e6 for name in GROUPS}
        ratio = {
            name: statistics.median(mine / gloo for mine, gloo in zip(series[name], series["gloo"], strict=True))
            for name in GROUPS
        }
        limit = floor[8] if "8 B" in case else floor[1 << 20] if "MiB" in case else float("nan")
        figures = "".join(f"{row[name]:>12.1f}" for name in GROUPS)
        figures += f"{ratio['over gloo']:>11.3f}{ratio['monarch']:>14.3f}{ratio['gloo again']:>12.3f}"
        print(f"{case:<32}{figures}{limit:>11.1f}")
        table[case] = {"us": row, "ratio": ratio, "floor_us": limit}
    return table


def main() -> None:
    """Run the benchmark and print the figures; with --json also write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=5, help="pairs of ranks, one after the other")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    table = _report(_run(args.rounds, args.pairs))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(table, file, indent=1)


if __name__ == "__main__":
    main()
