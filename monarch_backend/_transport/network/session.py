"""Frames between two hosts: each once, in order, whatever connections break meanwhile.

A session outlives its connections. Each side numbers its frames, keeps those that the other side has not acknowledged,
and sends them again on the next connection from where the other side says that it is. Knows no sockets, no clock and no
meaning: bytes in, bytes out. Who may talk at all is auth.py's.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

_HEAD = struct.Struct("!4sB3xIQQQ")  # magic, kind, bytes of the prefix, bytes of the body, number, acknowledged
HEAD_BYTES = _HEAD.size
MAGIC = b"mofr"

DATA, WORD, BYE, SAY, LENT = range(1, 6)
"""Kinds: a frame; only what stands in the head, which also says that one is alive; the end, in peace.

Only for who has greeted as one that knows them: something said about NICs, in the prefix, without a number; a frame of
whose body a part is not on the connection (rdma_frame_header.py), and is read where it lies.
"""

MOST_PREFIX, MOST_BODY, MOST_SAID = 16 << 20, 1 << 30, (64 << 10) + 64
"""Bytes. Whoever announces more is not listened to any more."""

MAX_UNACKNOWLEDGED_BYTES = 64 << 20
"""Bytes that may be under way; then nothing more is sent, but one frame goes in any case."""

FRAME_OVERHEAD_BYTES = 256
"""Bytes that a frame counts beside its own: what it takes to remember it. A million empty frames are not free."""

WORTH_A_WORD = 4 << 20
"""Bytes after which the other side is told at once that they have come."""


class SessionError(ConnectionError):
    """The other side does not keep to the protocol, or cannot go on from where this one is."""


class Head(NamedTuple):
    """What stands before each frame."""

    kind: int
    prefix: int
    body: int
    number: int
    acknowledged: int


def read_head(data: bytes) -> Head:
    """Of HEAD_BYTES. Raises SessionError for what no host of ours would send."""
    if len(data) != HEAD_BYTES:
        raise SessionError(f"{len(data)} bytes where a frame's head has {HEAD_BYTES}")
    magic, *fields = _HEAD.unpack(data)
    head = Head(*fields)
    if magic != MAGIC or not DATA <= head.kind <= LENT or (head.kind in (DATA, LENT)) != (head.number > 0):
        raise SessionError("bytes that are no frame of this version")
    if head.kind != DATA and (bool(head.prefix), bool(head.body)) != (head.kind in (SAY, LENT), head.kind == LENT):
        raise SessionError("bytes that are no frame of this version")
    if head.kind == SAY and head.prefix > MOST_SAID:
        raise SessionError(f"something said of {head.prefix} bytes, which is more than there is to say")
    if head.prefix > MOST_PREFIX or head.body > MOST_BODY:
        raise SessionError(f"a frame of {head.prefix + head.body} bytes, which is more than any frame has")
    return head


class Session:
    """One side of it.

    >>> one, other = Session(), Session()
    >>> lost = one.send(b"prefix", [b"body"])  # and the connection breaks
    >>> [again] = one.resume(other.received)
    >>> head = read_head(again[0][:HEAD_BYTES])
    >>> other.take(head), other.take(head)  # once
    (True, False)
    >>> one.hear(read_head(other.word()))
    >>> one.unacknowledged
    0
    """

    def __init__(self) -> None:
        self.received = 0  # the number of the last frame that was taken
        self.acknowledged = 0  # the number of the last one of ours that the other side has taken
        self.unacknowledged = 0  # bytes
        self._sent = 0
        self._untold = 0  # bytes that have come since the other side was told of `received`
        self._kept: deque[tuple[int, bytes, Sequence[Any], int]] = deque()

    @property
    def full(self) -> bool:
        """No more for now."""
        return self.unacknowledged >= MAX_UNACKNOWLEDGED_BYTES

    def send(self, prefix: bytes, body: Sequence[Any]) -> list[Any]:
        """The bytes of a frame, in parts. The parts of the body must not change until they are acknowledged.

        Raises ValueError for a frame that the other side would not take.
        """
        return self._frame(*self._keep(prefix, body))

    def lend(self, notes: bytes, prefix: bytes, body: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
        """The same, with only the ``rest`` of the body on this connection; ``notes`` say where the other side reads the
        parts that it lacks. If the connection breaks, or by :meth:`again`, all of it is sent as ever.
        """
        number, _, _, size = self._keep(prefix, body)
        return [self._head(LENT, number, len(notes) + len(prefix), size) + notes + prefix, *rest]

    def again(self, number: int) -> list[Any]:
        """The bytes of a frame that was lent, all of it: it was the last that was sent, or it would come too late."""
        assert self._kept[-1][0] == number, "another frame was sent before it was known whether this one can be read"
        return self._frame(*self._kept[-1])

    def _keep(self, prefix: bytes, body: Sequence[Any]) -> tuple[int, bytes, Sequence[Any], int]:
        size = sum(memoryview(part).nbytes for part in body)
        if len(prefix) > MOST_PREFIX or size > MOST_BODY:
            raise ValueError(
                f"a frame of {len(prefix)} and {size} bytes; between hosts a prefix has up to {MOST_PREFIX}, a body up "
                f"to {MOST_BODY}: send it in pieces"
            )
        self._sent += 1
        self._kept.append((self._sent, prefix, body, size))
        self.unacknowledged += size + len(prefix) + FRAME_OVERHEAD_BYTES
        return self._kept[-1]

    @property
    def sent(self) -> int:
        """The number of the last frame of ours."""
        return self._sent

    def _frame(self, number: int, prefix: bytes, body: Sequence[Any], size: int) -> list[Any]:
        return [self._head(DATA, number, len(prefix), size) + prefix, *body]

    def _head(self, kind: int, number: int = 0, prefix: int = 0, body: int = 0) -> bytes:
        self._untold = 0
        return _HEAD.pack(MAGIC, kind, prefix, body, number, self.received)

    def word(self) -> bytes:
        """What has come so far; and that this side is alive."""
        return self._head(WORD)

    def say(self, what: bytes) -> bytes:
        """Of up to MOST_SAID bytes, without a number: lost if the connection breaks."""
        return self._head(SAY, 0, len(what)) + what

    def bye(self) -> bytes:
        """The end."""
        return self._head(BYE)

    @property
    def word_is_due(self) -> bool:
        """So much has come that the other side should know."""
        return self._untold >= WORTH_A_WORD

    def hear(self, head: Head) -> None:
        """What any head says of our frames. Raises SessionError if it knows of frames that there never were."""
        if head.acknowledged > self._sent:
            raise SessionError(f"it has received frame {head.acknowledged} of {self._sent}")
        self.acknowledged = max(self.acknowledged, head.acknowledged)
        while self._kept and self._kept[0][0] <= head.acknowledged:
            _, prefix, _, size = self._kept.popleft()
            self.unacknowledged -= size + len(prefix) + FRAME_OVERHEAD_BYTES

    def is_next(self, head: Head) -> bool:
        """False if this frame has come before: its body is read and dropped. Raises SessionError if one is missing."""
        self.hear(head)
        if head.number <= self.received:
            return False
        if head.number != self.received + 1:
            raise SessionError(f"frame {head.number} comes after frame {self.received}")
        return True

    def take(self, head: Head) -> bool:
        """This frame has come, with the last byte of its body; as :meth:`is_next`.

        Not before: what is taken is acknowledged, and a connection may break in the middle of a body.
        """
        if not self.is_next(head):
            return False
        self.received = head.number
        self._untold += head.prefix + head.body + FRAME_OVERHEAD_BYTES
        return True

    def resume(self, received: int) -> Iterator[list[Any]]:
        """What the other side has missed, on a new connection. Raises SessionError if that is not there any more."""
        first = self._kept[0][0] if self._kept else self._sent + 1
        if not first - 1 <= received <= self._sent:
            raise SessionError(f"it is at frame {received}, and here are frames {first} to {self._sent}")
        self.hear(Head(WORD, 0, 0, 0, received))
        return (self._frame(number, prefix, body, size) for number, prefix, body, size in list(self._kept))
