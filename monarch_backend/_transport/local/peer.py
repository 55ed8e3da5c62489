"""Another process, as this one knows it: no more than what is remembered of it. What to do about it is the router's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from monarch_backend._core.errors import MonarchError, public
from monarch_backend._transport.local.frames import Frame
from monarch_backend._transport.local.links import epoch_of

if TYPE_CHECKING:
    from monarch_backend._transport.local.broadcast_tree import ReplyAggregator


def short(token: str) -> str:
    """For people, who know nothing else of it: its host's digits are those of many."""
    return token[8:16]


@public("monarch_backend.actor")
class PeerGoneError(MonarchError, ConnectionError):
    """The process is not there any more; the text says which one, and how it ended."""

    @classmethod
    def of(cls, peer: Peer) -> PeerGoneError:
        """For this process."""
        return cls(f"process {peer.pid or short(peer.token)} is gone: {peer.gone}")


class CreditWaiter:
    """What a sender waits for."""

    __slots__ = ("gate", "ready")

    def __init__(self) -> None:
        self.ready = False
        self.gate: threading.Lock | None = None


class Peer:
    """Another process, as this one knows it."""

    __slots__ = (
        "asked_by",
        "asking",
        "backlog",
        "believed",
        "credit",
        "done",
        "epoch",
        "expected",
        "gone",
        "held",
        "label",
        "link",
        "owner",
        "peace",
        "pid",
        "received",
        "refusals",
        "room",
        "sent",
        "token",
    )

    def __init__(self, token: str, credit: int) -> None:
        self.token = token
        self.epoch = epoch_of(token)
        self.link = -1
        self.pid = 0
        self.label: str | Callable[[], str] = ""  # for people: "gpus 3 of trainers", made when somebody reads it
        self.sent = 0  # the last sequence number
        self.credit = credit  # places left in the window
        self.received = 0  # the last sequence number that was delivered
        self.done = 0  # processed messages of which the sender does not know yet
        self.held: dict[int, tuple[Frame, ReplyAggregator | None]] = {}
        self.backlog: deque[Callable[[], None]] = deque()
        self.asked_by: list[Peer] = []  # who wants to know when it is there
        self.asking = False  # its owner has been asked for it, and has not answered
        self.room: CreditWaiter | None = None
        self.expected = False  # it will come to us
        self.believed = False  # its owner says that it is there, and it is being called
        self.refusals = 0  # how often it could not be reached though its owner thought so
        self.owner: Peer | None = None  # who knows whether it is there yet
        self.gone: str | None = None
        self.peace = False  # it went as it was told to

    def __str__(self) -> str:
        who = (self.label() if callable(self.label) else self.label) or short(self.token)
        return f"{who} (pid {self.pid})" if self.pid else who
