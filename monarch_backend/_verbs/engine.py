"""Verbs engine of one process: its devices, exposed regions, connections to peers, and the thread for completions.

The engine does not know actors, nor how bytes get to a peer: its user carries connect requests and replies. Nothing is
opened before its first use. Callbacks run on the engine's thread or on a thread that polls for completions (`help`,
`listen`). They run without the engine's lock and must not wait.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Literal

from monarch_backend import _native
from monarch_backend._core import fork
from monarch_backend._verbs import wire_format as messages
from monarch_backend._verbs.completion_poller import MAX_UNSIGNALED_BYTES, Completions
from monarch_backend._verbs.config import Settings, from_environment
from monarch_backend._verbs.connections.accepted_peers import AcceptedPeers
from monarch_backend._verbs.connections.connection import PeerConnection, PeerConnections, State
from monarch_backend._verbs.discovery import available, distance, node_of_memory
from monarch_backend._verbs.engine_thread import UNREADABLE, EngineThread
from monarch_backend._verbs.errors import NoConnectionError, UnreachableMemoryError, VerbsError
from monarch_backend._verbs.open_device import Device, ExposedMemory, open_devices
from monarch_backend._verbs.providers.provider import (
    LOCAL_WRITE,
    REMOTE_ATOMIC,
    REMOTE_READ,
    REMOTE_WRITE,
    Binding,
    load,
)
from monarch_backend._verbs.registrations.cache import register
from monarch_backend._verbs.wire_format import ConnectReply, ConnectRequest, Region
from monarch_backend._verbs.work_requests import Done, Plan, Request, Segment, plan_atomic, plan_transfer

log = logging.getLogger("monarch_backend")

STRIPING_MIN_BYTES = 1 << 20
"""Bytes from which a transfer uses several devices."""

INLINE_REGISTRATION_MAX_BYTES = 1 << 20
"""Bytes up to which memory is registered on the caller's thread; more takes too long."""

_FORK_TIMEOUT_S = 0.5
"""Seconds that a fork waits for engines."""

_forks = 0  # forks since the first process; getpid() would be a system call


def _count_fork() -> None:
    global _forks
    _forks += 1


fork.register(fork.Step.VERBS_ENGINES, after_in_child=_count_fork)

Peer = Hashable


