"""Choice of the route from this process to each other process's memory. It is made once per process.

MONARCH_DEBUG=1 prints the choice and its reason.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from monarch_backend._actor.runtime import Runtime, is_of_parent
from monarch_backend._core import debug_log, env
from monarch_backend._rdma.errors import RDMAError
from monarch_backend._rdma.local_memory import CPU
from monarch_backend._rdma.registrations import Handle, Registry
from monarch_backend._rdma.routes.gpu_staged import GpuNics, Staged
from monarch_backend._rdma.routes.pinned_pool import PinnedPool
from monarch_backend._rdma.routes.protocol import (
    UNREACHABLE,
    AtomicOp,
    InFlightTransfer,
    NicRoute,
    ReadWriteOp,
    Result,
    Route,
)
from monarch_backend._rdma.routes.same_host import LocalRoute, SameHost
from monarch_backend._rdma.routes.tcp import Endpoints, Tcp
from monarch_backend._rdma.routes.verbs import Verbs
from monarch_backend._transport.tokens import host_of
from monarch_backend._verbs import VerbsError, available

log = logging.getLogger("monarch_backend")

MAX_WARNED_PEERS = 4096
"""Processes for which the TCP warning is remembered."""

RETRY_INTERVAL_S = 60.0
"""Seconds between attempts to use NICs to a process that TCP reaches, if both sides have NICs."""

_KINDS = tuple(itertools.product((False, True), (False, True)))
"""Kinds of memory: whether a NIC can reach it, and whether it is on a GPU."""


def forced() -> str:
    return str(env.get("MONARCH_RDMA_TRANSPORT"))


def refuse_the_parents(handle: Handle) -> None:
    """Raise RDMAError in a fork, for memory of the program that was forked."""
    if is_of_parent(handle.token):
        raise RDMAError(
            f"{handle} belongs to the program that this process, {os.getpid()}, was forked from: a fork is a program "
            "of its own, and the parent knows nothing of it. Use it in the parent, or spawn processes "
            "(this_host().spawn_procs()) and send it to an actor of theirs"
        )


class Routes:
    def __init__(self, owner: Runtime, registry: Registry, submit: Callable[[Callable[[], None]], None]) -> None:
        """``submit`` runs a job on a thread that may block."""
        self._program, self._registry = owner, registry
        self._local, self._same_host = LocalRoute(registry), SameHost(owner, registry, _say)
        self._tcp = Tcp(owner, registry, submit)
        self.verbs = Verbs(owner, registry)
        self.lender = PinnedPool(self.verbs, self._tcp)
        self._staged = Staged(owner, self.verbs, self._tcp, _say)
        self._gpu_nics = GpuNics(self.verbs, self._staged)
        registry.on_drop.append(self.verbs.dropped)
        self._warned: dict[str, None] = {}  # processes with a logged TCP warning, including ended ones
        self._warning = threading.Lock()
        # By process and kind of memory.
        self._chosen: dict[tuple[str, bool, bool], Route] = {}
        self._choosing = threading.RLock()  # reentrant, because the program's log handler may call back
        self._forced = forced()
        self.reached = self._same_host.reached
        """Processes of this host that a first transfer has reached."""

    def to(self, handle: Handle) -> Route:
        """Return the route to this memory. Raises RDMAError if none exists."""
        which = handle.token, _for_nics(handle), handle.device != CPU
        route = self._chosen.get(which)
        if route is None:
            with self._choosing:  # one thread at a time, so that devices are looked up and messages logged once
                route = self._chosen.get(which)
                if route is None:
                    route = self._chosen[which] = self._choose(handle)
        return route

    def outgoing(self, handle: Handle) -> Handle:
        """Return the handle as this process sends it: with the routes to this process, if it is the owner."""
        if handle.token != self._program.router.token or not (self._program.gateway or self._forced):
            return handle
        ways, encrypted = self.ways()
        verbs = self._exposed(handle)
        staged = not verbs and self.verbs.is_staged(handle)
        return handle._replace(ways=ways, encrypted=encrypted, verbs=verbs, staged=staged)

    def _exposed(self, handle: Handle) -> bytes:
        if self._forced == "tcp" or self.verbs.unusable() is not None:
            return b""
        try:
            return self.verbs.exposed(handle)
        except VerbsError as error:
            log.warning("memory can't be registered with the NICs of this host, so others take TCP to it: %s", error)
            return b""

    def ways(self) -> tuple[Endpoints, bool]:
        return self._tcp.ways()

    def knows(self, token: str) -> bool:
        return any((token, *kind) in self._chosen for kind in _KINDS) or self.verbs.started

    def forget(self, token: str) -> None:
        for kind in _KINDS:
            self._chosen.pop((token, *kind), None)
        self._same_host.forget(token)
        self._tcp.forget(token)
        self.verbs.forget(token, "its process is gone")
        self._staged.forget(token)
        self.lender.forget(token)  # its NIC reaches nothing of this process any more

    def close(self) -> None:
        self._tcp.close()
        self._staged.close()
        self.lender.close()
        self.verbs.close()

    def abandon(self) -> None:
        self._tcp.abandon()

    def _choose(self, handle: Handle) -> Route:
        if handle.token == self._program.router.token:
            return self._local
        if host_of(handle.token) == host_of(self._program.router.token) and not self._forced:
            return self._same_host  # it logs its copy method with the first transfer
        refuse_the_parents(handle)
        return self._remote_route(handle)

    def _remote_route(self, handle: Handle) -> Route:
        why = "MONARCH_RDMA_TRANSPORT says so" if self._forced == "tcp" else self.verbs.unusable(up=False)
        if why is None and _for_nics(handle):
            if handle.verbs:
                _say(handle, "verbs")  # otherwise the first transfer logs the way
            nics: Verbs | GpuNics = self.verbs if handle.device == CPU else self._gpu_nics
            return (
                nics
                if self._forced == "verbs"
                else VerbsWithTcpFallback(nics, self._tcp, self._warn_of_tcp, self._program.run_in_thread)
            )
        why = why or "its owner has not registered it with a NIC"
        if self._forced == "verbs":
            raise RDMAError(f"{handle} can't be reached by verbs, as MONARCH_RDMA_TRANSPORT wants it: {why}")
        staged = "" if handle.device == CPU else ", through pinned memory of both hosts"
        _say(handle, f"tcp{staged}: {why}")
        if not self._forced:
            self._warn_of_tcp(handle, why)
        return self._tcp

    def _warn_of_tcp(self, handle: Handle, why: str) -> None:
        """Warn once per process.

        Its memory may be of two kinds, and handles of ended processes may be used repeatedly.
        """
        with self._warning:
            if handle.token in self._warned:
                return
            self._warned[handle.token] = None
            if len(self._warned) > MAX_WARNED_PEERS:
                del self._warned[next(iter(self._warned))]
        log.warning("memory of process %d on host %s is read and written over TCP: %s", handle.pid, handle.host, why)


class VerbsWithTcpFallback(NicRoute):
    """Verbs, or TCP if the two NICs do not reach each other. NICs are tried again later, outside of transfers.

    A transfer uses one of the two. It changes to the other only if it has not started over verbs and never will, so
    that an atomic runs at most once.
    """

    def __init__(
        self,
        verbs: Verbs | GpuNics,
        tcp: Tcp,
        warn: Callable[[Handle, str], None],
        run_in_thread: Callable[[Callable[[], None]], object],
    ) -> None:
        """``warn`` logs that TCP reaches a process, and why. ``run_in_thread`` runs jobs that may block."""
        self._verbs, self._tcp, self._warn, self._run_in_thread = verbs, tcp, warn, run_in_thread
        self._lock = threading.Lock()
        self._why = ""  # the reason for TCP; empty: verbs
        self._next = 0.0  # time of the next attempt with NICs
        self._tries = False  # whether that attempt has started

    @property
    def name(self) -> str:
        return self._tcp.name if self._why else self._verbs.name

    def _takes_tcp(self, handle: Handle) -> bool:
        """Return whether a new transfer takes TCP. It does not block: an attempt with NICs serves later transfers."""
        if not self._why:
            return False
        with self._lock:
            if not self._why or (self._tries and self._verbs.is_ready(handle)):
                self._why, self._tries = "", False
                return False
            now = time.monotonic()
            begin = now >= self._next
            if begin:
                self._next, self._tries = now + RETRY_INTERVAL_S, True
        if begin:
            self._run_in_thread(lambda: self._verbs.prepare(handle))
        return True

    def _falls_back(self, handle: Handle, result: Result) -> bool:
        """Return whether this transfer has not started over verbs. The results of other transfers do not matter."""
        if result.outcome != UNREACHABLE or not handle.ways:
            return False
        with self._lock:
            self._why, self._next, self._tries = result.text or "?", time.monotonic() + RETRY_INTERVAL_S, False
        self._warn(handle, result.text)
        return True

    def begin(
        self, part: ReadWriteOp | AtomicOp, scope: Any, keep: Any, done: Callable[[Result], None]
    ) -> InFlightTransfer | None:
        """See AsyncRoute. TCP needs a thread, because `recover` would not know which route has started the part."""
        return None if self._takes_tcp(part.handle) else self._verbs.begin(part, scope, keep, done)

    def planned(self, part: ReadWriteOp | AtomicOp, keep: Any) -> Any:
        return self._verbs.planned(part, keep)

    def begin_planned(
        self, part: ReadWriteOp | AtomicOp, plan: Any, done: Callable[[Result], None]
    ) -> InFlightTransfer | None:
        return None if self._takes_tcp(part.handle) else self._verbs.begin_planned(part, plan, done)

    def recover(self, part: ReadWriteOp | AtomicOp, result: Result, scope: Any, keep: Any) -> Result:
        return self._or_tcp(part, self._verbs.recover(part, result, scope, keep), scope, keep)

    def run(self, part: ReadWriteOp | AtomicOp, scope: Any, keep: Any) -> Result:
        tried = None if self._takes_tcp(part.handle) else self._verbs.run(part, scope, keep)
        return self._or_tcp(part, tried, scope, keep)

    def _or_tcp(self, part: ReadWriteOp | AtomicOp, result: Result | None, scope: Any, keep: Any) -> Result:
        """Return ``result``, that of verbs, or run the part over TCP if verbs was not tried or can't start."""
        if result is not None and not self._falls_back(part.handle, result):
            return result
        return self._tcp.run(part, scope, keep)


