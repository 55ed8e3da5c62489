"""Routes to memory of this process and of others of this host: csrc/memory/near.h does the work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monarch_backend.rdma._handle import Handle
from monarch_backend.rdma._registry import Registry
from monarch_backend.rdma._route import Result, Segment

QUICK = 1 << 20
"""Bytes that are copied at once, on the caller's thread."""

MAPPED, KERNEL = 0, 1
"""As enum Way (csrc/memory/near.h)."""


class Here:
    """To memory of this very process."""

    name = "this process"

    def __init__(self, registry: Registry) -> None:
        self._native = registry.native

    def is_quick(self, handle: Handle, nbytes: int, atomic: bool) -> bool:
        """See Route."""
        return nbytes <= QUICK

    def move(self, handle: Handle, write: bool, segments: Sequence[Segment], patient: Any, keep: Any) -> Result:
        """See Route."""
        if over := patient.over():
            return Result(over, 0, 0, 0)
        return Result(*self._native.move_here(handle.ticket, write, segments))

    def change(
        self,
        handle: Handle,
        access: int,
        offset: int,
        operand: int,
        expected: int,
        patient: Any,
    ) -> Result:
        """See Route."""
        if over := patient.over():
            return Result(over, 0, 0, 0)
        return Result(*self._native.change_here(handle.ticket, access, offset, operand, expected))


class SameHost:
    """To memory of a process of this host: mapped, by the kernel, or by a thread of that process."""

    name = "same host"

    def __init__(self, registry: Registry) -> None:
        self._native = registry.native

    def is_quick(self, handle: Handle, nbytes: int, atomic: bool) -> bool:
        """See Route."""
        if nbytes > QUICK:
            return False
        way = self._native.way(handle.token, handle.ticket)
        return way == MAPPED or (way == KERNEL and not atomic)

    def move(self, handle: Handle, write: bool, segments: Sequence[Segment], patient: Any, keep: Any) -> Result:
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
        return ways[found] if found >= 0 else "which of its ways is seen with the first transfer"
