"""Bytes of a message: its body, the buffers beside the body, and pieces of both."""

from __future__ import annotations

import os
import pickle
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from monarch_backend._transport.local.frames import FrameError, decode

_Head = tuple[int, int, int, int, int, bytes, list[int], int]
_decoder = msgspec.msgpack.Decoder(_Head)


def size_of(body: Any, buffers: Any) -> int:
    """Return the bytes of a body (bytes, a view, or a list of them) and of its buffers."""
    size = len(body) if isinstance(body, (bytes, bytearray, memoryview)) else sum(len(chunk) for chunk in body)
    return size + sum(memoryview(buffer).nbytes for buffer in buffers) if buffers else size


def own(body: Any) -> Any:
    """Return the body as bytes; copies memory that the caller can still change."""
    if isinstance(body, bytes):
        return body
    return bytes(body) if isinstance(body, (bytearray, memoryview)) else b"".join(body)


def own_all(buffers: Any) -> list[bytearray] | None:
    return [bytearray(buffer) for buffer in buffers] if buffers else None


def cut(body: Any, buffers: Sequence[Any] | None, most: int) -> tuple[list[int], deque[tuple[bool, memoryview]]]:
    """Cut a body and its buffers into pieces of at most ``most`` bytes.

    Return the bytes of the body and of each buffer, and the pieces in order. With each piece comes whether it belongs
    to a buffer: buffers may be sent in another way than a body.

    >>> sizes, pieces = cut([b"abc", b"d"], [bytearray(b"xyz")], 2)
    >>> sizes, [bytes(piece) for _, piece in pieces], [of_buffer for of_buffer, _ in pieces].index(True)
    ([4, 3], [b'ab', b'c', b'd', b'xy', b'z'], 3)
    """
    chunks = [body] if isinstance(body, (bytes, bytearray, memoryview)) else list(body)
    sizes = [sum(len(c) for c in chunks), *(memoryview(b).nbytes for b in buffers or ())]
    pieces = deque(
        (index >= len(chunks), view[start : start + most])
        for index, view in enumerate(memoryview(part).cast("B") for part in [*chunks, *(buffers or ())])
        for start in range(0, view.nbytes, most)
    )
    return sizes, pieces


class _Discarded:
    """Replaces a bytearray that could not be allocated: has its length, and drops the bytes written to it."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __setitem__(self, part: slice, content: Any) -> None:
        pass


class _Refused(bytes):
    """A body that raises MemoryError when it is unpickled.

    Its length is that of the message that it replaces, so the receiver returns the credit that the sender took.
    """

    _size: int

    @classmethod
    def of(cls, size: int) -> _Refused:
        made = cls(pickle.dumps(_NoRoom(size)))
        made._size = size
        return made

    def __len__(self) -> int:
        return self._size


class _NoRoom:
    def __init__(self, size: int) -> None:
        self._size = size

    def __reduce__(self) -> Any:
        return _raise_no_room, (self._size, os.getpid())


def _raise_no_room(size: int, pid: int) -> None:
    raise MemoryError(f"process {pid} has no memory for a message of {size} bytes")


class Assembly:
    def __init__(self, head: bytes) -> None:
        self._head: _Head = decode(_decoder, head, "the head of a frame in pieces")
        sizes = self._head[6]
        if not sizes or min(sizes) < 0 or sum(sizes) > sys.maxsize:
            raise FrameError(f"a frame in pieces of {sizes[:4]} bytes")
        self._parts: list[Any]
        try:
            self._parts = [bytearray(size) for size in sizes]
            self._has_room = True
        except MemoryError:  # the link stays up: other messages, and this one's error reply, must still be delivered
            self._parts = [_Discarded(size) for size in sizes]
            self._has_room = False
        self._which = self._at = self._next = 0
        self._missing = sum(self._head[6])

    def add(self, number: int, piece: Any) -> bool:
        """Store the next piece. Return False if it is out of order or too long."""
        if number != self._next:
            return False
        self._next += 1
        while self._which < len(self._parts) and self._at == len(self._parts[self._which]):
            self._which, self._at = self._which + 1, 0
        if self._which == len(self._parts) or self._at + len(piece) > len(self._parts[self._which]):
            return False
        self._parts[self._which][self._at : self._at + len(piece)] = piece
        self._at += len(piece)
        self._missing -= len(piece)
        return True

    @property
    def complete(self) -> bool:
        return self._next == self._head[7]

    def frame(self, link: int, epoch: int) -> tuple[Any, ...]:
        """Return the frame as a link's event. Raises FrameError if there are fewer bytes than announced.

        If this process had no memory for the frame, its body raises MemoryError when it is unpickled.
        """
        if self._missing:
            raise FrameError(f"a frame in pieces that lacks {self._missing} bytes")
        kind, target, ref, seq, rank, prefix, sizes, _ = self._head
        body, *buffers = self._parts if self._has_room else [_Refused.of(sum(sizes))]
        return (link, kind, target, ref, seq, rank, epoch, prefix, body, buffers or None)
