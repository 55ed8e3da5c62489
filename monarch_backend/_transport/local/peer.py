"""State that the router keeps for each other process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from monarch_backend._core.errors import MonarchError, public
from monarch_backend._transport.local.frames import Frame
from monarch_backend._transport.tokens import epoch_of

if TYPE_CHECKING:
    from monarch_backend._transport.local.tree_multicast import ReplyAggregator


def short(token: str) -> str:
    """Return the digits of a token for messages. The first eight are the host's and do not identify the process."""
    return token[8:16]


@public("monarch_backend.actor")
class PeerGoneError(MonarchError, ConnectionError):
    """The process that a message was for has ended. The text names it and its end.

    `Port.send` raises it. Calls of actors raise `SupervisionError` in this case.

    >>> from monarch_backend.actor import PeerGoneError
    >>> issubclass(PeerGoneError, ConnectionError)
    True
    """

    @classmethod
    def of(cls, peer: Peer) -> PeerGoneError:
        """Return the error for this process."""
        return cls(f"process {peer.pid or short(peer.token)} is gone: {peer.gone}")


class CreditWaiter:
    """Condition on which senders wait for credit."""

    __slots__ = ("ready", "wait_lock")

    def __init__(self) -> None:
        self.ready = False
        self.wait_lock: threading.Lock | None = None


class Peer:
    __slots__ = (
        "asked_by",
        "asking",
        "backlog",
        "believed",
        "credit",
        "credit_waiter",
        "done",
        "epoch",
        "expected",
        "gone",
        "held",
        "label",
        "link",
        "orderly",
        "owner",
        "pid",
        "received",
        "refusals",
        "sent",
        "token",
    )

    def __init__(self, token: str, credit: int) -> None:
        self.token = token
        self.epoch = epoch_of(token)
        self.link = -1
        self.pid = 0
        self.label: str | Callable[[], str] = ""  # for messages: "gpus 3 of trainers"
        self.sent = 0  # the last sequence number
        self.credit = credit  # left in the window
        self.received = 0  # the last sequence number that was delivered
        self.done = 0  # credit of processed messages, not returned yet
        self.held: dict[int, tuple[Frame, ReplyAggregator | None]] = {}
        self.backlog: deque[Callable[[], None]] = deque()
        self.asked_by: list[Peer] = []  # waiting for a LookupReply about it
        self.asking = False  # a LookupRequest to its owner is under way
        self.credit_waiter: CreditWaiter | None = None
        self.expected = False  # it will connect to this process
        self.believed = False  # its owner says that it is up, and a connection to it is pending
        self.refusals = 0  # failed connections, although its owner says that it is up
        self.owner: Peer | None = None  # knows whether it is up
        self.gone: str | None = None  # how it ended
        self.orderly = False  # it ended in an orderly way

    def __str__(self) -> str:
        who = (self.label() if callable(self.label) else self.label) or short(self.token)
        return f"{who} (pid {self.pid})" if self.pid else who
