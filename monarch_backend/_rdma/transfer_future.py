"""What a transfer gives its user: a future that is done when nobody touches the transfer's memory any more.

Most transfers are of one part that a NIC does by itself. Of such a one the future is all there is, as long as it goes
well; what is made for those of many parts, or that fail, or are given up, is made when it does not
(transfer_engine.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from monarch_backend._actor.errors import CancelledError
from monarch_backend._actor.future import Future, no_wait
from monarch_backend._actor.runtime import Runtime
from monarch_backend._rdma.routes.base import DONE, AtomicOp, InFlightTransfer, NicRoute, ReadWriteOp, Result
from monarch_backend._verbs import hears

if TYPE_CHECKING:
    from monarch_backend._rdma.transfer_engine import Engine, _Transfer

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
        if self.ready:  # since a moment ago, and let go before this was written
            self.let_go()

    def let_go(self) -> None:
        """It is done, and has to keep nothing else alive."""
        self._wait, self._cancel, self._transfer = no_wait, None, None

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

    def __init__(
        self, mover: Engine, part: ReadWriteOp | AtomicOp, route: NicRoute, keep: Any, result: Callable[[], T]
    ) -> None:
        self.ready = False
        self.gate = self._value = self._error = self._raw = self._cancel = self._callbacks = self._lock = None
        self._transfer, self._wait = None, _wait
        self._mover: Any = mover  # this, and what follows, is None when it is done
        self._part: Any = part
        self._route: Any = route
        self._keep: Any = keep
        self._result: Any = result
        self._flight: InFlightTransfer | None = None
        self._ends: dict[str, _Transfer | None] = {}  # "by" whom: None is itself, and the first to say it is right
        self._awaited = False  # somebody sleeps, or has slept, until it is done

    def flies(self, flight: InFlightTransfer) -> SingleFuture[T]:
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
        if isinstance(self._part, AtomicOp):
            self._part.take(result.found)
        mover = self._mover
        self._set(self._result())
        self._drop()
        if self._awaited:
            mover.program.pump.wake()

    def _drop(self) -> None:
        """What it needs no more, once it is ready: part and result may know the user's memory."""
        self._flight = self._keep = self._part = self._route = self._result = self._mover = None

    def _taken_over(self) -> _Transfer | None:
        """The transfer that sees to its end; None if the future itself has begun to do that."""
        mover, part, flight, keep, result = self._mover, self._part, self._flight, self._keep, self._result
        if self.ready:  # and what was read may be None by then
            return None
        made: _Transfer = mover.taking_over(self, part, flight, keep, result)
        seen_to_by = self._ends.setdefault("by", made)
        if seen_to_by is made:
            self.taken_over(made)
        else:
            made.unwatch()
        return seen_to_by

    def let_go(self) -> None:
        """As TransferFuture's."""
        super().let_go()
        self._ends = _OVER
        self._drop()

    def done(self) -> bool:
        """As TransferFuture's."""
        self._look(0.0)
        return self.ready

    def _look(self, most: float) -> None:
        flight, mover = self._flight, self._mover
        if not self.ready and flight is not None:
            mover.guard()
            flight.help(most, most)

    def _listen(self) -> None:
        self._awaited = True
        if (flight := self._flight) is not None:
            flight.listen()

    def add_done_callback(self, call: Callable[[Future[T]], None]) -> None:
        """As TransferFuture's."""
        Future.add_done_callback(self, call)
        if not self.ready and (flight := self._flight) is not None:
            flight.listen()

    def cancel(self, reason: str = "cancelled by the caller") -> bool:
        """As TransferFuture's."""
        mover = self._mover
        if self.ready:
            return False
        refuse_to_wait(mover.program)
        seen_to_by = self._taken_over()
        if seen_to_by is not None:
            seen_to_by.cancel(reason)
        else:  # a thread is about to say that it is done, and may still have to put down what an atomic has found
            self._awaited = True
            mover.program.pump.wait(self)
        return isinstance(self._error, CancelledError)


def _wait(what: Any, seconds: float | None) -> bool:
    """Of a SingleFuture that no transfer has taken over."""
    mover = what._mover
    return True if what.ready else look_and_sleep(mover.program, what, seconds, what._look, what._listen)


def look_and_sleep(
    program: Runtime, what: Any, seconds: float | None, look: Callable[[float], object], listen: Callable[[], object]
) -> bool:
    """Until it is ready, and for so long at most in all. Whoever waits looks himself, ``look(most)``, before he sleeps;
    ``listen`` has him woken. Who may not wait is told so also where it would be a short time.
    """
    refuse_to_wait(program)
    until = None if seconds is None else time.monotonic() + seconds
    look(math.inf if seconds is None else seconds)
    if what.ready:
        return True
    listen()
    return bool(program.wait(what, None if until is None else max(0.0, until - time.monotonic())))


def refuse_to_wait(program: Runtime) -> None:
    """On a thread that has to notice what would be waited for, or in a fork, where nobody does: that is for ever."""
    if program.disowned:
        program.wait(None)  # raises, and says whose it is
    reads = program.pump.reading
    if reads or hears():
        raise RuntimeError(
            f"a callback runs on the thread that {'reads messages' if reads else 'hears of completions'}, and can't "
            "wait for a transfer, nor for the end of one that is cancelled: use another thread"
        )
