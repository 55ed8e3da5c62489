"""Failures of operations on a worker, and which of them have not been reported to the controller yet."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from typing import Any

MAX_FAILURES = 8
"""Limit of failed checks that are kept for the next read. A loop without reads may have any number of them."""

MAX_MESSAGE_LENGTH = 500
"""Characters of a message that is printed without a read."""


class Failure:
    """Reason for a missing tensor, in its place.

    ``order``: position in the controller's words; the same on all ranks. ``is_end``: not an error of its own: the group
    was closed, or another rank has ended, which other reports say.
    """

    __slots__ = ("is_end", "order", "report")

    def __init__(self, report: dict[str, Any], order: int, *, is_end: bool) -> None:
        self.report, self.order, self.is_end = {**report, "order": order}, order, is_end


class Failures:
    """Failures of this worker. A *check* has no result (`_assert_async`); any read reports it."""

    def __init__(self) -> None:
        self._untold: Failure | None = None  # the first
        self._checks: list[Failure] = []

    def add(self, failure: Failure, *, is_check: bool) -> None:
        self._untold = self._untold or failure
        if is_check and not failure.is_end and len(self._checks) < MAX_FAILURES:
            self._checks.append(failure)

    def told(self, failure: Failure) -> dict[str, Any]:
        """Return the failure's report for the controller. It then needs no further report."""
        if failure is self._untold:
            self._untold = None
        return failure.report

    def first_untold(self) -> dict[str, Any] | None:
        """Return the report of the first unreported failure; it counts as reported then."""
        return None if self._untold is None else self.told(self._untold)

    def beside(self, reply: Any) -> Any:
        """Return the reply to a read, with the checks that have failed by now."""
        return {"reply": reply, "checks": [each.report for each in self._checks]} if self._checks else reply

    def raised(self, order: int) -> None:
        """Drop the checks that the controller has raised. A reply alone may arrive after its caller has gone."""
        for each in [each for each in self._checks if each.order <= order]:
            self._checks.remove(each)
            self.told(each)

    def tell_at_the_end(self) -> None:
        """Print a failure that no read has reported, so that it is not lost."""
        if self._untold is not None and not self._untold.is_end:
            report = self._untold.report
            print(
                f"monarch_backend: {report['failed']} raised on rank {report['rank']} (host {report['host']}, pid "
                f"{report['pid']}), and no read has reported it: {_shortly(report['message'])}",
                file=sys.stderr,
            )


def _shortly(message: str) -> str:
    """Return the first line of a message: some of torch's messages have a line for each of its backends."""
    first, *rest = message.splitlines()
    return f"{first[:MAX_MESSAGE_LENGTH]} ..." if rest or len(first) > MAX_MESSAGE_LENGTH else first


def report_of(operation: str, site: int, rank: int, error: BaseException) -> dict[str, Any]:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {
        "failed": operation, "site": site, "rank": rank, "host": socket.gethostname(), "pid": os.getpid(),
        "message": f"{type(error).__name__}: {error}", "traceback": text,
    }  # fmt: skip
