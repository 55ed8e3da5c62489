"""`monarch-backend metrics`: metrics of running programs as Prometheus's text, printed or served."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from monarch_backend.cli.arguments import add_program, fail, until_signal

DEFAULT_HOST = "127.0.0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_program(parser, or_job=True)
    parser.add_argument("--json", action="store_true", help="print one JSON array instead of text")
    parser.add_argument(
        "--serve",
        type=metrics_address,
        metavar="[HOST:]PORT",
        help=f"answer GET /metrics until a signal, on {DEFAULT_HOST} by default; port 0 takes a free one",
    )


def metrics_address(text: str) -> tuple[str, int]:
    """Return host and port. Raises ArgumentTypeError."""
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not [HOST:]PORT with a port from 0 to 65535")
    return host.strip("[]") or DEFAULT_HOST, int(port)


def run(args: argparse.Namespace) -> int:
    """Print the metrics, or serve them. Return 0, or 1 with the reason if there is no such program or no such port."""
    from monarch_backend._job.errors import JobError
    from monarch_backend._telemetry.export import prometheus
    from monarch_backend._telemetry.export.series import Collector
    from monarch_backend.cli.subject import look_at

    try:
        with look_at(args.program) as there:
            collector = Collector(there.recording)
            families, recording = collector.look()
            if args.serve is not None:
                host, port = args.serve
                return _serve(host, port, lambda: prometheus.as_text(collector.look()[0]))
    except (LookupError, NotImplementedError, ValueError, JobError) as error:
        return fail("metrics", error)
    if args.json:
        print(prometheus.as_json(families))
    else:
        print(prometheus.as_text(families), end="")
    for each in recording.unread:
        fail("metrics", f"not read: {each}")
    return 0


def _serve(host: str, port: int, text: Callable[[], str]) -> int:
    from monarch_backend._telemetry.export import prometheus

    try:
        with until_signal() as ended, prometheus.serving(host, port, text) as url:
            print(f"metrics at {url}; Ctrl-C ends this", flush=True)
            ended.wait()
    except OSError as error:
        return fail("metrics", error)
    return 0
