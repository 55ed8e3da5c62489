"""TCP route, which always exists: data connections that native threads serve without Python.

A process listens for others once it sends handles to them. It connects to other processes at the first transfer with
their memory. csrc/memory/wire.h defines the protocol, handshake.h the authentication.
"""

from __future__ import annotations

import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from monarch_backend import _native
from monarch_backend._actor.runtime import Runtime
from monarch_backend._core import env, platform
from monarch_backend._core.addresses import local_addresses
from monarch_backend._rdma.control_rpc import TOPICS, ask
from monarch_backend._rdma.errors import RDMAError
from monarch_backend._rdma.registrations import Handle, Registry
from monarch_backend._rdma.routes.protocol import (
    CANCELLED,
    DONE,
    FAILED,
    LATE,
    LOST,
    READ,
    UNREACHABLE,
    WRITE,
    AtomicOp,
    ReadWriteOp,
    Result,
    Route,
)
from monarch_backend._transport.local.frames import PING, Setting
from monarch_backend._transport.local.peer import Peer

Endpoints = tuple[tuple[str, int], ...]
"""Addresses and ports."""

STREAMS_PER_PEER = 4
"""Connections to one process, for large transfers."""

SOCKET_WAIT_S = 0.002
"""Seconds that a waiting thread blocks in the socket, where only signals interrupt it."""

SWEEP_INTERVAL_S = 0.02


class ServerInfo(msgspec.Struct, frozen=True, array_like=True):
    """Addresses and secret of a process, as the main program sends them."""

    secret: bytes  # of the program, for memory only; it never leaves the program's processes
    addresses: tuple[str, ...]  # at which other hosts reach this one
    encrypted: bool


_secrets_lock = threading.Lock()
_secrets: weakref.WeakKeyDictionary[Runtime, bytes] = weakref.WeakKeyDictionary()


def place(owner: Runtime) -> ServerInfo:
    """Return this process's addresses and secret. Raises RDMAError if the main program does not answer."""
    if owner.root is None:
        found = _place_of(owner, owner.router.token)
    else:
        found = msgspec.msgpack.decode(ask(owner, owner.root, "place"), type=ServerInfo)
    if not env.get("MONARCH_TLS"):  # in this process alone
        found = ServerInfo(found.secret, found.addresses, False)
    return found


def _place_of(root: Runtime, token: str) -> ServerInfo:
    from monarch_backend._hosts.connection_settings import tls_for

    with _secrets_lock:
        secret = _secrets.setdefault(root, secrets.token_bytes(32))
    host = root.hosts.of(token)
    addresses = tuple(dict.fromkeys(_own_addresses(root))) if host is None else (host.address[0],)
    return ServerInfo(secret, addresses or ("127.0.0.1",), tls_for() is not None)


def _own_addresses(root: Runtime) -> Iterator[str]:
    """Return the addresses of the main program's host from which it connects to other hosts."""
    for host in root.hosts.attached():
        if host.lost is not None or host.through is not None:
            continue
        yield from local_addresses(host.address[0])


def _answer(root: Runtime, peer: Peer, _: bytes) -> bytes:
    return msgspec.msgpack.encode(_place_of(root, peer.token))


TOPICS["place"] = _answer


class SmallRequest:
    """A small request in flight: see InFlightTransfer.

    The caller's thread sends the request, and the waiting thread reads the reply, which saves two thread switches. A
    pool thread reads the reply instead if a waiter sleeps or a callback is set. It also takes requests that were not
    polled within SWEEP_INTERVAL_S.
    """

    __slots__ = ("_client", "_done", "_handed_over", "_native", "_scope", "token")

    def __init__(
        self,
        client: SmallRequestClient,
        token: str,
        scope: Any,
        done: Callable[[Result], None],
        native: _native.SmallRequest,
    ) -> None:
        self._client, self.token, self._scope, self._done, self._native = client, token, scope, done, native
        self._handed_over = False

    def _fetch(self, seconds: float | None) -> None:
        told = self._native.fetch(seconds)
        if told is not None:
            self._client.forget(self)
            self._done(Result(*told))

    def help(self, spins: float, waits: float) -> None:
        self._fetch(0.0 if self._handed_over else min(SOCKET_WAIT_S, waits))

    def listen(self) -> None:
        if not self._handed_over and not self._native.is_over:
            self._handed_over = True
            self._client.submit(self._see_to_it)

    def _see_to_it(self) -> None:
        while not self._native.is_over:
            self._fetch(None)

    def end(self, outcome: int) -> None:
        if outcome != LATE:  # the native part detects a timeout by itself
            self._scope.cancel()
        self._fetch(0.0)
        self.listen()  # for the case that another thread reads the reply: it sees the cancellation

    def end_now(self) -> None:
        """See InFlightTransfer. Nothing to do: `end` lets the thread that reads the reply close its socket."""


