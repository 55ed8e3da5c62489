"""Recording of the messages that an async actor has begun and not ended: concurrent endpoints have several.

The first one is shown in the actor's own cell, as of a plain actor. Others get cells of their own, while there are any.
The end of each one is an event. Those without a cell also have an event of their start.

The actor's own cell counts all of them. The oldest one that a cell shows also shows the length of the queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from monarch_backend._telemetry import kinds, recorder
from monarch_backend._telemetry.recorder import begin_activity, end_activity
from monarch_backend._transport.local.frames import Frame

if TYPE_CHECKING:
    from monarch_backend._actor.execution.runner import ActorRunner

_MESSAGE = int(kinds.Kind.MESSAGE)
_QUEUE, _STARTED = int(kinds.Kind.QUEUE), int(kinds.QueueStatus.STARTED)
_RUNNING = int(kinds.State.RUNNING) | kinds.ASYNC_FLAG


class OpenMessage:
    """A message that has begun. ``start_ns`` is 0 for one that a cell shows."""

    __slots__ = ("cell", "frame", "number", "sender", "start_ns")

    def __init__(self, cell: int, number: int, frame: Frame, sender: int) -> None:
        self.cell, self.number, self.frame, self.sender = cell, number, frame, sender
        self.start_ns = 0


class OpenMessages:
    """The open messages of one actor. Methods run on its thread."""

    def __init__(self, runner: ActorRunner) -> None:
        self._runner, self._cell = runner, runner.recording_cell
        self._number = recorder.name_number(runner.name)
        self._cells: dict[int, None] = {}  # of open messages, oldest first

    def begin(self, number: int, frame: Frame, sender: int, queued: int) -> OpenMessage:
        """Record the start of a message. ``number`` is that of the endpoint's name, ``sender`` an identity."""
        cells, cell = self._cells, self._cell
        if cell in cells:
            cell = recorder.take_cell(_MESSAGE, self._runner.name, self._runner.rank)
        if cells:
            queued = 0  # the oldest one shows it
        else:
            self._runner.queue_cell = cell
        message = OpenMessage(cell, number, frame, sender)
        begin_activity(cell, _RUNNING, number, frame.ref, queued, len(frame.body), sender)
        if cell:
            cells[cell] = None
        elif recorder.is_recording():
            message.start_ns = recorder.monotonic_ns()
            recorder.record_event(_QUEUE, _STARTED, self._number, number, 0, frame.ref, len(frame.body), sender)
        return message

    def end(self, message: OpenMessage, status: int, queued: int) -> None:
        """Record the end of a message."""
        cell, frame, runner = message.cell, message.frame, self._runner
        if message.start_ns:
            recorder.record_event(
                _MESSAGE, status, self._number, message.number, message.start_ns, frame.ref, len(frame.body),
                message.sender,
            )  # fmt: skip
        elif cell:
            end_activity(cell, status)
            del self._cells[cell]
            if cell == runner.queue_cell:
                runner.queue_cell = next(iter(self._cells), self._cell)
                if self._cells:
                    recorder.note_queue(runner.queue_cell, queued)
        if cell != self._cell:
            recorder.release_cell(cell)
            recorder.count_ended(self._cell)
