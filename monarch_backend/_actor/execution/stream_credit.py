"""Credit of the streams that an actor's generators send: how many values each reader still takes."""

from __future__ import annotations

import threading

from monarch_backend._actor.calls.pending_calls import STREAM_WINDOW
from monarch_backend._transport.local.event_loop import release
from monarch_backend._transport.local.frames import MoreCredit
from monarch_backend._transport.local.peer import Peer


class StreamCredit:
    """Number of values that a generator may send to its reader, and of those that it has sent.

    Each number is written by one thread: ``granted`` by the reading thread, ``sent`` by the actor's.
    """

    __slots__ = ("granted", "ready", "sent", "wait_lock")

    def __init__(self) -> None:
        self.granted, self.sent = STREAM_WINDOW, 0
        self.ready = False
        self.wait_lock: threading.Lock | None = None

    def more(self, count: int) -> None:
        """Add credit, after the reader has taken values."""
        self.granted += count
        self.ready = True
        release(self)


class OpenStreams:
    """Credit of each stream that an actor sends. The actor opens and closes streams; the reading thread adds credit."""

    def __init__(self) -> None:
        self._credits: dict[tuple[str, int], StreamCredit] = {}  # by the reader's token and its call

    def open(self, peer: Peer, ref: int, credit: StreamCredit) -> None:
        """Let the reader of a call add to this credit."""
        self._credits[peer.token, ref] = credit

    def close(self, peer: Peer, ref: int) -> None:
        """Forget the stream of a call."""
        self._credits.pop((peer.token, ref), None)

    def more(self, peer: Peer, message: MoreCredit) -> None:
        """Add credit for a generator. Called on the reading thread."""
        credit = self._credits.get((peer.token, message.ref))
        if credit is not None:
            credit.more(message.count)

    def reader_gone(self, peer: Peer) -> None:
        """Let generators for this ended process run to their end. Called on the reading thread."""
        for (token, _), credit in list(self._credits.items()):
            if token == peer.token:
                credit.more(STREAM_WINDOW)