class SmallRequestClient:
    """The unfinished small requests of this process. ``submit`` runs a job on a thread that may block."""

    def __init__(self, owner: Runtime, submit: Callable[[Callable[[], None]], None]) -> None:
        self.submit, self._progress = submit, owner.progress
        self._lock = threading.Lock()
        self._out: set[SmallRequest] = set()
        self._old: set[SmallRequest] = set()  # requests of the last sweep
        self._sweeps = False

    def add(self, request: SmallRequest) -> None:
        """Add a request. It may have finished already."""
        with self._lock:
            self._out.add(request)
            begin, self._sweeps = not self._sweeps, True
        if begin:
            self._progress.later(SWEEP_INTERVAL_S, self._sweep)

    def forget(self, request: SmallRequest) -> None:
        with self._lock:
            self._out.discard(request)
            self._old.discard(request)

    def _sweep(self) -> None:
        with self._lock:
            late, self._old = self._old, self._out - self._old
            self._sweeps = bool(self._old)
        for request in late:
            request.listen()
        if self._sweeps:
            self._progress.later(SWEEP_INTERVAL_S, self._sweep)

    def end(self, token: str | None = None) -> None:
        with self._lock:
            ended = [request for request in self._out if token in (None, request.token)]
        for request in ended:
            request.end(CANCELLED)


