"""Connecting to other hosts: resolve the address, try each of its results, and retry with a growing pause."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from monarch_backend._transport.network.connection import PeerConnection

if TYPE_CHECKING:
    from monarch_backend._transport.network.connection_manager import Tcp


class Dialer:
    def __init__(self, tcp: Tcp) -> None:
        self._tcp = tcp

    def call(self, remote: PeerConnection) -> None:
        if remote.lost is not None or remote.address is None or self._tcp.is_closed:
            return
        host, port = remote.address
        try:
            self.connect(remote, socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST))
        except (socket.gaierror, UnicodeError):  # not a numeric address, and the resolver may be slow
            threading.Thread(target=self._look_up, args=(remote, host, port), name="monarch-names", daemon=True).start()

    def _look_up(self, remote: PeerConnection, host: str, port: int) -> None:
        """Resolve a name. Runs on its own thread."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            trouble = f"{host}: {error}"
            self._tcp.call_soon(lambda: self._failed(remote, trouble))
        else:
            self._tcp.call_soon(lambda: self.connect(remote, found))

    def _failed(self, remote: PeerConnection, trouble: str) -> None:
        remote.trouble = trouble
        self.call_again(remote)

    def connect(self, remote: PeerConnection, found: Sequence[Any]) -> None:
        """Connect to one of the resolved addresses; the next attempt uses the next one."""
        if remote.lost is not None or self._tcp.is_closed:
            return
        family, kind, protocol, _, where = found[remote.attempts % len(found)]
        remote.attempts += 1
        try:
            plain = socket.socket(family, kind, protocol)
        except OSError as error:
            self._failed(remote, str(error))
            return
        plain.setblocking(False)
        try:
            plain.connect(where)
        except BlockingIOError:
            pass
        except OSError as error:
            plain.close()
            self._failed(remote, error.strerror or str(error))
            return
        self._tcp.adopt(plain, remote, b"")

    def call_again(self, remote: PeerConnection) -> None:
        """Connect again after a pause that doubles each time."""
        first = self._tcp.bounds.pause
        remote.pause = min(remote.pause * 2, first * 10) if remote.pause else first
        pause = remote.pause * random.uniform(0.5, 1.0)  # many connections may break at once
        self._tcp.timers.append((time.monotonic() + pause, lambda: self.call(remote)))
