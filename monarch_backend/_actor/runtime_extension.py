"""Base class of the parts that higher layers attach to a process's runtime: hosts, registered memory, transfers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, cast

from monarch_backend._transport.local.peer import Peer


class RuntimeExtension:
    """Part of a runtime that a higher layer owns. `Extensions.extend` attaches it; it lives as long as the runtime.

    Each method does nothing here. The runtime calls them on the thread that reads messages, unless they say otherwise.
    """

    has_work = False
    """Whether the program must be shut down in order at its end, even if it has no processes of its own."""

    hosts: Mapping[str, Any] = MappingProxyType({})
    """Other hosts that the extension has attached, by their id."""

    def on_disconnected(self, peer: Peer) -> None:
        """The link to a process has ended. How the process ended may not be known yet."""

    def on_process_lost(self, peer: Peer) -> None:
        """A process has ended, and pending calls to it have failed."""

    def kill(self) -> None:
        """End what the extension has started outside this process. Called at the end of the program."""

    def close(self) -> None:
        """Release what the extension holds. Called after `kill`, in the main program only."""

    def abandon(self) -> None:
        """Drop inherited resources silently. Called in a fork of this process."""


E = TypeVar("E", bound=RuntimeExtension)


class Extensions:
    """The extensions of a runtime, at most one of each class. They are iterated in the order of their addition."""

    def __init__(self) -> None:
        self._parts: dict[type[RuntimeExtension], RuntimeExtension] = {}
        self._lock = threading.RLock()

    def __iter__(self) -> Iterator[RuntimeExtension]:
        return iter(self._parts.values())

    def extend(self, kind: type[E], make: Callable[[], E]) -> E:
        """Return the extension of this class. The first call makes it."""
        found = self._parts.get(kind)
        if found is None:
            with self._lock:
                found = self._parts.get(kind)
                if found is None:
                    found = make()  # may itself add extensions
                    self._parts = {**self._parts, kind: found}  # other threads may iterate over the old one
        return cast("E", found)

    def get(self, kind: type[E]) -> E | None:
        return cast("E | None", self._parts.get(kind))
