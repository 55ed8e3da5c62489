"""Which way leads from this process to the memory of another one, and why. Chosen once per process.

What was chosen is printed with MONARCH_DEBUG=1.
"""

from __future__ import annotations

import logging
import os
import sys

from monarch_backend.actor._program import Program
from monarch_backend.rdma._handle import Handle
from monarch_backend.rdma._near import Here, SameHost
from monarch_backend.rdma._registry import Registry
from monarch_backend.rdma._route import Route
from monarch_backend.rdma._tcp import Tcp, Ways
from monarch_backend.transport._carried import host_of

log = logging.getLogger("monarch_backend")

FORCED = ("", "tcp")
"""What MONARCH_RDMA may say: to take this route also where there is a better one."""


class Routes:
    """Those of one process."""

    def __init__(self, owner: Program, registry: Registry) -> None:
        self._program, self._registry = owner, registry
        self._here, self._near, self._tcp = Here(registry), SameHost(registry), Tcp(owner, registry)
        self._chosen: dict[str, Route] = {}
        self._forced = os.environ.get("MONARCH_RDMA", "")
        if self._forced not in FORCED:
            known = ", ".join(repr(name) for name in FORCED if name)
            raise ValueError(f"MONARCH_RDMA={self._forced!r}: one of {known}, or unset for the best route")

    def to(self, handle: Handle) -> Route:
        """The route to this memory. Raises RDMAError if there is none."""
        route = self._chosen.get(handle.token)
        if route is None:
            route = self._chosen[handle.token] = self._choose(handle)
        return route

    def outgoing(self, handle: Handle) -> Handle:
        """As this process sends a handle to others: with the ways that lead here, if it is its own."""
        if handle.token != self._program.router.token or not (self._program.gateway or self._forced == "tcp"):
            return handle
        ways, encrypted = self.ways()
        return handle._replace(ways=ways, encrypted=encrypted)

    def ways(self) -> tuple[Ways, bool]:
        """Where this process's memory is served, from now on, and whether that is encrypted."""
        return self._tcp.ways()

    def knows(self, token: str) -> bool:
        """Something is kept for that process."""
        return token in self._chosen

    def forget(self, token: str) -> None:
        """That process is gone."""
        self._chosen.pop(token, None)
        self._tcp.forget(token)

    def _choose(self, handle: Handle) -> Route:
        if handle.token == self._program.router.token:
            return self._here
        if self._forced == "tcp":
            _say(handle, "tcp, as MONARCH_RDMA says")
            return self._tcp
        if host_of(handle.token) == host_of(self._program.router.token):
            _say(handle, f"{self._near.name}, {self._near.way(handle)}")
            return self._near
        _say(handle, "tcp, it is on another host")
        log.warning(
            "memory of process %d on host %s is read and written over TCP: there is no faster route to it",
            handle.pid,
            handle.host,
        )
        return self._tcp


def _say(handle: Handle, how: str) -> None:
    if os.environ.get("MONARCH_DEBUG", "0") not in ("", "0"):
        sys.stderr.write(f"monarch: memory of process {handle.pid} on host {handle.host}: {how}\n")
