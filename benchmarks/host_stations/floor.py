"""What the sockets themselves take: one byte there and back. `floor.py listen|call ADDRESS PORT`."""

import json
import socket
import sys
import time


def main() -> None:
    role, address, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if role == "listen":
        with socket.create_server((address, port)) as server:
            print("0", flush=True)
            connection, _ = server.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := connection.recv(16):
                connection.sendall(data)
        return
    connection = socket.create_connection((address, port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    print("0", flush=True)
    for line in sys.stdin:
        _, count, _ = json.loads(line)
        times = []
        for _ in range(count):
            begun = time.perf_counter()
            connection.sendall(b"x")
            connection.recv(16)
            times.append(time.perf_counter() - begun)
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
