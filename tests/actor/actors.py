"""Actors and helpers for tests of messages. Worker processes import this module, so it does not import pytest."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from monarch_backend._processes.system_calls import stands_still
from monarch_backend.actor import (
    Actor,
    ActorMesh,
    Channel,
    Port,
    ProcMesh,
    SupervisionError,
    concurrent_endpoint,
    current_rank,
    current_size,
    endpoint,
    this_host,
)
from tests.actor.support import PATIENCE, pass_gate


def until(condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    """Poll until the condition holds. Raises AssertionError after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"after {seconds} s still not: {what}"
        time.sleep(0.002)


@contextmanager
def running(sizes: dict[str, int], bootstrap: Callable[[], object] | None = None) -> Iterator[ProcMesh]:
    """Yield a mesh whose processes have started. Stop it at the end of the block."""
    with this_host().spawn_procs(sizes, bootstrap=bootstrap) as procs:
        procs.initialized.get(4 * PATIENCE)  # dozens of processes without fork each import torch
        yield procs


def comes_back(mesh: ActorMesh, value: Any = "back") -> None:
    """Call ``echo`` until it answers.

    A call that reaches the dying process may be lost; then it raises SupervisionError.
    """

    def answered() -> bool:
        try:
            return bool(mesh.echo.call_one(value).get(PATIENCE) == value)
        except SupervisionError:
            return False

    until(answered, "somebody answers again")


def resident_bytes(pid: int | str = "self") -> int:
    """Return the bytes of private memory of a process, and of shared memory that it has touched.

    The current process first returns freed memory to the system: how much malloc keeps depends on the order of threads.
    """
    if pid == "self":
        ctypes.CDLL(None).malloc_trim(0)
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


@contextmanager
def stopped_processes(*pids: int) -> Iterator[None]:
    """Stop these processes with SIGSTOP for the duration of the block, so that messages to them stay unread."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: all(_states(pid) == {"T"} for pid in pids), "the processes stand still")
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):  # the process has been killed meanwhile
                os.kill(pid, signal.SIGCONT)


def _states(pid: int) -> set[str]:
    """Return the states of a process's threads. SIGSTOP reaches one thread first and the others a moment later."""
    if not os.path.isdir("/proc/self"):
        return {"T"} if stands_still(pid) else {"R"}
    found = set()
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # the thread has just ended
            found.add(path.read_text().rsplit(")", 1)[1].split()[0])
    return found


def pid_of(one: ActorMesh) -> int:
    """Return the pid of the process of a mesh of one rank. The process must have connected."""
    pid = int(one._core.peer(one._shape.ranks[0]).pid)
    assert pid > 0, "it has not connected yet"
    return pid


class PortHolder(Actor):
    """Sends values to given ports. Opens a port of its own, whose receiver is in ``receiver``."""

    receiver: Any

    @endpoint
    def send_to(self, port: Port[Any], value: Any) -> None:
        port.send(value)

    @endpoint
    def open_port(self) -> Port[Any]:
        port, self.receiver = Channel.open()
        return port


class Sync(Actor):
    """An actor without an event loop. The results of its endpoints name the rank that answered."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @endpoint
    def square(self, n: int, *, plus: int = 0) -> tuple[int, int]:
        """Return (rank, n * n + plus). Add ``n`` to ``seen``, so that broadcasts can be checked."""
        self.seen.append(n)
        return current_rank().rank, n * n + plus

    @endpoint
    def count(self, n: int, *, plus: int = 0) -> Iterator[tuple[int, int]]:
        """Yield (rank, i + plus) for each i below n."""
        self.seen.append(n)
        for i in range(n):
            yield current_rank().rank, i + plus

    @endpoint
    def place(self) -> tuple[int, dict[str, int], dict[str, int]]:
        """Return rank, coordinates and sizes that the context of the message has."""
        return current_rank().rank, dict(current_rank()), current_size()

    @endpoint
    def take_seen(self) -> list[Any]:
        """Return the values seen since the last call of this endpoint."""
        seen, self.seen = self.seen, []
        return seen

    @endpoint
    def echo(self, value: Any) -> Any:
        """Return the argument."""
        return value

    @endpoint
    def note(self, value: Any) -> None:
        """Keep the value for `take_seen`."""
        self.seen.append(value)

    @endpoint
    def fail(self, text: str) -> None:
        raise ValueError(text)

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def resident(self) -> int:
        return resident_bytes()

    @endpoint
    def relay(self, mesh: Any, value: Any) -> Any:
        """Return the answer of another actor's ``echo``."""
        return mesh.echo.call_one(value).get(PATIENCE)


