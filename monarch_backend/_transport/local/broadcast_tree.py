"""Tree of processes for multicast: its shape, and the aggregation of replies on their way up.

tree_multicast.py sends along the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from monarch_backend._transport.local import frames
from monarch_backend._transport.local.buffers import own as own_body
from monarch_backend._transport.local.buffers import own_all
from monarch_backend._transport.local.frames import Kind, MulticastArrived, Part, Replies, Route, Status
from monarch_backend._transport.local.peer import Peer

if TYPE_CHECKING:
    from monarch_backend._transport.local.router import Router


@dataclass
class Multicast:
    """A multicast that this process has sent, until all receivers have it."""

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
    """Aggregates the replies of this process and of those below it, and sends them up the tree."""

    def __init__(self, router: Router, parent: int, root: Peer, route: Route, children: dict[str, int]) -> None:
        self._router, self._parent, self._root = router, parent, root
        self._route = route
        self._children = children  # token -> replies that its subtree still has to send
        self._mine = 1
        self._missing = 0  # replies that do not come this way
        self._parts: list[Part] = []
        self._chunks: list[Any] = []
        self._buffers: list[Any] = []

    def own(self, rank: int, status: bytes, body: Any, buffers: Sequence[Any] | None) -> None:
        """Add this process's reply, from any thread. A large reply is sent directly to the root."""
        if self._router.is_sent_directly(body, buffers):
            self._router.reply(self._root, self._route.ref, rank, status, body, buffers)
            self.straight()
            return
        if any(count > 0 for count in self._children.values()):  # the reply waits, and the actor may change its memory
            body, buffers = own_body(body), own_all(buffers)
        chunks = [body] if isinstance(body, (bytes, memoryview)) else list(body)
        with self._router.lock:
            self._mine = 0
            self._add(Part(rank, status, sum(len(c) for c in chunks), len(buffers or ())), chunks, buffers or ())
            self._maybe_send(_urgent(status))

    def straight(self) -> None:
        """Record that this process sends its reply directly to the root."""
        self._router.tell(self._root, MulticastArrived(self._route.multicast, [self._router.token]))
        with self._router.lock:
            self._mine, self._missing = 0, self._missing + 1
            self._maybe_send(False)

    def below(self, token: str, replies: Replies, body: Any, buffers: Sequence[Any]) -> None:
        parts = replies.parts
        with self._router.lock:
            self._children[token] = self._children.get(token, 0) - len(parts) - replies.missing
            self._missing += replies.missing
            self._parts += parts
            self._chunks.append(body)
            self._buffers += buffers
            self._maybe_send(any(_urgent(part.status) for part in parts))

    def lost(self, token: str) -> None:
        """Expect nothing from a child that is gone. The root sends directly to the processes below it."""
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
            link = self._parent if self._router.table.open(self._parent) else self._router.link_to(self._root)
            self._router.send_or_keep(
                link, Kind.REPLIES, self._route.multicast, self._route.ref, prefix, self._chunks, self._buffers
            )
            self._parts, self._chunks, self._buffers, self._missing = [], [], [], 0
        if complete:
            self._router.tree.combiners.pop((self._route.root, self._route.multicast), None)


def _urgent(status: bytes) -> bool:
    """Whether a reply is sent up at once: an error ends the call."""
    return status not in (Status.VALUE, Status.NOTHING)


def children(index: int, count: int, fanout: int) -> range:
    """Return the children of a place in a tree of ``count`` places.

    The first ``fanout`` places are the children of the root, which has no place of its own.

    >>> list(children(0, 20, 8)), list(children(1, 20, 8)), list(children(2, 20, 8))
    ([8, 9, 10, 11, 12, 13, 14, 15], [16, 17, 18, 19], [])
    """
    first = fanout * (index + 1)
    return range(min(first, count), min(first + fanout, count))


def descendants(index: int, count: int, fanout: int) -> list[int]:
    found: list[int] = []
    todo = [index]
    while todo:
        below = children(todo.pop(), count, fanout)
        found += below
        todo += below
    return found


def count_below(index: int, count: int, fanout: int) -> int:
    """Return the size of the subtree, this place included."""
    return 1 + len(descendants(index, count, fanout))
