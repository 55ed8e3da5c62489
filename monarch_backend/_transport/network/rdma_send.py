"""Large frames that are not sent to another host, but read there: who is asked, what is said, what becomes of a frame.

Between two gateways that both have NICs: WANT, and the other one makes an OFFER, to which there is an ANSWER, or a NO;
it says that it is READY. A connection that breaks is made anew when the next frame is to be read. Then a large
frame is LENT: the parts that are worth it stay where they are, and the other side's NIC reads them. No other frame is
sent until it has acknowledged this one, as it does any, or has REFUSED it; then, and if the connection breaks, it is
sent as ever, with the same number. So order, and that each frame comes once, are the session's as before (session.py),
and words of life go on meanwhile.

Runs on the thread of the Tcp, and what a remote's lock guards under that lock. NICs are rdma_reader.py's, sockets
connection_manager.py's.
"""

from __future__ import annotations

import logging
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from monarch_backend._core import debug_log, env
from monarch_backend._transport.network import rdma_frame_header
from monarch_backend._transport.network.rdma_frame_header import Part
from monarch_backend._transport.network.rdma_reader import Key, Nics, PeerLink, UnusableError
from monarch_backend._transport.network.session import MOST_BODY, MOST_PREFIX, MOST_SAID, Head
from monarch_backend._verbs import eligibility

if TYPE_CHECKING:
    from monarch_backend._transport.network.connection import PeerConnection

log = logging.getLogger("monarch_backend")

WANT, OFFER, ANSWER, NO, READY, REFUSED = range(1, 7)
"""What is said: its first byte. Who does not know one ignores it."""

RETRY_INTERVAL_S = 60.0
"""After which one is asked again that was asked, and can't be reached by NICs after all, or not any more."""

READ_SECONDS, READ_RATE = 15.0, 20e6
"""For a frame to be read, and for each byte of it one of so many parts of a second: then the connection is given up."""

_NUMBER = struct.Struct("!Q")


@dataclass(eq=False)
class RdmaSend:
    """A frame that is being registered, or, once it has a number, read by the other side."""

    prefix: bytes
    body: Sequence[Any] = field(repr=False)
    lent: dict[int, memoryview] = field(repr=False)
    parts: list[Part] = field(default_factory=list)  # once they are registered
    keys: list[Key] = field(default_factory=list)
    number: int = 0


@dataclass(eq=False)
class RdmaRead:
    """A frame that is read out of the other side's memory.

    ``current``: the connection that it came by is there. ``over``: its memory may be used again. ``until``: when it is
    to be there.
    """

    head: Head
    prefix: bytes
    body: memoryview
    current: Callable[[], bool]
    over: Callable[[], None]
    until: float = 0.0


@dataclass
class PeerState:
    """Of one remote, what NICs are to it."""

    able: bool = False  # it may have NICs, too
    ready: bool = False  # it can read from here, as far as anybody knows
    asked: float = float("-inf")  # when it was asked last
    warned: bool = False
    loan: RdmaSend | None = None  # all other frames wait for it
    reading: RdmaRead | None = None
    lent: int = 0  # frames that it has read
    read: int = 0  # frames of its that were read here


class Carrier(Protocol):
    """What a Tcp does for its loans."""

    who: bytes

    def soon(self, call: Callable[[], None]) -> None:
        """On the thread."""

    def put(self, remote: PeerConnection, parts: Sequence[Any]) -> None:
        """With the remote's lock: on its connection, if there is one."""

    def go_on(self, remote: PeerConnection) -> None:
        """With the remote's lock: send what waits."""

    def have_read(self, remote: PeerConnection, reading: RdmaRead) -> None:
        """The frame is there."""


def loans(carrier: Carrier) -> RdmaSender | None:
    """For a gateway on a machine that may have NICs, if it may use them."""
    try:
        if not eligibility.there() or env.get("MONARCH_RDMA_TRANSPORT") == "tcp":
            return None
        return RdmaSender(carrier, eligibility.wanted_least())
    except ValueError as error:
        log.warning("frames between hosts do without NICs in pid %d: %s", os.getpid(), error)
        return None


