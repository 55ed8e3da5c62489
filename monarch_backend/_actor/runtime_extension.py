"""Base class of the parts that higher layers attach to a process's runtime: hosts, registered memory, transfers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from monarch_backend._transport.local.peer import Peer


class RuntimeExtension:
    """Part of a runtime that a higher layer owns. `Runtime.extend` attaches it; it lives as long as the runtime.

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
