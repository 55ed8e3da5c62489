"""Frames between two hosts over connections that break: each once, in order, with bounded memory."""

from __future__ import annotations

import array
import os
import random
import struct
from typing import Any

import pytest

from monarch_backend._transport.network import session
from monarch_backend._transport.network.session import (
    ACK,
    ACK_AFTER_BYTES,
    BYE,
    CONTROL,
    DATA,
    FRAME_OVERHEAD_BYTES,
    HEAD_BYTES,
    MAX_BODY_BYTES,
    MAX_CONTROL_BYTES,
    MAX_PREFIX_BYTES,
    MAX_UNACKNOWLEDGED_BYTES,
    RDMA_FRAME,
    Head,
    Session,
    SessionError,
    read_head,
)


def _head(parts: list[Any]) -> Head:
    return read_head(bytes(parts[0][:HEAD_BYTES]))


# Random schedules -----------------------------------------------------------------------------------------------------


class Side:
    """A session, its incoming bytes, and the frames that it has received. It reads as a gateway does."""

    def __init__(self, rng: random.Random, name: str) -> None:
        self.session, self.rng, self.name = Session(), rng, name
        self.wire = bytearray()  # in flight to this side
        self.inbox = bytearray()
        self.sent: list[tuple[bytes, bytes]] = []
        self.taken: list[tuple[bytes, bytes]] = []
        self.said_bye = False

    def put(self, parts: list[Any]) -> None:
        for part in parts:
            self.wire += part

    def send(self, connected: bool) -> None:
        if self.session.full:
            return
        prefix = f"{self.name}{len(self.sent)}".encode() * self.rng.choice((0, 1, 1, 1, 50))
        body = [self.rng.randbytes(self.rng.choice((0, 1, 100, 3000))) for _ in range(self.rng.randrange(3))]
        parts = self.session.send(prefix, body)
        self.sent.append((prefix, b"".join(body)))
        if connected:
            self.put(parts)

    def read(self) -> None:
        while len(self.inbox) >= HEAD_BYTES:
            head = read_head(bytes(self.inbox[:HEAD_BYTES]))
            self.session.hear(head)
            end = HEAD_BYTES + head.prefix + head.body
            if len(self.inbox) < end:
                if head.kind == DATA:
                    self.session.is_next(head)  # the buffer for the body is chosen before the body has arrived
                return
            if head.kind == DATA and self.session.take(head):
                middle = HEAD_BYTES + head.prefix
                self.taken.append((bytes(self.inbox[HEAD_BYTES:middle]), bytes(self.inbox[middle:end])))
            self.said_bye |= head.kind == BYE
            del self.inbox[:end]
            if self.session.ack_is_due:
                self.wire += self.session.acknowledgement()


def _arrive(source: Side, target: Side, count: int) -> None:
    target.inbox += source.wire[:count]
    del source.wire[:count]
    target.read()


def _break(one: Side, other: Side) -> None:
    """Drop all bytes in flight and all incomplete frames, as a broken connection does."""
    for side in (one, other):
        side.wire.clear()
        side.inbox.clear()


def _connect(one: Side, other: Side) -> None:
    positions = one.session.received, other.session.received
    for side, position in ((one, positions[1]), (other, positions[0])):
        for parts in side.session.resume(position):
            side.put(parts)


def _play(seed: int, steps: int) -> tuple[Side, Side]:
    rng = random.Random(seed)
    one, other = Side(rng, "one"), Side(rng, "other")
    connected = False
    for _ in range(steps):
        what = rng.random()
        side, target = rng.sample((one, other), 2)
        if not connected and what < 0.1:
            _connect(one, other)
            connected = True
        elif connected and what < 0.03:
            _break(one, other)
            connected = False
        elif what < 0.5:
            side.send(connected)
        elif connected:
            _arrive(side, target, rng.choice((1, HEAD_BYTES, 500, 10_000, 1 << 20)))
            if what > 0.97:
                side.wire += side.session.acknowledgement()
        for one_of in (one, other):
            kept = one_of.session._kept
            costs = [len(prefix) + size + FRAME_OVERHEAD_BYTES for _, prefix, _, size in kept]
            assert one_of.session.unacknowledged == sum(costs)
            assert one_of.session.unacknowledged <= session.MAX_UNACKNOWLEDGED_BYTES + max(costs, default=0)
    _break(one, other)
    _connect(one, other)
    for side in (one, other):
        side.wire += side.session.bye()
    while one.wire or other.wire:
        _arrive(one, other, 10_000)
        _arrive(other, one, 10_000)
    return one, other


