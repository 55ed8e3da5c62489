"""What a transfer gives its user: a future that is done when nobody touches the transfer's memory any more.

Most transfers are of one part that a NIC does by itself. Of such a one the future is all there is, as long as it goes
well; what is made for those of many parts, or that fail, or are given up, is made when it does not (_transfers.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from monarch_backend.actor import CancelledError, Future
from monarch_backend.actor._future import no_wait
from monarch_backend.actor._program import Program
from monarch_backend.rdma._route import DONE, Change, Flight, NicRoute, Part, Result
from monarch_backend.rdma.verbs import hears

if TYPE_CHECKING:
    from monarch_backend.rdma._transfers import Engine, _Transfer

T = TypeVar("T")


class TransferFuture(Future[T]):
    """One that is done when its transfer is, also where that is given up: then nobody touches its memory any more."""

    __slots__ = ("_transfer",)

    def __init__(self, transfer: _Transfer) -> None:
        super().__init__(transfer.wait, transfer.cancel)
        self._transfer: _Transfer | None = transfer

    def taken_over(self, transfer: _Transfer) -> None:
        """What becomes of it is this transfer's business, from now on."""
        self._wait, self._cancel, self._transfer = transfer.wait, transfer.cancel, transfer

    def let_go(self) -> None:
        """It is done, and has to keep nothing else alive."""
        self._wait, self._transfer = no_wait, None

    def done(self) -> bool:
        """As Future's; whoever asks looks."""
        if not self.ready and (transfer := self._transfer) is not None:
            transfer.glance()
        return self.ready

    def add_done_callback(self, call: Callable[[Future[T]], None]) -> None:
        """As Future's. It may also be called on the thread that hears of NICs' completions. It may begin transfers;
        `get` and `cancel` of one that is not done may raise RuntimeError there, and do nothing.
        """
        super().add_done_callback(call)
        if not self.ready and (transfer := self._transfer) is not None:
            transfer.listen()

    def cancel(self, reason: str = "cancelled by the caller") -> bool:
        """End the transfer, and wait for that: a moment. False if it has ended already.

        Raises RuntimeError in a callback on a thread that must not wait, and has given up nothing then.
        """
        end = self._cancel
        if self.ready or end is None:
            return False
        end(reason)
        return isinstance(self._error, CancelledError)


_OVER: dict[str, Any] = {"by": None}
"""Of all whose end somebody has seen to."""


class SingleFuture(TransferFuture[T]):
    """Of one part on a route of NICs. A _Transfer takes it over when it fails, or when somebody gives it up."""

    __slots__ = ("_awaited", "_ends", "_flight", "_keep", "_mover", "_part", "_result", "_route")

    def __init__(self, mover: Engine, part: Part | Change, route: NicRoute, keep: Any, result: Callable[[], T]) -> None:
        self.ready = False
        self.gate = self._value = self._error = self._raw = self._cancel = self._callbacks = self._lock = None
        self._transfer, self._wait = None, _wait
        self._mover, self._part, self._route, self._keep, self._result = mover, part, route, keep, result
        self._flight: Flight | None = None
        self._ends: dict[str, _Transfer | None] = {}  # "by" whom: None is itself, and the first to say it is right
        self._awaited = False  # somebody sleeps, or has slept, until it is done

    def flies(self, flight: Flight) -> SingleFuture[T]:
        """Itself, which may be done already."""
        self._flight = flight
        if self.ready:
            self._flight = None
        return self

    def landed(self, result: Result) -> None:
        """Of its flight, on any thread. Must not wait."""
        seen_to_by = self._ends.setdefault("by", None) if result.outcome == DONE else self._taken_over()
        if seen_to_by is not None:
            seen_to_by.landed(0, self._part, self._route, result)
            return
        if isinstance(self._part, Change):
            self._part.take(result.found)
        mover = self._mover
        self._set(self._result())
        self._flight = self._keep = None
        if self._awaited:
            mover.program.pump.wake()

    def _taken_over(self) -> _Transfer | None:
        """The transfer that sees to its end; None if the future itself has begun to do that."""
        made = self._mover.taking_over(self, self._part, self._flight, self._keep, self._result)
        seen_to_by = self._ends.setdefault("by", made)
        if seen_to_by is made:
            self.taken_over(made)
        else:
            made.unwatch()
        return seen_to_by

    def let_go(self) -> None:
        """As TransferFuture's."""
        super().let_go()
        self._flight, self._keep, self._ends = None, None, _OVER

    def done(self) -> bool:
        """As TransferFuture's."""
        if not self.ready and (flight := self._flight) is not None:
            self._mover.guard()
            flight.help(0.0, 0.0)
        return self.ready

    def add_done_callback(self, call: Callable[[Future[T]], None]) -> None:
        """As TransferFuture's."""
        Future.add_done_callback(self, call)
        if not self.ready and (flight := self._flight) is not None:
            flight.listen()

    def cancel(self, reason: str = "cancelled by the caller") -> bool:
        """As TransferFuture's."""
        if self.ready:
            return False
        refuse_to_wait(self._mover.program)
        seen_to_by = self._taken_over()
        if seen_to_by is not None:  # else it is done, as good as: nobody touches its memory any more
            seen_to_by.cancel(reason)
        return isinstance(self._error, CancelledError)


def _wait(what: Any, seconds: float | None) -> bool:
    """Of a SingleFuture that no transfer has taken over. Whoever waits looks himself before he sleeps."""
    mover, flight = what._mover, what._flight
    refuse_to_wait(mover.program)
    if flight is not None:
        mover.guard()
        most = math.inf if seconds is None else seconds
        flight.help(most, most)
    what._awaited = True
    if what.ready:
        return True
    if flight is not None:
        flight.listen()
    return bool(mover.program.wait(what, seconds))


def refuse_to_wait(program: Program) -> None:
    """On a thread that has to notice what would be waited for: it would wait for ever."""
    reads = program.pump.reading
    if reads or hears():
        raise RuntimeError(
            f"a callback runs on the thread that {'reads messages' if reads else 'hears of completions'}, and can't "
            "wait for a transfer, nor for the end of one that is cancelled: use another thread"
        )
