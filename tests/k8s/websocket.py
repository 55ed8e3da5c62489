"""Server's side of a WebSocket, and port-forwarding over it, as a kubelet has it, without extensions."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

PROTOCOL = "v4.channel.k8s.io"
BINARY, CLOSE, PING, PONG = 2, 8, 9, 10
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def accept(request: http.server.BaseHTTPRequestHandler, protocol: str = PROTOCOL) -> Callable[[int, bytes], None]:
    """Answer the request for a WebSocket. Return ``send(opcode, data)``."""
    key = request.headers["Sec-WebSocket-Key"].encode()
    request.send_response(101)
    for name, value in (
        ("Upgrade", "websocket"),
        ("Connection", "Upgrade"),
        ("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key + _GUID).digest()).decode()),
        ("Sec-WebSocket-Protocol", protocol),
    ):
        request.send_header(name, value)
    request.end_headers()
    request.close_connection = True
    lock = threading.Lock()

    def send(opcode: int, data: bytes) -> None:
        length = len(data)
        if length < 126:
            head = struct.pack(">BB", 128 | opcode, length)
        elif length < 1 << 16:
            head = struct.pack(">BBH", 128 | opcode, 126, length)
        else:
            head = struct.pack(">BBQ", 128 | opcode, 127, length)
        with lock:
            request.wfile.write(head + data)
            request.wfile.flush()

    return send


def received(source: Any, send: Callable[[int, bytes], None]) -> Iterator[bytes]:
    """Yield the data of binary frames that have any, until the client closes. Answer pings meanwhile."""
    while (frame := read(source)) is not None:
        opcode, data = frame
        if opcode == CLOSE:
            return
        if opcode == PING:
            send(PONG, data)
        elif opcode == BINARY and data:
            yield data


def forward(request: http.server.BaseHTTPRequestHandler, address: str, ports: list[int]) -> None:
    """Connect each port of the pod, and copy both directions until the client closes."""
    send, sockets = accept(request), {}

    def copy(channel: int, source: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):  # the client's connection may be closed
            while data := source.recv(32768):
                send(BINARY, bytes([channel]) + data)
        with contextlib.suppress(OSError, ValueError):
            send(CLOSE, b"")

    try:
        for index, port in enumerate(ports):
            for channel in (2 * index, 2 * index + 1):
                send(BINARY, bytes([channel]) + struct.pack("<H", port))
            try:
                sockets[2 * index] = socket.create_connection((address, port), 5)
            except OSError as error:
                send(BINARY, bytes([2 * index + 1]) + str(error).encode())
                send(CLOSE, b"")
                return
            sockets[2 * index].settimeout(None)
            threading.Thread(target=copy, args=(2 * index, sockets[2 * index]), daemon=True).start()
        for data in received(request.rfile, send):
            if data[0] in sockets:
                sockets[data[0]].sendall(data[1:])
    except OSError:
        pass
    finally:
        for each in sockets.values():
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def read(file: Any) -> tuple[int, bytes] | None:
    head = file.read(2)
    if len(head) < 2:
        return None
    length = head[1] & 127
    if length >= 126:
        [length] = struct.unpack(">H" if length == 126 else ">Q", file.read(2 if length == 126 else 8))
    mask = file.read(4)
    data = file.read(length)
    if len(data) < length:
        return None
    word = (mask * (length // 4 + 1))[:length]
    return head[0] & 15, (int.from_bytes(data, "big") ^ int.from_bytes(word, "big")).to_bytes(length, "big")