@pytest.mark.parametrize("bound", [MAX_UNACKNOWLEDGED_BYTES, 20_000])
def test_frames_arrive_once_and_in_order_despite_breaks(monkeypatch: pytest.MonkeyPatch, bound: int) -> None:
    monkeypatch.setattr(session, "MAX_UNACKNOWLEDGED_BYTES", bound)
    monkeypatch.setattr(session, "ACK_AFTER_BYTES", bound // 16)
    wanted = os.environ.get("MONARCH_TEST_SEED")
    for seed in [int(wanted)] if wanted else range(60):
        try:
            one, other = _play(seed, 700)
            assert one.taken == other.sent and other.taken == one.sent
            assert len(one.sent) > 20 and one.said_bye and other.said_bye
            for side in (one, other):  # one last acknowledgement covers every frame
                side.session.hear(read_head((other if side is one else one).session.acknowledgement()))
                assert side.session.unacknowledged == 0 and not side.session._kept
        except BaseException:
            print(f"again: MONARCH_TEST_SEED={seed}")
            raise


# Memory ---------------------------------------------------------------------------------------------------------------


def test_acknowledgements_limit_the_unacknowledged_frames() -> None:
    one, other = Session(), Session()
    body = [bytes(1 << 20)]
    most = 0
    for _ in range(500):
        assert not one.full
        assert other.take(_head(one.send(b"p", body)))
        most = max(most, one.unacknowledged)
        if other.ack_is_due:
            one.hear(read_head(other.acknowledgement()))
            assert not other.ack_is_due
    assert most < 2 * ACK_AFTER_BYTES
    assert len(one._kept) <= 4


def test_full_window_still_sends_one_frame() -> None:
    one = Session()
    whole = bytes(1 << 30)  # never written, so the kernel commits no memory for it
    one.send(b"", [memoryview(whole)])
    assert one.full
    one.hear(Head(ACK, 0, 0, 0, 1))
    assert not one.full and one.unacknowledged == 0


def test_empty_frames_count_too_on_both_sides() -> None:
    one, other = Session(), Session()
    count = 0
    while not one.full:
        assert other.take(_head(one.send(b"", [])))
        count += 1
    assert count == MAX_UNACKNOWLEDGED_BYTES // FRAME_OVERHEAD_BYTES
    assert other.ack_is_due
    one.hear(read_head(other.acknowledgement()))
    assert one.unacknowledged == 0


def test_any_head_acknowledges() -> None:
    one, other = Session(), Session()
    for _ in range(3):
        other.take(_head(one.send(b"p", [b"b"])))
    one.hear(_head(other.send(b"", [])))
    assert one.unacknowledged == 0
    one.hear(Head(ACK, 0, 0, 0, 1))  # an old acknowledgement changes nothing
    assert one.unacknowledged == 0


def test_parts_of_any_type_are_counted_in_bytes() -> None:
    one, other = Session(), Session()
    numbers = array.array("d", [1.0, 2.0])
    parts = one.send(b"xy", [memoryview(numbers), bytearray(3), b"four"])
    head = _head(parts)
    assert (head.prefix, head.body) == (2, 16 + 3 + 4)
    assert other.take(head)


# Failures -------------------------------------------------------------------------------------------------------------


def test_a_frame_is_taken_with_its_last_byte() -> None:
    """`is_next`, called when the header arrives, changes nothing, because the connection may break before the body is
    complete.
    """
    one, other = Session(), Session()
    head = _head(one.send(b"p", [b"body"]))
    assert other.is_next(head) and other.is_next(head)
    assert other.received == 0
    [again] = one.resume(other.received)
    assert other.take(_head(again)) and not other.is_next(head)


def test_rdma_frame_is_kept_whole_until_acknowledged() -> None:
    """It counts like any frame.

    After a failed read the sender sends all of it, on the same connection or the next one.
    """
    one, other = Session(), Session()
    [_, rest] = one.rdma_frame(b"notes", b"prefix", [b"here", b"there"], [b"here"])
    assert rest == b"here"
    assert one.unacknowledged == len(b"prefix") + len(b"herethere") + FRAME_OVERHEAD_BYTES
    plain = [one.again(1), *one.resume(0)]
    for parts in plain:
        head = _head(parts)
        assert (head.kind, head.number, head.prefix, head.body) == (DATA, 1, 6, 9)
        assert parts[0][HEAD_BYTES:] == b"prefix" and parts[1:] == [b"here", b"there"]
    assert [other.take(_head(parts)) for parts in plain] == [True, False]
    one.hear(read_head(other.acknowledgement()))
    assert one.acknowledged == 1 and not one.unacknowledged


def test_control_messages_acknowledge_without_a_number() -> None:
    one, other = Session(), Session()
    assert other.take(_head(one.send(b"", [])))
    said = other.control(b"something")
    assert said[HEAD_BYTES:] == b"something"
    one.hear(read_head(said[:HEAD_BYTES]))
    assert one.acknowledged == 1 and other.sent == 0


def test_a_missing_frame_is_an_error() -> None:
    one, other = Session(), Session()
    one.send(b"lost", [])
    with pytest.raises(SessionError, match="frame 2 comes after frame 0"):
        other.take(_head(one.send(b"second", [])))
    assert other.received == 0


def test_acknowledgement_of_an_unsent_frame_is_an_error() -> None:
    one = Session()
    one.send(b"", [])
    with pytest.raises(SessionError, match="has received frame 2 of 1"):
        one.hear(Head(ACK, 0, 0, 0, 2))
    with pytest.raises(SessionError, match="has received frame 2 of 1"):
        one.take(Head(DATA, 0, 0, 1, 2))
    assert one.received == 0 and one.unacknowledged


@pytest.mark.parametrize("received", [0, 1, 6, (1 << 64) - 1])
def test_resume_at_an_impossible_frame_raises(received: int) -> None:
    one = Session()
    for _ in range(5):
        one.send(b"p", [])
    one.hear(Head(ACK, 0, 0, 0, 2))
    with pytest.raises(SessionError, match=f"it is at frame {received}, and here are frames 3 to 5"):
        one.resume(received)
    assert [_head(parts).number for parts in one.resume(3)] == [4, 5]
    assert list(one.resume(5)) == []


def _raw(kind: int = DATA, prefix: int = 0, body: int = 0, number: int = 1, magic: bytes = b"mofr") -> bytes:
    return struct.pack("!4sB3xIQQQ", magic, kind, prefix, body, number, 0)


@pytest.mark.parametrize(
    "data",
    [
        _raw(magic=b"GET "),
        _raw(magic=b"mona"),
        _raw(kind=0),
        _raw(kind=6),
        _raw(kind=CONTROL, number=0),
        _raw(kind=CONTROL, number=1, prefix=1),
        _raw(kind=CONTROL, number=0, prefix=1, body=1),
        _raw(kind=CONTROL, number=0, prefix=MAX_CONTROL_BYTES + 1),
        _raw(kind=RDMA_FRAME, number=0, prefix=1, body=1),
        _raw(kind=RDMA_FRAME, prefix=1),
        _raw(kind=RDMA_FRAME, body=1),
        _raw(kind=255),
        _raw(number=0),
        _raw(kind=ACK),
        _raw(kind=ACK, number=0, prefix=1),
        _raw(kind=ACK, number=0, body=1),
        _raw(kind=BYE, number=0, body=1),
        _raw(prefix=MAX_PREFIX_BYTES + 1),
        _raw(body=MAX_BODY_BYTES + 1),
        _raw(body=(1 << 64) - 1),
        bytes(HEAD_BYTES),
        b"",
        _raw()[:-1],
        _raw() + b"\0",
    ],
)
def test_bad_heads_are_errors_of_the_session(data: bytes) -> None:
    with pytest.raises(SessionError):
        read_head(data)


def test_head_with_the_largest_sizes_is_valid() -> None:
    assert read_head(_raw(prefix=MAX_PREFIX_BYTES, body=MAX_BODY_BYTES)) == Head(
        DATA, MAX_PREFIX_BYTES, MAX_BODY_BYTES, 1, 0
    )


def test_too_large_a_frame_is_refused_here_and_leaves_no_gap() -> None:
    one, other = Session(), Session()
    large = memoryview(bytes(MAX_BODY_BYTES))
    for prefix, body in [(bytes(MAX_PREFIX_BYTES + 1), []), (b"", [large, b"x"])]:
        with pytest.raises(ValueError, match="send it in pieces"):
            one.send(prefix, body)
    assert one.unacknowledged == 0
    assert other.take(_head(one.send(b"small", [])))