def _for_nics(handle: Handle) -> bool:
    """Return whether the owner has a NIC that reaches the memory, or staging memory."""
    return bool(handle.verbs) or handle.staged


def _say(handle: Handle, how: str) -> None:
    debug_log.write(f"monarch: memory of process {handle.pid} on host {handle.host}: {how}")


def is_rdma_available() -> bool:
    """Return whether this process can use an RDMA NIC: an active and permitted port, its device file, and a package for
    verbs.

    The check reads /sys and opens no device. `RDMABuffer` works in either case: without a NIC it uses TCP.
    `monarch-backend doctor` says what is missing. MONARCH_RDMA_TRANSPORT makes no difference here.

    >>> from monarch_backend.rdma import is_rdma_available
    >>> is_rdma_available() in (True, False)
    True
    """
    return available() is None


def get_rdma_backend() -> str:
    """Return the best route from this process to memory on other hosts: "verbs" or "tcp".

    The route to one buffer also depends on its owner: see `RDMABuffer.backend`. It is "tcp" if the owner has no NIC,
    and "same host" or "this process" if no network is in between. Raises ValueError for an invalid
    MONARCH_RDMA_TRANSPORT.

    >>> from monarch_backend.rdma import get_rdma_backend, is_rdma_available
    >>> get_rdma_backend() == "tcp" or is_rdma_available()
    True
    """
    return "verbs" if forced() != "tcp" and is_rdma_available() else "tcp"
