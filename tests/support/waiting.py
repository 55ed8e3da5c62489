"""Waiting for a condition that another process or thread makes true."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], timeout: float = 60.0) -> T:
    """Return the first true result of ``condition()``. Fails with the last one after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while not (result := condition()):
        assert time.monotonic() < end, f"after {timeout} s it is still {result!r}"
        time.sleep(0.01)
    return result
