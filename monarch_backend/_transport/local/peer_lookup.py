"""Lookup of processes that can't be reached: their owner is asked whether they are up, and how they ended."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any

from monarch_backend._transport.local import tuning
from monarch_backend._transport.local.frames import Frame, LookupReply, LookupRequest
from monarch_backend._transport.local.links import LINK_PENDING
from monarch_backend._transport.local.peer import Peer

if TYPE_CHECKING:
    from monarch_backend._transport.local.router import Router


class PeerLookup:
    """Sends and answers `LookupRequest`. The state of each lookup is in the fields of `Peer`."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def request(self, peer: Peer) -> None:
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
        self._router.table.on_peer_gone(peer)

    def ask_owner(self, peer: Peer) -> None:
        """Ask the owner for the successor of a dead process. The owner reports later successors on its own."""
        owner = peer.owner
        if owner is not None and owner is not self._router.me and owner.gone is None:
            with contextlib.suppress(RuntimeError, OSError):  # no space for a link: the request is optional
                self._router.tell(owner, LookupRequest(peer.token))

    def on_refused(self, event: Any) -> None:
        """Handle a connection that was refused. If the event has a reason, the process is gone."""
        peer = self._router.peer(event[2])
        with self._router.lock:
            if peer.link >= 0 or peer.gone is not None:
                return
            if len(event) > 3:
                self._router.never_came(peer, event[3])
            elif peer.believed:  # its owner has just said that it is up
                peer.believed = False
                self._request_again(peer)
            else:
                self.request(peer)

    def on_request(self, peer: Peer, message: LookupRequest, _: Frame) -> None:
        """Reply now if the process is known to be up or gone; otherwise later, in `answer`."""
        asked = self._router.peers.get(message.token)
        self._router.on_asked(peer, message.token)
        if asked is not None and (asked.gone is not None or asked.link >= 0):
            self._router.tell(peer, LookupReply(message.token, asked.gone))
        elif asked is None or not asked.expected:
            self._router.tell(peer, LookupReply(message.token, "its mesh has ended"))
        else:
            asked.asked_by.append(peer)

    def answer(self, asked: Peer) -> None:
        askers, asked.asked_by = asked.asked_by, []
        for peer in askers:
            self._router.tell(peer, LookupReply(asked.token, asked.gone))

    def on_reply(self, _peer: Peer, message: LookupReply, _: Frame) -> None:
        """Connect to a process that is up; mark one that is gone."""
        asked = self._router.peer(message.token)
        asked.asking = False
        if asked.gone is not None:
            return
        if message.gone is not None:
            self._router.never_came(asked, message.gone)
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
                self._router.table.bind(asked, link)
            backlog, asked.backlog = asked.backlog, deque()
            for emit in backlog:
                emit()

    def _request_again(self, peer: Peer) -> None:
        """Ask again after a delay. The process has most likely just died, and its owner does not know it yet.

        Call under the lock.
        """
        if peer.refusals >= tuning.MAX_REFUSALS:
            self._router.never_came(peer, "it can't be reached from here")
            return
        peer.refusals += 1

        def ask() -> None:
            with self._router.lock:
                if peer.gone is None and peer.link < 0:
                    self.request(peer)

        self._router.later(0.01 * 2**peer.refusals, ask)
