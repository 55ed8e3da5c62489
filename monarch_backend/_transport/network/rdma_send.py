"""Large frames between hosts that the receiver's NIC reads: the protocol between two gateways.

To connect, the sender of frames asks with WANT. The receiver replies with an OFFER of a queue pair. The sender replies
with ANSWER, or with NO, and the receiver reports READY. A queue pair that breaks is connected again for the next read.

Then a large frame is sent as RDMA_FRAME: its large parts are registered, and the receiver's NIC reads them. No other
frame is sent until the receiver has acknowledged this one, or has replied REFUSED. After REFUSED, or if the
connection breaks, the frame is sent over TCP with the same number. So the session (session.py) keeps the order and
drops duplicates, and heartbeats continue meanwhile.

The code runs on the thread of the Tcp, or under a peer's lock. NICs are in rdma_reader.py, sockets in
connection_manager.py.
"""

from __future__ import annotations

import logging
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from monarch_backend._core import debug_log, env
from monarch_backend._transport.network import rdma_frame_header
from monarch_backend._transport.network.rdma_frame_header import Part
from monarch_backend._transport.network.rdma_reader import Key, Nics, PeerLink, UnusableError
from monarch_backend._transport.network.session import MAX_BODY_BYTES, MAX_CONTROL_BYTES, MAX_PREFIX_BYTES, Head
from monarch_backend._verbs import eligibility

if TYPE_CHECKING:
    from monarch_backend._transport.network.connection import PeerConnection
    from monarch_backend._transport.network.connection_manager import Tcp

log = logging.getLogger("monarch_backend")

WANT, OFFER, ANSWER, NO, READY, REFUSED = range(1, 7)
"""First byte of a message about NICs. An unknown one is ignored."""

RETRY_INTERVAL_S = 60.0
"""Interval at which a peer that can't be reached by NICs is asked again."""

READ_SECONDS, READ_RATE = 15.0, 20e6
"""Time for the read of a frame: seconds, plus its bytes divided by a rate in bytes per second."""

_NUMBER = struct.Struct("!Q")


@dataclass(eq=False)
class RdmaSend:
    """Frame that is being registered or, when it has a number, is read by the receiver."""

    prefix: bytes
    body: Sequence[Any] = field(repr=False)
    rdma_parts: dict[int, memoryview] = field(repr=False)
    parts: list[Part] = field(default_factory=list)  # after the registration
    keys: list[Key] = field(default_factory=list)
    number: int = 0


@dataclass(eq=False)
class RdmaRead:
    """Frame that is read from the sender's memory while ``current()``. ``over()`` allows reuse of its memory."""

    head: Head
    prefix: bytes
    body: memoryview
    current: Callable[[], bool]
    over: Callable[[], None]
    until: float = 0.0  # end of the read's time limit, in seconds of time.monotonic()


@dataclass
class PeerState:
    able: bool = False  # whether the peer may have NICs
    ready: bool = False  # whether the peer can read from here, by its last message
    asked: float = float("-inf")  # when WANT was last sent
    warned: bool = False
    rdma_send: RdmaSend | None = None  # all other frames wait for it
    reading: RdmaRead | None = None
    frames_sent: int = 0  # frames that the peer has read
    read: int = 0  # frames of the peer that were read here


def rdma_sender(tcp: Tcp) -> RdmaSender | None:
    """Return the sender of a gateway; None if there are no NICs, or settings exclude them."""
    try:
        if not eligibility.there() or env.get("MONARCH_RDMA_TRANSPORT") == "tcp":
            return None
        return RdmaSender(tcp, eligibility.wanted_least())
    except ValueError as error:
        log.warning("frames between hosts use TCP only in pid %d: %s", os.getpid(), error)
        return None


