"""Owners of memory that is read and written over TCP: forked processes with a command pipe.

An owner's Python runs only during a command. The tests examine its native threads between commands.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from typing import Any

from monarch_backend import _native
from monarch_backend._transport.network.tls import Ders

MIB = 1 << 20
Ticket = tuple[int, int, int]


class Memory:
    """Bytes at a fixed address."""

    def __init__(self, size: int, content: bytes = b"") -> None:
        self._map = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map[: len(content)] = content
        self.size = size
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def __getitem__(self, part: slice) -> bytes:
        return self._map[part]

    def __setitem__(self, part: slice, content: bytes) -> None:
        self._map[part] = content

    def all(self) -> list[tuple[int, int, int]]:
        """Return one segment with all of the memory, at offset 0 of the registration."""
        return [(0, self.address, self.size)]


def identity(token: str, secret: bytes, tls: bool, ders_of: bytes | None = None) -> _native.MemoryIdentity:
    """Make a process's identity. ``ders_of`` is another secret from which to derive the certificates."""
    if not tls:
        return _native.MemoryIdentity(token, secret)
    ders = Ders.of_secret(secret if ders_of is None else ders_of)
    return _native.MemoryIdentity(token, secret, ders.certificate, ders.key, ders.ca)


def threads() -> list[str]:
    """Return the names of this process's native threads that serve or read memory."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as comm:
            names.append(comm.read().strip())
    return sorted(name for name in names if name in ("monarch_door", "monarch_serve", "monarch_stream"))


def descriptors() -> int:
    """Return the number of open descriptors."""
    return len(os.listdir("/proc/self/fd"))


class _Service:
    """The service in an owner's process."""

    def __init__(self, secret: bytes, token: str, tls: bool, most: int, address: str) -> None:
        self.table = _native.Memory(_native.Host(16 * MIB))
        self.kept: dict[int, Memory] = {}
        self.before = descriptors()
        self.address, self.mine, self.most = address, identity(token, secret, tls), most
        self.port = 0
        self.restart()

    def restart(self) -> None:
        """Close all connections, and listen again on the same port."""
        self.server = _native.MemoryServer(self.table, self.mine, self.most)
        self.port = self.server.listen(self.address, self.port)

    def listening(self) -> int:
        return self.port

    def add(self, content: bytes, writable: bool = True) -> Ticket:
        memory = Memory(len(content), content)
        ticket = self.table.add(memory.address, len(content), writable)
        self.kept[ticket[0]] = memory
        return ticket

    def drop(self, ticket: Ticket, seconds: float = 1.0) -> int:
        return self.table.drop(ticket, seconds)

    def content(self, ticket: Ticket) -> bytes:
        return self.kept[ticket[0]][:]

    def connections(self) -> int:
        return self.server.connections()

    def threads(self) -> list[str]:
        return threads()

    def freeze(self) -> None:
        """Hold the GIL until the process is killed."""
        ctypes.PyDLL(None).sleep(1000)

    def close(self) -> tuple[list[str], int]:
        self.server.close()
        del self.server
        return threads(), descriptors() - self.before


class Owner:
    """A process that serves memory. :func:`owner` makes one."""

    def __init__(self, tls: bool, most: int = 1024, address: str = "127.0.0.1") -> None:
        self.secret, self.token = os.urandom(32), os.urandom(16).hex()
        self.tls, self.address = tls, address
        self._pipe, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._pipe.close()
                service = _Service(self.secret, self.token, tls, most, address)
                while True:
                    name, words = theirs.recv()
                    theirs.send(getattr(service, name)(*words))
            except EOFError:
                os._exit(0)
            finally:
                os._exit(1)
        theirs.close()
        self.port: int = self.ask("listening")

    def tell(self, name: str, *words: Any) -> None:
        """Send a command without waiting for its result."""
        self._pipe.send((name, words))

    def ask(self, name: str, *words: Any) -> Any:
        """Run a command in the owner and return its result."""
        self.tell(name, *words)
        assert self._pipe.poll(20), f"{name} took too long"
        return self._pipe.recv()

    def hear(self, seconds: float) -> Any:
        """Return the result of a command that `tell` sent."""
        assert self._pipe.poll(seconds), "no answer in time"
        return self._pipe.recv()

    def client(self, streams: int = 4, **other: Any) -> _native.MemoryClient:
        """Connect a client in this process to the owner. ``other`` replaces parts of its identity or of the address."""
        mine = identity(
            os.urandom(16).hex(), other.get("secret", self.secret), other.get("tls", self.tls), other.get("ders_of")
        )
        port = other.get("port", self.port)
        return _native.MemoryClient(self.address, port, mine, other.get("whom", self.token), streams)

    def connect(self) -> socket.socket:
        """Open a connection without a handshake."""
        return socket.create_connection((self.address, self.port), timeout=10)

    def signal(self, number: int) -> None:
        """Send a signal to the owner's process."""
        os.kill(self.pid, number)

    def stop(self) -> None:
        """Stop all threads of the owner's process before returning."""
        self.signal(signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def end(self) -> None:
        """Kill the owner's process."""
        self._pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


@contextlib.contextmanager
def owner(tls: bool = False, **options: Any) -> Iterator[Owner]:
    """Start an owner, and kill it at the end."""
    made = Owner(tls, **options)
    try:
        yield made
    finally:
        made.end()


class Narrow:
    """A proxy between one client and an owner. It forwards only as many of the owner's bytes as it is told to."""

    ALL = 1 << 60

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._owner = socket.create_connection(("127.0.0.1", port))
        self._ears, self._bell = socket.socketpair()
        self._left = self.ALL  # number of the owner's bytes to forward
        self._passed = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def let_through(self, nbytes: int) -> None:
        """Forward this number of bytes from now on."""
        self._passed.clear()
        self._bell.send(nbytes.to_bytes(8, "little"))

    def wait(self) -> None:
        """Wait until they are forwarded."""
        assert self._passed.wait(20), "the owner has sent less"

    def _run(self) -> None:
        if self._ears in select.select([self._listener, self._ears], [], [])[0]:
            return
        with self._listener.accept()[0] as client, contextlib.suppress(OSError):
            while self._pass_on(client):
                pass

    def _pass_on(self, client: socket.socket) -> bool:
        """Forward available bytes. Return False at the end of either stream."""
        ready = select.select([client, self._ears, *([self._owner] if self._left else [])], [], [])[0]
        if self._ears in ready:
            told = self._ears.recv(8)
            self._left = int.from_bytes(told, "little")
        elif client in ready:
            told = client.recv(1 << 16)
            self._owner.sendall(told)
        else:
            told = self._owner.recv(min(self._left, 1 << 16))
            client.sendall(told)
            self._left -= len(told)
        if not self._left:
            self._passed.set()
        return bool(told)

    def __enter__(self) -> Narrow:
        return self

    def __exit__(self, *_: object) -> None:
        self._bell.close()
        self._thread.join()
        for each in (self._listener, self._owner, self._ears):
            each.close()


class Background:
    """A call on a separate thread."""

    def __init__(self, call: Any, *words: Any) -> None:
        self.result: Any = None
        self._thread = threading.Thread(target=self._run, args=(call, *words))
        self._thread.start()

    def _run(self, call: Any, *words: Any) -> None:
        self.result = call(*words)

    def wait(self, seconds: float = 20.0) -> Any:
        """Return the call's result."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "it still waits"
        return self.result

    @property
    def over(self) -> bool:
        """Whether the call has ended."""
        return not self._thread.is_alive()
