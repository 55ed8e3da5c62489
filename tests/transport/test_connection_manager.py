"""Connections between hosts, on loopback: each frame arrives once and in order; unauthenticated peers are refused."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

import pytest

from monarch_backend._transport.network import connection_manager, session
from monarch_backend._transport.network.auth import HandshakeServer, new_secret
from monarch_backend._transport.network.connection import PeerConnection, Timeouts
from tests.transport.connected_hosts import QUICK, Side, reset, together


def test_frames_arrive_in_both_directions(sides: Callable[..., Side]) -> None:
    here, there, out, back = together(sides)
    assert (out.who, back.who) == (there.tcp.who, here.tcp.who)
    large = os.urandom(3 << 20)
    here.tcp.send(out, b"one", [b"body ", bytearray(b"in parts")])
    here.tcp.send(out, b"two", [large])
    there.tcp.send(back, b"back", [])
    assert there.frames.get(timeout=10) == (b"one", b"body in parts")
    assert there.frames.get(timeout=10) == (b"two", large)
    assert here.frames.get(timeout=10) == (b"back", b"")


def test_frames_beyond_the_window_arrive_in_order(sides: Callable[..., Side]) -> None:
    here, there, out, _ = together(sides, bounds=Timeouts())
    block = bytes(8 << 20)
    for number in range(20):
        here.tcp.send(out, b"%d" % number, [block])
    assert [int(there.frames.get(timeout=20)[0]) for _ in range(20)] == list(range(20))


def test_broken_connections_neither_lose_nor_repeat_frames(sides: Callable[..., Side]) -> None:
    here, there, out, back = together(sides)
    for number in range(300):
        here.tcp.send(out, b"%d" % number, [bytes(number * 300)])
        there.tcp.send(back, b"%d" % number, [])
        if number % 50 == 49:
            side, remote = (here, out) if number % 100 == 49 else (there, back)
            side.tcp.call_soon(lambda side=side, remote=remote: reset(side, remote))  # type: ignore[misc]
    assert [there.frames.get(timeout=10)[0] for _ in range(300)] == [b"%d" % n for n in range(300)]
    assert [here.frames.get(timeout=10)[0] for _ in range(300)] == [b"%d" % n for n in range(300)]
    assert here.lost.empty()
    assert there.lost.empty()


def test_session_survives_a_lost_proof(sides: Callable[..., Side], monkeypatch: pytest.MonkeyPatch) -> None:
    """The client has the session and the server lost its proof. The session begins on the next connection."""
    check, failed = HandshakeServer.check, threading.Event()

    def fails_once(called: HandshakeServer, proof: bytes) -> None:
        if not failed.is_set():
            failed.set()
            raise ConnectionResetError("in the middle of it")
        check(called, proof)

    monkeypatch.setattr(HandshakeServer, "check", fails_once)
    here, there, out, _ = together(sides)
    here.tcp.send(out, b"once", [])
    assert there.frames.get(timeout=10) == (b"once", b"")
    assert failed.is_set() and here.lost.empty() and there.up.empty()


def test_ended_session_is_not_resumed(sides: Callable[..., Side]) -> None:
    """Also if the client has received nothing in the session: its frames may already have been handled."""
    here, there, out, back = together(sides, bounds=Timeouts(heartbeat=60.0, silence=180.0))
    here.tcp.send(out, b"once", [])
    assert there.frames.get(timeout=10) == (b"once", b"")
    there.tcp.call_soon(lambda: there.tcp.lose(back, "of its own"))
    assert here.lost.get(timeout=10) is out and "has given up" in str(out.lost)
    assert there.lost.get(timeout=10) is back and there.frames.empty()


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[PeerConnection, str]]:
    """Return the list to which ends of connections are added."""
    events = list[tuple[PeerConnection, str]]()
    monkeypatch.setattr(connection_manager, "record_connection", lambda of, event, _: events.append((of, event)))
    return events


def test_hang_up_ends_the_session_at_the_peer(sides: Callable[..., Side], monkeypatch: pytest.MonkeyPatch) -> None:
    here, there, out, back = together(sides)
    events = recorded(monkeypatch)
    here.tcp.hang_up(out)
    assert there.lost.get(timeout=10) is back
    assert back.lost == "it has ended the session"
    assert events == [(out, "ended"), (back, "ended")]


def test_lost_session_is_recorded_as_lost(sides: Callable[..., Side], monkeypatch: pytest.MonkeyPatch) -> None:
    here, _, out, _ = together(sides)
    events = recorded(monkeypatch)
    here.tcp.call_soon(lambda: here.tcp.lose(out, "of its own"))
    assert here.lost.get(timeout=10) is out
    assert events[0] == (out, "lost")


def test_closed_connection_is_lost_before_the_silence_limit(sides: Callable[..., Side]) -> None:
    """The kernel closes the connection in the same way when a process is killed."""
    here, there, out, back = together(sides, bounds=Timeouts(silence=60.0))
    assert out.connection is not None
    assert there.tcp is not here.tcp
    begun = time.monotonic()
    here.tcp.call_soon(lambda: (setattr(out, "address", None), out.connection.socket.shutdown(socket.SHUT_RDWR)))  # type: ignore[func-returns-value, union-attr]
    assert there.lost.get(timeout=10) is back
    assert time.monotonic() - begun < 5
    assert "closed the connection" in str(back.lost)


def test_silence_is_noticed_within_the_bound(sides: Callable[..., Side]) -> None:
    here, there, out, back = together(sides)
    stuck = threading.Event()
    begun = time.monotonic()
    there.tcp.call_soon(lambda: stuck.wait(20))  # its thread neither reads nor writes
    try:
        assert here.lost.get(timeout=10) is out
        assert time.monotonic() - begun < QUICK.silence + 5 * QUICK.heartbeat + 0.5
        assert out.lost is not None
        assert "nothing was heard from it" in out.lost
    finally:
        stuck.set()
    assert there.lost.get(timeout=10) is back  # the other side has ended the session


def test_wrong_secret_is_reported(sides: Callable[..., Side]) -> None:
    here, there = sides(new_secret()), sides(new_secret())
    remote = here.tcp.call(there.tcp.listen("127.0.0.1"), new_secret())
    assert here.lost.get(timeout=10) is remote
    assert "does not know this job's secret" in str(remote.lost)
    assert there.up.empty()


def test_connect_to_a_closed_port(sides: Callable[..., Side]) -> None:
    here = sides(new_secret(), bounds=Timeouts(heartbeat=0.05, silence=1.0, patience=0.3, pause=0.01))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    remote = here.tcp.call(address, new_secret())
    assert here.lost.get(timeout=10) is remote
    assert "did not answer" in str(remote.lost)
    assert "refused" in str(remote.lost)


def test_silent_connection_is_replaced(sides: Callable[..., Side]) -> None:
    """The first connection is not closed and never delivers a byte, as if its other end was reset during a cut."""
    secret, bounds = new_secret(), Timeouts(heartbeat=0.05, silence=0.3, patience=10.0, pause=0.01)
    here, there = sides(secret, bounds=bounds), sides(secret, bounds=bounds)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        remote = here.tcp.call(server.getsockname(), secret)
        with server.accept()[0]:
            second, _ = server.accept()
            there.tcp.take_over(second, b"")
            assert here.up.get(timeout=10) is remote
    here.tcp.send(remote, b"at last", [])
    assert there.frames.get(timeout=10) == (b"at last", b"")


def test_unauthenticated_connections_do_not_block_others(sides: Callable[..., Side]) -> None:
    secret = new_secret()
    here, there = sides(secret), sides(secret)
    address = there.tcp.listen("127.0.0.1")
    strangers = [socket.create_connection(address) for _ in range(300)]
    try:
        for number, stranger in enumerate(strangers):
            if number % 3:
                try:
                    stranger.sendall(os.urandom(number))
                except OSError:
                    continue
        remote = here.tcp.call(address, secret)
        assert here.up.get(timeout=10) is remote
        here.tcp.send(remote, b"still here", [])
        assert there.frames.get(timeout=10) == (b"still here", b"")
        assert len(there.tcp.unauthenticated) <= 256
    finally:
        for stranger in strangers:
            stranger.close()


def _resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _announce(remote: PeerConnection, prefix: int, body: int) -> None:
    """Send only the header of the next frame."""
    with remote.lock:
        assert remote.connection is not None
        head = remote.session._head(session.DATA, remote.session.sent + 1, prefix, body)
        remote.connection.socket.sendall(head)


def test_announced_body_that_never_comes_commits_no_memory(sides: Callable[..., Side]) -> None:
    here, there, out, back = together(sides, bounds=Timeouts())
    before = _resident()
    _announce(out, 0, session.MAX_BODY_BYTES)
    deadline = time.monotonic() + 20
    while (connection := back.connection) is None or len(connection.into) != session.MAX_BODY_BYTES:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert _resident() - before < 64 << 20
    assert here.lost.empty() and there.lost.empty()


@pytest.mark.parametrize(("prefix", "body"), [(0, 4097), (4097, 0), (1, 4096), (0, 1 << 30)])
def test_frame_above_the_limit_is_refused_at_its_head(sides: Callable[..., Side], prefix: int, body: int) -> None:
    secret = new_secret()
    here, there = sides(secret), sides(secret, max_frame_bytes=4096)
    out = here.tcp.call(there.tcp.listen("127.0.0.1"), secret)
    back = (here.up.get(timeout=10), there.up.get(timeout=10))[1]
    here.tcp.send(out, b"1", [bytes(4095)])
    assert there.frames.get(timeout=10) == (b"1", bytes(4095))
    _announce(out, prefix, body)
    deadline = time.monotonic() + 10
    while f"a frame of {prefix + body} bytes, where at most 4096 are accepted" not in back.trouble and back.times < 2:
        assert time.monotonic() < deadline, back.trouble
        time.sleep(0.01)
    here.tcp.send(out, b"next", [b"on the next connection"])
    assert there.frames.get(timeout=10) == (b"next", b"on the next connection")


def test_session_beyond_the_limit_is_refused_until_one_ends(sides: Callable[..., Side]) -> None:
    secret = new_secret()
    there = sides(secret, max_sessions=2)
    address = there.tcp.listen("127.0.0.1")
    first, second, third = (sides(secret) for _ in range(3))
    held = first.tcp.call(address, secret)
    first.up.get(timeout=10)
    second.tcp.call(address, secret)
    second.up.get(timeout=10)
    third.tcp.call(address, secret)
    refused = third.lost.get(timeout=10)
    assert "as many sessions as it accepts" in (refused.lost or "")
    first.tcp.hang_up(held)
    there.lost.get(timeout=10)
    third.tcp.call(address, secret)
    third.up.get(timeout=10)
