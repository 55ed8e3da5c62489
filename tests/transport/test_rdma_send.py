"""Large frames that the other host's NIC reads, over fake NICs that copy; both hosts are in this process.

The guarantees are those of TCP: each frame arrives once and in order. Tests of the wire layouts are at the end.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch_backend._transport.network import rdma_frame_header, rdma_reader, rdma_send
from monarch_backend._transport.network.auth import new_secret
from monarch_backend._transport.network.connection import PeerConnection, Timeouts
from monarch_backend._transport.network.connection_manager import Tcp
from monarch_backend._transport.network.rdma_frame_header import Part
from monarch_backend._transport.network.session import HEAD_BYTES, RDMA_FRAME, SessionError, read_head
from monarch_backend._transport.network.tls import Tls
from monarch_backend._verbs import discovery, eligibility, engine, shared_engine
from monarch_backend._verbs.discovery import PortFacts
from monarch_backend._verbs.wire_format import ROCE_V2, Gid
from tests.rdma.verbs.fabric import Fabric
from tests.rdma.verbs.peers import until
from tests.transport.connected_hosts import Side, reset, together

KIB, MIB = 1 << 10, 1 << 20
PATIENT = Timeouts(heartbeat=0.1, silence=20.0, patience=10.0, pause=0.01)

Make = Callable[..., tuple[Side, Side, PeerConnection, PeerConnection]]


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fabric]:
    """Give this process a fake NIC."""
    made = Fabric()
    gid = Gid(1, ROCE_V2, bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 1]))
    facts = [PortFacts("fake0", 1, "ACTIVE", True, (gid,), -1)]
    monkeypatch.setattr(discovery, "usable", lambda *_: facts)
    monkeypatch.setattr(engine, "available", lambda *_: None)
    monkeypatch.setattr(discovery, "available", lambda *_: None)
    monkeypatch.setattr(engine, "load", lambda wanted: made)
    monkeypatch.setattr(eligibility, "DEVICES", "/proc/self")
    monkeypatch.setattr(eligibility, "PACKAGES", ("os",))
    eligibility.usable.cache_clear()
    assert shared_engine._engine is None
    yield made
    eligibility.usable.cache_clear()


@pytest.fixture
def make(fabric: Fabric, sides: Callable[..., Side]) -> Iterator[Make]:
    """Return a function that connects two hosts with NICs.

    Afterwards check that no registration and no engine is left.
    """
    made: list[Side] = []

    def meet(**options: Any) -> tuple[Side, Side, PeerConnection, PeerConnection]:
        here, there, out, back = together(sides, **{"bounds": PATIENT, "offers_rdma": True, **options})
        made.extend((here, there))
        connect(here, there, out)
        return here, there, out, back

    yield meet
    for side in made:
        side.tcp.close()
    assert shared_engine._engine is None
    assert not fabric.pairs
    assert all(nic.opened == nic.closed for nic in fabric.nics)


def connect(here: Side, there: Side, out: PeerConnection, nbytes: int = 2 * MIB) -> None:
    """Send a frame, which asks for queue pairs, and wait for them. TCP carries this frame."""
    here.tcp.send(out, b"first", [bytes(nbytes)], 1)
    assert there.frames.get(timeout=20) == (b"first", bytes(nbytes))
    assert until(lambda: out.nics.ready)
    assert out.nics.frames_sent == 0


def numbers(nbytes: int, seed: int) -> bytearray:
    """Return bytes with a period of 251, so that no two blocks of a power-of-two size are equal."""
    one = bytes((i * 7 + seed) & 0xFF for i in range(251))
    return bytearray((one * (nbytes // 251 + 1))[:nbytes])


@contextlib.contextmanager
def running(fabric: Fabric) -> Iterator[None]:
    """Run the queued work requests of the fake NICs on a thread, each after a random delay."""
    ended = threading.Event()

    def run() -> None:
        rng = random.Random(3)
        while not ended.wait(rng.random() * 0.002):
            fabric.run(rng.randrange(1, 4))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def warnings() -> Iterator[list[str]]:
    """Yield the list of warnings that the package logs in the block."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("monarch_backend")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def receive(side: Side) -> tuple[bytes, bytes]:
    return side.frames.get(timeout=30)


# Delivery -------------------------------------------------------------------------------------------------------------


def test_frames_around_the_minimum_size_arrive(make: Make) -> None:
    here, there, out, _ = make()
    for nbytes in (1, 64 * KIB, MIB - 1, MIB, MIB + 1, 3 * MIB + 5, 40 * MIB, 100 * MIB):
        sent = numbers(nbytes, nbytes % 7)
        here.tcp.send(out, b"%d" % nbytes, [b"pickle", sent], 1)
        assert receive(there) == (b"%d" % nbytes, b"pickle" + sent), nbytes
    assert until(lambda: out.nics.frames_sent == 5)


