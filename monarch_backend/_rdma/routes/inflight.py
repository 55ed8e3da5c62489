"""A transfer in flight on a NIC. The waiting thread polls it with `help`; `end` abandons it.

_verbs runs the transfer. routes/verbs.py starts it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monarch_backend._actor.runtime import Runtime
from monarch_backend._rdma.routes.protocol import DONE, FAILED, LOST, UNREACHABLE, Result
from monarch_backend._verbs import Engine, NoConnectionError, UnreachableMemoryError, VerbsError

CANCEL_GRACE_S = 0.5
"""Seconds that an abandoned transfer has to end by itself. After that its connection is closed."""

MAX_POLL_S = 5e-3
"""Seconds for which a thread that waits for several transfers polls before it sleeps."""

_WHY = "another transfer with it was given up"


class VerbsInFlight:
    """See InFlightTransfer. ``done`` is called with the result."""

    __slots__ = ("_done", "_engine", "_late", "_over", "_program", "_request", "_token")

    def __init__(self, program: Runtime, engine: Engine, token: str, done: Callable[[Result], None]) -> None:
        self._program, self._engine, self._token = program, engine, token
        self._done: Any = done
        self._late: Any = None  # a timer
        self._over = 0  # the outcome of an abandoned transfer, else 0
        self._request: Any = None

    def took_off(self, request: Any) -> VerbsInFlight | None:
        """Store the engine's request and return this transfer. Return None if there is no request."""
        self._request = request
        return self if request is not None else None

    def landed(self, what: Any) -> None:
        done, self._done = self._done, None  # else the timer would keep the callback and its objects alive
        done(result_of(what, self._over))
        if self._late is not None:
            self._late.cancel()

    def help(self, spins: float, waits: float) -> None:
        self._engine.help(self._request, spins)

    def listen(self) -> None:
        self._engine.listen(self._request)

    def end(self, outcome: int) -> None:
        if self._over or self._request.finished:
            return
        self._over = outcome
        self._engine.stop(self._token, self._request, "it was given up")
        self._engine.listen(self._request)
        if not self._request.finished:
            self._late = self._program.progress.later(CANCEL_GRACE_S, self._end_all)
            if self._request.finished:  # finished meanwhile, and `landed` may not have seen the timer
                self._late.cancel()

    def _end_all(self) -> None:
        if not self._request.finished:
            self._engine.give_up_soon(self._token, _WHY)

    def end_now(self) -> None:
        if not self._request.finished:
            self._engine.give_up(self._token, _WHY)


_DONE = Result(DONE, 0, 0, 0)


def result_of(what: Any, over: int) -> Result:
    """Convert the engine's outcome to a Result. ``over``: the outcome of an abandoned transfer, else 0."""
    if what is None:
        return _DONE
    if not isinstance(what, BaseException):
        return Result(DONE, 0, 0, what)
    if over:
        return Result(over, 0, 0, 0)
    if isinstance(what, (NoConnectionError, UnreachableMemoryError)):
        return Result(UNREACHABLE, 0, 0, 0, str(what))
    refused = isinstance(what, VerbsError) and what.status not in ("", "transport retry counter exceeded")
    return Result(FAILED if refused or not isinstance(what, VerbsError) else LOST, 0, 0, 0, str(what))
