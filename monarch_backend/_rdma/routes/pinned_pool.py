"""Staging memory: pinned host memory, registered with NICs, for transfers of GPU memory that the NICs do not reach.

An owner lends each borrowing process memory of its own. That memory is never lent to another process, because the
borrower's NIC may write to it until their connection is closed. It is divided into slots, and the borrower decides
which slots are in use. routes/gpu_staged.py and csrc/memory/pinned_staging.h do the copying.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from typing import Any

import msgspec

from monarch_backend import _native
from monarch_backend._rdma.control_rpc import CHECK_INTERVAL_S
from monarch_backend._rdma.errors import RDMAError
from monarch_backend._rdma.routes.tcp import Tcp
from monarch_backend._rdma.routes.verbs import Verbs
from monarch_backend._verbs import Region, VerbsError

SLOTS, SLOT_BYTES = 4, 2 << 20
"""Slots of one process's staging memory, and their size. Two may be on the wire while the GPUs copy the others."""

MAX_BORROWERS = 64
"""Processes to which staging memory is lent at a time. The limit exists because the memory is locked into RAM."""

MAX_IDLE_BUFFERS = 8
"""Buffers of this process that are kept for its next transfers."""


class _LeaseDescription(msgspec.Struct, frozen=True, array_like=True):
    region: bytes
    key: int
    slot_bytes: int
    slots: int
    why: str  # the reason for staging, as text


class _LentMemory:
    def __init__(self, memory: Any, region: Region, server: Any) -> None:
        self.memory, self.region, self.server = memory, region, server
        self.key = secrets.randbits(64)


class PinnedPool:
    """Staging memory that this process lends to processes that access its GPU memory."""

    def __init__(self, verbs: Verbs, tcp: Tcp) -> None:
        self._verbs, self._tcp = verbs, tcp
        self._lock = threading.Lock()
        self._lent: dict[str, _LentMemory] = {}  # by the borrower's token

    def lend(self, token: str, device: int) -> bytes:
        """Return the description of the process's staging memory. ``device``: the GPU of its first transfer.

        Raises RDMAError, VerbsError and GpuFailure.
        """
        with self._lock:
            lent = self._lent.get(token)
            if lent is None:
                lent = self._lent[token] = self._new(device)
        packed = lent.region.to_bytes()
        return msgspec.msgpack.encode(_LeaseDescription(packed, lent.key, SLOT_BYTES, SLOTS, self._verbs.why_staged))

    def _new(self, device: int) -> _LentMemory:
        if len(self._lent) >= MAX_BORROWERS:
            raise RDMAError(f"staging memory is lent to {MAX_BORROWERS} processes already, which is the most")
        memory = _native.PinnedMemory(device, SLOTS * SLOT_BYTES)
        region = self._verbs.opened().expose(memory.address, memory.nbytes, memory)
        lent = _LentMemory(memory, region, self._tcp.server())
        lent.server.add_staging(lent.key, memory, SLOT_BYTES)
        return lent

    def forget(self, token: str) -> None:
        """Take back the memory of a process that has ended, has lost its connection, or does not need it any more."""
        with self._lock:
            lent = self._lent.pop(token, None)
        if lent is not None:
            lent.server.remove_staging(lent.key)
            self._verbs.opened().release(lent.region)  # before the memory is freed and allocated again

    def close(self) -> None:
        for token in list(self._lent):
            self.forget(token)


class PinnedLease:
    """Lease of another process's staging memory. Transfers take slots from it."""

    def __init__(self, description: bytes) -> None:
        """Decode the owner's description. Raises VerbsError for an invalid one."""
        try:
            decoded = msgspec.msgpack.decode(description, type=_LeaseDescription)
        except msgspec.DecodeError as error:
            raise VerbsError(f"its owner has lent what is no staging memory: {error}") from None
        self.region, self.key, self.why = Region.from_bytes(decoded.region), decoded.key, decoded.why
        self.slot_bytes, self.slots = decoded.slot_bytes, decoded.slots
        self._free = deque(range(decoded.slots))
        self.unsure: set[int] = set()
        """Slots to or from which the owner may still copy, for an abandoned transfer."""
        self._changed = threading.Condition()
        self._waiting = 0

    def take(self, most: int, scope: Any) -> list[int]:
        """Wait for free slots and take up to ``most`` of them. Return none once ``scope`` is over."""
        with self._changed:
            self._waiting += 1
            while not self._free and not scope.outcome():
                self._changed.wait(CHECK_INTERVAL_S)
            self._waiting -= 1
            if not self._free:
                return []
            return [self._free.popleft() for _ in range(min(most, len(self._free)))]

    @property
    def is_short(self) -> bool:
        """Whether a transfer waits for a slot. Transfers with several slots then give one back."""
        return self._waiting > 0

    def give(self, slot: int) -> None:
        with self._changed:
            self._free.append(slot)
            self._changed.notify()


class PinnedPoolClient:
    """Pool of pinned memory for this process's own transfers. Each takes a buffer and returns it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Any] = []

    def take(self, device: int, nbytes: int) -> Any:
        """Take a buffer of at least ``nbytes``. Raises GpuFailure."""
        with self._lock:
            for index, memory in enumerate(self._idle):
                if memory.nbytes >= nbytes:
                    return self._idle.pop(index)
        return _native.PinnedMemory(device, nbytes)

    def give(self, memory: Any) -> None:
        """Return a buffer that no copy and no NIC uses any more."""
        with self._lock:
            if len(self._idle) < MAX_IDLE_BUFFERS:
                self._idle.append(memory)

    def close(self) -> None:
        with self._lock:
            self._idle.clear()
