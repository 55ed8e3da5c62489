"""One message to many, down a tree of processes: who is below whom, and the replies on their way up.

Sending, and who there is, is the router's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from monarch_backend._transport.local import frames
from monarch_backend._transport.local.buffers import own as own_body
from monarch_backend._transport.local.buffers import own_all
from monarch_backend._transport.local.frames import CastArrived, Kind, Part, Replies, Route, Status
from monarch_backend._transport.local.peer import Peer

if TYPE_CHECKING:
    from monarch_backend._transport.local.router import Router


@dataclass
class Multicast:
    """A cast that its root has not heard the end of."""

    number: int
    kind: int
    target: int
    ref: int
    prefix: bytes
    body: Any
    peers: list[Peer]
    hops: list[frames.RelayHop]
    missing: set[int] = field(default_factory=set)


class ReplyAggregator:
    """Replies of the processes below this one, on their way up."""

    def __init__(self, router: Router, parent: int, root: Peer, route: Route, children: dict[str, int]) -> None:
        self._router, self._parent, self._root = router, parent, root
        self._route = route
        self._children = children  # token -> how many replies are still to come from below it
        self._mine = 1
        self._missing = 0  # replies that were to come from below a lost child
        self._parts: list[Part] = []
        self._chunks: list[Any] = []
        self._buffers: list[Any] = []

    def own(self, rank: int, status: bytes, body: Any, buffers: Sequence[Any] | None) -> None:
        """This process's reply; may come from any thread. A large one goes straight to the root."""
        if self._router.goes_straight(body, buffers):
            self._router.reply(self._root, self._route.ref, rank, status, body, buffers)
            self.straight()
            return
        if any(count > 0 for count in self._children.values()):  # it waits here, and the actor goes on with its memory
            body, buffers = own_body(body), own_all(buffers)
        chunks = [body] if isinstance(body, (bytes, memoryview)) else list(body)
        with self._router.lock:
            self._mine = 0
            self._add(Part(rank, status, sum(len(c) for c in chunks), len(buffers or ())), chunks, buffers or ())
            self._maybe_send(_urgent(status))

    def straight(self) -> None:
        """This process's reply does not come this way."""
        self._router.tell(self._root, CastArrived(self._route.cast, [self._router.token]))
        with self._router.lock:
            self._mine, self._missing = 0, self._missing + 1
            self._maybe_send(False)

    def below(self, token: str, replies: Replies, body: Any, buffers: Sequence[Any]) -> None:
        """Replies of a child and those below it."""
        parts = replies.parts
        with self._router.lock:
            self._children[token] = self._children.get(token, 0) - len(parts) - replies.missing
            self._missing += replies.missing
            self._parts += parts
            self._chunks.append(body)
            self._buffers += buffers
            self._maybe_send(any(_urgent(part.status) for part in parts))

    def lost(self, token: str) -> None:
        """A child is gone; the root asks those below it itself."""
        with self._router.lock:
            left = self._children.pop(token, None)
            if left is not None:
                self._missing += max(left, 0)
                self._maybe_send(False)

    def _add(self, part: Part, chunks: list[Any], buffers: Sequence[Any]) -> None:
        self._parts.append(part)
        self._chunks += chunks
        self._buffers += buffers

    def _maybe_send(self, urgent: bool) -> None:
        complete = self._mine == 0 and all(count <= 0 for count in self._children.values())
        if (self._parts or self._missing) and (complete or urgent):
            prefix = frames.encode(Replies(self._route.root, self._parts, self._missing))
            link = self._parent if self._router.open(self._parent) else self._router.link_to(self._root)
            self._router.send_or_keep(
                link, Kind.REPLIES, self._route.cast, self._route.ref, prefix, self._chunks, self._buffers
            )
            self._parts, self._chunks, self._buffers, self._missing = [], [], [], 0
        if complete:
            self._router.tree.combiners.pop((self._route.root, self._route.cast), None)


def _urgent(status: bytes) -> bool:
    """An error ends the call, and does not wait for the others."""
    return status not in (Status.VALUE, Status.NOTHING)


def children(index: int, count: int, fanout: int) -> range:
    """Places below this one in a tree of ``count`` places whose first ``fanout`` places are below the root.

    >>> list(children(0, 20, 8)), list(children(1, 20, 8)), list(children(2, 20, 8))
    ([8, 9, 10, 11, 12, 13, 14, 15], [16, 17, 18, 19], [])
    """
    first = fanout * (index + 1)
    return range(min(first, count), min(first + fanout, count))


def descendants(index: int, count: int, fanout: int) -> list[int]:
    """Places below this one, and below those."""
    found: list[int] = []
    todo = [index]
    while todo:
        below = children(todo.pop(), count, fanout)
        found += below
        todo += below
    return found


def count_below(index: int, count: int, fanout: int) -> int:
    """This place and those below it."""
    return 1 + len(descendants(index, count, fanout))
