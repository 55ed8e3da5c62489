"""Reports of futures' errors that are never read: one log record, when the future is collected or at exit.

Only a failure makes an `UnreadError`. A call that succeeds costs nothing here except for its call site.
"""

from __future__ import annotations

import atexit
import logging
import os
import traceback
import weakref
from collections.abc import Callable
from types import CodeType

from monarch_backend._actor import program_exit  # noqa: F401 (its atexit hook is registered first, and so runs last)

log = logging.getLogger("monarch_backend")

CallSite = tuple[CodeType, int]
"""Place of a call: the caller's code, and the index of its last instruction (``f_lasti``)."""

REPORTS_IN_FULL = 3
"""Number of equal reports (same text, same line of the caller) that are all logged. Later ones: the 10th, 100th, ..."""

MAX_COUNTED = 1024
"""Number of different reports that are counted at a time."""

_live: weakref.WeakValueDictionary[int, UnreadError] = weakref.WeakValueDictionary()
_counts: dict[tuple[str, CallSite | None], int] = {}


class UnreadError:
    """Report of a future that has failed and was not read yet. Call `forget` when the error is read.

    ``describe`` returns the text of the report: the failed call, its rank, host and pid, and the traceback. It may run
    at any moment, also during garbage collection, so it must not run user code.
    """

    __slots__ = ("__weakref__", "_describe", "_pid", "_site")

    def __init__(self, describe: Callable[[], str], site: CallSite | None) -> None:
        self._describe: Callable[[], str] | None = describe
        self._site = site
        self._pid = os.getpid()
        _live[id(self)] = self

    def forget(self) -> None:
        self._describe = None

    def report(self) -> None:
        """Log the error once, unless it was read. A fork logs nothing: its parent does."""
        describe, self._describe = self._describe, None
        if describe is None or self._pid != os.getpid():
            return
        try:
            text = describe()
            count = _count(text.partition("\n")[0], self._site)
            if count <= REPORTS_IN_FULL or str(count).strip("0") == "1":
                again = f" ({count} times by now)" if count > 1 else ""
                log.error(
                    "the error of a call was never read%s: %s\nRead the future with get(), exception() or await, or "
                    "call its ignore() to silence this report.%s",
                    again,
                    text,
                    "" if self._site is None else f" The call was made here:\n{_line_of(self._site)}",
                )
        except Exception:
            log.exception("an error that was never read could not be reported")

    def __del__(self) -> None:
        self.report()


def _count(head: str, site: CallSite | None) -> int:
    if len(_counts) > MAX_COUNTED:
        _counts.clear()
    count = _counts[head, site] = _counts.get((head, site), 0) + 1
    return count


def _line_of(site: CallSite) -> str:
    """Return the caller's line as a traceback shows it."""
    code, instruction = site
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end)
    line = next(lines, None) or code.co_firstlineno
    return "".join(traceback.format_list([traceback.FrameSummary(code.co_filename, line, code.co_name)])).rstrip()


def describe_local(name: str, error: BaseException) -> str:
    return f"{name} [pid {os.getpid()}]\n" + "".join(traceback.format_exception(error)).rstrip()


@atexit.register
def _report_at_exit() -> None:
    for reference in _live.valuerefs():
        unread = reference()
        if unread is not None:
            unread.report()
