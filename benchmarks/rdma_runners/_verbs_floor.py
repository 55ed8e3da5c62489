"""Time of calls below Python, to post work requests and to poll: libibverbs, the kernel and the NIC.

What is left of a call is Python's, where it was measured: after system calls its code is not in the caches any more.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from _timing import Call


def below(engine: Any, call: Call, count: int) -> list[float]:
    """Seconds for each of so many calls, after one that does not count."""
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
    """How often the caller's thread slept in so many calls, for each call."""
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
