"""Link that loses and reorders Ethernet frames, for kernels without netem.

`python lossy_link.py IF IF LOSS REORDER SEED` forwards frames between two interfaces of the caller's network
namespace, by packet sockets, until stdin ends. LOSS and REORDER are probabilities. A reordered frame is sent after at
most eight later frames, or after 20 ms.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import random
import select
import socket
import struct
import sys
import time
from collections.abc import Iterator

_ETH_P_ALL, _PACKET_OUTGOING = 3, 4
_SIOCETHTOOL = 0x8946
_OFFLOADS = (0x17, 0x1F, 0x25, 0x2C)  # ETHTOOL_STXCSUM, _STSO, _SGSO and _SGRO: each frame must be complete


def switch_off_offloads(interface: str) -> None:
    """Have the kernel complete checksums and segments of frames that leave through an interface of this namespace."""
    import ctypes

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in _OFFLOADS:
            value = ctypes.create_string_buffer(struct.pack("II", command, 0), 8)
            with contextlib.suppress(OSError):  # an offload may depend on another one that is already off
                fcntl.ioctl(control, _SIOCETHTOOL, struct.pack("16sP", interface.encode(), ctypes.addressof(value)))


class _Way:
    """One direction, from one interface to the other."""

    def __init__(self, source: socket.socket, target: socket.socket, loss: float, reorder: float) -> None:
        self.source, self._target, self._loss, self._reorder = source, target, loss, reorder
        self._late: collections.deque[list[float | int | bytes]] = collections.deque()
        self.lost = self.reordered = self.sent = 0

    def forward(self, rng: random.Random) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                frame, address = self.source.recvfrom(1 << 16)
                if address[2] == _PACKET_OUTGOING:
                    continue
                if rng.random() < self._loss:
                    self.lost += 1
                elif rng.random() < self._reorder:
                    self.reordered += 1
                    self._late.append([time.monotonic() + 0.02, rng.randrange(1, 9), frame])
                else:
                    self._send(frame)
                    for late in self._late:
                        late[1] -= 1  # type: ignore[operator]
                    self.send_late()

    def send_late(self) -> None:
        now = time.monotonic()
        while self._late and (self._late[0][0] <= now or self._late[0][1] <= 0):  # type: ignore[operator]
            self._send(self._late.popleft()[2])  # type: ignore[arg-type]

    def _send(self, frame: bytes) -> None:
        with contextlib.suppress(OSError):  # the queue is full: the frame is lost, too
            self._target.send(frame)
            self.sent += 1


def _interface(name: str) -> socket.socket:
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    made.bind((name, _ETH_P_ALL))
    made.setblocking(False)
    return made


def _ready(ways: list[_Way]) -> Iterator[bool]:
    while True:
        found = select.select([sys.stdin, *(way.source for way in ways)], [], [], 0.005)[0]
        yield sys.stdin not in found


def main(one: str, other: str, loss: str, reorder: str, seed: str) -> None:
    """Forward until stdin ends, then print how many frames were sent, lost and reordered."""
    ends, rng = (_interface(one), _interface(other)), random.Random(int(seed))
    ways = [_Way(*pair, float(loss), float(reorder)) for pair in (ends, ends[::-1])]
    print("ready", flush=True)
    for goes_on in _ready(ways):
        if not goes_on:
            break
        for way in ways:
            way.forward(rng)
            way.send_late()
    print(*(sum(getattr(way, name) for way in ways) for name in ("sent", "lost", "reordered")), flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        switch_off_offloads(sys.argv[1])
    else:
        main(*sys.argv[1:])
