"""Recording of the messages that an async actor has begun and not ended: concurrent endpoints have several.

The first one is shown in the actor's own cell, as of a plain actor. Others get cells of their own, while there are any.
The end of each one is an event, also of those without a cell.

The actor's own cell counts all of them. The oldest one that a cell shows also shows the length of the queue.
"""

from __future__ import annotations

from monarch_backend._telemetry import kinds, recorder
from monarch_backend._telemetry.recorder import begin_activity, end_activity
from monarch_backend._transport.local.frames import Frame

_MESSAGE = int(kinds.Kind.MESSAGE)
_RUNNING = int(kinds.State.RUNNING) | kinds.ASYNC_FLAG


class OpenMessage:
    """A message that has begun. ``start_ns`` is 0 for one that a cell shows."""

    __slots__ = ("cell", "frame", "number", "sender", "start_ns")

    def __init__(self, cell: int, number: int, frame: Frame, sender: int) -> None:
        self.cell, self.number, self.frame, self.sender = cell, number, frame, sender
        self.start_ns = 0


class OpenMessages:
    """The open messages of one actor. Methods run on its thread.

    ``queue_cell`` is the cell that shows the queue, which other threads read.
    """

    def __init__(self, name: str, rank: int, cell: int) -> None:
        self._name, self._rank, self._cell = name, rank, cell
        self._cells: dict[int, None] = {}  # of open messages, oldest first
        self.queue_cell = cell

    def begin(self, number: int, frame: Frame, sender: int, queued: int) -> OpenMessage:
        """Record the start of a message. ``number`` is that of the endpoint's name, ``sender`` an identity."""
        cells, cell = self._cells, self._cell
        if cell in cells:
            cell = recorder.take_cell(_MESSAGE, self._name, self._rank)
        if cells:
            queued = 0  # the oldest one shows it
        else:
            self.queue_cell = cell
        message = OpenMessage(cell, number, frame, sender)
        begin_activity(cell, _RUNNING, number, frame.ref, queued, len(frame.body), sender)
        if cell:
            cells[cell] = None
        elif recorder.is_recording():
            message.start_ns = recorder.monotonic_ns()
        return message

    def end(self, message: OpenMessage, status: int, queued: int) -> None:
        """Record the end of a message."""
        cell, frame = message.cell, message.frame
        if message.start_ns:
            recorder.record_event(
                _MESSAGE, status, recorder.name_number(self._name), message.number, message.start_ns, frame.ref,
                len(frame.body), message.sender,
            )  # fmt: skip
        elif cell:
            end_activity(cell, status)
            del self._cells[cell]
            if cell == self.queue_cell:
                self.queue_cell = next(iter(self._cells), self._cell)
                if self._cells:
                    recorder.note_queue(self.queue_cell, queued)
        if cell != self._cell:
            recorder.release_cell(cell)
            recorder.count_ended(self._cell)
