"""What a route is: how it is asked for a transfer, and what it answers. The routes are other modules'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from monarch_backend import _native
from monarch_backend.rdma._handle import Handle

Segment = tuple[int, int, int]
"""Offset in what was registered, address in this process, bytes."""

READ, WRITE, FETCH_ADD, COMPARE_AND_SWAP = range(4)
"""As enum Access (csrc/memory/table.h)."""


DROPPED, WRONG_KEY, OUT_OF_RANGE, READ_ONLY, MISALIGNED, DEVICE, NO_ATOMICS = range(1, 8)
"""As enum Refusal (csrc/memory/table.h)."""


class Result(NamedTuple):
    """How a transfer ended: an Outcome (csrc/memory/outcome.h), a Refusal (table.h), an errno, what an atomic found."""

    outcome: int
    refusal: int
    error: int
    found: int
    text: str = ""  # of a route that knows more


DONE, REFUSED, LOST, LATE, CANCELLED, FAILED, UNREACHABLE = range(7)
"""As enum Outcome (csrc/memory/outcome.h)."""


class Route(Protocol):
    """A way to another process's memory."""

    def is_quick(self, handle: Handle, nbytes: int, atomic: bool) -> bool:
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


def patient(timeout: float | None) -> Any:
    """What ends a transfer before its time. Raises ValueError for a negative time."""
    if timeout is not None and not timeout >= 0:
        raise ValueError(f"timeout={timeout!r}: seconds, 0 or more, or None")
    return _native.Patient(timeout)
