"""Two hosts for tests of connections: each is a connection manager in this process, with its received frames."""

from __future__ import annotations

import os
import queue
import socket
import struct
from collections.abc import Callable
from typing import Any

from monarch_backend._transport.network.auth import new_secret
from monarch_backend._transport.network.connection import PeerConnection, Timeouts
from monarch_backend._transport.network.connection_manager import Tcp, secrets_by_name

QUICK = Timeouts(heartbeat=0.05, silence=1.0, patience=2.0, pause=0.01)


class Side:
    """One of two hosts: its connection manager, received frames, and connections that came up or were lost."""

    def __init__(self, *secrets: bytes, bounds: Timeouts = QUICK, **options: Any) -> None:
        self.frames: queue.Queue[tuple[bytes, bytes]] = queue.Queue()
        self.up: queue.Queue[PeerConnection] = queue.Queue()
        self.lost: queue.Queue[PeerConnection] = queue.Queue()
        self.tcp = Tcp(
            os.urandom(16), secrets_by_name(*secrets), self._frame, self.up.put, self.lost.put, bounds=bounds, **options
        )
        self.tcp.start()

    def _frame(self, remote: PeerConnection, prefix: bytes, body: memoryview) -> None:
        self.frames.put((prefix, bytes(body)))


def together(sides: Callable[..., Side], **options: Any) -> tuple[Side, Side, PeerConnection, PeerConnection]:
    secret = new_secret()
    here, there = sides(secret, **options), sides(secret, **options)
    remote = here.tcp.call(there.tcp.listen("127.0.0.1"), secret)
    assert here.up.get(timeout=10) is remote
    return here, there, remote, there.up.get(timeout=10)


def reset(side: Side, remote: PeerConnection) -> None:
    """Reset the connection of both sides, as a network failure does. Call this on the manager's thread."""
    if remote.connection is not None:
        connection = remote.connection
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        side.tcp.drop(connection)
