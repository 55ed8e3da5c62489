"""State of a connection to a process on another host: the peer with its session, and the socket."""

from __future__ import annotations

import mmap
import socket
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from monarch_backend._transport.network.rdma_send import PeerState
from monarch_backend._transport.network.session import Session, SessionError

MAX_RECEIVE_BUFFER_BYTES = 80 << 20
"""Bytes of a frame up to which its receive buffer is reused: faults of new pages cost more than the network."""

MIN_RECEIVE_BUFFER_BYTES = 64 << 10
"""Bytes of the first mapping: many small frames share it."""

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
