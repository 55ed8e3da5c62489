"""The bytes of a message in the forms in which they come: a body, buffers beside it, pieces of both.

What they mean is no concern of this module, nor where they go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from monarch_backend.transport._frames import FrameError, decode

_Head = tuple[int, int, int, int, int, bytes, list[int], int]
_decoder = msgspec.msgpack.Decoder(_Head)


def size_of(body: Any, buffers: Any) -> int:
    """Bytes of a body (bytes, a view, or a list of them) and of its buffers."""
    size = len(body) if isinstance(body, (bytes, bytearray, memoryview)) else sum(len(chunk) for chunk in body)
    return size + sum(memoryview(buffer).nbytes for buffer in buffers) if buffers else size


def own(body: Any) -> Any:
    """Bytes that nobody else can change."""
    return (
        body
        if isinstance(body, bytes)
        else bytes(body)
        if isinstance(body, (bytearray, memoryview))
        else b"".join(body)
    )


def own_all(buffers: Any) -> list[bytearray] | None:
    """Buffers that nobody else can change."""
    return [bytearray(buffer) for buffer in buffers] if buffers else None


def cut(body: Any, buffers: Sequence[Any] | None, most: int) -> tuple[list[int], deque[tuple[bool, memoryview]]]:
    """Bytes of the body and of each buffer, and pieces of at most so many bytes of them all, one after the other; with
    each whether it is of a buffer, which may travel by other ways than a body.

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


class Assembly:
    """A frame that comes in pieces."""

    def __init__(self, head: bytes) -> None:
        self._head: _Head = decode(_decoder, head, "the head of a frame in pieces")
        try:
            self._parts = [bytearray(size) for size in self._head[6]]
        except (ValueError, OverflowError, MemoryError) as error:
            raise FrameError(f"a frame in pieces that nobody has room for: {error}") from error
        if not self._parts:
            raise FrameError("a frame in pieces without a body")
        self._which = self._at = self._next = 0
        self._missing = sum(self._head[6])

    def add(self, number: int, piece: Any) -> bool:
        """Room for this piece, in its place; False if there is none."""
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
        """All pieces are there."""
        return self._next == self._head[7]

    def frame(self, link: int, epoch: int) -> tuple[Any, ...]:
        """The frame, as links bring it. Raises FrameError if there are fewer bytes than were announced."""
        if self._missing:
            raise FrameError(f"a frame in pieces that lacks {self._missing} bytes")
        kind, target, ref, seq, rank, prefix, _, _ = self._head
        body, *buffers = self._parts
        return (link, kind, target, ref, seq, rank, epoch, prefix, body, buffers or None)
