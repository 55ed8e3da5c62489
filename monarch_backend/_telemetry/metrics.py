"""Metrics with OpenTelemetry's names: counters, up-down counters, histograms and gauges. Each record is an event.

An event of a counter has the increment as its value. Its trace is the sum since the recording began. So the sum stays
right when the ring has overwritten older events.

The reference of an event has the kind and the number of its instrument. A name that stays in the recording has the
meter and the unit of that number.
"""

from __future__ import annotations

import itertools
import json
import re
import struct
import threading
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from monarch_backend import _native
from monarch_backend._core import fork
from monarch_backend._telemetry import recorder, texts
from monarch_backend._telemetry.kinds import Kind, NamedNumber
from monarch_backend._telemetry.recorder import record_event

_METRIC = int(Kind.METRIC)
_is_recording = _native.is_recording
_DOUBLE, _BITS = struct.Struct("=d"), struct.Struct("=Q")

Made = TypeVar("Made", bound="_Instrument")
Number = int | float
Attributes = Mapping[str, Any] | None


class InstrumentKind(NamedNumber):
    """Kind of an instrument: in the reference of its events."""

    COUNTER = 1
    UP_DOWN_COUNTER = 2
    HISTOGRAM = 3
    GAUGE = 4


SUMS = InstrumentKind.COUNTER, InstrumentKind.UP_DOWN_COUNTER
"""Kinds whose events have the sum so far."""


BOUNDS = tuple(float(f"{digit}e{exponent}") for exponent in range(-5, 5) for digit in (1, 2.5, 5))
"""Upper bounds of the buckets of each histogram: three in each power of ten, from 10 us to 50,000."""

MAX_TOTALS = 2000
"""Sets of attributes of a counter that have their own sum. Further ones share a sum, as in OpenTelemetry."""

_OVERFLOW = "further attributes"


_KIND_BITS = 8  # of the reference of an event; the others are the number of the instrument
_ABOUT = re.compile(r"instrument (\d+): (.*)", re.DOTALL)
_numbers = itertools.count(1)


def kind_of(reference: int) -> int:
    """Return the `InstrumentKind` of an event with this reference."""
    return reference & ((1 << _KIND_BITS) - 1)


def number_of(reference: int) -> int:
    """Return the number of the instrument of an event with this reference, 0 for none."""
    return reference >> _KIND_BITS


def instruments(names: Iterable[str]) -> dict[int, tuple[str, str]]:
    """Return the meter and the unit of each number of an instrument, from the names that a process has recorded.

    >>> instruments(['trainer', 'instrument 2: ["loader","ms"]'])
    {2: ('loader', 'ms')}
    """
    found = {}
    for name in names:
        about = _ABOUT.fullmatch(name)
        if about:
            try:
                meter, unit = json.loads(about[2])
            except ValueError:  # the name of a span
                continue
            found[int(about[1])] = str(meter), str(unit)
    return found


class _Instrument:
    """Base class of instruments. ``description`` is for people; it is not recorded."""

    _kind: InstrumentKind

    def __init__(self, meter: str, name: str, unit: str, description: str) -> None:
        self._meter, self.name, self.unit, self.description = meter, name, unit, description
        number, self._starts = next(_numbers), -1
        self._reference = self._kind | number << _KIND_BITS
        self._about = f"instrument {number}: {json.dumps([meter, unit], separators=(',', ':'))}"

    def __reduce__(self) -> Any:
        """In another process it is the instrument of that process."""
        return _instrument, (self._meter, type(self), self.name, self.unit, self.description)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def _record(self, value: Number, detail: int, total: int = 0) -> None:
        name = texts.name_number(self.name)
        if self._starts != recorder.starts:  # this recording has no meter and unit of it yet
            about = texts.name(self._about)
            if about:
                recorder.name_number(about)
            self._starts = recorder.starts
        record_event(_METRIC, 0, name, detail, 0, self._reference, float(value), total)


class _Summing(_Instrument):
    def __init__(self, meter: str, name: str, unit: str, description: str) -> None:
        super().__init__(meter, name, unit, description)
        self._start()

    def _start(self) -> None:
        """Begin with sums of 0."""
        self._lock = threading.RLock()  # a signal handler may add, too
        self._totals: dict[int | str, float] = {}

    def _add(self, value: Number, attributes: Attributes) -> None:
        if not _is_recording() and not recorder.begin():
            return
        detail = texts.number(attributes) if attributes else 0
        key = str(attributes) if attributes and (not detail or texts.is_in_ring(detail)) else detail
        with self._lock:
            if key not in self._totals and len(self._totals) >= MAX_TOTALS:
                key = _OVERFLOW
            total = self._totals[key] = self._totals.get(key, 0.0) + value
            self._record(value, detail, _BITS.unpack(_DOUBLE.pack(total))[0])


class _Unsummed(_Instrument):
    def _set(self, value: Number, attributes: Attributes) -> None:
        if _is_recording() or recorder.begin():
            self._record(value, texts.number(attributes) if attributes else 0)


class Counter(_Summing):
    """A sum that only grows, such as a number of samples. ``Meter.create_counter`` makes it.

    >>> from monarch_backend.telemetry import get_meter
    >>> samples = get_meter("trainer").create_counter("samples")
    >>> samples.add(32, {"split": "train"})
    """

    _kind = InstrumentKind.COUNTER

    def add(self, value: Number, attributes: Attributes = None) -> None:
        """Add ``value``. Raises ValueError if it is negative.

        >>> from monarch_backend.telemetry import get_meter
        >>> get_meter("trainer").create_counter("steps").add(1)
        """
        if value < 0:
            raise ValueError(f"counter {self.name!r} only grows, and {value} is negative: use create_up_down_counter")
        self._add(value, attributes)


