"""Readers of connections: the handshake of a new one, then the frames of the session that it resumes or begins.

The handshake is a preamble, TLS, and a proof of the secret. NICs may read parts of a frame's body.
"""

from __future__ import annotations

import logging
import selectors
import struct
import time
from typing import TYPE_CHECKING

from monarch_backend._transport.network import rdma_frame_header
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
from monarch_backend._transport.network.connection import (
    ANY_RECEIVER,
    MAX_RECEIVE_BUFFER_BYTES,
    Connection,
    HandedOverError,
    PeerConnection,
    Reader,
    ReceiveBuffer,
    record_connection,
)
from monarch_backend._transport.network.rdma_send import RdmaRead
from monarch_backend._transport.network.session import (
    BYE,
    CONTROL,
    DATA,
    HEAD_BYTES,
    RDMA_FRAME,
    Head,
    SessionError,
    read_head,
)

if TYPE_CHECKING:
    from monarch_backend._transport.network.connection_manager import Tcp

log = logging.getLogger("monarch_backend")

LOG_INTERVAL_S = 1.0
"""Seconds between two log lines about refused connections."""

_PREAMBLE = struct.Struct("!4sB3x16s8s")  # magic, whether TLS follows, receiver's token, name of the secret
PREAMBLE_BYTES = _PREAMBLE.size
_PREAMBLE_MAGIC = b"monh"


