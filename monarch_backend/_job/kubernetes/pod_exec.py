"""Command in a container of a pod, over the API server's WebSocket: protocols v5 and v4 of channel.k8s.io.

Standard input, output and error of the command are channels, as are its exit status and the size of a terminal.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from typing import Any

from monarch_backend._job.errors import JobError

STDIN, STDOUT, STDERR, STATUS, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255
"""Channels: the first byte of each frame. CLOSE is followed by the channel that ends, in v5 only."""
V5 = "v5.channel.k8s.io"
CHUNK_BYTES = 32 << 10
PING_INTERVAL_S = 30.0
PING_TIMEOUT_S = 30.0
"""Seconds for the answer to a ping."""
MAX_UNREAD_BYTES = 4096
"""With more input than this after the last ping that was answered, the command may be what delays the answer."""
_BINARY_FRAME, _TEXT_FRAME, _CLOSE_FRAME, _PONG_FRAME = 2, 1, 8, 10
_END = b"\x04"
"""What a terminal takes for the end of input, if it is the first byte of a line."""


class Execution:
    """A running command. ``connection``: websocket-client's WebSocket. ``what`` names the pod in errors."""

    def __init__(self, connection: Any, what: str, *, is_tty: bool) -> None:
        self._connection, self._what, self._is_tty = connection, what, is_tty
        self._status = b""
        self._unsent = bytearray()
        """Frames that wait until they can be sent. A blocking send could last until this process reads."""
        connection.send_frame = self._queue
        self._heartbeat = Heartbeat(time.monotonic())

    def run(self, stdin: int | None) -> int:
        """Copy between descriptors of this process and the command, and return its exit code.

        ``stdin``: descriptor of the input, or None. A terminal is raw meanwhile, if the command has a terminal.
        Raises JobError if the command cannot be started, if the connection ends before the command, or if the server
        does not answer a ping in time.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            sizes = None
            if self._is_tty and stdin is not None and os.isatty(stdin):
                stack.enter_context(_raw(stdin))
                sizes = stack.enter_context(_size_changes())
                self._send_size(stdin)
            self._copy(stdin, stdin, sizes)
        return self._exit_code()

    def _copy(self, stdin: int | None, terminal: int | None, sizes: socket.socket | None) -> None:
        there = self._connection.sock
        there.setblocking(False)
        while True:
            poll = select.poll()
            poll.register(there, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            if stdin is not None and not self._unsent:
                poll.register(stdin, select.POLLIN)
            if sizes is not None:
                poll.register(sizes, select.POLLIN)
            # TLS may hold a whole frame that poll() does not see.
            is_pending = isinstance(there, ssl.SSLSocket) and there.pending() > 0
            wait_s = 0.0 if is_pending else self._heartbeat.next_s(time.monotonic())
            ready = dict(poll.poll(math.ceil(wait_s * 1000)))
            if self._unsent and not self._send_some():
                stdin = sizes = None  # what the command has written before can still be read
            if (is_pending or ready.get(there.fileno(), 0) & ~select.POLLOUT) and not self._receive():
                return
            self._check_connection()
            if sizes is not None and terminal is not None and sizes.fileno() in ready:
                sizes.recv(CHUNK_BYTES)
                self._send_size(terminal)
            if stdin is not None and stdin in ready:
                data = os.read(stdin, CHUNK_BYTES)
                if data:
                    self._heartbeat.input_sent(len(data))
                    self._send(STDIN, data)
                else:
                    stdin = None
                    self._end_input()

    def _check_connection(self) -> None:
        """Send a ping when it is time. Raises JobError if the last one was not answered."""
        now = time.monotonic()
        if self._heartbeat.is_lost(now):
            raise JobError(f"{self._what}: the connection is lost: no answer for {PING_TIMEOUT_S:g} s")
        if (payload := self._heartbeat.ping(now)) is not None:
            self._connection.ping(payload)

    def _queue(self, frame: Any) -> int:
        """Take the place of the connection's `send_frame`, through which it also answers pings."""
        data = frame.format()
        self._unsent += data
        return len(data)

    def _send_some(self) -> bool:
        """Send what can be sent without waiting. Return False if nothing can be sent any more."""
        try:
            sent = self._connection.sock.send(self._unsent)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return True
        except OSError:
            self._unsent.clear()
            return False
        del self._unsent[:sent]
        return True

    def _close(self) -> None:
        connection = self._connection
        if connection.connected and not self._unsent:
            connection.send_close()
        if connection.sock is not None and self._unsent:
            connection.sock.setblocking(False)
            self._send_some()
        connection.shutdown()

    def _receive(self) -> bool:
        """Take one frame, or a part of it. Return False at the end of the connection."""
        from websocket import WebSocketException

        try:
            opcode, frame = self._connection.recv_data_frame(True)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            self._heartbeat.received(time.monotonic())
            return True  # a part of a frame, which the connection keeps
        except (WebSocketException, OSError):
            return False
        if opcode == _CLOSE_FRAME:
            return False
        self._heartbeat.received(time.monotonic(), frame.data if opcode == _PONG_FRAME else None)
        if opcode in (_BINARY_FRAME, _TEXT_FRAME) and frame.data:
            channel, data = frame.data[0], frame.data[1:]
            if channel in (STDOUT, STDERR):
                _write_all(channel, data)  # the numbers of the channels are those of the descriptors
            elif channel == STATUS:
                self._status += data
        return True

    def _send(self, channel: int, data: bytes) -> None:
        self._connection.send(bytes([channel]) + data, opcode=_BINARY_FRAME)

    def _send_size(self, terminal: int) -> None:
        size = os.get_terminal_size(terminal)
        self._send(RESIZE, json.dumps({"Width": size.columns, "Height": size.lines}).encode())

    def _end_input(self) -> None:
        if self._is_tty:
            self._send(STDIN, _END)
        elif V5 in (self._connection.getheaders() or {}).values():  # the protocol that the server has chosen
            self._send(CLOSE, bytes([STDIN]))
        else:
            raise JobError(
                f"{self._what}: the end of input needs Kubernetes 1.30 and a package kubernetes with protocol v5, such "
                "as 37; with -t it is sent as Ctrl-D"
            )

    def _exit_code(self) -> int:
        if not self._status:
            raise JobError(f"{self._what}: the connection ended before the command")
        try:
            status = json.loads(self._status)
            if status.get("status") == "Success":
                return 0
            causes = (status.get("details") or {}).get("causes") or ()
            codes = [each["message"] for each in causes if each.get("reason") == "ExitCode"]
            if codes:
                return int(codes[0])
            why = status.get("message", "")
        except (ValueError, AttributeError, KeyError):
            why = self._status.decode(errors="replace")
        raise JobError(f"{self._what}: {why}")


