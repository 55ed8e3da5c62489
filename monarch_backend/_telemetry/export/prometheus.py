"""Text of metrics in Prometheus's exposition format, version 0.0.4, and its server at /metrics."""

from __future__ import annotations

import contextlib
import http.server
import json
import math
import re
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

from monarch_backend._core.addresses import is_loopback
from monarch_backend._telemetry.export.series import Distribution, Family, Point
from monarch_backend._telemetry.metrics import BOUNDS, InstrumentKind

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

MAX_CONNECTIONS = 8
"""Connections that are served at one time. Further ones are closed."""

CONNECTION_TIMEOUT_S = 10.0
"""Seconds that a client may take for its request, or for reading the answer."""

_TYPES = {
    InstrumentKind.COUNTER: "counter",
    InstrumentKind.UP_DOWN_COUNTER: "gauge",
    InstrumentKind.HISTOGRAM: "histogram",
    InstrumentKind.GAUGE: "gauge",
}
_SUFFIXES = {"counter": ("",), "gauge": ("",), "histogram": ("", "_bucket", "_sum", "_count")}
_OWN_LABELS = "program", "pid", "process"

Sample = tuple[str, dict[str, str], float]
"""Name, labels and value."""


def samples(families: Iterable[Family]) -> Iterator[tuple[str, str, str, list[Sample]]]:
    """Yield each family's name in Prometheus, type, help and samples. Names and labels are unique and valid."""
    used: set[str] = set()
    for family in families:
        kind = _TYPES[family.kind]
        name = _unused(family, kind, used)
        used.update(name + suffix for suffix in _SUFFIXES[kind])
        points: dict[tuple[tuple[str, str], ...], Point] = {}
        for point in family.points:
            points[tuple(_labels(point).items())] = point
        found = [sample for labels, point in points.items() for sample in _samples_of(name, dict(labels), point.value)]
        yield name, kind, family.about, found


def _unused(family: Family, kind: str, used: set[str]) -> str:
    """Return a name for the family: "a.b" and "a-b" are the same in Prometheus, so the second one has a number."""
    base = re.sub(r"[^a-zA-Z0-9_:]", "_", family.name.replace(".", "_"))
    base = f"_{base}" if base[0].isdigit() else base
    ends = f"{'_' + family.unit if family.unit else ''}{'_total' if kind == 'counter' else ''}"
    base = base.removesuffix("_total") if kind == "counter" else base
    name, number = base + ends, 1
    while any(name + suffix in used for suffix in _SUFFIXES[kind]):
        number += 1
        name = f"{base}_{number}{ends}"
    return name


def _labels(point: Point) -> dict[str, str]:
    """Return the labels of a point. A user's attribute with the name of one of ours is called ``exported_``."""
    labels = {"program": point.program}
    if point.process is not None:
        labels |= {"pid": str(point.process.pid), "process": point.process.label}
        labels |= {"host": point.process.host} if point.process.host else {}
    for attribute, value in point.attributes.items():
        label = re.sub(r"[^a-zA-Z0-9_]", "_", attribute) or "_"
        label = f"_{label}" if label[0].isdigit() else label
        label = re.sub(r"^__+", "_", label)  # Prometheus keeps names with two for itself
        while label in labels or label in _OWN_LABELS or label == "le":
            label = f"exported_{label}"
        labels[label] = value
    return labels


def _samples_of(name: str, labels: dict[str, str], value: float | Distribution) -> Iterator[Sample]:
    if not isinstance(value, Distribution):
        yield name, labels, value
        return
    total = 0
    for bound, count in zip((*BOUNDS, math.inf), value.counts, strict=True):
        total += count
        yield f"{name}_bucket", {**labels, "le": number(bound)}, total
    yield f"{name}_sum", labels, value.total
    yield f"{name}_count", labels, total


