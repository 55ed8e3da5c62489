"""Two forked ranks with a monarch, a gloo and a fake group, which time calls of all groups in turns.

async_collectives.py and point_to_point.py use it. The fake group moves nothing: its time is torch's own part.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers "fake"

GROUPS = ("monarch", "gloo", "fake")
Times = dict[str, dict[tuple[int, str], list[float]]]
"""Microseconds of each round, by group and by (bytes, kind of call)."""

Kinds = dict[str, tuple[Callable[[], object], int]]
"""Kind of call -> (function, operations in it)."""


def quantile_of(values: list[float], quantile: float) -> float:
    """Return a quantile of the values, by the median's definition for 0.5."""
    return statistics.median(values) if quantile == 0.5 else sorted(values)[int(quantile * len(values))]


def _burst(call: Callable[[], object], calls: int, quantile: float) -> float:
    """Return a quantile of the microseconds of a call, in a burst of ``calls``."""
    dist.barrier()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return quantile_of(times, quantile) * 1e6


def _rank(
    rank: int,
    address: str,
    kinds_of: Callable[[int, int], Callable[[Any], Kinds]],
    sizes: Sequence[int],
    rounds: int,
    quantile: float,
    results: Any,
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("monarch", init_method=address, rank=rank, world_size=2)
    groups = {name: dist.new_group([0, 1], backend=name) for name in GROUPS}
    times: Times = {name: {} for name in GROUPS}
    for size in sizes:
        calls = max(4, min(100, (8 << 20) // size))
        of_group = kinds_of(rank, size)
        kinds = {name: of_group(group) for name, group in groups.items()}
        for turn in range(rounds + 1):
            for kind in kinds["monarch"]:
                for name in GROUPS[turn % 3 :] + GROUPS[: turn % 3]:
                    call, many = kinds[name][kind]
                    took = _burst(call, calls, quantile) / many
                    if turn:  # the first round warms up
                        times[name].setdefault((size, kind), []).append(took)
    results.send(times)
    dist.barrier()
    dist.destroy_process_group()


def measure(
    kinds_of: Callable[[int, int], Callable[[Any], Kinds]], sizes: Sequence[int], rounds: int, quantile: float = 0.5
) -> Times:
    """Run both ranks and return the times of the slower one.

    ``kinds_of(rank, bytes)`` returns a function from a group to its kinds of calls. Of each burst of calls the
    ``quantile`` counts.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        given = (f"file://{folder}/store", kinds_of, sizes, rounds, quantile)
        ranks = [context.Process(target=_rank, args=(rank, *given, pipes[rank][1])) for rank in range(2)]
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
