"""Transfer of some parts, with one future: its state, and how it ends."""

from __future__ import annotations

import errno
import functools
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch_backend._actor.errors import CancelledError, MeshFailure
from monarch_backend._actor.runtime import Runtime
from monarch_backend._rdma.errors import DroppedError, OwnerLostError, RDMAError
from monarch_backend._rdma.registrations import Handle
from monarch_backend._rdma.routes.protocol import (
    CANCELLED,
    DONE,
    DROPPED,
    LATE,
    LOST,
    REFUSED,
    UNREACHABLE,
    AsyncRoute,
    AtomicOp,
    InFlightTransfer,
    ReadWriteOp,
    Result,
    Route,
    cancel_scope,
)
from monarch_backend._rdma.routes.verbs import CANCEL_GRACE_S, MAX_POLL_S
from monarch_backend._rdma.transfers.future import TransferFuture, look_and_sleep, refuse_to_wait
from monarch_backend._rdma.transfers.recording import Record

if TYPE_CHECKING:
    from monarch_backend._rdma.transfers.engine import Engine


_REFUSALS = (
    "",
    "it is not registered any more: drop() was called, or its owner was started anew",
    "its key is not that of any registration: the handle was forged or damaged",
    "the range is outside of what was registered",
    "it was registered read-only",
    "atomics need 8 bytes at an address that is a multiple of 8",
    "its owner's GPU, or the driver of it, could not copy it",
    "atomics on memory of a GPU are possible over verbs only, where a NIC reaches it: use memory of the CPU for it",
    "its owner does not know the staging memory any more that it has lent to this process: try again",
)
PEER_LOSS_TIMEOUT_S = 1.0
"""Seconds to wait, after a connection has broken, for the report that its process has ended."""


def run_part(part: ReadWriteOp | AtomicOp, route: Route, until: Any, keep: Any) -> Result:
    """Run a part on a route of a thread; an atomic's old value goes to its ``take``."""
    result = route.run(part, until, keep)
    if result.outcome == DONE and isinstance(part, AtomicOp):
        part.take(result.found)
    return result


