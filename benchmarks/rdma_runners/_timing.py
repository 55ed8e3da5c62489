"""Loop that times all contenders of rdma.py, and the byte pattern that verifies a transfer.

Workers in the contenders' own environments import it, so it may import only the standard library and torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Call = Callable[[], object]


class Wrong(Exception):
    """The transferred bytes differ from the source."""


def pattern(nbytes: int) -> torch.Tensor:
    """Return new memory with a pattern of period 251, so that offsets by a power of two are detected."""
    made = torch.empty(nbytes, dtype=torch.uint8)
    fill(made)
    return made


def fill(memory: torch.Tensor) -> None:
    """Write that pattern to memory, without a second buffer of equal size."""
    block = torch.arange(251, dtype=torch.uint8).repeat(1 << 12)
    for start in range(0, len(memory), len(block)):
        part = memory[start : start + len(block)]
        part.copy_(block[: len(part)])


def check(memory: torch.Tensor, what: str) -> None:
    """Raise Wrong if the memory does not have that pattern."""
    if not torch.equal(memory, pattern(len(memory))):
        raise Wrong(f"{what}: the bytes are not those of the source")


def timed(call: Call, count: int) -> list[float]:
    """Return the seconds of each of ``count`` successive calls, after one warm-up call."""
    clock, times = time.perf_counter, []
    call()
    for _ in range(count):
        begun = clock()
        call()
        times.append(clock() - begun)
    return times


def look(count: int = 1000) -> float:
    """Return the seconds that one read of the clock takes."""
    begun = time.perf_counter()
    for _ in range(count):
        time.perf_counter()
    return (time.perf_counter() - begun) / count


def together(call: Call, count: int) -> list[float]:
    """Return the mean seconds of ``count`` calls as a list of one, with one read of the clock at each end.

    In User-Mode Linux a read of the clock is slow. perftest measures in the same way: it counts messages per interval.
    """
    call()
    begun = time.perf_counter()
    for _ in range(count):
        call()
    return [(time.perf_counter() - begun) / count]
