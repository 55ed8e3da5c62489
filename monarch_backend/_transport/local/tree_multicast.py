"""Multicast down a tree of processes: relaying, the root's record of receivers that have it, and replies.

The tree's shape and the aggregation of replies are in broadcast_tree.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from monarch_backend._transport.local import frames, tuning
from monarch_backend._transport.local.broadcast_tree import (
    Multicast,
    ReplyAggregator,
    children,
    count_below,
    descendants,
)
from monarch_backend._transport.local.buffers import own, size_of
from monarch_backend._transport.local.flow_control import places_of
from monarch_backend._transport.local.frames import (
    Frame,
    FrameError,
    Kind,
    MulticastArrived,
    MulticastLost,
    Route,
    Status,
)
from monarch_backend._transport.local.links import Receiver
from monarch_backend._transport.local.peer import Peer

if TYPE_CHECKING:
    from monarch_backend._transport.local.router import Router


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
        hops, places = [], places_of(size_of(body, None))
        for peer, rank in to:
            peer.sent = seq = peer.sent + 1
            peer.credit -= places
            hops.append(frames.RelayHop(peer.token, seq, rank))
        number = next(self._router.ids)
        peers = [peer for peer, _ in to]
        multicast = Multicast(number, kind, target, ref, prefix, own(body), peers, hops, set(range(len(hops))))
        self.multicasts[number] = multicast
        tokens = "".join(hop.token for hop in hops)
        seqs, ranks = [hop.seq for hop in hops], [hop.rank for hop in hops]
        route = frames.encode(
            Route(number, self._router.token, kind, target, ref, combine, prefix, tokens, seqs, ranks)
        )
        first = [(peers[i].link, 0, i, peers[i].epoch) for i in range(min(tuning.TREE_FANOUT, len(hops)))]
        self._send_each(first, route, multicast.body, None)
        for index, peer in enumerate(peers):
            if peer.gone is not None:
                self._bypass(multicast, index)
        self._mark(number, ())  # peers that have exited before the multicast was recorded

    def receive(self, frame: Frame) -> None:
        """Relay a multicast to the processes below this one, then deliver it here."""
        route = frames.decode_route(frame.prefix)
        if frame.rank >= len(route) or route.hop(frame.rank).token != self._router.token:
            raise FrameError("a multicast for another process")
        root = self._router.peer(route.root)
        below = children(frame.rank, len(route), tuning.TREE_FANOUT)
        combiner = None
        with self._router.lock:
            if route.combine and root.gone is None:
                counts = {route.hop(i).token: count_below(i, len(route), tuning.TREE_FANOUT) for i in below}
                combiner = self.combiners[route.root, route.multicast] = ReplyAggregator(
                    self._router, frame.link, root, route, counts
                )
            self._pass_on(route, root, frame, below)
            if not route.combine:
                self._router.tell(root, MulticastArrived(route.multicast, [self._router.token]))
        hop = route.hop(frame.rank)
        mine = Frame(
            frame.link,
            route.kind,
            route.target,
            route.ref,
            hop.seq,
            hop.rank,
            self._router.epoch,
            route.prefix,
            frame.body,
            frame.buffers,
        )
        if not self._router.in_order(root, mine, combiner) and combiner is not None:
            combiner.own(hop.rank, Status.NOTHING, b"", None)  # a copy came directly, and so does its reply

    def _pass_on(self, route: Route, root: Peer, frame: Frame, below: Sequence[int]) -> None:
        to = []
        for index in below:
            token = route.hop(index).token
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
        for below in descendants(index, len(multicast.hops), tuning.TREE_FANOUT):
            if below in multicast.missing and multicast.peers[below].gone is None:
                self._emit_hop(multicast, below)

    def _emit_hop(self, multicast: Multicast, index: int) -> None:
        hop, peer = multicast.hops[index], multicast.peers[index]
        multicast.missing.discard(index)  # a direct link loses nothing
        if not multicast.missing:
            self.multicasts.pop(multicast.number, None)
        self._router.emit(
            peer,
            multicast.kind,
            multicast.target,
            multicast.ref,
            hop.seq,
            hop.rank,
            multicast.prefix,
            multicast.body,
            None,
        )

    def on_arrived(self, _peer: Peer, message: MulticastArrived, _: Frame) -> None:
        self._mark(message.multicast, message.tokens)

    def _mark(self, number: int, tokens: Sequence[str]) -> None:
        with self._router.lock:
            multicast = self.multicasts.get(number)
            if multicast is None:
                return
            gone = set(tokens)
            multicast.missing -= {
                i for i, hop in enumerate(multicast.hops) if hop.token in gone or multicast.peers[i].gone is not None
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
                index = next((i for i, hop in enumerate(multicast.hops) if hop.token == token), None)
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
        ranks = {hop.rank: hop.token for hop in multicast.hops} if multicast is not None else {}
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
            self._mark(frame.target, [ranks[part.rank] for part in parts if part.rank in ranks])

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
