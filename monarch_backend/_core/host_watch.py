"""Detection of hosts that are cut off, by idle TCP connections whose ends the kernels keep alive.

Each process listens, and connects to one process of each other host. No data is sent: a kernel acknowledges the probes
of the other one. So a busy, paused or stopped process is not taken for dead, and only a host that is cut off is silent.
The kernel of a process that ends closes the connection. The watch then connects to the next process of that host.

Ranks (process_group/_host_guard.py) and launchers (_launch/peer_launchers.py) use it. Actors have heartbeats of their
own, because their connections carry data and have sessions that survive a reconnection.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from monarch_backend._core import env
from monarch_backend._core.limits import start_thread

_log = logging.getLogger("monarch_backend")

Address = tuple[str, int]

_PROBE_INTERVAL_S = 1
_REPORT_S = 2  # of the setting's seconds: for the report, which waits until every process has seen the silence
_AGREE_S = 1.25  # by which two processes may differ: an interval of probes and more. Each tries to connect meanwhile
_RETRY_S = 0.25
_MAX_NOTICE_BYTES = 4096
_BACKLOG = 4096  # connections that are never accepted; the kernel keeps them alive all the same
_SILENT = frozenset((errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN))


def silence() -> int:
    """Return the seconds without a sign of life after which a host is lost; 0 if hosts are not watched."""
    limit: int = env.get("MONARCH_HOST_TIMEOUT")
    return limit and limit - _REPORT_S


def keep_alive(connection: socket.socket, seconds: int) -> None:
    """Let the kernel probe an idle connection each second, and end it after ``seconds`` without an answer."""
    idle = getattr(socket, "TCP_KEEPIDLE", None) or socket.TCP_KEEPALIVE  # type: ignore[attr-defined,unused-ignore]
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, idle, _PROBE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, seconds - _PROBE_INTERVAL_S)


@dataclass(eq=False)
class Watcher:
    """One user of a watch and the hosts it needs.

    ``lost`` gets the hosts that are silent. ``noticed`` gets a host and the notice that its process sent.
    """

    hosts: frozenset[str]
    lost: Callable[[list[str]], object]
    noticed: Callable[[str, str], object] = lambda _host, _text: None
    silent: list[str] = field(default_factory=list)
    due: float | None = None  # when `lost` is called


@dataclass
class _Peer:
    """A watched host: the connection to one of its processes, and the processes to try next."""

    candidates: list[Address]
    address: Address | None = None  # of the connection
    connection: socket.socket | None = None
    connected: bool = False
    retry: float | None = None  # when a silent host is tried again


class HostWatch:
    """The listener, the connections and the thread of one process. The thread runs while there are watchers."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._listener: socket.socket | None = None
        self._peers: dict[str, _Peer] = {}
        self._watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._wake: tuple[socket.socket, ...] = ()

    def listen(self) -> int:
        """Return the port to which other processes connect. Raises OSError."""
        with self._lock:
            if self._listener is None:
                self._listener, self._wake = _listener(), socket.socketpair()
                for each in (self._listener, *self._wake):
                    each.setblocking(False)
            return int(self._listener.getsockname()[1])

    def watch(self, watcher: Watcher, processes: Mapping[str, Sequence[Address]]) -> None:
        """Watch the hosts of ``watcher`` after `listen`, as long as it lives or until `close`.

        ``processes`` has the addresses of the processes on each host.

        A host is watched from the first connection to it. One that accepts none, as behind a firewall, is not watched.
        """
        with self._lock:
            for host in watcher.hosts:
                peer = self._peers.setdefault(host, _Peer([]))
                peer.candidates += [address for address in processes[host] if address not in peer.candidates]
            self._watchers.add(watcher)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="monarch_host_watch", daemon=True)
                start_thread(self._thread)
            self._nudge()

    def close(self, watcher: Watcher) -> None:
        """End a watch. The last one ends the thread and all connections; the listener stays for later watches."""
        with self._lock:
            self._watchers.discard(watcher)
            self._nudge()

    def notify(self, text: str) -> None:
        """Send a notice to all processes that watch this one, and disconnect them."""
        listener = self._listener
        if listener is None:
            return
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = listener.accept()
                with contextlib.suppress(OSError), connection:
                    connection.send(text.encode()[:_MAX_NOTICE_BYTES])

    def forget(self) -> None:
        """Close this process's copies of the sockets, in a forked child, and start anew."""
        for end in (*self._wake, self._listener, *(peer.connection for peer in self._peers.values())):
            if end is not None:
                end.close()
        self.__init__()  # type: ignore[misc]

    def _nudge(self) -> None:
        with contextlib.suppress(BlockingIOError, IndexError):
            self._wake[1].send(b"1")

    def _run(self) -> None:
        while True:
            calls: list[Callable[[], object]] = []
            with self._lock:
                watchers = list(self._watchers)
                self._drop({host for watcher in watchers for host in watcher.hosts})
                if not watchers:
                    self._thread = None
                    return
                poll, by_descriptor = self._poll()
                ends = [watcher.due for watcher in watchers if watcher.due is not None]
                ends += [peer.retry for peer in self._peers.values() if peer.retry is not None]
            del watchers
            ready = poll.poll(max(0.0, min(ends) - time.monotonic()) * 1000 + 1 if ends else None)
            with self._lock:
                with contextlib.suppress(BlockingIOError):
                    self._wake[0].recv(4096)
                for descriptor, _ in ready:
                    if (host := by_descriptor.get(descriptor)) is not None:
                        calls += self._on_event(host)
                calls += self._due()
            for call in calls:
                try:
                    call()
                except Exception:  # of one user; the others stay watched
                    _log.exception("a handler of a lost host failed")
            del calls

    def _poll(self) -> tuple[select.poll, dict[int, str]]:
        poll, by_descriptor = select.poll(), {}
        poll.register(self._wake[0], select.POLLIN)
        for host in list(self._peers):
            peer = self._peers[host]
            if peer.retry is not None and peer.retry <= time.monotonic():
                self._disconnect(peer)
                peer.retry, peer.connection = time.monotonic() + _RETRY_S, peer.address and _connect(peer.address)
            while peer.connection is None and peer.retry is None and peer.candidates:
                peer.address = peer.candidates.pop(0)
                peer.connection = _connect(peer.address)
            if peer.connection is not None:
                by_descriptor[peer.connection.fileno()] = host
                poll.register(peer.connection, select.POLLIN if peer.connected else select.POLLOUT)
        return poll, by_descriptor

    def _drop(self, needed: set[str]) -> None:
        for host in self._peers.keys() - needed:
            self._disconnect(self._peers.pop(host))

    @staticmethod
    def _disconnect(peer: _Peer) -> None:
        if peer.connection is not None:
            peer.connection.close()
        peer.connection, peer.connected = None, False

    def _on_event(self, host: str) -> list[Callable[[], object]]:
        """Return the calls for watchers after an event of a connection."""
        peer = self._peers.get(host)
        if peer is None or peer.connection is None:
            return []
        failure, notice = peer.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), b""
        watchers = [watcher for watcher in self._watchers if host in watcher.hosts]
        was_connected = peer.connected
        if not was_connected and peer.retry is not None and failure in (0, errno.ECONNREFUSED):  # it is back
            peer.retry = None
            for watcher in watchers:
                watcher.silent = [each for each in watcher.silent if each != host]
                watcher.due = watcher.due if watcher.silent else None
        if not failure and not was_connected:
            peer.connected = True
            return []
        if not failure:
            try:
                notice = peer.connection.recv(_MAX_NOTICE_BYTES)
            except OSError as error:
                failure = error.errno or 0
        self._disconnect(peer)  # the next candidate, if any, takes its place
        if was_connected and failure in _SILENT:
            peer.retry = time.monotonic()
            for watcher in watchers:
                watcher.silent.append(host)
                watcher.due = watcher.due or time.monotonic() + _AGREE_S
        text = notice.decode(errors="replace")
        return [functools.partial(watcher.noticed, host, text) for watcher in watchers if text]

    def _due(self) -> list[Callable[[], object]]:
        calls: list[Callable[[], object]] = []
        for watcher in list(self._watchers):
            if watcher.due is not None and watcher.due <= time.monotonic():
                for host in watcher.silent:
                    if (peer := self._peers.pop(host, None)) is not None:
                        self._disconnect(peer)
                calls.append(functools.partial(watcher.lost, watcher.silent))
                watcher.silent, watcher.due = [], None
        return calls


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # a kernel without IPv6
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=_BACKLOG)


def _connect(address: Address) -> socket.socket | None:
    """Return a socket that connects to a numeric address, or None if it can't."""
    connection = None
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            *address, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        connection = socket.socket(family, kind, protocol)
        connection.setblocking(False)
        keep_alive(connection, silence())
        if connection.connect_ex(where) in (0, errno.EINPROGRESS):
            return connection
    except OSError:
        pass
    if connection is not None:
        connection.close()
    return None