class Engine:
    """Engine of one process.

    ``dial(peer)`` is called when a connection to a peer is wanted, at first use or after one broke. It carries a
    connect request to the peer and the reply back (:meth:`offer`, there :meth:`accept`, :meth:`connect`), or reports
    that the peer is gone. Without ``dial`` the connection must exist before the first transfer.
    """

    def __init__(
        self,
        dial: Callable[[Peer], None] | None = None,
        *,
        settings: Settings | None = None,
        binding: Binding | None = None,
    ) -> None:
        self.settings = settings or from_environment()
        self._binding = binding
        self._lock = threading.RLock()
        self._opened: list[Device] = []
        self._thread = EngineThread(self._turn, self._patience, self._fail_all)
        self._connections = links = PeerConnections(self._lock, self.settings, dial, self.devices, self._thread)
        self._completions = Completions(self._lock, self._thread.wake, links.progress, links.is_restless)
        self._connections.ends, self._links = self._completions.ends, links.by_peer
        self._accepted = AcceptedPeers(self.settings)
        self._exposed: dict[int, ExposedMemory] = {}
        self._regions = itertools.count(1)
        self._closed = False
        self._busy = 0  # threads that use open devices without the lock
        self._idle = threading.Condition(self._lock)
        self._fork = _forks
        fork.register(fork.Step.VERBS_ENGINES, before=self._before_fork, after_in_child=self.detach_after_fork)

    # ---- opening and closing

    def devices(self) -> list[Device]:
        """Return the open devices; opens them if needed. Raises VerbsError."""
        with self._lock:
            if self._fork != _forks:
                raise VerbsError("this engine belongs to the process that this one was forked from: make one here")
            if self._closed:
                raise VerbsError("the engine is closed")
            if not self._opened:
                self._open()
            return self._opened

    def _open(self) -> None:
        binding = self._binding
        if binding is None:
            reason = available()
            if reason is not None:
                raise VerbsError(f"verbs cannot be used here: {reason}")
            binding = load(self.settings.binding)
        self._thread.open()
        try:
            self._opened = open_devices(binding, self.settings, functools.partial(self._thread.call_soon, self._sweep))
            if not self._opened:
                raise VerbsError("no port of a verbs device is active here")
            self._completions.devices = self._opened
            self._completions.arm()
        except BaseException as error:
            self._thread.close()
            if isinstance(error, OSError) and not isinstance(error, VerbsError):
                raise VerbsError(
                    f"a verbs device can't be opened: {error}; is /dev/infiniband in this container?"
                ) from error
            raise
        self._thread.start(self._opened, self._completions)

    def close(self) -> None:
        """Fail requests in progress and deregister all memory."""
        if self._thread.is_here:
            raise RuntimeError("a callback cannot close the engine whose thread it runs on")
        with self._lock:
            if self._closed or self._fork != _forks:
                return
            for link in self._links.values():
                link.fail(VerbsError(f"the engine was closed with transfers from or to {link.peer} under way"))
            self._closed = True
            thread = self._thread.stop()
        if thread is not None:
            thread.join()
        with self._lock:
            self._idle.wait_for(lambda: not self._busy)
            self._accepted.close()
            for exposed in self._exposed.values():
                exposed.close()
            self._exposed.clear()
            self._completions.devices = []
            for device in self._opened:
                device.close()
            self._opened = []
            self._thread.close()

    def settle(self, seconds: float) -> None:
        """Wait, for at most ``seconds``, until the engine's thread has run its pending calls.

        Called before a fork, so that freed memory, which malloc uses again, is deregistered. The kernel may exclude
        registered pages from a fork. With stale registrations the child would lack these pages.
        """
        if self._fork == _forks:
            self._thread.settle(seconds)

    def _before_fork(self) -> None:
        self.settle(_FORK_TIMEOUT_S)

    def detach_after_fork(self) -> None:
        """Keep a forked child from accessing the devices through this engine.

        The child shares the kernel's objects with the parent. Destroying a registration or a queue pair here would
        destroy the parent's. So the objects are kept alive and unreachable. Locks are replaced, because a thread of the
        parent may have held them.
        """
        _native.keep_for_ever((self._opened, self._exposed))
        self._opened, self._exposed = [], {}
        self._accepted.detach_after_fork()
        self._thread.detach_after_fork()
        self._completions.devices = []
        self._lock = threading.RLock()
        self._connections.detach_after_fork(self._lock)
        self._links = self._connections.by_peer

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[list[Device]]:
        """Yield open devices that stay open in this context, because registration is slow and runs without the lock.

        Raises VerbsError.
        """
        with self._lock:
            devices = self.devices()
            self._busy += 1
        try:
            yield devices
        finally:
            with self._lock:
                self._busy -= 1
                self._idle.notify_all()

    # ---- memory for peers

    def expose(self, address: int, nbytes: int, owner: Any, *, writable: bool = True) -> Region:
        """Let peers access this memory until :meth:`release`; its owner is kept alive until then. Raises VerbsError."""
        if nbytes < 1:
            raise ValueError("a region of no bytes")
        access = LOCAL_WRITE | REMOTE_READ | REMOTE_WRITE | REMOTE_ATOMIC if writable else REMOTE_READ
        exposed = ExposedMemory(owner, address, nbytes)
        with self._in_use() as opened:
            devices = opened[: messages.MOST_ENDPOINTS]
            try:
                for device in devices:
                    caches = [device.cache for device in devices]
                    make = functools.partial(register, device.nic, address, nbytes, access, caches)
                    made = device.retired.fresh(make, address, nbytes, device.name)
                    exposed.registrations.append((made, device))
                with self._lock:
                    self.devices()  # raises if the engine was closed meanwhile
                    keys = [registration.rkey for registration, _ in exposed.registrations]
                    region = Region(next(self._regions), address, nbytes, writable, keys)
                    self._exposed[region.id] = exposed
            except BaseException:
                exposed.close()
                raise
        return region

    def release(self, region: Region) -> None:
        """End access to a region: a peer that tries gets "remote access error". A second call does nothing."""
        with self._lock:
            exposed = self._exposed.pop(region.id, None)
        if exposed is not None:
            exposed.close()

    def accept(self, peer: Peer, offer: bytes) -> bytes:
        """Connect the queue pairs of a peer's connect request; return the reply. Raises VerbsError."""
        wanted = messages.unpack(ConnectRequest, offer)
        with self._in_use() as devices:
            made, answer = self._accepted.pair(peer, wanted, devices)
            with self._lock:
                self._accepted.replace(peer, made)
        return answer

    # ---- transfers

    def offer(self, peer: Peer) -> bytes:
        """Return a connect request for the peer's :meth:`accept`. Raises VerbsError."""
        self.devices()
        with self._lock:
            data = self._link(peer).offer()
            self._thread.wake()  # there is a deadline now
            return data

    def connect(self, peer: Peer, answer: bytes) -> None:
        """Connect by the reply of the peer's :meth:`accept`. Raises VerbsError."""
        message = messages.unpack(ConnectReply, answer)
        with self._lock:
            self._completions.arm()  # for the queue pairs' proofs
            self._link(peer).connect(message)
            self._thread.wake()  # there is a deadline now

    def no_connection(self, peer: Peer, offer: bytes, why: str) -> bool:
        """Fail the requests that wait for a connection, because the :meth:`offer` (or none, if empty) had no result.

        Returns False if the report is late: another offer is pending, or has led to a connection.
        """
        with self._lock:
            link = self._links.get(peer)
            return link is None or link.no_connection(offer, NoConnectionError(why, "", "", str(peer)))

    def connected(self, peer: Peer) -> bool:
        with self._lock:
            link = self._links.get(peer)
            return link is not None and link.state is State.UP

    def transfer(
        self,
        peer: Peer,
        kind: Literal["read", "write"],
        remote: Region,
        segments: Sequence[Segment],
        owners: Any,
        done: Callable[[BaseException | None], None],
        *,
        at_once: bool = False,
    ) -> Request | None:
        """Copy segments between a peer's region and memory here.

        ``owners``: the object that owns the local memory, or a list with one for each segment. ``done(None or the
        error)`` is called once. Invalid arguments raise at once.

        ``at_once``: start only if there is a connection and starting takes no time, else return None. A thread that
        needs the result soon must then call `help` or `listen`.
        """
        return self.start(peer, plan_transfer(kind, remote, segments, owners), done, at_once=at_once)

    def start(self, peer: Peer, what: Plan, done: Done, *, at_once: bool = False) -> Request | None:
        """Start a planned request, as `transfer` and `atomic` do."""
        request = Request(what, done)
        with self._lock:
            link = self._links.get(peer)
            if at_once and (link is None or link.state is not State.UP):
                return None
            near = self._near(what)
            if link is not None and (request.is_atomic or request.register_known(near)):
                return self._hand_to(link, request, at_once)
        if at_once and not all(
            a.nbytes <= INLINE_REGISTRATION_MAX_BYTES or d.cache.has(a) for a in what.allocations for d in near
        ):
            return None
        with self._in_use():
            _register(request, near)
            with self._lock:
                try:
                    self.devices()
                    link = self._links.get(peer) if at_once else self._link(peer)
                except BaseException:
                    request.close()  # no connection or other thread has it
                    raise
                if link is None or (at_once and link.state is not State.UP):  # the connection broke a moment ago
                    request.close()
                    return None
                return self._hand_to(link, request, at_once)

    def atomic(
        self,
        peer: Peer,
        kind: Literal["fetch_add", "compare_swap"],
        remote: Region,
        offset: int,
        operand: int,
        expected: int,
        done: Callable[[int | BaseException], None],
        *,
        at_once: bool = False,
    ) -> Request | None:
        """Run an atomic on eight aligned bytes: add the operand, or store it if the value is the expected one.

        ``done`` gets the previous value, or the error. Numbers are unsigned and wrap around. ``at_once``: see
        `transfer`.
        """
        return self.start(peer, plan_atomic(kind, remote, offset, operand, expected), done, at_once=at_once)

    def help(self, request: Request, seconds: float) -> None:
        """Poll for completions, for at most ``seconds``, from a thread that waits for the request. Runs callbacks."""
        if self._fork == _forks:
            try:
                self._completions.help(request, seconds)
            except Exception:
                self._fail_all(UNREADABLE)

    def listen(self, request: Request) -> None:
        """Request an event, so that a thread can sleep until the request is over. May run callbacks."""
        if self._fork == _forks:
            self._carefully(self._completions.listen, request)

    def stop(self, peer: Peer, request: Request, why: str) -> None:
        """Cancel a request: it ends when its posted work requests have ended."""
        with self._lock:
            link = self._links.get(peer)
            if link is not None and not request.finished:
                link.give_up(request, VerbsError(why, "", "", str(peer)))

    def peer_gone(self, peer: Peer, why: BaseException | str) -> None:
        """Fail all requests to and from a peer for this reason; none of them accesses this process afterwards."""
        error = why if isinstance(why, BaseException) else VerbsError(why, "", "", str(peer))
        with self._lock:
            link = self._links.pop(peer, None)
            if link is not None:
                link.fail(error)
            self._accepted.hang_up(peer)

    def give_up(self, peer: Peer, why: str) -> None:
        """Fail all requests to a peer now; the peer's requests continue."""
        with self._lock:
            link = self._links.pop(peer, None)
            if link is not None:
                link.fail(VerbsError(why, "", "", str(peer)))

    def _hand_to(self, link: PeerConnection, request: Request, quiet: bool) -> Request:
        """Submit a request; the lock is held. If a device can't be armed, this raises and nothing was submitted."""
        request.quiet = quiet and request.nbytes <= MAX_UNSIGNALED_BYTES and link.state is State.UP and not link.waiting
        try:
            self._completions.begins(request)
        except BaseException:
            request.close()
            raise
        if not request.nbytes:
            self._connections.finish(request)
            return request
        link.submit(request)
        if request.quiet and request.has_more and self._completions.announce(request):
            self._thread.call_soon(self._look)  # for completions from before it was armed
        return request

    def _link(self, peer: Peer) -> PeerConnection:
        if self._closed:
            raise VerbsError("the engine is closed")
        link = self._links.get(peer)
        return self._links.setdefault(peer, PeerConnection(peer, self._connections)) if link is None else link

    def _near(self, what: Plan) -> list[Device]:
        """Return the devices for a transfer: those nearest to its memory, or one of them for a small transfer."""
        devices, pieces = self.devices() if self._closed or not self._opened else self._opened, what.pieces
        if len(devices) == 1 or not pieces:
            return devices
        node = node_of_memory(pieces[0].local)
        least = min(distance(node, device.node) for device in devices)
        near = [device for device in devices if distance(node, device.node) == least]
        return near if what.nbytes >= STRIPING_MIN_BYTES else [near[(pieces[0].local >> 21) % len(near)]]

    def call_soon(self, call: Callable[[], None]) -> None:
        """Call a function on the engine's thread, once it exists. Takes no lock, so that weak references may use it."""
        self._thread.call_soon(call)

    # ---- on the engine's thread

    def _sweep(self) -> None:
        for device in self._opened:
            device.cache.sweep()

    def _look(self) -> None:
        for device in self._opened:
            self._completions.look(device)

    def _turn(self) -> bool:
        self._carefully(self._completions.sweep)  # before connections report that a device is silent
        self._carefully(self._connections.tick, why="a connection can't be maintained")
        self._completions.tell()
        with self._lock:
            return self._closed and not self._completions.has_calls

    def _carefully(self, look: Callable[..., None], *of: Any, why: str = UNREADABLE) -> None:
        try:
            look(*of)
        except Exception:
            self._fail_all(why)

    def _patience(self) -> float | None:
        if self._completions.has_calls:
            return 0
        with self._lock:
            deadlines = [link.deadline for link in self._links.values()]
            deadlines.append(self._completions.next_sweep)
        found = [deadline for deadline in deadlines if deadline is not None]
        return max(0.0, min(found) - time.monotonic()) * 1000 + 1 if found else None

    def _fail_all(self, why: str) -> None:
        log.exception("verbs: %s", why)
        with self._lock:
            for link in self._links.values():
                try:
                    link.fail(VerbsError(f"{why}: see the log"))
                except Exception:  # the other transfers must end nevertheless, and this thread must not
                    log.exception("verbs: the transfers from or to %s cannot be ended", link.peer)


def _register(request: Request, near: Sequence[Device]) -> None:
    """Register with all of these devices that reach the memory, or with none. Raises VerbsError."""
    if request.is_atomic:  # registered with the device of its queue pair
        return
    unreachable: UnreachableMemoryError | None = None
    try:
        for device in near:
            try:
                request.register(device)
            except UnreachableMemoryError as error:
                unreachable = error
        if unreachable is not None and not request.anywhere():
            raise unreachable
    except BaseException:
        request.close()
        raise
