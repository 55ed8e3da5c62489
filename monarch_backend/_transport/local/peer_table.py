"""Peers of a process: which are known, which are connected, and their end.

The owner of a process that can't be reached is asked whether it is up, and how it ended.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch_backend._transport.local import tuning
from monarch_backend._transport.local.frames import Frame, LookupReply, LookupRequest
from monarch_backend._transport.local.links import LINK_PENDING
from monarch_backend._transport.local.peer import Peer
from monarch_backend._transport.tokens import host_of

if TYPE_CHECKING:
    from monarch_backend._transport.local.router import Router


class PeerTable:
    def __init__(self, router: Router, me: Peer) -> None:
        self._router = router
        self.peers: dict[str, Peer] = {me.token: me}
        self.by_link: dict[int, Peer] = {}

    def peer(self, token: str, owner: Peer | None = None) -> Peer:
        """Return the process with this token. Lookups of a process that can't be reached are sent to ``owner``."""
        peer = self.peers.get(token)
        if peer is None:
            with self._router.lock:
                peer = self.peers.setdefault(token, Peer(token, tuning.CREDIT_WINDOW))
        if peer.owner is None and owner is not None and owner is not peer:
            peer.owner = owner
        return peer

    def expect(self, token: str, label: str | Callable[[], str]) -> Peer:
        """Return a process that this one has started. Messages to it are queued here until it connects."""
        peer = self.peer(token)
        peer.expected, peer.label = True, label
        return peer

    def never_came(self, peer: Peer, how: str) -> None:
        """Mark an expected process as gone, whether or not it has connected."""
        if peer.gone is None:
            peer.gone = how
            self.on_peer_gone(peer)

    def forget(self, token: str) -> None:
        """Delete the state of a process that is gone. Call it when no further message can name the process."""
        peer = self.peers.get(token)
        if peer is not None and peer.gone is not None:
            self.peers.pop(token, None)

    def open(self, link: int) -> bool:
        """Whether frames can still be sent on this link."""
        peer = self.by_link.get(link)
        return peer is not None and peer.gone is None

    def reach(self, peer: Peer) -> bool:
        """Whether frames can be sent to this peer now; connects to it if necessary. Call under the lock."""
        if peer.backlog or peer.gone is not None:
            return False
        if peer.link >= 0:
            return True
        if peer.expected:
            return False
        link = self._router.links.connect(peer.token)
        if link >= 0:
            self.bind(peer, link)
            return True
        if link != LINK_PENDING:
            self._look_up(peer)
        return False

    def link_to(self, peer: Peer) -> int:
        with self._router.lock:
            return peer.link if self.reach(peer) else -1

    def bind(self, peer: Peer, link: int) -> None:
        self.by_link[link] = peer
        if peer.link < 0:
            peer.link = link

    def on_met(self, event: Any) -> None:
        link, _, token, pid = event
        peer = self.peer(token)
        peer.pid = pid
        with self._router.lock:
            self.bind(peer, link)
            backlog, peer.backlog = peer.backlog, deque()
            for emit in backlog:
                emit()
            self._answer(peer)
        self._router.on_met(peer)

    def on_ended(self, event: Any) -> None:
        link, _, how, orderly = event
        self._router.fragments.drop_link(link)
        peer = self.by_link.pop(link, None)
        if peer is not None and peer.gone is None:
            peer.gone, peer.orderly = how or "it ended", orderly
            self.on_peer_gone(peer)

    def on_host_gone(self, event: Any) -> None:
        """Mark all processes of the host as gone before the first call to one of them fails."""
        _, _, host, how = event
        self._router.before_host_gone(host)
        lost = [peer for peer in list(self.peers.values()) if host_of(peer.token) == host and peer.gone is None]
        for peer in lost:
            peer.gone = how
        for peer in lost:
            self.on_peer_gone(peer)

    def on_peer_gone(self, peer: Peer) -> None:
        """Release what waits for a process that is gone, and report its end."""
        with self._router.lock:
            peer.backlog.clear()
            peer.held.clear()
            self._answer(peer)
            self._router.flow.release(peer)
            for other in list(self.peers.values()):
                if other.owner is peer and other.link < 0 and other.gone is None and other.backlog:
                    self.never_came(other, f"its owner is gone: {peer.gone}")
            self._router.tree.on_peer_exit(peer)
        self._router.on_gone(peer)

    # ---- lookups: the state of each is in the fields of `Peer`

    def _look_up(self, peer: Peer) -> None:
        """Ask the owner of a process that can't be reached. Call under the lock."""
        if peer.owner is not None and peer.owner.gone is None:
            if not peer.asking:
                peer.asking = True
                try:
                    self._router.tell(peer.owner, LookupRequest(peer.token))
                except (RuntimeError, OSError):  # no descriptors or shared memory at the moment
                    peer.asking = False
                    self._request_again(peer)
                    return
            if peer.owner.gone is None:
                return
        peer.gone = "it can't be reached, and its owner is gone too" if peer.owner else "it can't be reached"
        self.on_peer_gone(peer)

    def ask_owner(self, peer: Peer) -> None:
        """Ask the owner for the successor of a dead process. The owner reports later successors on its own."""
        owner = peer.owner
        if owner is not None and owner is not self._router.me and owner.gone is None:
            with contextlib.suppress(RuntimeError, OSError):  # no space for a link: the request is optional
                self._router.tell(owner, LookupRequest(peer.token))

    def on_refused(self, event: Any) -> None:
        """Handle a connection that was refused. If the event has a reason, the process is gone."""
        peer = self.peer(event[2])
        with self._router.lock:
            if peer.link >= 0 or peer.gone is not None:
                return
            if len(event) > 3:
                self.never_came(peer, event[3])
            elif peer.believed:  # its owner has just said that it is up
                peer.believed = False
                self._request_again(peer)
            else:
                self._look_up(peer)

    def on_request(self, peer: Peer, message: LookupRequest, _: Frame) -> None:
        """Reply now if the process is known to be up or gone; otherwise later, in `_answer`."""
        asked = self.peers.get(message.token)
        self._router.on_asked(peer, message.token)
        if asked is not None and (asked.gone is not None or asked.link >= 0):
            self._router.tell(peer, LookupReply(message.token, asked.gone))
        elif asked is None or not asked.expected:
            self._router.tell(peer, LookupReply(message.token, "its mesh has ended"))
        else:
            asked.asked_by.append(peer)

    def _answer(self, asked: Peer) -> None:
        """Reply to the peers that wait for the state of this process. Call under the router's lock."""
        askers, asked.asked_by = asked.asked_by, []
        for peer in askers:
            self._router.tell(peer, LookupReply(asked.token, asked.gone))

    def on_reply(self, _peer: Peer, message: LookupReply, _: Frame) -> None:
        asked = self.peer(message.token)
        asked.asking = False
        if asked.gone is not None:
            return
        if message.gone is not None:
            self.never_came(asked, message.gone)
            return
        with self._router.lock:
            if asked.link < 0:
                try:
                    link = self._router.links.connect(asked.token)
                except (RuntimeError, OSError):
                    link = -1
                if link < 0:
                    if link != LINK_PENDING:
                        self._request_again(asked)
                    asked.believed = link == LINK_PENDING
                    return
                self.bind(asked, link)
            backlog, asked.backlog = asked.backlog, deque()
            for emit in backlog:
                emit()

    def _request_again(self, peer: Peer) -> None:
        """Ask later, under the lock: the process has most likely just died, which its owner does not know yet."""
        if peer.refusals >= tuning.MAX_REFUSALS:
            self.never_came(peer, "it can't be reached from here")
            return
        peer.refusals += 1

        def ask() -> None:
            with self._router.lock:
                if peer.gone is None and peer.link < 0:
                    self._look_up(peer)

        self._router.later(0.01 * 2**peer.refusals, ask)
