"""Hosts as this process knows them: those that its extensions have attached, and names that came with meshes."""

from __future__ import annotations

from collections.abc import Sequence
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
        """Return host numbers and names, see `MeshProgram.host_names`."""
        if not self._runtime.gateway:  # all receivers are on this host
            return ()
        numbers = sorted({host_of(token) for token in tokens})
        return tuple((number, name) for number in numbers if (name := self.name_of(number)) != number)
