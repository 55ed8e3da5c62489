"""Client side of a fork server: it is started or found, waited for, and asked to end.

spawner.py has the requests and events, fork_server.py the server.
"""

from __future__ import annotations

import contextlib
import os
import signal as signals
import socket
import subprocess
import sys
import tempfile
import threading
from typing import IO

import msgspec

from monarch_backend._core import fork
from monarch_backend._core.env import without_secrets
from monarch_backend._processes import interpreter_args, local_sockets
from monarch_backend._processes.fork_server import Configuration
from monarch_backend._processes.spawn_protocol import Channel, Event

# Time limit for the exit of killed processes. It takes milliseconds, unless one hangs in a driver.
REPLY_TIMEOUT_S = 10.0


class ForkServer:
    """A connection to a fork server, and the server process if this process has started it."""

    def __init__(self, sock: socket.socket, process: subprocess.Popen[bytes] | None, log: IO[bytes] | None) -> None:
        self.channel: Channel[Event] = Channel(sock, msgspec.msgpack.Decoder(Event))
        self.process = process
        self.log = log

    def stop(self) -> None:
        """Have all processes of this connection killed. Their ends are sent, then the connection ends."""
        self.channel.drop_unsent()
        with contextlib.suppress(OSError):
            self.channel.socket.shutdown(socket.SHUT_WR)
        if self.process is not None:
            self.process.terminate()  # while it imports torch it does not listen

    def wait(self) -> str:
        """Wait until a server of this process has ended. Return a sentence on how it ended."""
        if self.process is None:
            return "the fork server closed the connection"
        try:
            code = self.process.wait(REPLY_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        how = f"killed by {_name(-code)}" if code < 0 else f"exit code {code}"
        assert self.log is not None
        self.log.seek(max(0, self.log.seek(0, os.SEEK_END) - 4000))
        text = self.log.read().decode(errors="replace").strip()
        wrote = f"; it wrote:\n{text}" if text else ""
        return f"the fork server (pid {self.process.pid}) ended: {how}{wrote}"

    def close(self) -> None:
        """Close the connection. A server of this process must have ended."""
        self.channel.close()
        if self.log is not None:
            self.log.close()


def _name(signal: int) -> str:
    try:
        return signals.Signals(signal).name
    except ValueError:
        return f"signal {signal}"


def connect(address: str) -> socket.socket:
    """Return a connection to the server at this address.

    Raises ValueError for an invalid address, PermissionError for another user's server, OSError.
    """
    if not local_sockets.is_address(address):
        raise ValueError(f"{address!r} is not an address of a Spawner, which begins with {local_sockets.FIRST!r}")
    try:
        sock = local_sockets.connect(address)
    except ConnectionRefusedError:
        raise ConnectionRefusedError(f"no fork server listens at {address}: has its controller ended?") from None
    user = local_sockets.peer(sock)[1]
    if user != os.geteuid():
        sock.close()
        raise PermissionError(f"{address} belongs to user {user}, not to this process's")
    return sock


_starting = threading.Lock()
"""Held while a server is started. A fork waits for it.

`subprocess.Popen` waits until all copies of a pipe are closed, and a fork would keep one.
"""
fork.register(
    fork.Step.SPAWNERS, before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_starting.release
)


def start_server(listener: socket.socket | None, preload: list[str], *, ignores_sigterm: bool = False) -> ForkServer:
    """Start a server, which inherits ``listener`` and dies with this thread. Raises OSError, RuntimeError."""
    with _starting, contextlib.ExitStack() as passed, contextlib.ExitStack() as kept:
        if listener is not None:
            passed.enter_context(listener)
        ours, theirs = socket.socketpair()
        kept.enter_context(ours)
        passed.enter_context(theirs)
        stdout, stderr = (_own_stream(number, passed) for number in (1, 2))
        log = kept.enter_context(tempfile.TemporaryFile())
        configuration = Configuration(
            theirs.fileno(), None if listener is None else listener.fileno(), stdout, stderr, preload,
            ignores_sigterm=ignores_sigterm,
        )  # fmt: skip
        process = subprocess.Popen(
            interpreter_args.command(
                "monarch_backend._processes.fork_server", msgspec.json.encode(configuration).decode(), sys.path
            ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[
                *(n for n in (configuration.connection, configuration.listener, stdout, stderr) if n is not None),
                *interpreter_args.inherited(),
            ],
            env=_server_environment(),
            start_new_session=True,  # Ctrl-C is for the controller, which ends its processes itself
        )
        kept.pop_all()
        return ForkServer(ours, process, log)


def _own_stream(number: int, stack: contextlib.ExitStack) -> int:
    """Return a duplicate of this process's descriptor 1 or 2, or of /dev/null if it has none."""
    try:
        descriptor = os.dup(number)
    except OSError:
        descriptor = os.open(os.devnull, os.O_WRONLY)
    stack.callback(os.close, descriptor)
    return descriptor


def _server_environment() -> dict[str, str]:
    """Return this environment without variables that would make threads or hide torch's own number of threads."""
    left_out = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    kept = without_secrets(os.environ)  # children inherit the memory of the server, and /proc shows its variables
    return {n: v for n, v in kept.items() if n not in left_out} | {"OPENBLAS_NUM_THREADS": "1"}
