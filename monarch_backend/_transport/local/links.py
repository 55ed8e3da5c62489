"""Interfaces of links and of the clock, with their implementations on one host. The simulator replaces both.

`Links` carry frames between processes. The frames between two processes stay in order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from monarch_backend import _native
from monarch_backend._core import env, platform
from monarch_backend._core.limits import explained
from monarch_backend._verbs import eligibility

ARENA_BYTES = 4 << 30
"""Bytes of address space for the unread messages of one process. Pages are committed at their first use."""

MOST_IN_ONE = 256 << 20
"""Bytes of a payload that is sent in one piece; a larger one is sent in several."""

MAX_UNREAD_BYTES = 256 << 20
"""Bytes of the arena that one receiver may leave unread: the rest is for other receivers. One message of any size may
always be sent."""

FIRST_REMOTE_LINK = 1 << 20
"""The number of the first link to another host."""

LINK_PENDING = -2
"""Result of `connect` for a process that does not answer yet."""


class Clock(Protocol):
    """Monotonic clock, in seconds since an arbitrary point."""

    def now(self) -> float: ...


class RealClock:
    now = staticmethod(time.monotonic)


Receiver = tuple[int, int, int, int]
"""Link, sequence number, rank, epoch."""


class Links(Protocol):
    """Sends frames to other processes, in order for each pair of processes."""

    token: str

    def connect(self, token: str) -> int:
        """Return the link; LINK_PENDING before it answers (MET or REFUSED follows); -1 if it can't be reached."""
        ...

    def send(
        self,
        link: int,
        kind: int,
        target: int,
        ref: int,
        seq: int,
        rank: int,
        epoch: int,
        prefix: bytes,
        body: Any,
        buffers: Sequence[Any] | None,
    ) -> bool:
        """Send a frame without waiting. Return False, and send nothing, if there is no space for the payload."""
        ...

    def multicast(
        self,
        to: list[Receiver],
        kind: int,
        target: int,
        ref: int,
        prefix: bytes,
        body: Any,
        buffers: Sequence[Any] | None,
    ) -> bool:
        """Send one frame to several receivers; the payload is copied once."""
        ...

    def drop(self, link: int) -> None: ...

    def unread(self, link: int) -> int:
        """Return the bytes on this link that its receiver has not read yet."""
        ...


def few_processors() -> bool:
    """Whether there are too few processors for a process and its gateway, two threads each, to wait by spinning."""
    return platform.usable_cpus() < 4


def idle_memory_timeout() -> int:
    """Return the seconds after which unused memory of messages is given back to the system. 0: never.

    Never where there are RDMA devices. Other libraries there may cache registrations by address. They are not notified
    when another process discards the pages, so their NIC would access the old ones.
    """
    return 0 if eligibility.has_devices() else int(env.get("MONARCH_IDLE_MEMORY_TIMEOUT"))


class LocalLinks:
    """Links between processes of one host, over shared memory."""

    def __init__(self, token: str = "", *, oversubscribed: bool = False) -> None:
        with explained(f"reserve {ARENA_BYTES} bytes of address space for messages"):
            self.host = _native.Host(ARENA_BYTES, token)
        self.host.return_idle_memory(idle_memory_timeout())
        spin = env.get("MONARCH_BUSY_POLL")
        with explained("start the thread that wakes this process for messages"):
            self.mailbox = _native.Mailbox(self.host, spin == "0" if spin else oversubscribed, MAX_UNREAD_BYTES)
        self._oversubscribed = oversubscribed
        self.token: str = self.host.token
        self.connect = self.mailbox.connect
        self.send = self.mailbox.send
        self.multicast = self.mailbox.multicast
        self.drop = self.mailbox.drop
        self.unread = self.mailbox.unread
        self.translate: Callable[[Sequence[Any]], Sequence[Any]] = lambda events: events

    def go_through(self, remote_links: Any) -> None:
        """Send through ``remote_links``, a RemoteLinks around these links, so that other hosts can be reached, too."""
        if not env.get("MONARCH_BUSY_POLL"):
            self.mailbox.set_oversubscribed(self._oversubscribed or few_processors())
        self.connect, self.send, self.multicast = remote_links.connect, remote_links.send, remote_links.multicast
        self.drop, self.unread, self.translate = remote_links.drop, remote_links.unread, remote_links.translate
