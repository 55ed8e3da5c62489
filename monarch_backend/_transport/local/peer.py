"""State that the router keeps for each other process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from monarch_backend._core.errors import MonarchError, public
from monarch_backend._transport.local.frames import Frame
from monarch_backend._transport.tokens import epoch_of, identity_of

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


@dataclass(slots=True, eq=False)
class CreditWaiter:
    ready: bool = False
    wait_lock: threading.Lock | None = None
    receiver: Peer | None = None  # returns the credit; None in a wait for something else
    kind: int = 0  # Kind of the messages that wait, 0 if they differ in kind or target
    target: int = 0  # the actor or port at the receiver that gets the messages


@dataclass(slots=True, eq=False, repr=False)
class Peer:
    """State of another process."""

    token: str
    credit: int  # left in the window
    epoch: int = field(init=False)
    identity: int = field(init=False)  # in recorded events
    link: int = -1
    pid: int = 0
    label: str | Callable[[], str] = ""  # for messages: "gpus 3 of trainers"
    sent: int = 0  # the last sequence number
    received: int = 0  # the last sequence number that was delivered
    done: int = 0  # credit of all processed messages
    returned: int = 0  # of it, credit that was returned
    held: dict[int, tuple[Frame, ReplyAggregator | None]] = field(default_factory=dict)
    backlog: deque[Callable[[], None]] = field(default_factory=deque)
    asked_by: list[Peer] = field(default_factory=list)  # waiting for a LookupReply about it
    asking: bool = False  # a LookupRequest to its owner is under way
    credit_waiter: CreditWaiter | None = None
    expected: bool = False  # it will connect to this process
    believed: bool = False  # its owner says that it is up, and a connection to it is pending
    refusals: int = 0  # failed connections, although its owner says that it is up
    owner: Peer | None = None  # knows whether it is up
    gone: str | None = None  # how it ended
    orderly: bool = False  # it ended in an orderly way

    def __post_init__(self) -> None:
        self.epoch = epoch_of(self.token)
        self.identity = identity_of(self.token)

    def __str__(self) -> str:
        who = (self.label() if callable(self.label) else self.label) or short(self.token)
        return f"{who} (pid {self.pid})" if self.pid else who
