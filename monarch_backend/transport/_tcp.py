"""Connections to other hosts: one thread that reads, accepts, calls again what broke, and hears who has fallen silent.

Real sockets and real time stand here and nowhere else between hosts; the simulator has its own. What frames mean is the
gateway's. Sending is tried at once by whoever sends, and what the socket does not take goes out from the thread.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from monarch_backend.transport import _session
from monarch_backend.transport._secret import (
    ANSWER_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    Called,
    Caller,
    Greeting,
    HandshakeError,
    Refusal,
)
from monarch_backend.transport._session import HEAD_BYTES, Session, SessionError, read_head

log = logging.getLogger("monarch_backend")

MOST_STRANGERS = 256
"""Connections that have not proved anything yet; the oldest goes when there is one more."""

STRANGER_SECONDS = 5.0
"""Time to prove it."""

Address = tuple[str, int]
Wanted = int | memoryview
"""So many bytes, which come as bytes; or memory to be filled."""
Reader = Generator[Wanted, Any, None]


@dataclass
class Bounds:
    """Seconds."""

    heartbeat: float = 1.0
    silence: float = 3.0  # after which a host is lost
    pause: float = 0.05  # before a broken connection is tried again; twice as long each time, up to ten times


class Remote:
    """Another host, and the session with it."""

    def __init__(self, who: bytes, session: bytes, address: Address | None) -> None:
        self.who, self.id, self.address = who, session, address
        self.session = Session()
        self.lock = threading.Lock()  # session and connection
        self.connection: _Connection | None = None
        self.heard = time.monotonic()
        self.lost: str | None = None

    def __str__(self) -> str:
        return f"{self.address[0]}:{self.address[1]}" if self.address else self.who.hex()[:8]


@dataclass(eq=False)
class _Connection:
    """A socket, and what it is in the middle of."""

    socket: socket.socket
    reader: Reader
    remote: Remote | None = None
    since: float = field(default_factory=time.monotonic)
    out: deque[memoryview] = field(default_factory=deque)
    into: memoryview | None = None  # what is being read
    filled: int = 0
    owned: bytearray | None = None  # where bytes that were asked for by number come
    tls: bool = False
    shaking: bool = False  # hands, below TLS
    writing: bool = False  # the selector looks for room


class Tcp:
    """The connections of one gateway. Callbacks run on its thread, and must not wait."""

    def __init__(
        self,
        who: bytes,
        secrets: dict[bytes, bytes],
        on_frame: Callable[[Remote, bytes, bytearray], None],
        on_up: Callable[[Remote], None],
        on_lost: Callable[[Remote], None],
        *,
        bounds: Bounds | None = None,
        server_tls: ssl.SSLContext | None = None,
        client_tls: ssl.SSLContext | None = None,
    ) -> None:
        self.who, self._secrets = who, secrets
        self._on_frame, self._on_up, self._on_lost = on_frame, on_up, on_lost
        self.bounds = bounds or Bounds()
        self._server_tls, self._client_tls = server_tls, client_tls
        self._remotes: dict[bytes, Remote] = {}  # by session
        self._strangers: dict[_Connection, None] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._soon: deque[Callable[[], None]] = deque()
        self._nudge = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._nudge, selectors.EVENT_READ, None)
        self._listeners: list[socket.socket] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="monarch-hosts", daemon=True)

    # ---- from any thread

    def start(self) -> None:
        """From now on there is a thread."""
        self._thread.start()

    def listen(self, host: str, port: int = 0) -> Address:
        """Accept calls there; the address, with the port that it got. Raises OSError."""
        [(family, kind, protocol, _, where), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(128)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
        self._listeners.append(listener)
        self.soon(lambda: self._selector.register(listener, selectors.EVENT_READ, listener))
        return listener.getsockname()[:2]

    def call(self, address: Address, secret: bytes) -> Remote:
        """Connect to a host, until it answers or the bound is over; then ``on_up`` or ``on_lost`` is called."""
        remote = Remote(b"", os.urandom(16), address)
        self._remotes[remote.id] = remote
        self.soon(lambda: self._call(remote, secret, self.bounds.pause))
        return remote

    def send(self, remote: Remote, prefix: bytes, body: list[Any]) -> bool:
        """A frame; False if there is no room for now. What ``body`` shows must not change until it has arrived."""
        with remote.lock:
            if remote.session.full:
                return False
            parts = remote.session.send(prefix, body)
            connection = remote.connection
            if connection is not None:
                self._write(connection, parts)
        return True

    def soon(self, call: Callable[[], None]) -> None:
        """On the thread."""
        self._soon.append(call)
        os.eventfd_write(self._nudge, 1)

    def close(self) -> None:
        """Say goodbye to all, and end the thread."""

        def end() -> None:
            for remote in self._remotes.values():
                with remote.lock:
                    if remote.connection is not None:
                        self._write(remote.connection, [remote.session.bye()])
            self._closed = True

        self.soon(end)
        if self._thread.is_alive():
            self._thread.join()

    # ---- the thread

    def _run(self) -> None:
        beat = time.monotonic()
        while not self._closed:
            now = time.monotonic()
            if now >= beat:
                self._beat(now)
                beat = now + self.bounds.heartbeat / 2
            for key, events in self._selector.select(max(0.0, beat - now)):
                if key.data is None:
                    os.eventfd_read(self._nudge)
                elif isinstance(key.data, socket.socket):
                    self._accept(key.data)
                else:
                    self._ready(key.data, events)
            while self._soon:
                self._soon.popleft()()
        self._end()

    def _end(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Connection):
                self._drop(key.data)
        for listener in self._listeners:
            listener.close()
        self._selector.close()
        os.close(self._nudge)

    def _accept(self, listener: socket.socket) -> None:
        try:
            accepted, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # a stranger's place is better used by a host
                for stranger in list(self._strangers)[:8]:
                    self._drop(stranger)
            return
        while len(self._strangers) >= MOST_STRANGERS:
            self._drop(next(iter(self._strangers)))
        connection = self._adopt(accepted, self._server_tls, None)
        if connection is not None:
            self._strangers[connection] = None

    def _adopt(self, plain: socket.socket, tls: ssl.SSLContext | None, name: str | None) -> _Connection | None:
        """A new connection; ``name`` is whom we have called, None where we were."""
        plain.setblocking(False)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wrapped = plain
        if tls is not None:
            wrapped = tls.wrap_socket(
                plain, server_side=name is None, server_hostname=name, do_handshake_on_connect=False
            )
        connection = _Connection(wrapped, tls=tls is not None, shaking=tls is not None)
        connection.reader = self._called(connection)
        self._want(connection, next(connection.reader))
        self._selector.register(wrapped, selectors.EVENT_READ, connection)
        return connection

    def _drop(self, connection: _Connection, why: str = "") -> None:
        """This connection is over; its session may go on with another one."""
        self._strangers.pop(connection, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.socket.close()
        connection.reader.close()
        remote = connection.remote
        if remote is None or remote.connection is not connection:
            return
        with remote.lock:
            remote.connection = None
        if remote.address is not None and remote.lost is None and not self._closed:
            self._call(remote, self._secret_of[remote.id], self.bounds.pause)

    # ---- reading

    def _ready(self, connection: _Connection, events: int) -> None:
        try:
            if connection.shaking and not self._shake(connection):
                return
            if events & selectors.EVENT_WRITE and connection.remote is not None:
                with connection.remote.lock:
                    self._flush(connection)
            if events & selectors.EVENT_READ:
                self._read(connection)
        except (OSError, SessionError, HandshakeError) as error:
            if connection.remote is not None and not isinstance(error, ConnectionResetError):
                log.info("the connection with %s is over: %s", connection.remote, error)
            self._drop(connection, str(error))

    def _read(self, connection: _Connection) -> None:
        """All that is there, but not for ever: others have something, too."""
        for _ in range(64):
            assert connection.into is not None
            try:
                count = connection.socket.recv_into(connection.into[connection.filled :])
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            if count == 0:
                raise ConnectionResetError("it has closed the connection")
            if connection.remote is not None:
                connection.remote.heard = time.monotonic()
            connection.filled += count
            while connection.filled == len(connection.into):
                self._want(connection, connection.reader.send(connection.owned))

    def _want(self, connection: _Connection, wanted: Wanted) -> None:
        connection.filled = 0
        if isinstance(wanted, int):
            connection.owned = bytearray(wanted)
            connection.into = memoryview(connection.owned)
        else:
            connection.owned, connection.into = None, wanted
