"""Control messages of two ranks on different hosts, sent over Gloo, about a message that a NIC may carry.

The sender announces the message under the user's tag, where the receive looks for it. The two ranks then exchange
control messages with a tag of its own. p2p.py has their order.

| from | | then |
| --- | --- | --- |
| sender | announcement (`SendHeader`) | |
| receiver | OFFER, of a connection to read by | ANSWER from the sender, empty if it can't connect |
| receiver | DONE: it has the message | the end |
| receiver | PLAIN, with the reason: send it over Gloo | the message itself |
| receiver | REFUSED, with the number of bytes that it takes | the end |
"""

from __future__ import annotations

import struct
from typing import NamedTuple

# Tags are below 2**31. Users' tags are below OWN_TAGS; messages with tags from MAX_TAG on use Gloo only. The tags of
# the stages between hosts (_hierarchical/inter_host.py) begin at FIRST_STAGE_TAG and depend on the number of bytes,
# too.
MAX_TAG = 1 << 28
FIRST_STAGE_TAG = 1 << 30
OWN_TAGS = _ANNOUNCED = 1 << 29
_FIRST_EXCHANGE_TAG = _ANNOUNCED + MAX_TAG
MAX_EXCHANGES = 1 << 27
"""Exchanges between two ranks in one direction before a number is used again."""

DONE, PLAIN, OFFER, REFUSED, ANSWER = range(1, 6)

_HEAD = struct.Struct("!4sIQQH")  # magic, number, bytes of the message, offset in the region, bytes of the region
_MAGIC = b"mfa1"
SEND_HEADER_BYTES = 256
"""Length of an announcement in bytes."""
_WORD = struct.Struct("!4sIQQ")  # magic, kind, value, bytes that follow
WORD = _WORD.size
MAX_CONTROL_BYTES = 64 << 10
"""Most bytes after a control message."""


class ProtocolError(ValueError):
    """Bytes that no rank of this release sends."""


class SendHeader(NamedTuple):
    """Announcement of a message, with the location of its bytes; no region if NICs can't reach them."""

    number: int
    nbytes: int
    offset: int = 0
    region: bytes = b""

    def pack(self) -> bytearray:
        head = _HEAD.pack(_MAGIC, self.number, self.nbytes, self.offset, len(self.region))
        return bytearray((head + self.region).ljust(SEND_HEADER_BYTES, b"\0"))

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> SendHeader:
        """Parse an announcement. Raises ProtocolError."""
        magic, number, nbytes, offset, size = _HEAD.unpack_from(data)
        if magic != _MAGIC or _HEAD.size + size > len(data):
            raise ProtocolError(f"an announcement that begins with {bytes(data[:4])!r}")
        return cls(number, nbytes, offset, bytes(data[_HEAD.size : _HEAD.size + size]))


def fits(region: bytes) -> bool:
    return _HEAD.size + len(region) <= SEND_HEADER_BYTES


class ControlMessage(NamedTuple):
    """Control message of an exchange; ``size`` bytes follow."""

    kind: int
    value: int
    size: int

    def pack(self) -> bytearray:
        return bytearray(_WORD.pack(_MAGIC, *self))

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> ControlMessage:
        """Parse a control message. Raises ProtocolError."""
        magic, kind, value, size = _WORD.unpack(data)
        if magic != _MAGIC or not DONE <= kind <= ANSWER or size > MAX_CONTROL_BYTES:
            raise ProtocolError(f"a control message that begins with {bytes(data[:8])!r}")
        return cls(kind, value, size)


def announced(tag: int) -> int:
    return tag if tag >= FIRST_STAGE_TAG else _ANNOUNCED + tag


def exchange_tag(number: int, sender: int, receiver: int) -> int:
    """Return Gloo's tag for an exchange. Each direction has its own, since both ranks use a pair in both directions."""
    return _FIRST_EXCHANGE_TAG + 2 * (number % MAX_EXCHANGES) + (sender < receiver)
