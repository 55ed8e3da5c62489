"""Placement of processes on hosts: at their first start and at a restart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from monarch_backend._transport.tokens import host_of

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime


class Placement:
    """Chooses the host of each process."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def homes(self, hosts: tuple[str, ...] | None, count: int) -> list[str]:
        """Return the host of each rank. Raises RuntimeError for a lost host, or if another process has attached it."""
        if hosts is None:
            return [host_of(self._runtime.router.token)] * count
        for each in hosts:
            known = self._runtime.hosts.find(each)
            if known is None:
                raise RuntimeError(
                    f"host {each} was attached by another process: only that process can start processes there"
                )
            if known.lost is not None:
                raise RuntimeError(f"{known.lost}: take a slice of the hosts without it, or attach it again")
        return [hosts[rank * len(hosts) // count] for rank in range(count)]

    def home_again(self, token: str, others: Sequence[str]) -> str:
        """Return the host of a restarted process: its former host or, if that is lost, another one of its mesh."""
        host = self._runtime.hosts.of(token)
        if host is None or host.lost is None:
            return host_of(token)
        alive = [
            host_of(other)
            for other in others
            if (known := self._runtime.hosts.of(other)) is not None and known.lost is None
        ]
        return min(sorted(set(alive)), key=alive.count, default=host_of(token))

    def is_on(self, tokens: Sequence[str], hosts: Sequence[str]) -> bool:
        """Return whether one of the processes is on one of these hosts. Without hosts: on this host."""
        wanted = set(hosts) or {host_of(self._runtime.router.token)}
        return any(host_of(token) in wanted for token in tokens)
