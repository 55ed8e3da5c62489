"""Reader of the frames of an authenticated connection: heads, prefixes and bodies. NICs may read parts of a body."""

from __future__ import annotations

from typing import TYPE_CHECKING

from monarch_backend._transport.network import rdma_frame_header
from monarch_backend._transport.network.connection import (
    MAX_RECEIVE_BUFFER_BYTES,
    Connection,
    PeerConnection,
    Reader,
    ReceiveBuffer,
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


class FrameReader:
    """Reads the frames of each connection, and delivers them in the order of the session."""

    def __init__(self, tcp: Tcp) -> None:
        self._tcp = tcp

    def read(self, connection: Connection, remote: PeerConnection) -> Reader:
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
                    self._tcp.lose(remote, "it has ended the session")
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
            self.take(remote, head, prefix, body)
            if head.body > MAX_RECEIVE_BUFFER_BYTES:
                scratch.tidy()

    def _hear(self, remote: PeerConnection, head: Head, said: bytes) -> None:
        with remote.lock:
            remote.session.hear(head)
            self._tcp.go_on(remote)
        if head.kind == CONTROL and self._tcp.rdma_sender is not None:
            self._tcp.rdma_sender.hear(remote, said)

    def take(self, remote: PeerConnection, head: Head, prefix: bytes, body: memoryview) -> None:
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
