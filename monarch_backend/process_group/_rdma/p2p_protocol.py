"""What two ranks of different hosts tell each other, over Gloo, about a message that a NIC may carry: layouts and tags.

The sender announces the message where the receive with the user's tag looks for it; the two then talk about it with a
tag of its own. Who says what when is p2p.py's.

| from | | then |
| --- | --- | --- |
| sender | Announcement | |
| receiver | OFFER, of a connection to read by | ANSWER from the sender, empty where it can't |
| receiver | DONE: it has the message | the end |
| receiver | PLAIN, and why: let Gloo carry it | the message itself |
| receiver | REFUSED, and how many bytes it wants | the end |
"""

from __future__ import annotations

import struct
from typing import NamedTuple

# Tags are below 2**31. Those of people are below OWN_TAGS; from MOST_TAG on their messages go as they always did. Those
# of a group's stages between hosts (process_group/_hierarchical/inter_host.py) begin at STAGES, and are made of the number of bytes, too.
MOST_TAG = 1 << 28
STAGES = 1 << 30
OWN_TAGS = _ANNOUNCED = 1 << 29
_TALKS = _ANNOUNCED + MOST_TAG
NUMBERS = 1 << 27
"""Conversations between two ranks in one direction, until the same number is used again."""

DONE, PLAIN, OFFER, REFUSED, ANSWER = range(1, 6)

_HEAD = struct.Struct("!4sIQQH")  # magic, number, bytes of the message, offset in the region, bytes of the region
_MAGIC = b"mfa1"
ANNOUNCEMENT = 256
"""Bytes."""
_WORD = struct.Struct("!4sIQQ")  # magic, what is said, a number, bytes that follow
WORD = _WORD.size
MOST_BYTES = 64 << 10
"""That may follow a word."""


class ProtocolError(ValueError):
    """Bytes that no rank of this release has written."""


class SendHeader(NamedTuple):
    """A message, and where its bytes lie; no region where no NIC may reach them."""

    number: int
    nbytes: int
    offset: int = 0
    region: bytes = b""

    def pack(self) -> bytearray:
        """Always of the same length."""
        head = _HEAD.pack(_MAGIC, self.number, self.nbytes, self.offset, len(self.region))
        return bytearray((head + self.region).ljust(ANNOUNCEMENT, b"\0"))

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> SendHeader:
        """Raises ProtocolError."""
        magic, number, nbytes, offset, size = _HEAD.unpack_from(data)
        if magic != _MAGIC or _HEAD.size + size > len(data):
            raise ProtocolError(f"an announcement that begins with {bytes(data[:4])!r}")
        return cls(number, nbytes, offset, bytes(data[_HEAD.size : _HEAD.size + size]))


def fits(region: bytes) -> bool:
    """There is room for it in an announcement."""
    return _HEAD.size + len(region) <= ANNOUNCEMENT


class ControlMessage(NamedTuple):
    """What is said in a conversation; ``size`` bytes follow."""

    kind: int
    value: int
    size: int

    def pack(self) -> bytearray:
        """As bytes."""
        return bytearray(_WORD.pack(_MAGIC, *self))

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> ControlMessage:
        """Raises ProtocolError."""
        magic, kind, value, size = _WORD.unpack(data)
        if magic != _MAGIC or not DONE <= kind <= ANSWER or size > MOST_BYTES:
            raise ProtocolError(f"a word that begins with {bytes(data[:8])!r}")
        return cls(kind, value, size)


def announced(tag: int) -> int:
    """Gloo's tag for announcements of messages with this tag."""
    return tag if tag >= STAGES else _ANNOUNCED + tag


def talk(number: int, sender: int, receiver: int) -> int:
    """Gloo's tag for a conversation: another one for each direction, since both use both ways of the pair."""
    return _TALKS + 2 * (number % NUMBERS) + (sender < receiver)
