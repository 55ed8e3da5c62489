"""Questions between processes about memory: where a server listens, how to connect; what was dropped. By messages.

They are few, and come before the first transfer between two processes: nothing is asked for a transfer. Whoever asks
waits, so not on the thread that reads messages. What is asked, and what is answered, stands in TOPICS.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from monarch_backend._actor.runtime import Runtime
from monarch_backend._rdma.errors import RDMAError
from monarch_backend._transport.local.frames import Setting
from monarch_backend._transport.local.peer import Peer

ASK, ANSWER, DROP = "rdma.ask", "rdma.answer", "rdma.drop"
"""Names of Settings: the program brings those that begin with the name of this room here."""

REPLY_TIMEOUT_S = 20.0
"""Seconds for an answer: whoever is asked may be in the middle of a long call into C code."""

CHECK_INTERVAL_S = 0.02
"""Seconds after which whoever waits looks whether he still wants to."""

TOPICS: dict[str, Callable[[Runtime, Peer, bytes], bytes]] = {}
"""What can be asked: by the module whose business it is. Called on a thread that may wait."""


class _Question:
    """As a pending call."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.ended = threading.Event()
        self.answer: bytes | None = None
        self.error = ""

    def on_gone(self, peer: Peer, failure: Any) -> None:
        """Whoever was asked answers no more."""
        if peer is self.peer:
            self.error = str(failure)
            self.ended.set()

    def on_reply(self, frame: Any) -> None:
        """Nobody replies to it in this way."""

    def wait(self, patience: float, over: Callable[[], object]) -> bool:
        """For the answer, or until somebody else is."""
        end = time.monotonic() + patience
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
    """The answer of another process. Raises RDMAError if there is none, also once ``over()``, or if it is no."""
    if owner.pump.reading:
        raise RDMAError(
            f"{peer} has to be asked for {topic} first, which the thread of a callback can't do, since it reads the "
            "answer: use another thread"
        )
    question = _Question(peer)
    number = next(owner.ids)
    owner.pending[number] = question
    try:
        if peer.gone is not None:  # nobody will tell us again
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
    """A Setting for this room. On a thread that may wait."""
    if name == DROP:
        if owner.memory is not None:
            owner.memory.told_to_drop(tuple(value))
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
