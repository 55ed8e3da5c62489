"""Runner process of telemetry.py: times a case with or without recording, on each request.

    python benchmarks/_telemetry_runner.py group|actors|dtensor

A request is a line on standard input, ``{"case": NAME, "count": N, "record": true or false}``. The answer is the mean
time of a call in seconds. All processes of the case record, or none. Without "record" MONARCH_TELEMETRY decides.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from _checkout_runner import Step, answer

from monarch_backend.actor import Actor, endpoint

Switch = Callable[[bool], object]


def switch(record: bool) -> None:
    """Pause the recording of this process, or resume it."""
    from monarch_backend import _native

    if record:
        _native.resume_recording()
    else:
        _native.pause_recording()
    assert _native.is_recording() == record, "MONARCH_TELEMETRY=0"


class Worker(Actor):
    """Actor of the calls that are timed."""

    @endpoint
    def noop(self) -> None:
        pass

    @endpoint
    def switch(self, record: bool) -> None:
        switch(record)


def switch_all(workers: Any) -> Switch:
    """Return a function that switches this process and those of the workers."""

    def switch_both(record: bool) -> None:
        switch(record)
        workers.switch.call(record).get()

    return switch_both


def group() -> tuple[dict[str, Step], Step, Switch]:
    """Return collectives of two ranks. Each rank is one runner, with the environment variables of torchrun."""
    import torch.distributed as dist

    dist.init_process_group("monarch")
    small = torch.ones(2)
    return {"all_reduce 8 B": lambda: dist.all_reduce(small)}, dist.barrier, switch


def actors() -> tuple[dict[str, Step], Step, Switch]:
    """Return calls of an actor in another process."""
    from monarch_backend.actor import this_host

    worker: Any = this_host().spawn_procs({"procs": 1}).spawn("workers", Worker)

    def pipelined() -> None:
        for future in [worker.noop.call_one() for _ in range(100)]:
            future.get()

    cases: dict[str, Step] = {"call_one": lambda: worker.noop.call_one().get(), "100 x call_one": pipelined}
    return cases, lambda: None, switch_all(worker)


def dtensor() -> tuple[dict[str, Step], Step, Switch]:
    """Return operations of a controller with two workers."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    from monarch_backend.actor import this_host

    procs = this_host().spawn_procs({"x": 2})
    x = distribute_tensor(torch.randn(8, 16), procs.device_mesh("cpu"), [Shard(0)])
    assert isinstance(x, DTensor)
    a: Any = x.to_local()
    cases: dict[str, Step] = {
        "remote a + a": lambda: a + a,
        "DTensor x + x": lambda: x + x,
        "a.sum().item()": lambda: a.sum().item(),
    }
    return cases, lambda: a.sum().item(), switch_all(procs.spawn("workers", Worker))


def main(kind: str) -> None:
    """Answer requests of one kind of cases."""
    torch.set_num_threads(1)
    cases, drain, record = {"group": group, "actors": actors, "dtensor": dtensor}[kind]()
    answer(cases, drain, lambda order: record(order["record"]) if "record" in order else None)


if __name__ == "__main__":
    main(sys.argv[1])
