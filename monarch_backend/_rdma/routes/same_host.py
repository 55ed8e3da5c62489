"""Routes to memory of this process and of other processes of its host, on top of csrc/memory/same_host.h."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from monarch_backend._actor.runtime import Runtime
from monarch_backend._rdma import gpu_memory
from monarch_backend._rdma.cuda_ipc import Lent
from monarch_backend._rdma.handle import Handle
from monarch_backend._rdma.local_memory import CPU
from monarch_backend._rdma.registrations import Registry
from monarch_backend._rdma.route_protocol import DONE, LOST, Result, Segment

INLINE_MAX_BYTES = 1 << 20
"""Bytes up to which a copy runs on the caller's thread at once."""

MAPPED, KERNEL, THREAD, GPU, LENT, UNSEEN = range(6)
"""Values of enum Way (csrc/memory/same_host.h)."""


class LocalRoute:
    """Route to memory of this process."""

    name = "this process"

    def __init__(self, registry: Registry) -> None:
        self._native = registry.native

    def completes_inline(self, handle: Handle, nbytes: int, atomic: bool) -> bool:
        """See Route."""
        return nbytes <= INLINE_MAX_BYTES

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
    """Route to memory of a process of this host.

    The copy uses a mapping, the kernel (process_vm_readv), a GPU, or a thread of that process.
    """

    name = "same host"

    def __init__(self, owner: Runtime, registry: Registry, say: Callable[[Handle, str], None]) -> None:
        self._native, self._say = registry.native, say
        self._lent = Lent(owner, registry) if registry.maps_gpus else None
        self._asks_kernel = registry.asks_kernel
        self.met: set[str] = set()
        """Processes whose CPU memory was reached, and whose way was logged."""
        self._saying = threading.Lock()
        self._said: set[tuple[str, str]] = set()  # process and logged text, for GPU memory

    def completes_inline(self, handle: Handle, nbytes: int, atomic: bool) -> bool:
        """See Route."""
        if nbytes > INLINE_MAX_BYTES:
            return False
        way = self._native.way(handle.token, handle.ticket)
        return way in (MAPPED, GPU, LENT) or (way == KERNEL and not atomic)

    def move(self, handle: Handle, write: bool, segments: Sequence[Segment], patient: Any, keep: Any) -> Result:
        """See Route."""
        result = Result(*self._native.move(handle.token, handle.ticket, write, segments, patient))
        if handle.device != CPU:
            self._look_after(handle, result)
        elif handle.token not in self.met:
            self._say_way(handle, result)
        return result

    def change(self, handle: Handle, access: int, offset: int, operand: int, expected: int, patient: Any) -> Result:
        """See Route."""
        result = Result(*self._native.change(handle.token, handle.ticket, access, offset, operand, expected, patient))
        if handle.device == CPU and handle.token not in self.met:
            self._say_way(handle, result)
        return result

    def forget(self, token: str) -> None:
        """Forget a process that has ended, and unmap its memory."""
        self._native.sweep()
        if self._lent is not None:
            self._lent.forget(token)
        self.met.discard(token)
        self._said = {said for said in self._said if said[0] != token}

    def _say_way(self, handle: Handle, result: Result) -> None:
        """Log the way to CPU memory once, with the first transfer: before it the way is unknown."""
        with self._saying:
            if handle.token in self.met or result.outcome == LOST:
                return
            if self._native.way(handle.token, handle.ticket) < 0:
                return
            self.met.add(handle.token)
        self._say(handle, f"{self.name}, {self.way(handle)}")

    def _look_after(self, handle: Handle, result: Result) -> None:
        """Log the way to GPU memory. If the driver could not map it, ask torch for another way."""
        if self._lent is not None:
            self._lent.tidy()
            if result.outcome == DONE and self._native.way(handle.token, handle.ticket) == THREAD:
                self._lent.want(handle)
        said = handle.token, self.way(handle)
        if said not in self._said:
            self._said.add(said)
            self._say(handle, f"{self.name}, {said[1]}")

    def way(self, handle: Handle) -> str:
        """Return the way as text for messages."""
        found = self._native.way(handle.token, handle.ticket)
        why = "the kernel forbids process_vm_readv" if self._asks_kernel else "MONARCH_CMA=0"
        if handle.device != CPU:
            also = self._lent.why_not(handle) if self._lent is not None else ""
            why = "through memory of the host, since " + self._native.why_not_mapped(handle.token, handle.ticket)
            why += f", nor torch: {also}" if also else ""
        ways = (
            "its memory is mapped here",
            "process_vm_readv",
            f"copied by its own thread: {why}",
            f"{gpu_memory.api()} IPC",
            f"{gpu_memory.api()} IPC, by torch",
        )
        return ways[found] if 0 <= found < UNSEEN else "which of its ways is seen with the first transfer"
