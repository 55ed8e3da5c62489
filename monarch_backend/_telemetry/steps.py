"""Training steps: `step` marks the end of one. Its cell has the median of the last ones, and each step is an event.

A process also looks for ranks with slow steps from time to time: stragglers.py finds them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from statistics import median_low

from monarch_backend._core import env, fork
from monarch_backend._core.limits import start_thread
from monarch_backend._telemetry import recorder, texts
from monarch_backend._telemetry.kinds import Kind, State, Status
from monarch_backend._telemetry.step_window import MIN_STEPS, WINDOW

MAX_NAMES = 8
"""Names of steps that are told apart in a process. Steps of further names count as those of the last one."""

MAX_SHARE = 0.01
"""Share of a processor that the looks for slow ranks may take."""

FIRST_LOOK_S, LAST_LOOK_S = 5.0, 600.0
"""Seconds between two looks for slow ranks, and their limit in a process that leaves them to another one."""

_log = logging.getLogger("monarch_backend")


class StepBlock:
    """What `step` returns. A ``with`` block of it is one step, which ends at the end of the block."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        pass


_NOT_RECORDED = StepBlock()


class _Steps(StepBlock):
    """Steps of one name in this process."""

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        self._name = name
        self._cell = recorder.take_cell(Kind.STEP, texts.name(name))
        self._durations: deque[int] = deque(maxlen=WINDOW)
        self._start = self._number = 0
        self._looked_at, self._pause, self._is_looking = 0.0, FIRST_LOOK_S, False
        self._has_blocks = False  # then a call is the begin of a block

    def __enter__(self) -> None:
        with self._lock:
            if not self._has_blocks:  # the first call was no end of a step
                self._has_blocks = True
                self._number -= 1
                self._durations.clear()
                for watch in list(_watches):
                    watch.add(-1)
            self._begin()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._end()

    def end(self) -> None:
        """End a step, unless the call is the begin of a block."""
        if not self._has_blocks:
            self._end()

    def _begin(self) -> None:
        self._start = recorder.monotonic_ns()
        count = len(self._durations)
        middle = median_low(self._durations) if count else 0
        recorder.begin_activity(self._cell, int(State.RUNNING), 0, self._number + 1, count, middle, 0)

    def _end(self) -> None:
        with self._lock:
            now = recorder.monotonic_ns()
            self._number += 1
            if self._start and self._cell:
                recorder.end_activity(self._cell, int(Status.OK))
            else:
                name = texts.name_number(self._name)
                recorder.record_event(int(Kind.STEP), int(Status.OK), name, 0, self._start, self._number, 0, 0)
            if self._start:
                self._durations.append(now - self._start)
            self._begin()
            for watch in list(_watches):
                watch.add()
            count = len(self._durations)
            is_due = not self._is_looking and count >= MIN_STEPS
            is_due = is_due and time.monotonic() - self._looked_at >= self._pause
            self._is_looking |= is_due
        if is_due:
            self._look()

    def _look(self) -> None:
        """Look for slow ranks, on a thread."""
        try:
            if env.get("MONARCH_STRAGGLER_PERCENT"):
                start_thread(threading.Thread(target=self._name_slow_ranks, name="monarch-steps", daemon=True))
                return
        except (OSError, RuntimeError, ValueError):  # no thread is left, or a wrong setting
            pass
        self._looked_at, self._is_looking = time.monotonic(), False

    def _name_slow_ranks(self) -> None:
        begun = time.thread_time()
        try:
            is_mine = self._name_those_that_are_seen()
        except Exception:  # a reader must not end the program's step
            _log.debug("the steps of other ranks were not read", exc_info=True)
            is_mine = False
        cost = time.thread_time() - begun
        self._pause = max(FIRST_LOOK_S, cost / MAX_SHARE) if is_mine else min(2 * self._pause, LAST_LOOK_S)
        self._looked_at, self._is_looking = time.monotonic(), False

    def _name_those_that_are_seen(self) -> bool:
        """Name the slow ranks. Return False if another process of the job does."""
        from monarch_backend._telemetry import stragglers

        slow = stragglers.seen_by(os.getpid())
        if slow is None:
            return False
        for each in slow:
            if (each.pid, each.name) not in _named:
                _named.add((each.pid, each.name))
                _log.warning("%s", each)
        return True


class StepWatch:
    """Count of the steps of this process since it was made."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = threading.Condition()

    def add(self, number: int = 1) -> None:
        """Count a step."""
        with self._changed:
            self.count += number
            self._changed.notify_all()

    def wait(self, count: int, timeout: float) -> bool:
        """Wait for the end of ``count`` steps. Return whether they ended within ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.count >= count, timeout)


@contextlib.contextmanager
def watched() -> Iterator[StepWatch]:
    """Count the steps that end within the block."""
    watch = StepWatch()
    _watches.append(watch)
    try:
        yield watch
    finally:
        _watches.remove(watch)


_watches: list[StepWatch] = []
_steps: dict[str, _Steps] = {}
_named: set[tuple[int, str]] = set()
_lock = threading.Lock()


def _in_forked_child() -> None:
    global _lock
    _steps.clear()
    _named.clear()
    _watches.clear()
    _lock = threading.Lock()


fork.register(fork.Step.RECORDING, after_in_child=_in_forked_child)


def step(name: str = "step") -> StepBlock:
    """Mark the end of a training step: call it once at the end of each iteration, on each rank.

    ``with step():`` around the iteration is the other form. The time between two blocks does not belong to a
    step. A block that raises does not count as a step. Steps of one ``name`` have one of both forms.

    ``name`` tells apart the steps of several loops. Ranks whose steps take longer than the median of their mesh are
    named once in the log, and in `monarch-backend ps` and `sql`. The time that a rank waits in collectives does not
    count, because all ranks wait there for the slow one.

    A step costs a few microseconds, and nothing while nothing is recorded. It never raises.

    >>> from monarch_backend.telemetry import step
    >>> for batch in range(3):
    ...     with step():
    ...         pass
    """
    if not recorder.begin():
        return _NOT_RECORDED
    found = _steps.get(name)
    if found is None:
        with _lock:
            if name not in _steps and len(_steps) >= MAX_NAMES:
                name = next(reversed(_steps))
            found = _steps.get(name) or _steps.setdefault(name, _Steps(name))
    found.end()
    return found
