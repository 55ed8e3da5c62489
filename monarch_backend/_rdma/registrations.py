"""Registry of this process's registered memory. It keeps the memory alive and names it by tickets."""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from monarch_backend import _native
from monarch_backend._actor.runtime import Runtime, program
from monarch_backend._actor.runtime_extension import RuntimeExtension
from monarch_backend._core import env, platform
from monarch_backend._rdma.errors import RDMAError
from monarch_backend._rdma.local_memory import LocalMemory

DROP_TIMEOUT_S = 5.0
"""Seconds that `drop` waits for transfers in progress."""

log = logging.getLogger("monarch_backend")

_WAS_NOT_THERE, _STILL_USED = 1, 2

Ticket = tuple[int, int, int]
"""Slot, epoch and key of a registration (csrc/memory/registration_table.h).

A process that has the ticket may access the memory.
"""


class Handle(NamedTuple):
    """A range of registered memory of any process: its owner, its ticket, and the routes to it."""

    token: str  # of the process that registered it
    pid: int
    host: str
    ticket: Ticket
    offset: int  # of the range in the registration, in bytes
    nbytes: int
    device: str
    writable: bool
    ways: tuple[tuple[str, int], ...] = ()  # addresses and ports of the owner's server, if there is one
    encrypted: bool = False  # connections to that server use TLS
    verbs: bytes = b""  # the packed Region for NICs, if a NIC of the owner reaches the memory
    staged: bool = False  # the owner has NICs that do not reach the memory, so transfers use staging memory

    def __str__(self) -> str:
        return f"{self.nbytes} bytes of process {self.pid} on host {self.host}"

    def part(self, start: int, stop: int) -> Handle:
        return self._replace(offset=self.offset + start, nbytes=stop - start)


class Registry(RuntimeExtension):
    def __init__(self, owner: Runtime) -> None:
        host = getattr(owner.links, "host", None)
        if host is None:
            raise RuntimeError("memory can't be registered in a simulation: its processes have none of their own")
        self.asks_kernel = bool(env.get("MONARCH_CMA"))
        self.maps_gpus = bool(env.get("MONARCH_GPU_IPC"))
        self.native = _native.Memory(host, self.asks_kernel, self.maps_gpus, _copying_threads())
        self.host = host
        self._program = weakref.ref(owner)
        # called when no transfer can start any more, while the memory still exists
        self.on_drop: list[Callable[[Ticket], None]] = []
        self._held: dict[Ticket, LocalMemory] = {}

    def add(self, memory: LocalMemory) -> Handle:
        """Register memory and keep it alive until it is dropped. Raises RDMAError if too many are registered."""
        owner = self._program()
        assert owner is not None
        try:
            ticket: Ticket = self.native.add(memory.address, memory.nbytes, memory.writable)
        except ValueError as error:  # std::length_error
            raise RDMAError(str(error)) from None
        self._held[ticket] = memory
        token = owner.router.token
        return Handle(
            token, owner.pid, owner.hosts.name_of(token), ticket, 0, memory.nbytes, memory.device, memory.writable
        )

    def drop(self, ticket: Ticket) -> bool:
        """End a registration and wait for its transfers in progress. Return False if it had ended before.

        Raises RDMAError if a transfer does not end in time. The memory is kept then; call `drop` again later.
        """
        found = self.native.drop(ticket, DROP_TIMEOUT_S)
        for let_go in self.on_drop:  # no transfer starts with it from now on
            let_go(ticket)
        if found == _STILL_USED:
            user = self.native.user_of(ticket) or os.getpid()
            raise RDMAError(
                f"process {user} is in the middle of a transfer with this memory and has not moved "
                f"for {DROP_TIMEOUT_S:g} s (is it stopped?): no process can start another one, and it stays "
                "allocated; call drop() again later"
            )
        return self._held.pop(ticket, None) is not None and found != _WAS_NOT_THERE

    def memory(self, ticket: Ticket) -> LocalMemory | None:
        return self._held.get(ticket)

    def told_to_drop(self, ticket: Ticket) -> None:
        """Drop memory on another process's request. Runs on a thread that may block."""
        try:
            self.drop(ticket)
        except RDMAError as error:
            log.warning("another process has dropped registered memory: %s", error)

    def count(self) -> int:
        return int(self.native.count())


def _copying_threads() -> int:
    """Return the number of this process's threads for one large copy between it and another process of its host."""
    return min(int(env.get("MONARCH_CMA_THREADS")), platform.usable_cpus())


def registry() -> Registry:
    runtime: Any = program()
    found: Registry = runtime.extensions.extend(Registry, lambda: Registry(runtime))
    return found


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an uninitialised CPU tensor in memory that the host's other processes have mapped.

    The arguments are those of ``torch.empty``. Once it is registered, processes of the same host read and write it at
    the full speed of a copy. For large tensors in other memory the kernel copies, which is two or three times slower.
    The memory is taken from the 4 GiB that large messages of this process also use, and is freed with the tensor.
    Raises RDMAError if it is exhausted.

    >>> from monarch_backend import rdma
    >>> weights = rdma.empty(2, 3).fill_(1.0)
    >>> weights.shape, weights.sum().item()
    (torch.Size([2, 3]), 6.0)
    """
    shape: Any = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    made = torch.empty(shape, dtype=dtype, device="meta")  # so that torch checks the arguments
    if made.numel() == 0:
        return torch.empty(made.shape, dtype=made.dtype, device="cpu")
    try:
        buffer = _native.ArenaBuffer(registry().host, math.prod(made.shape) * made.itemsize)
    except MemoryError:
        raise RDMAError(
            f"there is no room for {made.nbytes} bytes in the shared memory of this process: torch.empty has it, and "
            "can be registered as well"
        ) from None
    return torch.frombuffer(buffer, dtype=made.dtype).view(made.shape)
