"""Failures of operations on the workers, as their replies report them. Each is raised once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

from monarch_backend._actor.errors import SupervisionError
from monarch_backend.dtensor._controller import call_sites
from monarch_backend.dtensor._errors import RemoteOpError


class WorkerFailures:
    """Raises the failures that the replies of one worker set contain."""

    def __init__(self, line: Any) -> None:
        self._line = line
        self._checks_raised = 0  # number of failures that were raised
        self._raising = threading.Lock()

    def check(self, replies: list[Any]) -> list[Any]:
        """Return the replies of all ranks. Raises RemoteOpError for the first failure among them."""
        checks = self._new_checks(replies)
        replies = [each["reply"] if _has_checks(each) else each for each in replies]
        failures = [each for each in replies if isinstance(each, dict) and "failed" in each]
        if failures or checks:
            first = min([*failures, *checks.values()], key=lambda each: each["order"])
            checks.pop(first["order"], None)
            raise error_of(first, [checks[order] for order in sorted(checks)])
        return replies

    def _new_checks(self, replies: list[Any]) -> dict[int, Any]:
        """Return failed operations without results, by their order. The first caller raises each, once."""
        if not any(map(_has_checks, replies)):
            return {}
        with self._raising:
            found = [check for each in replies if _has_checks(each) for check in each["checks"]]
            new = {check["order"]: check for check in reversed(found) if check["order"] > self._checks_raised}
            if new:
                self._checks_raised = max(new)
                with contextlib.suppress(SupervisionError):  # the next read raises it
                    self._line.raised(self._checks_raised)
        return new


def error_of(report: dict[str, Any], others: Sequence[dict[str, Any]] = ()) -> RemoteOpError:
    """Return the error for a worker's report. ``others``: reports of failures that will not be raised again."""
    also = "".join(
        f"\nBefore this was read, {each['failed']} raised as well, on rank {each['rank']}: {each['message']}\n"
        f"Issued by the controller at:\n{call_sites.text_of(each['site'])}"
        for each in others
    )
    return RemoteOpError(
        report["failed"], report["rank"], report["host"], report["pid"], report["message"],
        report["traceback"] + also, call_sites.text_of(report["site"]),
    )  # fmt: skip


def _has_checks(reply: Any) -> bool:
    return isinstance(reply, dict) and "checks" in reply
