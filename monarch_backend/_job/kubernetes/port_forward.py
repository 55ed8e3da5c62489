"""Port-forwarding to a pod: a local listener, whose connections go through the API server's WebSocket."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import socket
import struct
import sys
import termios
import threading
import time
from typing import ClassVar

from monarch_backend._job.kubernetes.api import Api

log = logging.getLogger("monarch_backend")

_CHUNK = 1 << 16
_FLUSH_TIMEOUT_S = 5.0


class PortForward:
    """Listener on this machine's loopback interface for one port of a pod.

    Each connection has a WebSocket of its own, so after a loss the next connection works again. A lost WebSocket resets
    its connection, which both sides then resume over a new one. An orderly end would mean that the host has ended.
    """

    _open: ClassVar[dict[tuple[str, str], PortForward]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def to_pod(cls, job: str, api: Api, pod: str, port: int) -> PortForward:
        """Return this program's listener for a pod of a job."""
        with cls._lock:
            found = cls._open.get((job, pod))
            if found is None:
                found = cls._open[job, pod] = cls(api, pod, port)
            return found

    @classmethod
    def close_all(cls, job: str) -> None:
        """Close the listeners for a job's pods, with their connections."""
        with cls._lock:
            made = [cls._open.pop(key) for key in list(cls._open) if key[0] == job]
        for each in made:
            each.close()

    def __init__(self, api: Api, pod: str, port: int) -> None:
        self._api, self._pod, self._port = api, pod, port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._connections: set[socket.socket] = set()
        threading.Thread(target=self._accept, name="monarch-port-forward", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), name="monarch-forwarded", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        self._connections.add(connection)
        try:
            forwarded = self._api.port_forward(self._pod, self._port)
            there = forwarded.socket(self._port)
            there.setblocking(True)
            back = threading.Thread(
                target=_copy_back, args=(there, connection), name="monarch-forwarded-back", daemon=True
            )
            back.start()
            _copy(connection, there)
            _end(there)
            back.join()
            there.close()
            if error := forwarded.error(self._port):
                log.warning("port-forward to pod %s: %s", self._pod, error)
        except Exception as error:
            log.warning("port-forward to pod %s failed: %s", self._pod, error)
        finally:
            self._connections.discard(connection)
            connection.close()

    def close(self) -> None:
        """Close the listener and its connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in list(self._connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy until one side ends."""
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            target.sendall(data)


def _copy_back(there: socket.socket, connection: socket.socket) -> None:
    """Copy from the pod until one side ends. Then the close of the connection resets it.

    A reset drops what the program has not received, such as the last reply of a host that ends. So it waits for that.
    """
    _copy(there, connection)
    with contextlib.suppress(OSError):
        deadline = time.monotonic() + _FLUSH_TIMEOUT_S
        while _is_unsent(connection) and time.monotonic() < deadline:
            time.sleep(0.01)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RD)  # the other direction ends, and nothing is sent


def _is_unsent(connection: socket.socket) -> bool:
    """Return whether the other side has not acknowledged all data. Raises OSError once the connection has ended."""
    if sys.platform != "linux":
        return False
    return fcntl.ioctl(connection, termios.TIOCOUTQ, b"\0" * 4) != b"\0" * 4


def _end(there: socket.socket) -> None:
    with contextlib.suppress(OSError):
        there.shutdown(socket.SHUT_RDWR)
