"""Reply of one message: it is sent to the caller, to a port, or by reply aggregation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from monarch_backend._actor.calls.codec import Address, pack_error, pack_failure
from monarch_backend._actor.calls.port import HandedPort, Port, port_at
from monarch_backend._actor.errors import MeshFailure
from monarch_backend._serialization.pickling import SerializationError, dumps
from monarch_backend._transport.local.broadcast_tree import ReplyAggregator
from monarch_backend._transport.local.frames import Frame, Status
from monarch_backend._transport.local.peer import Peer, PeerGoneError

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime

Message = tuple[Peer, Frame, ReplyAggregator | None]
"""A received message: its sender, its frame, and the aggregation of its reply."""


class ReplyHandle:
    __slots__ = ("__weakref__", "_due", "_frame", "_peer", "_program", "_sent", "_via", "explicit", "port")

    def __init__(self, program: Runtime, message: Message, port: Address | None) -> None:
        self._program = program
        self._peer, self._frame, self._via = message
        self.port = port
        self._sent = False
        self.explicit = False  # the endpoint replies through a port
        self._due = True  # neither sent nor passed on

    @property
    def wanted(self) -> bool:
        return self._frame.ref != 0 or self.port is not None

    def __call__(self, status: bytes, body: Any, buffers: Any = None) -> None:
        frame, self._due = self._frame, False
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
        self._due = False
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
        if self.wanted and self._due:
            error = RuntimeError("the endpoint has dropped its port without a reply")
            self._program.call_soon(lambda: self(Status.ERROR, pack_error(error)))

    def lost(self, failure: MeshFailure) -> None:
        """Report the end of the actor, unless the reply was passed on."""
        if self.wanted and self._due:
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
