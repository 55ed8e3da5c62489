"""A call for each of several values, on threads at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_parallel(call: Callable[[T], R], values: Iterable[T], most: int = 32) -> list[R]:
    """Return the results of ``call`` in the order of the values. ``most``: calls at the same time.

    Raises the first error of a call, when all calls have ended.

    >>> in_parallel(abs, [-3, 2])
    [3, 2]
    """
    values = list(values)
    if not values:
        return []
    with ThreadPoolExecutor(min(most, len(values))) as pool:
        return list(pool.map(call, values))
