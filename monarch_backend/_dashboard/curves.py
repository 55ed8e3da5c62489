"""Curves of metrics: the values that programs have recorded, with a bounded number of points."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy

from monarch_backend._dashboard.answers import Metrics, Series
from monarch_backend._telemetry.kinds import Kind
from monarch_backend._telemetry.metrics import SUMS, InstrumentKind, kind_of
from monarch_backend._telemetry.program_recording import Recording, double
from monarch_backend._telemetry.reader import EventFilter

WANTED = EventFilter(kinds=(Kind.METRIC,))
"""Events that `curves` needs."""

MAX_SERIES = 200
MAX_SERIES_OF_METRIC = 16
"""Processes with a curve of their own. Those of more processes are one curve: the mean, and the range."""


_Points = list[tuple[float, float]]


def curves(recording: Recording, name: str, points: int) -> Metrics:
    """Return the curves of a metric, or of all. Of counters they show the sums."""
    found = defaultdict[tuple[str, int, str], dict[tuple[str, int], _Points]](lambda: defaultdict(list))
    for process in recording.processes:
        for event in process.events(Kind.METRIC):
            if not name or event.name == name:
                value = double(event.trace if kind_of(event.reference) in SUMS else event.value)
                key = event.name or "(name not recorded)", kind_of(event.reference), event.detail
                label = f"{process.label} on {process.host}" if process.host else process.label
                found[key][label, process.pid].append(((event.end_ns + recording.wall_offset_ns) / 1e9, value))
    series = [each for key in sorted(found) for each in _series(key, found[key], points)]
    return Metrics(series[:MAX_SERIES], max(0, len(series) - MAX_SERIES), [str(each) for each in recording.unread])


def _series(
    key: tuple[str, int, str], by_process: dict[tuple[str, int], _Points], points: int
) -> Iterator[Series]:  # fmt: skip
    name, kind, attributes = key
    instrument = InstrumentKind(kind).title
    if len(by_process) > MAX_SERIES_OF_METRIC:
        values = [each for own in by_process.values() for each in own]
        yield Series(name, instrument, attributes, f"{len(by_process)} processes", *_binned(values, points, True))
        return
    for (label, _), values in sorted(by_process.items(), key=lambda each: each[0]):
        yield Series(name, instrument, attributes, label, *_binned(values, points, False))


def _binned(
    values: _Points, points: int, ranges: bool
) -> tuple[list[float], list[float | None], list[float | None], list[float | None]]:
    """Return times and values, and with ``ranges`` the least and greatest values of each bin.

    Without ranges, few values are returned as they are.
    """
    if not ranges and len(values) <= points:
        return [time for time, _ in values], [_finite(value) for _, value in values], [], []
    array = numpy.array(sorted(values))
    times, numbers = array[:, 0], array[:, 1]
    edges = numpy.linspace(times[0], times[-1], points + 1)[1:-1]
    starts = numpy.unique(numpy.searchsorted(times, edges, side="right"))
    starts = starts[starts < len(times)]
    bins = [each for each in numpy.split(numpy.arange(len(times)), starts) if len(each)]
    means = [_finite(float(numbers[each].mean())) for each in bins]
    low = [_finite(float(numbers[each].min())) for each in bins]
    high = [_finite(float(numbers[each].max())) for each in bins]
    return [float(times[each[-1]]) for each in bins], means, low, high


def _finite(value: float) -> float | None:
    return value if numpy.isfinite(value) else None
