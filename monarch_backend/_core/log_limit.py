"""Rate limit of the package's log: one place logs equal lines `EQUAL_LINES` times in `WINDOW_S` seconds.

It is installed once, on the logger of the whole package. A loop that logs cannot fill a disk or hide other lines.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

EQUAL_LINES = 5
WINDOW_S = 10.0

MAX_COUNTED = 1024
"""Number of different lines that are counted at a time."""


class RepeatLimit(logging.Filter):
    """Filter that drops equal records of one source line beyond the limit.

    The last record before a gap and the first one after it mention the dropped ones.

    >>> limit = RepeatLimit(clock=lambda: 0.0)
    >>> [limit.filter(logging.LogRecord("x", logging.WARNING, "x.py", 1, "late", (), None)) for _ in range(7)]
    [True, True, True, True, True, False, False]
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, int, str], tuple[float, int]] = {}  # start of the window, records in it

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            text = record.getMessage()
        except Exception:  # wrong arguments, which the handler reports
            return True
        key, now = (record.pathname, record.lineno, text), self._clock()
        since, count = self._seen.get(key, (now, 0))
        if now - since >= WINDOW_S:
            dropped, since, count = max(0, count - EQUAL_LINES), now, 0
            if dropped:
                record.msg, record.args = f"{text} ({dropped} equal lines were dropped before this one)", ()
        if len(self._seen) >= MAX_COUNTED and key not in self._seen:
            self._seen.clear()
        self._seen[key] = since, count + 1
        if count + 1 == EQUAL_LINES:
            record.msg, record.args = f"{text} (equal lines are dropped for the next {WINDOW_S:g} s)", ()
        return count < EQUAL_LINES


def install() -> None:
    """Add the limit to the logger of this package."""
    logger = logging.getLogger("monarch_backend")
    if not any(isinstance(each, RepeatLimit) for each in logger.filters):
        logger.addFilter(RepeatLimit())
