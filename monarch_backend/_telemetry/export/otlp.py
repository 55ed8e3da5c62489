"""Export of spans, messages and metrics by OpenTelemetry's protocol (OTLP) over HTTP, with its own exporters."""

from __future__ import annotations

import contextlib
import logging
import os
import urllib.parse
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import export as metrics
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from monarch_backend import __version__
from monarch_backend._telemetry.export.series import (
    Collector,
    Distribution,
    Family,
)
from monarch_backend._telemetry.export.span_tree import Node, SpanTree
from monarch_backend._telemetry.kinds import Kind
from monarch_backend._telemetry.metrics import BOUNDS, SUMS, InstrumentKind
from monarch_backend._telemetry.program_recording import ProcessRecording, Recording
from monarch_backend._telemetry.reader import ALL_EVENTS, EventFilter
from monarch_backend._telemetry.resources import resource_of
from monarch_backend._telemetry.trace_context import HEADER
from monarch_backend._telemetry.unseen_processes import MAX_UNSEEN, with_unseen

TIMEOUT_S = 10.0
"""Seconds for a request with its repetitions."""

SPANS_PER_REQUEST = 1000

MAX_WAIT_S = 60.0
"""Seconds that a span waits for those above it, which may have been overwritten."""

_SCOPE = InstrumentationScope("monarch_backend", __version__)


class ExportError(OSError):
    """A receiver did not take what was sent."""


@dataclass
class Sent:
    """What a call of `Exporter.send` has sent."""

    spans: int
    metrics: int
    overwritten: int


class Exporter:
    """Exporter of programs to a receiver. ``read`` returns a recording of them with the wanted events.

    ``endpoint`` is the receiver's URL without /v1/traces.

    Headers and certificates are those of the variables OTEL_EXPORTER_OTLP_... Raises ValueError for a wrong URL.
    """

    def __init__(self, read: Callable[[EventFilter], Recording], endpoint: str) -> None:
        self._where = _checked(endpoint)
        base = endpoint.rstrip("/")
        with self._explained():
            self._spans = OTLPSpanExporter(endpoint=f"{base}/v1/traces", timeout=TIMEOUT_S)
            self._metrics = OTLPMetricExporter(endpoint=f"{base}/v1/metrics", timeout=TIMEOUT_S)
        if self._said.text:
            raise ValueError(f"a variable OTEL_EXPORTER_OTLP_... is wrong: {self._said.text}")
        self._read = read
        self._collector, self._tree = Collector(read), SpanTree()
        self._exported: dict[tuple[int, int], int] = {}  # the last event of each process
        self._waiting: set[int] = set()  # spans to be sent later
        self._lost: dict[int, None] = {}  # spans that were open when their process ended, as a set in order
        self._taken: set[int] = set()  # spans that the receiver took in a call that failed later

    def send(self, *, is_last: bool = False) -> Sent:
        """Send the spans that have ended since the last call, and all metrics.

        A span below one that cannot be seen yet waits for it, unless ``is_last``.
        Raises what ``read`` does, and ExportError if the receiver refuses something.
        """
        recording = self._read(ALL_EVENTS)
        all_nodes = self._tree.nodes(recording)
        new = [node for node in all_nodes if node.own not in self._taken and self._is_new(node)]
        oldest = recording.now_ns if is_last else recording.now_ns - int(MAX_WAIT_S * 1e9)
        waiting = {node.own for node in new if node.waits and node.end is not None and node.end > oldest}
        nodes = [node for node in new if not node.is_link and node.own not in waiting]
        resources = {id(process): _resource(process) for process in recording.processes}
        spans = [_span(node, resources[id(node.process)], recording.wall_offset_ns) for node in nodes]
        for start in range(0, len(spans), SPANS_PER_REQUEST):
            with self._explained():
                done = self._spans.export(spans[start : start + SPANS_PER_REQUEST]) is SpanExportResult.SUCCESS
            self._check(done)
            self._taken |= {node.own for node in nodes[start : start + SPANS_PER_REQUEST]}
        self._note(recording, all_nodes)
        self._waiting = waiting
        families, seen = self._collector.look()
        data = _metrics_data(families, seen.now_ns + seen.wall_offset_ns, seen.wall_offset_ns)
        with self._explained():
            done = self._metrics.export(data) is metrics.MetricExportResult.SUCCESS
        self._check(done)
        return Sent(len(spans), len(families), sum(each.recorded.lost for each in recording.processes))

    def close(self) -> None:
        """Close the connections."""
        self._spans.shutdown()  # type: ignore[no-untyped-call]
        self._metrics.shutdown()

    def _is_new(self, node: Node) -> bool:
        if node.number is None:
            return node.end is not None and node.own not in self._lost
        return node.own in self._waiting or node.number > self._exported.get(node.process.recorded.key, 0)

    def _note(self, recording: Recording, nodes: list[Node]) -> None:
        if not recording.unread:  # else a host may be among them, whose processes are read again later
            self._exported.clear()
            self._lost.clear()
        exported = {
            each.recorded.key: each.recorded.events[-1].number for each in recording.processes if each.recorded.events
        }
        lost = {node.own: None for node in nodes if node.number is None and node.end is not None}
        self._exported = with_unseen(exported, self._exported, MAX_UNSEEN)
        self._lost = with_unseen(lost, self._lost, MAX_UNSEEN)
        self._taken = set()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Keep what OpenTelemetry logs about a failure, in place of printing it."""
        log = logging.getLogger("opentelemetry")
        self._said = _Messages()
        log.addHandler(self._said)
        propagates, log.propagate = log.propagate, False
        try:
            yield
        except OSError as error:  # older exporters raise what requests does
            raise ExportError(f"{self._where} did not take the data: {_without_secrets(str(error))[:300]}") from None
        finally:
            log.propagate = propagates
            log.removeHandler(self._said)

    def _check(self, done: bool) -> None:
        if not done:
            reason = self._said.text or "no reason was given"
            raise ExportError(f"{self._where} did not take the data: {reason}")


class _Messages(logging.Handler):
    """The first and the last message of a logger: the first has the reason, the last has what became of it."""

    first = last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = _without_secrets(record.getMessage())
        self.first = self.first or self.last

    @property
    def text(self) -> str:
        return self.first if self.first == self.last else f"{self.first[:300]}; {self.last[:100]}"


def _without_secrets(text: str) -> str:
    for secret in _secrets():
        text = text.replace(secret, "***")
    return " ".join(text.split())


def _secrets() -> list[str]:
    """Return the values of headers in the environment, as they are written and as they are sent, longest first."""
    found: set[str] = set()
    for signal in ("", "TRACES_", "METRICS_"):
        for header in os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}HEADERS", "").split(","):
            value = header.partition("=")[2] or header
            for each in (value, urllib.parse.unquote(value)):
                found |= {each, each.strip(), repr(each)[1:-1]}
    return sorted(found - {""}, key=len, reverse=True)


def _checked(endpoint: str) -> str:
    """Return the URL for messages: without a user's name, a password and parameters. Raises ValueError."""
    wrong = "the endpoint must be a URL such as http://localhost:4318"
    try:
        parts = urllib.parse.urlsplit(endpoint)
        port = "" if parts.port is None else f":{parts.port}"
    except ValueError:
        raise ValueError(wrong) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(wrong)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    if parts.query or parts.fragment or parts.path.rstrip("/").endswith(("/v1/traces", "/v1/metrics")):
        raise ValueError(f"give the endpoint {parts.scheme}://{host}{port} without /v1/traces: that is added")
    return f"{parts.scheme}://{host}{port}{parts.path}"


