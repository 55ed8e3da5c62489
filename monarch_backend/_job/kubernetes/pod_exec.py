"""Command in a container of a pod, over the API server's WebSocket: protocols v5 and v4 of channel.k8s.io.

Standard input, output and error of the command are channels, as are its exit status and the size of a terminal.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import ssl
from collections.abc import Iterator
from typing import Any

from monarch_backend._job.errors import JobError

STDIN, STDOUT, STDERR, STATUS, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255
"""Channels: the first byte of each frame. CLOSE is followed by the channel that ends, in v5 only."""
V5 = "v5.channel.k8s.io"
CHUNK_BYTES = 32 << 10
_BINARY_FRAME, _TEXT_FRAME, _CLOSE_FRAME = 2, 1, 8
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

    def run(self, stdin: int | None) -> int:
        """Copy between descriptors of this process and the command, and return its exit code.

        ``stdin``: descriptor of the input, or None. A terminal is raw meanwhile, if the command has a terminal.
        Raises JobError if the command cannot be started, or if the connection ends before the command.
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
            ready = dict(poll.poll(0 if is_pending else None))
            if self._unsent and not self._send_some():
                stdin = sizes = None  # what the command has written before can still be read
            if (is_pending or ready.get(there.fileno(), 0) & ~select.POLLOUT) and not self._receive():
                return
            if sizes is not None and terminal is not None and sizes.fileno() in ready:
                sizes.recv(CHUNK_BYTES)
                self._send_size(terminal)
            if stdin is not None and stdin in ready:
                data = os.read(stdin, CHUNK_BYTES)
                if data:
                    self._send(STDIN, data)
                else:
                    stdin = None
                    self._end_input()

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
            return True  # a part of a frame, which the connection keeps
        except (WebSocketException, OSError):
            return False
        if opcode == _CLOSE_FRAME:
            return False
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
    try:
        tty.setraw(terminal, termios.TCSADRAIN)  # what was typed before is for the command, too
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


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
