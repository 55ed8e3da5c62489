"""Connections to other hosts: one thread that accepts, calls, reads, and notices who has broken off or fallen silent.

Real sockets and real time between hosts stand here and nowhere else. What frames mean is the gateway's; who may talk at
all is auth.py's; what is lost with a connection and sent again is session.py's; what NICs carry is rdma_send.py's.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import random
import selectors
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from monarch_backend._core.limits import start_thread
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
from monarch_backend._transport.network.rdma_send import PeerState, RdmaRead, RdmaSender, loans
from monarch_backend._transport.network.session import (
    BYE,
    DATA,
    HEAD_BYTES,
    LENT,
    MOST_BODY,
    MOST_PREFIX,
    SAY,
    Head,
    Session,
    SessionError,
    read_head,
)

if TYPE_CHECKING:
    from monarch_backend._transport.network.tls import Tls

log = logging.getLogger("monarch_backend")

MAX_UNAUTHENTICATED = 256
"""Connections that have not proved anything yet; the oldest goes when there is one more."""

MAX_ENDED_SESSIONS = 1024
"""Sessions that are over and remembered as such: many times as many as can still be asked for."""

AUTHENTICATION_TIMEOUT_S = 5.0
"""Time to prove it."""

MAX_RECEIVE_BUFFER_BYTES = 80 << 20
"""Bytes of a frame up to which the memory that it is read into is used again: fresh pages cost more than a network."""

MIN_RECEIVE_BUFFER_BYTES = 64 << 10
"""Bytes of the first mapping: many small frames share it."""

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

MOST_AT_ONCE = 1 << 20
"""Bytes that are given to a TLS connection in one piece."""

MOST_OF_ONE = 4 << 20
"""Bytes that are read of one connection, before others have their turn."""

LOG_INTERVAL_S = 1.0
"""Between two lines of the log about strangers."""

RECONNECT_AFTER_CLOSE_S = 1.0
"""For a host to call again whose connection was closed, not broken: a process that dies closes what it has."""

_PROMPT = ((16, 1), (44, 1000))
"""TCP_THIN_LINEAR_TIMEOUTS, TCP_RTO_MAX_MS: what was lost is sent again each second at least, not after 0.2, 0.4, 0.8,
1.6 and 3.2: a network that comes back within the bound for silence is not to be found silent all the same."""

ANY_RECEIVER = bytes(16)
"""For whom a connection is that has no process to talk to yet: whoever listens."""

_PREAMBLE = struct.Struct("!4sB3x16s8s")  # magic, TLS or not, for whom, which secret
KNOCK_BYTES = _PREAMBLE.size
_PREAMBLE_MAGIC = b"monh"

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
        self.connection: _Connection | None = None
        self.attempt: _Connection | None = None  # to become that: nobody has proved anything on it yet
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
class _Connection:
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


class _Scratch:
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


class _HandOverError(Exception):
    """Not ours: this socket is for another process of this host."""


class Tcp:
    """The connections of one process. Callbacks run on its thread, and must not wait.

    ``on_frame(remote, prefix, body)`` is given a view that shows the body until it returns.
    ``secrets``: those that are accepted, by `name_of`; the mapping may change. ``hand_over(for_whom, socket, read)``:
    for a connection to another process of this host, with what was read of it; it returns False if there is none.
    ``lends``: where both sides do, and have NICs, these carry large frames.
    ``max_frame_bytes``: the session of a peer that announces a larger frame loses its connection, before memory is
    reserved. ``max_sessions``: sessions that peers have opened at one time; a further one is refused.
    ``on_up`` and ``on_lost`` come once for each Remote; a connection that breaks and comes back within the bound is
    neither.
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
        lends: bool = False,
        max_frame_bytes: int = MOST_PREFIX + MOST_BODY,
        max_sessions: int | None = None,
    ) -> None:
        self.who, self._secrets = who, secrets
        self._on_frame, self._on_up, self._on_lost = on_frame, on_up, on_lost
        self.bounds = bounds or Timeouts()
        self._tls, self._hand_over = tls, hand_over
        self._max_frame_bytes, self._max_sessions = max_frame_bytes, max_sessions
        self._loans: RdmaSender | None = loans(self) if lends else None
        self._remotes: dict[bytes, PeerConnection] = {}  # by session
        self._over: dict[bytes, None] = {}  # sessions that were lost, the oldest first
        self._refusals, self._quiet = 0, 0.0  # of strangers, and until when nothing is said of them
        self._strangers: dict[_Connection, None] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._soon: deque[Callable[[], None]] = deque()
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._nudge = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._nudge, selectors.EVENT_READ, None)
        self._listeners: list[socket.socket] = []
        self._closed = False
        self._beats = 0.0  # when to tell everybody that we are alive
        self._thread = threading.Thread(target=self._run, name="monarch-hosts", daemon=True)

    # ---- from any thread

    def start(self) -> None:
        """From now on there is a thread."""
        start_thread(self._thread)

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
        self.soon(lambda: self._watch(listener))
        name: Address = listener.getsockname()[:2]
        return name

    def call(
        self, address: Address, secret: bytes, whom: bytes = ANY_RECEIVER, *, patience: float | None = None
    ) -> PeerConnection:
        """Connect to a host, and try again until ``patience`` is over; then ``on_up`` or ``on_lost`` is called."""
        remote = PeerConnection(os.urandom(16), address, secret, time.monotonic())
        remote.wanted, remote.silence = whom, self.bounds.patience if patience is None else patience
        self._remotes[remote.id] = remote
        self.soon(lambda: self._call(remote))
        self.later(remote.silence, lambda: None if remote.up else self._lose_the_silent(remote, time.monotonic()))
        return remote

    def take_over(self, accepted: socket.socket, knock: bytes) -> None:
        """A connection that somebody else has accepted, and read a part of."""
        self.soon(lambda: self._adopt(accepted, None, knock))

    def send(self, remote: PeerConnection, prefix: bytes, body: Sequence[Any], lendable: int = 0) -> None:
        """A frame, in its order, when there is room. What ``body`` shows must not change until it has arrived.

        ``lendable``: how many of its last parts may be seen in the network, and so be carried by NICs.
        """
        with remote.lock:
            if remote.lost is not None:
                return
            if remote.waiting or remote.session.full or remote.nics.loan is not None:
                remote.waiting.append((prefix, body, lendable))
            else:
                self._send(remote, prefix, body, lendable)

    def _send(self, remote: PeerConnection, prefix: bytes, body: Sequence[Any], lendable: int) -> None:
        if lendable and self._loans is not None and self._loans.lend(remote, prefix, body, lendable):
            return
        parts = remote.session.send(prefix, body)
        if remote.connection is not None:
            self._write(remote.connection, parts)

    def hang_up(self, remote: PeerConnection) -> None:
        """Say goodbye to this one; nothing is told of it any more."""
        self.soon(lambda: self._hang_up(remote))

    def soon(self, call: Callable[[], None]) -> None:
        """On the thread."""
        self._soon.append(call)
        self._wake()

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """On the thread, in so many seconds."""
        self.soon(lambda: self._later.append((time.monotonic() + seconds, call)))

    def close(self) -> None:
        """Say goodbye to all, and end the thread."""

        def end() -> None:
            for remote in list(self._remotes.values()):
                self._hang_up(remote)
            self._closed = True

        if self._thread.is_alive():
            self.soon(end)
            self._thread.join()

    # ---- the thread

    def _wake(self) -> None:
        with contextlib.suppress(OSError, BlockingIOError):
            os.eventfd_write(self._nudge, 1)

    def _watch(self, listener: socket.socket) -> None:
        self._selector.register(listener, selectors.EVENT_READ, listener)

    def _run(self) -> None:
        try:
            turn = time.monotonic()
            self._beats = turn + self.bounds.heartbeat
            while not self._closed:
                turn = self._turn(turn)
        except BaseException:
            log.exception("the thread of the connections between hosts has failed: all hosts are lost to this process")
            for remote in list(self._remotes.values()):
                self._safely(lambda remote=remote: self._lose(remote, "this side can't read connections any more"))  # type: ignore[misc]
        finally:
            if self._loans is not None:
                self._loans.close()
            self._end()

    def _turn(self, last: float) -> float:
        """Once around; when it began."""
        now = time.monotonic()
        if now - last > self.bounds.silence / 2:  # we were stopped, not they: what they said may lie there
            for remote in list(self._remotes.values()):
                remote.heard += now - last
        if now >= self._beats:
            self._safely(lambda: self._beat(now))
            self._beats = now + self.bounds.heartbeat
        due = now if self._soon else min([self._beats, *(at for at, _ in self._later)])
        for key, events in self._selector.select(max(0.0, due - now)):
            self._serve(key, events)
        self._do_what_is_due()
        return now

    def _safely(self, call: Callable[[], object]) -> None:
        """What fails here concerns one connection, and not the others."""
        try:
            call()
        except Exception:
            log.exception("something between hosts failed in an unknown way; the rest goes on")

    def _serve(self, key: selectors.SelectorKey, events: int) -> None:
        try:
            if key.data is None:
                os.eventfd_read(self._nudge)
            elif isinstance(key.data, _Connection):
                if not key.data.gone:
                    self._ready(key.data, events)
            else:
                self._accept(key.data)
        except Exception:
            log.exception("a connection between hosts failed in an unknown way; the others go on")
            if isinstance(key.data, _Connection):
                self._drop(key.data)

    def _do_what_is_due(self) -> None:
        for _ in range(len(self._soon)):  # not what comes meanwhile: others are to be read, too
            self._safely(self._soon.popleft())
        now = time.monotonic()
        due = [call for at, call in self._later if at <= now]
        self._later = [(at, call) for at, call in self._later if at > now]
        for call in due:
            self._safely(call)

    def _end(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Connection):
                self._drop(key.data)
        for listener in self._listeners:
            listener.close()
        self._selector.close()
        os.close(self._nudge)

    def _beat(self, now: float) -> None:
        """Tell everybody that we are alive; those that do not tell us are lost."""
        for stranger in [s for s in self._strangers if now - s.since > AUTHENTICATION_TIMEOUT_S]:
            self._drop(stranger)
        for remote in list(self._remotes.values()):
            if now - remote.heard > remote.silence:
                self._lose_the_silent(remote, now)
                continue
            self._give_up_attempt(remote, now)
            if self._loans is not None:
                self._loans.beat(remote, now)
            with remote.lock:
                if remote.connection is not None and remote.up:
                    self._write(remote.connection, [remote.session.word()])

    def _give_up_attempt(self, remote: PeerConnection, now: float) -> None:
        """Where the end of a connection was lost on its way nothing is sent, and nothing ever comes: call again."""
        attempt, most = remote.attempt, self.bounds.silence / (2 if remote.up else 1)
        if attempt is not None and not attempt.gone and now - attempt.since > most:
            remote.trouble = f"it did not answer a connection for {now - attempt.since:.1f} s"
            self._drop(attempt)

    def _lose_the_silent(self, remote: PeerConnection, now: float) -> None:
        how = "nothing was heard from it" if remote.up else "it did not answer"
        why = f" ({remote.trouble})" if remote.trouble else ""
        self._lose(remote, f"{how} for {now - remote.heard:.1f} s{why}")

    def _lose(self, remote: PeerConnection, why: str) -> None:
        if self._remotes.pop(remote.id, None) is None:
            return
        self._forget(remote)
        with remote.lock:
            remote.lost = why
            remote.waiting.clear()
            self._lend_no_more(remote)
            connection, remote.connection = remote.connection, None
        if connection is not None:
            self._drop(connection)
        self._on_lost(remote)

    def _forget(self, remote: PeerConnection) -> None:
        """Not quite: its session does not begin anew, with frames that have come before."""
        self._over[remote.id] = None
        while len(self._over) > MAX_ENDED_SESSIONS:
            del self._over[next(iter(self._over))]

    def _lend_no_more(self, remote: PeerConnection) -> None:
        if self._loans is not None:
            self._loans.forget(remote)

    def _hang_up(self, remote: PeerConnection) -> None:
        if self._remotes.pop(remote.id, None) is None:
            return
        self._forget(remote)
        with remote.lock:
            remote.lost = "we have said goodbye"
            if self._loans is not None:
                self._loans.settle(remote)
            self._lend_no_more(remote)
            connection, remote.connection = remote.connection, None
            if connection is not None:
                self._write(connection, [remote.session.bye()])
        if connection is not None:
            self._drop(connection)

    # ---- connections that come and go

    def _accept(self, listener: socket.socket) -> None:
        try:
            accepted, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # a stranger's place is better used by a host
                for stranger in list(self._strangers)[:8]:
                    self._drop(stranger)
            return
        self._adopt(accepted, None, b"")

    def _adopt(self, plain: socket.socket, remote: PeerConnection | None, knock: bytes) -> None:
        """Read what comes here; of ``remote``, if we have called it, else of a stranger."""
        plain.setblocking(False)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option, value in _PROMPT:
            with contextlib.suppress(OSError):  # an older kernel
                plain.setsockopt(socket.IPPROTO_TCP, option, value)
        connection = _Connection(plain, iter(()), None)  # type: ignore[arg-type]
        if remote is None:
            while len(self._strangers) >= MAX_UNAUTHENTICATED:
                self._drop(next(iter(self._strangers)))
            self._strangers[connection] = None
            connection.reader = self._called(connection, knock)
        else:
            connection.name, connection.remote, connection.connecting = str(remote), remote, True
            remote.attempt = connection
            connection.reader = self._caller(connection, remote)
        self._selector.register(plain, selectors.EVENT_READ | selectors.EVENT_WRITE * connection.connecting, connection)
        if remote is None:
            self._guarded(connection, lambda: self._advance(connection, None))

    def _call(self, remote: PeerConnection) -> None:
        if remote.lost is not None or remote.address is None or self._closed:
            return
        host, port = remote.address
        try:
            self._connect(remote, socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST))
        except (socket.gaierror, UnicodeError):  # a name: who knows it may take long to answer
            threading.Thread(target=self._look_up, args=(remote, host, port), name="monarch-names", daemon=True).start()

    def _look_up(self, remote: PeerConnection, host: str, port: int) -> None:
        """On a thread of its own."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            trouble = f"{host}: {error}"
            self.soon(lambda: self._failed(remote, trouble))
        else:
            self.soon(lambda: self._connect(remote, found))

    def _failed(self, remote: PeerConnection, trouble: str) -> None:
        remote.trouble = trouble
        self._call_again(remote)

    def _connect(self, remote: PeerConnection, found: Sequence[Any]) -> None:
        """To one of its addresses; next time to the next one."""
        if remote.lost is not None or self._closed:
            return
        family, kind, protocol, _, where = found[remote.attempts % len(found)]
        remote.attempts += 1
        try:
            plain = socket.socket(family, kind, protocol)
        except OSError as error:
            self._failed(remote, str(error))
            return
        plain.setblocking(False)
        try:
            plain.connect(where)
        except BlockingIOError:
            pass
        except OSError as error:
            plain.close()
            self._failed(remote, error.strerror or str(error))
            return
        self._adopt(plain, remote, b"")

    def _call_again(self, remote: PeerConnection) -> None:
        first = self.bounds.pause
        remote.pause = min(remote.pause * 2, first * 10) if remote.pause else first
        pause = remote.pause * random.uniform(0.5, 1.0)  # many may have been broken off at once
        self._later.append((time.monotonic() + pause, lambda: self._call(remote)))

    def _drop(self, connection: _Connection) -> None:
        """This connection is over; its session may go on with another one."""
        if connection.gone:
            return
        connection.gone = True
        self._strangers.pop(connection, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        remote = connection.remote
        if remote is None:
            connection.socket.close()
        else:
            with remote.lock:  # nobody is writing
                if remote.lost is None:  # a reset: an end would say that this process has died
                    with contextlib.suppress(OSError):
                        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.socket.close()
        with contextlib.suppress(ValueError):  # it is what fails just now
            connection.reader.close()
        if remote is None:
            return
        with remote.lock:
            if remote.connection is connection:
                remote.connection = None
        if remote.address is not None and remote.lost is None and not self._closed:
            self._call_again(remote)

    # ---- reading

    def _guarded(self, connection: _Connection, act: Callable[[], None]) -> None:
        try:
            act()
        except _HandOverError:
            self._strangers.pop(connection, None)
        except HandshakeError as error:
            self._refused(connection, error)
        except (OSError, SessionError, EOFError) as error:
            remote = connection.remote
            if remote is not None:
                before = not remote.up and not connection.connecting
                remote.trouble = f"{error}; is it a host, with the same MONARCH_TLS?" if before else str(error)
            # Whoever was told of a break when it wrote reads an end afterwards.
            ended = isinstance(error, EOFError) and not connection.broken
            ended = ended and remote is not None and remote.connection is connection
            self._drop(connection)
            if remote is not None and remote.up:
                self._broken(remote, error, ended)

    def _broken(self, remote: PeerConnection, error: Exception, ended: bool) -> None:
        """A network breaks connections, and does not close them: a process that ends does, or its system for it."""
        if ended:
            remote.closed = True
            times = remote.times
            self._later.append((time.monotonic() + RECONNECT_AFTER_CLOSE_S, lambda: self._still_closed(remote, times)))
        elif remote.closed and isinstance(error, ConnectionRefusedError):
            self._lose(remote, "its process has closed the connection, and nobody listens there any more")

    def _still_closed(self, remote: PeerConnection, times: int) -> None:
        if remote.times == times and remote.lost is None:
            self._lose(remote, "its process has closed the connection and does not come back")

    def _refused(self, connection: _Connection, error: HandshakeError) -> None:
        """One whom we have called says why it does not talk to us; or a stranger is shown the door."""
        remote = connection.remote
        if remote is not None and connection.name is not None:
            self._lose(remote, str(error))
        else:
            self._tell_of_a_stranger(connection, error)
        self._drop(connection)

    def _tell_of_a_stranger(self, connection: _Connection, error: HandshakeError) -> None:
        """Not of each: whoever can reach us would write our log."""
        self._refusals += 1
        if time.monotonic() < self._quiet:
            return
        self._quiet = time.monotonic() + LOG_INTERVAL_S
        try:
            whom = str(connection.socket.getpeername()[0])
        except OSError:
            whom = "somebody"
        log.warning("a connection of %s was refused, the %d. so far: %s", whom, self._refusals, error)

    def _ready(self, connection: _Connection, events: int) -> None:
        def act() -> None:
            if connection.connecting:
                error = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error:
                    raise OSError(error, os.strerror(error))
                connection.connecting = False
                self._look_for(connection, selectors.EVENT_READ)
                self._advance(connection, None)
                return
            if connection.shaking and not self._shake(connection):
                return
            if events & selectors.EVENT_WRITE and connection.remote is not None:
                with connection.remote.lock:
                    self._flush(connection)
            elif events & selectors.EVENT_WRITE:
                self._flush(connection)
            if events & selectors.EVENT_READ:
                self._read(connection)

        self._guarded(connection, act)

    def _look_for(self, connection: _Connection, events: int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.modify(connection.socket, events, connection)

    def _read(self, connection: _Connection) -> None:
        """What is there, but not for ever: others have something, too."""
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
            left -= max(count, 1 << 10)  # many small frames take their time, too
            connection.filled += count
            if connection.filled == len(connection.into):
                self._advance(connection, connection.owned)
        if isinstance(connection.socket, ssl.SSLSocket) and not connection.gone:
            self.soon(lambda: None if connection.gone else self._guarded(connection, lambda: self._read(connection)))

    def _receive(self, connection: _Connection) -> int:
        into = connection.into[connection.filled :]
        if connection.remote is None or not isinstance(connection.socket, ssl.SSLSocket):
            return connection.socket.recv_into(into)
        with connection.remote.lock:  # OpenSSL's objects are not for two threads
            return self._decrypt(connection.socket, into[:MOST_AT_ONCE])

    @staticmethod
    def _decrypt(secured: ssl.SSLSocket, into: memoryview) -> int:
        """Record by record until nothing more is there; what a record costs in Python counts, at 16 KiB each."""
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

    def _advance(self, connection: _Connection, value: Any) -> None:
        """Give the reader what it has asked for, until it asks for something that is not there."""
        while True:
            try:
                wanted = connection.reader.send(value)
            except StopIteration:
                self._drop(connection)
                return
            connection.filled = 0
            connection.owned = bytearray(wanted) if isinstance(wanted, int) else None
            connection.into = memoryview(connection.owned) if connection.owned is not None else wanted  # type: ignore[assignment]
            if len(connection.into):
                return
            value = connection.owned

    # ---- TLS

    def _encrypt(self, connection: _Connection, tls: Tls) -> None:
        self._selector.unregister(connection.socket)
        context = tls.client if connection.name is not None else tls.server
        wrapped = context.wrap_socket(
            connection.socket, server_side=connection.name is None, do_handshake_on_connect=False
        )
        connection.socket, connection.shaking = wrapped, True
        self._selector.register(wrapped, selectors.EVENT_READ, connection)
        self.soon(
            lambda: None if connection.gone else self._guarded(connection, lambda: self._begin_to_shake(connection))
        )

    def _begin_to_shake(self, connection: _Connection) -> None:
        if connection.shaking:
            self._shake(connection)

    def _shake(self, connection: _Connection) -> bool:
        """True when both sides have shaken hands."""
        secured: Any = connection.socket
        try:
            secured.do_handshake()
        except ssl.SSLWantReadError:
            self._look_for(connection, selectors.EVENT_READ)
            return False
        except ssl.SSLWantWriteError:
            self._look_for(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
            return False
        except ssl.SSLEOFError:  # before a word of TLS: its side looks up the secret first
            raise HandshakeError(
                "it closed the connection at the start of TLS: it does not know this secret, or is no host of this job"
            ) from None
        except ssl.SSLError as error:
            raise HandshakeError(
                f"TLS failed: {error.reason or error}: is it a host, of the same job, with the same secret?"
            ) from None
        connection.shaking = False
        self._look_for(connection, selectors.EVENT_READ)
        self._advance(connection, None)
        return not connection.gone

    def _secured(self, connection: _Connection, secret: bytes) -> Generator[int | memoryview, Any, bytes]:
        """Under TLS from here on, if that is on; what is bound into the proofs."""
        if self._tls is None:
            return b""
        from monarch_backend._transport.network import tls as _tls

        tls = self._tls(secret)
        self._encrypt(connection, tls)
        yield memoryview(bytearray(1))  # never filled: `_shake` goes on from here
        secured: Any = connection.socket
        return _tls.binding(secured, connection.name is None, tls)

    # ---- what is said

    def _called(self, connection: _Connection, knock: bytes) -> Reader:
        if not knock:
            knock = bytes((yield KNOCK_BYTES))
        magic, encrypted, whom, which = _PREAMBLE.unpack(knock)
        if magic != _PREAMBLE_MAGIC or bool(encrypted) != (self._tls is not None):
            raise HandshakeError("bytes of a stranger, or of a host with another idea of TLS")
        if self._tls is not None and which not in self._secrets:
            raise HandshakeError("it wants to prove a secret that is not known here")
        if whom not in (ANY_RECEIVER, self.who):
            self._selector.unregister(connection.socket)
            if self._hand_over is not None and self._hand_over(whom, connection.socket, knock):
                connection.gone = True
                connection.socket.detach()
                raise _HandOverError
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        binding = yield from self._secured(connection, self._secrets.get(which, b""))
        called = HandshakeServer(dict(self._secrets), binding)
        refusal = called.hear(bytes((yield HELLO_BYTES)))
        remote = None if refusal or whom not in (ANY_RECEIVER, self.who) else self._session_of(called)
        if remote is not None and remote.id not in self._remotes and self._is_full():
            remote, refusal = None, Refusal.FULL
        if remote is None:
            self._write(connection, [HandshakeServer.refuse(refusal or Refusal.SESSION)])
            raise HandshakeError("it was told why")
        self._write(connection, [called.answer(self._greeting(remote))])
        called.check(bytes((yield PROOF_BYTES)))
        if remote.id not in self._remotes and self._is_full():  # others have proved themselves meanwhile
            raise HandshakeError(f"{self._max_sessions} sessions are open, which is the limit")
        del self._strangers[connection]
        self._begin(connection, remote, called.other)
        yield from self._frames(connection, remote)

    def _is_full(self) -> bool:
        return self._max_sessions is not None and len(self._remotes) >= self._max_sessions

    def _greeting(self, remote: PeerConnection) -> Hello:
        return Hello(self.who, remote.id, remote.session.received, remote.knows, self._loans is not None)

    def _session_of(self, called: HandshakeServer) -> PeerConnection | None:
        """The session that goes on, or a new one; None for one that is over."""
        known = self._remotes.get(called.other.session)
        if known is not None:
            return known if known.secret == called.secret and known.who == called.other.who else None
        if called.other.received or called.other.resumes or called.other.session in self._over:
            return None
        return PeerConnection(called.other.session, None, called.secret, time.monotonic())

    def _caller(self, connection: _Connection, remote: PeerConnection) -> Reader:
        knock = _PREAMBLE.pack(_PREAMBLE_MAGIC, self._tls is not None, remote.wanted, name_of(remote.secret))
        self._write(connection, [knock])
        binding = yield from self._secured(connection, remote.secret)
        caller = HandshakeClient(remote.secret, self._greeting(remote), binding)
        self._write(connection, [caller.hello()])
        self._write(connection, [caller.hear(bytes((yield ANSWER_BYTES)))])
        if remote.wanted not in (ANY_RECEIVER, caller.other.who):
            raise HandshakeError("somebody else answered")
        self._begin(connection, remote, caller.other)
        yield from self._frames(connection, remote)

    def _begin(self, connection: _Connection, remote: PeerConnection, other: Hello) -> None:
        """It has proved that it knows the secret: its session goes on here."""
        if other.who == self.who:
            raise HandshakeError("this is the address of the very process that calls")
        with remote.lock:
            former, remote.connection = remote.connection, connection
            connection.remote = remote
            if remote.attempt is connection:
                remote.attempt = None
            first, remote.up, remote.who, remote.pause = not remote.up, True, other.who, 0.0
            remote.times += 1
            remote.trouble, remote.closed = "", False
            remote.heard, remote.silence = time.monotonic(), self.bounds.silence
            self._remotes[remote.id] = remote
            for parts in remote.session.resume(other.received):
                self._write(connection, parts)
            if self._loans is not None:
                self._loans.connected(remote, other.lends)
                self.go_on(remote)
        if former is not None and former is not connection:
            former.remote = None
            self._drop(former)
        if first:
            self._on_up(remote)

    def _frames(self, connection: _Connection, remote: PeerConnection) -> Reader:
        scratch = _Scratch()
        while True:
            head = read_head(bytes((yield HEAD_BYTES)))
            if head.prefix + head.body > self._max_frame_bytes:
                raise SessionError(
                    f"a frame of {head.prefix + head.body} bytes, where at most {self._max_frame_bytes} are accepted"
                )
            remote.knows = True
            prefix = bytes((yield head.prefix)) if head.prefix else b""
            if head.kind not in (DATA, LENT):
                self._hear(remote, head, prefix)
                if head.kind == BYE:
                    self._lose(remote, "it has said goodbye")
                    return
                continue
            if remote.nics.reading is not None:  # it is sent as ever after all, and is not to be written to any more
                remote.nics.reading = None
                scratch.renew()
            if len(scratch.whole) < head.body:
                scratch.grow(head.body)
            body = scratch.whole[: head.body]
            if head.kind == LENT:
                yield from self._lent(connection, remote, head, prefix, body, scratch)
                continue
            if head.body:
                yield body
            self._take(remote, head, prefix, body)
            if head.body > MAX_RECEIVE_BUFFER_BYTES:
                scratch.tidy()

    def _hear(self, remote: PeerConnection, head: Head, said: bytes) -> None:
        with remote.lock:
            remote.session.hear(head)
            self.go_on(remote)
        if head.kind == SAY and self._loans is not None:
            self._loans.hear(remote, said)

    def _take(self, remote: PeerConnection, head: Head, prefix: bytes, body: memoryview) -> None:
        """A frame is there, with the last byte of its body."""
        with remote.lock:
            session = remote.session
            taken = session.take(head)
            self.go_on(remote)
            if session.word_is_due or head.kind == LENT:  # nothing else comes before that
                self.put(remote, [session.word()])
        if taken:
            self._on_frame(remote, prefix, body)

    def _lent(
        self,
        connection: _Connection,
        remote: PeerConnection,
        head: Head,
        prefix: bytes,
        body: memoryview,
        scratch: _Scratch,
    ) -> Reader:
        """What of it is on this connection; what is not is read from there meanwhile, and then it is taken."""
        if self._loans is None:
            raise SessionError("a frame that NICs are to carry, though there are none here")
        parts, prefix = rdma_frame_header.unpack(prefix, head.body)
        for start, end in rdma_frame_header.gaps(parts, head.body):
            yield body[start:end]
        with remote.lock:
            wanted = remote.session.is_next(head)
        if wanted:
            reading = RdmaRead(head, prefix, body, lambda: not connection.gone, scratch.tidy)
            self._loans.read(remote, reading, parts, scratch.whole)

    def have_read(self, remote: PeerConnection, reading: RdmaRead) -> None:
        """As Carrier: a frame of which a part was lent is all there."""
        if (connection := remote.connection) is not None:
            self._guarded(connection, lambda: self._take(remote, reading.head, reading.prefix, reading.body))
        reading.over()

    def go_on(self, remote: PeerConnection) -> None:
        """As Carrier: what has waited, as far as there is room now."""
        if self._loans is not None:
            self._loans.heard(remote)
        while remote.waiting and not remote.session.full and remote.nics.loan is None:
            self._send(remote, *remote.waiting.popleft())

    def put(self, remote: PeerConnection, parts: Sequence[Any]) -> None:
        """As Carrier: on its connection, if it has one; what it lacks comes with the next one."""
        if remote.connection is not None:
            self._write(remote.connection, parts)

    # ---- writing, with the lock of the remote

    def _write(self, connection: _Connection, parts: Sequence[Any]) -> None:
        if connection.broken:
            return
        idle = not connection.out
        connection.out.extend(memoryview(part).cast("B") for part in parts if len(part))
        if idle:
            try:
                self._flush(connection)
            except OSError:
                connection.out.clear()
                connection.broken = True
                self.soon(lambda: self._drop(connection))

    def _flush(self, connection: _Connection) -> None:
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
            self._look_for(connection, events)

    @staticmethod
    def _send_some(connection: _Connection) -> int:
        out = connection.out
        if isinstance(connection.socket, ssl.SSLSocket):
            return connection.socket.send(out[0][:MOST_AT_ONCE])
        return connection.socket.sendmsg([out[i] for i in range(min(len(out), 64))])


def secrets_by_name(*secrets: bytes) -> dict[bytes, bytes]:
    """As Tcp wants them."""
    return {name_of(secret): secret for secret in secrets}
