"""Requests about memory between processes: the address of a server, connection parameters, drops. They travel as
messages.

Requests are rare: they precede the first transfer between two processes, and no transfer sends any. The caller blocks,
so it must not be the thread that reads messages. TOPICS lists the requests and their handlers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from monarch_backend._actor.runtime import Runtime
from monarch_backend._rdma.errors import RDMAError
from monarch_backend._rdma.registrations import Registry
from monarch_backend._transport.local.frames import Setting
from monarch_backend._transport.local.peer import Peer

ASK, ANSWER, DROP = "rdma.ask", "rdma.answer", "rdma.drop"
"""Names of Settings. The actor runtime passes Settings whose names begin with "rdma." to `heard`."""

REPLY_TIMEOUT_S = 20.0
"""Seconds until a request fails. It is long because the peer may be in a long call into C code."""

CHECK_INTERVAL_S = 0.02
"""Seconds between two checks of a waiting thread whether its transfer was cancelled."""

TOPICS: dict[str, Callable[[Runtime, Peer, bytes], bytes]] = {}
"""Handlers of requests by topic. Each module adds its own. They run on a thread that may block."""


class _Question:
    """A request without an answer yet. It is one of the runtime's pending calls."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.ended = threading.Event()
        self.answer: bytes | None = None
        self.error = ""

    def on_gone(self, peer: Peer, failure: Any) -> None:
        if peer is self.peer:
            self.error = str(failure)
            self.ended.set()

    def on_reply(self, frame: Any) -> None:
        """Do nothing: answers arrive as Settings."""

    def wait(self, seconds: float, over: Callable[[], object]) -> bool:
        end = time.monotonic() + seconds
        while not self.ended.wait(CHECK_INTERVAL_S):
            if over() or time.monotonic() > end:
                return False
        return True


def ask(
    owner: Runtime,
    peer: Peer,
    topic: str,
    body: bytes = b"",
    over: Callable[[], object] = lambda: False,
) -> bytes:
    """Send a request to another process and return its answer.

    Raises RDMAError if the answer is an error, if none arrives in time, or once ``over()`` is true.
    """
    if owner.progress.reading:
        raise RDMAError(
            f"{peer} has to be asked for {topic} first, which the thread of a callback can't do, since it reads the "
            "answer: use another thread"
        )
    question = _Question(peer)
    number = next(owner.ids)
    owner.pending[number] = question
    try:
        if peer.gone is not None:  # its end was reported before and is not reported again
            raise RDMAError(f"{peer} is gone: {peer.gone}")
        owner.router.tell(peer, Setting(ASK, (number, topic, body)))
        if not question.wait(REPLY_TIMEOUT_S, over):
            raise RDMAError(f"{peer} was asked for {topic} and has not answered in time: is it stopped, or very busy?")
    finally:
        owner.pending.pop(number, None)
    if question.answer is None:
        raise RDMAError(f"{peer} was asked for {topic}: {question.error}")
    return question.answer


def heard(owner: Runtime, peer: Peer, name: str, value: Any) -> None:
    """Handle a Setting of this package. Runs on a thread that may block."""
    if name == DROP:
        if (registry := owner.extensions.get(Registry)) is not None:
            registry.told_to_drop(tuple(value))
    elif name == ANSWER:
        number, is_answer, said = value
        question = owner.pending.get(number)
        if isinstance(question, _Question) and question.peer is peer:
            question.answer, question.error = (bytes(said), "") if is_answer else (None, str(said))
            question.ended.set()
    elif name == ASK:
        number, topic, body = value
        try:
            answer: tuple[int, bool, Any] = (number, True, TOPICS[topic](owner, peer, bytes(body)))
        except Exception as error:
            answer = (number, False, f"{type(error).__name__}: {error}".encode()[:4096].decode(errors="replace"))
        owner.router.tell(peer, Setting(ANSWER, answer))
