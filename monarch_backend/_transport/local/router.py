"""Messages between processes: in order, at most once, bounded, to one or down a tree to many.

Stands on Links (frames between two processes, in order) and adds what the promises of docs/design.md ask for: a place
in the sender's order for every message, so that what came down the tree and what came straight are put in order again
and nothing is taken twice; a window for each pair, so that queues are bounded; and what happens to all that when a
process dies. Knows neither actors nor meshes, reads no clock and starts no thread: the simulator runs this very code.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from monarch_backend._transport.local import frames
from monarch_backend._transport.local.broadcast_tree import (
    Multicast,
    ReplyAggregator,
    children,
    count_below,
    descendants,
)
from monarch_backend._transport.local.buffers import Assembly, cut, own, own_all, size_of
from monarch_backend._transport.local.event_loop import release
from monarch_backend._transport.local.frames import (
    CastArrived,
    CastLost,
    Frame,
    FrameError,
    Kind,
    LookupReply,
    LookupRequest,
    Route,
    Status,
)
from monarch_backend._transport.local.links import (
    FIRST_REMOTE_LINK,
    LINK_PENDING,
    MOST_IN_ONE,
    Links,
    Receiver,
    epoch_of,
)
from monarch_backend._transport.local.peer import CreditWaiter, Peer, PeerGoneError
from monarch_backend._transport.network.envelope import host_of

log = logging.getLogger("monarch_backend")

SLOW_SEND_REPORT_S = 10.0
"""Seconds after which a sender that waits for its receiver says so."""

CREDIT_WINDOW = 1024
"""Places for messages from one process to another, under way or waiting to be processed; then the sender waits."""

CREDIT_RESERVE = 16
"""Of these, as many as other threads may take between a look at what is left and the message that follows."""

BYTES_PER_CREDIT = 1 << 20
"""Bytes after which a message takes one more place: what waits is bounded to a GiB. The last one may go beyond it."""

TREE_FANOUT = 8
"""Processes that one process of a tree passes a message on to."""

MAX_DIRECT_RECEIVERS = 64
"""Receivers up to which a message goes to each of them straight. Waking 64 processes takes one process a third of a
millisecond, while a tree doubles what all of them together have to do (docs/design.md has the measurement)."""

MAX_REFUSALS = 7
"""Times that a process which refuses is asked for; each time after twice as long, 2.5 s altogether."""

SHARED_COPY_MIN_BYTES = 32 << 10
"""Bytes from which a message goes straight to all: they read one copy in shared memory, which no tree can better."""


_NOTHING = frames.encode(frames.Setting(frames.KNOCK, None))


def places_of(size: int) -> int:
    """Places that a message of so many bytes takes: its sender's reckoning is its receiver's."""
    return 1 + size // BYTES_PER_CREDIT


class _FullMemory:
    """A sender that waits until receivers let go of shared memory, which they do without a word.

    ``whole``: it is in the middle of a message, and can't be interrupted.
    """

    def __init__(self, router: Router, to: Sequence[Peer], whole: bool = False) -> None:
        self._router, self._to, self._whole = router, to, whole
        self._report: Any = None

    def wait(self) -> None:
        """A moment; the first one is said, and so is a long time."""
        if self._report is None:
            why = self._why()
            self._router.on_full(why)
            self._report = self._router.report(why, "who does not read holds up others")
        self._router._wait(CreditWaiter(), 0.001, self._whole)

    def _why(self) -> str:
        router = self._router
        unread = [str(peer) for link, peer in list(router._by_link.items()) if router.links.unread(link) > 0]
        more = f" and {len(unread) - 3} others" if len(unread) > 3 else ""
        behind = f"what {', '.join(unread[:3])}{more} did not read" if unread else "what others keep"
        to = str(self._to[0]) if len(self._to) == 1 else f"{len(self._to)} processes"
        return f"no room in shared memory for a message to {to}: {behind} fills it: waiting"

    def close(self) -> None:
        """It waits no more."""
        if self._report is not None:
            self._report.cancel()


Handler = Callable[[Peer, Frame, ReplyAggregator | None], None]


class Router:
    """This process among the others. ``handlers`` take frames by kind; ``control`` takes control messages by type.

    Handlers run on whichever thread reads, one at a time for what comes from outside, and on the sender's thread for
    what a process sends to itself. They must not wait.
    """

    def __init__(self, links: Links, wait: Callable[[CreditWaiter, float | None, bool], bool]) -> None:
        self.links = links
        self.token = links.token
        self.epoch = epoch_of(links.token)
        self.lock = threading.RLock()
        self.me = Peer(links.token, CREDIT_WINDOW)
        self.peers: dict[str, Peer] = {links.token: self.me}
        self.handlers: dict[int, Handler] = {}
        self.control: dict[type, Callable[[Peer, Any, Frame], None]] = {
            CastArrived: self._cast_arrived,
            CastLost: self._cast_lost,
            LookupRequest: self._where,
            LookupReply: self._there,
        }
        self.on_gone: Callable[[Peer], None] = lambda _: None
        self.on_met: Callable[[Peer], None] = lambda _: None
        self.on_asked: Callable[[Peer, str], None] = lambda _peer, _token: None
        self.on_wait: Callable[[Peer, int, int, str], None] = lambda _peer, _kind, _target, _why: None
        self.on_full: Callable[[str], None] = lambda _why: None
        self.combiners: dict[tuple[str, int], ReplyAggregator] = {}
        self.before_host_gone: Callable[[str], None] = lambda _: None
        self._told = {
            Kind.MET: self._met,
            Kind.GONE: self._ended,
            Kind.REFUSED: self._refused,
            Kind.HOST_GONE: self._host_gone,
        }
        self._wait = wait
        self._by_link: dict[int, Peer] = {}
        self._casts: dict[int, Multicast] = {}
        self._ids = itertools.count(1)
        self._stuck: deque[tuple[int, Callable[[], bool]]] = deque()  # what found no room in shared memory
        self._whole: dict[tuple[int, int], Assembly] = {}  # by link and the sender's number of it

    # ---- who there is

    def peer(self, token: str, owner: Peer | None = None) -> Peer:
        """The process with this token; ``owner`` is asked where it is if it can't be reached."""
        peer = self.peers.get(token)
        if peer is None:
            with self.lock:
                peer = self.peers.setdefault(token, Peer(token, CREDIT_WINDOW))
        if peer.owner is None and owner is not None and owner is not peer:
            peer.owner = owner
        return peer

    def expect(self, token: str, label: str | Callable[[], str]) -> Peer:
        """A process that this one has started: it will connect; until then its messages are kept here."""
        peer = self.peer(token)
        peer.expected, peer.label = True, label
        return peer

    def never_came(self, peer: Peer, how: str) -> None:
        """An expected process has ended, with or without having connected."""
        if peer.gone is None:
            peer.gone = how
            self._bury(peer)

    def forget(self, token: str) -> None:
        """Nobody will ask for this process any more, which is gone."""
        peer = self.peers.get(token)
        if peer is not None and peer.gone is not None:
            self.peers.pop(token, None)

    def open(self, link: int) -> bool:
        """True if frames can still be sent on this link."""
        peer = self._by_link.get(link)
        return peer is not None and peer.gone is None

    # ---- sending

    def send(
        self, peer: Peer, kind: int, target: int, ref: int, rank: int, prefix: bytes, body: Any, buffers: Any = None
    ) -> None:
        """A message in its place after the earlier ones to this process. Waits while the window is full.

        Raises PeerGoneError if the process is known to be gone: then nothing was sent.
        """
        size = len(body) if buffers is None and type(body) is bytes else size_of(body, buffers)
        places = places_of(size)
        with self.lock:
            if peer.credit > 0 and peer.link >= 0 and not peer.backlog and peer.gone is None and size <= MOST_IN_ONE:
                peer.sent = seq = peer.sent + 1  # first: a signal's handler may send to it, too
                try:
                    sent = self.links.send(peer.link, kind, target, ref, seq, rank, peer.epoch, prefix, body, buffers)
                except BaseException:
                    self._fill(peer, seq)
                    raise
                if sent:
                    peer.credit -= places
                    return
                self._unclaim(peer, seq)
        self._send_slowly(peer, kind, target, ref, rank, prefix, body, buffers)

    def _send_slowly(
        self, peer: Peer, kind: int, target: int, ref: int, rank: int, prefix: bytes, body: Any, buffers: Any
    ) -> None:
        here, size = peer is self.me, size_of(body, buffers)
        large = size > MOST_IN_ONE
        with contextlib.closing(_FullMemory(self, [peer])) as full:
            while True:
                self.wait_for_credit(peer, kind, target)
                with self.lock:
                    if peer.credit <= 0:
                        continue
                    reached = here or self._reach(peer)
                    peer.sent = seq = peer.sent + 1
                    sent = True
                    if reached and not here and not large:
                        try:
                            sent = self.links.send(
                                peer.link, kind, target, ref, seq, rank, peer.epoch, prefix, body, buffers
                            )
                        except BaseException:
                            self._fill(peer, seq)
                            raise
                    if sent:
                        peer.credit -= places_of(size)
                        if not reached:
                            self._put_off(peer, kind, target, ref, seq, rank, prefix, body, buffers)
                        break
                    self._unclaim(peer, seq)
                full.wait()
        if here:
            frame = Frame(-1, kind, target, ref, 0, rank, self.epoch, prefix, own(body), own_all(buffers))
            self._deliver_here(kind, frame)
        elif reached and large:  # it has its place: what others send meanwhile comes after it
            self._send_parts(peer, kind, target, ref, seq, rank, prefix, body, buffers)

    def _unclaim(self, peer: Peer, seq: int) -> None:
        """Nothing was sent with this number; under the lock."""
        if peer.sent == seq:
            peer.sent = seq - 1
        else:  # whoever has interrupted this has the next one
            self._fill(peer, seq)

    def _fill(self, peer: Peer, seq: int) -> None:
        """Perhaps nothing was sent with this number, and what follows would wait for it for ever. Under the lock."""
        self._emit(peer, Kind.CONTROL, 0, 0, seq, 0, _NOTHING, b"", None)

    def _deliver_here(self, kind: int, frame: Frame) -> None:
        """To this very process: on the sender's thread, so whoever reads may have to look up."""
        self.handlers[kind](self.me, frame, None)
        self.wake()

    def _put_off(
        self, peer: Peer, kind: int, target: int, ref: int, seq: int, rank: int, prefix: bytes, body: Any, buffers: Any
    ) -> None:
        """Until its receiver is there; under the lock. The caller's memory is its own again when this returns."""
        if peer.gone is not None:
            return
        body, buffers = own(body), own_all(buffers)
        peer.backlog.append(lambda: self._emit(peer, kind, target, ref, seq, rank, prefix, body, buffers))

    @staticmethod
    def has_room(peer: Peer) -> bool:
        """Whether a message to it would leave at once, also if others that are under way leave before."""
        return peer.credit > CREDIT_RESERVE or peer.gone is not None

    def wait_for_credit(self, peer: Peer, kind: int, target: int) -> None:
        """Until it may be sent one more message. Raises PeerGoneError if it is gone."""
        if peer.gone is not None:
            raise PeerGoneError.of(peer)
        if peer.credit > 0:
            return
        limit = f"{CREDIT_WINDOW} messages to {peer}, or {CREDIT_WINDOW * BYTES_PER_CREDIT >> 20} MiB"
        why = f"{limit}, are not processed yet: waiting"
        self.on_wait(peer, kind, target, why)
        report: Any = self.report(why, "the receiver is busy, or nobody reads")
        try:
            while True:
                room = self._room(peer)  # first: what changes after the looks below is told to those who wait for it
                if peer.gone is not None:
                    raise PeerGoneError.of(peer)
                if peer.credit > 0:
                    return
                self._wait(room, None, False)
        finally:
            report.cancel()

    def _room(self, peer: Peer) -> CreditWaiter:
        """What all who wait for this process wait for: with one for each, only the last would hear of it."""
        new = CreditWaiter()
        with self.lock:
            room = peer.room = peer.room or new  # no call here: a signal's handler may send to it, too
        return room

    def report(self, why: str, guess: str) -> Any:
        """Somebody begins to wait, and says so if it takes long; cancel it when that is over."""
        return self.later(
            SLOW_SEND_REPORT_S, lambda: log.warning("%s since %.0f s; %s", why, SLOW_SEND_REPORT_S, guess)
        )

    def tell(self, peer: Peer, message: Any, body: Any = b"", buffers: Any = None) -> None:
        """A control message, in order with the messages to this process. Never waits; nothing if it is gone."""
        prefix = frames.encode(message)
        if peer is self.me:
            frame = Frame(-1, Kind.CONTROL, 0, 0, 0, 0, self.epoch, prefix, own(body), own_all(buffers))
            self._controlled(peer, frame, None)
            self.wake()
            return
        with self.lock:
            if peer.gone is not None:
                return
            self._queue(peer, Kind.CONTROL, 0, 0, prefix, body, buffers)

    def push(
        self, peer: Peer, kind: int, target: int, rank: int, prefix: bytes, body: Any, buffers: Any = None
    ) -> None:
        """As `send`, beyond the window if need be. Never waits; nothing if it is gone."""
        with self.lock:
            if peer.gone is not None:
                return
            self._queue(peer, kind, target, rank, prefix, body, buffers)
            peer.credit -= places_of(size_of(body, buffers))

    def _queue(self, peer: Peer, kind: int, target: int, rank: int, prefix: bytes, body: Any, buffers: Any) -> None:
        """The next of the messages to it, at once; under the lock."""
        reached = self._reach(peer)  # which may raise: no number is lost with that
        peer.sent = seq = peer.sent + 1
        put = self._emit if reached else self._put_off
        put(peer, kind, target, 0, seq, rank, prefix, body, buffers)

    def reply(self, peer: Peer, ref: int, rank: int, status: bytes, body: Any, buffers: Any = None) -> None:
        """An answer to a call: not numbered, since the call's number says which. Waits only for shared memory."""
        if peer is self.me:
            frame = Frame(-1, Kind.REPLY, 0, ref, 0, rank, self.epoch, status, own(body), own_all(buffers))
            self._deliver_here(Kind.REPLY, frame)
            return
        large = size_of(body, buffers) > MOST_IN_ONE
        full: _FullMemory | None = None
        try:
            while True:
                with self.lock:
                    if peer.gone is not None:
                        return
                    if not self._reach(peer):
                        self._put_off(peer, Kind.REPLY, 0, ref, 0, rank, status, body, buffers)
                        return
                    if large:
                        break
                    if self.links.send(peer.link, Kind.REPLY, 0, ref, 0, rank, peer.epoch, status, body, buffers):
                        return
                full = full or _FullMemory(self, [peer], whole=True)
                full.wait()
        finally:
            if full is not None:
                full.close()
        self._send_parts(peer, Kind.REPLY, 0, ref, 0, rank, status, body, buffers)

    def processed(self, peer: Peer, frame: Frame) -> None:
        """This message of this peer has left the queue that it waited in."""
        body, buffers = frame.body, frame.buffers
        places = places_of(len(body) if not buffers else size_of(body, buffers))
        if peer is self.me:
            self._refill(peer, places)
            return
        peer.done += places
        if peer.done >= CREDIT_WINDOW // 16:  # often enough that nearly the whole window can be used
            with self.lock:
                count, peer.done = peer.done, 0
                if count and peer.gone is None and self._reach(peer):
                    self.links.send(peer.link, Kind.CREDIT, count, 0, 0, 0, peer.epoch, b"", b"", None)

    def send_or_keep(
        self,
        link: int,
        kind: int,
        target: int,
        ref: int,
        prefix: bytes,
        body: Any,
        buffers: Sequence[Any] | None,
        rank: int = 0,
    ) -> None:
        """An unnumbered frame that must not wait: it goes when there is room."""
        peer = self._by_link.get(link)
        if peer is None or peer.gone is not None:
            return
        if not self.links.send(link, kind, target, ref, 0, rank, peer.epoch, prefix, body, buffers):
            body, buffers = own(body), own_all(buffers)

            def send() -> bool:
                return peer.gone is not None or self.links.send(
                    link, kind, target, ref, 0, rank, peer.epoch, prefix, body, buffers
                )

            self.keep(send, link)

    # ---- sending to many

    def cast(
        self,
        to: Sequence[tuple[Peer, int]],
        kind: int,
        target: int,
        ref: int,
        prefix: bytes,
        body: Any,
        buffers: Any = None,
        combine: bool = False,
    ) -> None:
        """A message to each (process, rank). Waits as `send`; processes that are gone are left out.

        With ``combine`` the replies come up the tree together, as REPLIES.
        """
        alive = [(peer, rank) for peer, rank in to if peer.gone is None]
        if not alive:
            return
        if (
            len(alive) == 1
            or buffers is not None
            or self.goes_straight(body, None)
            or len(alive) <= MAX_DIRECT_RECEIVERS
            or any(
                not 0 <= peer.link < FIRST_REMOTE_LINK for peer, _ in alive
            )  # gateways send one copy to each host as it is
        ):
            self._cast_straight(alive, kind, target, ref, prefix, body, buffers)
        else:
            self._cast_down(alive, kind, target, ref, prefix, body, combine)

    @staticmethod
    def goes_straight(body: Any, buffers: Any) -> bool:
        """It is too large for the tree."""
        return size_of(body, buffers) > SHARED_COPY_MIN_BYTES

    def _cast_straight(
        self, to: Sequence[tuple[Peer, int]], kind: int, target: int, ref: int, prefix: bytes, body: Any, buffers: Any
    ) -> None:
        size = size_of(body, buffers)
        with contextlib.closing(_FullMemory(self, [peer for peer, _ in to])) as full:
            while True:
                self._credit_of_all(to, kind, target)
                with self.lock:
                    if self._lacks_credit(to):
                        continue
                    linked = [
                        (peer, rank)
                        for peer, rank in to
                        if peer is not self.me and size <= MOST_IN_ONE and self._reach(peer)
                    ]
                    if not linked or self._cast_linked(linked, size, kind, target, ref, prefix, body, buffers):
                        break
                full.wait()
        done = {id(peer) for peer, _ in linked}
        for peer, rank in to:
            if id(peer) not in done and peer.gone is None:
                self._send_slowly(peer, kind, target, ref, rank, prefix, body, buffers)

    def _cast_linked(
        self, to: Sequence[tuple[Peer, int]], size: int, kind: int, target: int, ref: int, prefix: bytes, body: Any,
        buffers: Any,
    ) -> bool:  # fmt: skip
        """To those that can be reached now; False if there is no room. Under the lock."""
        receivers = []
        for peer, rank in to:
            peer.sent = seq = peer.sent + 1
            receivers.append((peer.link, seq, rank, peer.epoch))
        try:
            sent = self.links.cast(receivers, kind, target, ref, prefix, body, buffers)
        except BaseException:
            for (peer, _), receiver in zip(to, receivers, strict=True):
                self._fill(peer, receiver[1])
            raise
        for (peer, _), receiver in zip(to, receivers, strict=True):
            if sent:
                peer.credit -= places_of(size)
            else:
                self._unclaim(peer, receiver[1])
        return sent

    def _credit_of_all(self, to: Sequence[tuple[Peer, int]], kind: int, target: int) -> None:
        for peer, _ in to:
            if peer.credit <= 0:
                try:
                    self.wait_for_credit(peer, kind, target)
                except PeerGoneError:
                    continue  # whoever asked hears of it in its own way

    def _lacks_credit(self, to: Sequence[tuple[Peer, int]]) -> bool:
        """Another thread has taken what there was; under the lock."""
        return any(peer.credit <= 0 and peer.gone is None for peer, _ in to)

    def _cast_down(
        self, to: Sequence[tuple[Peer, int]], kind: int, target: int, ref: int, prefix: bytes, body: Any, combine: bool
    ) -> None:
        while True:
            self._credit_of_all(to, kind, target)
            with self.lock:
                if not self._lacks_credit(to):
                    return self._begin_cast(to, kind, target, ref, prefix, body, combine)

    def _begin_cast(
        self, to: Sequence[tuple[Peer, int]], kind: int, target: int, ref: int, prefix: bytes, body: Any, combine: bool
    ) -> None:
        """To the first ones of the tree; under the lock."""
        hops, places = [], places_of(size_of(body, None))
        for peer, rank in to:
            peer.sent = seq = peer.sent + 1
            peer.credit -= places
            hops.append(frames.RelayHop(peer.token, seq, rank))
        number = next(self._ids)
        peers = [peer for peer, _ in to]
        cast = Multicast(number, kind, target, ref, prefix, own(body), peers, hops, set(range(len(hops))))
        self._casts[number] = cast
        tokens = "".join(hop.token for hop in hops)
        seqs, ranks = [hop.seq for hop in hops], [hop.rank for hop in hops]
        route = frames.encode(Route(number, self.token, kind, target, ref, combine, prefix, tokens, seqs, ranks))
        first = [(peers[i].link, 0, i, peers[i].epoch) for i in range(min(TREE_FANOUT, len(hops)))]
        self._cast_each(first, route, cast.body, None)
        for index, peer in enumerate(peers):
            if peer.gone is not None:
                self._recast(cast, index)
        self._mark(number, ())  # those of them that have ended while this was waited with

    def _passed_down(self, peer: Peer, frame: Frame, _: ReplyAggregator | None) -> None:
        route = frames.decode_route(frame.prefix)
        if frame.rank >= len(route) or route.hop(frame.rank).token != self.token:
            raise FrameError("a cast for somebody else")
        root = self.peer(route.root)
        below = children(frame.rank, len(route), TREE_FANOUT)
        combiner = None
        with self.lock:
            if route.combine and root.gone is None:  # else nobody waits for replies
                counts = {route.hop(i).token: count_below(i, len(route), TREE_FANOUT) for i in below}
                combiner = self.combiners[route.root, route.cast] = ReplyAggregator(
                    self, frame.link, root, route, counts
                )
            self._pass_on(route, root, frame, below)
            if not route.combine:
                self.tell(root, CastArrived(route.cast, [self.token]))
        hop = route.hop(frame.rank)
        mine = Frame(
            frame.link,
            route.kind,
            route.target,
            route.ref,
            hop.seq,
            hop.rank,
            self.epoch,
            route.prefix,
            frame.body,
            frame.buffers,
        )
        if not self._in_order(root, mine, combiner) and combiner is not None:
            combiner.own(hop.rank, Status.NOTHING, b"", None)  # it came straight before, and is answered straight

    def _pass_on(self, route: Route, root: Peer, frame: Frame, below: Sequence[int]) -> None:
        to = []
        for index in below:
            token = route.hop(index).token
            child = self.peer(token, root)
            if child.gone is None and self._reach(child):
                to.append((child.link, 0, index, child.epoch))
            else:
                combiner = self.combiners.get((route.root, route.cast))
                if combiner is not None:
                    combiner.lost(token)
                self.tell(root, CastLost(route.cast, [token]))
        if to:
            self._cast_each(to, frame.prefix, frame.body, frame.buffers)

    def _cast_each(self, to: list[Receiver], route: bytes, body: Any, buffers: Any) -> None:
        """To these places of a tree: together, or, where one of them leaves no room, each when there is room for it."""
        if not self.links.cast(to, Kind.CAST, 0, 0, route, body, buffers):
            for link, _, index, _ in to:
                self.send_or_keep(link, Kind.CAST, 0, 0, route, body, buffers, rank=index)

    def _recast(self, cast: Multicast, index: int) -> None:
        """The process at this place of the tree is lost to it: those below it get the message straight."""
        for below in descendants(index, len(cast.hops), TREE_FANOUT):
            if below in cast.missing and cast.peers[below].gone is None:
                self._emit_hop(cast, below)

    def _emit_hop(self, cast: Multicast, index: int) -> None:
        hop, peer = cast.hops[index], cast.peers[index]
        cast.missing.discard(index)  # nothing is lost on the straight way
        if not cast.missing:
            self._casts.pop(cast.number, None)
        self._emit(peer, cast.kind, cast.target, cast.ref, hop.seq, hop.rank, cast.prefix, cast.body, None)

    def _cast_arrived(self, peer: Peer, message: CastArrived, _: Frame) -> None:
        self._mark(message.cast, message.tokens)

    def _mark(self, number: int, tokens: Sequence[str]) -> None:
        with self.lock:
            cast = self._casts.get(number)
            if cast is None:
                return
            gone = set(tokens)
            cast.missing -= {
                i for i, hop in enumerate(cast.hops) if hop.token in gone or cast.peers[i].gone is not None
            }
            if not cast.missing:
                del self._casts[number]

    def _cast_lost(self, peer: Peer, message: CastLost, _: Frame) -> None:
        with self.lock:
            cast = self._casts.get(message.cast)
            if cast is None:
                return
            for token in message.tokens:
                index = next((i for i, hop in enumerate(cast.hops) if hop.token == token), None)
                if index is not None:
                    if index in cast.missing and cast.peers[index].gone is None:
                        self._emit_hop(cast, index)
                    self._recast(cast, index)

    def _combined(self, peer: Peer, frame: Frame, _: ReplyAggregator | None) -> None:
        """Replies of many: pass them up, or, at the root, hand them out one by one."""
        replies = frames.decode_replies(frame.prefix)
        parts, buffers = replies.parts, frame.buffers or []
        if sum(part.body for part in parts) != len(frame.body) or sum(part.buffers for part in parts) != len(buffers):
            raise FrameError("combined replies whose lengths do not add up")
        if replies.root != self.token:
            combiner = self.combiners.get((replies.root, frame.target))
            if combiner is not None:
                combiner.below(peer.token, replies, frame.body, buffers)
            else:  # nobody waits for them here any more
                link = self.link_to(self.peer(replies.root))
                self.send_or_keep(link, Kind.REPLIES, frame.target, frame.ref, frame.prefix, frame.body, buffers)
            return
        cast = self._casts.get(frame.target)
        at, nth, body = 0, 0, memoryview(frame.body)
        handler = self.handlers[Kind.REPLY]
        ranks = {hop.rank: hop.token for hop in cast.hops} if cast is not None else {}
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
        if cast is not None:
            self._mark(frame.target, [ranks[part.rank] for part in parts if part.rank in ranks])

    # ---- receiving

    def handle(self, events: Sequence[Any]) -> None:
        """What the links have brought, in its order."""
        interrupt: BaseException | None = None  # a signal handler's of the user's: the rest is not lost for that
        for event in events:
            try:
                self._handle(event)
            except FrameError as error:
                log.error(
                    "process %s: %s; it is not listened to any more",
                    self._by_link.get(event[0]),
                    error,
                )
                self.links.drop(event[0])
            except Exception:
                log.exception("a message could not be handled; the program goes on without it")
            except BaseException as error:
                interrupt = error
        if self._stuck:
            self._unstick()
        if interrupt is not None:
            raise interrupt

    def _handle(self, event: Any) -> None:
        kind = event[1]
        if kind < 0:
            self._told[kind](event)
            return
        peer = self._by_link[event[0]]
        if event[6] != self.epoch:
            log.warning("a message of epoch %d for one of epoch %d is dropped", event[6], self.epoch)
            return
        frame = Frame._make(event)
        if frame.seq == 0:
            self._take(peer, frame, None)
        else:
            self._in_order(peer, frame, None)

    def _in_order(self, peer: Peer, frame: Frame, combiner: ReplyAggregator | None) -> bool:
        """Take it when its turn has come. False if that is over: it came before, or it will never come."""
        if frame.seq != peer.received + 1:
            if frame.seq <= peer.received or frame.seq in peer.held or peer.gone is not None:
                return False  # what is missing of a dead sender's will not come any more
            peer.held[frame.seq] = (frame, combiner)
            return True
        peer.received = frame.seq
        self._take(peer, frame, combiner)
        while peer.held and (following := peer.held.pop(peer.received + 1, None)) is not None:
            peer.received += 1
            self._take(peer, *following)
        return True

    def _take(self, peer: Peer, frame: Frame, combiner: ReplyAggregator | None) -> None:
        kind = frame.kind
        if kind in (Kind.CALL, Kind.REPLY, Kind.PORT):
            self.handlers[kind](peer, frame, combiner)
        elif kind == Kind.CONTROL:
            self._controlled(peer, frame, combiner)
        elif kind == Kind.CAST:
            self._passed_down(peer, frame, None)
        elif kind == Kind.REPLIES:
            self._combined(peer, frame, None)
        elif kind == Kind.CREDIT:
            self._refill(peer, frame.target)
        elif kind == Kind.PART:
            self._take_part(peer, frame)
        else:
            raise FrameError(f"a frame of kind {kind}, which this version does not know")

    def _controlled(self, peer: Peer, frame: Frame, _: ReplyAggregator | None) -> None:
        message = frames.decode_control(frame.prefix)
        handler = self.control.get(type(message))
        if handler is None:
            raise FrameError(f"{type(message).__name__} is for another kind of process")
        handler(peer, message, frame)

    def _refill(self, peer: Peer, count: int) -> None:
        with self.lock:  # others take of it meanwhile
            peer.credit += count
        self._free(peer)

    def _free(self, peer: Peer) -> None:
        with self.lock:
            room, peer.room = peer.room, None
        if room is not None:
            room.ready = True
            release(room)
            self.wake()

    def wake(self) -> None:
        """Somebody who waits may go on; the pump's wake, where there is one."""

    def later(self, seconds: float, call: Callable[[], None]) -> object:
        """Call it on the thread that reads; the pump's later, where there is one."""
        raise NotImplementedError

    def keep(self, send: Callable[[], bool], link: int = -1) -> None:
        """Try it again until it returns True: receivers let go of shared memory without a word.

        What is for the same link keeps its order; who does not read holds up nobody else.
        """
        with self.lock:
            self._stuck.append((link, send))
            if len(self._stuck) == 1:
                self.later(0.001, self._retry)

    def _retry(self) -> None:
        with self.lock:
            self._unstick()
            if self._stuck:
                self.later(0.001, self._retry)

    def _unstick(self) -> None:
        with self.lock:
            full: set[int] = set()
            for _ in range(len(self._stuck)):
                link, send = self._stuck.popleft()
                if link in full or not send():
                    self._stuck.append((link, send))
                    if link >= 0:
                        full.add(link)

    @property
    def stuck(self) -> bool:
        """True while something waits for room in shared memory."""
        return bool(self._stuck)

    # ---- processes that come and go

    def _reach(self, peer: Peer) -> bool:
        """True if frames can be sent to it now; under the lock."""
        if peer.backlog or peer.gone is not None:
            return False
        if peer.link >= 0:
            return True
        if peer.expected:
            return False
        link = self.links.connect(peer.token)
        if link >= 0:
            self._bind(peer, link)
            return True
        if link != LINK_PENDING:
            self._ask_for(peer)
        return False

    def _ask_for(self, peer: Peer) -> None:
        """It can't be reached from here: who has started it knows why. Under the lock."""
        if peer.owner is not None and peer.owner.gone is None:
            if not peer.asking:
                peer.asking = True
                try:
                    self.tell(peer.owner, LookupRequest(peer.token))
                except (RuntimeError, OSError):  # no descriptors, no shared memory: later perhaps
                    peer.asking = False
                    self._ask_again(peer)
                    return
            if peer.owner.gone is None:
                return
        peer.gone = "it can't be reached, and who started it is gone too" if peer.owner else "it can't be reached"
        self._bury(peer)

    def ask_owner(self, peer: Peer) -> None:
        """It has died: has it a successor? Once there is a link to its owner, it tells of the next ones by itself."""
        owner = peer.owner
        if owner is not None and owner is not self.me and owner.gone is None:
            with contextlib.suppress(RuntimeError, OSError):  # no room for a link: it is as if we had never asked
                self.tell(owner, LookupRequest(peer.token))

    def link_to(self, peer: Peer) -> int:
        """The link to this process, or -1."""
        with self.lock:
            return peer.link if self._reach(peer) else -1

    def _bind(self, peer: Peer, link: int) -> None:
        self._by_link[link] = peer
        if peer.link < 0:
            peer.link = link

    def _met(self, event: Any) -> None:
        link, _, token, pid = event
        peer = self.peer(token)
        peer.pid = pid
        with self.lock:
            self._bind(peer, link)
            backlog, peer.backlog = peer.backlog, deque()
            for emit in backlog:
                emit()
            self._answer_where(peer)
        self.on_met(peer)

    def _refused(self, event: Any) -> None:
        """It was called, did not answer, and now never will; if it is said why, nobody needs to be asked."""
        peer = self.peer(event[2])
        with self.lock:
            if peer.link >= 0 or peer.gone is not None:
                return
            if len(event) > 3:
                self.never_came(peer, event[3])
            elif peer.believed:  # its owner has just said that it is there
                peer.believed = False
                self._ask_again(peer)
            else:
                self._ask_for(peer)

    def _ended(self, event: Any) -> None:
        link, _, how, peace = event
        for key in [key for key in self._whole if key[0] == link]:
            del self._whole[key]
        peer = self._by_link.pop(link, None)
        if peer is not None and peer.gone is None:
            peer.gone, peer.peace = how or "it ended", peace
            self._bury(peer)

    def _host_gone(self, event: Any) -> None:
        """Mark all processes of the host as gone before the first call to one of them fails."""
        _, _, host, how = event
        self.before_host_gone(host)
        lost = [peer for peer in list(self.peers.values()) if host_of(peer.token) == host and peer.gone is None]
        for peer in lost:
            peer.gone = how
        for peer in lost:
            self._bury(peer)

    def _bury(self, peer: Peer) -> None:
        with self.lock:
            peer.backlog.clear()
            peer.held.clear()
            self._answer_where(peer)
            self._free(peer)
            for other in list(self.peers.values()):
                if other.owner is peer and other.link < 0 and other.gone is None and other.backlog:
                    self.never_came(other, f"who started it is gone: {peer.gone}")
            for cast in list(self._casts.values()):
                for index, other in enumerate(cast.peers):
                    if other is peer:
                        self._recast(cast, index)
            for number in list(self._casts):
                self._mark(number, [peer.token])
            for (root, number), combiner in list(self.combiners.items()):
                combiner.lost(peer.token)
                if root == peer.token:
                    self.combiners.pop((root, number), None)
                else:
                    self.tell(self.peer(root), CastLost(number, [peer.token]))
        self.on_gone(peer)

    def _where(self, peer: Peer, message: LookupRequest, _: Frame) -> None:
        asked = self.peers.get(message.token)
        self.on_asked(peer, message.token)
        if asked is not None and (asked.gone is not None or asked.link >= 0):
            self.tell(peer, LookupReply(message.token, asked.gone))
        elif asked is None or not asked.expected:
            self.tell(peer, LookupReply(message.token, "its mesh has ended"))
        else:
            asked.asked_by.append(peer)

    def _answer_where(self, asked: Peer) -> None:
        askers, asked.asked_by = asked.asked_by, []
        for peer in askers:
            self.tell(peer, LookupReply(asked.token, asked.gone))

    def _there(self, peer: Peer, message: LookupReply, _: Frame) -> None:
        asked = self.peer(message.token)
        asked.asking = False
        if asked.gone is not None:
            return
        if message.gone is not None:
            self.never_came(asked, message.gone)
            return
        with self.lock:
            if asked.link < 0:
                try:
                    link = self.links.connect(asked.token)
                except (RuntimeError, OSError):
                    link = -1
                if link < 0:
                    if link != LINK_PENDING:
                        self._ask_again(asked)
                    asked.believed = link == LINK_PENDING
                    return
                self._bind(asked, link)
            backlog, asked.backlog = asked.backlog, deque()
            for emit in backlog:
                emit()

    def _ask_again(self, peer: Peer) -> None:
        """Its owner thinks that it is up, yet it refuses: most likely it has just died, and its owner hears of it soon.

        Under the lock.
        """
        if peer.refusals >= MAX_REFUSALS:
            self.never_came(peer, "it can't be reached from here")
            return
        peer.refusals += 1

        def ask() -> None:
            with self.lock:
                if peer.gone is None and peer.link < 0:
                    self._ask_for(peer)

        self.later(0.01 * 2**peer.refusals, ask)

    # ---- frames that come late or in pieces

    def _emit(
        self, peer: Peer, kind: int, target: int, ref: int, seq: int, rank: int, prefix: bytes, body: Any, buffers: Any
    ) -> None:
        """A frame whose number is given already; under the lock, and without waiting."""
        if peer.gone is not None:
            return
        if peer.link < 0 and not self._reach(peer):
            self._put_off(peer, kind, target, ref, seq, rank, prefix, body, buffers)
            return

        def send() -> bool:
            return self.links.send(peer.link, kind, target, ref, seq, rank, peer.epoch, prefix, body, buffers)

        large = size_of(body, buffers) > MOST_IN_ONE
        if not large and send():
            return
        body, buffers = own(body), own_all(buffers)
        if large:
            self._send_parts(peer, kind, target, ref, seq, rank, prefix, body, buffers, keep=True)
        else:
            self.keep(lambda: peer.gone is not None or send(), peer.link)

    def _send_parts(
        self, peer: Peer, kind: int, target: int, ref: int, seq: int, rank: int, prefix: bytes, body: Any,
        buffers: Any, keep: bool = False,
    ) -> None:  # fmt: skip
        """In pieces, each when there is room: waits for it, without the lock, or with ``keep`` owns the payload."""
        sizes, pieces = cut(body, buffers, MOST_IN_ONE // 4)
        count, whole = len(pieces), next(self._ids)
        head = frames.encode([kind, target, ref, seq, rank, prefix, sizes, count])

        def send() -> bool:
            while pieces and peer.gone is None:
                number = count - len(pieces)
                first = head if number == 0 else b""
                of_buffer, piece = pieces[0]
                what = (b"", [piece]) if of_buffer else ([piece], None)
                if not self.links.send(peer.link, Kind.PART, number, whole, 0, rank, peer.epoch, first, *what):
                    return False
                pieces.popleft()
            return True

        if keep:
            if not send():
                self.keep(send, peer.link)
        else:
            with contextlib.closing(_FullMemory(self, [peer], whole=True)) as full:
                while not send():
                    full.wait()

    def _take_part(self, peer: Peer, frame: Frame) -> None:
        key = frame.link, frame.ref
        whole = self._whole.get(key)
        if frame.target == 0:
            whole = self._whole[key] = Assembly(frame.prefix)
        piece = frame.buffers[0] if frame.buffers else frame.body
        if whole is None or not whole.add(frame.target, piece):
            raise FrameError("a piece of no frame")
        if whole.complete:
            del self._whole[key]
            self._handle(whole.frame(frame.link, frame.epoch))
