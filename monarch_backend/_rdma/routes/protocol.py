"""Interfaces of routes, and the operations and results that they exchange with the transfer engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from monarch_backend import _native
from monarch_backend._core.timeouts import check_timeout
from monarch_backend._rdma.registrations import Handle

Segment = tuple[int, int, int]
"""Offset in the registration, address in this process, bytes."""

READ, WRITE, FETCH_ADD, COMPARE_AND_SWAP = range(4)
"""Values of enum Access (csrc/memory/registration_table.h)."""


DROPPED, WRONG_KEY, OUT_OF_RANGE, READ_ONLY, MISALIGNED, DEVICE, NO_ATOMICS, NO_STAGING = range(1, 9)
"""Values of enum Refusal (csrc/memory/registration_table.h)."""


class ReadWriteOp(NamedTuple):
    """Part of a transfer: reads or writes of one registration. Offsets count from its beginning."""

    handle: Handle
    write: bool
    segments: Sequence[Segment]


class AtomicOp(NamedTuple):
    """An atomic operation. ``take`` receives the old value."""

    handle: Handle
    access: int
    offset: int
    operand: int
    expected: int
    take: Callable[[int], object]


class Result(NamedTuple):
    """Result of a transfer.

    An Outcome (csrc/memory/status.h), a Refusal (csrc/memory/registration_table.h), an errno, an atomic's old value.
    """

    outcome: int
    refusal: int
    error: int
    found: int
    text: str = ""  # details, if the route has any


DONE, REFUSED, LOST, LATE, CANCELLED, FAILED, UNREACHABLE = range(7)
"""Values of enum Outcome (csrc/memory/status.h)."""


class Route(Protocol):
    """A route to another process's memory."""

    def completes_inline(self, handle: Handle, nbytes: int, atomic: bool) -> bool:
        """Return whether the transfer is so short that the caller's own thread runs it.

        It must not depend on other threads.
        """
        return False

    @property
    def name(self) -> str:
        """The value of RDMABuffer.backend."""
        ...

    def run(self, part: ReadWriteOp | AtomicOp, scope: Any, keep: Any) -> Result:
        """Run a part and return its result. An atomic's value is not taken yet.

        ``keep`` holds the memory of the local addresses, as LocalMemory or as objects with memory.
        """
        ...


class InFlightTransfer(Protocol):
    """A transfer in flight that occupies no thread of this process.

    All methods may be called from any thread and never block.
    """

    def help(self, spins: float, waits: float) -> None:
        """Poll for completion from a thread that would sleep otherwise, while polling is cheaper than the sleep.

        ``spins``: limit in seconds if polling uses a CPU. ``waits``: limit in seconds if it uses none.
        """
        ...

    def listen(self) -> None:
        """Make sure that completion is noticed without delay, because a callback or a sleeping thread depends on it."""
        ...

    def end(self, outcome: int) -> None:
        """Abandon the transfer. It ends soon, with this outcome unless it has completed."""
        ...

    def end_now(self) -> None:
        """Force the end of an abandoned transfer after its grace period.

        Other transfers may fail, and it may block for a moment.
        """
        ...


class AsyncRoute(Route, Protocol):
    """A route that can advance transfers without a thread."""

    def begin(
        self, part: ReadWriteOp | AtomicOp, scope: Any, keep: Any, done: Callable[[Result], None]
    ) -> InFlightTransfer | None:
        """Start a part on the caller's thread, without blocking. Return None if it needs a thread, and `run`.

        ``done`` is called once, on any thread, when the local memory is not touched any more. That may be before this
        returns. It must not block.
        """
        ...

    def recover(self, part: ReadWriteOp | AtomicOp, result: Result, scope: Any, keep: Any) -> Result:
        """Return the final result of a part that has started and is not DONE.

        It may try again. Runs on a thread that may block.
        """
        ...


class NicRoute(AsyncRoute, Protocol):
    """An AsyncRoute by NICs. Its transfers need no ``scope``, and end when their owner ends."""

    def begin(
        self, part: ReadWriteOp | AtomicOp, scope: Any, keep: Any, done: Callable[[Result], None]
    ) -> InFlightTransfer | None:
        plan = self.planned(part, keep)
        return None if plan is None else self.begin_planned(part, plan, done)

    def planned(self, part: ReadWriteOp | AtomicOp, keep: Any) -> Any:
        """Return a plan for `begin_planned`, valid while the local memory stays where it is. None if planning fails."""
        ...

    def begin_planned(
        self, part: ReadWriteOp | AtomicOp, plan: Any, done: Callable[[Result], None]
    ) -> InFlightTransfer | None: ...


def as_async_route(route: Route) -> AsyncRoute | None:
    return route if hasattr(route, "begin") else None  # type: ignore[return-value]


def of_nics(route: Route) -> NicRoute | None:
    return route if hasattr(route, "begin_planned") else None  # type: ignore[return-value]


def cancel_scope(timeout: float | None) -> Any:
    """Return the native timeout and cancel flag of a transfer. Raises as check_timeout does."""
    return _native.CancelScope(check_timeout(timeout))
