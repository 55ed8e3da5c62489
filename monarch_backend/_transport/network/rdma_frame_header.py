"""Layout of a frame whose body is read by a NIC of the receiver, as a whole or in part.

After the head of such a frame come: the number of bytes of the notes, the notes, the prefix, and the parts of the body
that are sent on the connection. The notes name the parts that the NIC reads. rdma_reader.py reads them, and
rdma_send.py has the protocol.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from monarch_backend._transport.network.session import SessionError

MIN_PART_BYTES = 64 << 10
"""Bytes from which a part is registered, or fewer if the minimum for a frame is lower."""

MAX_PARTS = 256
"""Registered parts of one frame. Further parts are sent on the connection."""

_LENGTH = struct.Struct("!I")


class Part(NamedTuple):
    """Part of a body: its offset and bytes, and the encoded region from which it is read."""

    offset: int
    nbytes: int
    region: bytes


_decoder = msgspec.msgpack.Decoder(list[tuple[int, int, bytes]])


def choose(body: Sequence[Any], rdma_eligible: int, least: int) -> dict[int, memoryview]:
    """Choose parts of a body for a NIC, by offset, among the last ``rdma_eligible`` parts.

    Return none if they have fewer than ``least`` bytes together.

    >>> list(choose([b"pickle", bytes(70_000), b"small", bytes(80_000)], 3, 100_000))
    [6, 70011]
    """
    found: dict[int, memoryview] = {}
    at, first = 0, len(body) - rdma_eligible
    for index, part in enumerate(body):
        view = memoryview(part)
        if index >= first and view.nbytes >= min(MIN_PART_BYTES, least) and len(found) < MAX_PARTS:
            found[at] = view
        at += view.nbytes
    return found if sum(view.nbytes for view in found.values()) >= least else {}


def rest(body: Sequence[Any], rdma_parts: dict[int, memoryview]) -> list[Any]:
    """Return the parts that are sent on the connection."""
    left, at = [], 0
    for part in body:
        if (
            at not in rdma_parts or rdma_parts[at].nbytes != memoryview(part).nbytes
        ):  # an empty part has the same offset
            left.append(part)
        at += memoryview(part).nbytes
    return left


def pack(parts: Sequence[Part]) -> bytes:
    notes = msgspec.msgpack.encode(parts)
    return _LENGTH.pack(len(notes)) + notes


def unpack(prefix: bytes, size: int) -> tuple[list[Part], bytes]:
    """Return the parts of a body of ``size`` bytes, and the prefix. Raises SessionError for invalid notes.

    >>> unpack(pack([Part(2, 3, b"r")]) + b"prefix", 9)
    ([Part(offset=2, nbytes=3, region=b'r')], b'prefix')
    """
    end = _LENGTH.size + int.from_bytes(prefix[: _LENGTH.size], "big")
    if len(prefix) < end:
        raise SessionError("a frame in parts that is cut off")
    try:
        parts = [Part(*row) for row in _decoder.decode(prefix[_LENGTH.size : end])]
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError) as error:
        raise SessionError(f"a frame in parts that can't be read: {error}") from None
    at = 0
    for part in parts:
        if part.offset < at or part.nbytes < 1:
            raise SessionError("a frame in parts that do not add up")
        at = part.offset + part.nbytes
    if not parts or len(parts) > MAX_PARTS or at > size:
        raise SessionError("a frame in parts that do not add up")
    return parts, prefix[end:]


def gaps(parts: Sequence[Part], size: int) -> list[tuple[int, int]]:
    """Return the ranges between the parts: these bytes come on the connection.

    >>> gaps([Part(2, 3, b""), Part(5, 1, b"")], 9)
    [(0, 2), (6, 9)]
    """
    found, at = [], 0
    for part in parts:
        if part.offset > at:
            found.append((at, part.offset))
        at = part.offset + part.nbytes
    return [*found, (at, size)] if at < size else found
