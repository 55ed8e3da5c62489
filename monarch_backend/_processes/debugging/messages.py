"""Messages between a waiting process and its clients: JSON objects, one a line, over a Unix socket.

A request has the key "do": status, attach, names, run. Replies have one of the keys status, output, prompt, names,
error, resumed, over. `Peer` is one end.
"""

from __future__ import annotations

import json
import socket
from typing import Any

MESSAGE_LIMIT = 16 << 20
"""Bytes of one message."""

SOCKET_PREFIX = "debug-"
"""First part of the name of each socket; the pid of its process follows."""

_RECEIVE_BYTES = 64 << 10


class Peer:
    """One end of a connection. ``pid`` is the process at the other end, 0 if it is unknown."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.socket, self.pid = sock, pid
        self._received = bytearray()

    def send(self, **message: Any) -> None:
        """Send a message. Raises OSError, also TimeoutError if the other side does not read."""
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """Return the whole messages that have arrived, perhaps none, after one read.

        Raises EOFError at the end, ValueError for anything that is not such a message, and OSError.
        """
        data = self.socket.recv(_RECEIVE_BYTES)
        if not data:
            raise EOFError
        self._received += data
        *lines, rest = self._received.split(b"\n")
        if len(rest) > MESSAGE_LIMIT:
            raise ValueError(f"a message of more than {MESSAGE_LIMIT} bytes")
        self._received = bytearray(rest)
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("a message that is not an object")
        return messages

    def close(self) -> None:
        self.socket.close()
