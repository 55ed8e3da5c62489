"""`_native.Post`: frames between processes, blocks that stay in place, deaths, and the turn to read."""

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
from monarch_backend._processes.linux import stands_still
from tests.transport.mailbox_processes import GONE, MET, PATIENCE, REFUSED, SILENT, UP, Office, play, until

INLINE = 16 << 10  # csrc/channel/frame.h: a larger payload goes in a block
KEPT = 64 << 10  # csrc/channel/python/bind.cpp: a smaller one is copied
RING = 128 << 10
LINE = 64


def _pattern(size: int, salt: int = 0) -> bytes:
    return bytes((i * 7 + i // 251 + salt) & 0xFF for i in range(min(size, 4096))) * (size // 4096 + 1)


def _text(size: int, salt: int = 0) -> bytes:
    return _pattern(size, salt)[:size]


# Frames ---------------------------------------------------------------------------------------------------------------


def _caller(office: Office) -> list[tuple[bytes, bytes]]:
    link = office.connect(1)
    assert office.connect(1) == link
    answers = []
    for i in range(100):
        assert office.post.send(link, 1, 2, i, i + 1, 0, 0, b"ping", b"%d" % i, None)
        (answer,) = office.read()
        assert (answer.link, answer.ref, answer.seq) == (link, i, i + 1)
        answers.append((answer.prefix, answer.body))
    return answers


def _answerer(office: Office) -> None:
    for _ in range(100):
        (call,) = office.read()
        assert office.ranks[call.link] == 0
        assert office.post.send(call.link, 2, 0, call.ref, call.seq, 0, 0, b"pong", call.body * 2, None)


def test_a_round_trip() -> None:
    answers, _ = play(_caller, _answerer)
    assert answers == [(b"pong", b"%d%d" % (i, i)) for i in range(100)]


def test_who_is_met_and_who_is_not() -> None:
    def first(office: Office) -> int:
        assert office.post.connect("0" * 32) == -1
        assert office.post.connect("nonsense") == -1
        assert office.connect(1) == 0
        assert [event[:3] for event in office.events(PATIENCE)] == [(0, MET, office.tokens[1])]
        return os.getpid()

    def second(office: Office) -> tuple[int, int, str, int]:
        with office.turn():
            (event,) = office.post.receive(PATIENCE)
        return event  # type: ignore[no-any-return]

    pid, event = play(first, second)
    assert event[:2] == (0, MET)
    assert event[3] == pid


@pytest.mark.parametrize("ending", [signal.SIGCONT, signal.SIGKILL])
def test_one_who_stands_still_is_not_taken_for_gone(ending: signal.Signals) -> None:
    told, tell = os.pipe()

    def still(office: Office) -> None:
        os.write(tell, b"%d" % os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)
        assert office.read()[0].body == b"awake?"

    def caller(office: Office) -> None:
        post, token = office.post, office.tokens[0]
        office.flags.wait(UP)
        pid = int(os.read(told, 10))
        until(lambda: stands_still(pid), "the other one to be stopped")
        fds, used = len(os.listdir("/proc/self/fd")), office.used()
        assert [post.connect(token) for _ in range(3)] == [SILENT] * 3
        assert len(os.listdir("/proc/self/fd")) == fds + 1, "it is called once"
        assert office.events() == []
        os.kill(pid, ending)
        (event,) = office.events(PATIENCE)
        if ending == signal.SIGCONT:
            assert event == (0, MET, token, pid)
            assert post.connect(token) == 0
            assert office.send(0, body=b"awake?")
        else:
            assert event[1:] == (REFUSED, token)
            assert post.connect(token) == -1
            assert (len(os.listdir("/proc/self/fd")), office.used()) == (fds, used)

    try:
        play(still, caller, dying=[0] if ending == signal.SIGKILL else [])
    finally:
        os.close(told)
        os.close(tell)


def test_one_without_descriptors_is_met_when_it_has_some() -> None:
    def poor(office: Office) -> float:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        office.flags.raise_(0)
        office.flags.wait(1)
        before = time.process_time()
        office.flags.wait(2)
        used = time.process_time() - before
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        office.meet()
        return used

    def caller(office: Office) -> None:
        office.flags.wait(0)
        assert office.post.connect(office.tokens[0]) == SILENT
        office.flags.raise_(1)
        assert office.events(0.5) == []
        office.flags.raise_(2)
        assert office.meet() == 0

    used, _ = play(poor, caller)
    assert used < 0.3, f"it took {used:.2f} s of a processor to wait for half a second"


# As the sender gives it, and as it arrives.
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


def test_every_field_arrives_as_it_was_sent() -> None:
    """All bodies with all buffers, with all other fields at their least and their largest."""
    cases = [(body, buffers) for body in BODIES for buffers in BUFFERS]
    least = (0, 0, 0, 0, 0, 0)
    most = (255, 2**64 - 1, 2**64 - 1, 2**64 - 1, 2**32 - 1, 2**32 - 1)
    prefixes = (b"", _text(300))

    def sender(office: Office) -> None:
        link = office.connect(1)
        for body, buffers in cases:
            for fields, prefix in zip((least, most), prefixes, strict=True):
                assert office.post.send(link, *fields, prefix, BODIES[body][0], BUFFERS[buffers][0])
            office.read()

    def receiver(office: Office) -> None:
        for body, buffers in cases:
            for fields, prefix in zip((least, most), prefixes, strict=True):
                (frame,) = office.read()
                assert frame[1:7] == fields
                assert frame.prefix == prefix
                assert bytes(frame.body) == BODIES[body][1], body
                wanted = BUFFERS[buffers][1]
                assert wanted is None if frame.buffers is None else list(map(bytes, frame.buffers)) == wanted, buffers
                link = frame.link
                del frame
            office.send(link)

    play(sender, receiver)


def test_sizes_around_what_goes_inline_and_what_is_kept() -> None:
    """What is kept is a view of the sender's memory; what is copied belongs to the receiver."""
    own = 8 + 8  # the table: of the body and one buffer
    sizes = [edge - own + more for edge in (LINE, INLINE, KEPT) for more in (-65, -64, -63, -1, 0, 1, 63, 64, 65)]
    sizes = [size for size in sizes if size >= 0]

    def sender(office: Office) -> None:
        link = office.connect(1)
        for size in sizes:
            assert office.send(link, body=_text(size), buffers=[b"b"])
            assert office.send(link, body=b"b", buffers=[_text(size)])

    def receiver(office: Office) -> None:
        for size in sizes:
            for body_size, buffer_size in ((size, 1), (1, size)):
                (frame,) = office.read()
                body, (buffer,) = frame.body, frame.buffers  # type: ignore[misc]
                assert (len(body), len(buffer)) == (body_size, buffer_size)
                assert body == _text(size) if body_size > 1 else body == b"b"
                assert buffer == _text(size) if buffer_size > 1 else buffer == b"b"
                whole = (own + body_size + LINE - 1) // LINE * LINE + buffer_size
                kinds = (memoryview, memoryview) if whole >= KEPT else (bytes, bytearray)
                assert (type(body), type(buffer)) == kinds, size

    play(sender, receiver)


def test_what_cannot_be_sent_is_refused_and_nothing_else_is_hurt() -> None:
    def sender(office: Office) -> None:
        link = office.connect(1)
        used = office.used()
        with pytest.raises(TypeError):
            office.send(link, body="text")
        with pytest.raises(BufferError):
            office.send(link, buffers=[memoryview(b"abcdef")[::2]])
        with pytest.raises(ValueError, match="65535"):
            office.send(link, buffers=[b""] * 0x10000)
        with pytest.raises(TypeError):
            office.post.send(link, 256, 0, 0, 0, 0, 0, b"", b"", None)
        for size in (1, 1 << 20):
            with pytest.raises(IndexError):
                office.send(link + 1, body=bytes(size))
        assert office.send(link, body=b"good")
        until(lambda: office.used() == used, "the room of what was not sent")

    def receiver(office: Office) -> None:
        (frame,) = office.read()
        assert frame.body == b"good"

    play(sender, receiver)


def test_a_cast_is_copied_once_and_numbered_for_each() -> None:
    size = 1 << 20

    def caster(office: Office) -> None:
        links = [office.connect(rank) for rank in (1, 2, 3)]
        to = [(link, 10 + link, 20 + link, 30 + link) for link in links]
        assert office.post.cast(to, 4, 5, 6, b"small", b"body", [b"buffer"])
        used = office.used()
        assert office.post.cast(to, 4, 5, 6, b"large", b"body", [_text(size)])
        assert size <= office.host.used() - used < 2 * size
        for rank in (1, 2, 3):
            office.flags.raise_(rank)
        until(lambda: office.used() == used, "the room of a cast")
        assert office.post.cast([], 4, 5, 6, b"to nobody", b"", None)

    def receiver(office: Office) -> None:
        small, large = office.read(2)
        for frame in small, large:
            assert (frame.seq, frame.rank, frame.epoch) in [(10 + n, 20 + n, 30 + n) for n in range(3)]
            assert frame[1:4] == (4, 5, 6)
        assert (small.prefix, small.body, small.buffers) == (b"small", b"body", [b"buffer"])
        office.flags.wait(office.rank)
        assert type(large.buffers[0]) is bytearray  # type: ignore[index] # others read it as well: copied
        assert large.buffers[0] == _text(size)  # type: ignore[index]

    play(caster, receiver, receiver, receiver)


# Blocks that stay where they lie --------------------------------------------------------------------------------------


def test_what_is_kept_stays_valid_after_more_was_sent_and_after_its_sender_died() -> None:
    size, count = 300_000, 40

    def sender(office: Office) -> None:
        link = office.connect(1)
        for i in range(count):
            assert office.send(link, seq=i, body=_text(100, i), buffers=[_text(size, i), _text(7, i)])
            office.flags.wait(i)
        os.kill(os.getpid(), signal.SIGKILL)

    def receiver(office: Office) -> None:
        kept = []
        for i in range(count):
            kept.append(office.read()[0])
            if i % 3 == 0:
                kept.pop(len(kept) // 2)  # room in the middle for what comes next
            office.flags.raise_(i)
        (gone,) = office.read_till_gone()
        assert gone[2:] == ("killed by signal 9", False)
        assert len(kept) > count // 2
        for frame in kept:
            body, (buffer, end) = frame.body, frame.buffers  # type: ignore[misc]
            assert type(buffer) is memoryview
            assert (body, buffer, end) == (_text(100, frame.seq), _text(size, frame.seq), _text(7, frame.seq))

    play(sender, receiver, dying=[0])


def test_a_part_of_what_is_kept_keeps_the_whole() -> None:
    def sender(office: Office) -> None:
        link = office.connect(1)
        used = office.used()
        assert office.send(link, body=b"b", buffers=[_text(1 << 20), b"end"])
        office.flags.wait(0)
        assert office.used() > used + (1 << 20)
        office.flags.raise_(1)
        until(lambda: office.used() == used, "the room of a payload that nobody holds any more")

    def receiver(office: Office) -> None:
        (frame,) = office.read()
        part = ctypes.c_char.from_buffer(frame.buffers[1][1:])  # type: ignore[index]
        del frame
        gc.collect()
        office.flags.raise_(0)
        office.flags.wait(1)
        assert part.value == b"n"
        del part
        gc.collect()

    play(sender, receiver)


def test_no_room_is_said_and_there_is_room_again_after_release() -> None:
    size, arena = 500_000, 2 << 20

    def sender(office: Office) -> None:
        link = office.connect(1)
        sent = 0
        while office.send(link, seq=sent, buffers=[_text(size, sent)]):
            sent += 1
        assert sent == 3  # and a ring
        used = office.used()
        assert not office.send(link, buffers=[_text(size)])
        assert not office.post.cast([(link, 0, 0, 0)] * 2, 1, 0, 0, b"", b"", [_text(size)])
        assert office.used() == used
        assert office.send(link, seq=sent, body=b"small")  # needs none
        office.flags.raise_(0)
        until(lambda: office.send(link, seq=sent + 1, buffers=[_text(size, sent + 1)]), "room")

    def receiver(office: Office) -> None:
        office.flags.wait(0)
        frames = office.read(4)
        assert [frame.seq for frame in frames] == [0, 1, 2, 3]
        for frame in frames[:3]:
            assert frame.buffers[0] == _text(size, frame.seq)  # type: ignore[index]
        assert frames[3].body == b"small"
        del frame, frames
        (frame,) = office.read()
        assert frame.seq == 4
        assert frame.buffers[0] == _text(size, 4)  # type: ignore[index]

    play(sender, receiver, arena=arena)


def test_who_does_not_read_leaves_room_for_the_others() -> None:
    """A share of the arena for what one receiver has not read; what is larger goes when it has read everything."""
    size, share = 300_000, 1 << 20

    def sender(office: Office) -> None:
        asleep, awake = office.connect(1), office.connect(2)
        sent = 0
        while office.send(asleep, seq=sent, buffers=[_text(size, sent)]):
            sent += 1
        assert sent == 3
        assert not office.post.cast([(awake, 0, 0, 0), (asleep, 0, 0, 0)], 1, 0, 0, b"", b"", [_text(size)])
        assert office.send(asleep, seq=sent, body=b"small")  # lies in the ring
        for i in range(20):
            until(lambda i=i: office.send(awake, seq=i, buffers=[_text(size, i)]), "room")  # type: ignore[misc]
        until(lambda: office.send(awake, seq=20, buffers=[_text(3 * share, 20)]), "room for more than a share")
        office.flags.raise_(0)
        until(lambda: office.send(asleep, seq=4, buffers=[_text(size, 4)]), "room again")

    def asleep(office: Office) -> None:
        office.flags.wait(0)
        frames = office.read(5)
        assert [frame.seq for frame in frames] == [0, 1, 2, 3, 4]
        assert [frame.buffers[0] == _text(size, i) for i, frame in enumerate(frames) if frame.buffers] == [True] * 4

    def awake(office: Office) -> None:
        held = [frame.buffers[0] for frame in office.read(21)]  # type: ignore[index] # what is kept was read
        assert held == [*(_text(size, i) for i in range(20)), _text(3 * share, 20)]

    play(sender, asleep, awake, share=share)


def test_receivers_keep_at_most_half_of_an_arena() -> None:
    """The rest of it is for what is on its way; more than that is copied."""
    size, arena = 400_000, 2 << 20

    def sender(office: Office) -> None:
        link = office.connect(1)
        for i in range(6):
            assert office.send(link, seq=i, buffers=[_text(size, i)])
            office.flags.wait(i)

    def receiver(office: Office) -> None:
        held: list[Any] = []
        for i in range(6):
            (frame,) = office.read()
            held.append(frame.buffers[0])  # type: ignore[index]
            del frame
            if i == 3:
                del held[0]  # a kept one: the next is kept again
            office.flags.raise_(i)
        assert [type(buffer) for buffer in held] == [memoryview, bytearray, bytearray, memoryview, bytearray]
        assert [bytes(buffer) for buffer in held] == [_text(size, i) for i in (1, 2, 3, 4, 5)]

    play(sender, receiver, arena=arena)


# Full rings -----------------------------------------------------------------------------------------------------------


def test_a_full_ring_keeps_the_order() -> None:
    count = 2000

    def sender(office: Office) -> None:
        link = office.connect(1)
        for i in range(count):
            buffers = [_text(20_000, i)] if i % 50 == 0 else None
            assert office.send(link, seq=i, body=_text(i % 700, i), buffers=buffers)
        kept_back, unread = office.post.kept_back(), office.post.unread(link)
        assert kept_back > 0
        assert RING - 1000 < unread <= RING
        office.flags.raise_(0)
        office.read()  # whoever reads passes on what waits
        assert office.post.kept_back() == 0
        assert office.post.unread(link) == 0

    def receiver(office: Office) -> None:
        office.flags.wait(0)
        frames = office.read(count)
        for i, frame in enumerate(frames):
            assert frame.seq == i
            assert frame.body == _text(i % 700, i)
            assert (frame.buffers is not None) == (i % 50 == 0)
        office.send(frames[0].link)

    play(sender, receiver)


def test_unread_counts_lines_of_frames() -> None:
    def sender(office: Office) -> None:
        link = office.connect(1)
        assert office.post.unread(link) == 0
        assert office.send(link)
        assert office.post.unread(link) == 2 * LINE  # the header; the table
        assert office.send(link, body=bytes(LINE - 8))
        assert office.post.unread(link) == 4 * LINE
        assert office.send(link, body=bytes(INLINE))  # in a block
        assert office.post.unread(link) == 5 * LINE
        office.flags.raise_(0)
        until(lambda: office.post.unread(link) == 0, "a reader")

    def receiver(office: Office) -> None:
        office.flags.wait(0)
        assert len(office.read(3)) == 3

    play(sender, receiver)


def test_a_link_that_is_dropped_gives_back_what_waited() -> None:
    def sender(office: Office) -> None:
        link = office.connect(1)
        used = office.used()
        sent = 0
        while office.post.kept_back() == 0:
            assert office.send(link, seq=sent, body=bytes(10_000))
            sent += 1
        for i in range(10):
            assert office.send(link, seq=sent + i, buffers=[bytes(100_000)])
        office.post.drop(link)
        assert office.post.kept_back() == 0
        assert office.post.unread(link) == 0
        assert office.used() == used
        assert office.send(link, body=b"to nobody")
        assert office.send(link, buffers=[bytes(100_000)])
        assert office.used() == used
        office.flags.raise_(0)
        (frame,) = office.read()  # the other direction is as it was
        assert frame.body == b"%d" % (sent - 1)

    def receiver(office: Office) -> None:
        office.flags.wait(0)
        frames = []
        while events := office.events():
            frames += [event for event in events if event[1] != MET]
        assert [frame[4] for frame in frames] == list(range(len(frames)))
        office.send(0, body=b"%d" % len(frames))

    play(sender, receiver)


def test_one_who_always_has_something_does_not_keep_the_others_out() -> None:
    def flooder(office: Office) -> None:
        link = office.connect(0)
        for i in range(2000):
            assert office.send(link, seq=i)
        office.flags.raise_(0)
        office.flags.wait(2)

    def modest(office: Office) -> None:
        office.flags.wait(0)
        assert office.send(office.connect(0))
        office.flags.raise_(1)
        office.flags.wait(2)

    def receiver(office: Office) -> int:
        office.flags.wait(0, 1)
        looks = 0
        while True:
            looks += 1
            events = office.events(PATIENCE)
            if any(event[1] != MET and office.ranks[event[0]] == 2 for event in events):
                office.flags.raise_(2)
                return looks

    looks, *_ = play(receiver, flooder, modest)
    assert looks <= 2


# The ends of processes ------------------------------------------------------------------------------------------------


def _end_by_signal(office: Office) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _end_by_exit(office: Office) -> None:
    os._exit(3)


def _end_in_peace(office: Office) -> None:
    office.host.leave()
    os._exit(0)


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (_end_by_signal, ("killed by signal 9", False)),
        (_end_by_exit, ("exited with status 3", False)),
        (_end_in_peace, ("", True)),
    ],
)
def test_the_end_of_a_process_is_told_after_its_last_frames(
    end: Callable[[Office], None], told: tuple[str, bool]
) -> None:
    count = 600  # more than one look brings

    def dying(office: Office) -> None:
        link = office.connect(1)
        for i in range(count):
            assert office.send(link, seq=i, buffers=[_text(70_000, i)] if i % 100 == 0 else None)
        assert office.post.kept_back() == 0
        office.flags.raise_(0)
        office.flags.wait(1)
        end(office)

    def survivor(office: Office) -> None:
        office.flags.wait(0)
        assert office.host.accepted(office.tokens[0], PATIENCE)
        used = office.used()
        for _ in range(3):
            assert office.send(0, buffers=[bytes(100_000)])
        office.flags.raise_(1)
        events = office.read_till_gone()
        assert [event[4] for event in events[:-1]] == list(range(count))
        for i in range(0, count, 100):
            assert events[i][9][0] == _text(70_000, i)
        assert events[-1][2:] == told
        link = events[-1][0]
        assert office.send(link)  # to nobody
        assert office.send(link, buffers=[bytes(100_000)])
        assert office.post.unread(link) == 0
        until(lambda: office.used() < used, "the dead one's ring and what it had not read")
        assert office.post.connect(office.tokens[0]) == -1

    play(dying, survivor, dying=[0])


def test_the_end_of_one_who_is_waited_for_is_told_at_once() -> None:
    def dying(office: Office) -> None:
        office.connect(1)
        office.flags.wait(0)
        os.kill(os.getpid(), signal.SIGKILL)

    def survivor(office: Office) -> None:
        office.meet()
        office.flags.raise_(0)
        with office.turn():
            (event,) = office.post.receive(None)
        assert event == (0, GONE, "killed by signal 9", False)

    play(dying, survivor, dying=[0])


def test_what_waits_for_one_who_dies_is_given_up() -> None:
    def dying(office: Office) -> None:
        office.connect(1)
        office.flags.wait(0)
        os.kill(os.getpid(), signal.SIGKILL)

    def survivor(office: Office) -> None:
        link = office.meet()
        used = office.used()
        while office.post.kept_back() == 0:
            assert office.send(link, buffers=[bytes(20_000)])
        office.flags.raise_(0)
        office.read_till_gone()
        assert office.post.kept_back() == 0
        until(lambda: office.used() < used, "what the dead one had not read")

    play(dying, survivor, dying=[0])


def test_what_has_been_read_is_given_back_though_nothing_more_is_sent() -> None:
    def sender(office: Office) -> None:
        link = office.connect(1)
        used = office.used()
        assert office.send(link, buffers=[bytes(8 << 20)])
        assert office.host.used() >= used + (8 << 20)
        until(lambda: office.host.used() == used, "the memory of what has been read")

    def receiver(office: Office) -> None:
        office.read()

    play(sender, receiver)


ATTEMPTS = 200
STARTED, CONNECTED, TWO, SENT = 10, 500, 1000, 1  # flags


def _connected_at_once(office: Office) -> Office:
    """Both ranks connect to each other at the same time, with new hosts, until both find two links."""
    me, other = office.rank, 1 - office.rank
    for attempt in range(ATTEMPTS):
        tokens = [f"{token[:28]}{attempt:04x}" for token in office.tokens]
        one = Office(me, tokens, office.flags, 16 << 20)
        office.flags.raise_(STARTED + 2 * attempt + me)
        while not office.flags.is_raised(STARTED + 2 * attempt + other):
            pass
        assert one.post.connect(tokens[other]) >= 0
        office.flags.raise_(CONNECTED + 2 * attempt + me)
        office.flags.wait(CONNECTED + 2 * attempt + other)
        met = one.events(0.05)
        if len(met) == 1:
            met += one.events(0.05)
        two = len(met) == 2
        office.flags.tell(TWO + 2 * attempt + me, two)
        if two and office.flags.hear(TWO + 2 * attempt + other):
            return one
    raise AssertionError(f"in {ATTEMPTS} attempts the two did not connect at once")


def test_one_whom_two_links_lead_to_is_gone_when_both_are_read() -> None:
    count = 300  # more than one look brings

    def dying(office: Office) -> None:
        one = _connected_at_once(office)
        for i in range(count):
            for link in (0, 1):
                assert one.send(link, seq=i)
        office.flags.raise_(SENT)
        os.kill(os.getpid(), signal.SIGKILL)

    def survivor(office: Office) -> None:
        one = _connected_at_once(office)
        office.flags.wait(SENT)
        events = one.read_till_gone(links=2)
        assert [event[1] == GONE for event in events] == [False] * (2 * count) + [True] * 2
        for link in (0, 1):
            assert [event[4] for event in events if event[0] == link and event[1] != GONE] == list(range(count))

    play(dying, survivor, dying=[0])


def test_without_room_for_a_ring_nobody_is_met_and_nothing_is_left_behind() -> None:
    def small(office: Office) -> None:
        held = []
        while office.send(0, buffers=[bytes(100_000)]) if held else office.connect(1) >= 0:
            held.append(1)
        office.flags.raise_(0)
        office.flags.wait(1)
        fds = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            with pytest.raises(RuntimeError, match="no room for a ring"):
                office.post.connect(office.tokens[2])
        assert len(os.listdir("/proc/self/fd")) == fds
        office.flags.raise_(2)

    def silent(office: Office) -> None:
        office.flags.wait(2)  # reads nothing

    def third(office: Office) -> None:
        office.flags.wait(0)
        fds, used = len(os.listdir("/proc/self/fd")), office.used()
        times = []
        for _ in range(5):
            start = time.monotonic()
            assert office.post.connect(office.tokens[0]) == -1
            times.append(time.monotonic() - start)
        assert min(times) < 0.9, "it waited for an answer that was not coming"
        assert len(os.listdir("/proc/self/fd")) == fds
        assert office.used() == used
        office.flags.raise_(1)
        office.flags.wait(2)

    play(small, silent, third, arena=1 << 20)


# The turn to read -----------------------------------------------------------------------------------------------------


def _alone(role: Callable[[Office], Any]) -> Any:
    return play(role)[0]


def _in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    return thread, results


def _joined(thread: threading.Thread, results: list[Any]) -> Any:
    thread.join(PATIENCE)
    assert not thread.is_alive()
    return results[0]


def test_one_thread_at_a_time_has_the_turn() -> None:
    def role(office: Office) -> None:
        post = office.post
        for _ in range(50):
            assert post.take()
            assert not post.take()
            assert not _joined(*_in_thread(post.take))
            post.pass_on()
            assert _joined(*_in_thread(post.take))
            assert not post.take()
            post.pass_on()

    _alone(role)


def test_turns_are_handed_between_threads_and_nothing_is_lost() -> None:
    """Several threads of a process ask another one; whoever has the turn takes the others' answers as well."""
    threads, calls = 4, 200

    def asker(office: Office) -> int:
        link, answers, changed = office.connect(1), set[int](), threading.Condition()
        readers: list[int] = []
        most: list[int] = []

        def ask(number: int) -> None:
            for i in range(calls):
                ref = number * calls + i
                assert office.send(link, ref=ref)
                while ref not in answers:
                    if not office.post.take():
                        with changed:
                            changed.wait(0.001)
                        continue
                    readers.append(number)
                    most.append(len(readers))
                    for event in office.post.receive(0.001):
                        if event[1] != MET:
                            assert event[3] not in answers
                            answers.add(event[3])
                    readers.remove(number)
                    office.post.pass_on()
                    with changed:
                        changed.notify_all()

        running = [_in_thread(lambda number=number: ask(number)) for number in range(threads)]  # type: ignore[misc]
        for thread, results in running:
            assert _joined(thread, results) is None
        assert max(most) == 1
        assert answers == set(range(threads * calls))
        office.flags.raise_(0)
        return len(answers)

    def answerer(office: Office) -> None:
        for _ in range(threads * calls):
            (call,) = office.read()
            office.send(call.link, ref=call.ref)

    play(asker, answerer)


class _Standby:
    """A thread that reads while nobody else does, as `transport._pump` has one."""

    def __init__(self, post: Any) -> None:
        self._post = post
        self.events: list[Any] = []
        self.turns: list[float] = []  # when they began
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        while self._post.stand_by():
            self.turns.append(time.monotonic())
            while True:
                events = self._post.receive(None, True)
                self.events += events
                if not events and self._post.wanted():
                    break
            self._post.pass_on()

    def close(self) -> None:
        self._post.close()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


def test_the_standby_takes_over_soon_and_gives_way_at_once() -> None:
    def role(office: Office) -> tuple[list[float], list[float]]:
        standby = _Standby(office.post)
        overs, ways, passed = [], [], 0.0
        for turn in range(20):
            until(lambda turn=turn: len(standby.turns) > turn, "the standby")  # type: ignore[misc]
            if turn > 0:
                overs.append(standby.turns[turn] - passed)
            start = time.monotonic()
            assert office.post.take()
            ways.append(time.monotonic() - start)
            assert not _joined(*_in_thread(office.post.take))
            passed = time.monotonic()
            office.post.pass_on()
        standby.close()
        return overs, ways

    overs, ways = _alone(role)
    assert min(overs) >= 0.001  # a tick, so that readers who come and go are not disturbed
    assert statistics.median(overs) < 0.1
    assert statistics.median(ways) < 0.1


def test_the_standby_reads_what_comes_while_nobody_waits() -> None:
    def sender(office: Office) -> None:
        link = office.connect(1)
        for i in range(1000):
            assert office.send(link, seq=i)
        office.read()

    def receiver(office: Office) -> None:
        standby = _Standby(office.post)
        until(lambda: len(standby.events) == 1001, "frames")
        assert [event[4] for event in standby.events[1:]] == list(range(1000))
        office.send(0)
        standby.close()

    play(sender, receiver)


@pytest.mark.parametrize("leads", [True, False])
def test_close_ends_the_standby(leads: bool) -> None:
    def role(office: Office) -> None:
        if not leads:
            assert office.post.take()
        standby = _Standby(office.post)
        if leads:
            until(lambda: standby.turns, "the standby")
        standby.close()
        assert not office.post.stand_by()
        if not leads:
            office.post.pass_on()
        assert len(standby.turns) == leads

    _alone(role)


# What ends a wait -----------------------------------------------------------------------------------------------------


def test_a_wait_ends_at_its_time() -> None:
    def role(office: Office) -> None:
        for seconds in (0.0, -1.0, 0.02):
            start = time.monotonic()
            assert office.events(seconds) == []
            assert time.monotonic() - start >= seconds

    _alone(role)


@pytest.mark.parametrize("crowded", [False, True])
def test_wake_ends_a_wait(crowded: bool) -> None:
    """Also one that begins only later; but not the one after it."""

    def role(office: Office) -> None:
        office.post.crowd(crowded)
        with office.turn():
            office.post.wake()
            office.post.wake()
            assert office.post.receive(None) == []
            for _ in range(20):
                waker = threading.Thread(target=office.post.wake)
                waker.start()
                assert office.post.receive(None) == []
                waker.join()
            start = time.monotonic()
            assert office.post.receive(0.02) == []
            assert time.monotonic() - start >= 0.02

    _alone(role)


def test_a_signal_ends_a_wait() -> None:
    """Python runs its handlers between two waits; what a handler raises ends the loop."""

    class InterruptedHereError(Exception):
        pass

    def role(office: Office) -> None:
        seen: list[int] = []
        signal.signal(signal.SIGALRM, lambda number, _: seen.append(number))
        # Again and again: the first may come before the wait begins.
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        with office.turn():
            assert office.post.receive(None) == []
        assert seen

        raised: list[int] = []

        def interrupt(number: int, frame: object) -> None:
            if not raised:  # a busy machine may have the next one strike before its timer is stopped
                raised.append(number)
                raise InterruptedHereError

        def wait_for_ever() -> None:
            signal.signal(signal.SIGALRM, interrupt)
            with office.turn():
                while True:
                    office.post.receive(None)

        with pytest.raises(InterruptedHereError):
            wait_for_ever()
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert office.post.take()

    _alone(role)


def test_a_signal_comes_before_the_sleep() -> None:
    """While the wait spins, say: what its handler does is done before, and ends the wait as ever."""

    class InterruptedHereError(Exception):
        pass

    def role(office: Office) -> None:
        strike, receive = ctypes.PyDLL(None)["raise"], office.post.receive  # a signal without a word to Python

        def strike_and_wait() -> list[Any]:
            """No step of Python's is between the two, at which handlers would run."""
            return list(itertools.chain(map(strike, [signal.SIGALRM]), map(receive, [PATIENCE])))

        def interrupt(number: int, frame: object) -> None:
            raise InterruptedHereError

        start = time.monotonic()
        signal.signal(signal.SIGALRM, lambda *_: office.post.wake())
        with office.turn():
            assert strike_and_wait() == [0, []]
            signal.signal(signal.SIGALRM, interrupt)
            with pytest.raises(InterruptedHereError):
                strike_and_wait()
            office.post.wake()
            assert receive(PATIENCE) == []  # and it goes on as before
        assert time.monotonic() - start < PATIENCE

    _alone(role)


def test_waiting_and_large_copies_leave_the_interpreter_to_others() -> None:
    enough = 300_000  # more than a thread counts in its turns before the other one waits

    def sender(office: Office) -> int:
        link = office.connect(1)
        ran = 0
        done = threading.Event()

        def count() -> None:
            nonlocal ran
            while not done.is_set():
                ran += 1
                if ran == enough:
                    office.flags.raise_(1)

        counter = threading.Thread(target=count)
        counter.start()
        with office.turn():
            office.flags.raise_(0)
            while not [event for event in office.post.receive(None) if event[1] != MET]:
                pass
        done.set()
        counter.join()
        assert office.send(link)
        return ran

    def receiver(office: Office) -> None:
        office.flags.wait(0)
        office.flags.wait(1)  # while the other one waits
        assert office.send(0)
        office.read()

    assert play(sender, receiver)[0] >= enough


def test_who_calls_before_there_is_a_post_is_answered_when_there_is() -> None:
    """Whoever has chosen a process's token may call as soon as that listens."""
    token = secrets.token_hex(16)
    late, host = _native.Host(16 << 20, token), _native.Host(16 << 20)
    post = _native.Post(host, False)
    assert post.connect(token) == SILENT, "it does not answer yet"
    its = _native.Post(late, False)
    for each, other in ((post, token), (its, host.token)):
        assert each.take()
        (event,) = each.receive(PATIENCE)
        assert event[1:3] == (MET, other), event
        each.pass_on()
    for each in (late, host):
        each.leave()


def test_a_host_that_has_no_post_yet_is_abandoned() -> None:
    """By a fork of the process, say, which has no threads of it."""
    host = _native.Host(16 << 20, secrets.token_hex(16))
    before = len(os.listdir("/proc/self/fd"))
    host.abandon()
    assert len(os.listdir("/proc/self/fd")) < before
