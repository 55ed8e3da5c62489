"""Reasons for lost hosts, as a scheduler has them. One thread asks for all hosts of a job that are lost at a time."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from monarch_backend._core.limits import ResourceLimitError, start_thread

log = logging.getLogger("monarch_backend")

K = TypeVar("K")

ANSWER_TIMEOUT_S = 1.0
"""Seconds for the last answer. Then the loss is reported without one."""


class LossReason(NamedTuple):
    """Why a host is lost. ``is_final``: there will be no better reason."""

    text: str
    is_final: bool


class _Loss(Generic[K]):
    def __init__(self, host: K, report: Callable[[str], None], until: float) -> None:
        self.host, self.report, self.until = host, report, until
        self.text = ""  # the last reason that is not final


class LossReasons(Generic[K]):
    """Reasons for lost hosts of one job. ``ask`` returns a reason for each of these hosts, and may wait.

    A scheduler can notice a loss later than this program. So it is asked again until a reason is final or ``timeout``
    seconds are over. ``wait`` waits between two questions.
    """

    def __init__(
        self, ask: Callable[[Sequence[K]], Sequence[LossReason]], timeout: float, wait: Callable[[], None]
    ) -> None:
        self._ask, self._timeout, self._wait = ask, timeout, wait
        self.limit = timeout + ANSWER_TIMEOUT_S
        """Seconds until a loss is reported, with or without a reason."""
        self._lock = threading.Lock()
        self._open: list[_Loss[K]] = []
        self._is_asking = False

    def find(
        self, host: K, report: Callable[[str], None], later: Callable[[float, Callable[[], None]], object]
    ) -> None:
        """Call ``report`` with the reason, once and within seconds, on another thread. ``later`` sets a timer."""
        loss = _Loss(host, report, time.monotonic() + self._timeout)
        with self._lock:
            self._open.append(loss)
            is_first, self._is_asking = not self._is_asking, True
        unanswered = f"the scheduler was asked why, and did not answer within {self.limit:g} s"
        later(self.limit, lambda: self._close(loss, loss.text or unanswered))
        if is_first:
            try:
                start_thread(threading.Thread(target=self._run, name="monarch-reason", daemon=True))
            except ResourceLimitError as error:
                with self._lock:
                    self._is_asking = False
                self._close(loss, f"the reason could not be asked: {error}")

    def _run(self) -> None:
        try:
            while losses := self._still_open():
                self._ask_for(losses)
                with contextlib.suppress(Exception):  # the next question has the same error
                    self._wait()
        except BaseException:  # the next loss starts a thread again
            with self._lock:
                self._is_asking = False
            raise

    def _ask_for(self, losses: Sequence[_Loss[K]]) -> None:
        try:
            answers = list(zip(losses, self._ask([loss.host for loss in losses]), strict=True))
        except Exception as error:
            failed = f"the reason could not be asked: {error}"
            answers = [(loss, LossReason(loss.text or failed, True)) for loss in losses]
        now = time.monotonic()
        for loss, reason in answers:
            loss.text = reason.text
            if reason.is_final or now > loss.until:
                try:
                    self._close(loss, reason.text)
                except Exception:  # the others are still to be reported
                    log.exception("the loss of host %s could not be reported (%s)", loss.host, reason.text)

    def _still_open(self) -> list[_Loss[K]]:
        """Return the losses without a reason. If there are none, the thread ends."""
        with self._lock:
            self._is_asking = bool(self._open)
            return list(self._open)

    def _close(self, loss: _Loss[K], reason: str) -> None:
        with self._lock:
            if loss not in self._open:
                return
            self._open.remove(loss)
        loss.report(reason)
