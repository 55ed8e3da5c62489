"""`monarch-backend dashboard`: a page in the browser about running programs, and an HTTP API."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import sys
import webbrowser
from types import FrameType
from typing import TYPE_CHECKING

from monarch_backend.cli.arguments import add_program, fail

if TYPE_CHECKING:
    from monarch_backend._telemetry.subject import Subject

EXTRA = "pip install 'monarch_backend[dashboard]'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_program(parser, or_job=True)
    parser.add_argument("--port", type=_port, default=0, help="port to listen on; by default a free one")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default 127.0.0.1")
    parser.add_argument(
        "--allow-remote",
        action="store_true",
        help="allow a --host that other machines reach: what they read is not encrypted",
    )
    parser.add_argument("--no-open", action="store_true", help="only print the address; open no browser")
    parser.add_argument("--json", action="store_true", help="print one JSON object with url, address and token")


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 16:
        raise argparse.ArgumentTypeError(f"{text} is not a port: 0 to 65535")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal. Return 0, or 1 with the reason if it cannot listen or the extra is not installed."""
    try:
        from monarch_backend._dashboard import server as _server  # noqa: F401
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("anyio", "starlette", "uvicorn"):
            raise
        return fail("dashboard", f"it needs {error.name}, which is not installed: {EXTRA}")
    from monarch_backend._job.errors import JobError
    from monarch_backend.cli.subject import look_at

    try:
        with look_at(args.program) as there:
            _, _, unread = there.look()
            for each in unread:
                fail("dashboard", f"not read: {each}")
            return _serve(args, there)
    except (LookupError, NotImplementedError, JobError) as error:
        return fail("dashboard", error)


def _serve(args: argparse.Namespace, there: Subject) -> int:
    from monarch_backend._dashboard import server
    from monarch_backend._dashboard.guard import is_loopback

    token = secrets.token_urlsafe(32)
    try:
        remote = not is_loopback(args.host)
        if remote and not args.allow_remote:
            return fail(
                "dashboard",
                f"--host {args.host} can be reached from other machines, without encryption. Listen on 127.0.0.1 and "
                "forward the port ('ssh -L PORT:127.0.0.1:PORT HOST'), or add --allow-remote",
            )
        listening = server.Server(there, args.host, args.port, token, remote=remote)
    except OSError as error:
        return fail("dashboard", f"cannot listen on {args.host} port {args.port}: {error}")
    if remote:
        print(
            "monarch-backend dashboard: warning: other machines can reach this address. The traffic is not encrypted "
            "and has the token, which gives access to stacks, logs and data of your programs",
            file=sys.stderr,
        )
    url = f"{listening.address}#token={token}"
    signal.signal(signal.SIGTERM, _exit)
    with contextlib.suppress(KeyboardInterrupt), server.private_page(url) as page:

        def show() -> None:
            if args.json:
                print(json.dumps({"url": url, "address": listening.address, "token": token}), flush=True)
            else:
                print(f"Dashboard: {url}\nThe address has a secret. Ctrl-C ends the dashboard.", flush=True)
            if not args.no_open and _has_screen():
                webbrowser.open(page)

        listening.run(show)
    return 0


def _has_screen() -> bool:
    """Return whether a browser has a window. One in the terminal would hide the dashboard's lines."""
    return sys.platform != "linux" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def _exit(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)
