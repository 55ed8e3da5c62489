"""Runner process of checkouts.py: has one checkout's group, actors or DTensors, and times a case on each request.

    PYTHONPATH=CHECKOUT python benchmarks/_checkout_runner.py group|actors|dtensor

A request is a line on standard input, ``{"case": NAME, "count": N}``. The answer is the mean time of a call in seconds.
This module uses only public names of the package, because it runs with both checkouts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

Step = Callable[[], object]


def nothing() -> None:
    """Do nothing: for cases whose calls wait for their results."""


def group() -> tuple[dict[str, Step], Step]:
    """Return collectives of two ranks. Each rank is one runner, with the environment variables of torchrun."""
    import torch.distributed as dist

    dist.init_process_group("monarch")
    small, large = torch.ones(2), torch.ones(1 << 18)
    cases: dict[str, Step] = {
        "all_reduce 8 B": lambda: dist.all_reduce(small),
        "all_reduce 1 MiB": lambda: dist.all_reduce(large),
    }
    return cases, dist.barrier


def actors() -> tuple[dict[str, Step], Step]:
    """Return calls of two actors in two processes."""
    from monarch_backend.actor import Actor, endpoint, this_host

    class Worker(Actor):
        @endpoint
        def noop(self) -> None:
            pass

    workers: Any = this_host().spawn_procs({"procs": 2}).spawn("workers", Worker)
    one = workers.slice(procs=0)

    def pipelined() -> None:
        for future in [one.noop.call_one() for _ in range(100)]:
            future.get()

    cases: dict[str, Step] = {
        "call_one": lambda: one.noop.call_one().get(),
        "call of two": lambda: workers.noop.call().get(),
        "100 x call_one": pipelined,
    }
    return cases, nothing


def dtensor() -> tuple[dict[str, Step], Step]:
    """Return operations of a controller with two workers."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    from monarch_backend.actor import this_host

    mesh = this_host().spawn_procs({"x": 2}).device_mesh("cpu")
    x = distribute_tensor(torch.randn(8, 16), mesh, [Shard(0)])
    weight = distribute_tensor(torch.randn(16, 16), mesh, [Replicate()])
    assert isinstance(x, DTensor)
    a: Any = x.to_local()
    cases: dict[str, Step] = {
        "remote a + a": lambda: a + a,
        "DTensor x + x": lambda: x + x,
        "DTensor x @ w": lambda: x @ weight,
        "redistribute": lambda: x.redistribute(mesh, [Replicate()]),
    }
    return cases, lambda: a.sum().item()


def answer(cases: dict[str, Step], drain: Step, prepare: Callable[[dict[str, Any]], object] = lambda _: None) -> None:
    """Answer requests until standard input ends. ``prepare`` gets each request before its case is timed."""
    print(json.dumps(list(cases)), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        step = cases[order["case"]]
        prepare(order)
        drain()
        begin = time.perf_counter()
        for _ in range(order["count"]):
            step()
        drain()
        print((time.perf_counter() - begin) / order["count"], flush=True)


def main(kind: str) -> None:
    """Answer requests of one kind of cases."""
    torch.set_num_threads(1)
    answer(*{"group": group, "actors": actors, "dtensor": dtensor}[kind]())


if __name__ == "__main__":
    main(sys.argv[1])