class UpDownCounter(_Summing):
    """A sum that grows and shrinks, such as the length of a queue. ``Meter.create_up_down_counter`` makes it.

    >>> from monarch_backend.telemetry import get_meter
    >>> queued = get_meter("loader").create_up_down_counter("queued")
    >>> queued.add(4); queued.add(-1)
    """

    _kind = InstrumentKind.UP_DOWN_COUNTER

    def add(self, value: Number, attributes: Attributes = None) -> None:
        """Add ``value``, which may be negative.

        >>> from monarch_backend.telemetry import get_meter
        >>> get_meter("loader").create_up_down_counter("queued").add(-1)
        """
        self._add(value, attributes)


class Histogram(_Unsummed):
    """Values to aggregate later, such as durations. ``Meter.create_histogram`` makes it.

    >>> from monarch_backend.telemetry import get_meter
    >>> get_meter("trainer").create_histogram("step_s", unit="s").record(0.25)
    """

    _kind = InstrumentKind.HISTOGRAM

    def record(self, value: Number, attributes: Attributes = None) -> None:
        """Record one value.

        >>> from monarch_backend.telemetry import get_meter
        >>> get_meter("trainer").create_histogram("tokens").record(512, {"split": "train"})
        """
        self._set(value, attributes)


class Gauge(_Unsummed):
    """A value that changes, such as a loss. ``Meter.create_gauge`` makes it.

    >>> from monarch_backend.telemetry import get_meter
    >>> get_meter("trainer").create_gauge("loss").set(2.5)
    """

    _kind = InstrumentKind.GAUGE

    def set(self, value: Number, attributes: Attributes = None) -> None:
        """Record the present value.

        >>> from monarch_backend.telemetry import get_meter
        >>> get_meter("trainer").create_gauge("loss").set(2.5, {"split": "test"})
        """
        self._set(value, attributes)


class Meter:
    """Maker of instruments. `get_meter` returns it. Two requests for one name and kind return the same instrument.

    >>> from monarch_backend.telemetry import get_meter
    >>> meter = get_meter("trainer")
    >>> meter.create_counter("samples") is meter.create_counter("samples")
    True
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._instruments: dict[tuple[type[_Instrument], str], _Instrument] = {}

    def __reduce__(self) -> Any:
        return get_meter, (self.name,)

    def create_counter(self, name: str, unit: str = "", description: str = "") -> Counter:
        """Return the counter of this name.

        >>> from monarch_backend.telemetry import get_meter
        >>> get_meter("trainer").create_counter("samples")
        Counter('samples')
        """
        return self._create(Counter, name, unit, description)

    def create_up_down_counter(self, name: str, unit: str = "", description: str = "") -> UpDownCounter:
        """Return the up-down counter of this name.

        >>> from monarch_backend.telemetry import get_meter
        >>> get_meter("loader").create_up_down_counter("queued")
        UpDownCounter('queued')
        """
        return self._create(UpDownCounter, name, unit, description)

    def create_histogram(self, name: str, unit: str = "", description: str = "") -> Histogram:
        """Return the histogram of this name.

        >>> from monarch_backend.telemetry import get_meter
        >>> get_meter("trainer").create_histogram("step_s", unit="s")
        Histogram('step_s')
        """
        return self._create(Histogram, name, unit, description)

    def create_gauge(self, name: str, unit: str = "", description: str = "") -> Gauge:
        """Return the gauge of this name.

        >>> from monarch_backend.telemetry import get_meter
        >>> get_meter("trainer").create_gauge("loss")
        Gauge('loss')
        """
        return self._create(Gauge, name, unit, description)

    def _start_after_fork(self) -> None:
        self._lock = threading.Lock()
        for instrument in self._instruments.values():
            if isinstance(instrument, _Summing):
                instrument._start()

    def _create(self, kind: type[Made], name: str, unit: str, description: str) -> Made:
        with self._lock:
            made = self._instruments.get((kind, name))
            if made is None:
                made = self._instruments[kind, name] = kind(self.name, name, unit, description)
        assert isinstance(made, kind)
        return made


def _instrument(meter: str, kind: type[_Instrument], name: str, unit: str, description: str) -> _Instrument:
    return get_meter(meter)._create(kind, name, unit, description)


_meters: dict[str, Meter] = {}
_meters_lock = threading.Lock()


def _in_forked_child() -> None:
    """Sums are those of one process. A lock could be held by a thread that the child does not have."""
    global _meters_lock
    _meters_lock = threading.Lock()
    for meter in _meters.values():
        meter._start_after_fork()


fork.register(fork.Step.RECORDING, after_in_child=_in_forked_child)


def get_meter(name: str = "monarch") -> Meter:
    """Return the meter of this name, which makes counters, histograms and gauges.

    SQL has the meter's name as ``scope_name``. Exporters and curves leave it out, so give metrics names that are clear
    alone.

    >>> from monarch_backend.telemetry import get_meter
    >>> get_meter("trainer") is get_meter("trainer")
    True
    """
    with _meters_lock:
        return _meters.setdefault(name, Meter(name))
