"""Session between two hosts: delivers frames in order and once, across broken connections.

Each side numbers its frames and keeps those that are not acknowledged. On a new connection it resends them from the
number that the peer has received. The module uses no sockets and no clock: bytes in, bytes out. auth.py authenticates
the connections.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

_HEAD = struct.Struct("!4sB3xIQQQ")  # magic, kind, bytes of the prefix, bytes of the body, number, acknowledged
HEAD_BYTES = _HEAD.size
MAGIC = b"mofr"

DATA, ACK, BYE, CONTROL, RDMA_FRAME = range(1, 6)
"""Kinds of frames.

- DATA: a frame with a number.
- ACK: only a head, which acknowledges frames and serves as a heartbeat.
- BYE: the orderly end of the session.
- CONTROL: a message about NICs, in the prefix, without a number.
- RDMA_FRAME: a frame with a number, parts of whose body the receiver's NIC reads (rdma_frame_header.py).

CONTROL and RDMA_FRAME are sent only to a peer whose `Hello` has ``offers_rdma``.
"""

MAX_PREFIX_BYTES, MAX_BODY_BYTES, MAX_CONTROL_BYTES = 16 << 20, 1 << 30, (64 << 10) + 64
"""Limits of a prefix, of a body and of a CONTROL prefix, in bytes. A peer that exceeds them loses its connection."""

MAX_UNACKNOWLEDGED_BYTES = 64 << 20
"""Unacknowledged bytes from which on nothing more is sent. One frame of any size may always be sent."""

FRAME_OVERHEAD_BYTES = 256
"""Bytes that a frame counts beyond its size, for the memory to keep it. They bound the number of empty frames."""

ACK_AFTER_BYTES = 4 << 20
"""Received bytes after which an acknowledgement is sent at once."""


class SessionError(ConnectionError):
    """The peer violates the protocol, or can't resume the session."""


class Head(NamedTuple):
    kind: int
    prefix: int
    body: int
    number: int
    acknowledged: int


def read_head(data: bytes) -> Head:
    """Decode a head of HEAD_BYTES. Raises SessionError if it is invalid."""
    if len(data) != HEAD_BYTES:
        raise SessionError(f"{len(data)} bytes where a frame's head has {HEAD_BYTES}")
    magic, *fields = _HEAD.unpack(data)
    head = Head(*fields)
    if magic != MAGIC or not DATA <= head.kind <= RDMA_FRAME or (head.kind in (DATA, RDMA_FRAME)) != (head.number > 0):
        raise SessionError("bytes that are no frame of this version")
    if head.kind != DATA and (bool(head.prefix), bool(head.body)) != (
        head.kind in (CONTROL, RDMA_FRAME),
        head.kind == RDMA_FRAME,
    ):
        raise SessionError("bytes that are no frame of this version")
    if head.kind == CONTROL and head.prefix > MAX_CONTROL_BYTES:
        raise SessionError(f"a message about NICs of {head.prefix} bytes, which is more than the limit")
    if head.prefix > MAX_PREFIX_BYTES or head.body > MAX_BODY_BYTES:
        raise SessionError(f"a frame of {head.prefix + head.body} bytes, which is more than any frame has")
    return head


