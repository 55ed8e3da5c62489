"""State of a connection to a process on another host, and the bytes of its socket, with or without TLS."""

from __future__ import annotations

import contextlib
import mmap
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from monarch_backend._telemetry import texts
from monarch_backend._telemetry.kinds import Kind
from monarch_backend._transport.network.auth import HandshakeError
from monarch_backend._transport.network.rdma_send import PeerState
from monarch_backend._transport.network.session import Session, SessionError

if TYPE_CHECKING:
    from monarch_backend._transport.network.connection_manager import Tcp
    from monarch_backend._transport.network.tls import Tls

MAX_RECEIVE_BUFFER_BYTES = 80 << 20
"""Bytes of a frame up to which its receive buffer is reused: faults of new pages cost more than the network."""

MIN_RECEIVE_BUFFER_BYTES = 64 << 10
"""Bytes of the first mapping: many small frames share it."""

MOST_AT_ONCE = 1 << 20
"""Bytes of one call to a TLS socket."""

MOST_OF_ONE = 4 << 20
"""Bytes that are read from one connection before the others."""

_MAX_REASON = 100  # characters of a reason that are recorded

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

ANY_RECEIVER = bytes(16)
"""Token in a preamble that addresses any process that listens there."""

Address = tuple[str, int]
Reader = Generator[int | memoryview, Any, None]
"""Parser of a connection's bytes. It yields the number of bytes that it needs, or memory to be filled."""


@dataclass
class Timeouts:
    """Timeouts and intervals between hosts, in seconds."""

    heartbeat: float = 1.0
    silence: float = 3.0  # until a silent host is lost; a broken connection must be restored within it
    patience: float = 10.0  # for the first answer of a host
    pause: float = 0.05  # before the first retry of a connection; doubles with each retry, up to ten times


class PeerConnection:
    """Process on another host, and the session with it."""

    def __init__(self, session: bytes, address: Address | None, secret: bytes, until: float) -> None:
        self.id, self.address, self.secret = session, address, secret
        self.who = ANY_RECEIVER  # its token, after the handshake
        self.wanted = ANY_RECEIVER  # the token to which this process connects
        self.session = Session()
        self.lock = threading.RLock()  # session, waiting, connection, nics
        self.nics = PeerState()
        self.waiting: deque[tuple[bytes, Sequence[Any], int]] = deque()  # frames, while the session or a NIC is busy
        self.connection: Connection | None = None
        self.attempt: Connection | None = None  # connecting, and not authenticated yet
        self.heard = until  # when bytes last came from it
        self.silence = 0.0  # seconds for which it may be silent
        self.pause = 0.0  # before the last retry
        self.up = False  # whether it has ever been connected
        self.knows = False  # whether it has certainly begun this session: a frame of it has come
        self.attempts = 0  # to connect
        self.times = 0  # connections so far
        self.trouble = ""  # why there is no connection
        self.closed = False  # by the peer, without BYE
        self.lost: str | None = None  # why it is lost

    def __str__(self) -> str:
        return f"{self.address[0]}:{self.address[1]}" if self.address else f"host {self.who.hex()[:8]}"


def record_connection(remote: PeerConnection, event: str, reason: str = "") -> None:
    """Record that a connection was made, or how it ended."""
    texts.event(Kind.CONNECTION, str(remote), f"{event}: {reason[:_MAX_REASON]}" if reason else event)


@dataclass(eq=False)
class Connection:
    """Socket, and the progress of its reads and writes."""

    socket: socket.socket
    reader: Reader
    name: str | None = None  # of the peer to which this process connects; None on the accepting side
    remote: PeerConnection | None = None
    since: float = field(default_factory=time.monotonic)
    out: deque[memoryview] = field(default_factory=deque)
    into: memoryview = field(default_factory=lambda: memoryview(b""))
    owned: bytearray | None = None  # the memory of `into`, if the reader has asked for a number of bytes
    filled: int = 0  # bytes of `into`
    connecting: bool = False
    shaking: bool = False  # in the handshake of TLS
    writing: bool = False  # whether the selector waits until the socket is writable
    broken: bool = False  # whether a write has failed
    gone: bool = False


class ReceiveBuffer:
    """Reused memory into which the bodies of one connection are read."""

    def __init__(self) -> None:
        self.whole = memoryview(bytearray())  # the object by which the registration cache knows the memory

    def grow(self, size: int) -> None:
        """Reserve ``size`` bytes. Raises SessionError if the address space has no room.

        A frame's head announces its size, and the peer may never send the body. Pages of an anonymous mapping are
        committed when bytes are written to them; a bytearray would commit all of them now.
        """
        self.whole = memoryview(b"")
        try:
            self.whole = memoryview(mmap.mmap(-1, max(size, MIN_RECEIVE_BUFFER_BYTES), _PRIVATE))
        except (OSError, MemoryError) as error:
            raise SessionError(
                f"no memory for a frame of {size} bytes ({error}): look at RLIMIT_AS (ulimit -v) and the memory limit "
                "of the control group"
            ) from None

    def renew(self) -> None:
        """Replace the memory, because a NIC may still write to it."""
        self.whole = memoryview(bytearray())

    def tidy(self) -> None:
        if len(self.whole) > MAX_RECEIVE_BUFFER_BYTES:
            self.renew()


class HandedOverError(Exception):
    """The socket is for another process of this host, which has received it."""


