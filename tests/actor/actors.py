"""Actors for tests of messages. Worker processes import this module, so it does not import pytest."""

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

from monarch_backend._processes.linux import stands_still
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
    """Wait until the condition holds, looking often; AssertionError if it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"after {seconds} s still not: {what}"
        time.sleep(0.002)


@contextmanager
def running(sizes: dict[str, int], bootstrap: Callable[[], object] | None = None) -> Iterator[ProcMesh]:
    """Processes that are up, for as long as the block."""
    with this_host().spawn_procs(sizes, bootstrap=bootstrap) as procs:
        procs.initialized.get(PATIENCE)
        yield procs


def comes_back(mesh: ActorMesh, value: Any = "back") -> None:
    """Ask until there is an answer: a call that reaches the dying one may be lost, and says so."""

    def answered() -> bool:
        try:
            return bool(mesh.echo.call_one(value).get(PATIENCE) == value)
        except SupervisionError:
            return False

    until(answered, "somebody answers again")


def resident_bytes(pid: int | str = "self") -> int:
    """Memory of a process that is its own: private pages and those of shared memory that it has touched.

    Not what malloc has free between the pieces that are in use: how much that is depends on the order of threads.
    """
    if pid == "self":
        ctypes.CDLL(None).malloc_trim(0)
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


@contextmanager
def held_up(*pids: int) -> Iterator[None]:
    """These processes stand still; what is sent to them meanwhile they find all at once."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: all(_states(pid) == {"T"} for pid in pids), "the processes stand still")
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):  # it has been killed meanwhile
                os.kill(pid, signal.SIGCONT)


def _states(pid: int) -> set[str]:
    """Of its threads: the signal reaches one, and the others a moment later."""
    if not os.path.isdir("/proc/self"):
        return {"T"} if stands_still(pid) else {"R"}
    found = set()
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # of a thread that has just ended
            found.add(path.read_text().rsplit(")", 1)[1].split()[0])
    return found


def pid_of(one: ActorMesh) -> int:
    """The process of a mesh of one, which must be up."""
    pid = int(one._core.peer(one._shape.ranks[0]).pid)
    assert pid > 0, "it has not connected yet"
    return pid


class PortHolder(Actor):
    """Sends to ports of others, and opens a port of its own, whose receiver is in ``receiver``."""

    receiver: Any

    @endpoint
    def send_to(self, port: Port[Any], value: Any) -> None:
        port.send(value)

    @endpoint
    def open_port(self) -> Port[Any]:
        port, self.receiver = Channel.open()
        return port


class Sync(Actor):
    """A plain actor; what its endpoints give names the rank that has answered."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @endpoint
    def square(self, n: int, *, plus: int = 0) -> tuple[int, int]:
        """(rank, n * n + plus); noted for broadcasts."""
        self.seen.append(n)
        return current_rank().rank, n * n + plus

    @endpoint
    def count(self, n: int, *, plus: int = 0) -> Iterator[tuple[int, int]]:
        """(rank, i + plus) for i below n."""
        self.seen.append(n)
        for i in range(n):
            yield current_rank().rank, i + plus

    @endpoint
    def place(self) -> tuple[int, dict[str, int], dict[str, int]]:
        """Where the message finds itself: rank, coordinates and sizes."""
        return current_rank().rank, dict(current_rank()), current_size()

    @endpoint
    def take_seen(self) -> list[Any]:
        """What has come since the last time."""
        seen, self.seen = self.seen, []
        return seen

    @endpoint
    def echo(self, value: Any) -> Any:
        """The very same."""
        return value

    @endpoint
    def note(self, value: Any) -> None:
        """Keep it for `take_seen`."""
        self.seen.append(value)

    @endpoint
    def fail(self, text: str) -> None:
        """Raise ValueError."""
        raise ValueError(text)

    @endpoint
    def pid(self) -> int:
        """Of the process."""
        return os.getpid()

    @endpoint
    def resident(self) -> int:
        """Bytes of memory, see `resident_bytes`."""
        return resident_bytes()

    @endpoint
    def relay(self, mesh: Any, value: Any) -> Any:
        """The answer of another actor."""
        return mesh.echo.call_one(value).get(PATIENCE)


class Async(Actor):
    """The same with a loop."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @endpoint
    async def square(self, n: int, *, plus: int = 0) -> tuple[int, int]:
        """As Sync's."""
        await asyncio.sleep(0)
        self.seen.append(n)
        return current_rank().rank, n * n + plus

    @endpoint
    async def count(self, n: int, *, plus: int = 0) -> AsyncIterator[tuple[int, int]]:
        """As Sync's."""
        self.seen.append(n)
        for i in range(n):
            await asyncio.sleep(0)
            yield current_rank().rank, i + plus

    @endpoint
    async def place(self) -> tuple[int, dict[str, int], dict[str, int]]:
        """As Sync's."""
        return current_rank().rank, dict(current_rank()), current_size()

    @endpoint
    async def take_seen(self) -> list[Any]:
        """As Sync's."""
        seen, self.seen = self.seen, []
        return seen

    @endpoint
    async def echo(self, value: Any) -> Any:
        """As Sync's."""
        return value

    @endpoint
    async def note(self, value: Any) -> None:
        """As Sync's."""
        self.seen.append(value)

    @endpoint
    async def relay(self, mesh: Any, value: Any) -> Any:
        """As Sync's, awaiting."""
        return await mesh.echo.call_one(value)


