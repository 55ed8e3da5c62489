"""Bound on what a reader remembers of processes that its last read has not seen."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

MAX_UNSEEN = 10_000
"""Processes that are remembered while a host is not read. On a host that was read, those that are not seen ended."""


def with_unseen(seen: dict[K, V], before: dict[K, V], most: int) -> dict[K, V]:
    """Return ``seen`` after the other entries of ``before``: at most this number, those that were seen last.

    >>> with_unseen({"a": 1}, {"a": 0, "b": 0, "c": 0}, 1)
    {'c': 0, 'a': 1}
    """
    unseen = [key for key in before if key not in seen]
    return {**{key: before[key] for key in unseen[-most:]}, **seen}