def _resource(process: ProcessRecording) -> Resource:
    about = resource_of(process)
    instance = ":".join(map(str, (about["host.name"], *process.recorded.key)))
    return Resource({**about, "service.instance.id": instance})


def _span(node: Node, resource: Resource, wall_offset: int) -> ReadableSpan:
    attributes = {name: value for name, value in node.attributes.items() if name != HEADER}
    if node.actor is not None:
        attributes["monarch.actor"] = node.actor
        rank = node.process.rank_of_actor.get(node.actor)
        attributes |= {} if rank is None else {"monarch.actor.rank": rank}
    if node.status not in ("ok", "error"):
        attributes["monarch.status"] = node.status
    assert node.end is not None
    return ReadableSpan(
        node.name,
        context=_context(node.trace, node.identity),
        parent=_context(node.trace, node.parent) if node.parent else None,
        resource=resource,
        attributes=attributes,
        kind=SpanKind.SERVER if node.kind == Kind.MESSAGE else SpanKind.INTERNAL,
        status=Status(StatusCode.OK if node.status == "ok" else StatusCode.ERROR),
        start_time=node.start + wall_offset,
        end_time=node.end + wall_offset,
        instrumentation_scope=_SCOPE,
    )


def _context(trace: int, span: int) -> SpanContext:
    return SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


# ---- metrics


def _metrics_data(families: list[Family], now: int, wall_offset: int) -> metrics.MetricsData:
    """Return the metrics of each process, and those of whole programs with a resource without process."""
    found: dict[int, tuple[Resource, list[metrics.Metric]]] = {}
    for family in families:
        points = defaultdict[int, list[Any]](list)
        resources: dict[int, Resource] = {}
        for point in family.points:
            process = point.process
            key = hash(point.program) if process is None else id(process)
            if key not in found and key not in resources:
                resources[key] = Resource({"service.name": point.program}) if process is None else _resource(process)
            since = now if process is None else process.recorded.started_ns + wall_offset
            points[key].append(_point(point.value, point.attributes, since, now))
        for key, made in points.items():
            _, those = found.setdefault(key, (resources.get(key) or found[key][0], []))
            those.append(metrics.Metric(family.name, family.about, family.unit, _data(family.kind, made)))
    return metrics.MetricsData(
        [
            metrics.ResourceMetrics(resource, [metrics.ScopeMetrics(_SCOPE, those, "")], "")
            for resource, those in found.values()
        ]
    )


def _data(kind: InstrumentKind, points: list[Any]) -> Any:
    total = metrics.AggregationTemporality.CUMULATIVE
    if kind == InstrumentKind.HISTOGRAM:
        return metrics.Histogram(points, total)
    if kind in SUMS:
        return metrics.Sum(points, total, kind == InstrumentKind.COUNTER)
    return metrics.Gauge(points)


def _point(value: float | Distribution, attributes: dict[str, str], since: int, now: int) -> Any:
    if not isinstance(value, Distribution):
        return metrics.NumberDataPoint(attributes, since, now, value)
    return metrics.HistogramDataPoint(
        attributes, since, now, sum(value.counts), value.total, value.counts, BOUNDS, value.least, value.most
    )
