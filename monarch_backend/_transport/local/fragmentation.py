"""Frames that are larger than one piece of shared memory: cut by the sender, assembled by the receiver."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from monarch_backend._transport.local import frames, tuning
from monarch_backend._transport.local.flow_control import SharedMemoryWait
from monarch_backend._transport.local.frames import Frame, FrameError, Kind, decode
from monarch_backend._transport.local.peer import Peer

if TYPE_CHECKING:
    from monarch_backend._transport.local.router import Router

_Head = tuple[int, int, int, int, int, bytes, list[int], int]
_decoder = msgspec.msgpack.Decoder(_Head)


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
    """Body that raises MemoryError when unpickled. Its length, which counts for credit, is that of the message."""

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
    """Frame that arrives in pieces."""

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


class Fragmenter:
    """Sends frames in pieces, and assembles those of the peers."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.assemblies: dict[tuple[int, int], Assembly] = {}  # by link and the sender's number of the frame

    def send(
        self, peer: Peer, kind: int, target: int, ref: int, seq: int, rank: int, prefix: bytes, body: Any,
        buffers: Any, keep: bool = False,
    ) -> None:  # fmt: skip
        """Send in pieces. Wait for space without the lock; with ``keep`` queue the rest of an owned payload."""
        sizes, pieces = cut(body, buffers, tuning.MOST_IN_ONE // 4)
        count, whole = len(pieces), next(self._router.ids)
        head = frames.encode([kind, target, ref, seq, rank, prefix, sizes, count])

        def send() -> bool:
            while pieces and peer.gone is None:
                number = count - len(pieces)
                first = head if number == 0 else b""
                of_buffer, piece = pieces[0]
                what = (b"", [piece]) if of_buffer else ([piece], None)
                if not self._router.links.send(peer.link, Kind.PART, number, whole, 0, rank, peer.epoch, first, *what):
                    return False
                pieces.popleft()
            return True

        if keep:
            if not send():
                self._router.keep(send, peer.link)
        else:
            with contextlib.closing(SharedMemoryWait(self._router, [peer], whole=True)) as full:
                while not send():
                    full.wait()

    def receive(self, frame: Frame) -> tuple[Any, ...] | None:
        """Take a piece; return the event of the frame that it completes. Raises FrameError if the frame is unknown."""
        key = frame.link, frame.ref
        assembly = self.assemblies.get(key)
        if frame.target == 0:
            assembly = self.assemblies[key] = Assembly(frame.prefix)
        piece = frame.buffers[0] if frame.buffers else frame.body
        if assembly is None or not assembly.add(frame.target, piece):
            raise FrameError("a piece that belongs to no known frame")
        if not assembly.complete:
            return None
        del self.assemblies[key]
        return assembly.frame(frame.link, frame.epoch)

    def drop_link(self, link: int) -> None:
        for key in [key for key in self.assemblies if key[0] == link]:
            del self.assemblies[key]