class RdmaSender:
    """Those of one Tcp."""

    def __init__(self, carrier: Carrier, least: int) -> None:
        self._carrier, self._least = carrier, least
        self._nics = Nics(carrier.who, self._dial)
        self._met: dict[bytes, PeerConnection] = {}  # by session: those that are, or were, to be connected

    def close(self) -> None:
        """Nobody reads from here any more."""
        self._nics.close()

    def _gate(self, remote: PeerConnection) -> PeerLink:
        return PeerLink(self._carrier.who, remote.id, str(remote))

    # ---- the side that has the frame

    def lend(self, remote: PeerConnection, prefix: bytes, body: Sequence[Any], lendable: int) -> bool:
        """True if this frame, and the last so many parts of its body, are in these hands; False: send it as ever."""
        nics = remote.nics
        if not nics.able or len(prefix) > MOST_PREFIX // 2 or sum(map(_nbytes, body)) > MOST_BODY:
            return False
        lent = rdma_frame_header.choose(body, lendable, self._least)
        if not lent:
            return False
        if not nics.ready:
            self._ask(remote)
            return False
        loan = nics.loan = RdmaSend(prefix, body, lent)
        self._nics.do(lambda: self._register(remote, loan))
        return True

    def _ask(self, remote: PeerConnection) -> None:
        now = time.monotonic()
        if now - remote.nics.asked > RETRY_INTERVAL_S and self._nics.start():
            remote.nics.asked = now
            self._say(remote, WANT)

    def _register(self, remote: PeerConnection, loan: RdmaSend) -> None:
        """On the thread of the NICs."""
        try:
            parts, keys = self._nics.expose(loan.lent)
        except Exception as error:
            why = f"{sum(map(_nbytes, loan.lent.values()))} bytes can't be registered with NICs here: {error}"
            self._carrier.soon(lambda: self._send_plainly(remote, loan, why))
        else:
            self._carrier.soon(lambda: self._send(remote, loan, parts, keys))

    def _send_plainly(self, remote: PeerConnection, loan: RdmaSend, why: str) -> None:
        with remote.lock:
            if remote.nics.loan is not loan:
                return
            self._fell_back(remote, why)
            remote.nics.ready, remote.nics.loan = False, None
            self._carrier.put(remote, remote.session.send(loan.prefix, loan.body))
            self._carrier.go_on(remote)

    def _send(self, remote: PeerConnection, loan: RdmaSend, parts: list[Part], keys: list[Key]) -> None:
        loan.parts, loan.keys = parts, keys
        with remote.lock:
            if remote.nics.loan is not loan:  # the session is over
                self._give_back(loan)
            elif remote.connection is not None:
                self._announce(remote, loan)

    def _announce(self, remote: PeerConnection, loan: RdmaSend) -> None:
        rest = rdma_frame_header.rest(loan.body, loan.lent)
        frame = remote.session.lend(rdma_frame_header.pack(loan.parts), loan.prefix, loan.body, rest)
        loan.number = remote.session.sent
        self._carrier.put(remote, frame)

    def heard(self, remote: PeerConnection) -> None:
        """With the lock: the other side has said what it has received."""
        loan = remote.nics.loan
        if loan is not None and 0 < loan.number <= remote.session.acknowledged:
            remote.nics.lent += 1
            if remote.nics.lent == 1:
                _debug(f"large frames to {remote}: verbs")
            self._end(remote)

    def connected(self, remote: PeerConnection, able: bool) -> None:
        """With the lock: on a new connection all that was kept is sent as ever, also what was lent on the last one."""
        remote.nics.able, remote.nics.reading = able, None
        gate, loan = self._gate(remote), remote.nics.loan
        self._nics.do(lambda: self._nics.renew(gate))
        if not remote.nics.ready:  # what was said on the last one may be lost
            remote.nics.asked = float("-inf")
        if loan is not None and loan.number:
            self._end(remote)
        elif loan is not None and loan.parts:
            self._announce(remote, loan)

    def settle(self, remote: PeerConnection) -> None:
        """With the lock: nothing is lent from now on, and what is sent is sent as ever."""
        remote.nics.able, loan = False, remote.nics.loan
        if loan is None:
            return
        session = remote.session
        again = session.again(loan.number) if loan.number else session.send(loan.prefix, loan.body)
        self._carrier.put(remote, again)
        self._end(remote)
        self._carrier.go_on(remote)

    def forget(self, remote: PeerConnection) -> None:
        """Its session is over."""
        with remote.lock:
            remote.nics.able, remote.nics.reading = False, None
            self._end(remote)
        gate = self._gate(remote)
        self._met.pop(remote.id, None)
        self._nics.do(lambda: self._nics.forget(gate, f"the session with {gate} is over"))

    def _end(self, remote: PeerConnection) -> None:
        loan, remote.nics.loan = remote.nics.loan, None
        if loan is not None:
            self._give_back(loan)

    def _give_back(self, loan: RdmaSend) -> None:
        keys, loan.keys = loan.keys, []
        if keys:  # the loan is held until then: its memory may not become somebody else's, under the same keys
            self._nics.do(lambda: self._released(loan, keys))

    def _released(self, loan: RdmaSend, keys: list[Key]) -> None:
        self._nics.release(keys)
        loan.lent.clear()

    def _refused(self, remote: PeerConnection, number: int, why: str) -> None:
        with remote.lock:
            remote.nics.ready = False
            self._fell_back(remote, f"it could not read a frame from here: {why}")
            loan = remote.nics.loan
            if loan is None or loan.number != number:
                return
            self._carrier.put(remote, remote.session.again(number))
            self._end(remote)
            self._carrier.go_on(remote)

    # ---- the side that reads

    def read(self, remote: PeerConnection, reading: RdmaRead, parts: list[Part], whole: memoryview) -> None:
        """Into their places in the frame's body, which lies in ``whole``; then it is taken, or refused."""
        remote.nics.reading = reading
        gate = self._gate(remote)

        def done(error: BaseException | None) -> None:
            self._carrier.soon(lambda: self._have_read(remote, reading, error))

        self._nics.do(lambda: self._nics.read(gate, parts, reading.body, whole, done))
        reading.until = time.monotonic() + READ_SECONDS + reading.head.body / READ_RATE

    def _have_read(self, remote: PeerConnection, reading: RdmaRead, error: BaseException | None) -> None:
        if remote.nics.reading is not reading or not reading.current():
            return  # it comes, or has come, by another connection
        remote.nics.reading = None
        if error is None:
            remote.nics.read += 1
            self._carrier.have_read(remote, reading)
            return
        self._fell_back(remote, f"a frame of {reading.head.body} bytes could not be read from there: {error}")
        self._say(remote, REFUSED, _NUMBER.pack(reading.head.number) + str(error).encode()[:1024])

    def beat(self, remote: PeerConnection, now: float) -> None:
        """Now and then: a NIC that never says how a read ended is not waited for."""
        reading = remote.nics.reading
        if reading is not None and now > reading.until:
            reading.until = float("inf")  # once
            gate = self._gate(remote)
            self._nics.do(lambda: self._nics.give_up(gate, "the NIC has not said for too long how a read ended"))

    # ---- what is said

    def hear(self, remote: PeerConnection, said: bytes) -> None:
        """Of the other side."""
        what, data, gate = said[0], said[1:], self._gate(remote)
        nics = self._nics
        if what == READY:
            remote.nics.ready = True
        elif what == REFUSED and len(data) >= _NUMBER.size:
            (number,) = _NUMBER.unpack_from(data)
            self._refused(remote, number, data[_NUMBER.size :].decode(errors="replace"))
        elif what in (WANT, OFFER, ANSWER, NO) and nics.start():
            self._met[remote.id] = remote
            nics.do(lambda: self._step(remote, gate, what, data))

    def _dial(self, gate: PeerLink) -> None:
        self._nics.do(lambda: self._dial_again(gate))

    def _dial_again(self, gate: PeerLink) -> None:
        remote = self._met.get(gate.session)
        if remote is None or not self._try(remote, OFFER, lambda: self._nics.offer(gate)):
            self._nics.give_up(gate, f"{gate} can't be connected with")

    def _step(self, remote: PeerConnection, gate: PeerLink, heard: int, data: bytes) -> None:
        """On the thread of the NICs: towards a connection, by which we read from there, or it from here."""
        nics = self._nics
        if heard == WANT:
            nics.give_up(gate, f"{gate} wants a new connection")
            self._try(remote, OFFER, lambda: nics.offer(gate))
        elif heard == OFFER and not self._try(remote, ANSWER, lambda: nics.accept(gate, data)):
            self._carrier.soon(lambda: self._say(remote, NO))
        elif heard == ANSWER:
            self._try(remote, READY, lambda: nics.connect(gate, data))
        elif heard == NO:
            nics.give_up(gate, f"{gate} can't be connected with: its log says why")

    def _try(self, remote: PeerConnection, then: int, call: Callable[[], bytes | None]) -> bool:
        """What is said next, if that is possible."""
        if remote.lost is not None:
            return False
        try:
            data = call() or b""
        except UnusableError as error:  # a device that nobody wants to use is nothing to warn of
            _debug(f"large frames between here and {remote}: TCP, since {error}")
            return False
        except Exception as error:
            why = f"no connection came of it: {error}"
            self._carrier.soon(lambda: self._fell_back(remote, why))
            return False
        self._carrier.soon(lambda: self._say(remote, then, data))
        return True

    def _say(self, remote: PeerConnection, what: int, data: bytes = b"") -> None:
        if len(data) >= MOST_SAID:
            self._fell_back(remote, f"what is to be said has {len(data)} bytes: name fewer ports, MONARCH_RDMA_DEVICES")
            return
        with remote.lock:
            self._carrier.put(remote, [remote.session.say(bytes([what]) + data)])

    def _fell_back(self, remote: PeerConnection, why: str) -> None:
        """The first time it is a warning."""
        if remote.nics.warned:
            _debug(f"large frames between here and {remote}: TCP, since {why}")
            return
        remote.nics.warned = True
        log.warning(
            "large frames between pid %d here and %s go by TCP, since %s. `monarch-backend doctor` explains the "
            "machine; MONARCH_RDMA_TRANSPORT=tcp on both hosts leaves NICs alone",
            os.getpid(),
            remote,
            why,
        )


def _nbytes(part: Any) -> int:
    return memoryview(part).nbytes


def _debug(text: str) -> None:
    debug_log.write(f"monarch: {text}")
