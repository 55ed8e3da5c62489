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
import os
import secrets
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Literal

from monarch_backend import _native
from monarch_backend._core import fork
from monarch_backend._verbs import wire_format as messages
from monarch_backend._verbs.completion_poller import MAX_UNSIGNALED_BYTES, Completions
from monarch_backend._verbs.config import Settings, from_environment
from monarch_backend._verbs.connection import PeerConnection, State
from monarch_backend._verbs.deferred_destroy import destroy
from monarch_backend._verbs.discovery import available, distance, node_of_memory
from monarch_backend._verbs.errors import NoConnectionError, UnreachableMemoryError, VerbsError
from monarch_backend._verbs.open_device import Device, open_devices
from monarch_backend._verbs.path_selection import PathCandidate, ways
from monarch_backend._verbs.provider import (
    LOCAL_WRITE,
    REMOTE_ATOMIC,
    REMOTE_READ,
    REMOTE_WRITE,
    Binding,
    Path,
    QueuePair,
    Registration,
    load,
)
from monarch_backend._verbs.registration_cache import Allocation, allocation_of, register
from monarch_backend._verbs.wire_format import ConnectReply, ConnectRequest, Endpoint, Pairing, RegionRecord
from monarch_backend._verbs.work_requests import Done, Piece, Plan, Request

log = logging.getLogger("monarch_backend")

STRIPING_MIN_BYTES = 1 << 20
"""Bytes from which a transfer uses several devices."""

INLINE_REGISTRATION_MAX_BYTES = 1 << 20
"""Bytes up to which memory is registered on the caller's thread; more takes too long."""

_ALL = (1 << 64) - 1

_UNREADABLE = "completions of a device cannot be read"

_FORK_TIMEOUT_S = 0.5
"""Seconds that a fork waits for engines."""

_forks = 0  # forks since the first process; getpid() would be a system call


def _count_fork() -> None:
    global _forks
    _forks += 1


fork.register(fork.Step.VERBS_ENGINES, after_in_child=_count_fork)

_of_thread = threading.local()


def hears() -> bool:
    """True on a thread that handles an engine's completions. It must not wait, because nothing would complete."""
    return getattr(_of_thread, "hears", False)


Peer = Hashable
Segment = tuple[int, int, int]
"""(offset in the region, local address, bytes)."""


class Region:
    """Memory of a process that others may access; they get its address and keys as bytes."""

    def __init__(self, record: RegionRecord) -> None:
        self.record = record
        self.id, self.address, self.nbytes, self.writable = record.id, record.address, record.nbytes, record.writable

    def __repr__(self) -> str:
        return f"<Region of {self.nbytes} bytes, {'writable' if self.writable else 'read-only'}>"

    def to_bytes(self) -> bytes:
        """Return the region as bytes for other processes."""
        return messages.pack(self.record)

    @classmethod
    def from_bytes(cls, data: bytes) -> Region:
        """Parse a region of another process. Raises VerbsError."""
        return cls(messages.unpack(RegionRecord, data))


class _Exposed:
    """Local state of a region; keeps the owner of the memory alive."""

    def __init__(self, owner: Any, address: int, nbytes: int) -> None:
        self.owner, self.address, self.nbytes = owner, address, nbytes
        self.registrations: list[tuple[Registration, Device]] = []

    def close(self) -> None:
        for registration, device in self.registrations:
            device.retired.add(registration.rkey, self.address, self.nbytes)
        ended = [destroy(registration, "a region", device.name) for registration, device in self.registrations]
        if not all(ended):
            _native.keep_for_ever(self.owner)  # other processes may still access its memory, so it must not be reused
        self.registrations, self.owner = [], None


