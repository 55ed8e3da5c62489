"""What stands before a frame whose body is not all on the connection: which parts of it are read where they lie.

Layouts only. Bytes of such a frame, after its head: how many bytes the notes have, the notes, the prefix, and those
parts of the body that are not lent. Who reads what with which NIC is rdma_reader.py's, what is said about it
rdma_send.py's.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from monarch_backend._transport.network.session import SessionError

MIN_PART_BYTES = 64 << 10
"""Bytes from which a part is worth a registration of its own; fewer if fewer are worth a loan at all."""

MAX_PARTS = 256
"""Of a frame: the rest goes as ever."""

_LENGTH = struct.Struct("!I")


class Part(NamedTuple):
    """Of a body: where it is to be, and, as bytes, the region that it is read from."""

    offset: int
    nbytes: int
    region: bytes


_decoder = msgspec.msgpack.Decoder(list[tuple[int, int, bytes]])


def choose(body: Sequence[Any], lendable: int, least: int) -> dict[int, memoryview]:
    """Which of the last so many parts of a body are to be lent, by where they begin; none if that is not worth it.

    >>> list(choose([b"pickle", bytes(70_000), b"small", bytes(80_000)], 3, 100_000))
    [6, 70011]
    """
    found: dict[int, memoryview] = {}
    at, first = 0, len(body) - lendable
    for index, part in enumerate(body):
        view = memoryview(part)
        if index >= first and view.nbytes >= min(MIN_PART_BYTES, least) and len(found) < MAX_PARTS:
            found[at] = view
        at += view.nbytes
    return found if sum(view.nbytes for view in found.values()) >= least else {}


def rest(body: Sequence[Any], lent: dict[int, memoryview]) -> list[Any]:
    """The parts that are on the connection."""
    left, at = [], 0
    for part in body:
        if at not in lent or lent[at].nbytes != memoryview(part).nbytes:  # an empty part begins there, too
            left.append(part)
        at += memoryview(part).nbytes
    return left


def pack(parts: Sequence[Part]) -> bytes:
    """What stands before the prefix."""
    notes = msgspec.msgpack.encode(parts)
    return _LENGTH.pack(len(notes)) + notes


def unpack(prefix: bytes, size: int) -> tuple[list[Part], bytes]:
    """Of a body of so many bytes, and the prefix. Raises SessionError for what no host of ours would send.

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
    """From where to where the parts do not go: those bytes come on the connection.

    >>> gaps([Part(2, 3, b""), Part(5, 1, b"")], 9)
    [(0, 2), (6, 9)]
    """
    found, at = [], 0
    for part in parts:
        if part.offset > at:
            found.append((at, part.offset))
        at = part.offset + part.nbytes
    return [*found, (at, size)] if at < size else found
