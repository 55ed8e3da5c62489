"""Step times of ranks, and the ranks that are slow.

The time of a step that counts is the time outside of collectives: in them, fast ranks wait for the slow one.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median_low

from monarch_backend._core import env
from monarch_backend._telemetry import jobs
from monarch_backend._telemetry.kinds import Kind
from monarch_backend._telemetry.labels import mesh_of
from monarch_backend._telemetry.reader import RecordedProcess
from monarch_backend._telemetry.step_window import MIN_STEPS, WINDOW

KINDS = Kind.STEP, Kind.COLLECTIVE
"""Kinds of events from which step times are found."""

MAX_EVENTS = 2048
"""Last events of a rank in which a process looks for slow ones. All of a ring would take four times as long."""

MIN_SHARE = 0.1
"""Share of its step by which a slow rank must be behind the median. Below it, other ranks hardly wait."""


@dataclass
class StepTimes:
    """Steps of one name in one process: medians of the last ``steps`` of them, at most `WINDOW`.

    ``own_ns`` is the time outside of collectives. ``usual_ns`` is its median over ``ranks`` processes, and ``factor``
    the ratio of both, where there are enough of them.
    """

    pid: int
    label: str
    name: str
    steps: int
    median_ns: int
    own_ns: int
    usual_ns: int = 0
    ranks: int = 1
    factor: float = field(default=0.0)
    is_slow: bool = False

    def __str__(self) -> str:
        usual = f"{self.factor:.1f} times the median of {self.ranks} ranks ({_text(self.usual_ns)})"
        return (
            f"{self.label} (pid {self.pid}) is slow: {self.name} takes {_text(self.own_ns)} outside of collectives, "
            f"{usual}, over {self.steps} steps"
        )


def _text(ns: int) -> str:
    return f"{ns / 1e9:.2f} s" if ns >= 1e9 else f"{ns / 1e6:.1f} ms"


def of_job(processes: Iterable[RecordedProcess], limit: float | None = None) -> list[StepTimes]:
    """Return the step times of a job's processes, with their events of `KINDS`. ``limit`` is the factor of slow ranks.

    Ranks are compared with those of the same mesh.
    """
    limit = env.get("MONARCH_STRAGGLER_PERCENT") / 100 if limit is None else limit
    found = [times for process in processes for times in _of_process(process)]
    meshes = defaultdict[tuple[str, str], list[StepTimes]](list)
    for each in found:
        if each.steps >= MIN_STEPS:
            meshes[mesh_of(each.label), each.name].append(each)
    for ranks in meshes.values():
        usual = median_low(each.own_ns for each in ranks)
        for each in ranks:
            each.usual_ns, each.ranks, each.factor = usual, len(ranks), each.own_ns / max(usual, 1)
            is_behind = each.own_ns - usual >= MIN_SHARE * each.median_ns
            each.is_slow = bool(limit) and len(ranks) > 1 and each.factor > limit and is_behind
    return found


def _of_process(process: RecordedProcess) -> Iterable[StepTimes]:
    by_name = defaultdict[str, list[tuple[int, int]]](list)
    for event in process.events:
        if event.kind == Kind.STEP and event.duration_ns:
            by_name[event.name].append((event.end_ns - event.duration_ns, event.end_ns))
    waits = _Intervals((e.end_ns - e.duration_ns, e.end_ns) for e in process.events if e.kind == Kind.COLLECTIVE)
    for name, steps in by_name.items():
        last = steps[-WINDOW:]
        own = [end - start - waits.within(start, end) for start, end in last]
        median = median_low(end - start for start, end in last)
        yield StepTimes(process.pid, process.label, name, len(last), median, median_low(own))


class _Intervals:
    """Union of intervals of time."""

    def __init__(self, intervals: Iterable[tuple[int, int]]) -> None:
        self._starts, self._ends = list[int](), list[int]()
        for start, end in sorted(intervals):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)

    def within(self, start: int, end: int) -> int:
        """Return how much of the time from ``start`` to ``end`` is in an interval."""
        total = 0
        for number in range(bisect.bisect_right(self._ends, start), len(self._starts)):
            if self._starts[number] >= end:
                break
            total += min(self._ends[number], end) - max(self._starts[number], start)
        return total


def seen_by(pid: int) -> list[StepTimes] | None:
    """Return the slow ranks of the job of this process. Return None if another process of the job names them.
    That is the first one of the job that makes steps: rank 0, if all do. Raises NotImplementedError without /proc.
    """
    mine = next((each for each in jobs.running().values() if any(process.pid == pid for process in each)), [])
    with_steps = [process for process in mine if any(each.kind == Kind.STEP for each in process.activities)]
    if not with_steps or min(with_steps, key=_order).pid != pid:
        return None
    running = jobs.running(*KINDS, limit=MAX_EVENTS)
    job = next(each for each in running.values() if any(process.pid == pid for process in each))
    return [each for each in of_job(job) if each.is_slow]


def _order(process: RecordedProcess) -> tuple[int, int]:
    """Return the rank of a process of torchrun; others are in the order of their starts."""
    number = process.label.removeprefix("rank ")
    return (int(number) if number.isdecimal() else 0, process.index)
