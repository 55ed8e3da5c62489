"""Which way leads from this process to the memory of another one, and why.

A route moves bytes and waits until that is done; it is called on threads that may wait. Chosen once per process and
kind of memory. What was chosen is printed with MONARCH_DEBUG=1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from monarch_backend import _native
from monarch_backend.actor._program import Program
from monarch_backend.rdma._handle import Handle
from monarch_backend.rdma._registry import Registry
from monarch_backend.transport._carried import host_of

Segment = tuple[int, int, int]
"""Offset in what was registered, address in this process, bytes."""

FETCH_ADD, COMPARE_AND_SWAP = 2, 3
"""As enum Access (csrc/memory/table.h)."""


class Result(NamedTuple):
    """How a transfer ended: an Outcome (csrc/memory/near.h), a Refusal (table.h), an errno, what an atomic found."""

    outcome: int
    refusal: int
    error: int
    found: int
    text: str = ""  # of a route that knows more


DONE, REFUSED, LOST, LATE, CANCELLED, FAILED = range(6)


class Route(Protocol):
    """A way to another process's memory."""

    name: str
    quick: int  # bytes up to which the caller's own thread does it

    def move(self, handle: Handle, write: bool, segments: Sequence[Segment], patient: Any) -> Result:
        """Read or write; offsets count from the beginning of the registration."""
        ...

    def change(self, handle: Handle, access: int, offset: int, operand: int, expected: int, patient: Any) -> Result:
        """FETCH_ADD or COMPARE_AND_SWAP of 8 bytes."""
        ...


class Here:
    """To memory of this very process."""

    name, quick = "this process", 1 << 20

    def __init__(self, registry: Registry) -> None:
        self._native = registry.native

    def move(self, handle: Handle, write: bool, segments: Sequence[Segment], patient: Any) -> Result:  # noqa: ARG002
        """See Route."""
        return Result(*self._native.move_here(handle.ticket, write, segments))

    def change(
        self,
        handle: Handle,
        access: int,
        offset: int,
        operand: int,
        expected: int,
        patient: Any,  # noqa: ARG002
    ) -> Result:
        """See Route."""
        return Result(*self._native.change_here(handle.ticket, access, offset, operand, expected))


class SameHost:
    """To memory of a process of this host: mapped, by the kernel, or by a thread of that process."""

    quick = 1 << 20
    name = "same host"

    def __init__(self, registry: Registry) -> None:
        self._native = registry.native

    def move(self, handle: Handle, write: bool, segments: Sequence[Segment], patient: Any) -> Result:
        """See Route."""
        return Result(*self._native.move(handle.token, handle.ticket, write, segments, patient))

    def change(self, handle: Handle, access: int, offset: int, operand: int, expected: int, patient: Any) -> Result:
        """See Route."""
        return Result(*self._native.change(handle.token, handle.ticket, access, offset, operand, expected, patient))

    def way(self, handle: Handle) -> str:
        """For people."""
        ways = (
            "its memory is mapped here",
            "process_vm_readv",
            "copied by its own thread: the kernel forbids process_vm_readv",
        )
        found = self._native.way(handle.token, handle.ticket)
        return ways[found] if found >= 0 else "it does not answer"


class Routes:
    """Those of one process."""

    def __init__(self, owner: Program, registry: Registry) -> None:
        self._program, self._registry = owner, registry
        self._here, self._near = Here(registry), SameHost(registry)
        self._chosen: dict[str, Route] = {}

    def to(self, handle: Handle) -> Route:
        """The route to this memory. Raises RDMAError if there is none."""
        route = self._chosen.get(handle.token)
        if route is None:
            route = self._chosen[handle.token] = self._choose(handle)
        return route

    def forget(self, token: str) -> None:
        """That process is gone."""
        self._chosen.pop(token, None)

    def _choose(self, handle: Handle) -> Route:
        if handle.token == self._program.router.token:
            return self._here
        if host_of(handle.token) == host_of(self._program.router.token):
            _say(handle, f"{self._near.name}, {self._near.way(handle)}")
            return self._near
        return self._far(handle)

    def _far(self, handle: Handle) -> Route:
        from monarch_backend.rdma._errors import RDMAError

        raise RDMAError(f"{handle}: there is no route to another host yet")


def _say(handle: Handle, how: str) -> None:
    if os.environ.get("MONARCH_DEBUG", "0") not in ("", "0"):
        sys.stderr.write(f"monarch: memory of process {handle.pid} on host {handle.host}: {how}\n")


def patient(timeout: float | None) -> Any:
    """What ends a transfer before its time. Raises ValueError for a negative time."""
    if timeout is not None and not timeout >= 0:
        raise ValueError(f"timeout={timeout!r}: seconds, 0 or more, or None")
    return _native.Patient(timeout)