def test_pickles_and_small_parts_stay_on_the_connection(make: Make, fabric: Fabric) -> None:
    """Pickles of any size and small parts are sent by TCP. Empty parts are not sent."""
    here, there, out, back = make()
    read: list[int] = []
    registered = fabric.nics[0].register
    fabric.nics[0].register = lambda address, nbytes, access: (  # type: ignore[method-assign]
        read.append(nbytes),
        registered(address, nbytes, access),
    )[1]
    pickle, parts = numbers(3 * MIB, 1), [numbers(n, n % 5) for n in (0, 2 * MIB, 100, 0, 64 * KIB, 64 * KIB - 1)]
    here.tcp.send(out, b"mixed", [pickle, b"more of it", *parts], len(parts))
    assert receive(there) == (b"mixed", b"".join((pickle, b"more of it", *parts)))
    assert until(lambda: out.nics.frames_sent == 1)
    whole = 5 * MIB + len(b"more of it") + 100 + 2 * 64 * KIB - 1
    assert sorted(read) == [64 * KIB, 2 * MIB, whole]  # the last one is the reader's buffer
    here.tcp.send(out, b"", [pickle], 0)
    assert receive(there)[1] == pickle
    assert out.nics.frames_sent == back.nics.read == 1


def test_numbers_of_parts(make: Make) -> None:
    here, there, out, _ = make()
    parts = [numbers(64 * KIB + i, i) for i in range(rdma_frame_header.MAX_PARTS + 5)]
    here.tcp.send(out, b"many", parts, len(parts))
    assert receive(there) == (b"many", b"".join(parts))
    assert until(lambda: out.nics.frames_sent == 1)


@pytest.mark.parametrize("tls", [False, True])
def test_both_ways_in_order(make: Make, fabric: Fabric, tls: bool) -> None:
    here, there, out, back = make(tls=functools.cache(Tls.of_secret) if tls else None)
    connect(there, here, back)
    fabric.at_once = False
    rng = random.Random(8)
    sizes = [rng.choice((0, 10, 5000, MIB, 2 * MIB + 1)) for _ in range(60)]
    with running(fabric):
        for number, nbytes in enumerate(sizes):
            for side, remote in ((here, out), (there, back)):
                side.tcp.send(remote, b"%d" % number, [b"x", numbers(nbytes, number)], 1)
        for number, nbytes in enumerate(sizes):
            for side in (there, here):
                assert receive(side) == (b"%d" % number, b"x" + numbers(nbytes, number))
    large = sum(nbytes >= MIB for nbytes in sizes)
    assert until(lambda: (out.nics.frames_sent, back.nics.frames_sent) == (large, large))
    assert (out.nics.read, back.nics.read) == (large, large)


def test_memory_is_given_back(make: Make, fabric: Fabric) -> None:
    """Only the reader's buffer stays registered. Each side has two queue pairs, and neither keeps old entries."""
    here, there, out, _ = make()
    [nic] = fabric.nics
    for number in range(40):
        here.tcp.send(out, b"", [numbers(2 * MIB, number)], 1)
        assert receive(there)[1] == numbers(2 * MIB, number)
    assert until(lambda: len(nic.registered) == 1)
    assert until(lambda: not out.session._kept) and out.session.unacknowledged == 0
    assert len(fabric.pairs) == 4


def test_a_body_for_several_hosts_is_registered_once(make: Make, fabric: Fabric, sides: Callable[..., Side]) -> None:
    here, there, out, _ = make()
    [secret] = here.tcp.secrets.values()
    fleet = [(there, out)]
    for _ in range(2):
        other = sides(secret, bounds=PATIENT, offers_rdma=True)
        remote = here.tcp.call(other.tcp.listen("127.0.0.1"), secret)
        assert here.up.get(timeout=10) is remote
        connect(here, other, remote)
        fleet.append((other, remote))
    fabric.at_once = False
    [nic] = fabric.nics
    before, body = nic.opened, numbers(4 * MIB, 1)
    for _, remote in fleet:
        here.tcp.send(remote, b"cast", [memoryview(body)], 1)
    assert until(lambda: all(remote.nics.rdma_send and remote.nics.rdma_send.number for _, remote in fleet))
    assert sum(each.nbytes == 4 * MIB and each.access == 4 for each in nic.registered.values()) == 1
    with running(fabric):
        for side, _ in fleet:
            assert receive(side) == (b"cast", body)
    assert until(lambda: all(remote.nics.frames_sent for _, remote in fleet))
    assert nic.opened - before <= 1 + len(fleet)  # one registration for the payload, and one buffer for each reader
    for side, _ in fleet:
        side.tcp.close()


