"""Queue of an actor, of messages and of functions that it is to call, and the replies of the messages."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from monarch_backend._actor.calls.codec import Address, pack_error, pack_failure, read_prefix
from monarch_backend._actor.calls.port import HandedPort, Port, port_at
from monarch_backend._actor.errors import MeshFailure
from monarch_backend._serialization.pickling import SerializationError, dumps
from monarch_backend._transport.local.frames import Frame, Status
from monarch_backend._transport.local.peer import Peer, PeerGoneError
from monarch_backend._transport.local.tree_multicast import ReplyAggregator

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime

Message = tuple[Peer, Frame, ReplyAggregator | None]
"""A received message: its sender, its frame, and the aggregation of its reply."""

Job = Callable[[], Any]


class ReplyHandle:
    __slots__ = ("__weakref__", "_frame", "_peer", "_program", "_sent", "_via", "explicit", "is_due", "port")

    def __init__(self, program: Runtime, message: Message, port: Address | None) -> None:
        self._program = program
        self._peer, self._frame, self._via = message
        self.port = port
        self._sent = False
        self.explicit = False  # the endpoint replies through a port
        self.is_due = True  # neither sent nor passed on

    @property
    def prefix(self) -> bytes:
        """Prefix of the message."""
        return self._frame.prefix

    @property
    def ref(self) -> int:
        """Number of the call, 0 for a message without a reply."""
        return self._frame.ref

    @property
    def wanted(self) -> bool:
        return self._frame.ref != 0 or self.port is not None

    def __call__(self, status: bytes, body: Any, buffers: Any = None) -> None:
        frame, self.is_due = self._frame, False
        if self.port is not None:
            target = port_at(self.port, frame.rank)
            try:
                target._send(status, body, buffers)
            except PeerGoneError:
                return
        elif frame.ref and self._via is not None and not self._sent:
            self._sent = True
            self._via.own(frame.rank, status, body, buffers)
        elif frame.ref:
            self._program.router.reply(self._peer, frame.ref, frame.rank, status, body, buffers)

    def hand_on(self) -> Port[Any]:
        """Return a port for the reply that other processes can use."""
        self.is_due = False
        if self.port is not None:
            return port_at(self.port, self._frame.rank)
        if self._via is not None and not self._sent:
            self._sent = True
            self._via.straight()
        return HandedPort(self._peer.token, self._frame.ref, self._frame.rank)

    def dropped(self) -> None:
        """Send an error, as the endpoint's port was collected. Takes no lock: the garbage collector may call it
        anywhere.
        """
        if self.wanted and self.is_due:
            error = RuntimeError("the endpoint has dropped its port without a reply")
            self._program.call_soon(lambda: self(Status.ERROR, pack_error(error)))

    def lost(self, failure: MeshFailure) -> None:
        """Report the end of the actor, unless the reply was passed on."""
        if self.wanted and self.is_due:
            self(Status.LOST, pack_failure(failure))

    def settle(self) -> None:
        """Finish a reply that is no longer wanted: reply aggregation waits for one from each rank."""
        if self._via is not None and not self._sent:
            self._sent = True
            self._via.own(self._frame.rank, Status.END, b"", None)

    def value(self, value: Any) -> None:
        if not self.wanted:
            return
        try:
            body, buffers = dumps(value)
        except SerializationError as error:
            self(Status.ERROR, pack_error(error))
            return
        self(Status.VALUE, body, buffers)


class MessageQueue(deque[Message | Job]):
    """Waiting messages and functions of one actor, in their order. Any thread may add and take items.

    It is a deque, so that adding and taking an item is no call of a Python function.
    """

    def __init__(self, program: Runtime) -> None:
        super().__init__()
        self._program = program

    def taken(self) -> Iterator[Message | Job]:
        """Take the queued items one by one. Another thread may take items, too."""
        with contextlib.suppress(IndexError):
            while True:
                yield self.popleft()

    def sent_by(self, peer: Peer) -> list[Frame]:
        """Return the waiting messages from a process."""
        return [item[1] for item in list(self) if isinstance(item, tuple) and item[0] is peer]

    def inherit(self, items: list[Message | Job]) -> None:
        """Put the messages of a former actor first."""
        self.extendleft(item for item in reversed(items) if isinstance(item, tuple))

    def cancel(self, peer: Peer, ref: int) -> Message | None:
        """Remove and return the message of a call that its caller has cancelled, None if it does not wait any more."""
        for item in list(self):
            if isinstance(item, tuple) and item[0] is peer and item[1].ref == ref:
                try:
                    self.remove(item)
                except ValueError:
                    return None  # it has just started
                self._program.router.processed(peer, item[1])
                ReplyHandle(self._program, item, None).settle()
                return item
        return None

    def refuse_all(self, failure: MeshFailure) -> Iterator[Message]:
        """Remove all messages, and yield each one once its caller is told of the failure."""
        for item in self.taken():
            if isinstance(item, tuple):
                self._refuse(item, failure)
                yield item

    def _refuse(self, message: Message, failure: MeshFailure) -> None:
        peer, frame, _ = message
        self._program.router.processed(peer, frame)
        called, _ = read_prefix(frame.prefix)
        answer = ReplyHandle(self._program, message, called.port)
        if answer.wanted:
            body = pack_failure(failure)
            self._program.without_waiting(lambda: answer(Status.DEAD, body))
