"""Spans, metrics and queries: what a program records about itself, and how to read it.

>>> from monarch_backend.telemetry import get_meter, span
>>> with span("step", number=1):
...     get_meter("trainer").create_counter("samples").add(32)

The implementation is in _telemetry/: spans.py and metrics.py record, sql.py answers queries.
"""

from monarch_backend import _wiring as _wiring
from monarch_backend._telemetry.export.torch_debug import add_torch_debug_handler
from monarch_backend._telemetry.metrics import Counter, Gauge, Histogram, Meter, UpDownCounter, get_meter
from monarch_backend._telemetry.present_context import traceparent
from monarch_backend._telemetry.profile_result import ProfileResult
from monarch_backend._telemetry.spans import remote_parent, span, traced
from monarch_backend._telemetry.sql import AskedHost, QueryError, QueryResult, ReadProcess, query
from monarch_backend._telemetry.steps import step

__all__ = [
    "AskedHost",
    "Counter",
    "Gauge",
    "Histogram",
    "Meter",
    "ProfileResult",
    "QueryError",
    "QueryResult",
    "ReadProcess",
    "UpDownCounter",
    "add_torch_debug_handler",
    "get_meter",
    "query",
    "remote_parent",
    "span",
    "step",
    "traced",
    "traceparent",
]