class Tcp(Route):
    """Route to memory of a process on any host."""

    name = "tcp"

    def __init__(self, owner: Runtime, registry: Registry, submit: Callable[[Callable[[], None]], None]) -> None:
        """``submit`` runs a job on a thread that may block."""
        self._program, self._registry = owner, registry
        self._small_requests = SmallRequestClient(owner, submit)
        self._lock = threading.Lock()  # guards the dictionaries; never held while blocking
        self._serving = threading.RLock()  # guards the server; its holder may block in a request to the main program
        self._place: ServerInfo | None = None
        self._gateway = ""  # of the program when the addresses were requested; empty: there were no other hosts yet
        self._server: Any = None
        self._ports: dict[str, int] = {}  # by listening address
        self._identities: dict[bool, Any] = {}
        self._clients: dict[str, list[Any]] = {}  # by token: one for each address, the best one first

    # ---- serving

    def ways(self) -> tuple[Endpoints, bool]:
        """Serve this process's memory. Return the server's addresses, and whether connections are encrypted."""
        with self._serving:
            where = self._where()
            if self._server is None:
                self._server = _native.MemoryServer(self._registry.native, self._identity(where.encrypted))
            for address in where.addresses:
                if address not in self._ports:
                    self._ports[address] = self._listen(address)
            return tuple((address, self._ports[address]) for address in where.addresses), where.encrypted

    def server(self) -> Any:
        self.ways()
        return self._server

    def _listen(self, address: str) -> int:
        """Listen at the address, or on all interfaces if the address is not one of this host's own."""
        family, _, _, _, numeric = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        try:
            return int(self._server.listen(numeric[0]))
        except OSError:
            return int(self._server.listen("::" if family == socket.AF_INET6 else "0.0.0.0"))

    def _where(self) -> ServerInfo:
        """Return the addresses and the secret. The caller holds the serving lock."""
        if self._place is None or self._gateway != self._program.gateway:
            self._gateway = self._program.gateway
            self._place = place(self._program)
        return self._place

    def _identity(self, encrypted: bool) -> Any:
        """Return the identity with or without TLS, to match the other side's server. Handles say which it uses."""
        with self._serving:
            made = self._identities.get(encrypted)
            if made is None:
                secret, token = self._where().secret, self._program.router.token
                ders: tuple[bytes, ...] = ()
                if encrypted:
                    from monarch_backend._transport.network.tls import Ders

                    own = Ders.of_secret(secret)
                    ders = own.certificate, own.key, own.ca
                made = self._identities[encrypted] = _native.MemoryIdentity(token, secret, *ders)
            return made

    # ---- connecting

    def run(self, part: ReadWriteOp | AtomicOp, scope: Any, keep: Any) -> Result:
        """See Route. A read is retried once after a broken connection.

        A write is not: it may still take effect after a later write, so the caller decides about a retry. Nor is an
        atomic, because it may have taken effect.
        """
        return self.recover(part, self._run(part, scope), scope, keep)

    def _run(self, part: ReadWriteOp | AtomicOp, scope: Any) -> Result:
        ticket = part.handle.ticket
        if isinstance(part, ReadWriteOp):
            return self._try(part.handle, scope, lambda client: client.move(ticket, part.write, part.segments, scope))
        numbers = part.access, part.offset, part.operand, part.expected
        return self._try(part.handle, scope, lambda client: client.change(ticket, *numbers, scope))

    def begin(
        self, part: ReadWriteOp | AtomicOp, scope: Any, keep: Any, done: Callable[[Result], None]
    ) -> SmallRequest | None:
        """See AsyncRoute. Takes small transfers if a connection is idle."""
        clients = self._clients.get(part.handle.token)
        if not clients:
            return None
        if isinstance(part, AtomicOp):
            access, segments, numbers = part.access, ((part.offset, 0, 8),), (part.operand, part.expected)
        else:
            access, segments, numbers = WRITE if part.write else READ, part.segments, (0, 0)  # type: ignore[assignment]
        try:
            sent = clients[0].begin(part.handle.ticket, access, segments, *numbers, scope)
        except RuntimeError:  # for example, descriptors are exhausted: `run` gets the same error and reports it
            return None
        if sent is None:
            return None
        request = SmallRequest(self._small_requests, part.handle.token, scope, done, sent)
        self._small_requests.add(request)
        return request

    def recover(self, part: ReadWriteOp | AtomicOp, result: Result, scope: Any, keep: Any) -> Result:
        again = result.outcome == LOST and isinstance(part, ReadWriteOp) and not part.write
        return self._run(part, scope) if again else result

    def staging_connection(self, handle: Handle, scope: Any) -> tuple[Any, Result]:
        """Return a connection for the caller alone, until the caller closes it.

        On failure return None and the reason.
        """
        connections: list[Any] = []

        def take(client: Any) -> Any:
            made, result = client.open_staging_connection(scope)
            connections.append(made)
            return result

        result = self._try(handle, scope, take)
        return (connections[-1] if result.outcome == DONE else None), result

    def _try(self, handle: Handle, scope: Any, act: Any) -> Result:
        try:
            clients = self._clients_of(handle, scope)
        except (RDMAError, RuntimeError) as error:
            return Result(scope.outcome() or UNREACHABLE, 0, 0, 0, str(error))
        result = Result(FAILED, 0, 0, 0, "it has told us no address")
        for client in list(clients):
            try:
                result = Result(*act(client))
            except RuntimeError as error:  # an error of this process: no descriptors, no memory
                return Result(FAILED, 0, 0, 0, str(error))
            if result.outcome != UNREACHABLE:
                if clients[0] is not client:
                    clients.sort(key=lambda each: each is not client)
                break
        return result

    def _clients_of(self, handle: Handle, scope: Any) -> list[Any]:
        with self._lock:
            made = self._clients.get(handle.token)
        if made is not None:
            return made
        # A connected peer gets a report of this process's end, even if this transfer sends it no message.
        peer = self._program.router.peer(handle.token)
        self._program.router.tell(peer, Setting(PING, None))
        ways, encrypted = handle.ways, handle.encrypted
        if not ways:  # the handle was sent when there were no other hosts yet
            answer = ask(self._program, peer, "ways", over=scope.outcome)
            ways, encrypted = msgspec.msgpack.decode(answer, type=tuple[Endpoints, bool])
        identity, streams = self._identity(encrypted), STREAMS_PER_PEER
        if encrypted:  # with TLS, more streams than half the CPUs would only take turns
            streams = max(1, min(streams, platform.usable_cpus() // 2))
        fresh = [
            _native.MemoryClient(address, port, identity, handle.token, streams)
            for name, port in ways
            for address in _numeric(name)
        ]
        with self._lock:
            return self._clients.setdefault(handle.token, fresh)

    def close(self) -> None:
        self._small_requests.end()
        with self._lock:
            gone, self._clients = [client for clients in self._clients.values() for client in clients], {}
        with self._serving:
            server, self._server = self._server, None
            self._ports.clear()
        for each in [*gone, server]:
            if each is not None:
                each.close()

    def abandon(self) -> None:
        """Drop inherited connections in a fork. The peers must get the report of the end from the owning process."""
        for each in [*(client for clients in self._clients.values() for client in clients), self._server]:
            if each is not None:
                each.abandon()

    def forget(self, token: str) -> None:
        with self._lock:
            gone = self._clients.pop(token, ())
        self._small_requests.end(token)
        for client in gone:
            client.close()


def _numeric(name: str) -> list[str]:
    try:
        return list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)))
    except OSError as error:
        raise RDMAError(f"the address {name} of a host is not known here: {error}") from None