class _Wake:
    """Event that wakes the engine's thread.

    Other threads may be about to set it, at any point and without a lock, while the engine is closed. It stays open
    until the last of them has released it, because its file descriptor might be reused.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.fd)


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
        self._dial = dial
        self.settings = settings or from_environment()
        self._binding = binding
        self._lock = threading.RLock()
        self._opened: list[Device] = []
        self._completions = Completions(self._lock, self._nudge, self._pump_all, self._is_restless)
        self._links: dict[Peer, PeerConnection] = {}
        self._accepted: dict[Peer, list[tuple[QueuePair, str]]] = {}  # with the devices' names
        self._exposed: dict[int, _Exposed] = {}
        self._regions = itertools.count(1)
        self._soon: deque[Callable[[], None]] = deque()  # calls for the engine's thread
        self._thread: threading.Thread | None = None
        self._wake: _Wake | None = None
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
        self._wake = _Wake()
        try:
            self._opened = open_devices(binding, self.settings, self._sweep_soon)
            if not self._opened:
                raise VerbsError("no port of a verbs device is active here")
            self._completions.devices = self._opened
            self._completions.arm()
        except BaseException as error:
            self._wake = None
            if isinstance(error, OSError) and not isinstance(error, VerbsError):
                raise VerbsError(
                    f"a verbs device can't be opened: {error}; is /dev/infiniband in this container?"
                ) from error
            raise
        self._thread = threading.Thread(target=self._run, name="monarch-verbs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Fail requests in progress and deregister all memory."""
        if self.is_here:
            raise RuntimeError("a callback cannot close the engine whose thread it runs on")
        with self._lock:
            if self._closed or self._fork != _forks:
                return
            for link in self._links.values():
                link.fail(VerbsError(f"the engine was closed with transfers from or to {link.peer} under way"))
            self._closed = True
            thread, self._thread = self._thread, None
            self._nudge()
        if thread is not None:
            thread.join()
        with self._lock:
            self._idle.wait_for(lambda: not self._busy)
            for peer in list(self._accepted):
                self._hang_up(peer)
            for exposed in self._exposed.values():
                exposed.close()
            self._exposed.clear()
            self._completions.devices = []
            for device in self._opened:
                device.close()
            self._opened, self._wake = [], None

    def settle(self, seconds: float) -> None:
        """Wait, for at most ``seconds``, until the engine's thread has run its pending calls.

        Called before a fork, so that freed memory, which malloc uses again, is deregistered. The kernel may exclude
        registered pages from a fork. With stale registrations the child would lack these pages.
        """
        if self._thread is None or self.is_here or self._fork != _forks:
            return
        done = threading.Event()
        self._call_soon(done.set)
        done.wait(seconds)

    def _before_fork(self) -> None:
        self.settle(_FORK_TIMEOUT_S)

    def detach_after_fork(self) -> None:
        """Keep a forked child from accessing the devices through this engine.

        The child shares the kernel's objects with the parent. Destroying a registration or a queue pair here would
        destroy the parent's. So the objects are kept alive and unreachable. Locks are replaced, because a thread of the
        parent may have held them.
        """
        _native.keep_for_ever((self._opened, self._links, self._accepted, self._exposed, self._soon))
        self._opened, self._links, self._accepted, self._exposed, self._soon = [], {}, {}, {}, deque()
        self._completions.devices = []
        self._lock, self._thread = threading.RLock(), None
        self._wake = None  # it would wake the parent's thread

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
        exposed = _Exposed(owner, address, nbytes)
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
                    region = Region(RegionRecord(next(self._regions), address, nbytes, writable, keys))
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
            made, answer = self._paired(peer, wanted, devices)
            with self._lock:
                self._hang_up(peer)
                self._accepted[peer] = made
        return answer

    def _paired(
        self, peer: Peer, wanted: ConnectRequest, devices: Sequence[Device]
    ) -> tuple[list[tuple[QueuePair, str]], bytes]:
        """Return queue pairs for a connect request, and the reply."""
        made: list[tuple[QueuePair, str]] = []
        pairings: list[Pairing] = []
        problems: list[str] = []
        used: dict[tuple[int, int], int] = {}
        for place, end in enumerate(wanted.ends):
            if end.endpoint >= len(wanted.endpoints):
                raise VerbsError(f"the offer of {peer} names port {end.endpoint} of {len(wanted.endpoints)}")
            theirs = wanted.endpoints[end.endpoint]
            for device, endpoint, way in _candidates(devices, theirs, used):
                try:
                    pair, pairing = self._answer(device, endpoint, way, theirs, place, end)
                except OSError as error:
                    problems.append(f"{device.name} to {theirs.device}: {error}")
                    continue
                made.append((pair, device.name))
                pairings.append(pairing)
                used[device.index, endpoint.port] = used.get((device.index, endpoint.port), 0) + 1
                break
        if not pairings:
            raise VerbsError(_no_way(peer, wanted.endpoints, devices, problems), "", "", str(peer))
        return made, messages.pack(ConnectReply(wanted.nonce, pairings))

    def _answer(
        self,
        device: Device,
        endpoint: Endpoint,
        way: PathCandidate,
        theirs: Endpoint,
        place: int,
        end: messages.QpEndpoint,
    ) -> tuple[QueuePair, Pairing]:
        mtu = min(endpoint.mtu, theirs.mtu)
        reads = min(theirs.reads_out, endpoint.reads_in)
        psn, settings = secrets.randbits(24), self.settings
        pair = device.nic.queue_pair(1)
        try:
            pair.initialize(endpoint.port, REMOTE_READ | REMOTE_WRITE | REMOTE_ATOMIC)
            pair.connect(
                Path(
                    endpoint.port,
                    end.number,
                    psn,
                    end.psn,
                    mtu,
                    way.ours.index,
                    way.theirs.raw,
                    theirs.lid,
                    way.is_global,
                    reads,
                    1,
                    settings.timeout,
                    settings.retries,
                    settings.traffic_class,
                    settings.service_level,
                )
            )
        except BaseException:
            destroy(pair, f"queue pair {pair.number}", device.name)
            raise
        return pair, Pairing(
            place,
            device.index,
            pair.number,
            psn,
            mtu,
            reads,
            way.theirs.index,
            way.ours.raw,
            endpoint.lid,
            way.is_global,
        )

    def _hang_up(self, peer: Peer) -> None:
        for pair, device in self._accepted.pop(peer, []):
            destroy(pair, f"queue pair {pair.number}", device)

    # ---- transfers

    def offer(self, peer: Peer) -> bytes:
        """Return a connect request for the peer's :meth:`accept`. Raises VerbsError."""
        self.devices()
        with self._lock:
            data = self._link(peer).offer()
            self._nudge()  # there is a deadline now
            return data

    def connect(self, peer: Peer, answer: bytes) -> None:
        """Connect by the reply of the peer's :meth:`accept`. Raises VerbsError."""
        message = messages.unpack(ConnectReply, answer)
        with self._lock:
            self._completions.arm()  # for the queue pairs' proofs
            self._link(peer).connect(message)
            self._nudge()  # there is a deadline now

    def no_connection(self, peer: Peer, offer: bytes, why: str) -> bool:
        """Fail the requests that wait for a connection, because the :meth:`offer` (or none, if empty) had no result.

        Returns False if the report is late: another offer is pending, or has led to a connection.
        """
        with self._lock:
            link = self._links.get(peer)
            return link is None or link.no_connection(offer, NoConnectionError(why, "", "", str(peer)))

    def connected(self, peer: Peer) -> bool:
        """True if there is a connection that works, as far as is known."""
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
                self._fail_all(_UNREADABLE)

    @property
    def is_here(self) -> bool:
        """True on the engine's thread."""
        return threading.current_thread() is self._thread

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
            self._hang_up(peer)

    def give_up(self, peer: Peer, why: str) -> None:
        """Fail all requests to a peer now; the peer's requests continue."""
        with self._lock:
            link = self._links.pop(peer, None)
            if link is not None:
                link.fail(VerbsError(why, "", "", str(peer)))

    def give_up_soon(self, peer: Peer, why: str) -> None:
        """Do the same on the engine's thread, because closing a connection is slow."""
        self._call_soon(lambda: self.give_up(peer, why))

    def _hand_to(self, link: PeerConnection, request: Request, quiet: bool) -> Request:
        """Submit a request; the lock is held. If a device can't be armed, this raises and nothing was submitted."""
        request.quiet = (
            quiet and request.nbytes <= MAX_UNSIGNALED_BYTES and link.state is State.UP and not link.has_waiting
        )
        try:
            self._completions.begins(request)
        except BaseException:
            request.close()
            raise
        if not request.nbytes:
            self.finish(request)
            return request
        link.submit(request)
        if request.quiet and request.has_more and self._completions.announce(request):
            self._call_soon(self._look)  # for completions from before it was armed
        return request

    def _link(self, peer: Peer) -> PeerConnection:
        if self._closed:
            raise VerbsError("the engine is closed")
        link = self._links.get(peer)
        return self._links.setdefault(peer, PeerConnection(peer, self)) if link is None else link

    def _near(self, what: Plan) -> list[Device]:
        """Return the devices for a transfer: those nearest to its memory, or one of them for a small transfer."""
        devices, pieces = self.devices() if self._closed or not self._opened else self._opened, what.pieces
        if len(devices) == 1 or not pieces:
            return devices
        node = node_of_memory(pieces[0].local)
        least = min(distance(node, device.node) for device in devices)
        near = [device for device in devices if distance(node, device.node) == least]
        return near if what.nbytes >= STRIPING_MIN_BYTES else [near[(pieces[0].local >> 21) % len(near)]]

    def soon(self, call: Callable[[], None]) -> None:
        """Call a function on the engine's thread, once it exists. Takes no lock, so that weak references may use it."""
        self._call_soon(call)

    # ---- methods for connections

    def finish(self, request: Request) -> None:
        done, outcome = request.done, request.close()
        self._completions.ends(request, done, outcome)

    def dial(self, peer: Peer) -> bool:
        if self._dial is None:
            return False
        self._call_soon(lambda: self._dial_now(peer))
        return True

    def _dial_now(self, peer: Peer) -> None:
        assert self._dial is not None
        try:
            self._dial(peer)
        except Exception as error:
            failed = VerbsError(f"{peer} could not be dialed: {error}", "", "", str(peer))
            failed.__cause__ = error
            with self._lock:
                link = self._links.get(peer)
                if link is not None:
                    link.fail(failed)

    def now(self) -> float:
        return time.monotonic()

    # ---- the thread

    def _call_soon(self, call: Callable[[], None]) -> None:
        self._soon.append(call)
        self._nudge()

    def _sweep_soon(self) -> None:
        # Called at any point where an object ends, so no lock is taken.
        self._soon.append(self._sweep)
        self._nudge()

    def _nudge(self) -> None:
        wake = self._wake
        if wake is not None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(wake.fd, 1)

    def _sweep(self) -> None:
        for device in self._opened:
            device.cache.sweep()

    def _look(self) -> None:
        for device in self._opened:
            self._completions.look(device)

    def _pump_all(self) -> None:
        for link in self._links.values():
            link.pump()

    def _run(self) -> None:
        _of_thread.hears = True
        assert self._wake is not None
        poller, wake = select.poll(), self._wake.fd
        poller.register(wake, select.POLLIN)
        by_fd = {device.nic.fd: device for device in self._opened}
        for fd in by_fd:
            poller.register(fd, select.POLLIN)
        while True:
            for fd, _ in poller.poll(self._patience()):
                if fd == wake:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(fd)
                elif not self._carefully(self._completions.heard, by_fd[fd]):
                    poller.unregister(fd)
            self._call()
            self._carefully(self._completions.sweep)  # before connections report that a device is silent
            self._carefully(self._tick, why="a connection can't be maintained")
            self._completions.tell()
            with self._lock:
                if self._closed and not self._soon and not self._completions.has_calls:
                    return

    def _tick(self) -> None:
        with self._lock:
            for link in self._links.values():
                link.tick(self.now())

    def _carefully(self, look: Callable[..., None], *of: Any, why: str = _UNREADABLE) -> bool:
        """Call a function; False if it failed, in which case all requests in progress fail."""
        try:
            look(*of)
        except Exception:
            self._fail_all(why)
            return False
        return True

    def _is_restless(self) -> bool:
        return any(link.is_restless for link in self._links.values())

    def _patience(self) -> float | None:
        if self._soon or self._completions.has_calls:
            return 0
        with self._lock:
            deadlines = [link.deadline for link in self._links.values()]
            deadlines.append(self._completions.deadline())
        found = [deadline for deadline in deadlines if deadline is not None]
        return max(0.0, min(found) - self.now()) * 1000 + 1 if found else None

    def _call(self) -> None:
        for _ in range(len(self._soon)):
            try:
                self._soon.popleft()()
            except Exception:
                log.exception("verbs: a callback has failed")

    def _fail_all(self, why: str) -> None:
        """Fail all requests, in an except clause."""
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