# Failures -------------------------------------------------------------------------------------------------------------


def test_broken_connections_neither_lose_nor_repeat_frames(make: Make, fabric: Fabric) -> None:
    here, there, out, back = make()
    fabric.at_once = False
    with running(fabric):
        for number in range(120):
            here.tcp.send(out, b"%d" % number, [numbers((number % 3) * MIB, number)], 1)
            if number % 12 == 11:
                side, remote = (here, out) if number % 24 == 11 else (there, back)
                side.tcp.call_soon(lambda side=side, remote=remote: reset(side, remote))  # type: ignore[misc]
        for number in range(120):
            assert receive(there) == (b"%d" % number, numbers((number % 3) * MIB, number))
    assert here.lost.empty() and there.lost.empty() and there.frames.empty()
    assert out.nics.frames_sent > 20


@pytest.mark.parametrize("side", ["here", "there"])
def test_connection_break_during_an_rdma_read(make: Make, fabric: Fabric, side: str) -> None:
    """The frame arrives by the next connection. The old RDMA read, which may still run, writes to unused memory."""
    here, there, out, back = make()
    fabric.at_once = False
    here.tcp.send(out, b"one", [numbers(2 * MIB, 1)], 1)
    assert until(lambda: back.nics.reading is not None)
    breaks, remote = (here, out) if side == "here" else (there, back)
    breaks.tcp.call_soon(lambda: reset(breaks, remote))
    assert receive(there) == (b"one", numbers(2 * MIB, 1))
    here.tcp.send(out, b"two", [numbers(2 * MIB, 2)], 1)
    with running(fabric):
        assert receive(there) == (b"two", numbers(2 * MIB, 2))
    assert there.frames.empty() and not here.lost.qsize()


