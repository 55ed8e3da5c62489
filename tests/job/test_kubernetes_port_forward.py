"""Connections through the API server to a pod, whose WebSocket is lost."""

from __future__ import annotations

import contextlib
import http.server
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._hosts.connection_settings import parse_address
from monarch_backend._job.kubernetes.api import Api
from monarch_backend._job.kubernetes.port_forward import PortForward
from tests.k8s import websocket
from tests.support.kubernetes_api import api_server

TIMEOUT_S = 30


@contextlib.contextmanager
def pod() -> Iterator[int]:
    """Yield the port of a listener that sends one byte back for each that it receives."""

    def echo(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(1):
                connection.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=echo, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=accept)
        accepting.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join()


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.shutdown(socket.SHUT_RD)


def end(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("lose", [reset, end])
def test_lost_web_socket_resets_its_connection_and_the_next_one_works(tmp_path: Path, lose: Any) -> None:
    served: list[socket.socket] = []

    def forward(request: http.server.BaseHTTPRequestHandler, _path: str, query: dict[str, list[str]]) -> None:
        served.append(request.connection)
        websocket.forward(request, "127.0.0.1", [int(port) for port in query["ports"]])

    with pod() as port, api_server(tmp_path) as server:
        server.on_connect = forward
        there = PortForward.to_pod("job", Api(None, str(server.kubeconfig), None, False), "trainers-0", port)
        try:
            for _ in range(2):
                with socket.create_connection(parse_address(there.address), TIMEOUT_S) as connection:
                    connection.sendall(b"x")
                    assert connection.recv(1) == b"x"
                    lose(served.pop())
                    # An end would mean that the host has closed the connection.
                    with pytest.raises(ConnectionResetError):
                        connection.recv(1)
        finally:
            PortForward.close_all("job")


def test_data_before_the_end_of_a_pod_arrives_at_a_slow_reader(tmp_path: Path) -> None:
    sent, size = threading.Event(), 256 << 10

    def forward(request: http.server.BaseHTTPRequestHandler, _path: str, query: dict[str, list[str]]) -> None:
        websocket.forward(request, "127.0.0.1", [int(port) for port in query["ports"]])
        sent.set()

    def send(listener: socket.socket) -> None:
        connection = listener.accept()[0]
        with connection:
            connection.sendall(b"x" * size)

    with socket.create_server(("127.0.0.1", 0)) as listener, api_server(tmp_path) as server:
        server.on_connect = forward
        sending = threading.Thread(target=send, args=(listener,))
        sending.start()
        api = Api(None, str(server.kubeconfig), None, False)
        there = PortForward.to_pod("job", api, "trainers-0", listener.getsockname()[1])
        try:
            with socket.socket() as connection:
                connection.settimeout(TIMEOUT_S)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # most of it waits to be sent
                connection.connect(parse_address(there.address))
                assert sent.wait(TIMEOUT_S)
                received = 0
                with contextlib.suppress(ConnectionResetError):
                    while data := connection.recv(4096):
                        received += len(data)
                assert received == size
        finally:
            PortForward.close_all("job")
            sending.join()
