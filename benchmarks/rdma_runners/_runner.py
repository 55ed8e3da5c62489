"""Base of the runners of rdma.py: a process that holds one contender and times its transfers on order.

An order is a line of JSON on stdin, [case, how many, bytes]; the answer on stdout is a list of seconds, or {"error":
"why not"}. All contenders are timed by the loop of _timing.py, and what they have read is compared with what it must be
the first time a case is asked for. Only the standard library and torch may be imported here: runners run in the
contenders' own environments.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import torch
from _timing import Call, check, timed, together

ANSWERS = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)  # what libraries print


def serve(about: str, times: Callable[[str, int, int], list[float]]) -> None:
    """Do orders: ``times`` is given the case, how many, and how many bytes."""
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
    """What most runners time: calls, made ready once, that put bytes at the beginning of ``into``."""

    def __init__(self, into: torch.Tensor, ready: Callable[[str, int], Call], *, one_by_one: bool = True) -> None:
        self._into, self._ready, self._timed = into, ready, timed if one_by_one else together
        self._calls: dict[tuple[str, int], Call] = {}

    def times(self, case: str, count: int, size: int) -> list[float]:
        """See serve."""
        return self._timed(self.call(case, size), count)

    def call(self, case: str, size: int) -> Call:
        """Made ready, and looked at whether it does what it should."""
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
    """A line to whoever has started this process."""
    ANSWERS.write(json.dumps(said) + "\n")
    ANSWERS.flush()