class Async(Actor):
    """The endpoints of `Sync` as ``async`` functions."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @endpoint
    async def square(self, n: int, *, plus: int = 0) -> tuple[int, int]:
        await asyncio.sleep(0)
        self.seen.append(n)
        return current_rank().rank, n * n + plus

    @endpoint
    async def count(self, n: int, *, plus: int = 0) -> AsyncIterator[tuple[int, int]]:
        self.seen.append(n)
        for i in range(n):
            await asyncio.sleep(0)
            yield current_rank().rank, i + plus

    @endpoint
    async def place(self) -> tuple[int, dict[str, int], dict[str, int]]:
        return current_rank().rank, dict(current_rank()), current_size()

    @endpoint
    async def take_seen(self) -> list[Any]:
        seen, self.seen = self.seen, []
        return seen

    @endpoint
    async def echo(self, value: Any) -> Any:
        return value

    @endpoint
    async def note(self, value: Any) -> None:
        self.seen.append(value)

    @endpoint
    async def relay(self, mesh: Any, value: Any) -> Any:
        return await mesh.echo.call_one(value)


class Concurrent(Actor):
    """The endpoints of `Sync` as concurrent endpoints."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @concurrent_endpoint
    async def square(self, n: int, *, plus: int = 0) -> tuple[int, int]:
        await asyncio.sleep(0)
        self.seen.append(n)
        return current_rank().rank, n * n + plus

    @concurrent_endpoint
    async def count(self, n: int, *, plus: int = 0) -> AsyncIterator[tuple[int, int]]:
        self.seen.append(n)
        for i in range(n):
            await asyncio.sleep(0)
            yield current_rank().rank, i + plus

    @concurrent_endpoint
    async def place(self) -> tuple[int, dict[str, int], dict[str, int]]:
        return current_rank().rank, dict(current_rank()), current_size()

    @endpoint
    async def take_seen(self) -> list[Any]:
        seen, self.seen = self.seen, []
        return seen

    @concurrent_endpoint
    async def echo(self, value: Any) -> Any:
        return value

    @concurrent_endpoint
    async def relay(self, mesh: Any, value: Any) -> Any:
        return await mesh.echo.call_one(value)


