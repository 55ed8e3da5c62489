"""Multicast down a tree of processes: relaying, the root's record of receivers that have it, and aggregated replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monarch_backend._transport.local import frames, tuning
from monarch_backend._transport.local.flow_control import places_of
from monarch_backend._transport.local.frames import (
    Frame,
    FrameError,
    Kind,
    MulticastArrived,
    MulticastLost,
    Part,
    Replies,
    Route,
    Status,
    own_all,
    size_of,
)
from monarch_backend._transport.local.frames import own as own_body
from monarch_backend._transport.local.links import Receiver
from monarch_backend._transport.local.peer import Peer

if TYPE_CHECKING:
    from monarch_backend._transport.local.router import Router


@dataclass
class Multicast:
    """A multicast that this process has sent, until all receivers have it."""

    route: Route
    body: Any
    peers: list[Peer]
    missing: set[int]


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
            self._parts.append(Part(rank, status, sum(len(c) for c in chunks), len(buffers or ())))
            self._chunks += chunks
            self._buffers += buffers or ()
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


class TreeMulticast:
    """Multicasts that this process has sent or relays."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.multicasts: dict[int, Multicast] = {}  # sent by this process, and not known to have arrived everywhere
        self.combiners: dict[tuple[str, int], ReplyAggregator] = {}  # by the root's token and its number

    def send(
        self, to: Sequence[tuple[Peer, int]], kind: int, target: int, ref: int, prefix: bytes, body: Any, combine: bool
    ) -> None:
        """Send to (process, rank) pairs; waits until all have credit. With ``combine`` replies are aggregated."""
        while True:
            self._router.flow.wait_for_all(to, kind, target)
            with self._router.lock:
                if not self._router.flow.lacks_credit(to):
                    return self._start(to, kind, target, ref, prefix, body, combine)

    def _start(
        self, to: Sequence[tuple[Peer, int]], kind: int, target: int, ref: int, prefix: bytes, body: Any, combine: bool
    ) -> None:
        """Send to the first processes of the tree. Call under the lock."""
        peers, ranks, places = [peer for peer, _ in to], [rank for _, rank in to], places_of(size_of(body, None))
        seqs = []
        for peer in peers:
            peer.sent = seq = peer.sent + 1  # a signal handler may send to this peer, too
            peer.credit -= places
            seqs.append(seq)
        number, tokens = next(self._router.ids), "".join(peer.token for peer in peers)
        route = Route(number, self._router.token, kind, target, ref, combine, prefix, tokens, seqs, ranks)
        self.multicasts[number] = multicast = Multicast(route, own_body(body), peers, set(range(len(peers))))
        first = [(peer.link, 0, i, peer.epoch) for i, peer in enumerate(peers[: tuning.TREE_FANOUT])]
        self._send_each(first, frames.encode(route), multicast.body, None)
        for index, peer in enumerate(peers):
            if peer.gone is not None:
                self._bypass(multicast, index)
        self._mark(number, ())  # peers that have exited before the multicast was recorded

    def receive(self, frame: Frame) -> None:
        """Relay a multicast to the processes below this one, then deliver it here."""
        route = frames.decode_route(frame.prefix)
        if frame.rank >= len(route) or route.token(frame.rank) != self._router.token:
            raise FrameError("a multicast for another process")
        root = self._router.peer(route.root)
        below = children(frame.rank, len(route), tuning.TREE_FANOUT)
        combiner = None
        with self._router.lock:
            if route.combine and root.gone is None:
                counts = {route.token(i): 1 + len(descendants(i, len(route), tuning.TREE_FANOUT)) for i in below}
                combiner = self.combiners[route.root, route.multicast] = ReplyAggregator(
                    self._router, frame.link, root, route, counts
                )
            self._pass_on(route, root, frame, below)
            if not route.combine:
                self._router.tell(root, MulticastArrived(route.multicast, [self._router.token]))
        rank = route.ranks[frame.rank]
        mine = Frame(
            frame.link,
            route.kind,
            route.target,
            route.ref,
            route.seqs[frame.rank],
            rank,
            self._router.epoch,
            route.prefix,
            frame.body,
            frame.buffers,
        )
        if not self._router.in_order(root, mine, combiner) and combiner is not None:
            combiner.own(rank, Status.NOTHING, b"", None)  # a copy came directly, and so does its reply

    def _pass_on(self, route: Route, root: Peer, frame: Frame, below: Sequence[int]) -> None:
        to = []
        for index in below:
            token = route.token(index)
            child = self._router.peer(token, root)
            if child.gone is None and self._router.reach(child):
                to.append((child.link, 0, index, child.epoch))
            else:
                combiner = self.combiners.get((route.root, route.multicast))
                if combiner is not None:
                    combiner.lost(token)
                self._router.tell(root, MulticastLost(route.multicast, [token]))
        if to:
            self._send_each(to, frame.prefix, frame.body, frame.buffers)

    def _send_each(self, to: list[Receiver], route: bytes, body: Any, buffers: Any) -> None:
        """Send to these places of the tree: with one copy, or separately if there is no space."""
        if not self._router.links.multicast(to, Kind.MULTICAST, 0, 0, route, body, buffers):
            for link, _, index, _ in to:
                self._router.send_or_keep(link, Kind.MULTICAST, 0, 0, route, body, buffers, rank=index)

    def _bypass(self, multicast: Multicast, index: int) -> None:
        """Send directly to the processes below this place of the tree."""
        for below in descendants(index, len(multicast.peers), tuning.TREE_FANOUT):
            if below in multicast.missing and multicast.peers[below].gone is None:
                self._emit_hop(multicast, below)

    def _emit_hop(self, multicast: Multicast, index: int) -> None:
        route, peer = multicast.route, multicast.peers[index]
        multicast.missing.discard(index)  # a direct link loses nothing
        if not multicast.missing:
            self.multicasts.pop(route.multicast, None)
        seq, rank = route.seqs[index], route.ranks[index]
        self._router.emit(peer, route.kind, route.target, route.ref, seq, rank, route.prefix, multicast.body, None)

    def on_arrived(self, _peer: Peer, message: MulticastArrived, _: Frame) -> None:
        self._mark(message.multicast, message.tokens)

    def _mark(self, number: int, tokens: Sequence[str]) -> None:
        with self._router.lock:
            multicast = self.multicasts.get(number)
            if multicast is None:
                return
            gone = set(tokens)
            multicast.missing -= {
                i for i, peer in enumerate(multicast.peers) if peer.token in gone or peer.gone is not None
            }
            if not multicast.missing:
                del self.multicasts[number]

    def on_lost(self, _peer: Peer, message: MulticastLost, _: Frame) -> None:
        """Send directly to processes that the tree did not reach, and to those below them."""
        with self._router.lock:
            multicast = self.multicasts.get(message.multicast)
            if multicast is None:
                return
            for token in message.tokens:
                index = next((i for i, peer in enumerate(multicast.peers) if peer.token == token), None)
                if index is not None:
                    if index in multicast.missing and multicast.peers[index].gone is None:
                        self._emit_hop(multicast, index)
                    self._bypass(multicast, index)

    def receive_replies(self, peer: Peer, frame: Frame) -> None:
        """Relay aggregated replies up the tree; at the root, deliver them one by one."""
        replies = frames.decode_replies(frame.prefix)
        parts, buffers = replies.parts, frame.buffers or []
        if sum(part.body for part in parts) != len(frame.body) or sum(part.buffers for part in parts) != len(buffers):
            raise FrameError("aggregated replies whose lengths do not add up")
        if replies.root != self._router.token:
            combiner = self.combiners.get((replies.root, frame.target))
            if combiner is not None:
                combiner.below(peer.token, replies, frame.body, buffers)
            else:  # the aggregator of this process has finished
                link = self._router.link_to(self._router.peer(replies.root))
                self._router.send_or_keep(
                    link, Kind.REPLIES, frame.target, frame.ref, frame.prefix, frame.body, buffers
                )
            return
        multicast = self.multicasts.get(frame.target)
        at, nth, body = 0, 0, memoryview(frame.body)
        handler = self._router.handlers[Kind.REPLY]
        ranks = {} if multicast is None else dict(zip(multicast.route.ranks, multicast.peers, strict=True))
        for part in parts:
            own = body[at : at + part.body]
            one = Frame(
                frame.link,
                Kind.REPLY,
                0,
                frame.ref,
                0,
                part.rank,
                frame.epoch,
                part.status,
                own,
                buffers[nth : nth + part.buffers],
            )
            at, nth = at + part.body, nth + part.buffers
            if part.status != Status.NOTHING:
                handler(peer, one, None)
        if multicast is not None:
            self._mark(frame.target, [ranks[part.rank].token for part in parts if part.rank in ranks])

    def on_peer_exit(self, peer: Peer) -> None:
        """Send directly to the subtree of a process that is gone; expect no reply from it. Call under the lock."""
        for multicast in list(self.multicasts.values()):
            for index, other in enumerate(multicast.peers):
                if other is peer:
                    self._bypass(multicast, index)
        for number in list(self.multicasts):
            self._mark(number, [peer.token])
        for (root, number), combiner in list(self.combiners.items()):
            combiner.lost(peer.token)
            if root == peer.token:
                self.combiners.pop((root, number), None)
            else:
                self._router.tell(self._router.peer(root), MulticastLost(number, [peer.token]))


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
