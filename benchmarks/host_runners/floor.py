"""Floor of calls between hosts, a bare socket: N bytes one way, one byte back.

`floor.py listen|call ADDRESS PORT [tls]`. With tls it uses Python's ssl and certificates derived from the secret, like
connections between our hosts.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

HEAD = 8


def _secured(plain: socket.socket, server: bool) -> socket.socket:
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.argv[4:] != ["tls"]:
        return plain
    from monarch_backend._transport.network.auth import read_secret
    from monarch_backend._transport.network.tls import Tls

    both = Tls.of_secret(read_secret(Path(os.environ["MONARCH_SECRET_FILE"])))
    return (both.server if server else both.client).wrap_socket(plain, server_side=server)


def _fill(connection: socket.socket, into: memoryview) -> bool:
    while len(into):
        count = connection.recv_into(into)
        if count == 0:
            return False
        into = into[count:]
    return True


def listen(address: str, port: int) -> None:
    with socket.create_server((address, port)) as server:
        print("0", flush=True)
        accepted, _ = server.accept()
        connection = _secured(accepted, server=True)
        head, room = bytearray(HEAD), bytearray()
        while _fill(connection, memoryview(head)):
            size = int.from_bytes(head, "little")
            if len(room) < size:
                room = bytearray(size)
            _fill(connection, memoryview(room)[:size])
            connection.sendall(b"x")


def _timed(connection: socket.socket, data: Any) -> float:
    begun = time.perf_counter()
    connection.sendall(len(data).to_bytes(HEAD, "little"))
    for at in range(0, len(data), 1 << 20):
        connection.sendall(data[at : at + (1 << 20)])
    connection.recv(1)
    return time.perf_counter() - begun


def call(address: str, port: int) -> None:
    connection = _secured(socket.create_connection((address, port)), server=False)
    print("0", flush=True)
    for line in sys.stdin:
        _, count, size = json.loads(line)
        data = memoryview(bytearray(size))
        print(json.dumps([_timed(connection, data) for _ in range(count)]), flush=True)


if __name__ == "__main__":
    (listen if sys.argv[1] == "listen" else call)(sys.argv[2], int(sys.argv[3]))