class Concurrent(Actor):
    """The same with endpoints that interleave."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @concurrent_endpoint
    async def square(self, n: int, *, plus: int = 0) -> tuple[int, int]:
        """As Sync's."""
        await asyncio.sleep(0)
        self.seen.append(n)
        return current_rank().rank, n * n + plus

    @concurrent_endpoint
    async def count(self, n: int, *, plus: int = 0) -> AsyncIterator[tuple[int, int]]:
        """As Sync's."""
        self.seen.append(n)
        for i in range(n):
            await asyncio.sleep(0)
            yield current_rank().rank, i + plus

    @concurrent_endpoint
    async def place(self) -> tuple[int, dict[str, int], dict[str, int]]:
        """As Sync's."""
        return current_rank().rank, dict(current_rank()), current_size()

    @endpoint
    async def take_seen(self) -> list[Any]:
        """As Sync's."""
        seen, self.seen = self.seen, []
        return seen

    @concurrent_endpoint
    async def echo(self, value: Any) -> Any:
        """As Sync's."""
        return value

    @concurrent_endpoint
    async def relay(self, mesh: Any, value: Any) -> Any:
        """As Sync's, awaiting."""
        return await mesh.echo.call_one(value)


class Gate(Actor):
    """Holds its callers until it is opened; says who waits."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.waiting = 0
        self.came = 0

    @concurrent_endpoint
    async def wait(self) -> int:
        """This rank, once the gate is open."""
        self.came += 1
        self.waiting += 1
        try:
            await self.open.wait()
        finally:
            self.waiting -= 1
        return current_rank().rank

    @endpoint
    async def counts(self) -> tuple[int, int]:
        """How many have come, and how many still wait."""
        return self.came, self.waiting

    @endpoint
    async def let_pass(self) -> None:
        """Whoever waits goes on; the next have to wait again."""
        self.open.set()
        self.open = asyncio.Event()


class Recorder(Actor):
    """Writes down what comes, from whom."""

    def __init__(self) -> None:
        self.came: list[tuple[Any, int]] = []

    @endpoint
    def note(self, sender: Any, i: int, _payload: Any = None) -> tuple[int, int]:
        """(rank, i), once it is written down."""
        self.came.append((sender, i))
        return current_rank().rank, i

    @endpoint
    def count(self, sender: Any, i: int) -> Iterator[int]:
        """As `note`, in a stream."""
        self.came.append((sender, i))
        yield i

    @endpoint
    def fail(self, sender: Any, i: int) -> None:
        """As `note`, with an error."""
        self.came.append((sender, i))
        raise ValueError(f"{sender} {i}")

    @endpoint(explicit_response_port=True)
    def later(self, port: Any, sender: Any, i: int) -> None:
        """As `note`, through a port."""
        self.came.append((sender, i))
        port.send((current_rank().rank, i))

    @endpoint(explicit_response_port=True)
    def through(self, port: Any, other: ActorMesh) -> None:
        """Another one answers."""
        other.use.broadcast(port, current_rank().rank)

    @endpoint
    def use(self, port: Any, value: Any) -> None:
        port.send(value)

    @endpoint
    def by_sender(self) -> dict[Any, list[int]]:
        """The numbers of each sender, in the order in which they came; then it forgets."""
        found: dict[Any, list[int]] = {}
        for sender, i in self.came:
            found.setdefault(sender, []).append(i)
        self.came.clear()
        return found

    @endpoint
    def block(self, size: int, fill: int) -> bytes:
        """So many bytes."""
        return bytes([fill]) * size

    @endpoint
    def flood(self, mesh: Any, sender: Any, n: int) -> int:
        """Send n messages to each rank of the mesh, in every way; None to a port."""
        send_in_every_way(mesh, sender, n)
        return n

    @endpoint
    def large(self, mesh: Any, sender: Any, n: int, size: int) -> None:
        """Send n messages of so many bytes to the mesh; says so when it has to wait."""
        os.environ["MONARCH_DEBUG"] = "1"
        for i in range(n):
            mesh.note.broadcast(sender, i, bytes(size))
        del os.environ["MONARCH_DEBUG"]

    @endpoint
    def fill(self, port: Any, sender: Any, n: int) -> None:
        """Send to a port."""
        for i in range(n):
            port.send((sender, i) if i % 7 else (sender, i, b"x" * 20_000))

    @endpoint
    def hold(self, begun: Any, gate: str) -> None:
        """Nothing else until the gate opens."""
        if begun is not None:
            begun.send(os.getpid())
        pass_gate(gate)

    @endpoint
    def resident(self) -> int:
        """Bytes of memory, see `resident_bytes`."""
        return resident_bytes()

    @endpoint
    def echo(self, value: Any) -> Any:
        """The very same."""
        return value


class AsyncRecorder(Actor):
    """The same, as far as it is needed, on a loop: bodies begin in order."""

    def __init__(self) -> None:
        self.came: list[tuple[Any, int]] = []

    @concurrent_endpoint
    async def note(self, sender: Any, i: int, _payload: Any = None) -> tuple[int, int]:
        """As Recorder's."""
        self.came.append((sender, i))
        await asyncio.sleep(0)
        return current_rank().rank, i

    @concurrent_endpoint
    async def count(self, sender: Any, i: int) -> AsyncIterator[int]:
        """As Recorder's."""
        self.came.append((sender, i))
        yield i

    @endpoint
    async def fail(self, sender: Any, i: int) -> None:
        """As Recorder's."""
        self.came.append((sender, i))
        raise ValueError(f"{sender} {i}")

    @endpoint(explicit_response_port=True)
    async def later(self, port: Any, sender: Any, i: int) -> None:
        """As Recorder's."""
        self.came.append((sender, i))
        port.send((current_rank().rank, i))

    @endpoint
    async def by_sender(self) -> dict[Any, list[int]]:
        """As Recorder's."""
        found: dict[Any, list[int]] = {}
        for sender, i in self.came:
            found.setdefault(sender, []).append(i)
        self.came.clear()
        return found


def send_in_every_way(mesh: Any, sender: Any, n: int) -> list[Any]:
    """Messages 0 to n - 1 to each rank, small and large, by every verb; the futures of those that answer."""
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
        elif way == 3:  # too large for the ring, and for a tree
            mesh.note.broadcast(sender, i, b"x" * 40_000)
        elif way == 4:
            mesh.later.send((sender, i))
        elif way == 5:
            futures.append(mesh.fail.call(sender, i))
        elif way == 6 and len(mesh) > 1:  # two halves
            half = len(mesh) // 2
            flat.slice(r=slice(0, half)).note.broadcast(sender, i)
            futures.append(flat.slice(r=slice(half, None)).later.call(sender, i))
        else:
            futures += list(mesh.note.stream(sender, i))
    return futures
