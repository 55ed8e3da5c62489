"""Time of a transfer that is spent below Python, in posting work requests and polling: libibverbs, kernel and NIC.

The rest of the transfer's time is Python's. It is measured in a real transfer, because system calls evict Python's code
from the caches.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from _timing import Call


def below(engine: Any, call: Call, count: int) -> list[float]:
    """Return the seconds that each of ``count`` calls spends below Python, after one warm-up call."""
    spent: list[float] = []
    with _timed(engine, spent.append):
        call()
        times = []
        for _ in range(count):
            spent.clear()
            call()
            times.append(sum(spent))
    return times


def sleeps(call: Call, count: int) -> list[float]:
    """Return how often the caller's thread slept per call, as a list of one: the mean of ``count`` calls."""
    call()
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    for _ in range(count):
        call()
    return [(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before) / count]


@contextmanager
def _timed(engine: Any, spend: Callable[[float], None]) -> Iterator[None]:
    pairs = [lane.pair for link in engine._links.values() for lane in link.lanes]
    nics = [device.nic for device in engine.devices()]
    kept = [(of, name, getattr(of, name)) for name, all_of in (("post", pairs), ("poll", nics)) for of in all_of]
    for of, name, done in kept:
        setattr(of, name, _spending(done, spend))
    try:
        yield
    finally:
        for of, name, done in kept:
            setattr(of, name, done)


def _spending(done: Callable[[Any], Any], spend: Callable[[float], None]) -> Callable[[Any], Any]:
    clock = time.perf_counter

    def timed(argument: Any) -> Any:
        begun = clock()
        found = done(argument)
        spend(clock() - begun)
        return found

    return timed