class ConnectionReader:
    def __init__(self, tcp: Tcp) -> None:
        self._tcp = tcp
        self._refusals = 0  # of accepted connections
        self._quiet = 0.0  # time until which refusals are not logged

    def refuse(self, connection: Connection, error: HandshakeError) -> None:
        """Give up the peer of an outgoing connection; log and drop an accepted one."""
        remote = connection.remote
        if remote is not None and connection.name is not None:
            self._tcp.lose(remote, str(error))
        else:
            self._log_refused(connection, error)
        self._tcp.drop(connection)

    def _log_refused(self, connection: Connection, error: HandshakeError) -> None:
        """Log a refusal, at a limited rate: otherwise unauthenticated peers could fill the log."""
        self._refusals += 1
        if time.monotonic() < self._quiet:
            return
        self._quiet = time.monotonic() + LOG_INTERVAL_S
        try:
            sender = str(connection.socket.getpeername()[0])
        except OSError:
            sender = "an unknown address"
        log.warning("a connection from %s was refused, number %d so far: %s", sender, self._refusals, error)

    def accept(self, connection: Connection, preamble: bytes) -> Reader:
        """Authenticate a peer that has connected to this process, then read its frames."""
        if not preamble:
            preamble = bytes((yield PREAMBLE_BYTES))
        magic, encrypted, receiver, which = _PREAMBLE.unpack(preamble)
        if magic != _PREAMBLE_MAGIC or bool(encrypted) != (self._tcp.tls is not None):
            raise HandshakeError("its first bytes are not those of a host with the same MONARCH_TLS")
        if self._tcp.tls is not None and which not in self._tcp.secrets:
            raise HandshakeError("it names a secret that is not known here")
        if receiver not in (ANY_RECEIVER, self._tcp.who):
            self._tcp.selector.unregister(connection.socket)
            if self._tcp.hand_over is not None and self._tcp.hand_over(receiver, connection.socket, preamble):
                connection.gone = True
                connection.socket.detach()
                raise HandedOverError
            self._tcp.selector.register(connection.socket, selectors.EVENT_READ, connection)
        binding = yield from self._tcp.io.secured(connection, self._tcp.secrets.get(which, b""))
        called = HandshakeServer(dict(self._tcp.secrets), binding)
        refusal = called.hear(bytes((yield HELLO_BYTES)))
        remote = None if refusal or receiver not in (ANY_RECEIVER, self._tcp.who) else self._session_of(called)
        if remote is not None and remote.id not in self._tcp.remotes and self._is_full():
            remote, refusal = None, Refusal.FULL
        if remote is None:
            self._tcp.io.write(connection, [HandshakeServer.refuse(refusal or Refusal.SESSION)])
            raise HandshakeError("the answer to it had the reason")
        self._tcp.io.write(connection, [called.answer(self._greeting(remote))])
        called.check(bytes((yield PROOF_BYTES)))
        if remote.id not in self._tcp.remotes and self._is_full():  # others have authenticated meanwhile
            raise HandshakeError(f"{self._tcp.max_sessions} sessions are open, which is the limit")
        del self._tcp.unauthenticated[connection]
        self._begin(connection, remote, called.other)
        yield from self._read_frames(connection, remote)

    def _is_full(self) -> bool:
        return self._tcp.max_sessions is not None and len(self._tcp.remotes) >= self._tcp.max_sessions

    def _greeting(self, remote: PeerConnection) -> Hello:
        return Hello(self._tcp.who, remote.id, remote.session.received, remote.knows, self._tcp.rdma_sender is not None)

    def _session_of(self, called: HandshakeServer) -> PeerConnection | None:
        """Return the session that is resumed, or a new one; None for one that has ended."""
        known = self._tcp.remotes.get(called.other.session)
        if known is not None:
            return known if known.secret == called.secret and known.who == called.other.who else None
        if called.other.received or called.other.resumes or called.other.session in self._tcp.ended_sessions:
            return None
        return PeerConnection(called.other.session, None, called.secret, time.monotonic())

    def connect(self, connection: Connection, remote: PeerConnection) -> Reader:
        """Authenticate to a peer that this process has connected to, then read its frames."""
        preamble = _PREAMBLE.pack(_PREAMBLE_MAGIC, self._tcp.tls is not None, remote.wanted, name_of(remote.secret))
        self._tcp.io.write(connection, [preamble])
        binding = yield from self._tcp.io.secured(connection, remote.secret)
        caller = HandshakeClient(remote.secret, self._greeting(remote), binding)
        self._tcp.io.write(connection, [caller.hello()])
        self._tcp.io.write(connection, [caller.hear(bytes((yield ANSWER_BYTES)))])
        if remote.wanted not in (ANY_RECEIVER, caller.other.who):
            raise HandshakeError("another process answered")
        self._begin(connection, remote, caller.other)
        yield from self._read_frames(connection, remote)

    def _begin(self, connection: Connection, remote: PeerConnection, other: Hello) -> None:
        if other.who == self._tcp.who:
            raise HandshakeError("this is the address of the connecting process itself")
        with remote.lock:
            former, remote.connection = remote.connection, connection
            connection.remote = remote
            if remote.attempt is connection:
                remote.attempt = None
            first, remote.up, remote.who, remote.pause = not remote.up, True, other.who, 0.0
            remote.times += 1
            record_connection(remote, "made" if remote.times == 1 else "made again")
            remote.trouble, remote.closed = "", False
            remote.heard, remote.silence = time.monotonic(), self._tcp.bounds.silence
            self._tcp.remotes[remote.id] = remote
            for parts in remote.session.resume(other.received):
                self._tcp.io.write(connection, parts)
            if self._tcp.rdma_sender is not None:
                self._tcp.rdma_sender.connected(remote, other.offers_rdma)
                self._tcp.go_on(remote)
        if former is not None and former is not connection:
            former.remote = None
            self._tcp.drop(former)
        if first:
            self._tcp.on_up(remote)

    # ---- frames of the session

    def _read_frames(self, connection: Connection, remote: PeerConnection) -> Reader:
        """Read frames until the peer ends the session."""
        scratch = ReceiveBuffer()
        while True:
            head = read_head(bytes((yield HEAD_BYTES)))
            size, limit = head.prefix + head.body, self._tcp.max_frame_bytes
            if size > limit:
                raise SessionError(f"a frame of {size} bytes, where at most {limit} are accepted")
            remote.knows = True
            prefix = bytes((yield head.prefix)) if head.prefix else b""
            if head.kind not in (DATA, RDMA_FRAME):
                self._hear(remote, head, prefix)
                if head.kind == BYE:
                    self._tcp.lose(remote, "it has ended the session", by_peer=True)
                    return
                continue
            if remote.nics.reading is not None:  # the peer sends it over TCP, and a NIC may still write to the memory
                remote.nics.reading = None
                scratch.renew()
            if len(scratch.whole) < head.body:
                scratch.grow(head.body)
            body = scratch.whole[: head.body]
            if head.kind == RDMA_FRAME:
                yield from self._lent(connection, remote, head, prefix, body, scratch)
                continue
            if head.body:
                yield body
            self.deliver(remote, head, prefix, body)
            if head.body > MAX_RECEIVE_BUFFER_BYTES:
                scratch.tidy()

    def _hear(self, remote: PeerConnection, head: Head, said: bytes) -> None:
        with remote.lock:
            remote.session.hear(head)
            self._tcp.go_on(remote)
        if head.kind == CONTROL and self._tcp.rdma_sender is not None:
            self._tcp.rdma_sender.hear(remote, said)

    def deliver(self, remote: PeerConnection, head: Head, prefix: bytes, body: memoryview) -> None:
        with remote.lock:
            session = remote.session
            taken = session.take(head)
            self._tcp.go_on(remote)
            if session.ack_is_due or head.kind == RDMA_FRAME:  # the peer sends nothing else before it is acknowledged
                self._tcp.put(remote, [session.acknowledgement()])
        if taken:
            self._tcp.on_frame(remote, prefix, body)

    def _lent(
        self,
        connection: Connection,
        remote: PeerConnection,
        head: Head,
        prefix: bytes,
        body: memoryview,
        scratch: ReceiveBuffer,
    ) -> Reader:
        """Read the part of a frame that is on this connection; NICs read the rest, then the frame is delivered."""
        if self._tcp.rdma_sender is None:
            raise SessionError("a frame that a NIC of this host should read, and NICs are off here")
        parts, prefix = rdma_frame_header.unpack(prefix, head.body)
        for start, end in rdma_frame_header.gaps(parts, head.body):
            yield body[start:end]
        with remote.lock:
            wanted = remote.session.is_next(head)
        if wanted:
            reading = RdmaRead(head, prefix, body, lambda: not connection.gone, scratch.tidy)
            self._tcp.rdma_sender.read(remote, reading, parts, scratch.whole)
