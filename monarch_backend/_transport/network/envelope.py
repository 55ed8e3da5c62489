"""Layouts of frames to another host, between a process and its gateway, and between gateways.

To its gateway a process sends the frame with both tokens before the prefix, and with a flag in the kind. Between hosts
the frame's header is in the prefix of a session's frame. remote_links.py and gateway.py send these frames.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from monarch_backend._transport.local.frames import CARRIED, TOKEN_LENGTH, FrameError
from monarch_backend._transport.tokens import HOST_ID_LENGTH, host_of

MANY = 0x80
"""Flag in a kind: the frame is for several processes on other hosts. The flag CARRIED is for one."""

CALL, MET, REFUSED, GONE = 0xF1, 0xF2, 0xF3, 0xF4
"""Kinds of control frames between processes and gateways: A connects to B; B is up, can't be reached, has ended."""

PASS, ARRIVED, COMBINED = 0xF5, 0xF6, 0xF7
"""Kinds between gateways: a multicast on its way down a tree; all below have it; aggregated replies on their way up."""

_HEAD = struct.Struct("!BxHIIQQQQ")  # kind, buffers, rank, epoch, target, ref, seq, bytes of the body
_RECEIVER = struct.Struct(f"!{TOKEN_LENGTH}sQII")  # token, seq, rank, epoch
_COUNT = struct.Struct("!I")
_PASS = struct.Struct(f"!{HOST_ID_LENGTH}s{HOST_ID_LENGTH}sBIQQI")  # root, parent, kind, branches, number, over, hosts
_PART = struct.Struct(f"!{HOST_ID_LENGTH}sI")  # host, receivers


def is_word(kind: int) -> bool:
    """Whether a kind is a control frame of processes and gateways."""
    return kind & 0xF0 == 0xF0


def is_for_many(kind: int) -> bool:
    """Whether a frame is for several receivers, which are listed before its tokens."""
    return bool(kind & MANY) and not is_word(kind)


def to_host(frame: Envelope) -> str:
    """Return the host of a frame; between gateways a frame for many is for one host. Raises FrameError."""
    if not is_for_many(frame.kind):
        return host_of(frame.to)
    text = frame.prefix[_COUNT.size : _COUNT.size + HOST_ID_LENGTH]
    if len(text) < HOST_ID_LENGTH or not text.isascii():
        raise FrameError("a frame for many without receivers")
    return str(text, "ascii")


class Envelope(NamedTuple):
    """Frame to another host. ``prefix`` begins with the tokens of its receiver and its sender."""

    kind: int
    target: int
    ref: int
    seq: int
    rank: int
    epoch: int
    prefix: bytes
    body: Any
    buffers: Sequence[Any] | None

    @property
    def to(self) -> str:
        return str(self.prefix[:TOKEN_LENGTH], "ascii")

    @property
    def sender(self) -> str:
        return str(self.prefix[TOKEN_LENGTH : 2 * TOKEN_LENGTH], "ascii")


HOST_LOST = 2
"""Flag in the rank of a GONE frame: the whole host of its sender is lost. Bit 0 says that the end was orderly."""


def word(kind: int, to: str, sender: str, pid: int = 0, text: str = "") -> Envelope:
    return Envelope(kind, 0, pid, 0, 0, 0, f"{to}{sender}{text}".encode(), b"", None)


def unpack_receivers(prefix: bytes) -> tuple[list[tuple[str, int, int, int]], bytes]:
    try:
        (count,) = _COUNT.unpack_from(prefix)
        end = _COUNT.size + count * _RECEIVER.size
        rows = [_RECEIVER.unpack_from(prefix, at) for at in range(_COUNT.size, end, _RECEIVER.size)]
        return [(str(token, "ascii"), *rest) for token, *rest in rows], prefix[end:]
    except (struct.error, UnicodeDecodeError) as error:
        raise FrameError(f"a frame for many whose receivers can't be read: {error}") from None


def pack(frame: Envelope) -> tuple[bytes, list[Any]]:
    """Return the prefix and the body of a session's frame."""
    body = [frame.body] if isinstance(frame.body, (bytes, bytearray, memoryview)) else list(frame.body)
    buffers = [memoryview(buffer) for buffer in frame.buffers or ()]
    head = _HEAD.pack(
        frame.kind, len(buffers), frame.rank, frame.epoch, frame.target, frame.ref, frame.seq,
        sum(len(part) for part in body),
    )  # fmt: skip
    sizes = struct.pack(f"!{len(buffers)}Q", *(buffer.nbytes for buffer in buffers))
    return head + sizes + frame.prefix, [*body, *(buffer.cast("B") for buffer in buffers)]


