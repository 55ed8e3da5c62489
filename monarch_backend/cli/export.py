"""`monarch-backend export`: what running programs have recorded, to an OpenTelemetry receiver or SQLite files."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import threading
from typing import TYPE_CHECKING

from monarch_backend.cli.arguments import add_program, fail, nothing_there, until_signal

if TYPE_CHECKING:
    from monarch_backend._telemetry.export.otlp import Exporter, Sent
    from monarch_backend._telemetry.recording_history import HistoryWriter
    from monarch_backend._telemetry.subject import Subject

DEFAULT_INTERVAL_S = 10.0
DEFAULT_KEEP_HOURS = 24.0
DEFAULT_KEEP_BYTES = 1 << 30
MIN_KEEP_BYTES = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "format",
        choices=["otlp", "sqlite", "history"],
        help="otlp: OpenTelemetry's protocol over HTTP; sqlite: a file with the tables of `monarch-backend sql`; "
        "history: a folder to which each interval adds what is new",
    )
    add_program(parser, or_job=True)
    parser.add_argument(
        "--endpoint",
        metavar="URL",
        help="receiver, such as http://localhost:4318; by default OTEL_EXPORTER_OTLP_ENDPOINT, whose other variables "
        "(..._HEADERS, ..._CERTIFICATE) are used too",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="new file of the format sqlite, or folder of a history")
    parser.add_argument(
        "--keep-hours",
        type=_hours,
        default=DEFAULT_KEEP_HOURS,
        metavar="N",
        help="delete files of a history that are older (default: %(default)g)",
    )
    parser.add_argument(
        "--keep-bytes",
        type=_size,
        default=DEFAULT_KEEP_BYTES,
        metavar="N",
        help="delete the oldest files of a history that is larger; a number, or one with K, M or G (default: 1G)",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="send what is recorded now, and end")
    how.add_argument(
        "--interval",
        type=_seconds,
        default=DEFAULT_INTERVAL_S,
        metavar="S",
        help="send or write each S seconds what is new, until a signal (default: %(default)g)",
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.1 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 86400")
    return seconds


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = math.nan
    if not 0 < hours <= 100_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of hours from 0 to 100,000")
    return hours


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d{1,15})([KMG]?)", text)
    size = int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2]] if found else 0
    if size < MIN_KEEP_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes, as 500M or 2G, of at least 1M")
    return size


def run(args: argparse.Namespace) -> int:
    """Send or write. Return 0, or 1 with the reason if there is no program, or the receiver or the file fails."""
    if args.format == "sqlite":
        return _save(args)
    if args.format == "history":
        return _keep(args)
    try:
        from monarch_backend._telemetry.export.otlp import Exporter
    except ImportError as error:
        return fail("export", f'{error}: install the extra, pip install "monarch_backend[otlp]"')
    from monarch_backend._job.errors import JobError
    from monarch_backend.cli.subject import look_at

    endpoint = args.endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    try:
        with look_at(args.program) as there, contextlib.closing(Exporter(there.recording, endpoint)) as exporter:
            if args.once:
                _print(exporter.send(is_last=True))
                return 0
            with until_signal() as ended:
                return _repeat(exporter, args.interval, ended)
    except (LookupError, NotImplementedError, OSError, ValueError, JobError) as error:
        return fail("export", error)


def _save(args: argparse.Namespace) -> int:
    from monarch_backend._job.errors import JobError
    from monarch_backend._telemetry import sql
    from monarch_backend.cli.subject import look_at

    if not args.output:
        return fail("export", "name the new file: -o FILE")
    try:
        with look_at(args.program) as there:
            recording = there.recording()
            if not recording.processes and not recording.unread:
                raise LookupError(nothing_there(args.program))
            sql.save(recording, args.output, there)
    except (LookupError, NotImplementedError, OSError, ValueError, JobError) as error:
        return fail("export", error)
    for each in recording.unread:
        fail("export", f"not read: {each}")
    print(
        f'{args.output}: {len(recording.processes)} processes. Ask it: monarch-backend sql "..." --from {args.output}'
    )
    return 0


def _keep(args: argparse.Namespace) -> int:
    """Add to a history until a signal. Programs may end and start meanwhile."""
    from monarch_backend._job.errors import JobError
    from monarch_backend._telemetry.recording_history import HistoryWriter
    from monarch_backend.cli.subject import look_at

    if not args.output:
        return fail("export", "name the folder: -o FOLDER")
    try:
        with (
            HistoryWriter(args.output, args.keep_hours * 3600, args.keep_bytes) as history,
            look_at(args.program) as there,
            until_signal() as ended,
        ):
            _add(history, there, args, ended)
            return 0
    except (LookupError, NotImplementedError, OSError, ValueError, JobError) as error:
        return fail("export", error)


def _add(history: HistoryWriter, there: Subject, args: argparse.Namespace, ended: threading.Event) -> None:
    """Add in each interval what is new. While nothing can be added, the reason is printed once, and old files end."""
    from monarch_backend._telemetry.reader import EventFilter
    from monarch_backend._telemetry.recording_history import HistoryWriteError

    problem, not_read = "", set[str]()
    while True:
        try:
            history.delete_old()
            recording = there.recording(EventFilter(after=history.after))
            added = history.append(recording)
        except (LookupError, HistoryWriteError) as error:
            if args.once:
                raise
            if str(error) != problem:
                problem = str(error)
                if isinstance(error, LookupError):
                    print(f"waits: {error}", flush=True)
                else:
                    fail("export", f"{error}. This is tried again each {args.interval:g} s")
        else:
            problem = ""
            lost = f"; {added.overwritten} older events were overwritten" if added.overwritten else ""
            print(f"added {added.events} events{lost}", flush=True)
            unread = {str(each) for each in recording.unread}
            for each in sorted(unread - not_read):
                fail("export", f"not read: {each}")
            not_read = unread
        if args.once or ended.wait(args.interval):
            return


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
