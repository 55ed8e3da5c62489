"""Fuzz target: the handshake of two hosts and the frame headers after it, with bytes of an unauthenticated or broken
peer.

Only HandshakeError and SessionError may be raised. A peer that changes a byte of a message is never accepted.
"""

from __future__ import annotations

import contextlib
import struct

from monarch_backend._transport.network import rdma_frame_header
from monarch_backend._transport.network import session as session_module
from monarch_backend._transport.network.auth import (
    ANSWER_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    HandshakeClient,
    HandshakeError,
    HandshakeServer,
    Hello,
    Refusal,
    name_of,
)
from monarch_backend._transport.network.session import (
    ACK,
    BYE,
    CONTROL,
    DATA,
    FRAME_OVERHEAD_BYTES,
    HEAD_BYTES,
    RDMA_FRAME,
    Session,
    SessionError,
    read_head,
)

SECRET = bytes(range(32))
ONE = Hello(b"a" * 16, b"s" * 16, 7, nonce=b"1" * 32)
OTHER = Hello(b"b" * 16, b"s" * 16, 9, nonce=b"2" * 32)


def one(data: bytes) -> None:
    """Run one target. The first byte selects the target for the other bytes."""
    if data:
        _TARGETS[data[0] % len(_TARGETS)](data[1:])


def _raw_hello(data: bytes) -> None:
    called = HandshakeServer({name_of(SECRET): SECRET}, b"binding")
    try:
        refusal = called.hear(data[:HELLO_BYTES])
    except HandshakeError:
        return
    assert refusal in (Refusal.NONE, Refusal.PROTOCOL, Refusal.SECRET)
    if refusal == Refusal.NONE:
        called.answer(OTHER)
    try:
        called.check(data[HELLO_BYTES:])
    except HandshakeError:
        return
    raise AssertionError("somebody without the secret got through")


def _raw_answer(data: bytes) -> None:
    try:
        HandshakeClient(SECRET, ONE, b"binding").hear(data)
    except HandshakeError:
        return
    raise AssertionError("somebody without the secret got through")


def _patched(data: bytes) -> None:
    """Run a whole handshake. Each pair of bytes changes one byte of the three messages."""
    caller, called = HandshakeClient(SECRET, ONE), HandshakeServer({name_of(SECRET): SECRET})
    changes = dict(zip(data[::2], data[1::2], strict=False))
    changed = False

    def pass_on(message: bytes, offset: int) -> bytes:
        nonlocal changed
        got = bytearray(message)
        for place, change in changes.items():
            if 0 <= place - offset < len(got):
                got[place - offset] ^= change
        changed |= bytes(got) != message
        return bytes(got)

    try:
        if called.hear(pass_on(caller.hello(), 0)) != Refusal.NONE:
            assert changed
            return
        proof = caller.hear(pass_on(called.answer(OTHER), HELLO_BYTES))
        called.check(pass_on(proof, HELLO_BYTES + ANSWER_BYTES))
    except HandshakeError:
        assert changed
        return
    assert not changed, "a message was changed and nobody noticed"
    assert (caller.other, called.other) == (OTHER, ONE)


def _session_with_frames() -> Session:
    session = Session()
    for number in range(4):
        session.send(b"prefix" * number, [b"body"] * number)
    return session


def _sound(session: Session) -> None:
    assert session.unacknowledged == sum(
        len(prefix) + size + FRAME_OVERHEAD_BYTES for _, prefix, _, size in session._kept
    )
    assert session.unacknowledged >= 0


def _raw_heads(data: bytes) -> None:
    session = _session_with_frames()
    for start in range(0, len(data), HEAD_BYTES):
        with contextlib.suppress(SessionError):
            head = read_head(data[start : start + HEAD_BYTES])
            assert head.prefix <= session_module.MAX_PREFIX_BYTES and head.body <= session_module.MAX_BODY_BYTES
            _step(session, head.kind, head.number, head.acknowledged, head)
        _sound(session)


def _small_heads(data: bytes) -> None:
    """Decode headers with valid magic and sizes. Four bytes give kind, number, acknowledged number and size."""
    session = _session_with_frames()
    for start in range(0, len(data) - 3, 4):
        kind, number, acknowledged, size = data[start : start + 4]
        with contextlib.suppress(SessionError):
            raw = struct.pack("!4sB3xIQQQ", session_module.MAGIC, kind, size, size, number, acknowledged)
            _step(session, kind, number, acknowledged, read_head(raw))
        _sound(session)


def _step(session: Session, kind: int, number: int, acknowledged: int, head: session_module.Head) -> None:
    before = session.received
    if kind in (DATA, RDMA_FRAME):
        expected = session.is_next(head)
        assert session.take(head) is expected
        assert session.received == before + expected
        assert not expected or session.received == number
    elif kind in (ACK, CONTROL):
        session.hear(head)
        session.send(b"more", [])
    else:
        assert kind == BYE
        again = [read_head(parts[0][:HEAD_BYTES]) for parts in session.resume(acknowledged)]
        assert [head.number for head in again] == list(range(acknowledged + 1, acknowledged + 1 + len(again)))


def _raw_parts(data: bytes) -> None:
    """Decode the prefix of an RDMA frame. The first four bytes are the size of its body."""
    size = int.from_bytes(data[:4], "big")
    with contextlib.suppress(SessionError):
        parts, rest = rdma_frame_header.unpack(data[4:], size)
        gaps = rdma_frame_header.gaps(parts, size)
        assert data.endswith(rest)
        places = sorted([*gaps, *((part.offset, part.offset + part.nbytes) for part in parts)])
        assert [start for start, _ in places] == [0, *(end for _, end in places[:-1])]
        assert places[-1][1] == size


_TARGETS = (_raw_hello, _raw_answer, _patched, _raw_heads, _small_heads, _raw_parts)


def _seeds() -> dict[str, bytes]:
    caller, called = HandshakeClient(SECRET, ONE, b"binding"), HandshakeServer({name_of(SECRET): SECRET}, b"binding")
    hello = caller.hello()
    called.hear(hello)
    answer = called.answer(OTHER)
    frames = [
        session_module.Session().send(b"prefix", [b"body"])[0][:HEAD_BYTES],
        Session().acknowledgement(),
        Session().bye(),
    ]
    return {
        "hello": b"\0" + hello + bytes(PROOF_BYTES),
        "unknown-secret": b"\0" + hello[:8] + bytes(8) + hello[16:],
        "other-protocol": b"\0" + hello[:5] + b"\2" + hello[6:],
        "answer": b"\1" + answer[:-1],
        "refusals": b"\1" + HandshakeServer.refuse(Refusal.SESSION),
        "unchanged": b"\2",
        "changed": b"\2\0\1\x80\x20\xf0\3",
        "parts": b"\5\0\0\1\0"
        + rdma_frame_header.pack([rdma_frame_header.Part(2, 9, b"r"), rdma_frame_header.Part(11, 1, b"r")])
        + b"prefix",
        "heads": b"\3" + b"".join(frames),
        "small-heads": b"\4" + bytes([DATA, 1, 0, 9, DATA, 1, 2, 9, ACK, 0, 3, 0, BYE, 0, 3, 0, BYE, 0, 9, 0]),
    }


SEEDS = _seeds()
