"""Startup handshake of `monarch-backend up` with the program that runs it.

A job's host reads the secret from standard input and prints its address. It ends with its standard
input, until the program has noted it and sends "stay". daemon.py defines what a host does.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from monarch_backend._core.state import make_private, state_directory
from monarch_backend._hosts.daemon import serve
from monarch_backend._hosts.process_identity import Identity
from monarch_backend._transport.network.auth import parse_secret

READY = "monarch_backend: this host is up: "
PROCESS = "monarch_backend: its process is "
STAY = b"stay"
_ADDRESS = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, socket.EAI_NONAME, socket.EAI_AGAIN)
DETACH_TIMEOUT_S = 600.0
"""Seconds in which the starting program must note a detached host. Then the host ends: the connection may be cut."""


def run(
    address: str,
    *,
    secret_from_stdin: bool,
    exit_with_stdin: bool,
    detach: bool,
    log: str | None,
    workers: Sequence[str] = (),
    tether: float | None = None,
    first_tether: float | None = None,
    notice: float = 0.0,
    signal_exit_code: int = 0,
    metrics: tuple[str, int] | None = None,
) -> int:
    """Run a host until it has to end; with ``detach``, until it is independent. Return an exit code.

    ``secret_from_stdin``: the first line of standard input is the job's secret. ``exit_with_stdin``: end with standard
    input, unless there is a line "stay". ``detach``: continue in a new session, with the output in ``log``.
    ``workers``: addresses of hosts that can be reached through this one. ``tether``: end when no controller has been
    attached for that many seconds, and ``first_tether`` the same for the first controller. ``notice``: seconds for
    which the host goes on after SIGTERM. ``signal_exit_code``: the exit code after a signal. ``metrics``: host and port
    of Prometheus's text.

    Raises OSError, ValueError.
    """
    options = {"workers": workers, "tether": tether, "first_tether": first_tether, "notice": notice, "metrics": metrics}
    if detach:
        where = log_file(log)
        done, tell = os.pipe()
        child = os.fork()
        if child:
            os.close(tell)
            return _see_it_off(child, done, where)
        os.close(done)
        os.setsid()
        return _Host(tell, where).run(address, secret_from_stdin, exit_with_stdin, signal_exit_code, options)
    return _Host(None, None).run(address, secret_from_stdin, exit_with_stdin, signal_exit_code, options)


class _Host:
    """A host and its startup. ``done``: descriptor that reports that it is independent."""

    def __init__(self, done: int | None, log: Path | None) -> None:
        self._done, self._log = done, log
        self._in, self._out = os.dup(0), os.dup(1)

    def run(
        self, address: str, secret_from_stdin: bool, exit_with_stdin: bool, signal_exit_code: int,
        options: dict[str, Any],
    ) -> int:  # fmt: skip
        self._leave_streams()
        secret = None
        if secret_from_stdin:
            secret = parse_secret(self._line().decode("ascii", "replace"), "the first line of standard input")
        if exit_with_stdin:
            threading.Thread(target=self._hold_on, name="monarch-stdin", daemon=True).start()

        def ready(host: str, port: int) -> None:
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            lines = [f"{READY}tcp://{where}"]
            if self._log is not None:
                me = Identity.of(os.getpid())
                lines.append(f"{PROCESS}{me.pid} {me.start} {me.boot} {self._log}")
            os.write(self._out, "".join(f"{line}\n" for line in lines).encode())
            if not exit_with_stdin:
                self._stand_alone()

        try:
            return signal_exit_code if serve(address, secret=secret, on_ready=ready, **options) else 0
        except (OSError, ValueError) as error:
            where = f"can't listen on {address}: " if getattr(error, "errno", None) in _ADDRESS else ""
            print(f"monarch-backend up: {where}{error}", file=sys.stderr)
            return 2

    def _leave_streams(self) -> None:
        """Replace the standard streams: processes inherit them, and must neither hold nor read them."""
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.close(null)
        if self._log is not None:
            fd = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            os.close(fd)

    def _line(self) -> bytes:
        """Read the next line of standard input and not a byte more. Return b"" at the end."""
        line = b""
        while len(line) < 1024 and not line.endswith(b"\n"):
            patience = None if self._done is None else DETACH_TIMEOUT_S
            data = os.read(self._in, 1) if select.select([self._in], [], [], patience)[0] else b""
            if not data:
                break
            line += data
        return line

    def _hold_on(self) -> None:
        """Wait for "stay"; end this process if standard input ends before. Runs on a thread."""
        while line := self._line():
            if line.strip() == STAY:
                self._stand_alone()
                return
        # A shell starts background commands with SIGINT ignored, until the host handles it.
        can_be_interrupted = callable(signal.getsignal(signal.SIGINT))
        os.kill(os.getpid(), signal.SIGINT if can_be_interrupted else signal.SIGTERM)

    def _stand_alone(self) -> None:
        if self._done is not None:
            os.close(self._in)
            os.close(self._out)
            os.write(self._done, b"!")
            os.close(self._done)
            self._done = None


def _see_it_off(child: int, done: int, log: Path) -> int:
    """Wait in the original process until the detached host is independent or has ended."""
    with os.fdopen(done, "rb") as file:
        if file.read(1):
            return 0
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    print(tail(log) or f"monarch-backend up: it has ended, with {code}", file=sys.stderr)
    return 0 if code == 0 else 2


def log_file(given: str | None) -> Path:
    """Return the log of a detached host, by default below the user's state directory. Make its directory."""
    if given is not None:
        path = Path(given).expanduser().absolute()
    else:
        path = state_directory() / "logs" / f"up-{os.getpid()}.log"
    make_private(path.parent)
    return path


def tail(path: Path, lines: int = 5) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-lines:])
    except OSError:
        return ""
