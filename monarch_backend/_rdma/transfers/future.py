"""Futures of transfers. A future is done when its transfer does not touch memory any more.

Most transfers have one part, which a NIC runs. Such a transfer consists of its future alone while it succeeds. The
state for many parts, failures and cancellation is made on demand (transfer.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from monarch_backend._actor.calls.future import Future, no_wait
from monarch_backend._actor.errors import CancelledError
from monarch_backend._actor.runtime import Runtime
from monarch_backend._rdma.routes.protocol import DONE, AtomicOp, InFlightTransfer, NicRoute, ReadWriteOp, Result
from monarch_backend._rdma.transfers.recording import Record
from monarch_backend._verbs import hears

if TYPE_CHECKING:
    from monarch_backend._rdma.transfers.engine import Engine
    from monarch_backend._rdma.transfers.transfer import Transfer

T = TypeVar("T")


class TransferFuture(Future[T]):
    """Future that is done when its transfer has ended, also if it was cancelled. After that no memory is touched."""

    __slots__ = ("_transfer",)

    def __init__(self, transfer: Transfer) -> None:
        super().__init__(transfer.wait, transfer.cancel)
        self._transfer: Transfer | None = transfer

    def taken_over(self, transfer: Transfer) -> None:
        self._wait, self._cancel, self._transfer = transfer.wait, transfer.cancel, transfer
        if self.ready:  # it may have become ready, and been let go, before the assignment above
            self.let_go()

    def let_go(self) -> None:
        """Release the transfer, because a finished future must not keep it alive."""
        self._wait, self._cancel, self._transfer = no_wait, None, None

    def done(self) -> bool:
        """Return whether the transfer has ended, after one poll."""
        if not self.ready and (transfer := self._transfer) is not None:
            transfer.glance()
        return self.ready

    def add_done_callback(self, call: Callable[[Future[T]], None]) -> None:
        """Add a callback, as Future does. It may also run on the thread that handles NICs' completions.

        The callback may start transfers. In it, `get` and `cancel` of an unfinished future may raise RuntimeError and
        do nothing.
        """
        super().add_done_callback(call)
        if not self.ready and (transfer := self._transfer) is not None:
            transfer.listen()

    def cancel(self, reason: str = "cancelled by the caller") -> bool:
        """End the transfer and wait a moment for its end. Return False if it had ended before.

        Raises RuntimeError in a callback on a thread that must not wait. Nothing is cancelled then.
        """
        end = self._cancel
        if self.ready or end is None:
            return False
        end(reason)
        return isinstance(self._error, CancelledError)


_OVER: dict[str, Any] = {"by": None}
"""Shared by all futures whose end has been handled."""


class SingleFuture(TransferFuture[T]):
    """Future of one part on a NIC route. A Transfer takes it over when it fails or is cancelled."""

    __slots__ = ("_awaited", "_ends", "_in_flight", "_keep", "_mover", "_part", "_record", "_result", "_route")

    def __init__(
        self,
        mover: Engine,
        part: ReadWriteOp | AtomicOp,
        route: NicRoute,
        keep: Any,
        result: Callable[[], T],
        record: Record | None,
    ) -> None:
        self.ready = False
        self.wait_lock = self._value = self._error = self._raw = self._cancel = self._callbacks = self._lock = None
        self._transfer, self._wait = None, _wait
        self._mover: Any = mover  # this attribute and those below are None once the future is done
        self._part: Any = part
        self._route: Any = route
        self._keep: Any = keep
        self._result: Any = result
        self._record = record
        self._in_flight: InFlightTransfer | None = None
        # "by": the transfer that handles the end, or None for the future itself; the first entry is valid
        self._ends: dict[str, Transfer | None] = {}
        self._awaited = False  # a thread sleeps, or has slept, until the end

    def flies(self, in_flight: InFlightTransfer) -> SingleFuture[T]:
        """Store the transfer in flight. Return this future, which may be done already."""
        self._in_flight = in_flight
        if self.ready:
            self._in_flight = None
        return self

    def landed(self, result: Result) -> None:
        """Handle the result, on any thread. Must not block."""
        seen_to_by = self._ends.setdefault("by", None) if result.outcome == DONE else self._taken_over()
        if seen_to_by is not None:
            seen_to_by.landed(0, self._part, self._route, result)
            return
        if isinstance(self._part, AtomicOp):
            self._part.take(result.found)
        mover = self._mover
        if self._record is not None:
            self._record.end(None)
        self._set(self._result())
        self._drop()
        if self._awaited:
            mover.program.progress.wake()

    def _drop(self) -> None:
        """Release what a finished future does not need: part and result may refer to the user's memory."""
        self._in_flight = self._keep = self._part = self._route = self._result = self._mover = None

    def _taken_over(self) -> Transfer | None:
        """Return the transfer that handles the end. None if the future itself has started to do so."""
        mover, part, in_flight, keep, result = self._mover, self._part, self._in_flight, self._keep, self._result
        if self.ready:  # the attributes read above may be None by then
            return None
        made: Transfer = mover.taking_over(self, part, in_flight, keep, result, self._record)
        seen_to_by = self._ends.setdefault("by", made)
        if seen_to_by is made:
            self.taken_over(made)
        else:
            made.unwatch()
        return seen_to_by

    def let_go(self) -> None:
        super().let_go()
        self._ends = _OVER
        self._drop()

    def done(self) -> bool:
        self._look(0.0)
        return self.ready

    def _look(self, most: float) -> None:
        in_flight, mover = self._in_flight, self._mover
        if not self.ready and in_flight is not None:
            mover.guard()
            in_flight.help(most, most)

    def _listen(self) -> None:
        self._awaited = True
        if (in_flight := self._in_flight) is not None:
            in_flight.listen()

    def add_done_callback(self, call: Callable[[Future[T]], None]) -> None:
        Future.add_done_callback(self, call)
        if not self.ready and (in_flight := self._in_flight) is not None:
            in_flight.listen()

    def cancel(self, reason: str = "cancelled by the caller") -> bool:
        mover = self._mover
        if self.ready:
            return False
        refuse_to_wait(mover.program)
        seen_to_by = self._taken_over()
        if seen_to_by is not None:
            seen_to_by.cancel(reason)
        else:  # another thread is finishing it, and may still have to store the old value of an atomic
            self._awaited = True
            mover.program.progress.wait(self)
        return isinstance(self._error, CancelledError)


