"""Messages of two engines as bytes: a region, a connect request with queue pairs, its reply.

Messages are typed, bounded and versioned, and not trusted. Other modules authenticate the sender.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from monarch_backend._verbs.errors import VerbsError

WIRE_VERSION = 1
MAX_MESSAGE_BYTES = 64 << 10
"""Length of a message."""

MOST_LANES, MOST_ENDPOINTS = 128, 16

ROCE_V1, ROCE_V2, INFINIBAND = 1, 2, 3
"""Kinds of GIDs."""

_U8 = Annotated[int, Meta(ge=0, le=0xFF)]
_U16 = Annotated[int, Meta(ge=0, le=0xFFFF)]
_U24 = Annotated[int, Meta(ge=0, le=0xFFFFFF)]
_U32 = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
_Size = Annotated[int, Meta(ge=1)]
_Address = Annotated[int, Meta(ge=0)]
_Raw = Annotated[bytes, Meta(min_length=16, max_length=16)]
_Nonce = Annotated[bytes, Meta(min_length=8, max_length=8)]
_Reads = Annotated[int, Meta(ge=1, le=0xFF)]


class Gid(msgspec.Struct, frozen=True, array_like=True):
    index: _U16
    kind: Annotated[int, Meta(ge=1, le=3)]
    raw: _Raw


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """A port of a device, and its limits."""

    nic: _U8  # index among its process's devices
    device: Annotated[str, Meta(min_length=1, max_length=64)]
    port: Annotated[int, Meta(ge=1, le=255)]
    ethernet: bool
    lid: _U16
    mtu: Annotated[int, Meta(ge=1, le=5)]
    reads_in: _Reads
    reads_out: _Reads
    gids: Annotated[list[Gid], Meta(max_length=64)]


class QpEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """A queue pair that waits for its other end."""

    endpoint: _U8
    number: _U24
    psn: _U24


class ConnectRequest(msgspec.Struct, frozen=True, array_like=True):
    nonce: _Nonce
    endpoints: Annotated[list[Endpoint], Meta(min_length=1, max_length=MOST_ENDPOINTS)]
    ends: Annotated[list[QpEndpoint], Meta(min_length=1, max_length=MOST_LANES)]


class Pairing(msgspec.Struct, frozen=True, array_like=True):
    """A queue pair of the serving side, for one in the connect request."""

    lane: _U8  # its index in the connect request
    nic: _U8  # of the serving side; its keys are valid
    number: _U24
    psn: _U24
    mtu: Annotated[int, Meta(ge=1, le=5)]
    reads: _Reads  # READs that the requesting side may have in flight
    gid_index: _U16  # of the requesting side
    gid: _Raw  # of the serving side
    lid: _U16
    is_global: bool


class ConnectReply(msgspec.Struct, frozen=True, array_like=True):
    nonce: _Nonce
    pairings: Annotated[list[Pairing], Meta(min_length=1, max_length=MOST_LANES)]


class Region(msgspec.Struct, frozen=True, array_like=True):
    """Memory of a process that others may access, with its keys by device. They get it as bytes."""

    id: _Address
    address: _Address
    nbytes: _Size
    writable: bool
    keys: Annotated[list[_U32], Meta(min_length=1, max_length=MOST_ENDPOINTS)]

    def __repr__(self) -> str:
        return f"<Region of {self.nbytes} bytes, {'writable' if self.writable else 'read-only'}>"

    def to_bytes(self) -> bytes:
        return pack(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Region:
        """Parse a region of another process. Raises VerbsError."""
        return unpack(Region, data)


_MAGIC = {ConnectRequest: b"mvof", ConnectReply: b"mvan", Region: b"mvre"}
_DECODERS = {kind: msgspec.msgpack.Decoder(kind) for kind in _MAGIC}
_encode = msgspec.msgpack.Encoder().encode
_M = TypeVar("_M", ConnectRequest, ConnectReply, Region)


def pack(message: _M) -> bytes:
    return _MAGIC[type(message)] + bytes([WIRE_VERSION]) + _encode(message)


def unpack(kind: type[_M], data: bytes) -> _M:
    """Parse a message. Raises VerbsError for other bytes, and for another version."""
    name = {ConnectRequest: "offer", ConnectReply: "answer", Region: "region"}[kind]
    if not 5 < len(data) <= MAX_MESSAGE_BYTES:
        raise VerbsError(f"{len(data)} bytes are no {name}: they were cut off, or are something else")
    if data[:4] != _MAGIC[kind]:
        raise VerbsError(f"bytes that begin with {bytes(data[:4])!r} are no {name}")
    if data[4] != WIRE_VERSION:
        raise VerbsError(
            f"the {name} is of version {data[4]}, and this process speaks {WIRE_VERSION}: install the same release of "
            "monarch_backend on all hosts"
        )
    try:
        return _DECODERS[kind].decode(memoryview(data)[5:])  # type: ignore[no-any-return]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise VerbsError(f"the {name} cannot be read: {error}") from error
