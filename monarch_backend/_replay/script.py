"""Content of a replay file as the player uses it: its records in order, and what belongs to each message."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from monarch_backend._actor.calls.codec import read_prefix
from monarch_backend._mesh.extent import Extent
from monarch_backend._replay import replay_file
from monarch_backend._replay.replay_file import (
    Arrived,
    Closed,
    Ended,
    Expired,
    Fired,
    Header,
    Lost,
    Opened,
    Record,
    Refused,
    ReplayError,
    Replied,
    Sent,
    Spawned,
    Started,
    TimedOut,
)

Key = tuple[int, int]
"""Message and place: the name of a call, port or spawned mesh in a replay file."""

SourceEvent = Arrived | TimedOut | Expired | Lost | Refused
"""What happens to a call or port."""


@dataclass
class RecordedMessage:
    """A message, or the constructor. ``started`` is None for the constructor."""

    number: int
    started: Started | None = None
    ended: Ended | None = None
    replies: list[Replied] = field(default_factory=list)
    late_replies: int = 0  # after its end, through an explicit port
    effects: int = 0  # calls, ports and spawned meshes

    @property
    def endpoint(self) -> str:
        return "__init__" if self.started is None else read_prefix(self.started.prefix)[0].method

    @property
    def state(self) -> str:
        """How it ended, for people."""
        if self.ended is None:
            return "not ended"
        if self.ended.is_cancelled:
            return "cancelled"
        return self.ended.error or "ok"


class Script:
    """A replay file, read into memory."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises ReplayError as `replay_file.records` does."""
        self.path = path
        self.records: list[Record] = list(replay_file.records(path))
        header = self.records[0]
        assert isinstance(header, Header)
        self.header = header
        self.extent = Extent(header.labels, header.sizes)
        self.messages = {0: RecordedMessage(0)}
        self.effects: dict[Key, Sent | Opened | Spawned] = {}
        self.events: dict[Key, deque[SourceEvent]] = {}
        self.timers: set[tuple[int, int]] = set()  # message and number of those that have run
        self.closed: Closed | None = None
        for record in self.records:
            self._sort(record)

    def _sort(self, record: Record) -> None:
        match record:
            case Started(message=number):
                self.messages[number] = RecordedMessage(number, record)
            case Ended(message=number):
                self.messages[number].ended = record
            case Replied(message=number):
                self.messages[number].replies.append(record)
                self.messages[number].late_replies += self.messages[number].ended is not None
            case Sent() | Opened() | Spawned():
                self.effects[record.message, record.place] = record
                self.messages[record.message].effects += 1
            case Arrived() | TimedOut() | Expired() | Lost() | Refused():
                self.events.setdefault((record.message, record.place), deque()).append(record)
            case Fired():
                self.timers.add((record.message, record.number))
            case Closed():
                self.closed = record

    @property
    def last(self) -> int:
        """Number of the last message."""
        return max(self.messages)

    @property
    def failed(self) -> int | None:
        """Number of the last message that raised, 0 for the constructor."""
        raised = [each.number for each in self.messages.values() if each.ended is not None and each.ended.error]
        return max(raised, default=None)

    @property
    def chosen(self) -> int:
        """Number of the message to look at: the last one if it has not ended, else the last that raised, if any."""
        if self.messages[self.last].ended is None or self.failed is None:
            return self.last
        return self.failed

    @property
    def end(self) -> str:
        """Why the file ends."""
        return "its process was killed, or still runs" if self.closed is None else self.closed.reason

    @property
    def where(self) -> str:
        """The actor, for people: "trainer gpus 3"."""
        point = str(self.extent.point(self.header.rank)) if self.header.labels else ""
        return f"{self.header.actor} {point}".rstrip()

    def check(self, number: int) -> None:
        """Raise ReplayError for a message that is not in the file."""
        if number not in self.messages:
            raise ReplayError(f"{self.path} has no message {number}: it has 0 (the constructor) to {self.last}")
