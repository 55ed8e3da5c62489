"""Stream of commands from the controller to a set of workers: batched, ordered, with back-pressure.

_protocol.py defines the words. Any thread may write; one batch is sent at a time.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from monarch_backend import _native
from monarch_backend._core import fork
from monarch_backend.dtensor import _protocol
from monarch_backend.dtensor._controller import recording
from monarch_backend.dtensor._errors import MeshClosedError

FIRST, MOST = 100, 1600
"""Words after which a batch is sent: the first batch, and the largest one.

The first one is small, 16 operations, so that workers start soon. Each is twice as large as the one before, because a
message has a fixed cost. After a read they are small again.
"""
IDLE_FLUSH_S = 0.001
"""Seconds after which a partial batch is sent."""
ACKNOWLEDGE_EVERY_WORDS = 6400
"""Words after which the workers acknowledge a batch."""
MIN_BATCH_WORDS = 400
"""Minimum of words that a batch counts as."""
DELETE_THRESHOLD_BYTES = 32 << 20
"""Bytes of new tensors, on each worker, after which unreachable ones are deleted within a batch."""
MAX_INFLIGHT_BATCHES = 8
"""Limit of batches without an acknowledgement. Beyond it the controller waits."""
SEND_TIMEOUT_S = 1.0
"""Seconds in which a thread must send its batch, unless workers delay it."""


class CommandChannel(Protocol):
    def send(self, batch: bytes) -> None:
        """Send to all workers, without a reply."""

    def send_counted(self, batch: bytes) -> Callable[[], object]:
        """Send, and return a function that waits until all workers have executed it. It raises if one cannot."""

    def send_at_the_end(self, batch: bytes) -> None:
        """Send without waiting for workers, however far behind they are."""

    def has_room(self) -> bool:
        """Return whether `send` would not wait for a worker."""

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call a function later, on another thread."""


class Stream:
    """All commands for one set of workers, with the name of their mesh."""

    def __init__(self, line: CommandChannel, name: str = "") -> None:
        self._line, self._name = line, name
        self.words: list[Any] = []  # never replaced: other threads append while a batch is taken from its front
        self.unreachable: list[int] = []
        self._definitions: list[Any] = []
        self.numbers = itertools.count(_protocol.FIRST)
        self._sending = threading.RLock()
        self._handing_over = False  # a batch was taken and is not sent yet: no other may overtake it
        self._missing: deque[Callable[[], object]] = deque()
        self._unanswered = 0  # words since the last acknowledged batch
        self.batches = 0
        self.nbytes = 0
        self._timed = False
        self._batches_then = 0  # when the clock was set
        self.closed: Exception | None = None  # why nothing can be sent any more
        fork.register(fork.Step.COMMAND_STREAMS, after_in_child=self.in_forked_child)

    def define(self, *definition: Any) -> None:
        """Add a definition, which precedes all words that are not sent yet."""
        self._definitions.append(definition)

    def delete(self) -> None:
        """Delete unreachable tensors before the next words, not at the end of the batch."""
        if not self.unreachable or not self._sending.acquire(blocking=False):
            return  # the sending thread takes them along
        try:
            dead = _native.take_all(self.unreachable)
            self.words += (_protocol.DELETE, len(dead), *dead)
            self.wake()
        finally:
            self._sending.release()

    def wake(self) -> None:
        """Schedule a send of the first words after a pause, whether more come or not.

        Add the words first. If `_late` runs between a call and the addition, it finds no words and nothing sends them.
        """
        if not self._timed:
            self._timed = True
            self._batches_then = self.batches
            self._line.later(IDLE_FLUSH_S, self._late)

    def _late(self) -> None:
        self._timed = False
        if self.words and self.batches != self._batches_then:  # other threads write, and these words are new
            self.wake()
            return
        if self._sending.acquire(blocking=False):  # otherwise another thread is sending
            try:
                # This thread handles messages, which make room. It must not wait for room.
                if self._handing_over or not self._line.has_room():
                    self.wake()
                else:
                    self.flush(wait=False)
            except Exception as error:  # no caller: the next send or read raises it
                self.closed = self.closed or error
            finally:
                self._sending.release()
        elif self.words:
            self.wake()

    def flush(self, *, wait: bool = True) -> None:
        """Send all words. ``wait``: block while workers are too far behind."""
        start = recording.monotonic_ns()
        with self._sending:
            if self.closed is not None:
                raise self.closed
            batch = self._take()
            if batch is None:
                return
            self.batches += 1
            self.nbytes += len(batch)
            self._handing_over = True
            try:
                if self._unanswered < ACKNOWLEDGE_EVERY_WORDS:
                    self._line.send(batch)
                else:
                    self._unanswered = 0
                    self._missing.append(self._line.send_counted(batch))
            finally:
                self._handing_over = False
            recording.record(self._name, recording.BATCH, start, reference=self.batches, value=len(batch))
        while wait and (answer := self._oldest_of_too_many()) is not None:
            start = recording.monotonic_ns()
            answer()
            recording.record(self._name, "wait for workers that are behind", start)

    def _oldest_of_too_many(self) -> Callable[[], object] | None:
        with self._sending:
            return self._missing.popleft() if len(self._missing) > MAX_INFLIGHT_BATCHES else None

    def send_the_rest(self) -> None:
        """Send the words before the workers' end, without raising; none while another thread waits to send."""
        if not self._sending.acquire(timeout=SEND_TIMEOUT_S):
            return
        try:
            if self.closed is None and not self._handing_over:
                batch = self._take()
                if batch is not None:
                    self.batches += 1
                    self.nbytes += len(batch)
                    self._line.send_at_the_end(batch)
        except Exception as error:  # no caller: the next send or read raises it
            self.closed = self.closed or error
        finally:
            self._sending.release()

    def in_forked_child(self) -> None:
        """Stop the stream in a forked child, because the workers and their tensors are the parent's."""
        self._sending = threading.RLock()
        self._timed = True  # no thread of the child would call it later
        self.closed = MeshClosedError("this process was forked from the controller, whose tensors are not its own")
        self._definitions.clear()
        self.words.clear()
        self._missing.clear()

    def _take(self) -> bytes | None:
        # Other threads write meanwhile. Words of tensors that are unreachable now are among the words that are taken
        # next, and their definitions among the definitions that are taken last.
        dead = _native.take_all(self.unreachable)
        words = _native.take_all(self.words)
        definitions = _native.take_all(self._definitions)
        if dead:
            words += (_protocol.DELETE, len(dead), *dead)
        self._unanswered += max(len(words), MIN_BATCH_WORDS)
        return _protocol.encode((definitions, words)) if words or definitions else None