class Transfer:
    def __init__(
        self,
        engine: Engine,
        count: int,
        keep: Any,
        timeout: float | None,
        result: Callable[[], Any],
        future: TransferFuture[Any] | None = None,
        record: Record | None = None,
    ) -> None:
        """``future``: one to take over; the default is a new one. ``record`` is ended with the transfer."""
        self._result, self._record = result, record
        self._engine, self._left, self._keep, self._timeout = engine, count, keep, timeout
        self._scope = cancel_scope(timeout)
        self._lock = threading.Lock()
        # locks, held until the transfer has ended, and until a process is known to have ended
        self._unfinished, self._untold = _held(), _held()
        self._queued: set[int] = set()  # parts that wait for a thread
        self._closed: BaseException | None = None  # the reason why no part waits for a thread any more
        self._flights: dict[int, InFlightTransfer | None] = {}  # of parts without a thread; None: the part has finished
        self._unwanted = 0  # the outcome for parts that are abandoned, else 0
        self._given_up: CancelledError | None = None  # the caller has cancelled the transfer
        self._error: BaseException | None = None
        self._number = 0
        self._late: Any = None  # a timer
        self._tokens: set[str] = set()
        self._gone: dict[str, MeshFailure] = {}
        self._awaited = False  # a thread sleeps, or has slept, until the end
        self.future: TransferFuture[Any] = TransferFuture(self) if future is None else future
        if count == 0:
            self._finish()

    def watch(self) -> None:
        self._number = next(self._engine.program.ids)
        self._engine.program.pending[self._number] = self
        if self._timeout is not None:
            self._late = self._engine.program.progress.later(self._timeout, self._time_is_over)

    def unwatch(self) -> None:
        self._engine.program.pending.pop(self._number, None)

    def adopt(self, part: ReadWriteOp | AtomicOp, in_flight: InFlightTransfer | None) -> None:
        """Add the only part, which a SingleFuture has started. A thread may sleep for its end already."""
        self._tokens.add(part.handle.token)
        self._flights[0], self._awaited = in_flight, True

    def _time_is_over(self) -> None:
        self._end_queued(
            TimeoutError(
                f"the transfer was not done within {self._timeout:g} s: a part of it waited for too many others"
                if self._timeout
                else "the transfer was not done at once (timeout=0)"
            )
        )
        self._end_flights(LATE)

    def on_gone(self, peer: Any, failure: MeshFailure) -> None:
        if peer.token in self._tokens:
            self._gone[peer.token] = failure
            self._scope.cancel()
            self._end_flights(CANCELLED)
            _release(self._untold)

    def on_reply(self, frame: Any) -> None:
        """Do nothing: transfers get no reply messages."""

    # ---- parts that a route advances without a thread

    def start_async(self, number: int, part: ReadWriteOp | AtomicOp, route: AsyncRoute | None) -> bool:
        """Start a part on such a route. Return False if the part needs a thread."""
        if route is None or self._unwanted or self._engine.is_gone(part.handle.token):
            return False
        self._tokens.add(part.handle.token)
        in_flight = route.begin(part, self._scope, self._keep, lambda result: self.landed(number, part, route, result))
        if in_flight is None:
            return False
        with self._lock:
            self._flights.setdefault(number, in_flight)
        self._end_if_unwanted(in_flight)
        return True

    def _end_if_unwanted(self, in_flight: InFlightTransfer) -> None:
        """End a part if the transfer was abandoned meanwhile: `_end_flights` may have missed it."""
        if self._unwanted:
            in_flight.end(self._unwanted)

    def landed(self, number: int, part: ReadWriteOp | AtomicOp, route: AsyncRoute, result: Result) -> None:
        """Handle the end of a part. It may come before `start_async` has stored the part. Must not block."""
        with self._lock:
            self._flights[number] = None
        if result.outcome == DONE:
            if isinstance(part, AtomicOp):
                part.take(result.found)
            self._part_over(None)
        elif result.outcome == CANCELLED and self._given_up is not None:
            self._part_over(self._given_up)
        elif result.outcome == LATE and part.handle.token not in self._gone:
            self._part_over(self._failure(part.handle, result))
        elif self.queue(number):  # on a thread, because finding the reason or trying again takes time
            self._engine.menders.submit(lambda: self._recover(number, part, route, result))

    def _recover(self, number: int, part: ReadWriteOp | AtomicOp, route: AsyncRoute, result: Result) -> None:
        if not self._begins(number):
            return
        error: BaseException | None = None
        try:
            if self._engine.is_gone(part.handle.token):
                error = _lost(self._engine.program, part.handle, None)
            elif (result := route.recover(part, result, self._scope, self._keep)).outcome != DONE:
                error = self._failure(part.handle, result)
            elif isinstance(part, AtomicOp):
                part.take(result.found)
        except BaseException as unexpected:
            error = unexpected
        self._part_over(error)

    def _end_flights(self, outcome: int) -> None:
        self._unwanted = outcome
        for in_flight in self._under_way():
            in_flight.end(outcome)

    def _under_way(self) -> list[InFlightTransfer]:
        """Return the unfinished parts. In a fork there are none, because a fork must not touch them."""
        if self._engine.program.disowned:
            return []
        return [in_flight for in_flight in list(self._flights.values()) if in_flight is not None]

    # ---- waiting

    def wait(self, what: Any, seconds: float | None) -> bool:
        look, program = functools.partial(self._look, MAX_POLL_S), self._engine.program
        return look_and_sleep(program, what, seconds, look, self._listen_awaited)

    def _listen_awaited(self) -> None:
        self._awaited = True
        self.listen()

    def _look(self, spins: float, waits: float) -> None:
        """Poll all parts. The seconds are a limit for all together: see InFlightTransfer.help."""
        self._engine.guard()
        flights = self._under_way()
        began = (
            time.perf_counter() if len(flights) > 1 else 0.0
        )  # reading the clock takes as long as a small transfer on some virtual machines
        for number, in_flight in enumerate(flights):
            gone = time.perf_counter() - began if number else 0.0
            in_flight.help(max(0.0, min(spins, waits) - gone), max(0.0, waits - gone))
            if self.future.ready:
                return

    def glance(self) -> None:
        self._look(0.0, 0.0)

    def listen(self) -> None:
        """Have a thread of the routes watch all parts, because a callback or a sleeping thread depends on them."""
        for in_flight in self._under_way():
            in_flight.listen()

    # ---- parts that a thread runs

    def queue(self, number: int) -> bool:
        """Add a part that waits for a thread. Return False if the transfer, and the part with it, has ended."""
        with self._lock:
            closed = self._closed
            if closed is None:
                self._queued.add(number)
                return True
        self._part_over(closed)
        return False

    def _begins(self, number: int) -> bool:
        with self._lock:
            waits = number in self._queued
            self._queued.discard(number)
        return waits

    def run_queued(self, number: int, part: ReadWriteOp | AtomicOp, route: Route) -> None:
        """Run a queued part, unless the transfer was abandoned meanwhile."""
        if self._begins(number):
            self.run(part, route)

    def _end_queued(self, error: BaseException) -> None:
        with self._lock:
            self._closed = self._closed or error
            if not self._queued:
                return
            self._left -= len(self._queued)
            self._queued.clear()
            self._error = self._error or error
            self._scope.cancel()
            if self._left:
                return
        self._finish()

    def run(self, part: ReadWriteOp | AtomicOp, route: Route) -> None:
        """Run one part. Never raises."""
        self._tokens.add(part.handle.token)
        error: BaseException | None = None
        try:
            if self._error is None:
                if self._engine.is_gone(part.handle.token):
                    error = _lost(self._engine.program, part.handle, None)
                elif (result := run_part(part, route, self._scope, self._keep)).outcome != DONE:
                    error = self._failure(part.handle, result)
        except BaseException as unexpected:
            error = unexpected
        self._part_over(error)

    def _part_over(self, error: BaseException | None) -> None:
        failed = False
        with self._lock:
            if error is not None and self._error is None:
                self._error = error
                self._scope.cancel()  # the other parts need not continue
                failed = True
            self._left -= 1
            left = self._left
        if not left:
            self._finish()
        elif failed:
            assert error is not None
            self._end_queued(error)
            self._end_flights(CANCELLED)

    def end_with(self, handle: Handle, result: Result) -> None:
        self._error = self._failure(handle, result)
        self._finish()

    def _failure(self, handle: Handle, result: Result) -> BaseException:
        known = self._gone.get(handle.token)
        broken = result.outcome in (LOST, UNREACHABLE)
        if result.outcome == CANCELLED and self._given_up is not None:
            return self._given_up
        if broken and known is None and self._is_gone_soon(handle.token):
            known = self._gone.get(handle.token)
        # an empty text: the route knows that the process has ended
        if known is not None or (result.outcome == LOST and not result.text):
            self._engine.routes.forget(handle.token)
            return _lost(self._engine.program, handle, known)
        if result.outcome == REFUSED:
            kind = DroppedError if result.refusal == DROPPED else RDMAError
            return kind(f"{handle} can't be used: {_REFUSALS[result.refusal]}")
        if result.outcome == LATE:
            return TimeoutError(
                f"the transfer with {handle} was not done within {self._timeout:g} s; a part of it may be"
            )
        if result.outcome == CANCELLED:
            return RDMAError(f"a transfer with {handle} was ended, since another part of it has failed")
        if result.error == errno.EFAULT:
            return RDMAError(
                f"{handle} can't be used: a part of it, or of this process's own buffer, is not there any more"
            )
        if broken:
            return RDMAError(
                f"{handle} could not be reached: {result.text}; its process is not known to have ended, so try again, "
                "or look whether the hosts can reach each other at the ports of its server (docs/guides/rdma.md)"
            )
        return RDMAError(f"a transfer with {handle} failed: {result.text or os.strerror(result.error)}")

    def _is_gone_soon(self, token: str) -> bool:
        """Return whether the process has ended.

        Wait a moment, because its connection may break before the report arrives.
        """
        owner = self._engine.program
        peer = owner.router.peers.get(token)
        if peer is not None and peer.gone is not None:
            self._gone.setdefault(token, owner.references.exit_of(peer))
        if token not in self._gone and self._number and self._untold.acquire(timeout=PEER_LOSS_TIMEOUT_S):
            _release(self._untold)  # for other threads in the same wait
        return token in self._gone

    def _finish(self) -> None:
        self._keep, progress = None, self._engine.program.progress
        self.unwatch()
        if self._late is not None:
            self._late.cancel()
        if self._record is not None:
            self._record.end(self._error)
        if self._error is not None:
            self.future._fail(self._error)
        else:
            self.future._set(self._result())
        self.future.let_go()
        _release(self._unfinished)
        if self._awaited:
            progress.wake()

    def cancel(self, reason: str) -> None:
        """Cancel the transfer. The caller may use the buffers again when this returns.

        Raises RuntimeError, before anything is abandoned, on a thread that must not wait.
        """
        refuse_to_wait(self._engine.program)
        self._given_up = CancelledError(reason)
        self._scope.cancel()
        self._end_queued(self._given_up)
        self._end_flights(CANCELLED)
        if not self._unfinished.acquire(timeout=CANCEL_GRACE_S):
            # in this thread and not in a timer, because no other thread may run any more
            for in_flight in self._under_way():
                in_flight.end_now()
            self._unfinished.acquire()
        _release(self._unfinished)  # for other threads in the same wait


def _held() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


def _release(lock: threading.Lock) -> None:
    try:
        lock.release()
    except RuntimeError:  # another thread has released it
        return


def _lost(owner: Runtime, handle: Handle, failure: MeshFailure | None) -> OwnerLostError:
    peer = owner.router.peers.get(handle.token)
    if failure is None and peer is not None and peer.gone is not None:
        failure = owner.references.exit_of(peer)
    how = str(failure) if failure is not None else "its process has ended"
    return OwnerLostError(f"the owner of {handle} is gone: {how}", failure)
