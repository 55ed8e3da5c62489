"""Queue of an actor: messages that wait for it, and functions that it is to call."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from monarch_backend._actor.calls.codec import pack_failure, read_prefix
from monarch_backend._actor.errors import MeshFailure
from monarch_backend._actor.execution.reply_handle import Message, ReplyHandle
from monarch_backend._transport.local.frames import Status
from monarch_backend._transport.local.peer import Peer

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime

Job = Callable[[], Any]


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

    def inherit(self, items: list[Message | Job]) -> None:
        """Put the messages of a former actor first."""
        self.extendleft(item for item in reversed(items) if isinstance(item, tuple))

    def cancel(self, peer: Peer, ref: int) -> bool:
        """Remove the message of a call that its caller has cancelled. Return False if it does not wait any more."""
        for item in list(self):
            if isinstance(item, tuple) and item[0] is peer and item[1].ref == ref:
                try:
                    self.remove(item)
                except ValueError:
                    return False  # it has just started
                self._program.router.processed(peer, item[1])
                ReplyHandle(self._program, item, None).settle()
                return True
        return False

    def refuse_all(self, failure: MeshFailure) -> None:
        for item in self.taken():
            if isinstance(item, tuple):
                self._refuse(item, failure)

    def _refuse(self, message: Message, failure: MeshFailure) -> None:
        peer, frame, _ = message
        self._program.router.processed(peer, frame)
        called, _ = read_prefix(frame.prefix)
        answer = ReplyHandle(self._program, message, called.port)
        if answer.wanted:
            body = pack_failure(failure)
            self._program.without_waiting(lambda: answer(Status.DEAD, body))
