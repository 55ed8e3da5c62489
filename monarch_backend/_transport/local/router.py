"""Messages between processes: in order, at most once, bounded, to one or to many.

Links carry frames between two processes in order. The router adds a sequence number to each message. The numbers put
messages from a tree and direct ones in one order, and detect duplicates. The router decides how a message is sent,
delivers messages that arrive, and handles the exit of a process. Its parts are in modules of their own:

- flow_control.py: the window of each pair of processes, which bounds the queues, and sending while memory is full
- fragmentation.py: frames that are larger than one piece
- tree_multicast.py: multicast down a tree of processes, and the replies that come back up
- peer_table.py: the known processes, their links and their end, and processes that can't be reached

The router does not depend on actors or meshes, reads no clock and starts no thread. The simulator runs the same code.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from monarch_backend._transport.local import frames, tuning
from monarch_backend._transport.local.flow_control import FlowControl, RetryQueue, SharedMemoryWait, places_of
from monarch_backend._transport.local.fragmentation import Fragmenter
from monarch_backend._transport.local.frames import (
    CARRIED,
    Frame,
    FrameError,
    Kind,
    LookupReply,
    LookupRequest,
    MulticastArrived,
    MulticastLost,
    own,
    own_all,
    size_of,
)
from monarch_backend._transport.local.links import FIRST_REMOTE_LINK, Links
from monarch_backend._transport.local.peer import CreditWaiter, Peer
from monarch_backend._transport.local.peer_table import PeerTable
from monarch_backend._transport.local.tree_multicast import ReplyAggregator, TreeMulticast
from monarch_backend._transport.tokens import epoch_of

log = logging.getLogger("monarch_backend")

MAX_EARLY_FRAMES = 4096
"""Frames from other hosts that are held before this process is told the gateway of its host."""

_NOTHING = frames.encode(frames.Setting(frames.PING, None))


Handler = Callable[[Peer, Frame, ReplyAggregator | None], None]


class Router:
    """Sends and receives the messages of one process.

    ``handlers`` take frames by kind; ``control`` takes control messages by type. Handlers run one at a time on the
    reading thread. For messages of a process to itself they run on the sender's thread. They must not block.
    """

    def __init__(self, links: Links, wait: Callable[[CreditWaiter, float | None, bool], bool]) -> None:
        self.links = links
        self.token = links.token
        self.epoch = epoch_of(links.token)
        self.lock = threading.RLock()
        self.me = Peer(links.token, tuning.CREDIT_WINDOW)
        self.wait = wait
        self.table = table = PeerTable(self, self.me)
        self.peers, self.by_link = table.peers, table.by_link
        # Called for each message, so without a further call of a function.
        self.peer, self.expect, self.never_came, self.forget = table.peer, table.expect, table.never_came, table.forget
        self.reach, self.link_to = table.reach, table.link_to
        self.ids = itertools.count(1)  # of multicasts and of fragmented frames
        self.flow = FlowControl(self)
        self.has_room, self.processed = self.flow.has_room, self.flow.processed  # called for each message
        self.tree = TreeMulticast(self)
        self.ask_owner = table.ask_owner
        self.fragments = Fragmenter(self)
        self._retries = RetryQueue(self)
        self.keep = self._retries.add
        self.handlers: dict[int, Handler] = {}
        self.control: dict[type, Callable[[Peer, Any, Frame], None]] = {
            MulticastArrived: self.tree.on_arrived,
            MulticastLost: self.tree.on_lost,
            LookupRequest: table.on_request,
            LookupReply: table.on_reply,
        }
        self.on_gone: Callable[[Peer], None] = lambda _: None
        self.on_met: Callable[[Peer], None] = lambda _: None
        self.on_asked: Callable[[Peer, str], None] = lambda _peer, _token: None
        self.on_wait: Callable[[Peer, int, int, str], None] = lambda _peer, _kind, _target, _why: None
        self.on_full: Callable[[str], None] = lambda _why: None
        self.has_notices = False  # `wait` logs a wait for credit that lasts
        self.before_host_gone: Callable[[str], None] = lambda _: None
        self._early_frames: list[Any] | None = []  # None once the gateway is known
        self._told = {
            Kind.MET: table.on_met,
            Kind.GONE: table.on_ended,
            Kind.REFUSED: table.on_refused,
            Kind.HOST_GONE: table.on_host_gone,
        }

    # ---- sending

    def send(
        self, peer: Peer, kind: int, target: int, ref: int, rank: int, prefix: bytes, body: Any, buffers: Any = None
    ) -> None:
        """Send a message in order; wait for credit. Raises PeerGoneError, and sends nothing, if the peer is gone."""
        size = len(body) if buffers is None and type(body) is bytes else size_of(body, buffers)
        places = places_of(size)
        with self.lock:
            fits = size <= tuning.MOST_IN_ONE
            if peer.credit > 0 and peer.link >= 0 and not peer.backlog and peer.gone is None and fits:
                peer.sent = seq = peer.sent + 1  # first: a signal handler may send to this peer, too
                try:
                    sent = self.links.send(peer.link, kind, target, ref, seq, rank, peer.epoch, prefix, body, buffers)
                except BaseException:
                    self._fill(peer, seq)
                    raise
                if sent:
                    peer.credit -= places
                    return
                self._release_seq(peer, seq)
        self._send_slowly(peer, kind, target, ref, rank, prefix, body, buffers)

    def _send_slowly(
        self, peer: Peer, kind: int, target: int, ref: int, rank: int, prefix: bytes, body: Any, buffers: Any
    ) -> None:
        here, size = peer is self.me, size_of(body, buffers)
        large = size > tuning.MOST_IN_ONE
        with contextlib.closing(SharedMemoryWait(self, [peer])) as full:
            while True:
                self.flow.wait_for_credit(peer, kind, target)
                with self.lock:
                    if peer.credit <= 0:
                        continue
                    reached = here or self.reach(peer)
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
                            self._enqueue_backlog(peer, kind, target, ref, seq, rank, prefix, body, buffers)
                        break
                    self._release_seq(peer, seq)
                full.wait()
        if here:
            frame = Frame(-1, kind, target, ref, 0, rank, self.epoch, prefix, own(body), own_all(buffers))
            self._deliver_here(kind, frame)
        elif reached and large:  # outside the lock: the sequence number keeps the order
            self.fragments.send(peer, kind, target, ref, seq, rank, prefix, body, buffers)

    def _release_seq(self, peer: Peer, seq: int) -> None:
        """Take back a sequence number with which nothing was sent. Call under the lock."""
        if peer.sent == seq:
            peer.sent = seq - 1
        else:  # a signal handler has taken the next number
            self._fill(peer, seq)

    def _fill(self, peer: Peer, seq: int) -> None:
        """Send an empty message with this number, under the lock: the receiver would hold back all later ones."""
        self.emit(peer, Kind.CONTROL, 0, 0, seq, 0, _NOTHING, b"", None)

    def _deliver_here(self, kind: int, frame: Frame) -> None:
        """Deliver to this process on the sender's thread, then wake the reading thread to check its condition."""
        self.handlers[kind](self.me, frame, None)
        self.wake()

    def _enqueue_backlog(
        self, peer: Peer, kind: int, target: int, ref: int, seq: int, rank: int, prefix: bytes, body: Any, buffers: Any
    ) -> None:
        """Queue a copy of a message until its receiver is connected. Call under the lock."""
        if peer.gone is not None:
            return
        body, buffers = own(body), own_all(buffers)
        peer.backlog.append(lambda: self.emit(peer, kind, target, ref, seq, rank, prefix, body, buffers))

    def tell(self, peer: Peer, message: Any, body: Any = b"", buffers: Any = None) -> None:
        """Send a control message, in order with the messages to this process, unless it is gone. Never waits."""
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
        """Send without waiting for credit, which may become negative, unless the process is gone."""
        with self.lock:
            if peer.gone is not None:
                return
            self._queue(peer, kind, target, rank, prefix, body, buffers)
            peer.credit -= places_of(size_of(body, buffers))

    def _queue(self, peer: Peer, kind: int, target: int, rank: int, prefix: bytes, body: Any, buffers: Any) -> None:
        """Send or queue a message without waiting. Call under the lock."""
        reached = self.reach(peer)  # before a number is taken, as it may raise
        peer.sent = seq = peer.sent + 1
        put = self.emit if reached else self._enqueue_backlog
        put(peer, kind, target, 0, seq, rank, prefix, body, buffers)

    def reply(self, peer: Peer, ref: int, rank: int, status: bytes, body: Any, buffers: Any = None) -> None:
        """Send a reply, without a sequence number: ``ref`` names the call. Waits only for shared memory."""
        if peer is self.me:
            frame = Frame(-1, Kind.REPLY, 0, ref, 0, rank, self.epoch, status, own(body), own_all(buffers))
            self._deliver_here(Kind.REPLY, frame)
            return
        large = size_of(body, buffers) > tuning.MOST_IN_ONE
        full: SharedMemoryWait | None = None
        try:
            while True:
                with self.lock:
                    if peer.gone is not None:
                        return
                    if not self.reach(peer):
                        self._enqueue_backlog(peer, Kind.REPLY, 0, ref, 0, rank, status, body, buffers)
                        return
                    if large:
                        break
                    if self.links.send(peer.link, Kind.REPLY, 0, ref, 0, rank, peer.epoch, status, body, buffers):
                        return
                full = full or SharedMemoryWait(self, [peer], whole=True)
                full.wait()
        finally:
            if full is not None:
                full.close()
        self.fragments.send(peer, Kind.REPLY, 0, ref, 0, rank, status, body, buffers)

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
        """Send a frame without a sequence number, now or when there is space. Never waits."""
        peer = self.by_link.get(link)
        if peer is None or peer.gone is not None:
            return
        if not self.links.send(link, kind, target, ref, 0, rank, peer.epoch, prefix, body, buffers):
            body, buffers = own(body), own_all(buffers)

            def send() -> bool:
                return peer.gone is not None or self.links.send(
                    link, kind, target, ref, 0, rank, peer.epoch, prefix, body, buffers
                )

            self.keep(send, link)

    # ---- multicast

    def multicast(
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
        """Send to each (process, rank) that is alive; waits for credit of all. ``combine``: replies are aggregated."""
        alive = [(peer, rank) for peer, rank in to if peer.gone is None]
        if not alive:
            return
        if (
            len(alive) == 1
            or buffers is not None
            or self.is_sent_directly(body, None)
            or len(alive) <= tuning.MAX_DIRECT_RECEIVERS
            or any(
                not 0 <= peer.link < FIRST_REMOTE_LINK for peer, _ in alive
            )  # gateways send one copy to each host anyway
        ):
            self._multicast_direct(alive, kind, target, ref, prefix, body, buffers)
        else:
            self.tree.send(alive, kind, target, ref, prefix, body, combine)

    @staticmethod
    def is_sent_directly(body: Any, buffers: Any) -> bool:
        """Whether a message is too large for the tree."""
        return size_of(body, buffers) > tuning.SHARED_COPY_MIN_BYTES

    def _multicast_direct(
        self, to: Sequence[tuple[Peer, int]], kind: int, target: int, ref: int, prefix: bytes, body: Any, buffers: Any
    ) -> None:
        size = size_of(body, buffers)
        with contextlib.closing(SharedMemoryWait(self, [peer for peer, _ in to])) as full:
            while True:
                self.flow.wait_for_all(to, kind, target)
                with self.lock:
                    if self.flow.lacks_credit(to):
                        continue
                    linked = [
                        (peer, rank)
                        for peer, rank in to
                        if peer is not self.me and size <= tuning.MOST_IN_ONE and self.reach(peer)
                    ]
                    if not linked or self._multicast_linked(linked, size, kind, target, ref, prefix, body, buffers):
                        break
                full.wait()
        done = {id(peer) for peer, _ in linked}
        for peer, rank in to:
            if id(peer) not in done and peer.gone is None:
                self._send_slowly(peer, kind, target, ref, rank, prefix, body, buffers)

    def _multicast_linked(
        self, to: Sequence[tuple[Peer, int]], size: int, kind: int, target: int, ref: int, prefix: bytes, body: Any,
        buffers: Any,
    ) -> bool:  # fmt: skip
        """Send to connected peers. Return False if there is no space. Call under the lock."""
        receivers = []
        for peer, rank in to:
            peer.sent = seq = peer.sent + 1
            receivers.append((peer.link, seq, rank, peer.epoch))
        try:
            sent = self.links.multicast(receivers, kind, target, ref, prefix, body, buffers)
        except BaseException:
            for (peer, _), receiver in zip(to, receivers, strict=True):
                self._fill(peer, receiver[1])
            raise
        for (peer, _), receiver in zip(to, receivers, strict=True):
            if sent:
                peer.credit -= places_of(size)
            else:
                self._release_seq(peer, receiver[1])
        return sent

    # ---- receiving

    def handle(self, events: Sequence[Any]) -> None:
        interrupt: BaseException | None = None  # raised by a user's signal handler: raised again after the last event
        for event in events:
            try:
                self._handle(event)
            except FrameError as error:
                log.error(
                    "process %s: %s; its link is closed",
                    self.by_link.get(event[0]),
                    error,
                )
                self.links.drop(event[0])
            except Exception:
                log.exception("a message could not be handled; the program continues without it")
            except BaseException as error:
                interrupt = error
        if self._retries.waiting:
            self._retries.run()
        if interrupt is not None:
            raise interrupt

    def _handle(self, event: Any) -> None:
        kind = event[1]
        if not 0 < kind < CARRIED:
            if kind < 0:
                self._told[kind](event)
            else:
                self._hold_early_frame(event)
            return
        peer = self.by_link[event[0]]
        if event[6] != self.epoch:
            log.warning("a message of epoch %d for one of epoch %d is dropped", event[6], self.epoch)
            return
        frame = Frame._make(event)
        if frame.seq == 0:
            self._take(peer, frame, None)
        else:
            self.in_order(peer, frame, None)

    def _hold_early_frame(self, event: Any) -> None:
        """Hold a frame of this host's gateway, which may connect to this process before it connects to the gateway."""
        early = self._early_frames
        if early is None or event[1] < CARRIED:
            raise FrameError(f"a frame of unknown kind {event[1]}; install the same monarch_backend everywhere")
        if len(early) >= MAX_EARLY_FRAMES:
            raise FrameError(f"{len(early)} frames from other hosts, before this process was told its gateway")
        early.append(event)

    def take_early_frames(self, gateway: str) -> tuple[set[int], list[Any]]:
        """Return the links to the gateway, and its frames that were held. Call it once, on the reading thread.

        Later frames of a gateway's kind are errors, and so are the frames of other processes that were held.
        """
        links = {link for link, peer in self.by_link.items() if peer.token == gateway}
        early, self._early_frames = self._early_frames or [], None
        for event in early:
            if event[0] in self.by_link and event[0] not in links:
                log.error("process %s: a frame of a gateway's kind; its link is closed", self.by_link[event[0]])
                self.links.drop(event[0])
        return links, [event for event in early if event[0] in links]

    def in_order(self, peer: Peer, frame: Frame, combiner: ReplyAggregator | None) -> bool:
        """Handle a frame, or hold it until those before it have come. False: a duplicate, or its sender is gone."""
        if frame.seq != peer.received + 1:
            if frame.seq <= peer.received or frame.seq in peer.held or peer.gone is not None:
                return False
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
        elif kind == Kind.MULTICAST:
            self.tree.receive(frame)
        elif kind == Kind.REPLIES:
            self.tree.receive_replies(peer, frame)
        elif kind == Kind.CREDIT:
            self.flow.refill(peer, frame.target)
        elif kind == Kind.PART:
            whole = self.fragments.receive(frame)
            if whole is not None:
                self._handle(whole)
        else:
            raise FrameError(f"a frame of unknown kind {kind}; install the same monarch_backend everywhere")

    def _controlled(self, peer: Peer, frame: Frame, _: ReplyAggregator | None) -> None:
        message = frames.decode_control(frame.prefix)
        handler = self.control.get(type(message))
        if handler is None:
            raise FrameError(f"{type(message).__name__} is for another kind of process")
        handler(peer, message, frame)

    @property
    def stuck(self) -> bool:
        """Whether a send waits for space in shared memory."""
        return bool(self._retries.waiting)

    def wake(self) -> None:
        """Wake the reading thread. Replaced by the wake of the progress loop, if there is one."""

    def later(self, seconds: float, call: Callable[[], None]) -> object:
        """Schedule a call on the reading thread. Replaced by the progress loop's method, if there is one."""
        raise NotImplementedError

    # ---- frames that are sent later

    def emit(
        self, peer: Peer, kind: int, target: int, ref: int, seq: int, rank: int, prefix: bytes, body: Any, buffers: Any
    ) -> None:
        """Send a frame that has its sequence number, now or when there is space. Call under the lock."""
        if peer.gone is not None:
            return
        if peer.link < 0 and not self.reach(peer):
            self._enqueue_backlog(peer, kind, target, ref, seq, rank, prefix, body, buffers)
            return

        def send() -> bool:
            return self.links.send(peer.link, kind, target, ref, seq, rank, peer.epoch, prefix, body, buffers)

        large = size_of(body, buffers) > tuning.MOST_IN_ONE
        if not large and send():
            return
        body, buffers = own(body), own_all(buffers)
        if large:
            self.fragments.send(peer, kind, target, ref, seq, rank, prefix, body, buffers, keep=True)
        else:
            self.keep(lambda: peer.gone is not None or send(), peer.link)