def number(value: float) -> str:
    """Return a number as Prometheus reads it.

    >>> [number(value) for value in (3, 2.5, float("inf"), float("-inf"), float("nan"))]
    ['3', '2.5', '+Inf', '-Inf', 'NaN']
    """
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1 << 53 else repr(float(value))


def as_text(families: Iterable[Family]) -> str:
    """Return the exposition text."""
    lines: list[str] = []
    for name, kind, about, found in samples(families):
        if about:
            lines.append(f"# HELP {name} {_escape(about)}")
        lines.append(f"# TYPE {name} {kind}")
        for each, labels, value in found:
            pairs = ",".join(f'{label}="{_escape(text, quote=True)}"' for label, text in labels.items())
            lines.append(f"{each}{{{pairs}}} {number(value)}")
    return "".join(f"{line}\n" for line in lines)


def _escape(text: str, quote: bool = False) -> str:
    r"""Return text for a line.

    >>> print(_escape('a "b"\n', quote=True))
    a \"b\"\n
    """
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quote else text


def as_json(families: Iterable[Family]) -> str:
    """Return the same samples as a JSON array. Infinite numbers and NaN are text."""
    made = [
        {
            "name": name, "type": kind, "help": about,
            "samples": [
                {"name": each, "labels": labels, "value": value if math.isfinite(value) else number(value)}
                for each, labels, value in found
            ],
        }
        for name, kind, about, found in samples(families)
    ]  # fmt: skip
    return json.dumps(made, indent=1, allow_nan=False)


class Server(http.server.ThreadingHTTPServer):
    """HTTP server that answers GET /metrics with what ``text`` returns. Raises OSError where it cannot listen."""

    daemon_threads = True

    def __init__(self, host: str, port: int, text: Callable[[], str]) -> None:
        self.address_family, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][::4]
        self.text = text
        self.one_at_a_time = threading.Lock()
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address[:2], _Handler)  # type: ignore[arg-type]

    def server_bind(self) -> None:
        """Bind without asking for the name of this host, which may take long."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection on a thread, or close it if too many are served now."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, *_: Any) -> None:
        """Drop a connection that the client has broken."""


@contextlib.contextmanager
def serving(host: str, port: int, text: Callable[[], str]) -> Iterator[str]:
    """Serve in a thread within the context, which has the URL. Raises OSError where it cannot listen.

    ``port``: 0 for a free one. ``text`` returns the metrics at each request.
    """
    try:
        server = Server(host, port, text)
    except OSError as error:
        raise OSError(f"cannot serve on {host} port {port}: {error.strerror or error}: choose another one") from error
    with server:
        thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
        thread.start()
        shown = f"[{server.server_name}]" if ":" in server.server_name else server.server_name
        try:
            yield f"http://{shown}:{server.server_port}/metrics"
        finally:
            server.shutdown()
            thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server
    timeout = CONNECTION_TIMEOUT_S
    server_version, sys_version = "monarch-backend", ""

    def do_GET(self) -> None:
        """Answer with the metrics."""
        if is_loopback(self.server.server_name) and not self._is_for_loopback():
            self._answer(403, "text/plain", "ask for 127.0.0.1 or localhost\n")
            return
        if self.path.partition("?")[0] != "/metrics":
            self._answer(404, "text/plain", "only /metrics is here\n")
            return
        try:
            with self.server.one_at_a_time:
                text = self.server.text()
        except (LookupError, NotImplementedError, OSError, ValueError) as error:
            self._answer(503, "text/plain", f"{error}\n")
        else:
            self._answer(200, CONTENT_TYPE, text)

    def _is_for_loopback(self) -> bool:
        """Return whether the client names this machine: a page of another site names its own (DNS rebinding)."""
        try:
            name = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        except ValueError:
            return False
        return name is not None and is_loopback(name)

    def _refuse(self) -> None:
        self._answer(405, "text/plain", "only GET is answered\n")

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse

    def _answer(self, status: int, kind: str, text: str) -> None:
        content = text.encode(errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if status == 405:
            self.send_header("Allow", "GET")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Print nothing for a request."""