class Session:
    """One side of a session.

    >>> one, other = Session(), Session()
    >>> lost = one.send(b"prefix", [b"body"])  # and the connection breaks
    >>> [again] = one.resume(other.received)
    >>> head = read_head(again[0][:HEAD_BYTES])
    >>> other.take(head), other.take(head)  # once
    (True, False)
    >>> one.hear(read_head(other.acknowledgement()))
    >>> one.unacknowledged
    0
    """

    def __init__(self) -> None:
        self.received = 0  # the number of the last received frame
        self.acknowledged = 0  # the number of the last frame that the peer has received
        self.unacknowledged = 0  # bytes
        self.sent = 0  # the number of the last sent frame
        self._untold = 0  # bytes received since the last acknowledgement
        self._kept: deque[tuple[int, bytes, Sequence[Any], int]] = deque()

    @property
    def full(self) -> bool:
        """Whether nothing more may be sent until the peer acknowledges frames."""
        return self.unacknowledged >= MAX_UNACKNOWLEDGED_BYTES

    def send(self, prefix: bytes, body: Sequence[Any]) -> list[Any]:
        """Return a frame in parts. Its body must not change until it is acknowledged. ValueError: it is too large."""
        return self._frame(*self._keep(prefix, body))

    def rdma_frame(self, notes: bytes, prefix: bytes, body: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
        """Return a RDMA_FRAME with the ``rest`` of the body. ``notes``: where the peer reads the other parts."""
        number, _, _, size = self._keep(prefix, body)
        return [self._head(RDMA_FRAME, number, len(notes) + len(prefix), size) + notes + prefix, *rest]

    def again(self, number: int) -> list[Any]:
        """Return a RDMA_FRAME frame as DATA. It must be the last one that was sent, or the order would be lost."""
        assert self._kept[-1][0] == number, "another frame was sent before it was known whether this one can be read"
        return self._frame(*self._kept[-1])

    def _keep(self, prefix: bytes, body: Sequence[Any]) -> tuple[int, bytes, Sequence[Any], int]:
        size = sum(memoryview(part).nbytes for part in body)
        if len(prefix) > MAX_PREFIX_BYTES or size > MAX_BODY_BYTES:
            raise ValueError(
                f"a frame of {len(prefix)} and {size} bytes; between hosts a prefix has up to {MAX_PREFIX_BYTES}, "
                f"a body up to {MAX_BODY_BYTES}: send it in pieces"
            )
        self.sent += 1
        self._kept.append((self.sent, prefix, body, size))
        self.unacknowledged += size + len(prefix) + FRAME_OVERHEAD_BYTES
        return self._kept[-1]

    def _frame(self, number: int, prefix: bytes, body: Sequence[Any], size: int) -> list[Any]:
        return [self._head(DATA, number, len(prefix), size) + prefix, *body]

    def _head(self, kind: int, number: int = 0, prefix: int = 0, body: int = 0) -> bytes:
        self._untold = 0
        return _HEAD.pack(MAGIC, kind, prefix, body, number, self.received)

    def acknowledgement(self) -> bytes:
        """Return an ACK frame: an acknowledgement and a heartbeat."""
        return self._head(ACK)

    def control(self, what: bytes) -> bytes:
        """Return a CONTROL frame of up to MAX_CONTROL_BYTES bytes. It is lost if the connection breaks."""
        return self._head(CONTROL, 0, len(what)) + what

    def bye(self) -> bytes:
        return self._head(BYE)

    @property
    def ack_is_due(self) -> bool:
        return self._untold >= ACK_AFTER_BYTES

    def hear(self, head: Head) -> None:
        """Release acknowledged frames. Raises SessionError if the head acknowledges frames that were never sent."""
        if head.acknowledged > self.sent:
            raise SessionError(f"it has received frame {head.acknowledged} of {self.sent}")
        self.acknowledged = max(self.acknowledged, head.acknowledged)
        while self._kept and self._kept[0][0] <= head.acknowledged:
            _, prefix, _, size = self._kept.popleft()
            self.unacknowledged -= size + len(prefix) + FRAME_OVERHEAD_BYTES

    def is_next(self, head: Head) -> bool:
        """Return False for a duplicate, whose body is to be dropped. Raises SessionError if a frame is missing."""
        self.hear(head)
        if head.number <= self.received:
            return False
        if head.number != self.received + 1:
            raise SessionError(f"frame {head.number} comes after frame {self.received}")
        return True

    def take(self, head: Head) -> bool:
        """Receive a frame after its last byte, which acknowledges it; returns and raises as :meth:`is_next`."""
        if not self.is_next(head):
            return False
        self.received = head.number
        self._untold += head.prefix + head.body + FRAME_OVERHEAD_BYTES
        return True

    def resume(self, received: int) -> Iterator[list[Any]]:
        """Return the frames after ``received`` for a new connection. Raises SessionError if they are not kept."""
        first = self._kept[0][0] if self._kept else self.sent + 1
        if not first - 1 <= received <= self.sent:
            raise SessionError(f"it is at frame {received}, and here are frames {first} to {self.sent}")
        self.hear(Head(ACK, 0, 0, 0, received))
        return (self._frame(number, prefix, body, size) for number, prefix, body, size in list(self._kept))
