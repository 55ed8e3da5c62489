"""`_native.Mailbox`: frames between processes, blocks that are not copied, deaths, and the turn to read."""

from __future__ import annotations

import array
import ctypes
import gc
import itertools
import os
import resource
import secrets
import signal
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from monarch_backend import _native
from monarch_backend._processes.system_calls import stands_still
from tests.transport.mailbox_processes import (
    GONE,
    LINK_PENDING,
    MET,
    REFUSED,
    TIMEOUT_S,
    UP,
    MailboxProcess,
    play,
    until,
)

INLINE = 16 << 10  # csrc/channel/frame.h: a larger payload is put in a block
KEPT = 64 << 10  # csrc/channel/python/bind.cpp: a smaller payload is copied by the receiver
RING = 128 << 10
LINE = 64


def _pattern(size: int, salt: int = 0) -> bytes:
    return bytes((i * 7 + i // 251 + salt) & 0xFF for i in range(min(size, 4096))) * (size // 4096 + 1)


def _text(size: int, salt: int = 0) -> bytes:
    return _pattern(size, salt)[:size]


# Frames ---------------------------------------------------------------------------------------------------------------


def _caller(process: MailboxProcess) -> list[tuple[bytes, bytes]]:
    link = process.connect(1)
    assert process.connect(1) == link
    answers = []
    for i in range(100):
        assert process.mailbox.send(link, 1, 2, i, i + 1, 0, 0, b"ping", b"%d" % i, None)
        (answer,) = process.read()
        assert (answer.link, answer.ref, answer.seq) == (link, i, i + 1)
        answers.append((answer.prefix, answer.body))
    return answers


def _answerer(process: MailboxProcess) -> None:
    for _ in range(100):
        (call,) = process.read()
        assert process.ranks[call.link] == 0
        assert process.mailbox.send(call.link, 2, 0, call.ref, call.seq, 0, 0, b"pong", call.body * 2, None)


def test_a_round_trip() -> None:
    answers, _ = play(_caller, _answerer)
    assert answers == [(b"pong", b"%d%d" % (i, i)) for i in range(100)]


def test_connect_reaches_live_processes_only() -> None:
    def first(process: MailboxProcess) -> int:
        assert process.mailbox.connect("0" * 32) == -1
        assert process.mailbox.connect("nonsense") == -1
        assert process.connect(1) == 0
        assert [event[:3] for event in process.events(TIMEOUT_S)] == [(0, MET, process.tokens[1])]
        return os.getpid()

    def second(process: MailboxProcess) -> tuple[int, int, str, int]:
        with process.turn():
            (event,) = process.mailbox.receive(TIMEOUT_S)
        return event  # type: ignore[no-any-return]

    pid, event = play(first, second)
    assert event[:2] == (0, MET)
    assert event[3] == pid


@pytest.mark.parametrize("ending", [signal.SIGCONT, signal.SIGKILL])
def test_stopped_process_is_pending_and_not_lost(ending: signal.Signals) -> None:
    told, tell = os.pipe()

    def still(process: MailboxProcess) -> None:
        os.write(tell, b"%d" % os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)
        assert process.read()[0].body == b"awake?"

    def caller(process: MailboxProcess) -> None:
        mailbox, token = process.mailbox, process.tokens[0]
        process.flags.wait(UP)
        pid = int(os.read(told, 10))
        until(lambda: stands_still(pid), "the other one to be stopped")
        fds, used = len(os.listdir("/proc/self/fd")), process.used()
        assert [mailbox.connect(token) for _ in range(3)] == [LINK_PENDING] * 3
        assert len(os.listdir("/proc/self/fd")) == fds + 1, "it is called once"
        assert process.events() == []
        os.kill(pid, ending)
        (event,) = process.events(TIMEOUT_S)
        if ending == signal.SIGCONT:
            assert event == (0, MET, token, pid)
            assert mailbox.connect(token) == 0
            assert process.send(0, body=b"awake?")
        else:
            assert event[1:] == (REFUSED, token)
            assert mailbox.connect(token) == -1
            assert (len(os.listdir("/proc/self/fd")), process.used()) == (fds, used)

    try:
        play(still, caller, dying=[0] if ending == signal.SIGKILL else [])
    finally:
        os.close(told)
        os.close(tell)


def test_process_without_descriptors_connects_later() -> None:
    def poor(process: MailboxProcess) -> float:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        process.flags.raise_(0)
        process.flags.wait(1)
        before = time.process_time()
        process.flags.wait(2)
        used = time.process_time() - before
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        process.next_link()
        return used

    def caller(process: MailboxProcess) -> None:
        process.flags.wait(0)
        assert process.mailbox.connect(process.tokens[0]) == LINK_PENDING
        process.flags.raise_(1)
        assert process.events(0.5) == []
        process.flags.raise_(2)
        assert process.next_link() == 0

    used, _ = play(poor, caller)
    assert used < 0.3, f"it took {used:.2f} s of a processor to wait for half a second"


# The body that the sender passes, and the bytes that arrive.
BODIES: dict[str, tuple[Any, bytes]] = {
    "bytes": (b"body", b"body"),
    "nothing": (None, b""),
    "empty": (b"", b""),
    "pieces": ([b"one", bytearray(b"two"), memoryview(b"three")[1:], b""], b"onetwohree"),
    "no pieces": ([], b""),
}
BUFFERS: dict[str, tuple[Any, list[bytes] | None]] = {
    "none": (None, None),
    "no buffers": ([], None),
    "empty ones": ([b"", b"x", bytearray()], [b"", b"x", b""]),
    "numbers": ([array.array("d", [1.5, -2.0])], [array.array("d", [1.5, -2.0]).tobytes()]),
    "many": ([b"%d" % i for i in range(1000)], [b"%d" % i for i in range(1000)]),
    "as many as there may be": ([b""] * 0xFFFF, [b""] * 0xFFFF),
    "copied": ([_text(KEPT - 200), b"end"], [_text(KEPT - 200), b"end"]),
    "kept": ([_text(KEPT), b"end"], [_text(KEPT), b"end"]),
    "past the cache": ([_text(5 << 20), memoryview(_text(100))[3:]], [_text(5 << 20), _text(100)[3:]]),
}


def test_all_frame_fields_arrive_unchanged() -> None:
    """Send every body with every kind of buffers, and the other fields with their minimum and maximum."""
    cases = [(body, buffers) for body in BODIES for buffers in BUFFERS]
    least = (0, 0, 0, 0, 0, 0)
    most = (255, 2**64 - 1, 2**64 - 1, 2**64 - 1, 2**32 - 1, 2**32 - 1)
    prefixes = (b"", _text(300))

    def sender(process: MailboxProcess) -> None:
        link = process.connect(1)
        for body, buffers in cases:
            for fields, prefix in zip((least, most), prefixes, strict=True):
                assert process.mailbox.send(link, *fields, prefix, BODIES[body][0], BUFFERS[buffers][0])
            process.read()

    def receiver(process: MailboxProcess) -> None:
        for body, buffers in cases:
            for fields, prefix in zip((least, most), prefixes, strict=True):
                (frame,) = process.read()
                assert frame[1:7] == fields
                assert frame.prefix == prefix
                assert bytes(frame.body) == BODIES[body][1], body
                wanted = BUFFERS[buffers][1]
                assert wanted is None if frame.buffers is None else list(map(bytes, frame.buffers)) == wanted, buffers
                link = frame.link
                del frame
            process.send(link)

    play(sender, receiver)


def test_payloads_around_the_inline_and_retain_sizes() -> None:
    """A retained payload is a view of the sender's memory. A copied payload belongs to the receiver."""
    own = 8 + 8  # the table of sizes, for the body and one buffer
    sizes = [edge - own + more for edge in (LINE, INLINE, KEPT) for more in (-65, -64, -63, -1, 0, 1, 63, 64, 65)]
    sizes = [size for size in sizes if size >= 0]

    def sender(process: MailboxProcess) -> None:
        link = process.connect(1)
        for size in sizes:
            assert process.send(link, body=_text(size), buffers=[b"b"])
            assert process.send(link, body=b"b", buffers=[_text(size)])

    def receiver(process: MailboxProcess) -> None:
        for size in sizes:
            for body_size, buffer_size in ((size, 1), (1, size)):
                (frame,) = process.read()
                body, (buffer,) = frame.body, frame.buffers  # type: ignore[misc]
                assert (len(body), len(buffer)) == (body_size, buffer_size)
                assert body == _text(size) if body_size > 1 else body == b"b"
                assert buffer == _text(size) if buffer_size > 1 else buffer == b"b"
                whole = (own + body_size + LINE - 1) // LINE * LINE + buffer_size
                kinds = (memoryview, memoryview) if whole >= KEPT else (bytes, bytearray)
                assert (type(body), type(buffer)) == kinds, size

    play(sender, receiver)


def test_invalid_frames_are_refused_without_side_effects() -> None:
    def sender(process: MailboxProcess) -> None:
        link = process.connect(1)
        used = process.used()
        with pytest.raises(TypeError):
            process.send(link, body="text")
        with pytest.raises(BufferError):
            process.send(link, buffers=[memoryview(b"abcdef")[::2]])
        with pytest.raises(ValueError, match="65535"):
            process.send(link, buffers=[b""] * 0x10000)
        with pytest.raises(TypeError):
            process.mailbox.send(link, 256, 0, 0, 0, 0, 0, b"", b"", None)
        for size in (1, 1 << 20):
            with pytest.raises(IndexError):
                process.send(link + 1, body=bytes(size))
        assert process.send(link, body=b"good")
        until(lambda: process.used() == used, "the room of what was not sent")

    def receiver(process: MailboxProcess) -> None:
        (frame,) = process.read()
        assert frame.body == b"good"

    play(sender, receiver)


def test_multicast_is_copied_once_and_numbered_per_receiver() -> None:
    size = 1 << 20

    def caster(process: MailboxProcess) -> None:
        links = [process.connect(rank) for rank in (1, 2, 3)]
        to = [(link, 10 + link, 20 + link, 30 + link) for link in links]
        assert process.mailbox.multicast(to, 4, 5, 6, b"small", b"body", [b"buffer"])
        used = process.used()
        assert process.mailbox.multicast(to, 4, 5, 6, b"large", b"body", [_text(size)])
        assert size <= process.host.used() - used < 2 * size
        for rank in (1, 2, 3):
            process.flags.raise_(rank)
        until(lambda: process.used() == used, "the room of a multicast")
        assert process.mailbox.multicast([], 4, 5, 6, b"no receiver", b"", None)

    def receiver(process: MailboxProcess) -> None:
        small, large = process.read(2)
        for frame in small, large:
            assert (frame.seq, frame.rank, frame.epoch) in [(10 + n, 20 + n, 30 + n) for n in range(3)]
            assert frame[1:4] == (4, 5, 6)
        assert (small.prefix, small.body, small.buffers) == (b"small", b"body", [b"buffer"])
        process.flags.wait(process.rank)
        assert type(large.buffers[0]) is bytearray  # type: ignore[index] # others read it as well: copied
        assert large.buffers[0] == _text(size)  # type: ignore[index]

    play(caster, receiver, receiver, receiver)


# Blocks that are not copied -------------------------------------------------------------------------------------------


def test_retained_payload_outlives_later_frames_and_its_sender() -> None:
    size, count = 300_000, 40

    def sender(process: MailboxProcess) -> None:
        link = process.connect(1)
        for i in range(count):
            assert process.send(link, seq=i, body=_text(100, i), buffers=[_text(size, i), _text(7, i)])
            process.flags.wait(i)
        os.kill(os.getpid(), signal.SIGKILL)

    def receiver(process: MailboxProcess) -> None:
        kept = []
        for i in range(count):
            kept.append(process.read()[0])
            if i % 3 == 0:
                kept.pop(len(kept) // 2)  # free a block in the middle, for later frames
            process.flags.raise_(i)
        (gone,) = process.read_until_gone()
        assert gone[2:] == ("killed by signal 9", False)
        assert len(kept) > count // 2
        for frame in kept:
            body, (buffer, end) = frame.body, frame.buffers  # type: ignore[misc]
            assert type(buffer) is memoryview
            assert (body, buffer, end) == (_text(100, frame.seq), _text(size, frame.seq), _text(7, frame.seq))

    play(sender, receiver, dying=[0])


def test_view_of_a_retained_payload_keeps_the_block() -> None:
    def sender(process: MailboxProcess) -> None:
        link = process.connect(1)
        used = process.used()
        assert process.send(link, body=b"b", buffers=[_text(1 << 20), b"end"])
        process.flags.wait(0)
        assert process.used() > used + (1 << 20)
        process.flags.raise_(1)
        until(lambda: process.used() == used, "a payload without a reader still has its space")

    def receiver(process: MailboxProcess) -> None:
        (frame,) = process.read()
        part = ctypes.c_char.from_buffer(frame.buffers[1][1:])  # type: ignore[index]
        del frame
        gc.collect()
        process.flags.raise_(0)
        process.flags.wait(1)
        assert part.value == b"n"
        del part
        gc.collect()

    play(sender, receiver)


def test_full_arena_refuses_sends_until_release() -> None:
    size, arena = 500_000, 2 << 20

    def sender(process: MailboxProcess) -> None:
        link = process.connect(1)
        sent = 0
        while process.send(link, seq=sent, buffers=[_text(size, sent)]):
            sent += 1
        assert sent == 3  # three blocks and a ring fill the arena
        used = process.used()
        assert not process.send(link, buffers=[_text(size)])
        assert not process.mailbox.multicast([(link, 0, 0, 0)] * 2, 1, 0, 0, b"", b"", [_text(size)])
        assert process.used() == used
        assert process.send(link, seq=sent, body=b"small")  # a small frame needs no block
        process.flags.raise_(0)
        until(lambda: process.send(link, seq=sent + 1, buffers=[_text(size, sent + 1)]), "room")

    def receiver(process: MailboxProcess) -> None:
        process.flags.wait(0)
        frames = process.read(4)
        assert [frame.seq for frame in frames] == [0, 1, 2, 3]
        for frame in frames[:3]:
            assert frame.buffers[0] == _text(size, frame.seq)  # type: ignore[index]
        assert frames[3].body == b"small"
        del frame, frames
        (frame,) = process.read()
        assert frame.seq == 4
        assert frame.buffers[0] == _text(size, 4)  # type: ignore[index]

    play(sender, receiver, arena=arena)


def test_unread_payloads_of_one_receiver_are_limited_to_its_share() -> None:
    """Unread blocks of one receiver take at most its share.

    A larger block is sent when the receiver has read all others.
    """
    size, share = 300_000, 1 << 20

    def sender(process: MailboxProcess) -> None:
        asleep, awake = process.connect(1), process.connect(2)
        sent = 0
        while process.send(asleep, seq=sent, buffers=[_text(size, sent)]):
            sent += 1
        assert sent == 3
        assert not process.mailbox.multicast([(awake, 0, 0, 0), (asleep, 0, 0, 0)], 1, 0, 0, b"", b"", [_text(size)])
        assert process.send(asleep, seq=sent, body=b"small")  # in the ring, not in a block
        for i in range(20):
            until(lambda i=i: process.send(awake, seq=i, buffers=[_text(size, i)]), "room")  # type: ignore[misc]
        until(lambda: process.send(awake, seq=20, buffers=[_text(3 * share, 20)]), "room for more than a share")
        process.flags.raise_(0)
        until(lambda: process.send(asleep, seq=4, buffers=[_text(size, 4)]), "room again")

    def asleep(process: MailboxProcess) -> None:
        process.flags.wait(0)
        frames = process.read(5)
        assert [frame.seq for frame in frames] == [0, 1, 2, 3, 4]
        assert [frame.buffers[0] == _text(size, i) for i, frame in enumerate(frames) if frame.buffers] == [True] * 4

    def awake(process: MailboxProcess) -> None:
        held = [frame.buffers[0] for frame in process.read(21)]  # type: ignore[index] # what is kept was read
        assert held == [*(_text(size, i) for i in range(20)), _text(3 * share, 20)]

    play(sender, asleep, awake, share=share)


def test_receivers_keep_at_most_half_of_an_arena() -> None:
    """The other half is for frames in flight. The receiver copies payloads beyond its half."""
    size, arena = 400_000, 2 << 20

    def sender(process: MailboxProcess) -> None:
        link = process.connect(1)
        for i in range(6):
            assert process.send(link, seq=i, buffers=[_text(size, i)])
            process.flags.wait(i)

    def receiver(process: MailboxProcess) -> None:
        held: list[Any] = []
        for i in range(6):
            (frame,) = process.read()
            held.append(frame.buffers[0])  # type: ignore[index]
            del frame
            if i == 3:
                del held[0]  # a retained one: the next payload can be retained again
            process.flags.raise_(i)
        assert [type(buffer) for buffer in held] == [memoryview, bytearray, bytearray, memoryview, bytearray]
        assert [bytes(buffer) for buffer in held] == [_text(size, i) for i in (1, 2, 3, 4, 5)]

    play(sender, receiver, arena=arena)


# Full rings -----------------------------------------------------------------------------------------------------------


def test_a_full_ring_keeps_the_order() -> None:
    count = 2000

    def sender(process: MailboxProcess) -> None:
        link = process.connect(1)
        for i in range(count):
            buffers = [_text(20_000, i)] if i % 50 == 0 else None
            assert process.send(link, seq=i, body=_text(i % 700, i), buffers=buffers)
        kept_back, unread = process.mailbox.kept_back(), process.mailbox.unread(link)
        assert kept_back > 0
        assert RING - 1000 < unread <= RING
        process.flags.raise_(0)
        process.read()  # each read also sends frames of the backlog
        assert process.mailbox.kept_back() == 0
        assert process.mailbox.unread(link) == 0

    def receiver(process: MailboxProcess) -> None:
        process.flags.wait(0)
        frames = process.read(count)
        for i, frame in enumerate(frames):
            assert frame.seq == i
            assert frame.body == _text(i % 700, i)
            assert (frame.buffers is not None) == (i % 50 == 0)
        process.send(frames[0].link)

    play(sender, receiver)


def test_unread_counts_lines_of_frames() -> None:
    def sender(process: MailboxProcess) -> None:
        link = process.connect(1)
        assert process.mailbox.unread(link) == 0
        assert process.send(link)
        assert process.mailbox.unread(link) == 2 * LINE  # the header and the table
        assert process.send(link, body=bytes(LINE - 8))
        assert process.mailbox.unread(link) == 4 * LINE
        assert process.send(link, body=bytes(INLINE))  # in a block
        assert process.mailbox.unread(link) == 5 * LINE
        process.flags.raise_(0)
        until(lambda: process.mailbox.unread(link) == 0, "a reader")

    def receiver(process: MailboxProcess) -> None:
        process.flags.wait(0)
        assert len(process.read(3)) == 3

    play(sender, receiver)


def test_dropped_link_releases_its_backlog() -> None:
    def sender(process: MailboxProcess) -> None:
        link = process.connect(1)
        used = process.used()
        sent = 0
        while process.mailbox.kept_back() == 0:
            assert process.send(link, seq=sent, body=bytes(10_000))
            sent += 1
        for i in range(10):
            assert process.send(link, seq=sent + i, buffers=[bytes(100_000)])
        process.mailbox.drop(link)
        assert process.mailbox.kept_back() == 0
        assert process.mailbox.unread(link) == 0
        assert process.used() == used
        assert process.send(link, body=b"no receiver")
        assert process.send(link, buffers=[bytes(100_000)])
        assert process.used() == used
        process.flags.raise_(0)
        (frame,) = process.read()  # the other direction still works
        assert frame.body == b"%d" % (sent - 1)

    def receiver(process: MailboxProcess) -> None:
        process.flags.wait(0)
        assert process.host.accepted(process.tokens[0], TIMEOUT_S)  # the sender's `connect` may return earlier
        frames = []
        while events := process.events():
            frames += [event for event in events if event[1] != MET]
        assert [frame[4] for frame in frames] == list(range(len(frames)))
        process.send(0, body=b"%d" % len(frames))

    play(sender, receiver)


def test_busy_sender_does_not_starve_others() -> None:
    def flooder(process: MailboxProcess) -> None:
        link = process.connect(0)
        for i in range(2000):
            assert process.send(link, seq=i)
        process.flags.raise_(0)
        process.flags.wait(2)

    def modest(process: MailboxProcess) -> None:
        process.flags.wait(0)
        assert process.send(process.connect(0))
        process.flags.raise_(1)
        process.flags.wait(2)

    def receiver(process: MailboxProcess) -> int:
        process.flags.wait(0, 1)
        for token in process.tokens[1:]:
            assert process.host.accepted(token, TIMEOUT_S)
        looks = 0
        while True:
            looks += 1
            events = process.events(TIMEOUT_S)
            if any(event[1] != MET and process.ranks[event[0]] == 2 for event in events):
                process.flags.raise_(2)
                return looks

    looks, *_ = play(receiver, flooder, modest)
    assert looks <= 2


# Ends of processes ----------------------------------------------------------------------------------------------------


def _end_by_signal(process: MailboxProcess) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _end_by_exit(process: MailboxProcess) -> None:
    os._exit(3)


def _end_in_peace(process: MailboxProcess) -> None:
    process.host.leave()
    os._exit(0)


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (_end_by_signal, ("killed by signal 9", False)),
        (_end_by_exit, ("exited with status 3", False)),
        (_end_in_peace, ("", True)),
    ],
)
def test_exit_is_reported_after_the_last_frames(end: Callable[[MailboxProcess], None], told: tuple[str, bool]) -> None:
    count = 600  # more than one read returns

    def dying(process: MailboxProcess) -> None:
        link = process.connect(1)
        for i in range(count):
            assert process.send(link, seq=i, buffers=[_text(70_000, i)] if i % 100 == 0 else None)
        assert process.mailbox.kept_back() == 0
        process.flags.raise_(0)
        process.flags.wait(1)
        end(process)

    def survivor(process: MailboxProcess) -> None:
        process.flags.wait(0)
        assert process.host.accepted(process.tokens[0], TIMEOUT_S)
        used = process.used()
        for _ in range(3):
            assert process.send(0, buffers=[bytes(100_000)])
        process.flags.raise_(1)
        events = process.read_until_gone()
        assert [event[4] for event in events[:-1]] == list(range(count))
        for i in range(0, count, 100):
            assert events[i][9][0] == _text(70_000, i)
        assert events[-1][2:] == told
        link = events[-1][0]
        assert process.send(link)  # succeeds, though no process receives it
        assert process.send(link, buffers=[bytes(100_000)])
        assert process.mailbox.unread(link) == 0
        until(lambda: process.used() < used, "the dead one's ring and what it had not read")
        assert process.mailbox.connect(process.tokens[0]) == -1

    play(dying, survivor, dying=[0])


def test_exit_of_an_awaited_process_is_reported_at_once() -> None:
    def dying(process: MailboxProcess) -> None:
        process.connect(1)
        process.flags.wait(0)
        os.kill(os.getpid(), signal.SIGKILL)

    def survivor(process: MailboxProcess) -> None:
        process.next_link()
        process.flags.raise_(0)
        with process.turn():
            (event,) = process.mailbox.receive(None)
        assert event == (0, GONE, "killed by signal 9", False)

    play(dying, survivor, dying=[0])


def test_backlog_to_a_dying_process_is_released() -> None:
    def dying(process: MailboxProcess) -> None:
        process.connect(1)
        process.flags.wait(0)
        os.kill(os.getpid(), signal.SIGKILL)

    def survivor(process: MailboxProcess) -> None:
        link = process.next_link()
        used = process.used()
        while process.mailbox.kept_back() == 0:
            assert process.send(link, buffers=[bytes(20_000)])
        process.flags.raise_(0)
        process.read_until_gone()
        assert process.mailbox.kept_back() == 0
        until(lambda: process.used() < used, "what the dead one had not read")

    play(dying, survivor, dying=[0])


def test_read_blocks_are_released_without_further_sends() -> None:
    def sender(process: MailboxProcess) -> None:
        link = process.connect(1)
        used = process.used()
        assert process.send(link, buffers=[bytes(8 << 20)])
        assert process.host.used() >= used + (8 << 20)
        until(lambda: process.host.used() == used, "the memory of what has been read")

    def receiver(process: MailboxProcess) -> None:
        process.read()

    play(sender, receiver)


ATTEMPTS = 200
STARTED, CONNECTED, TWO, SENT = 10, 500, 1000, 1  # numbers of flags


def _connected_at_once(process: MailboxProcess) -> MailboxProcess:
    """Connect both ranks to each other at the same time, with new hosts, until each has two links."""
    me, other = process.rank, 1 - process.rank
    for attempt in range(ATTEMPTS):
        tokens = [f"{token[:28]}{attempt:04x}" for token in process.tokens]
        one = MailboxProcess(me, tokens, process.flags, 16 << 20)
        process.flags.raise_(STARTED + 2 * attempt + me)
        while not process.flags.is_raised(STARTED + 2 * attempt + other):
            pass
        one.connect(other)
        process.flags.raise_(CONNECTED + 2 * attempt + me)
        process.flags.wait(CONNECTED + 2 * attempt + other)
        met = one.events(0.05)
        if len(met) == 1:
            met += one.events(0.05)
        two = len(met) == 2
        process.flags.tell(TWO + 2 * attempt + me, two)
        if two and process.flags.answer_to(TWO + 2 * attempt + other):
            return one
    raise AssertionError(f"in {ATTEMPTS} attempts the two did not connect at once")


def test_exit_is_reported_after_both_links_are_drained() -> None:
    count = 300  # more than one read returns

    def dying(process: MailboxProcess) -> None:
        one = _connected_at_once(process)
        for i in range(count):
            for link in (0, 1):
                assert one.send(link, seq=i)
        process.flags.raise_(SENT)
        os.kill(os.getpid(), signal.SIGKILL)

    def survivor(process: MailboxProcess) -> None:
        one = _connected_at_once(process)
        process.flags.wait(SENT)
        events = one.read_until_gone(links=2)
        assert [event[1] == GONE for event in events] == [False] * (2 * count) + [True] * 2
        for link in (0, 1):
            assert [event[4] for event in events if event[0] == link and event[1] != GONE] == list(range(count))

    play(dying, survivor, dying=[0])


def test_connect_without_space_for_a_ring_fails_cleanly() -> None:
    def small(process: MailboxProcess) -> None:
        held = []
        while process.send(0, buffers=[bytes(100_000)]) if held else process.connect(1) >= 0:
            held.append(1)
        process.flags.raise_(0)
        process.flags.wait(1)
        fds = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            with pytest.raises(RuntimeError, match="no room for a ring"):
                process.mailbox.connect(process.tokens[2])
        assert len(os.listdir("/proc/self/fd")) == fds
        process.flags.raise_(2)

    def silent(process: MailboxProcess) -> None:
        process.flags.wait(2)  # meanwhile it reads nothing

    def third(process: MailboxProcess) -> None:
        process.flags.wait(0)
        fds, used = len(os.listdir("/proc/self/fd")), process.used()
        times = []
        for _ in range(5):
            start = time.monotonic()
            assert process.mailbox.connect(process.tokens[0]) == -1
            times.append(time.monotonic() - start)
        assert min(times) < 0.9, "it waited for an answer that was not coming"
        assert len(os.listdir("/proc/self/fd")) == fds
        assert process.used() == used
        process.flags.raise_(1)
        process.flags.wait(2)

    play(small, silent, third, arena=1 << 20)


# The turn to read -----------------------------------------------------------------------------------------------------


def _alone(role: Callable[[MailboxProcess], Any]) -> Any:
    return play(role)[0]


def _in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    return thread, results


def _joined(thread: threading.Thread, results: list[Any]) -> Any:
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    return results[0]


def test_one_thread_at_a_time_has_the_turn() -> None:
    def role(process: MailboxProcess) -> None:
        mailbox = process.mailbox
        for _ in range(50):
            assert mailbox.acquire_turn()
            assert not mailbox.acquire_turn()
            assert not _joined(*_in_thread(mailbox.acquire_turn))
            mailbox.release_turn()
            assert _joined(*_in_thread(mailbox.acquire_turn))
            assert not mailbox.acquire_turn()
            mailbox.release_turn()

    _alone(role)


def test_threads_hand_over_the_turn_without_losing_frames() -> None:
    """Several threads of a process call another process.

    The thread with the turn also reads the replies for the others.
    """
    threads, calls = 4, 200

    def asker(process: MailboxProcess) -> int:
        link, answers, changed = process.connect(1), set[int](), threading.Condition()
        readers: list[int] = []
        most: list[int] = []

        def ask(number: int) -> None:
            for i in range(calls):
                ref = number * calls + i
                assert process.send(link, ref=ref)
                while ref not in answers:
                    if not process.mailbox.acquire_turn():
                        with changed:
                            changed.wait(0.001)
                        continue
                    readers.append(number)
                    most.append(len(readers))
                    for event in process.mailbox.receive(0.001):
                        if event[1] != MET:
                            assert event[3] not in answers
                            answers.add(event[3])
                    readers.remove(number)
                    process.mailbox.release_turn()
                    with changed:
                        changed.notify_all()

        running = [_in_thread(lambda number=number: ask(number)) for number in range(threads)]  # type: ignore[misc]
        for thread, results in running:
            assert _joined(thread, results) is None
        assert max(most) == 1
        assert answers == set(range(threads * calls))
        process.flags.raise_(0)
        return len(answers)

    def answerer(process: MailboxProcess) -> None:
        for _ in range(threads * calls):
            (call,) = process.read()
            process.send(call.link, ref=call.ref)

    play(asker, answerer)


class _Standby:
    """A thread that reads the mailbox while no other thread does. `ProgressLoop` has such a thread."""

    def __init__(self, mailbox: Any) -> None:
        self._mailbox = mailbox
        self.events: list[Any] = []
        self.turns: list[float] = []  # start times of its turns
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        while self._mailbox.acquire_turn_as_standby():
            self.turns.append(time.monotonic())
            while True:
                events = self._mailbox.receive(None, True)
                self.events += events
                if not events and self._mailbox.is_turn_wanted():
                    break
            self._mailbox.release_turn()

    def close(self) -> None:
        self._mailbox.close()
        self.thread.join(TIMEOUT_S)
        assert not self.thread.is_alive()


def test_the_standby_takes_over_soon_and_gives_way_at_once() -> None:
    def role(process: MailboxProcess) -> tuple[list[float], list[float]]:
        standby = _Standby(process.mailbox)
        overs, ways, passed = [], [], 0.0
        for turn in range(20):
            until(lambda turn=turn: len(standby.turns) > turn, "the standby")  # type: ignore[misc]
            if turn > 0:
                overs.append(standby.turns[turn] - passed)
            start = time.monotonic()
            assert process.mailbox.acquire_turn()
            ways.append(time.monotonic() - start)
            assert not _joined(*_in_thread(process.mailbox.acquire_turn))
            passed = time.monotonic()
            process.mailbox.release_turn()
        standby.close()
        return overs, ways

    overs, ways = _alone(role)
    # the standby thread waits for one tick, so that it does not disturb threads that take the turn often
    assert min(overs) >= 0.001
    assert statistics.median(overs) < 0.1
    assert statistics.median(ways) < 0.1


def test_standby_reads_while_no_thread_waits() -> None:
    def sender(process: MailboxProcess) -> None:
        link = process.connect(1)
        for i in range(1000):
            assert process.send(link, seq=i)
        process.read()

    def receiver(process: MailboxProcess) -> None:
        standby = _Standby(process.mailbox)
        until(lambda: len(standby.events) == 1001, "frames")
        assert [event[4] for event in standby.events[1:]] == list(range(1000))
        process.send(0)
        standby.close()

    play(sender, receiver)


@pytest.mark.parametrize("leads", [True, False])
def test_close_ends_the_standby(leads: bool) -> None:
    def role(process: MailboxProcess) -> None:
        if not leads:
            assert process.mailbox.acquire_turn()
        standby = _Standby(process.mailbox)
        if leads:
            until(lambda: standby.turns, "the standby")
        standby.close()
        assert not process.mailbox.acquire_turn_as_standby()
        if not leads:
            process.mailbox.release_turn()
        assert len(standby.turns) == leads

    _alone(role)


# Ends of waits --------------------------------------------------------------------------------------------------------


def test_a_wait_ends_at_its_time() -> None:
    def role(process: MailboxProcess) -> None:
        for seconds in (0.0, -1.0, 0.02):
            start = time.monotonic()
            assert process.events(seconds) == []
            assert time.monotonic() - start >= seconds

    _alone(role)


@pytest.mark.parametrize("oversubscribed", [False, True])
def test_wake_ends_a_wait(oversubscribed: bool) -> None:
    """A wake before the wait starts ends it, too. It does not end a second wait."""

    def role(process: MailboxProcess) -> None:
        process.mailbox.set_oversubscribed(oversubscribed)
        with process.turn():
            process.mailbox.wake()
            process.mailbox.wake()
            assert process.mailbox.receive(None) == []
            for _ in range(20):
                waker = threading.Thread(target=process.mailbox.wake)
                waker.start()
                assert process.mailbox.receive(None) == []
                waker.join()
            start = time.monotonic()
            assert process.mailbox.receive(0.02) == []
            assert time.monotonic() - start >= 0.02

    _alone(role)


def test_a_signal_ends_a_wait() -> None:
    """Python runs its signal handlers between two waits. An exception of a handler ends the loop."""

    class InterruptedHereError(Exception):
        pass

    def role(process: MailboxProcess) -> None:
        seen: list[int] = []
        signal.signal(signal.SIGALRM, lambda number, _: seen.append(number))
        # Repeat the signal, because the first one may arrive before the wait starts.
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        with process.turn():
            assert process.mailbox.receive(None) == []
        assert seen

        raised: list[int] = []

        def interrupt(number: int, frame: object) -> None:
            if not raised:  # on a busy machine the next signal may arrive before the timer is stopped
                raised.append(number)
                raise InterruptedHereError

        def wait_for_ever() -> None:
            signal.signal(signal.SIGALRM, interrupt)
            with process.turn():
                while True:
                    process.mailbox.receive(None)

        with pytest.raises(InterruptedHereError):
            wait_for_ever()
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert process.mailbox.acquire_turn()

    _alone(role)


def test_a_signal_comes_before_the_sleep() -> None:
    """A signal that arrives before the wait sleeps, for example while it spins. Its handler runs, and the wait ends."""

    class InterruptedHereError(Exception):
        pass

    def role(process: MailboxProcess) -> None:
        # raises a signal without running Python's handlers
        strike, receive = ctypes.PyDLL(None)["raise"], process.mailbox.receive

        def strike_and_wait() -> list[Any]:
            """Call both from C, so that Python cannot run a handler in between."""
            return list(itertools.chain(map(strike, [signal.SIGALRM]), map(receive, [TIMEOUT_S])))

        def interrupt(number: int, frame: object) -> None:
            raise InterruptedHereError

        start = time.monotonic()
        signal.signal(signal.SIGALRM, lambda *_: process.mailbox.wake())
        with process.turn():
            assert strike_and_wait() == [0, []]
            signal.signal(signal.SIGALRM, interrupt)
            with pytest.raises(InterruptedHereError):
                strike_and_wait()
            process.mailbox.wake()
            assert receive(TIMEOUT_S) == []  # the mailbox still works
        assert time.monotonic() - start < TIMEOUT_S

    _alone(role)


def test_waiting_and_large_copies_leave_the_interpreter_to_others() -> None:
    enough = 300_000  # more than the counter reaches in its share of the interpreter before the other thread waits

    def sender(process: MailboxProcess) -> int:
        link = process.connect(1)
        ran = 0
        done = threading.Event()

        def count() -> None:
            nonlocal ran
            while not done.is_set():
                ran += 1
                if ran == enough:
                    process.flags.raise_(1)

        counter = threading.Thread(target=count)
        counter.start()
        with process.turn():
            process.flags.raise_(0)
            while not [event for event in process.mailbox.receive(None) if event[1] != MET]:
                pass
        done.set()
        counter.join()
        assert process.send(link)
        return ran

    def receiver(process: MailboxProcess) -> None:
        process.flags.wait(0)
        process.flags.wait(1)  # while the sender waits
        assert process.send(0)
        process.read()

    assert play(sender, receiver)[0] >= enough


def test_early_connection_is_accepted_once_the_mailbox_exists() -> None:
    """A process that knows a token can connect as soon as the host with that token listens."""
    token = secrets.token_hex(16)
    late, host = _native.Host(16 << 20, token), _native.Host(16 << 20)
    mailbox = _native.Mailbox(host, False)
    assert mailbox.connect(token) == LINK_PENDING, "it does not answer yet"
    its = _native.Mailbox(late, False)
    for each, other in ((mailbox, token), (its, host.token)):
        assert each.acquire_turn()
        (event,) = each.receive(TIMEOUT_S)
        assert event[1:3] == (MET, other), event
        each.release_turn()
    for each in (late, host):
        each.leave()


def test_host_without_a_mailbox_can_be_abandoned() -> None:
    """A forked child abandons such a host, for example: the host's threads do not exist in the child."""
    host = _native.Host(16 << 20, secrets.token_hex(16))
    before = len(os.listdir("/proc/self/fd"))
    host.abandon()
    assert len(os.listdir("/proc/self/fd")) < before