class SocketIO:
    """Reads and writes what the sockets have room for, on the thread of the connections."""

    def __init__(self, tcp: Tcp) -> None:
        self._tcp = tcp

    def look_for(self, connection: Connection, events: int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._tcp.selector.modify(connection.socket, events, connection)

    def read(self, connection: Connection) -> None:
        """Read the available bytes, up to MOST_OF_ONE, so that other connections are read, too."""
        left = MOST_OF_ONE
        while left > 0:
            if connection.gone or connection.shaking:
                return
            try:
                count = self._receive(connection)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            if count == 0:
                raise EOFError("it has closed the connection")
            if connection.remote is not None and connection.remote.up:
                connection.remote.heard = time.monotonic()
            left -= max(count, 1 << 10)  # small frames have a cost of their own
            connection.filled += count
            if connection.filled == len(connection.into):
                self.advance(connection, connection.owned)
        if isinstance(connection.socket, ssl.SSLSocket) and not connection.gone:
            self._tcp.call_soon(lambda: self._guarded_unless_gone(connection, self.read))

    def _receive(self, connection: Connection) -> int:
        into = connection.into[connection.filled :]
        if connection.remote is None or not isinstance(connection.socket, ssl.SSLSocket):
            return connection.socket.recv_into(into)
        with connection.remote.lock:  # OpenSSL's objects are not for two threads
            return self._decrypt(connection.socket, into[:MOST_AT_ONCE])

    @staticmethod
    def _decrypt(secured: ssl.SSLSocket, into: memoryview) -> int:
        """Read TLS records of 16 KiB in a tight loop, because the Python overhead of each one matters."""
        filled, wanted = secured.recv_into(into), len(into)
        try:
            while 0 < filled < wanted:
                count = secured.recv_into(into[filled:])
                if count == 0:
                    break
                filled += count
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        return filled

    def advance(self, connection: Connection, value: Any) -> None:
        """Pass data to the reader until it asks for data that has not arrived."""
        while True:
            try:
                wanted = connection.reader.send(value)
            except StopIteration:
                self._tcp.drop(connection)
                return
            connection.filled = 0
            connection.owned = bytearray(wanted) if isinstance(wanted, int) else None
            connection.into = memoryview(connection.owned) if connection.owned is not None else wanted  # type: ignore[assignment]
            if len(connection.into):
                return
            value = connection.owned

    def _encrypt(self, connection: Connection, tls: Tls) -> None:
        self._tcp.selector.unregister(connection.socket)
        context = tls.client if connection.name is not None else tls.server
        wrapped = context.wrap_socket(
            connection.socket, server_side=connection.name is None, do_handshake_on_connect=False
        )
        connection.socket, connection.shaking = wrapped, True
        self._tcp.selector.register(wrapped, selectors.EVENT_READ, connection)
        self._tcp.call_soon(lambda: self._guarded_unless_gone(connection, self._begin_to_shake))

    def _begin_to_shake(self, connection: Connection) -> None:
        if connection.shaking:
            self.shake(connection)

    def shake(self, connection: Connection) -> bool:
        """Continue the TLS handshake. Return True when it is complete."""
        secured: Any = connection.socket
        try:
            secured.do_handshake()
        except ssl.SSLWantReadError:
            self.look_for(connection, selectors.EVENT_READ)
            return False
        except ssl.SSLWantWriteError:
            self.look_for(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
            return False
        except ssl.SSLEOFError:  # before its first TLS message: the peer looks up the secret first
            raise HandshakeError(
                "it closed the connection at the start of TLS: it does not know this secret, or is no host of this job"
            ) from None
        except ssl.SSLError as error:
            raise HandshakeError(
                f"TLS failed: {error.reason or error}: is it a host, of the same job, with the same secret?"
            ) from None
        connection.shaking = False
        self.look_for(connection, selectors.EVENT_READ)
        self.advance(connection, None)
        return not connection.gone

    def secured(self, connection: Connection, secret: bytes) -> Generator[int | memoryview, Any, bytes]:
        """Switch to TLS if it is on. Return the channel binding for the proofs."""
        if self._tcp.tls is None:
            return b""
        from monarch_backend._transport.network import tls as _tls

        tls = self._tcp.tls(secret)
        self._encrypt(connection, tls)
        yield memoryview(bytearray(1))  # never filled: `shake` continues from here
        secured: Any = connection.socket
        return _tls.binding(secured, connection.name is None, tls)

    def write(self, connection: Connection, parts: Sequence[Any]) -> None:
        """Queue parts and send what fits now. Call under the lock of the peer."""
        if connection.broken:
            return
        idle = not connection.out
        connection.out.extend(memoryview(part).cast("B") for part in parts if len(part))
        if idle:
            try:
                self.flush(connection)
            except OSError:
                connection.out.clear()
                connection.broken = True
                self._tcp.call_soon(lambda: self._tcp.drop(connection))

    def flush(self, connection: Connection) -> None:
        """Send what is queued, as far as the socket has room. Call under the lock of the peer."""
        out = connection.out
        try:
            while out:
                count = self._send_some(connection)
                while out and count >= len(out[0]):
                    count -= len(out.popleft())
                if count:
                    out[0] = out[0][count:]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        if bool(out) != connection.writing:
            connection.writing = bool(out)
            events = selectors.EVENT_READ | selectors.EVENT_WRITE * connection.writing
            self.look_for(connection, events)

    @staticmethod
    def _send_some(connection: Connection) -> int:
        out = connection.out
        if isinstance(connection.socket, ssl.SSLSocket):
            return connection.socket.send(out[0][:MOST_AT_ONCE])
        return connection.socket.sendmsg([out[i] for i in range(min(len(out), 64))])

    def _guarded_unless_gone(self, connection: Connection, act: Callable[[Connection], None]) -> None:
        if not connection.gone:
            self._tcp.guarded(connection, lambda: act(connection))