def _wait(what: Any, seconds: float | None) -> bool:
    """Wait for a SingleFuture that no transfer has taken over."""
    mover = what._mover
    return True if what.ready else look_and_sleep(mover.program, what, seconds, what._look, what._listen)


def look_and_sleep(
    program: Runtime, what: Any, seconds: float | None, look: Callable[[float], object], listen: Callable[[], object]
) -> bool:
    """Wait until ``what`` is ready, or for ``seconds`` in all. The thread polls with ``look(most)`` before it sleeps.

    ``listen`` makes sure that the sleeping thread is woken. Raises RuntimeError on a thread that must not wait, also if
    the wait would be short.
    """
    refuse_to_wait(program)
    until = None if seconds is None else time.monotonic() + seconds
    look(math.inf if seconds is None else seconds)
    if what.ready:
        return True
    listen()
    return bool(program.wait(what, None if until is None else max(0.0, until - time.monotonic())))


def refuse_to_wait(program: Runtime) -> None:
    """Raise on a thread that must not wait: one that has to detect the end itself, or one in a fork.

    Such a wait would never end.
    """
    if program.disowned:
        program.wait(None)  # raises, and names the program
    reads = program.progress.reading
    if reads or hears():
        raise RuntimeError(
            f"a callback runs on the thread that {'reads messages' if reads else 'hears of completions'}, and can't "
            "wait for a transfer, nor for the end of one that is cancelled: use another thread"
        )
