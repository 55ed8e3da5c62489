"""Base of the runners of rdma.py: a process that has one contender and times its transfers on request.

A request is a line of JSON on stdin, [case, count, bytes]. The answer on stdout is a list of seconds, or {"error":
"reason"}. The loop of _timing.py times all contenders. The first request for a case also checks the bytes that were
read. This module may import only the standard library and torch, because runners run in the contenders' own
environments.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import torch
from _timing import Call, check, timed, together

ANSWERS = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)  # output of libraries goes to stderr


def serve(about: str, times: Callable[[str, int, int], list[float]]) -> None:
    """Print ``about``, then answer requests until stdin ends: ``times(case, count, bytes)`` returns the seconds."""
    orders = os.fdopen(os.dup(0), encoding="utf-8")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    answer(about)
    for line in orders:
        try:
            answer(times(*json.loads(line)))
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"[-1000:]})


class Calls:
    """Times transfers that read into, or write from, the beginning of ``into``. Each is prepared once."""

    def __init__(self, into: torch.Tensor, ready: Callable[[str, int], Call], *, one_by_one: bool = True) -> None:
        self._into, self._ready, self._timed = into, ready, timed if one_by_one else together
        self._calls: dict[tuple[str, int], Call] = {}

    def times(self, case: str, count: int, size: int) -> list[float]:
        """Return the seconds of ``count`` calls. Use it as ``times`` of `serve`."""
        return self._timed(self.call(case, size), count)

    def call(self, case: str, size: int) -> Call:
        """Return the prepared call of a case. Prepare it, and check what it reads, on first use."""
        call = self._calls.get((case, size))
        if call is None:
            call = self._ready(case, size)
            if not case.startswith("write"):
                self._check(call, case, size)
            self._calls[case, size] = call
        return call

    def _check(self, call: Call, case: str, size: int) -> None:
        self._into[:size].zero_()
        call()
        check(self._into[:size], case)


def answer(said: Any) -> None:
    """Print a line of JSON for the process that has started this one."""
    ANSWERS.write(json.dumps(said) + "\n")
    ANSWERS.flush()
