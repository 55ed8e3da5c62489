"""What a route is: how it is asked for a transfer, and what it answers. The routes are other modules'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from monarch_backend import _native
from monarch_backend._core.timeouts import check_timeout
from monarch_backend._rdma.handle import Handle

Segment = tuple[int, int, int]
"""Offset in what was registered, address in this process, bytes."""

READ, WRITE, FETCH_ADD, COMPARE_AND_SWAP = range(4)
"""As enum Access (csrc/memory/registration_table.h)."""


DROPPED, WRONG_KEY, OUT_OF_RANGE, READ_ONLY, MISALIGNED, DEVICE, NO_ATOMICS, NO_STAGING = range(1, 9)
"""As enum Refusal (csrc/memory/registration_table.h)."""


class ReadWriteOp(NamedTuple):
    """A piece of a transfer: with one registration. Offsets count from its beginning."""

    handle: Handle
    write: bool
    segments: Sequence[Segment]


class AtomicOp(NamedTuple):
    """An atomic operation; ``take`` gets what was found."""

    handle: Handle
    access: int
    offset: int
    operand: int
    expected: int
    take: Callable[[int], object]


class Result(NamedTuple):
    """How a transfer ended: an Outcome (csrc/memory/status.h), a Refusal (table.h), an errno, what an atomic found."""

    outcome: int
    refusal: int
    error: int
    found: int
    text: str = ""  # of a route that knows more


DONE, REFUSED, LOST, LATE, CANCELLED, FAILED, UNREACHABLE = range(7)
"""As enum Outcome (csrc/memory/status.h)."""


class Route(Protocol):
    """A way to another process's memory."""

    def completes_inline(self, handle: Handle, nbytes: int, atomic: bool) -> bool:
        """It takes so short a time, and nobody else, that the caller's own thread does it."""
        ...

    @property
    def name(self) -> str:
        """As RDMABuffer.backend says it."""
        ...

    def move(self, handle: Handle, write: bool, segments: Sequence[Segment], patient: Any, keep: Any) -> Result:
        """Read or write; offsets count from the beginning of the registration.

        ``keep``: what the local addresses are in, as LocalMemory, or as objects that have memory.
        """
        ...

    def change(self, handle: Handle, access: int, offset: int, operand: int, expected: int, patient: Any) -> Result:
        """FETCH_ADD or COMPARE_AND_SWAP of 8 bytes."""
        ...


class InFlightTransfer(Protocol):
    """A part under way that no thread of ours waits for. All of it may be called from any thread, and never waits."""

    def help(self, spins: float, waits: float) -> None:
        """Of one who waits for it, and would sleep otherwise: look whether it is over, as long as that is worth more
        than the sleep. Seconds: for how long at most if that takes a processor, and for how long if it takes none.
        """
        ...

    def listen(self) -> None:
        """Somebody is to be called when it is over, or sleeps until then: nobody may be late to notice."""
        ...

    def end(self, outcome: int) -> None:
        """It is not wanted any more: it ends soon, with this outcome if it has not been done."""
        ...

    def end_now(self) -> None:
        """It was ended, and had its time for it: others may have to suffer. It may take a moment."""
        ...


class AsyncRoute(Route, Protocol):
    """A route that can do parts by itself."""

    def begin(
        self, part: ReadWriteOp | AtomicOp, patient: Any, keep: Any, done: Callable[[Result], None]
    ) -> InFlightTransfer | None:
        """Set it going on the caller's thread, without waiting for anybody. ``done`` is called once, on any thread,
        when nobody touches the local memory any more; perhaps before this returns, and it must not wait.

        None: nothing was asked for, and a thread that may wait has to do it, by `move` or `change`.
        """
        ...

    def mend(self, part: ReadWriteOp | AtomicOp, result: Result, patient: Any, keep: Any) -> Result:
        """What becomes of one that was begun and not DONE. On a thread that may wait: it may be tried again."""
        ...


class NicRoute(AsyncRoute, Protocol):
    """One whose flights NICs do: they need no ``patient``, and end when their owner does."""

    def is_ready(self, handle: Handle) -> bool:
        """What a transfer with this memory needs is there, as far as anybody knows: it would ask the owner nothing."""
        ...

    def prepare(self, handle: Handle) -> None:
        """Try to have that. On a thread that may wait; nothing is moved. Never raises for an owner that says no."""
        ...

    def planned(self, part: ReadWriteOp | AtomicOp, keep: Any) -> Any:
        """What `begin` finds out, for `begin_planned` as long as the local memory is where it is. None: it can't."""
        ...

    def rebind_request(self, plan: Any, memory: tuple[int, int, Any] | tuple[()]) -> Any:
        """The same, where the local memory is in this: its address, its bytes, its owner. With () it is to be kept, and
        keeps no memory alive.
        """
        ...

    def begin_planned(
        self, part: ReadWriteOp | AtomicOp, plan: Any, done: Callable[[Result], None]
    ) -> InFlightTransfer | None:
        """As `begin`."""
        ...


def flying(route: Route) -> AsyncRoute | None:
    """The same, if it is one of those."""
    return route if hasattr(route, "begin") else None  # type: ignore[return-value]


def of_nics(route: Route) -> NicRoute | None:
    """The same, if it is one of those."""
    return route if hasattr(route, "begin_planned") else None  # type: ignore[return-value]


def moved(part: ReadWriteOp | AtomicOp, route: Route, patient: Any, keep: Any) -> Result:
    """What becomes of it on this route; an atomic's value is not taken yet."""
    if isinstance(part, ReadWriteOp):
        return route.move(part.handle, part.write, part.segments, patient, keep)
    return route.change(part.handle, part.access, part.offset, part.operand, part.expected, patient)


def patient(timeout: float | None) -> Any:
    """What ends a transfer before its time. Raises as check_timeout does."""
    return _native.Patient(check_timeout(timeout))