def test_a_read_that_is_refused(make: Make, fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    """The frame arrives once, by TCP, with one warning on each side. NICs carry later frames again."""
    here, there, out, _ = make()
    expose = here.tcp.rdma_sender._nics.expose  # type: ignore[union-attr]

    def forged(rdma_parts: dict[int, memoryview]) -> Any:
        parts, keys = expose(rdma_parts)
        other, more = expose({part.offset: memoryview(bytearray(part.nbytes)) for part in parts})
        here.tcp.rdma_sender._nics.release(more)  # type: ignore[union-attr]
        return other, keys

    monkeypatch.setattr(here.tcp.rdma_sender._nics, "expose", forged)  # type: ignore[union-attr]
    with warnings() as said:
        for number in range(3):
            here.tcp.send(out, b"%d" % number, [numbers(2 * MIB, number)], 1)
        for number in range(3):
            assert receive(there) == (b"%d" % number, numbers(2 * MIB, number))
        assert until(lambda: len(said) == 2)
    assert "could not be read from there" in said[0] and "use TCP" in said[0]
    assert "could not read a frame from here" in said[1] and "remote access error" in said[1]
    assert out.nics.frames_sent == 0
    monkeypatch.undo()
    monkeypatch.setattr(rdma_send, "RETRY_INTERVAL_S", 0.0)
    again(here, there, out)


def again(here: Side, there: Side, out: PeerConnection) -> None:
    """Send frames until NICs carry them again. The first frame asks for new queue pairs."""
    before = out.nics.frames_sent
    connected = False
    for number in range(100):
        here.tcp.send(out, b"again", [numbers(2 * MIB, number)], 1)
        assert receive(there) == (b"again", numbers(2 * MIB, number))
        if connected:
            break
        connected = until(lambda: out.nics.ready, 0.5)
    assert until(lambda: out.nics.frames_sent > before)


def test_a_nic_that_goes_down_and_comes_back(make: Make, fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there, out, _ = make()
    fabric.dead = True
    with warnings() as said:
        for number in range(5):
            here.tcp.send(out, b"%d" % number, [numbers(2 * MIB, number)], 1)
        for number in range(5):
            assert receive(there) == (b"%d" % number, numbers(2 * MIB, number))
    assert len(said) == 2 and out.nics.frames_sent == 0
    fabric.dead = False
    monkeypatch.setattr(rdma_send, "RETRY_INTERVAL_S", 0.0)
    again(here, there, out)


@pytest.mark.parametrize("spare", [0, 3 * MIB])
def test_memory_that_cannot_be_locked(make: Make, fabric: Fabric, spare: int) -> None:
    """The sender's memory cannot be registered, or with ``spare`` the reader's buffer cannot."""
    here, there, out, _ = make()
    [nic] = fabric.nics
    nic.memory = sum(each.nbytes for each in nic.registered.values()) + spare
    with warnings() as said:
        for number in range(3):
            here.tcp.send(out, b"%d" % number, [numbers(2 * MIB, number)], 1)
            assert receive(there) == (b"%d" % number, numbers(2 * MIB, number))
    assert len(said) == (2 if spare else 1)
    assert "locked" in said[0] or "ulimit" in said[0] or "registered" in said[0]


def test_a_read_that_never_ends(make: Make, fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there, out, _ = make()
    monkeypatch.setattr(rdma_send, "READ_SECONDS", 0.1)
    fabric.at_once = False
    with warnings() as said:
        here.tcp.send(out, b"late", [numbers(2 * MIB, 1)], 1)
        assert receive(there) == (b"late", numbers(2 * MIB, 1))
    assert "a read of the NIC did not complete in time" in said[0]


def test_heartbeats_continue_during_an_rdma_read(make: Make, fabric: Fabric) -> None:
    """The read takes longer than the allowed silence. Frames behind it wait; frames of the other direction do not."""
    here, there, out, back = make(bounds=Timeouts(heartbeat=0.05, silence=0.6, patience=5.0, pause=0.01))
    fabric.at_once = False
    here.tcp.send(out, b"large", [numbers(2 * MIB, 1)], 1)
    here.tcp.send(out, b"behind", [])
    assert until(lambda: back.nics.reading is not None)
    until_later = threading.Event()
    here.tcp.later(1.5, until_later.set)
    there.tcp.send(back, b"back", [])
    assert receive(here) == (b"back", b"")
    assert until_later.wait(20) and there.frames.empty()
    fabric.run()
    assert [receive(there)[0] for _ in range(2)] == [b"large", b"behind"]
    assert here.lost.empty() and there.lost.empty()


def test_goodbye_during_an_rdma_read(make: Make, fabric: Fabric) -> None:
    """Frames sent before the goodbye arrive before it."""
    here, there, out, back = make()
    fabric.at_once = False
    here.tcp.send(out, b"lent", [numbers(2 * MIB, 1)], 1)
    here.tcp.send(out, b"behind", [])
    assert until(lambda: back.nics.reading is not None)
    reading = back.nics.reading
    assert reading is not None
    here.tcp.hang_up(out)
    assert receive(there) == (b"lent", numbers(2 * MIB, 1))
    assert receive(there) == (b"behind", b"")
    assert there.lost.get(timeout=10) is back and back.lost == "it has ended the session"
    assert not any(reading.body)  # the abandoned buffer, to which the NIC could still write
    fabric.run()
    assert there.frames.empty()


@pytest.mark.parametrize("who", ["here", "there"])
def test_peer_lost_during_an_rdma_read(make: Make, fabric: Fabric, who: str) -> None:
    """Both sides release their memory, and no frame is received afterwards."""
    here, there, out, back = make(bounds=Timeouts(heartbeat=0.05, silence=0.5, patience=5.0, pause=0.01))
    fabric.at_once = False
    here.tcp.send(out, b"lost", [numbers(2 * MIB, 1)], 1)
    assert until(lambda: back.nics.reading is not None)
    side, remote, other = (here, out, there) if who == "here" else (there, back, here)
    side.tcp.call_soon(lambda: side.tcp.lose(remote, "of its own"))
    assert other.lost.get(timeout=10) is not remote
    assert until(lambda: out.nics.rdma_send is None and len(fabric.nics[0].registered) <= 1)
    fabric.run()
    assert there.frames.empty()


def test_fork_during_an_rdma_read(make: Make, fabric: Fabric) -> None:
    here, there, out, back = make()
    fabric.at_once = False
    here.tcp.send(out, b"forked", [numbers(2 * MIB, 1)], 1)
    assert until(lambda: back.nics.reading is not None)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if shared_engine._engine is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    fabric.run()
    assert receive(there) == (b"forked", numbers(2 * MIB, 1))


def test_one_thread_serves_both_directions() -> None:
    """Both directions start at once. With two threads, both would receive the same completions."""
    nics, begun = rdma_reader.Nics(lambda _: None), threading.Barrier(8)

    def start() -> None:
        begun.wait()
        assert nics.start()

    starters = [threading.Thread(target=start) for _ in range(8)]
    for thread in starters:
        thread.start()
    for thread in starters:
        thread.join()
    assert sum(thread.name == "monarch-lending" for thread in threading.enumerate()) == 1
    nics.close()
    assert not nics.start()


# Peers without NICs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", [0, 1])
def test_frames_to_a_peer_without_rdma_use_the_connection(fabric: Fabric, sides: Callable[..., Side], who: int) -> None:
    """A side without RDMA does not offer it in its handshake, and gets no RDMA messages."""
    secret = new_secret()
    here, there = (sides(secret, bounds=PATIENT, offers_rdma=index != who) for index in range(2))
    out = here.tcp.call(there.tcp.listen("127.0.0.1"), secret)
    back = there.up.get(timeout=10)
    for side, remote, other in ((here, out, there), (there, back, here)):
        for number in range(3):
            side.tcp.send(remote, b"%d" % number, [numbers(2 * MIB, number)], 1)
            assert receive(other) == (b"%d" % number, numbers(2 * MIB, number))
    assert not fabric.nics
    assert out.nics.asked < 0 and back.nics.asked < 0


def test_peer_with_unusable_nics(fabric: Fabric, sides: Callable[..., Side], monkeypatch: Any) -> None:
    monkeypatch.setattr(discovery, "available", lambda *_: "no port is active")
    here, there, out, _ = together(sides, bounds=PATIENT, offers_rdma=True)
    with warnings() as said:
        for number in range(3):
            here.tcp.send(out, b"%d" % number, [numbers(2 * MIB, number)], 1)
            assert receive(there) == (b"%d" % number, numbers(2 * MIB, number))
    assert not said and not fabric.nics and not out.nics.ready


@pytest.mark.parametrize(
    ("variable", "value"), [("MONARCH_RDMA_TRANSPORT", "tcp"), ("MONARCH_RDMA_MIN_BYTES", "many")], ids=str
)
def test_settings_that_disable_rdma_sends(fabric: Fabric, monkeypatch: Any, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    with warnings() as said:
        tcp = Tcp(os.urandom(16), {}, lambda *_: None, lambda _: None, lambda _: None, offers_rdma=True)
    tcp.close()
    tcp._end()
    assert tcp.rdma_sender is None
    assert len(said) == (value == "many")


_GATEWAY = """
import sys
from monarch_backend._transport.network.connection_manager import Tcp
tcp = Tcp(bytes(16), {}, None, None, None, offers_rdma=True)
tcp.start()
tcp.close()
print([name for name in sys.modules if name.startswith("monarch_backend.rdma")])
"""


def test_rdma_is_not_imported_by_an_idle_gateway() -> None:
    done = subprocess.run([sys.executable, "-c", _GATEWAY], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Wire layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prefix",
    [
        b"",
        b"\0\0\0",
        b"\0\0\0\5abc",
        b"\xff\xff\xff\xff" + bytes(40),
        b"\0\0\0\1\x90prefix",  # no parts
        b"\0\0\0\1\xc1",
        rdma_frame_header.pack([Part(0, 5, b"r"), Part(4, 5, b"r")]),
        rdma_frame_header.pack([Part(5, 5, b"r"), Part(0, 5, b"r")]),
        rdma_frame_header.pack([Part(0, 0, b"r")]),
        rdma_frame_header.pack([Part(-1, 5, b"r")]),
        rdma_frame_header.pack([Part(96, 5, b"r")]),
        rdma_frame_header.pack([Part(1 << 62, 1 << 62, b"r")]),
        rdma_frame_header.pack([Part(i, 1, b"") for i in range(90)])[:-1],
    ],
)
def test_invalid_parts_are_a_session_error(prefix: bytes) -> None:
    with pytest.raises(SessionError):
        rdma_frame_header.unpack(prefix, 100)


def test_too_many_parts() -> None:
    many = [Part(i, 1, b"") for i in range(rdma_frame_header.MAX_PARTS + 1)]
    assert rdma_frame_header.unpack(rdma_frame_header.pack(many[:-1]) + b"rest", 1000) == (many[:-1], b"rest")
    with pytest.raises(SessionError):
        rdma_frame_header.unpack(rdma_frame_header.pack(many), 1000)


def test_peer_without_nics_refuses_rdma_frames(sides: Callable[..., Side]) -> None:
    """A peer that sends one nevertheless loses its connection. The session continues on the next connection."""
    here, there, out, _ = together(sides)
    with out.lock:
        frame = out.session.rdma_frame(rdma_frame_header.pack([Part(0, 5, b"r")]), b"prefix", [b"12345"], [])
        assert read_head(frame[0][:HEAD_BYTES]).kind == RDMA_FRAME
        here.tcp.put(out, frame)
    assert there.frames.get(timeout=10) == (b"prefix", b"12345")
