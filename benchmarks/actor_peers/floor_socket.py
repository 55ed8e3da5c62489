"""Runner of the floors: Unix sockets between forked processes, memcpy, fork, and a pidfd.

A round trip is 64 bytes each way between two Python processes that block in recv. The scheduler places both on one core
or on two, depending on the load. This makes a factor of two to four, so the pinned cases measure both placements. A
tensor is one copy of its bytes into memory whose pages exist. A start is os.fork of this process, which has imported
torch, until each child has answered. The first start of a runner also imports torch once in a new process. A death is
detected by poll on the child's pidfd.
"""

from __future__ import annotations

import mmap
import os
import platform
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from _runner import Mesh, Runner, die_with_parent, serve

NOOP, HOLD = b"n" * 64, b"h" * 64
WINDOW = 64  # messages in flight; more than a socket's buffers hold would block both sides


class Children:
    """Forked processes, with one socket to each."""

    def __init__(self, procs: int) -> None:
        self._children: list[tuple[int, socket.socket]] = [_forked() for _ in range(procs)]
        self._first = self._children[0][1]
        self._target = mmap.mmap(-1, mmap.PAGESIZE)
        self.cast()

    def noop(self) -> None:
        self._first.sendall(NOOP)
        self._first.recv(64, socket.MSG_WAITALL)

    def pipelined(self, n: int) -> None:
        link, sent, replies, size = self._first, 0, 0, len(NOOP)
        while replies < n * size:
            while sent < n and sent * size - replies < WINDOW * size:
                link.sendall(NOOP)
                sent += 1
            replies += len(link.recv(WINDOW * size))

    def cast(self) -> None:
        for _, link in self._children:
            link.sendall(NOOP)
        for _, link in self._children:
            link.recv(64, socket.MSG_WAITALL)

    def take(self, tensor: Any) -> float:
        source = memoryview(tensor.numpy()).cast("B")
        if len(self._target) != len(source):
            self._target.close()
            self._target = mmap.mmap(-1, len(source))
        self._target[:] = source
        return float(struct.unpack_from("f", self._target, len(source) - 4)[0])

    def pids(self) -> list[int]:
        return [pid for pid, _ in self._children]

    def hold(self) -> Callable[[], object]:
        self._first.sendall(HOLD)
        self._first.recv(64, socket.MSG_WAITALL)
        pidfd = os.pidfd_open(self._children[0][0])

        def wait() -> None:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.poll()
            os.close(pidfd)
            raise ChildProcessError("the pidfd is readable")

        return wait

    def stop(self) -> None:
        for pid, link in self._children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            link.close()
        self._target.close()


def _forked() -> tuple[int, socket.socket]:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent()
            _echo(its)
        finally:
            os._exit(1)
    its.close()
    return pid, ours


def _echo(link: socket.socket) -> None:
    while message := link.recv(64, socket.MSG_WAITALL):
        link.sendall(message)
        if message == HOLD:
            signal.pause()


class FloorRunner(Runner):
    """Requests that the floor handles: those of other runners, and `pinned`."""

    def pinned(self, n: int) -> list[list[float]]:
        """Return the seconds of round trips with both processes on one core, and with both on different cores."""
        cores = sorted(os.sched_getaffinity(0))
        pair = self._one()
        [child] = pair.pids()
        found = []
        try:
            os.sched_setaffinity(0, cores[:1])
            for core in (cores[0], cores[-1]):
                os.sched_setaffinity(child, [core])
                found.append(self.round_trip(n))
        finally:
            os.sched_setaffinity(0, cores)
            os.sched_setaffinity(child, cores)
        return found


class Floor:
    """The floor as a peer."""

    def __init__(self) -> None:
        self._imported = False

    def versions(self) -> str:
        return f"Linux {platform.release()}"

    def start(self, procs: int) -> Mesh:
        if not self._imported:
            subprocess.run([sys.executable, "-c", "import torch"], check=True)
            self._imported = True
        return Children(procs)

    def close(self) -> None:
        pass


if __name__ == "__main__":
    torch.set_num_threads(1)
    floor = Floor()
    serve(FloorRunner(floor), floor.versions())