def plan_transfer(kind: Literal["read", "write"], remote: Region, segments: Sequence[Segment], owners: Any) -> Plan:
    """Return the plan of a transfer; see Engine.transfer.

    Raises ValueError, and TypeError for owners without memory.
    """
    if kind not in ("read", "write"):
        raise ValueError(f"{kind!r}: a transfer is a read or a write")
    if kind == "write" and not remote.writable:
        raise ValueError("the region is read-only: its owner has exposed it without writable=True")
    each = list(owners) if isinstance(owners, (list, tuple)) else [owners] * len(segments)
    if len(each) != len(segments):
        raise ValueError(f"{len(each)} owners for {len(segments)} segments")
    allocations, pieces = _pieces(remote, segments, each)
    return Plan(kind, remote.record, pieces, allocations)


def plan_atomic(
    kind: Literal["fetch_add", "compare_swap"], remote: Region, offset: int, operand: int, expected: int
) -> Plan:
    """Return the plan of an atomic; see Engine.atomic. Raises ValueError."""
    if kind not in ("fetch_add", "compare_swap"):
        raise ValueError(f"{kind!r}: an atomic is fetch_add or compare_swap")
    if not remote.writable:
        raise ValueError("the region is read-only: its owner has exposed it without writable=True")
    if not 0 <= offset <= remote.nbytes - 8 or (remote.address + offset) % 8:
        raise ValueError(f"offset {offset} of a region of {remote.nbytes} bytes: eight aligned bytes are needed")
    operands = (operand & _ALL, 0) if kind == "fetch_add" else (expected & _ALL, operand & _ALL)
    return Plan(kind, remote.record, [Piece(remote.address + offset, 0, 8, 0)], (), operands)


