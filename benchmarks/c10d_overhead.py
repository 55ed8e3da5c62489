"""What backend="monarch" costs over the route it takes: the same calls on a gloo and on a monarch group.

    python benchmarks/c10d_overhead.py [--rounds 40] [--json FILE]

Two forked ranks hold both groups at once and alternate between them, so noise of the machine meets both. Each
round measures a burst on each group; the figures are medians over rounds of the burst's mean, the ratio is the
median of the rounds' ratios. The floor beside: a bare TCP round trip over loopback with the same bytes each way,
which is what Gloo's two-rank all-reduce has to do at least.
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
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

GROUPS = ("gloo", "monarch")
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
    """Case -> (what to call, calls per burst), for one group."""
    small, large = torch.ones(2), torch.ones(1 << 18)
    half, whole = torch.ones(1 << 17), torch.ones(1 << 18)
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from torch 2.13 on
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
    """Seconds of a round trip of ``size`` bytes each way over a bare loopback connection."""
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


def _rank(rank: int, address: str, link: socket.socket, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    groups = {name: dist.new_group([0, 1], backend=name) for name in GROUPS}
    cases = {name: _cases(group) for name, group in groups.items()}
    times: dict[str, dict[str, list[float]]] = {}
    for case, (_, calls) in cases["gloo"].items():
        series: dict[str, list[float]] = {name: [] for name in GROUPS}
        for step in (cases[name][case][0] for name in GROUPS):
            _burst(step, calls)  # warm
        for turn in range(rounds):
            for name in GROUPS if turn % 2 else GROUPS[::-1]:
                series[name].append(_burst(cases[name][case][0], calls))
        times[case] = series
    floors = {size: [_floor(link, size, 50, rank == 0) for _ in range(10)] for size in (8, 1 << 20)}
    dist.barrier()
    dist.destroy_process_group()
    return {"times": times, "floors": floors}


def _run(rounds: int) -> dict[str, Any]:
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far = listener.accept()[0]
    for link in (near, far):
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with tempfile.TemporaryDirectory() as folder:
        address = f"file://{folder}/store"
        child = os.fork()
        if child == 0:
            _rank(1, address, far, rounds)
            os._exit(0)
        result = _rank(0, address, near, rounds)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit("rank 1 failed")
    return result


def _report(result: dict[str, Any]) -> dict[str, Any]:
    table = {}
    floor = {size: statistics.median(series) * 1e6 for size, series in result["floors"].items()}
    print(f"{'2 ranks, median us per call':<32}{'gloo':>10}{'monarch':>10}{'ratio':>8}{'TCP floor':>11}")
    for case, series in result["times"].items():
        gloo, ours = (statistics.median(series[name]) * 1e6 for name in GROUPS)
        ratio = statistics.median(m / g for m, g in zip(series["monarch"], series["gloo"], strict=True))
        limit = floor[8] if "8 B" in case else floor[1 << 20] if "MiB" in case else float("nan")
        print(f"{case:<32}{gloo:>10.1f}{ours:>10.1f}{ratio:>8.3f}{limit:>11.1f}")
        table[case] = {"gloo_us": gloo, "monarch_us": ours, "ratio": ratio, "floor_us": limit}
    return table


def main() -> None:
    """Run and print; with --json also write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    table = _report(_run(args.rounds))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(table, file, indent=1)


if __name__ == "__main__":
    main()
