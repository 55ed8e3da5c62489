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
# of a group's stages between hosts (process_group/_hierarchical/inter_host.py) begin at STAGES, and are made of the
# number of bytes, too.
MAX_TAG = 1 << 28
FIRST_STAGE_TAG = 1 << 30
OWN_TAGS = _ANNOUNCED = 1 << 29
_FIRST_EXCHANGE_TAG = _ANNOUNCED + MAX_TAG
MAX_EXCHANGES = 1 << 27
"""Conversations between two ranks in one direction, until the same number is used again."""

DONE, PLAIN, OFFER, REFUSED, ANSWER = range(1, 6)

_HEAD = struct.Struct("!4sIQQH")  # magic, number, bytes of the message, offset in the region, bytes of the region
_MAGIC = b"mfa1"
SEND_HEADER_BYTES = 256
"""Bytes."""
_WORD = struct.Struct("!4sIQQ")  # magic, what is said, a number, bytes that follow
WORD = _WORD.size
MAX_CONTROL_BYTES = 64 << 10
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
        return bytearray((head + self.region).ljust(SEND_HEADER_BYTES, b"\0"))

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> SendHeader:
        """Raises ProtocolError."""
        magic, number, nbytes, offset, size = _HEAD.unpack_from(data)
        if magic != _MAGIC or _HEAD.size + size > len(data):
            raise ProtocolError(f"an announcement that begins with {bytes(data[:4])!r}")
        return cls(number, nbytes, offset, bytes(data[_HEAD.size : _HEAD.size + size]))


def fits(region: bytes) -> bool:
    """There is room for it in an announcement."""
    return _HEAD.size + len(region) <= SEND_HEADER_BYTES


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
        if magic != _MAGIC or not DONE <= kind <= ANSWER or size > MAX_CONTROL_BYTES:
            raise ProtocolError(f"a word that begins with {bytes(data[:8])!r}")
        return cls(kind, value, size)


def announced(tag: int) -> int:
    """Gloo's tag for announcements of messages with this tag."""
    return tag if tag >= FIRST_STAGE_TAG else _ANNOUNCED + tag


def talk(number: int, sender: int, receiver: int) -> int:
    """Gloo's tag for a conversation: another one for each direction, since both use both ways of the pair."""
    return _FIRST_EXCHANGE_TAG + 2 * (number % MAX_EXCHANGES) + (sender < receiver)
