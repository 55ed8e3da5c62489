"""`monarch-backend export`: what running programs have recorded, to an OpenTelemetry receiver or an SQLite file."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import threading
from typing import TYPE_CHECKING

from monarch_backend.cli.arguments import add_program, fail, nothing_there, until_signal

if TYPE_CHECKING:
    from monarch_backend._telemetry.export.otlp import Exporter, Sent

DEFAULT_INTERVAL_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "format",
        choices=["otlp", "sqlite"],
        help="otlp: OpenTelemetry's protocol over HTTP; sqlite: a file with the tables of `monarch-backend sql`",
    )
    add_program(parser)
    parser.add_argument(
        "--endpoint",
        metavar="URL",
        help="receiver, such as http://localhost:4318; by default OTEL_EXPORTER_OTLP_ENDPOINT, whose other variables "
        "(..._HEADERS, ..._CERTIFICATE) are used too",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="new file of the format sqlite")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="send what is recorded now, and end")
    how.add_argument(
        "--interval",
        type=_seconds,
        default=DEFAULT_INTERVAL_S,
        metavar="S",
        help="send each S seconds what is new, until a signal (default: %(default)g)",
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.1 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 86400")
    return seconds


def run(args: argparse.Namespace) -> int:
    """Send or write. Return 0, or 1 with the reason if there is no program, or the receiver or the file fails."""
    if args.format == "sqlite":
        return _save(args)
    try:
        from monarch_backend._telemetry.export.otlp import Exporter
    except ImportError as error:
        return fail("export", f'{error}: install the extra, pip install "monarch_backend[otlp]"')
    endpoint = args.endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    try:
        exporter = Exporter(args.program, endpoint)
        with contextlib.closing(exporter):
            if args.once:
                _print(exporter.send(is_last=True))
                return 0
            with until_signal() as ended:
                return _repeat(exporter, args.interval, ended)
    except (LookupError, NotImplementedError, OSError, ValueError) as error:
        return fail("export", error)


def _save(args: argparse.Namespace) -> int:
    from monarch_backend._telemetry import program_recording, sql

    if not args.output:
        return fail("export", "name the new file: -o FILE")
    try:
        recording = program_recording.read(args.program)
        if not recording.processes and not recording.unread:
            raise LookupError(nothing_there())
        sql.save(recording, args.output)
    except (LookupError, NotImplementedError, OSError, ValueError) as error:
        return fail("export", error)
    print(
        f'{args.output}: {len(recording.processes)} processes. Ask it: monarch-backend sql "..." --from {args.output}'
    )
    return 0


def _repeat(exporter: Exporter, interval: float, ended: threading.Event) -> int:
    """Send in each interval what is new. A receiver that fails gets it the next time."""
    has_sent = False
    while True:
        try:
            _print(exporter.send())
            has_sent = True
        except LookupError:
            if not has_sent:
                raise
            print("the program has ended", flush=True)
            return 0
        except OSError as error:
            fail("export", error)
        if ended.wait(interval):
            return 0


def _print(sent: Sent) -> None:
    lost = f"; {sent.overwritten} older events were overwritten" if sent.overwritten else ""
    print(f"sent {sent.spans} spans and {sent.metrics} metrics{lost}", flush=True)
