"""Reports of errors of futures that are never read: once, on the log, when the future is collected or at exit.

Only a failure makes an `UnreadError`; a call that succeeds costs nothing here but the place of its caller.
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
"""Where a call was made: the caller's code, and the index of its last instruction (``f_lasti``)."""

REPORTS_IN_FULL = 3
"""Equal reports (same text, same caller's line) that are all logged; of further ones, the 10th, 100th, 1000th, ..."""

MAX_COUNTED = 1024
"""Different reports that are counted at a time."""

_live: weakref.WeakValueDictionary[int, UnreadError] = weakref.WeakValueDictionary()
_counts: dict[tuple[str, CallSite | None], int] = {}


class UnreadError:
    """Kept by a future that has failed and was not read yet. `forget` it when the error is read.

    ``describe`` gives the text of the report: what failed, on which rank, host and pid, and the traceback. It runs at
    an arbitrary moment, perhaps inside the garbage collection, so it must run no code of the user's.
    """

    __slots__ = ("__weakref__", "_describe", "_pid", "_site")

    def __init__(self, describe: Callable[[], str], site: CallSite | None) -> None:
        self._describe: Callable[[], str] | None = describe
        self._site = site
        self._pid = os.getpid()
        _live[id(self)] = self

    def forget(self) -> None:
        """Report nothing."""
        self._describe = None

    def report(self) -> None:
        """Log the error, unless it was read or reported before. Not in a fork: its parent does."""
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
    """The caller's line as a traceback shows it."""
    code, instruction = site
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end)
    line = next(lines, None) or code.co_firstlineno
    return "".join(traceback.format_list([traceback.FrameSummary(code.co_filename, line, code.co_name)])).rstrip()


def describe_local(name: str, error: BaseException) -> str:
    """The text of an error that was raised in this process."""
    return f"{name} [pid {os.getpid()}]\n" + "".join(traceback.format_exception(error)).rstrip()


@atexit.register
def _report_at_exit() -> None:
    for reference in _live.valuerefs():
        unread = reference()
        if unread is not None:
            unread.report()
