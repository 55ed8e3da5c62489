"""Routes to memory of this process and of other processes of its host, on top of csrc/memory/same_host.h."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from monarch_backend._actor.runtime import Runtime
from monarch_backend._rdma import gpu_memory
from monarch_backend._rdma.local_memory import CPU
from monarch_backend._rdma.registrations import Handle, Registry
from monarch_backend._rdma.routes.cuda_ipc import TorchMappings
from monarch_backend._rdma.routes.protocol import DONE, LOST, AtomicOp, ReadWriteOp, Result

INLINE_MAX_BYTES = 1 << 20
"""Bytes up to which a copy runs on the caller's thread at once."""

MAPPED, KERNEL, THREAD, GPU, EXTERNAL, UNKNOWN = range(6)
"""Values of enum CopyMethod (csrc/memory/same_host.h)."""


class LocalRoute:
    name = "this process"

    def __init__(self, registry: Registry) -> None:
        self._native = registry.native

    def completes_inline(self, handle: Handle, nbytes: int, atomic: bool) -> bool:
        return nbytes <= INLINE_MAX_BYTES

    def run(self, part: ReadWriteOp | AtomicOp, scope: Any, keep: Any) -> Result:
        if over := scope.outcome():
            return Result(over, 0, 0, 0)
        ticket = part.handle.ticket
        if isinstance(part, ReadWriteOp):
            return Result(*self._native.move_local(ticket, part.write, part.segments))
        return Result(*self._native.change_local(ticket, part.access, part.offset, part.operand, part.expected))


class SameHost:
    """Route to memory of a process of this host.

    The copy uses a mapping, the kernel (process_vm_readv), a GPU, or a thread of that process.
    """

    name = "same host"

    def __init__(self, owner: Runtime, registry: Registry, say: Callable[[Handle, str], None]) -> None:
        self._native, self._say = registry.native, say
        self._torch_mappings = TorchMappings(owner, registry) if registry.maps_gpus else None
        self._asks_kernel = registry.asks_kernel
        self.reached: set[str] = set()
        """Processes whose CPU memory was reached, and whose copy method was logged."""
        self._logging = threading.Lock()
        self._logged: set[tuple[str, str]] = set()  # process and logged text, for GPU memory

    def completes_inline(self, handle: Handle, nbytes: int, atomic: bool) -> bool:
        if nbytes > INLINE_MAX_BYTES:
            return False
        method = self._native.copy_method(handle.token, handle.ticket)
        return method in (MAPPED, GPU, EXTERNAL) or (method == KERNEL and not atomic)

    def run(self, part: ReadWriteOp | AtomicOp, scope: Any, keep: Any) -> Result:
        handle = part.handle
        token, ticket = handle.token, handle.ticket
        if isinstance(part, ReadWriteOp):
            result = Result(*self._native.move(token, ticket, part.write, part.segments, scope))
        else:
            numbers = part.access, part.offset, part.operand, part.expected
            result = Result(*self._native.change(token, ticket, *numbers, scope))
        if handle.device == CPU:
            if token not in self.reached:
                self._log_copy_method(handle, result)
        elif isinstance(part, ReadWriteOp):
            self._log_gpu_method(handle, result)
        return result

    def forget(self, token: str) -> None:
        self._native.sweep()
        if self._torch_mappings is not None:
            self._torch_mappings.forget(token)
        self.reached.discard(token)
        self._logged = {logged for logged in self._logged if logged[0] != token}

    def _log_copy_method(self, handle: Handle, result: Result) -> None:
        """Log the copy method of CPU memory once, with the first transfer: before it the method is unknown."""
        with self._logging:
            if handle.token in self.reached or result.outcome == LOST:
                return
            if self._native.copy_method(handle.token, handle.ticket) < 0:
                return
            self.reached.add(handle.token)
        self._say(handle, f"{self.name}, {self.copy_method(handle)}")

    def _log_gpu_method(self, handle: Handle, result: Result) -> None:
        """Log the copy method of GPU memory. If the driver could not map it, ask torch to map it."""
        if self._torch_mappings is not None:
            self._torch_mappings.unmap_unused()
            if result.outcome == DONE and self._native.copy_method(handle.token, handle.ticket) == THREAD:
                self._torch_mappings.request(handle)
        logged = handle.token, self.copy_method(handle)
        if logged not in self._logged:
            self._logged.add(logged)
            self._say(handle, f"{self.name}, {logged[1]}")

    def copy_method(self, handle: Handle) -> str:
        found = self._native.copy_method(handle.token, handle.ticket)
        why = "the kernel forbids process_vm_readv" if self._asks_kernel else "MONARCH_CMA=0"
        if handle.device != CPU:
            also = self._torch_mappings.why_not(handle) if self._torch_mappings is not None else ""
            why = "through memory of the host, since " + self._native.why_not_mapped(handle.token, handle.ticket)
            why += f", nor torch: {also}" if also else ""
        methods = (
            "its memory is mapped here",
            "process_vm_readv",
            f"copied by its own thread: {why}",
            f"{gpu_memory.api()} IPC",
            f"{gpu_memory.api()} IPC, by torch",
        )
        return methods[found] if 0 <= found < UNKNOWN else "how it is copied is known after the first transfer"
