"""A small receiver of OpenTelemetry's protocol, which decodes what arrives."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Receiver(http.server.ThreadingHTTPServer):
    """What has arrived: spans and metrics, each with the attributes of its resource.

    ``status`` is the answer. ``statuses`` has those of the next requests, before it.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[tuple[dict[str, Any], Any]] = []
        self.metrics: list[tuple[dict[str, Any], Any]] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        self.statuses: list[int] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.headers.append(dict(self.headers))
        status = self.server.statuses.pop(0) if self.server.statuses else self.server.status
        if status == 200 and self.path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                about = attributes(resource.resource)
                self.server.spans += [(about, span) for scope in resource.scope_spans for span in scope.spans]
        elif status == 200 and self.path == "/v1/metrics":
            for found in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                about = attributes(found.resource)
                self.server.metrics += [(about, each) for scope in found.scope_metrics for each in scope.metrics]
        self.send_response(status if self.path in ("/v1/traces", "/v1/metrics") else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def attributes(what: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in what.attributes}


@contextlib.contextmanager
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
