"""The seams: how frames travel, what time it is. The real ones stand here, the simulator has its own.

`Links` carry frames between processes, each pair in order; they know no meaning. No protocol lives here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from monarch_backend import _native
from monarch_backend._core import env
from monarch_backend._core.limits import explained

ARENA_BYTES = 4 << 30
"""Of address space for what one process has on its way to others; pages that were never used cost nothing."""

MOST_IN_ONE = 256 << 20
"""Bytes of a payload that travel in one piece; a larger one goes in parts."""

MAX_UNREAD_BYTES = 256 << 20
"""Of those, how much one receiver may leave unread: the rest is for the others. One message goes in any case."""

FIRST_REMOTE_LINK = 1 << 20
"""The number of the first link to another host."""

LINK_PENDING = -2
"""What `connect` returns for a process that does not answer yet."""


class Clock(Protocol):
    """What time it is, in seconds from some point."""

    def now(self) -> float:
        """Never goes back."""
        ...


class RealClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds."""
        return time.monotonic()


Receiver = tuple[int, int, int, int]
"""Link, sequence number, rank, epoch."""


def epoch_of(token: str) -> int:
    """How often the process with this token has been started anew; its frames carry it. Programs have any number.

    >>> epoch_of("0123456789abcdef0123456789ab" + "0002")
    2
    """
    try:
        return int(token[-4:], 16)
    except ValueError:
        return 0


class Links(Protocol):
    """Frames to and from other processes; each pair of processes keeps their order."""

    token: str

    def connect(self, token: str) -> int:
        """A link to the process with this token; -1 if it can't be reached.

        SILENT if it is there and does not answer, as one that is stopped: MET or REFUSED follows when that has ended.
        """
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
        """False if there is no room for the payload now; then nothing was sent. Never waits."""
        ...

    def cast(
        self,
        to: list[Receiver],
        kind: int,
        target: int,
        ref: int,
        prefix: bytes,
        body: Any,
        buffers: Sequence[Any] | None,
    ) -> bool:
        """The same frame to many; the payload is copied once."""
        ...

    def drop(self, link: int) -> None:
        """Nothing more will be sent to this one."""
        ...

    def unread(self, link: int) -> int:
        """Bytes on this link that its receiver has not read yet."""
        ...


def few_processors() -> bool:
    """Too few for a process and its gateway, each with a thread beside, to wait by spinning."""
    return len(os.sched_getaffinity(0)) < 4


class LocalLinks:
    """Links between processes of one host, over shared memory."""

    def __init__(self, token: str = "", *, crowded: bool = False) -> None:
        with explained(f"reserve {ARENA_BYTES} bytes of address space for messages"):
            self.host = _native.Host(ARENA_BYTES, token)
        spin = env.get("MONARCH_BUSY_POLL")
        with explained("start the thread that wakes this process for messages"):
            self.post = _native.Post(self.host, spin == "0" if spin else crowded, MAX_UNREAD_BYTES)
        self._crowded = crowded
        self.token: str = self.host.token
        self.connect = self.post.connect
        self.send = self.post.send
        self.cast = self.post.cast
        self.drop = self.post.drop
        self.unread = self.post.unread
        self.translate: Callable[[Sequence[Any]], Sequence[Any]] = lambda events: events

    def go_through(self, far: Any) -> None:
        """From now on other hosts can be reached, too: ``far`` is a FarLinks that stands before these links."""
        if not env.get("MONARCH_BUSY_POLL"):
            self.post.crowd(self._crowded or few_processors())
        self.connect, self.send, self.cast = far.connect, far.send, far.cast
        self.drop, self.unread, self.translate = far.drop, far.unread, far.translate