def _pieces(remote: Region, segments: Sequence[Segment], owners: Sequence[Any]) -> tuple[list[Allocation], list[Piece]]:
    allocations: list[Allocation] = []
    places: dict[int, int] = {}  # index of an owner's allocation, by the owner's id
    pieces = []
    for (offset, address, nbytes), owner in zip(segments, owners, strict=True):
        if id(owner) not in places:
            places[id(owner)] = len(allocations)
            allocations.append(allocation_of(owner))
        part = places[id(owner)]
        whole = allocations[part]
        if nbytes < 0 or offset < 0 or offset + nbytes > remote.nbytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes} of a region of {remote.nbytes}")
        if not whole.address <= address <= address + nbytes <= whole.address + whole.nbytes:
            raise ValueError(f"{nbytes} bytes at {address:#x}, outside the memory of their owner")
        if nbytes:
            pieces.append(Piece(remote.address + offset, address, nbytes, part))
    return allocations, pieces


def _candidates(
    devices: Sequence[Device], theirs: Endpoint, used: dict[tuple[int, int], int]
) -> list[tuple[Device, Endpoint, PathCandidate]]:
    """Return paths to a port of the peer, best first; among equals the least used port."""
    found = [
        (device, endpoint, way) for device in devices for endpoint in device.endpoints for way in ways(endpoint, theirs)
    ]
    return sorted(found, key=lambda f: (f[2].cost, used.get((f[0].index, f[1].port), 0), -f[2].common))


def _no_way(peer: Peer, theirs: Sequence[Endpoint], devices: Sequence[Device], problems: Sequence[str]) -> str:
    there = ", ".join(f"{e.device}:{e.port}" for e in theirs)
    here = ", ".join(f"{e.device}:{e.port}" for d in devices for e in d.endpoints)
    tried = f" ({'; '.join(problems[:4])})" if problems else ": other kinds of network, or no address in common"
    return (
        f"no way between the ports of {peer} ({there}) and those here ({here}){tried}; name the ones to be used in "
        "MONARCH_RDMA_DEVICES, and compare `monarch-backend doctor` on both hosts"
    )


__all__ = ["Done", "Engine", "Peer", "Region", "Segment", "hears", "plan_atomic", "plan_transfer"]
