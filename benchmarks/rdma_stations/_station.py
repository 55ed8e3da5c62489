"""What a station of benchmarks/rdma.py is: a process that holds one contender and times its transfers when told to.

An order is a line of JSON on stdin, [case, how many, bytes]; the answer on stdout is a list of seconds, or {"error":
"why not"}. All contenders are timed by the loop of this file, and what they have read is compared with what it must be
the first time a case is asked for. Only the standard library and torch may be imported here: stations run in the
contenders' own environments.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

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


def serve(about: str, times: Callable[[str, int, int], list[float]]) -> None:
    """Do orders: ``times`` is given the case, how many, and how many bytes."""
    orders = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)  # what libraries print
    _answer(answers, about)
    for line in orders:
        try:
            _answer(answers, times(*json.loads(line)))
        except Exception as error:
            _answer(answers, {"error": f"{type(error).__name__}: {error}"[:1000]})


class Calls:
    """What most stations time: calls, made ready once, that put bytes at the beginning of ``into``."""

    def __init__(self, into: torch.Tensor, ready: Callable[[str, int], Call]) -> None:
        self._into, self._ready = into, ready
        self._calls: dict[tuple[str, int], Call] = {}

    def times(self, case: str, count: int, size: int) -> list[float]:
        """See serve."""
        call = self._calls.get((case, size))
        if call is None:
            call = self._ready(case, size)
            if not case.startswith("write"):
                self._check(call, case, size)
            self._calls[case, size] = call
        return timed(call, count)

    def _check(self, call: Call, case: str, size: int) -> None:
        self._into[:size].zero_()
        call()
        check(self._into[:size], case)


def _answer(answers: Any, answer: Any) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
