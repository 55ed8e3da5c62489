"""Causes of failures: which failed message made another one fail, by the times of their recordings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from monarch_backend._dashboard import failures
from monarch_backend._telemetry.kinds import Kind, Status
from monarch_backend._telemetry.reader import RecordedEvent

SECOND = 10**9
CALLER = 7
"""Identity of the process whose message fails."""


def _failed(start: float, end: float, trace: int = CALLER) -> Any:
    """Make a failed message that ran from ``start`` to ``end``, in seconds. The process ``trace`` has sent it."""
    process: Any = SimpleNamespace(recorded=SimpleNamespace(identity=CALLER))
    duration, end_ns = round((end - start) * SECOND), round(end * SECOND)
    event = RecordedEvent(1, end_ns, duration, Kind.MESSAGE, Status.ERROR, 0, "actor", "ask", 0, 0, trace)
    return failures._Failed(process, event)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([(11, 12), (13, 14)], 1),
        ([(11, 20.002)], 0),  # its end was recorded after that of the caller
        ([(11, 12), (13, 20.002)], 0),
        ([(11, 25)], None),  # the caller did not wait for it
        ([(9, 12)], None),
        ([(20.001, 20.002)], None),
    ],
)
def test_cause_is_the_last_message_that_failed_while_the_caller_ran(
    others: list[tuple[float, float]], expected: int | None
) -> None:
    caller, inner = _failed(10, 20, trace=0), [_failed(*each) for each in others]
    cause = failures._cause_of(caller, [caller, *inner])
    assert cause is (None if expected is None else inner[expected])
    assert failures._cause_of(caller, [_failed(11, 12, trace=8)]) is None
