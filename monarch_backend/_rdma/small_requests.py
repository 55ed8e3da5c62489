"""Small transfers over TCP, asked for on the caller's thread; whoever waits for one reads its answer himself.

That spares two changes of threads. Where nobody waits in the socket, a thread that may wait does: when somebody sleeps
for longer, or is to be called. What nobody has looked for within a SWEEP gets such a thread, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from monarch_backend import _native
from monarch_backend._actor.runtime import Runtime
from monarch_backend._rdma.routes.base import CANCELLED, LATE, Result

SOCKET_WAIT_S = 0.002
"""Seconds that one who waits stays in the socket, where only signals reach him."""

SWEEP_INTERVAL_S = 0.02


class SmallRequest:
    """See _route.Flight."""

    __slots__ = ("_done", "_handed_over", "_native", "_office", "_patient", "token")

    def __init__(
        self,
        office: SmallRequestClient,
        token: str,
        patient: Any,
        done: Callable[[Result], None],
        native: _native.Errand,
    ) -> None:
        self._office, self.token, self._patient, self._done, self._native = office, token, patient, done, native
        self._handed_over = False

    def _fetch(self, seconds: float | None) -> None:
        told = self._native.fetch(seconds)
        if told is not None:
            self._office.forget(self)
            self._done(Result(*told))

    def help(self, spins: float, waits: float) -> None:
        """See _route.Flight."""
        self._fetch(0.0 if self._handed_over else min(SOCKET_WAIT_S, waits))

    def listen(self) -> None:
        """See _route.Flight."""
        if not self._handed_over and not self._native.over:
            self._handed_over = True
            self._office.submit(self._see_to_it)

    def _see_to_it(self) -> None:
        while not self._native.over:
            self._fetch(None)

    def end(self, outcome: int) -> None:
        """See _route.Flight."""
        if outcome != LATE:  # which it notices by itself, and says so
            self._patient.cancel()
        self._fetch(0.0)
        self.listen()  # another thread is at it, and sees that it is cancelled

    def end_now(self) -> None:
        """See _route.Flight. Whoever is at it has a socket that he can close: it has ended, or does so now."""


class SmallRequestClient:
    """The errands of this process that are not over. ``submit``: have it done by a thread that may wait."""

    def __init__(self, owner: Runtime, submit: Callable[[Callable[[], None]], None]) -> None:
        self.submit, self._pump = submit, owner.pump
        self._lock = threading.Lock()
        self._out: set[SmallRequest] = set()
        self._old: set[SmallRequest] = set()  # those that were there at the last sweep
        self._sweeps = False

    def add(self, errand: SmallRequest) -> None:
        """It may be over already."""
        with self._lock:
            self._out.add(errand)
            begin, self._sweeps = not self._sweeps, True
        if begin:
            self._pump.later(SWEEP_INTERVAL_S, self._sweep)

    def forget(self, errand: SmallRequest) -> None:
        """It is over."""
        with self._lock:
            self._out.discard(errand)
            self._old.discard(errand)

    def _sweep(self) -> None:
        with self._lock:
            late, self._old = self._old, self._out - self._old
            self._sweeps = bool(self._old)
        for errand in late:
            errand.listen()
        if self._sweeps:
            self._pump.later(SWEEP_INTERVAL_S, self._sweep)

    def end(self, token: str | None = None) -> None:
        """Those to this process, or all."""
        with self._lock:
            ended = [errand for errand in self._out if token in (None, errand.token)]
        for errand in ended:
            errand.end(CANCELLED)
