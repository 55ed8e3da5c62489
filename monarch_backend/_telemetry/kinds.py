"""Kinds of recorded events and states of activities. The numbers are those of csrc/telemetry/recording.h."""

from __future__ import annotations

import enum
from typing import cast

BATCH = "send batch"
"""Detail of the event of a controller that has sent operations to its workers."""

POINT_TO_POINT = "send", "recv"
"""Details of collective events of a group that not all of its ranks take part in."""

COMPILER = "torch.compile"
"""Name in a controller's events of compilations."""


class NamedNumber(enum.IntEnum):
    """Base of enumerations of recorded numbers. A number of a later release is its own name.

    >>> Kind(4).title, State(99).title
    ('message', '99')
    """

    @property
    def title(self) -> str:
        """The name in readers."""
        return self.name.lower()

    @classmethod
    def _missing_(cls, value: object) -> NamedNumber:
        made = int.__new__(cls, cast(int, value))
        made._name_, made._value_ = str(value), cast(int, value)
        return made


class Kind(NamedNumber):
    """What an event or an activity is about."""

    PROCESS = 1
    ACTOR = 2
    SENT = 3
    MESSAGE = 4
    COLLECTIVE = 5
    TRANSFER = 6
    WAIT = 7
    SPAN = 8
    METRIC = 9
    MESH = 10
    CONTROLLER = 11
    LOG = 12
    STEP = 13
    CONNECTION = 14
    HOST = 15
    QUEUE = 16
    FAILURE = 17
    LINK = 18


class State(NamedNumber):
    """State of an activity."""

    IDLE = 0
    RUNNING = 1
    CONSTRUCTING = 2
    WAITING = 3
    FAILED = 4


ASYNC_FLAG = 1 << 8
"""Added to the state of a message that a coroutine handles, in the recording."""


class Status(NamedNumber):
    """How an activity has ended."""

    OK = 0
    ERROR = 1
    CANCELLED = 2
    ABORTED = 3


class QueueStatus(NamedNumber):
    """What an event of the kind `Kind.QUEUE` says about a message.

    STARTED is of a message without an activity: its process shows as many as it can.
    """

    ARRIVED = 0
    WITHDRAWN = 2
    REFUSED = 3
    STARTED = 4


class SlotState(enum.IntEnum):
    """State of a process in the recording area."""

    FREE = 0
    RESERVED = 1
    ALIVE = 2
    ENDED = 3