class Heartbeat:
    """State of pings and their answers. All times are those of one clock, in seconds.

    A server answers a ping after it has read the input before, so the payload of a ping is the number of these bytes.
    """

    def __init__(self, now: float) -> None:
        self._received_at, self._due = now, now + PING_INTERVAL_S
        self._sent = self._read = 0  # bytes of input
        self._asked_at: float | None = None  # when the ping without an answer was sent

    def input_sent(self, size: int) -> None:
        self._sent += size

    def received(self, now: float, pong: bytes | None = None) -> None:
        """Note that the server has sent something; ``pong`` is the payload of its answer to a ping."""
        self._received_at = now
        if pong is not None and self._asked_at is not None:
            self._asked_at = None
            self._read = int(pong) if pong.isdigit() else self._read

    def ping(self, now: float) -> bytes | None:
        """Return the payload of a ping that has to be sent now, or None."""
        if self._asked_at is not None or now < self._due:
            return None
        self._asked_at, self._due = now, now + PING_INTERVAL_S
        return b"%d" % self._sent

    def is_lost(self, now: float) -> bool:
        if self._asked_at is None or self._sent - self._read > MAX_UNREAD_BYTES:
            return False
        return now >= max(self._asked_at, self._received_at) + PING_TIMEOUT_S

    def next_s(self, now: float) -> float:
        """Return for how many seconds nothing has to be done, if nothing is received."""
        if self._asked_at is None:
            return max(0.0, self._due - now)
        left = max(self._asked_at, self._received_at) + PING_TIMEOUT_S - now
        return left if left > 0 else PING_TIMEOUT_S  # the command delays the answer


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


@contextlib.contextmanager
def _raw(terminal: int) -> Iterator[None]:
    """Give the keys of a terminal, such as Ctrl-C, to the command."""
    import termios
    import tty

    before = termios.tcgetattr(terminal)
    with _exit_on_sigterm():
        try:
            tty.setraw(terminal, termios.TCSADRAIN)  # what was typed before is for the command, too
            yield
        finally:
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Raise SystemExit on SIGTERM where it would end the process at once, without cleaning up."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def leave(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def _size_changes() -> Iterator[socket.socket]:
    """Yield a socket with a byte for each change of the terminal's size."""
    told, tell = socket.socketpair()
    with told, tell:
        tell.setblocking(False)

        def changed(*_: object) -> None:
            with contextlib.suppress(BlockingIOError):
                tell.send(b"!")

        before = signal.signal(signal.SIGWINCH, changed)
        try:
            yield told
        finally:
            signal.signal(signal.SIGWINCH, before)
