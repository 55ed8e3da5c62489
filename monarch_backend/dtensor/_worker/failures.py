"""What could not be done on a worker, and which of it somebody has still to be told of."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from typing import Any

MAX_FAILURES = 8
"""So many checks that failed are kept for the next who reads: a loop that never reads may have any number of them."""

MAX_MESSAGE_LENGTH = 500
"""Characters of a message that nobody has asked for."""


class Failure:
    """In the place of a tensor: why it is not there.

    ``order``: where in the controller's words it was; the same on all ranks. ``is_end``: nothing is wrong here: the
    group was closed, or another rank has gone, of which others tell.
    """

    __slots__ = ("is_end", "order", "report")

    def __init__(self, report: dict[str, Any], order: int, *, is_end: bool) -> None:
        self.report, self.order, self.is_end = {**report, "order": order}, order, is_end


class Failures:
    """Of this worker. A *check* has no result (`_assert_async`): nothing depends on it, and any reading tells of it."""

    def __init__(self) -> None:
        self._untold: Failure | None = None  # the first
        self._checks: list[Failure] = []

    def add(self, failure: Failure, *, is_check: bool) -> None:
        """It has just happened."""
        self._untold = self._untold or failure
        if is_check and not failure.is_end and len(self._checks) < MAX_FAILURES:
            self._checks.append(failure)

    def told(self, failure: Failure) -> dict[str, Any]:
        """As the controller gets it: nobody else need tell of it."""
        if failure is self._untold:
            self._untold = None
        return failure.report

    def first_untold(self) -> dict[str, Any] | None:
        """As the controller gets it; it is told then."""
        return None if self._untold is None else self.told(self._untold)

    def beside(self, reply: Any) -> Any:
        """The reply to who reads, with the checks that have failed by now."""
        return {"reply": reply, "checks": [each.report for each in self._checks]} if self._checks else reply

    def raised(self, order: int) -> None:
        """The controller has raised all checks up to this one: a reply alone may have found nobody who waited."""
        for each in [each for each in self._checks if each.order <= order]:
            self._checks.remove(each)
            self.told(each)

    def tell_at_the_end(self) -> None:
        """What nobody has read may have failed, and nobody would know."""
        if self._untold is not None and not self._untold.is_end:
            report = self._untold.report
            print(
                f"monarch_backend: {report['failed']} raised on rank {report['rank']} (host {report['host']}, pid "
                f"{report['pid']}), and nobody has read what depends on it: {_shortly(report['message'])}",
                file=sys.stderr,
            )


def _shortly(message: str) -> str:
    """Some of torch's have a line for each of its backends."""
    first, *rest = message.splitlines()
    return f"{first[:MAX_MESSAGE_LENGTH]} ..." if rest or len(first) > MAX_MESSAGE_LENGTH else first


def report_of(operation: str, site: int, rank: int, error: BaseException) -> dict[str, Any]:
    """For the controller."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {
        "failed": operation, "site": site, "rank": rank, "host": socket.gethostname(), "pid": os.getpid(),
        "message": f"{type(error).__name__}: {error}", "traceback": text,
    }  # fmt: skip