class Gate(Actor):
    """Blocks calls of ``wait`` until `let_pass`, and counts the blocked calls."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.waiting = 0
        self.came = 0

    @concurrent_endpoint
    async def wait(self) -> int:
        """Wait until the gate opens. Return the rank."""
        self.came += 1
        self.waiting += 1
        try:
            await self.open.wait()
        finally:
            self.waiting -= 1
        return current_rank().rank

    @endpoint
    async def counts(self) -> tuple[int, int]:
        """Return how many calls of ``wait`` have arrived, and how many are still blocked."""
        return self.came, self.waiting

    @endpoint
    async def let_pass(self) -> None:
        """Release the blocked calls of ``wait``. Later calls block again."""
        self.open.set()
        self.open = asyncio.Event()


class Recorder(Actor):
    """Records the sender and the number of each message."""

    def __init__(self) -> None:
        self.came: list[tuple[Any, int]] = []

    @endpoint
    def note(self, sender: Any, i: int, _payload: Any = None) -> tuple[int, int]:
        """Record the message. Return (rank, i)."""
        self.came.append((sender, i))
        return current_rank().rank, i

    @endpoint
    def count(self, sender: Any, i: int) -> Iterator[int]:
        """Record the message. Yield its number."""
        self.came.append((sender, i))
        yield i

    @endpoint
    def fail(self, sender: Any, i: int) -> None:
        """Record the message. Raise ValueError."""
        self.came.append((sender, i))
        raise ValueError(f"{sender} {i}")

    @endpoint(explicit_response_port=True)
    def later(self, port: Any, sender: Any, i: int) -> None:
        """Record the message. Reply through the port."""
        self.came.append((sender, i))
        port.send((current_rank().rank, i))

    @endpoint(explicit_response_port=True)
    def through(self, port: Any, other: ActorMesh) -> None:
        """Let another actor reply through the port."""
        other.use.broadcast(port, current_rank().rank)

    @endpoint
    def use(self, port: Any, value: Any) -> None:
        port.send(value)

    @endpoint
    def by_sender(self) -> dict[Any, list[int]]:
        """Return the numbers of each sender in the order of arrival, and clear the record."""
        found: dict[Any, list[int]] = {}
        for sender, i in self.came:
            found.setdefault(sender, []).append(i)
        self.came.clear()
        return found

    @endpoint
    def block(self, size: int, fill: int) -> bytes:
        """Return ``size`` bytes."""
        return bytes([fill]) * size

    @endpoint
    def flood(self, mesh: Any, sender: Any, n: int) -> int:
        """Call `send_in_every_way`."""
        send_in_every_way(mesh, sender, n)
        return n

    @endpoint
    def large(self, mesh: Any, sender: Any, n: int, size: int) -> None:
        """Send n messages of ``size`` bytes to the mesh. With MONARCH_DEBUG=1 the process logs its waits."""
        os.environ["MONARCH_DEBUG"] = "1"
        for i in range(n):
            mesh.note.broadcast(sender, i, bytes(size))
        del os.environ["MONARCH_DEBUG"]

    @endpoint
    def fill(self, port: Any, sender: Any, n: int) -> None:
        """Send n values to a port."""
        for i in range(n):
            port.send((sender, i) if i % 7 else (sender, i, b"x" * 20_000))

    @endpoint
    def hold(self, begun: Any, gate: str) -> None:
        """Block the actor until the gate opens."""
        if begun is not None:
            begun.send(os.getpid())
        pass_gate(gate)

    @endpoint
    def resident(self) -> int:
        return resident_bytes()

    @endpoint
    def echo(self, value: Any) -> Any:
        return value


class AsyncRecorder(Actor):
    """Some endpoints of `Recorder` as ``async`` functions. Their bodies begin in the order of the messages."""

    def __init__(self) -> None:
        self.came: list[tuple[Any, int]] = []

    @concurrent_endpoint
    async def note(self, sender: Any, i: int, _payload: Any = None) -> tuple[int, int]:
        self.came.append((sender, i))
        await asyncio.sleep(0)
        return current_rank().rank, i

    @concurrent_endpoint
    async def count(self, sender: Any, i: int) -> AsyncIterator[int]:
        self.came.append((sender, i))
        yield i

    @endpoint
    async def fail(self, sender: Any, i: int) -> None:
        self.came.append((sender, i))
        raise ValueError(f"{sender} {i}")

    @endpoint(explicit_response_port=True)
    async def later(self, port: Any, sender: Any, i: int) -> None:
        self.came.append((sender, i))
        port.send((current_rank().rank, i))

    @endpoint
    async def by_sender(self) -> dict[Any, list[int]]:
        found: dict[Any, list[int]] = {}
        for sender, i in self.came:
            found.setdefault(sender, []).append(i)
        self.came.clear()
        return found


def send_in_every_way(mesh: Any, sender: Any, n: int) -> list[Any]:
    """Send messages 0 to n - 1 to each rank, small and large, with every verb.

    Return the futures of those with replies.
    """
    futures: list[Any] = []
    whole = range(len(mesh))
    flat = mesh.flatten("r")
    for i in range(n):
        way = i % 8
        if way == 0:
            mesh.note.broadcast(sender, i)
        elif way == 1:
            futures.append(mesh.note.call(sender, i))
        elif way == 2:
            futures += [flat.slice(r=r).note.call_one(sender, i) for r in whole]
        elif way == 3:  # larger than a ring, and sent without a tree
            mesh.note.broadcast(sender, i, b"x" * 40_000)
        elif way == 4:
            mesh.later.send((sender, i))
        elif way == 5:
            futures.append(mesh.fail.call(sender, i))
        elif way == 6 and len(mesh) > 1:  # to the two halves of the mesh
            half = len(mesh) // 2
            flat.slice(r=slice(0, half)).note.broadcast(sender, i)
            futures.append(flat.slice(r=slice(half, None)).later.call(sender, i))
        else:
            futures += list(mesh.note.stream(sender, i))
    return futures
