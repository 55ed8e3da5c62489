"""Hosts as this process knows them: those that its extensions have attached, and names that came with meshes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from monarch_backend._actor.calls.codec import HOST
from monarch_backend._transport.tokens import host_of

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime


class KnownHosts:
    """Finds the host of a process, and its name for messages."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._names: dict[str, str] = {}  # names of other hosts by number, received with meshes

    def attached(self) -> list[Any]:
        """Return the Hosts that this program has attached, lost ones among them."""
        return [host for part in self._runtime.extensions for host in list(part.hosts.values())]

    def of(self, token: str) -> Any:
        """Return the Host of a remote process; None if the process is here or another process attached its host."""
        return self.find(host_of(token))

    def find(self, host_id: str) -> Any:
        """Return the Host with this id; None if this program has not attached it."""
        for part in self._runtime.extensions:
            if (found := part.hosts.get(host_id)) is not None:
                return found
        return None

    def add_names(self, names: Sequence[tuple[str, str]]) -> None:
        self._names.update(names)

    def name_of(self, token: str) -> str:
        """Return the name of this process's host, for messages."""
        if host_of(token) == host_of(self._runtime.router.token):
            return HOST
        host = self.of(token)
        return self._names.get(host_of(token), host_of(token)) if host is None else str(host.name)

    def names_of(self, tokens: Sequence[str]) -> tuple[tuple[str, str], ...]:
        """Return numbers and names of the hosts of these processes, as far as they are known here."""
        if not self._runtime.gateway:  # all receivers are on this host
            return ()
        numbers = sorted({host_of(token) for token in tokens})
        return tuple((number, name) for number in numbers if (name := self.name_of(number)) != number)

    # ---- successors of lost hosts

    def latest(self, host: Any) -> Any:
        """Return the Host that has taken the place of a lost one; the same one if none has."""
        while host.lost is not None and host.successor is not None:
            found = self.find(host.successor.host or "")
            if found is None:
                break
            host = found
        return host

    def awaited(self, tokens: Iterable[str]) -> list[Any]:
        """Return each HostSuccessor that the restart of these processes has to wait for."""
        lost = {host.id: host for token in tokens if (host := self.of(token)) is not None and host.lost is not None}
        latest = {host.id: host for host in map(self.latest, lost.values())}.values()
        return [
            host.successor
            for host in latest
            if host.lost is not None and host.successor is not None and not host.successor.is_known
        ]

    def with_successors(self, hosts: Iterable[str]) -> list[str]:
        """Return the ids of hosts, with those of their successors in place of lost ones."""
        return [each if (host := self.find(each)) is None else self.latest(host).id for each in hosts]

    # ---- placement of processes

    def homes(self, hosts: tuple[str, ...] | None, count: int) -> list[str]:
        """Return the host of each rank. Raises RuntimeError for a lost host, or if another process has attached it."""
        if hosts is None:
            return [host_of(self._runtime.router.token)] * count
        hosts = tuple(self.with_successors(hosts))
        for each in hosts:
            known = self.find(each)
            if known is None:
                raise RuntimeError(
                    f"host {each} was attached by another process: only that process can start processes there"
                )
            if known.lost is not None:
                raise RuntimeError(f"{known.lost}: take a slice of the hosts without it, or attach it again")
        return [hosts[rank * len(hosts) // count] for rank in range(count)]

    def home_again(self, token: str, others: Sequence[str]) -> str:
        """Return the host of a restarted process.

        It is its former host. If that is lost, it is the one that has taken its place, or another one of its mesh.
        """
        host = self.of(token)
        if host is None or host.lost is None:
            return host_of(token)
        latest = self.latest(host)
        if latest.lost is None:
            return str(latest.id)
        known = [self.latest(each) for other in others if (each := self.of(other)) is not None]
        alive = [str(each.id) for each in known if each.lost is None]
        return min(sorted(set(alive)), key=alive.count, default=host_of(token))

    def is_on(self, tokens: Sequence[str], hosts: Sequence[str]) -> bool:
        """Return whether one of the processes is on one of these hosts. Without hosts: on this host."""
        wanted = {*hosts, *self.with_successors(hosts)} or {host_of(self._runtime.router.token)}
        return any(host_of(token) in wanted for token in tokens)
