"""Loop that times all contenders of rdma.py, and the bytes that prove a transfer.

Workers in the contenders' own environments import it: only the standard library and torch may be imported here.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Call = Callable[[], object]


class Wrong(Exception):
    """What was transferred is not what was there."""


def pattern(nbytes: int) -> torch.Tensor:
    """Bytes that repeat after 251, so that no power of two looks alike; fresh memory."""
    made = torch.empty(nbytes, dtype=torch.uint8)
    fill(made)
    return made


def fill(memory: torch.Tensor) -> None:
    """With that pattern, without a second buffer as large."""
    block = torch.arange(251, dtype=torch.uint8).repeat(1 << 12)
    for start in range(0, len(memory), len(block)):
        part = memory[start : start + len(block)]
        part.copy_(block[: len(part)])


def check(memory: torch.Tensor, what: str) -> None:
    """Raises Wrong where it does not hold that pattern."""
    if not torch.equal(memory, pattern(len(memory))):
        raise Wrong(f"{what}: the bytes are not those of the source")


def timed(call: Call, count: int) -> list[float]:
    """Seconds of each of so many calls in a row, after one that does not count."""
    clock, times = time.perf_counter, []
    call()
    for _ in range(count):
        begun = clock()
        call()
        times.append(clock() - begun)
    return times


def look(count: int = 1000) -> float:
    """Seconds that a look at the clock takes."""
    begun = time.perf_counter()
    for _ in range(count):
        time.perf_counter()
    return (time.perf_counter() - begun) / count


def together(call: Call, count: int) -> list[float]:
    """The same of all of them with one look at the clock at each end: their mean, once.

    For beside peers that count what they do in a time, where a look at the clock takes long (User-Mode Linux).
    """
    call()
    begun = time.perf_counter()
    for _ in range(count):
        call()
    return [(time.perf_counter() - begun) / count]
