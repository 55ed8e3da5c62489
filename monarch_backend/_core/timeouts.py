"""Check of timeouts: one function for every public ``timeout=`` of the package."""

from __future__ import annotations

import datetime
import math
import numbers
import threading
from typing import Any

MAX_TIMEOUT_S = threading.TIMEOUT_MAX / 2
"""Limit to which longer timeouts are cut. It is half of what a lock takes: a deadline is a sum, and sums are
rounded.
"""


def check_timeout(value: Any, name: str = "timeout", *, zero: bool = True) -> float | None:
    """Return ``value`` in seconds, at most `MAX_TIMEOUT_S`. Return None, for no limit, where it is None or infinity.

    ``value`` is a number of seconds or a timedelta; ``name`` is the name of the parameter. ``zero``: whether 0 is
    accepted. Raises TypeError for another type, ValueError for NaN and negative values.

    >>> check_timeout(5), check_timeout(datetime.timedelta(minutes=1)), check_timeout(float("inf"))
    (5.0, 60.0, None)
    """
    if value is None:
        return None
    seconds: Any = value.total_seconds() if isinstance(value, datetime.timedelta) else value
    if isinstance(seconds, bool) or not issubclass(type(seconds), numbers.Real):
        raise TypeError(f"{name}={value!r}: give seconds or a timedelta, or None for no limit")
    if not seconds >= 0 or (seconds == 0 and not zero):
        raise ValueError(
            f"{name}={value!r}: give {'0' if zero else 'more than 0'} seconds{' or more' * zero}, or None for no limit"
        )
    if seconds == math.inf:
        return None
    return float(min(seconds, MAX_TIMEOUT_S))


def check_bounded(value: Any, name: str = "timeout") -> float:
    """Return what `check_timeout` returns, but `MAX_TIMEOUT_S` for no limit. For callees that need a number.

    >>> check_bounded(None) == MAX_TIMEOUT_S
    True
    """
    seconds = check_timeout(value, name)
    return MAX_TIMEOUT_S if seconds is None else seconds
