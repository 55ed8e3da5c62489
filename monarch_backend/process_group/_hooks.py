"""Completion hooks for the CPU route: what torch's NCCL group does for its own works, from futures.

`ProcessGroup._register_on_completion_hook` calls back with an object that has op_type, seq, time_started,
time_finished and active_duration, once for each finished collective. Gloo has no such hook; works have futures.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any


@dataclass(frozen=True)
class WorkInfo:
    """One finished collective, with the fields of torch's own WorkInfo (which Python can't construct)."""

    op_type: str
    seq: int
    time_started: datetime
    time_finished: datetime
    active_duration: timedelta


class CompletionHooks:
    """The hooks of one group. Calls them from the thread that finished the work; counts what is pending."""

    def __init__(self) -> None:
        self._hooks: list[Callable[[Any], None]] = []
        self._pending = 0
        self._sequence = 0
        self._idle = threading.Condition()

    def add(self, hook: Callable[[Any], None]) -> None:
        """Call ``hook`` after every collective that starts from now on."""
        self._hooks.append(hook)

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def follow(self, work: Any, op_type: str) -> None:
        """Call the hooks when ``work`` has finished, with an error or without."""
        started = datetime.now()
        with self._idle:
            self._sequence += 1
            self._pending += 1
            sequence = self._sequence

        def finished(_future: Any) -> None:
            now = datetime.now()
            try:
                for hook in self._hooks:
                    hook(WorkInfo(op_type, sequence, started, now, now - started))
            finally:
                with self._idle:
                    self._pending -= 1
                    self._idle.notify_all()

        work.get_future().add_done_callback(finished)

    def wait(self) -> None:
        """Wait until no work is pending and every hook has returned."""
        with self._idle:
            self._idle.wait_for(lambda: self._pending == 0)