def unpack(prefix: bytes, view: memoryview) -> Envelope:
    """Return the frame of another gateway, whose bytes are not trusted; its parts are views. Raises FrameError."""
    try:
        kind, count, rank, epoch, target, ref, seq, size = _HEAD.unpack_from(prefix)
        sizes = struct.unpack_from(f"!{count}Q", prefix, _HEAD.size)
    except struct.error as error:
        raise FrameError(f"a frame of another host that can't be read: {error}") from None
    if size + sum(sizes) != len(view):
        raise FrameError("a frame of another host whose lengths do not add up")
    buffers, at = [], size
    for length in sizes:
        buffers.append(view[at : at + length])
        at += length
    rest = prefix[_HEAD.size + 8 * count :]
    named = (
        is_for_many(kind)
        or kind in (PASS, ARRIVED)
        or (len(rest) >= 2 * TOKEN_LENGTH and rest[: 2 * TOKEN_LENGTH].isascii())
    )
    if kind < CARRIED or not named:
        raise FrameError(f"a frame of another host of kind {kind}")
    return Envelope(kind, target, ref, seq, rank, epoch, rest, view[:size], buffers or None)


class RelayHeader(NamedTuple):
    """Prefix of PASS. ``hosts``: packed receivers, of this host first. ``over``: the root has all replies before."""

    root: str
    parent: str
    kind: int
    branches: int
    number: int
    over: int
    hosts: list[tuple[str, bytes]]
    rest: bytes

    def pack(self) -> bytes:
        head = _PASS.pack(
            self.root.encode(), self.parent.encode(), self.kind, self.branches, self.number, self.over, len(self.hosts)
        )
        table = b"".join(_PART.pack(host.encode(), count_of(rows)) for host, rows in self.hosts)
        return b"".join((head, table, *(rows for _, rows in self.hosts), self.rest))

    @classmethod
    def unpack(cls, prefix: bytes) -> RelayHeader:
        try:
            root, parent, kind, branches, number, over, count = _PASS.unpack_from(prefix)
            at = _PASS.size + count * _PART.size
            hosts = []
            for place in range(_PASS.size, at, _PART.size):
                host, receivers = _PART.unpack_from(prefix, place)
                hosts.append((str(host, "ascii"), prefix[at : at + receivers * _RECEIVER.size]))
                at += receivers * _RECEIVER.size
            passed = cls(str(root, "ascii"), str(parent, "ascii"), kind, branches, number, over, hosts, prefix[at:])
        except (struct.error, UnicodeDecodeError) as error:
            raise FrameError(f"a PASS frame that can't be read: {error}") from None
        if at > len(prefix) or not hosts or not branches or not is_for_many(kind):
            raise FrameError("a PASS frame that can't be read")
        return passed


def pack_rows(to: Sequence[tuple[str, int, int, int]]) -> bytes:
    """Pack receivers (token, sequence number, rank, epoch), without their count."""
    return b"".join(_RECEIVER.pack(token.encode(), *rest) for token, *rest in to)


def count_of(rows: bytes) -> int:
    return len(rows) // _RECEIVER.size


def for_many(rows: bytes, rest: bytes) -> bytes:
    """Return the prefix of a frame for MANY: the receivers, then the tokens and the prefix."""
    return _COUNT.pack(count_of(rows)) + rows + rest


def arrived(root: str, number: int, who: str, done: bool, lost: Sequence[str] = ()) -> Envelope:
    """Return ARRIVED for the parent: ``who`` can't reach the ``lost`` hosts; ``done``: all others below have it."""
    return Envelope(ARRIVED, 0, 0, number, int(done), 0, "".join((root, who, *lost)).encode(), b"", None)


def unpack_arrived(frame: Envelope) -> tuple[str, str, list[str]]:
    """Return the root, the sending host, and the hosts that could not be reached. Raises FrameError."""
    try:
        text = str(frame.prefix, "ascii")
    except UnicodeDecodeError:
        text = ""
    if len(text) < 2 * HOST_ID_LENGTH or len(text) % HOST_ID_LENGTH:
        raise FrameError("an ARRIVED frame that can't be read")
    return (
        text[:HOST_ID_LENGTH],
        text[HOST_ID_LENGTH : 2 * HOST_ID_LENGTH],
        [text[at : at + HOST_ID_LENGTH] for at in range(2 * HOST_ID_LENGTH, len(text), HOST_ID_LENGTH)],
    )
