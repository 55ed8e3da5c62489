"""`monarch-backend up`: run the daemon of a host until a signal ends it (_hosts/daemon.py)."""

from __future__ import annotations

import argparse
import sys

from monarch_backend.cli.metrics import DEFAULT_HOST, metrics_address


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "--address",
        default="127.0.0.1",
        help="where to listen, HOST:PORT or tcp://HOST:PORT; other than loopback it needs the job's secret in "
        "MONARCH_SECRET_FILE or MONARCH_SECRET, or on standard input (default: %(default)s)",
    )
    parser.add_argument(
        "--workers",
        default="",
        metavar="HOST:PORT,...",
        help="hosts that can be reached from here, for controllers that can reach only this one: "
        "attach('tcp://HOST:PORT') of this one is a mesh of them",
    )
    parser.add_argument(
        "--secret-from-stdin", action="store_true", help="the first line of standard input is the job's secret"
    )
    parser.add_argument(
        "--exit-with-stdin",
        action="store_true",
        help="end with standard input, unless there is a line 'stay' on it: for programs that start hosts",
    )
    parser.add_argument(
        "--detach",
        action="store_true",
        help="go on in a session of its own once it listens; its address, pid and log are printed",
    )
    parser.add_argument(
        "--tether",
        type=float,
        metavar="SECONDS",
        help="end when no controller has been attached for that long, so that a host does not outlive its program",
    )
    parser.add_argument(
        "--first-tether",
        type=float,
        metavar="SECONDS",
        help="with --tether: wait for the first controller for that long, if that is longer",
    )
    parser.add_argument(
        "--notice",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="go on for that long after SIGTERM while a controller is attached, and report the end to it and to actors",
    )
    parser.add_argument(
        "--signal-exit-code",
        type=int,
        default=0,
        metavar="CODE",
        help="exit code after SIGTERM or Ctrl-C (default: %(default)s); other ends have 0, or 2 for an error",
    )
    parser.add_argument(
        "--metrics",
        type=metrics_address,
        metavar="[HOST:]PORT",
        help="answer GET /metrics with the metrics of all programs of this user on this machine, in Prometheus's text; "
        f"on {DEFAULT_HOST} by default",
    )
    parser.add_argument("--log", metavar="FILE", help="where a detached host writes to")


def run(args: argparse.Namespace) -> int:
    """Run the host. Return ``--signal-exit-code`` after a signal, 2 with the reason if it cannot listen, or 0."""
    from monarch_backend._core import env
    from monarch_backend._hosts import startup_handshake

    try:
        env.check()
        return startup_handshake.run(
            args.address,
            secret_from_stdin=args.secret_from_stdin,
            exit_with_stdin=args.exit_with_stdin,
            detach=args.detach,
            log=args.log,
            tether=args.tether,
            first_tether=args.first_tether,
            notice=args.notice,
            metrics=args.metrics,
            signal_exit_code=args.signal_exit_code,
            workers=[word.strip() for word in args.workers.split(",") if word.strip()],
        )
    except (OSError, ValueError) as error:
        print(f"monarch-backend up: {error}", file=sys.stderr)
        return 2
