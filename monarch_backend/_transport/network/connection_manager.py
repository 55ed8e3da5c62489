"""Connections to other hosts: one thread that accepts, connects and reads.

The module and its parts are the only users of sockets and real time between hosts. It connects and retries, sends
heartbeats, and ends silent and closed peers.

- connection.py: the state of a connection and of its peer, and its bytes, with or without TLS
- connection_reader.py: authentication of a new connection (the messages are in auth.py), then its frames (session.py)

gateway.py handles the frames. rdma_send.py sends large frames over NICs.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from monarch_backend._core import platform
from monarch_backend._core.limits import start_thread
from monarch_backend._transport.network.auth import (
    HandshakeError,
    name_of,
)
from monarch_backend._transport.network.connection import (
    ANY_RECEIVER,
    Address,
    Connection,
    HandedOverError,
    PeerConnection,
    SocketIO,
    Timeouts,
    record_connection,
)
from monarch_backend._transport.network.connection_reader import ConnectionReader
from monarch_backend._transport.network.rdma_send import RdmaRead, RdmaSender, rdma_sender
from monarch_backend._transport.network.session import (
    MAX_BODY_BYTES,
    MAX_PREFIX_BYTES,
    SessionError,
)

if TYPE_CHECKING:
    from monarch_backend._transport.network.tls import Tls

log = logging.getLogger("monarch_backend")

AUTHENTICATION_TIMEOUT_S = 5.0
"""Time for the handshake of an accepted connection."""

RECONNECT_AFTER_CLOSE_S = 1.0
"""Time for a peer to reconnect after it has closed its connection. A dying process closes its connections, too."""

MAX_UNAUTHENTICATED = 256
"""Unauthenticated connections at one time. The oldest is closed when there is one more."""

MAX_ENDED_SESSIONS = 1024
"""Ended sessions that are remembered, so that none of them begins again."""

_PROMPT = ((16, 1), (44, 1000))
"""TCP_THIN_LINEAR_TIMEOUTS, TCP_RTO_MAX_MS: retransmit lost packets at least each second. With the default back-off of
0.2, 0.4, 0.8, 1.6, 3.2 s a network that recovers in time would still look silent."""


class Tcp:
    """Connections of one process to other hosts. Callbacks run on its thread, and must not block.

    - ``on_frame(remote, prefix, body)``: ``body`` is a view that is valid until the callback returns.
    - ``on_up(remote)``, ``on_lost(remote)``: called at most once for each peer. A connection that breaks and is
      restored within ``bounds.silence`` calls neither.
    - ``secrets``: accepted secrets by `name_of`; the mapping may change.
    - ``hand_over(token, socket, read)``: passes on a connection to another process of this host, with the bytes that
      were read from it. It returns False if there is no such process.
    - ``offers_rdma``: NICs carry large frames if both hosts have NICs and set this.
    - ``max_frame_bytes``: a peer that announces a larger frame loses its connection before memory is reserved.
    - ``max_sessions``: sessions that peers may open at one time; a further one is refused.
    """

    def __init__(
        self,
        who: bytes,
        secrets: Mapping[bytes, bytes],
        on_frame: Callable[[PeerConnection, bytes, memoryview], None],
        on_up: Callable[[PeerConnection], None],
        on_lost: Callable[[PeerConnection], None],
        *,
        bounds: Timeouts | None = None,
        tls: Callable[[bytes], Tls] | None = None,
        hand_over: Callable[[bytes, socket.socket, bytes], bool] | None = None,
        offers_rdma: bool = False,
        max_frame_bytes: int = MAX_PREFIX_BYTES + MAX_BODY_BYTES,
        max_sessions: int | None = None,
    ) -> None:
        self.who, self.secrets = who, secrets
        self.on_frame, self.on_up, self._on_lost = on_frame, on_up, on_lost
        self.bounds = bounds or Timeouts()
        self.tls, self.hand_over = tls, hand_over
        self.max_frame_bytes, self.max_sessions = max_frame_bytes, max_sessions
        self.rdma_sender: RdmaSender | None = rdma_sender(self) if offers_rdma else None
        self.remotes: dict[bytes, PeerConnection] = {}  # by session
        self.ended_sessions: dict[bytes, None] = {}  # the oldest first
        self.io, self.readers = SocketIO(self), ConnectionReader(self)
        self._next_beat = 0.0
        self.unauthenticated: dict[Connection, None] = {}  # unauthenticated, the oldest first
        self.selector = selectors.DefaultSelector()
        self._soon: deque[Callable[[], object]] = deque()
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self._wake_read, self._wake_write = platform.wake_descriptors()
        self.selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._listeners: list[socket.socket] = []
        self.is_closed = False
        self._thread = threading.Thread(target=self._run, name="monarch-hosts", daemon=True)

    # ---- from any thread

    def start(self) -> None:
        start_thread(self._thread)

    def listen(self, host: str, port: int = 0) -> Address:
        """Accept connections. Return the address with the port that was assigned. Raises OSError."""
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
        self.call_soon(lambda: self.selector.register(listener, selectors.EVENT_READ, listener))
        name: Address = listener.getsockname()[:2]
        return name

    def call(
        self, address: Address, secret: bytes, receiver: bytes = ANY_RECEIVER, *, patience: float | None = None
    ) -> PeerConnection:
        """Connect to a host, and retry for ``patience`` seconds. Then ``on_up`` or ``on_lost`` is called."""
        remote = PeerConnection(os.urandom(16), address, secret, time.monotonic())
        remote.wanted, remote.silence = receiver, self.bounds.patience if patience is None else patience
        self.remotes[remote.id] = remote
        self.call_soon(lambda: self._dial(remote))
        self.later(remote.silence, lambda: None if remote.up else self._lose_silent(remote, time.monotonic()))
        return remote

    def take_over(self, accepted: socket.socket, preamble: bytes) -> None:
        """Take over a connection that another process has accepted; ``preamble`` is the preamble that it has read."""
        self.call_soon(lambda: self.adopt(accepted, None, preamble))

    def send(self, remote: PeerConnection, prefix: bytes, body: Sequence[Any], rdma_eligible: int = 0) -> None:
        """Send a frame in order, now or when the session has room. The body must not change until it has arrived.

        ``rdma_eligible``: the number of parts at the end of the body that NICs may read, without encryption.
        """
        with remote.lock:
            if remote.lost is not None:
                return
            if remote.waiting or remote.session.full or remote.nics.rdma_send is not None:
                remote.waiting.append((prefix, body, rdma_eligible))
            else:
                self._send(remote, prefix, body, rdma_eligible)

    def _send(self, remote: PeerConnection, prefix: bytes, body: Sequence[Any], rdma_eligible: int) -> None:
        if (
            rdma_eligible
            and self.rdma_sender is not None
            and self.rdma_sender.try_send(remote, prefix, body, rdma_eligible)
        ):
            return
        parts = remote.session.send(prefix, body)
        if remote.connection is not None:
            self.io.write(remote.connection, parts)

    def hang_up(self, remote: PeerConnection) -> None:
        """End the session with this peer. No callback is called for it any more."""
        self.call_soon(lambda: self._hang_up(remote))

    def call_soon(self, call: Callable[[], object]) -> None:
        self._soon.append(call)
        self._wake()

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        self.call_soon(lambda: self.timers.append((time.monotonic() + seconds, call)))

    def close(self) -> None:
        def end() -> None:
            for remote in list(self.remotes.values()):
                self._hang_up(remote)
            self.is_closed = True

        if self._thread.is_alive():
            self.call_soon(end)
            self._thread.join()

    # ---- the thread

    def _wake(self) -> None:
        with contextlib.suppress(OSError, BlockingIOError):
            os.write(self._wake_write, platform.WAKE)

    def _run(self) -> None:
        try:
            turn = time.monotonic()
            self._next_beat = turn + self.bounds.heartbeat
            while not self.is_closed:
                turn = self._turn(turn)
        except BaseException:
            log.exception("the thread of the connections between hosts has failed: all hosts are lost to this process")
            for remote in list(self.remotes.values()):
                self._safely(lambda remote=remote: self.lose(remote, "this side can't read connections any more"))  # type: ignore[misc]
        finally:
            if self.rdma_sender is not None:
                self.rdma_sender.close()
            self._end()

    def _turn(self, last: float) -> float:
        """Run one turn of the loop. Return the time at which it began."""
        now = time.monotonic()
        if now - last > self.bounds.silence / 2:  # this process was stopped: the peers' bytes may wait in the sockets
            for remote in list(self.remotes.values()):
                remote.heard += now - last
        if now >= self._next_beat:
            self._safely(lambda: self._beat(now))
            self._next_beat = now + self.bounds.heartbeat
        due = now if self._soon else min([self._next_beat, *(at for at, _ in self.timers)])
        for key, events in self.selector.select(max(0.0, due - now)):
            self._serve(key, events)
        self._do_what_is_due()
        return now

    def _safely(self, call: Callable[[], object]) -> None:
        """Run a call; log its error, which concerns one connection only."""
        try:
            call()
        except Exception:
            log.exception("an operation between hosts failed unexpectedly; the other connections continue")

    def _serve(self, key: selectors.SelectorKey, events: int) -> None:
        try:
            if key.data is None:
                os.read(self._wake_read, 4096)
            elif isinstance(key.data, Connection):
                if not key.data.gone:
                    self._ready(key.data, events)
            else:
                self._accept(key.data)
        except Exception:
            log.exception("a connection between hosts failed unexpectedly; the others continue")
            if isinstance(key.data, Connection):
                self.drop(key.data)

    def _do_what_is_due(self) -> None:
        for _ in range(len(self._soon)):  # calls that are added meanwhile wait until the sockets were read
            self._safely(self._soon.popleft())
        now = time.monotonic()
        due = [call for at, call in self.timers if at <= now]
        self.timers = [(at, call) for at, call in self.timers if at > now]
        for call in due:
            self._safely(call)

    def _end(self) -> None:
        for key in list(self.selector.get_map().values()):
            if isinstance(key.data, Connection):
                self.drop(key.data)
        for listener in self._listeners:
            listener.close()
        self.selector.close()
        for fd in {self._wake_read, self._wake_write}:
            os.close(fd)

    def lose(self, remote: PeerConnection, why: str, *, hang_up: bool = False, by_peer: bool = False) -> None:
        """End a session: lost for ``why``, or with ``hang_up`` by this side, which tells the peer and calls nothing.

        ``by_peer``: the peer has told that it ends the session, which is recorded as its end, not as a loss.
        """
        if self.remotes.pop(remote.id, None) is None:
            return
        record_connection(remote, "ended" if hang_up or by_peer else "lost", why)
        self.ended_sessions[remote.id] = None  # it must not begin again with frames that were delivered before
        while len(self.ended_sessions) > MAX_ENDED_SESSIONS:
            del self.ended_sessions[next(iter(self.ended_sessions))]
        with remote.lock:
            remote.lost = why
            if self.rdma_sender is not None:
                if hang_up:
                    self.rdma_sender.settle(remote)
                self.rdma_sender.forget(remote)
            remote.waiting.clear()
            connection, remote.connection = remote.connection, None
            if connection is not None and hang_up:
                self.io.write(connection, [remote.session.bye()])
        if connection is not None:
            self.drop(connection)
        if not hang_up:
            self._on_lost(remote)

    def _hang_up(self, remote: PeerConnection) -> None:
        self.lose(remote, "this side has ended the session", hang_up=True)

    # ---- start and end of connections

    def _accept(self, listener: socket.socket) -> None:
        try:
            accepted, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # free descriptors of unauthenticated connections
                for each in list(self.unauthenticated)[:8]:
                    self.drop(each)
            return
        self.adopt(accepted, None, b"")

    def adopt(self, plain: socket.socket, remote: PeerConnection | None, preamble: bytes) -> None:
        """Start the handshake on a socket: to ``remote`` if this process connects, else of an accepted connection."""
        plain.setblocking(False)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option, value in _PROMPT:
            with contextlib.suppress(OSError):  # an older kernel
                plain.setsockopt(socket.IPPROTO_TCP, option, value)
        connection = Connection(plain, iter(()), None)  # type: ignore[arg-type]
        if remote is None:
            while len(self.unauthenticated) >= MAX_UNAUTHENTICATED:
                self.drop(next(iter(self.unauthenticated)))
            self.unauthenticated[connection] = None
            connection.reader = self.readers.accept(connection, preamble)
        else:
            connection.name, connection.remote, connection.connecting = str(remote), remote, True
            remote.attempt = connection
            connection.reader = self.readers.connect(connection, remote)
        self.selector.register(plain, selectors.EVENT_READ | selectors.EVENT_WRITE * connection.connecting, connection)
        if remote is None:
            self.guarded(connection, lambda: self.io.advance(connection, None))

    def drop(self, connection: Connection) -> None:
        """Close a connection. Its session may continue on another one."""
        if connection.gone:
            return
        connection.gone = True
        self.unauthenticated.pop(connection, None)
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(connection.socket)
        remote = connection.remote
        if remote is None:
            connection.socket.close()
        else:
            with remote.lock:  # no thread is writing
                if remote.lost is None:  # with a reset: an orderly close means that this process has ended
                    with contextlib.suppress(OSError):
                        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.socket.close()
        with contextlib.suppress(ValueError):  # the reader is running: it has called this method
            connection.reader.close()
        if remote is None:
            return
        with remote.lock:
            if remote.connection is connection:
                remote.connection = None
        if remote.address is not None and remote.lost is None and not self.is_closed:
            self._dial_again(remote)

    # ---- connecting to peers: each result of a lookup in turn, with a growing pause

    def _dial(self, remote: PeerConnection) -> None:
        if remote.lost is not None or remote.address is None or self.is_closed:
            return
        host, port = remote.address
        try:
            self._connect(remote, socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST))
        except (socket.gaierror, UnicodeError):  # not a numeric address, and the resolver may be slow
            threading.Thread(target=self._look_up, args=(remote, host, port), name="monarch-names", daemon=True).start()

    def _look_up(self, remote: PeerConnection, host: str, port: int) -> None:
        """Resolve a name. Runs on its own thread."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            trouble = f"{host}: {error}"
            self.call_soon(lambda: self._dial_failed(remote, trouble))
        else:
            self.call_soon(lambda: self._connect(remote, found))

    def _dial_failed(self, remote: PeerConnection, trouble: str) -> None:
        remote.trouble = trouble
        self._dial_again(remote)

    def _connect(self, remote: PeerConnection, found: Sequence[Any]) -> None:
        """Connect to one of the resolved addresses; the next attempt uses the next one."""
        if remote.lost is not None or self.is_closed:
            return
        family, kind, protocol, _, where = found[remote.attempts % len(found)]
        remote.attempts += 1
        try:
            plain = socket.socket(family, kind, protocol)
        except OSError as error:
            self._dial_failed(remote, str(error))
            return
        plain.setblocking(False)
        try:
            plain.connect(where)
        except BlockingIOError:
            pass
        except OSError as error:
            plain.close()
            self._dial_failed(remote, error.strerror or str(error))
            return
        self.adopt(plain, remote, b"")

    def _dial_again(self, remote: PeerConnection) -> None:
        first = self.bounds.pause
        remote.pause = min(remote.pause * 2, first * 10) if remote.pause else first
        pause = remote.pause * random.uniform(0.5, 1.0)  # many connections may break at once
        self.timers.append((time.monotonic() + pause, lambda: self._dial(remote)))

    # ---- silent and closed peers

    def _beat(self, now: float) -> None:
        """Send heartbeats. Drop peers and unauthenticated connections that are silent for too long."""
        for connection in [s for s in self.unauthenticated if now - s.since > AUTHENTICATION_TIMEOUT_S]:
            self.drop(connection)
        for remote in list(self.remotes.values()):
            if now - remote.heard > remote.silence:
                self._lose_silent(remote, now)
                continue
            self._give_up_attempt(remote, now)
            if self.rdma_sender is not None:
                self.rdma_sender.beat(remote, now)
            with remote.lock:
                if remote.connection is not None and remote.up:
                    self.io.write(remote.connection, [remote.session.acknowledgement()])

    def _give_up_attempt(self, remote: PeerConnection, now: float) -> None:
        """Drop an attempt that gets no answer, then connect again: the packet that ended it may be lost."""
        attempt, most = remote.attempt, self.bounds.silence / (2 if remote.up else 1)
        if attempt is not None and not attempt.gone and now - attempt.since > most:
            remote.trouble = f"it did not answer a connection for {now - attempt.since:.1f} s"
            self.drop(attempt)

    def _lose_silent(self, remote: PeerConnection, now: float) -> None:
        how = "nothing was heard from it" if remote.up else "it did not answer"
        why = f" ({remote.trouble})" if remote.trouble else ""
        self.lose(remote, f"{how} for {now - remote.heard:.1f} s{why}")

    def _on_broken(self, remote: PeerConnection, error: Exception, ended: bool) -> None:
        """Detect the end of the peer's process: its system closes connections, while a network breaks them."""
        if ended:
            remote.closed = True
            times = remote.times
            self.timers.append((time.monotonic() + RECONNECT_AFTER_CLOSE_S, lambda: self._still_closed(remote, times)))
        elif remote.closed and isinstance(error, ConnectionRefusedError):
            self.lose(remote, "its process has closed the connection and does not listen any more")

    def _still_closed(self, remote: PeerConnection, times: int) -> None:
        if remote.times == times and remote.lost is None:
            self.lose(remote, "its process has closed the connection and does not connect again")

    # ---- reading

    def guarded(self, connection: Connection, act: Callable[[], None]) -> None:
        try:
            act()
        except HandedOverError:
            self.unauthenticated.pop(connection, None)
        except HandshakeError as error:
            self.readers.refuse(connection, error)
        except (OSError, SessionError, EOFError) as error:
            remote = connection.remote
            if remote is not None:
                before = not remote.up and not connection.connecting
                remote.trouble = f"{error}; is it a host, with the same MONARCH_TLS?" if before else str(error)
            # After a failed write the socket reads an end, although the connection broke.
            ended = isinstance(error, EOFError) and not connection.broken
            ended = ended and remote is not None and remote.connection is connection
            self.drop(connection)
            if remote is not None and remote.up:
                record_connection(remote, "broken", remote.trouble)
                self._on_broken(remote, error, ended)

    def _ready(self, connection: Connection, events: int) -> None:
        def act() -> None:
            if connection.connecting:
                error = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error:
                    raise OSError(error, os.strerror(error))
                connection.connecting = False
                self.io.look_for(connection, selectors.EVENT_READ)
                self.io.advance(connection, None)
                return
            if connection.shaking and not self.io.shake(connection):
                return
            if events & selectors.EVENT_WRITE and connection.remote is not None:
                with connection.remote.lock:
                    self.io.flush(connection)
            elif events & selectors.EVENT_WRITE:
                self.io.flush(connection)
            if events & selectors.EVENT_READ:
                self.io.read(connection)

        self.guarded(connection, act)

    # ---- for rdma_send.py

    def have_read(self, remote: PeerConnection, reading: RdmaRead) -> None:
        """Deliver a frame that a NIC has read."""
        if (connection := remote.connection) is not None:
            self.guarded(connection, lambda: self.readers.deliver(remote, reading.head, reading.prefix, reading.body))
        reading.over()

    def go_on(self, remote: PeerConnection) -> None:
        """Send waiting frames, as far as the session has room. Call under the peer's lock."""
        if self.rdma_sender is not None:
            self.rdma_sender.heard(remote)
        while remote.waiting and not remote.session.full and remote.nics.rdma_send is None:
            self._send(remote, *remote.waiting.popleft())

    def put(self, remote: PeerConnection, parts: Sequence[Any]) -> None:
        """Write to the peer's connection, if there is one; the next one resends. Call under the peer's lock."""
        if remote.connection is not None:
            self.io.write(remote.connection, parts)


def secrets_by_name(*secrets: bytes) -> dict[bytes, bytes]:
    return {name_of(secret): secret for secret in secrets}
