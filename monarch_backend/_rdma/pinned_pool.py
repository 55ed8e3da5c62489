"""Staging memory: pinned memory of a host, registered with its NICs, through which a GPU's memory goes that they do not
reach.

An owner lends each process that wants some of its own, which nobody else ever gets: the borrower's NIC may write to it
until the connection of the two is closed. It is cut into slots; which of them is in use is the borrower's business.
What is copied, and when, is routes/gpu_staged.py's and csrc/memory/pinned_staging.h's.
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
"""Of one process's staging memory: two slots may be on the wire while the GPUs copy the others."""

MAX_BORROWERS = 64
"""Processes to which staging memory is lent at a time: it is locked into RAM."""

MAX_IDLE_BUFFERS = 8
"""Of one's own, that are kept for the next transfers."""


class _Loan(msgspec.Struct, frozen=True, array_like=True):
    """As it travels."""

    region: bytes
    key: int
    slot_bytes: int
    slots: int
    why: str  # it is needed


class _Lent:
    """What stands behind a loan."""

    def __init__(self, memory: Any, region: Region, server: Any) -> None:
        self.memory, self.region, self.server = memory, region, server
        self.key = secrets.randbits(64)


class PinnedPool:
    """For the processes that want this one's memory."""

    def __init__(self, verbs: Verbs, tcp: Tcp) -> None:
        self._verbs, self._tcp = verbs, tcp
        self._lock = threading.Lock()
        self._lent: dict[str, _Lent] = {}  # by the borrower's token

    def lend(self, token: str, device: int) -> bytes:
        """What that process needs to know of its staging memory; ``device``: the GPU for which it wants it first.

        Raises RDMAError, VerbsError and GpuFailure.
        """
        with self._lock:
            lent = self._lent.get(token)
            if lent is None:
                lent = self._lent[token] = self._new(device)
        packed = lent.region.to_bytes()
        return msgspec.msgpack.encode(_Loan(packed, lent.key, SLOT_BYTES, SLOTS, self._verbs.why_staged))

    def _new(self, device: int) -> _Lent:
        if len(self._lent) >= MAX_BORROWERS:
            raise RDMAError(f"staging memory is lent to {MAX_BORROWERS} processes already, which is the most")
        memory = _native.PinnedMemory(device, SLOTS * SLOT_BYTES)
        lent = _Lent(memory, self._verbs.lend(memory), self._tcp.server())
        lent.server.add_staging(lent.key, memory, SLOT_BYTES)
        return lent

    def forget(self, token: str) -> None:
        """That process is gone, its connection closed, or it wants it no more."""
        with self._lock:
            lent = self._lent.pop(token, None)
        if lent is not None:
            lent.server.remove_staging(lent.key)
            self._verbs.take_back(lent.region)  # before the memory is somebody else's

    def close(self) -> None:
        """All of it."""
        for token in list(self._lent):
            self.forget(token)


class PinnedLease:
    """Another process's staging memory, of which transfers take slots."""

    def __init__(self, loan: bytes) -> None:
        """Raises VerbsError for what is no loan."""
        try:
            said = msgspec.msgpack.decode(loan, type=_Loan)
        except msgspec.DecodeError as error:
            raise VerbsError(f"its owner has lent what is no staging memory: {error}") from None
        self.region, self.key, self.why = Region.from_bytes(said.region), said.key, said.why
        self.slot_bytes, self.slots = said.slot_bytes, said.slots
        self._free = deque(range(said.slots))
        self._unsure: set[int] = set()
        self._changed = threading.Condition()
        self._waiting = 0

    def take(self, most: int, patient: Any) -> list[int]:
        """Slots, one at least, when there are some; none once nobody waits any more."""
        with self._changed:
            self._waiting += 1
            while not self._free and not patient.over():
                self._changed.wait(CHECK_INTERVAL_S)
            self._waiting -= 1
            if not self._free:
                return []
            return [self._free.popleft() for _ in range(min(most, len(self._free)))]

    @property
    def is_short(self) -> bool:
        """Somebody waits for a slot: who has several may spare one."""
        return self._waiting > 0

    def give(self, slot: int) -> None:
        """It is free again."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify()

    def is_unsure(self, slot: int) -> bool:
        """Its owner may still be about to copy to or from it, for a transfer that was given up."""
        return slot in self._unsure

    def doubt(self, slot: int) -> None:
        """From now on it `is_unsure`."""
        self._unsure.add(slot)

    def trust(self, slot: int) -> None:
        """Its owner has said that nothing from before will touch it."""
        self._unsure.discard(slot)


class PinnedPoolClient:
    """Pinned memory of this process for its own transfers, each of which takes a piece, and returns it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Any] = []

    def take(self, device: int, nbytes: int) -> Any:
        """Raises GpuFailure."""
        with self._lock:
            for place, memory in enumerate(self._idle):
                if memory.nbytes >= nbytes:
                    return self._idle.pop(place)
        return _native.PinnedMemory(device, nbytes)

    def give(self, memory: Any) -> None:
        """Nobody copies to or from it any more, and no NIC either."""
        with self._lock:
            if len(self._idle) < MAX_IDLE_BUFFERS:
                self._idle.append(memory)

    def close(self) -> None:
        """Those that nobody has."""
        with self._lock:
            self._idle.clear()
