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
"""Bytes of a frame up to which the memory that it is read into is used again: fresh pages cost more than a network."""

MIN_RECEIVE_BUFFER_BYTES = 64 << 10
"""Bytes of the first mapping: many small frames share it."""

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

ANY_RECEIVER = bytes(16)
"""For whom a connection is that has no process to talk to yet: whoever listens."""

Address = tuple[str, int]
Reader = Generator[int | memoryview, Any, None]
"""What is being read of a connection: it asks for so many bytes, or for memory to be filled."""


@dataclass
class Timeouts:
    """Seconds."""

    heartbeat: float = 1.0
    silence: float = 3.0  # after which a host is lost, and also how long a broken connection may take to come back
    patience: float = 10.0  # for the first answer of a host that is called
    pause: float = 0.05  # before a broken connection is tried again; twice as long each time, up to ten times


class PeerConnection:
    """A process on another host, and the session with it."""

    def __init__(self, session: bytes, address: Address | None, secret: bytes, until: float) -> None:
        self.id, self.address, self.secret = session, address, secret
        self.who = ANY_RECEIVER  # its token, once it has proved that it knows the secret
        self.wanted = ANY_RECEIVER  # whom we have called
        self.session = Session()
        self.lock = threading.RLock()  # session, waiting, connection, nics
        self.nics = PeerState()
        self.waiting: deque[tuple[bytes, Sequence[Any], int]] = deque()  # while the session is full, or a frame is lent
        self.connection: Connection | None = None
        self.attempt: Connection | None = None  # to become that: nobody has proved anything on it yet
        self.heard = until  # when something last came from it
        self.silence = 0.0  # how long it may be silent
        self.pause = 0.0
        self.up = False
        self.knows = False  # of this session, for sure: it has said something in it
        self.attempts = 0  # to connect
        self.times = 0  # that there was a connection
        self.trouble = ""  # why there is no connection
        self.closed = False  # by the other side, without a goodbye
        self.lost: str | None = None  # why, once it is

    def __str__(self) -> str:
        return f"{self.address[0]}:{self.address[1]}" if self.address else f"host {self.who.hex()[:8]}"


@dataclass(eq=False)
class Connection:
    """A socket, and what it is in the middle of."""

    socket: socket.socket
    reader: Reader
    name: str | None = None  # whom we have called; None where we were
    remote: PeerConnection | None = None
    since: float = field(default_factory=time.monotonic)
    out: deque[memoryview] = field(default_factory=deque)
    into: memoryview = field(default_factory=lambda: memoryview(b""))
    owned: bytearray | None = None  # `into`, where bytes were asked for by number
    filled: int = 0
    connecting: bool = False
    shaking: bool = False  # hands, below TLS
    writing: bool = False  # the selector looks for room
    broken: bool = False  # as was found when something was written
    gone: bool = False


class ReceiveBuffer:
    """Memory that the bodies of one connection are read into, again and again."""

    def __init__(self) -> None:
        self.whole = memoryview(bytearray())  # this very object: NICs know memory by the object that it belongs to

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
        """Somebody may still write to this one."""
        self.whole = memoryview(bytearray())

    def tidy(self) -> None:
        """A frame was taken."""
        if len(self.whole) > MAX_RECEIVE_BUFFER_BYTES:
            self.renew()


class HandedOverError(Exception):
    """Not ours: this socket is for another process of this host."""
