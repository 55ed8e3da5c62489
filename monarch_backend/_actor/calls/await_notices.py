"""Notices of long awaits: the log line of wait_notice.py for replies that coroutines await.

A timer for each await would cost more than the call. So awaits are kept with the time of their start, and one timer
looks for those that have lasted. Those of the main program are also shown in cells: of an actor's coroutine, readers
ask its process (task_stacks.py).
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from monarch_backend._actor import context
from monarch_backend._actor.calls.future import Future
from monarch_backend._actor.calls.pending_calls import asked_of
from monarch_backend._actor.calls.shown_waits import begin_shown_wait, end_shown_wait
from monarch_backend._actor.calls.wait_notice import log_long_wait
from monarch_backend._core import env
from monarch_backend._core.limits import ResourceLimitError, start_thread

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime

log = logging.getLogger("monarch_backend")

MIN_LOOK_S = 1.0
"""Least seconds between two looks."""

MAX_SHOWN = 16
"""Awaits of the main program that are shown at the same time: there are few cells."""

TOGETHER_S = 0.1
"""Awaits that lack at most this time are logged with those before them."""

MAX_LOGGED = 4
"""Awaits of one look that get a line. Of the others, only the number is logged."""


class AwaitNotices:
    """Awaits of a runtime's calls that have not ended. Any thread may call `begin` and `end`."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        # Start, actor, and the call or stream, by the future that is awaited.
        self._begun: dict[Future[Any], tuple[float, Any, Any]] = {}
        self._shown: dict[Future[Any], int] = {}  # cells, by the future that is awaited
        self._is_armed = False
        self._is_real = runtime.waiting.is_real
        self._after = env.get("MONARCH_WAIT_NOTICE") if self._is_real else 0.0  # 0: no notices

    def begin(self, future: Future[Any], what: Any) -> None:
        """Note that a coroutine awaits a future, which a call or stream ends."""
        runner = context.runner.get()
        if self._after or (runner is None and self._is_real):
            self._begun[future] = time.monotonic(), runner, what
            if not self._is_armed:
                self._arm(self._after if runner is not None else MIN_LOOK_S)

    def end(self, future: Future[Any]) -> None:
        """Note that no coroutine awaits a future any more."""
        self._begun.pop(future, None)
        self._hide(future)

    def _show(self, future: Future[Any], what: Any) -> None:
        """Show an await in a cell until it ends."""
        self._shown[future] = begin_shown_wait(self._runtime, asked_of(what), None)
        Future.add_done_callback(future, self._hide)  # an event loop that was abandoned ends no await
        if future not in self._begun:  # it has ended meanwhile, and found no cell
            self._hide(future)

    def _hide(self, future: Future[Any]) -> None:
        cell = self._shown.pop(future, None)
        if cell is not None:
            end_shown_wait(cell, is_done=future.ready)

    def _arm(self, seconds: float) -> None:
        self._is_armed = True
        self._runtime.progress.later(max(MIN_LOOK_S, seconds), self._look)

    def _look(self) -> None:
        """Log the awaits that have lasted, and show those of the main program. Called on the reading thread."""
        self._is_armed = False  # first, so that an await that begins meanwhile is not missed
        now, left, due = time.monotonic(), [], []
        for future, (start, runner, what) in self._begun.copy().items():
            age = now - start
            if runner is None and future not in self._shown and not future.ready:
                if age < MIN_LOOK_S - TOGETHER_S:
                    left.append(MIN_LOOK_S - age)
                elif len(self._shown) < MAX_SHOWN:
                    self._show(future, what)
            if age < (self._after or MIN_LOOK_S) - TOGETHER_S:
                left.append((self._after or MIN_LOOK_S) - age)
            elif future.ready or not self._after:
                self._begun.pop(future, None)
            else:
                due.append((future, runner, what))
        if left and not self._is_armed:
            self._arm(min(left))
        if due and self._start_log(due):
            for future, _, _ in due:
                self._begun.pop(future, None)
        elif due and not self._is_armed:  # a later look logs them
            self._arm(self._after)

    def _start_log(self, due: list[tuple[Future[Any], Any, Any]]) -> bool:
        """Log the awaits on a thread. Return False where the system allows no further thread."""
        try:
            start_thread(threading.Thread(target=self._log, args=(due,), name="monarch-notice", daemon=True))
        except ResourceLimitError:
            return False
        return True

    def _log(self, due: list[tuple[Future[Any], Any, Any]]) -> None:
        for future, runner, what in due[:MAX_LOGGED]:
            log_long_wait(what, runner, self._after, lambda: future.ready)  # noqa: B023
        if len(due) > MAX_LOGGED:
            log.warning("%d more awaits of calls have lasted %.0f s", len(due) - MAX_LOGGED, self._after)
