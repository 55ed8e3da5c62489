"""Failure of a group when one of its hosts is cut off.

The ranks tell each other the addresses at which they can be watched. _core/host_watch.py notices a silent host. Then
each rank fails its pending operations by closing its Gloo links. Later operations fail at once. All errors name the
hosts and their ranks.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import Store

from monarch_backend._core import fork, host_watch
from monarch_backend._core.addresses import address_towards, numeric_address
from monarch_backend._core.host_watch import Watcher
from monarch_backend.process_group._gloo_links import GlooLinks
from monarch_backend.process_group._handshake import Deadline, exchange
from monarch_backend.process_group._own_address import host_of
from monarch_backend.process_group._shm.shm_backend import explained

_LATE_S = 0.5  # by which the thread of the watch may be late

_watch = host_watch.HostWatch()
fork.register(fork.Step.GROUP_WATCH, after_in_child=_watch.forget)


class HostGuard:
    """Watch of a group's other hosts. ``end`` fails the group: it gets the cause, as the compiled core's failures."""

    def __init__(
        self, members: list[dict[str, Any]], rank: int, gloo: Any, end: Callable[[tuple[str, int, str]], object]
    ) -> None:
        self.links = GlooLinks(gloo)
        self._members, self._rank, self._end = members, rank, weakref.WeakMethod(end)  # the group owns this object
        self._cause: tuple[str, int, str] | None = None
        self._known = threading.Event()
        others = frozenset(each["address"] for each in members) - {members[rank]["address"], ""}
        own_place = self._on(members[rank]["address"]).index(members[rank])
        processes = {}
        for address in others:
            found = [(address, each["port"]) for each in self._on(address) if each["port"]]
            first = (
                own_place % len(found) if found else 0
            )  # the ranks of a host are watched by different ones of another
            processes[address] = found[first:] + found[:first]
        self._watcher = Watcher(others, self._lost)
        _watch.watch(self._watcher, processes)

    def _on(self, address: str) -> list[dict[str, Any]]:
        return [each for each in self._members if each["address"] == address]

    def close(self) -> None:
        _watch.close(self._watcher)

    def cause(self) -> tuple[str, int, str] | None:
        """Return why an operation failed, if a host is lost. Waits for that where a host is silent already.

        Another rank may have closed its links a moment earlier, which is only an effect.
        """
        due = self._watcher.due
        if self._cause is None and due is not None:
            self._known.wait(max(0.0, due - time.monotonic()) + _LATE_S)
        return self._cause

    def error(self) -> Exception | None:
        """Return the error of operations after a host was lost, else None."""
        if self._cause is None:
            return None
        return explained(self._cause, [each["member"] for each in self._members], self._rank, "")

    def _lost(self, addresses: list[str]) -> None:
        if self._cause is None:
            ranks = [rank for rank, each in enumerate(self._members) if each["address"] in addresses]
            hosts = ", ".join(
                dict.fromkeys(f"{self._members[r]['host']} ({self._members[r]['address']})" for r in ranks)
            )
            have, s = ("have", "s") if len(addresses) > 1 else ("has", "s" if len(ranks) > 1 else "")
            alone = len(addresses) > 1 and set(addresses) == self._watcher.hosts
            text = (
                f"was lost with its host: no sign of life from {hosts}, which {have} rank{s} "
                f"{', '.join(map(str, ranks))}, for {host_watch.silence()} s. Check the host and the network"
                f"{', first that of this host: all others are silent' if alone else ''}"
            )
            self._cause = "dead", ranks[0], text
            self._known.set()
            if (end := self._end()) is not None:
                end(self._cause)


def guard(
    store: Store,
    rank: int,
    size: int,
    deadline: Deadline,
    who: str,
    gloo: Any,
    end: Callable[[tuple[str, int, str]], object],
) -> HostGuard | None:
    """Exchange addresses and watch the other hosts. Return None if there are none, or with MONARCH_HOST_TIMEOUT=0.

    All ranks call this, with the same setting. Raises DistStoreError for ranks that do not, at the deadline.
    """
    if size == 1 or not host_watch.silence():
        return None
    try:
        port = _watch.listen()
    except OSError:  # no descriptor left: the others do not watch this process
        port = 0
    there = host_of(store)
    address = address_towards(there) if there else numeric_address(socket.gethostname())
    me = {"address": address, "port": port, "host": socket.gethostname(), "pid": os.getpid()}
    me["member"] = f"host {me['host']}, pid {me['pid']}"
    members = exchange(store, "watched", rank, size, me, deadline, who)
    for each in members:  # a rank on the store's host may know only loopback; others reach it as they reach the store
        each["address"] = each["address"] or numeric_address(there)
    if len({each["address"] for each in members}) == 1:
        return None
    return HostGuard(members, rank, gloo, end)