class RdmaSender:
    """Sends and receives frames over NICs for one Tcp."""

    def __init__(self, tcp: Tcp, least: int) -> None:
        self._tcp, self._least = tcp, least
        self._nics = Nics(self._dial)
        self._met: dict[bytes, PeerConnection] = {}  # by session: peers that have sent a message about NICs

    def close(self) -> None:
        self._nics.close()

    def _link_to(self, remote: PeerConnection) -> PeerLink:
        return self._nics.link_type(remote.id, str(remote))

    # ---- the sender of a frame

    def try_send(self, remote: PeerConnection, prefix: bytes, body: Sequence[Any], rdma_eligible: int) -> bool:
        """Send a frame whose last ``rdma_eligible`` parts a NIC may read. Return False if it is to be sent over TCP."""
        nics = remote.nics
        if not nics.able or len(prefix) > MAX_PREFIX_BYTES // 2 or sum(map(_nbytes, body)) > MAX_BODY_BYTES:
            return False
        rdma_parts = rdma_frame_header.choose(body, rdma_eligible, self._least)
        if not rdma_parts:
            return False
        if not nics.ready:
            self._ask(remote)
            return False
        rdma_send = nics.rdma_send = RdmaSend(prefix, body, rdma_parts)
        self._nics.do(lambda: self._register(remote, rdma_send))
        return True

    def _ask(self, remote: PeerConnection) -> None:
        now = time.monotonic()
        if now - remote.nics.asked > RETRY_INTERVAL_S and self._nics.start():
            remote.nics.asked = now
            self._say(remote, WANT)

    def _register(self, remote: PeerConnection, rdma_send: RdmaSend) -> None:
        """Register the parts. Runs on the thread of the NICs."""
        try:
            parts, keys = self._nics.expose(rdma_send.rdma_parts)
        except Exception as error:
            why = (
                f"{sum(map(_nbytes, rdma_send.rdma_parts.values()))} bytes can't be registered with NICs here: {error}"
            )
            self._tcp.call_soon(lambda: self._send_plainly(remote, rdma_send, why))
        else:
            self._tcp.call_soon(lambda: self._send(remote, rdma_send, parts, keys))

    def _send_plainly(self, remote: PeerConnection, rdma_send: RdmaSend, why: str) -> None:
        with remote.lock:
            if remote.nics.rdma_send is not rdma_send:
                return
            self._fell_back(remote, why)
            remote.nics.ready, remote.nics.rdma_send = False, None
            self._tcp.put(remote, remote.session.send(rdma_send.prefix, rdma_send.body))
            self._tcp.go_on(remote)

    def _send(self, remote: PeerConnection, rdma_send: RdmaSend, parts: list[Part], keys: list[Key]) -> None:
        rdma_send.parts, rdma_send.keys = parts, keys
        with remote.lock:
            if remote.nics.rdma_send is not rdma_send:  # the session is over
                self._give_back(rdma_send)
            elif remote.connection is not None:
                self._announce(remote, rdma_send)

    def _announce(self, remote: PeerConnection, rdma_send: RdmaSend) -> None:
        rest = rdma_frame_header.rest(rdma_send.body, rdma_send.rdma_parts)
        frame = remote.session.rdma_frame(
            rdma_frame_header.pack(rdma_send.parts), rdma_send.prefix, rdma_send.body, rest
        )
        rdma_send.number = remote.session.sent
        self._tcp.put(remote, frame)

    def heard(self, remote: PeerConnection) -> None:
        """Finish the send if the peer has acknowledged it. Call under the peer's lock."""
        rdma_send = remote.nics.rdma_send
        if rdma_send is not None and 0 < rdma_send.number <= remote.session.acknowledged:
            remote.nics.frames_sent += 1
            if remote.nics.frames_sent == 1:
                _debug(f"large frames to {remote}: verbs")
            self._end(remote)

    def connected(self, remote: PeerConnection, able: bool) -> None:
        """Begin on a new connection, under the peer's lock. There the session sends RDMA frames over TCP, too."""
        remote.nics.able, remote.nics.reading = able, None
        link, rdma_send = self._link_to(remote), remote.nics.rdma_send
        self._nics.do(lambda: self._nics.renew(link))
        if not remote.nics.ready:  # messages on the last connection may be lost
            remote.nics.asked = float("-inf")
        if rdma_send is not None and rdma_send.number:
            self._end(remote)
        elif rdma_send is not None and rdma_send.parts:
            self._announce(remote, rdma_send)

    def settle(self, remote: PeerConnection) -> None:
        """Send the current frame and all later ones over TCP. Call under the peer's lock."""
        remote.nics.able, rdma_send = False, remote.nics.rdma_send
        if rdma_send is None:
            return
        session = remote.session
        again = session.again(rdma_send.number) if rdma_send.number else session.send(rdma_send.prefix, rdma_send.body)
        self._tcp.put(remote, again)
        self._end(remote)
        self._tcp.go_on(remote)

    def forget(self, remote: PeerConnection) -> None:
        with remote.lock:
            remote.nics.able, remote.nics.reading = False, None
            self._end(remote)
        link = self._link_to(remote)
        self._met.pop(remote.id, None)
        self._nics.do(lambda: self._nics.forget(link, f"the session with {link} is over"))

    def _end(self, remote: PeerConnection) -> None:
        rdma_send, remote.nics.rdma_send = remote.nics.rdma_send, None
        if rdma_send is not None:
            self._give_back(rdma_send)

    def _give_back(self, rdma_send: RdmaSend) -> None:
        keys, rdma_send.keys = rdma_send.keys, []
        if keys:  # the call holds the memory until its release, so that the keys are not reused for other memory
            self._nics.do(lambda: self._released(rdma_send, keys))

    def _released(self, rdma_send: RdmaSend, keys: list[Key]) -> None:
        self._nics.release(keys)
        rdma_send.rdma_parts.clear()

    def _refused(self, remote: PeerConnection, number: int, why: str) -> None:
        with remote.lock:
            remote.nics.ready = False
            self._fell_back(remote, f"it could not read a frame from here: {why}")
            rdma_send = remote.nics.rdma_send
            if rdma_send is None or rdma_send.number != number:
                return
            self._tcp.put(remote, remote.session.again(number))
            self._end(remote)
            self._tcp.go_on(remote)

    # ---- the receiver of a frame

    def read(self, remote: PeerConnection, reading: RdmaRead, parts: list[Part], whole: memoryview) -> None:
        """Read parts into the frame's body, which lies in ``whole``; then deliver the frame, or refuse it."""
        remote.nics.reading = reading
        link = self._link_to(remote)

        def done(error: BaseException | None) -> None:
            self._tcp.call_soon(lambda: self._have_read(remote, reading, error))

        self._nics.do(lambda: self._nics.read(link, parts, reading.body, whole, done))
        reading.until = time.monotonic() + READ_SECONDS + reading.head.body / READ_RATE

    def _have_read(self, remote: PeerConnection, reading: RdmaRead, error: BaseException | None) -> None:
        if remote.nics.reading is not reading or not reading.current():
            return  # the frame is sent on another connection
        remote.nics.reading = None
        if error is None:
            remote.nics.read += 1
            self._tcp.have_read(remote, reading)
            return
        self._fell_back(remote, f"a frame of {reading.head.body} bytes could not be read from there: {error}")
        self._say(remote, REFUSED, _NUMBER.pack(reading.head.number) + str(error).encode()[:1024])

    def beat(self, remote: PeerConnection, now: float) -> None:
        """Give up a read that exceeds its time limit. Called with each heartbeat."""
        reading = remote.nics.reading
        if reading is not None and now > reading.until:
            reading.until = float("inf")  # once
            link = self._link_to(remote)
            self._nics.do(lambda: self._nics.give_up(link, "a read of the NIC did not complete in time"))

    # ---- messages about NICs

    def hear(self, remote: PeerConnection, said: bytes) -> None:
        what, data, link = said[0], said[1:], self._link_to(remote)
        nics = self._nics
        if what == READY:
            remote.nics.ready = True
        elif what == REFUSED and len(data) >= _NUMBER.size:
            (number,) = _NUMBER.unpack_from(data)
            self._refused(remote, number, data[_NUMBER.size :].decode(errors="replace"))
        elif what in (WANT, OFFER, ANSWER, NO) and nics.start():
            self._met[remote.id] = remote
            nics.do(lambda: self._step(remote, link, what, data))

    def _dial(self, link: PeerLink) -> None:
        self._nics.do(lambda: self._dial_again(link))

    def _dial_again(self, link: PeerLink) -> None:
        remote = self._met.get(link.session)
        if remote is None or not self._try(remote, OFFER, lambda: self._nics.offer(link)):
            self._nics.give_up(link, f"no queue pair to {link} could be connected")

    def _step(self, remote: PeerConnection, link: PeerLink, heard: int, data: bytes) -> None:
        """Take the next step towards a queue pair. Runs on the thread of the NICs."""
        nics = self._nics
        if heard == WANT:
            nics.give_up(link, f"{link} wants a new connection")
            self._try(remote, OFFER, lambda: nics.offer(link))
        elif heard == OFFER and not self._try(remote, ANSWER, lambda: nics.accept(link, data)):
            self._tcp.call_soon(lambda: self._say(remote, NO))
        elif heard == ANSWER:
            self._try(remote, READY, lambda: nics.connect(link, data))
        elif heard == NO:
            nics.give_up(link, f"{link} could not connect a queue pair: its log says why")

    def _try(self, remote: PeerConnection, then: int, call: Callable[[], bytes | None]) -> bool:
        """Call and send the result as the next message. Return False, and log why, if the call fails."""
        if remote.lost is not None:
            return False
        try:
            data = call() or b""
        except UnusableError as error:  # an unused device needs no warning
            _debug(f"large frames between here and {remote}: TCP, since {error}")
            return False
        except Exception as error:
            why = f"no queue pair could be connected: {error}"
            self._tcp.call_soon(lambda: self._fell_back(remote, why))
            return False
        self._tcp.call_soon(lambda: self._say(remote, then, data))
        return True

    def _say(self, remote: PeerConnection, what: int, data: bytes = b"") -> None:
        if len(data) >= MAX_CONTROL_BYTES:
            self._fell_back(remote, f"a message has {len(data)} bytes: name fewer ports in MONARCH_RDMA_DEVICES")
            return
        with remote.lock:
            self._tcp.put(remote, [remote.session.control(bytes([what]) + data)])

    def _fell_back(self, remote: PeerConnection, why: str) -> None:
        """Log the use of TCP: the first time as a warning."""
        if remote.nics.warned:
            _debug(f"large frames between here and {remote}: TCP, since {why}")
            return
        remote.nics.warned = True
        log.warning(
            "large frames between pid %d here and %s use TCP, since %s. `monarch-backend doctor` shows the machine's "
            "NICs; MONARCH_RDMA_TRANSPORT=tcp on both hosts turns NICs off",
            os.getpid(),
            remote,
            why,
        )


def _nbytes(part: Any) -> int:
    return memoryview(part).nbytes


def _debug(text: str) -> None:
    debug_log.write(f"monarch: {text}")
