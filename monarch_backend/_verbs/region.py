"""Regions: memory of a process that others may access."""

from __future__ import annotations

from typing import Any

from monarch_backend import _native
from monarch_backend._verbs import wire_format as messages
from monarch_backend._verbs.open_device import Device
from monarch_backend._verbs.providers.provider import Registration, destroy
from monarch_backend._verbs.wire_format import RegionRecord


class Region:
    """Memory of a process that others may access; they get its address and keys as bytes."""

    def __init__(self, record: RegionRecord) -> None:
        self.record = record
        self.id, self.address, self.nbytes, self.writable = record.id, record.address, record.nbytes, record.writable

    def __repr__(self) -> str:
        return f"<Region of {self.nbytes} bytes, {'writable' if self.writable else 'read-only'}>"

    def to_bytes(self) -> bytes:
        return messages.pack(self.record)

    @classmethod
    def from_bytes(cls, data: bytes) -> Region:
        """Parse a region of another process. Raises VerbsError."""
        return cls(messages.unpack(RegionRecord, data))


class ExposedMemory:
    """Local state of a region; keeps the owner of the memory alive."""

    def __init__(self, owner: Any, address: int, nbytes: int) -> None:
        self.owner, self.address, self.nbytes = owner, address, nbytes
        self.registrations: list[tuple[Registration, Device]] = []

    def close(self) -> None:
        for registration, device in self.registrations:
            device.retired.add(registration.rkey, self.address, self.nbytes)
        ended = [destroy(registration, "a region", device.name) for registration, device in self.registrations]
        if not all(ended):
            _native.keep_for_ever(self.owner)  # other processes may still access its memory, so it must not be reused
        self.registrations, self.owner = [], None
