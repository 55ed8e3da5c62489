"""Small transfers over TCP. The caller's thread sends the request, and the waiting thread reads the reply.

This saves two thread switches per transfer. A pool thread reads the reply instead if a waiter sleeps or a callback is
set. A pool thread also takes requests that were not polled within SWEEP_INTERVAL_S.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from monarch_backend import _native
from monarch_backend._actor.runtime import Runtime
from monarch_backend._rdma.routes.protocol import CANCELLED, LATE, Result

SOCKET_WAIT_S = 0.002
"""Seconds that a waiting thread blocks in the socket, where only signals interrupt it."""

SWEEP_INTERVAL_S = 0.02


class SmallRequest:
    """A small request in flight: see InFlightTransfer."""

    __slots__ = ("_client", "_done", "_handed_over", "_native", "_scope", "token")

    def __init__(
        self,
        client: SmallRequestClient,
        token: str,
        scope: Any,
        done: Callable[[Result], None],
        native: _native.SmallRequest,
    ) -> None:
        self._client, self.token, self._scope, self._done, self._native = client, token, scope, done, native
        self._handed_over = False

    def _fetch(self, seconds: float | None) -> None:
        told = self._native.fetch(seconds)
        if told is not None:
            self._client.forget(self)
            self._done(Result(*told))

    def help(self, spins: float, waits: float) -> None:
        self._fetch(0.0 if self._handed_over else min(SOCKET_WAIT_S, waits))

    def listen(self) -> None:
        if not self._handed_over and not self._native.is_over:
            self._handed_over = True
            self._client.submit(self._see_to_it)

    def _see_to_it(self) -> None:
        while not self._native.is_over:
            self._fetch(None)

    def end(self, outcome: int) -> None:
        if outcome != LATE:  # the native part detects a timeout by itself
            self._scope.cancel()
        self._fetch(0.0)
        self.listen()  # for the case that another thread reads the reply: it sees the cancellation

    def end_now(self) -> None:
        """See InFlightTransfer. Nothing to do: `end` lets the thread that reads the reply close its socket."""


class SmallRequestClient:
    """The unfinished small requests of this process. ``submit`` runs a job on a thread that may block."""

    def __init__(self, owner: Runtime, submit: Callable[[Callable[[], None]], None]) -> None:
        self.submit, self._progress = submit, owner.progress
        self._lock = threading.Lock()
        self._out: set[SmallRequest] = set()
        self._old: set[SmallRequest] = set()  # requests of the last sweep
        self._sweeps = False

    def add(self, request: SmallRequest) -> None:
        """Add a request. It may have finished already."""
        with self._lock:
            self._out.add(request)
            begin, self._sweeps = not self._sweeps, True
        if begin:
            self._progress.later(SWEEP_INTERVAL_S, self._sweep)

    def forget(self, request: SmallRequest) -> None:
        with self._lock:
            self._out.discard(request)
            self._old.discard(request)

    def _sweep(self) -> None:
        with self._lock:
            late, self._old = self._old, self._out - self._old
            self._sweeps = bool(self._old)
        for request in late:
            request.listen()
        if self._sweeps:
            self._progress.later(SWEEP_INTERVAL_S, self._sweep)

    def end(self, token: str | None = None) -> None:
        with self._lock:
            ended = [request for request in self._out if token in (None, request.token)]
        for request in ended:
            request.end(CANCELLED)
