"""Actors that own and access registered memory, and the routes between their processes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch

from monarch_backend import _native, rdma
from monarch_backend._rdma import registrations
from monarch_backend._rdma.routes import cuda_ipc
from monarch_backend.actor import Actor, ActorMesh, endpoint, this_host
from monarch_backend.rdma import RDMAAction, RDMABuffer
from tests.rdma import pretended_gpu
from tests.rdma.verbs import cross_process_nics, peers


@dataclass(frozen=True)
class RouteCase:
    """One route, and the settings with which two processes of one machine use it."""

    name: str  # value of RDMABuffer.backend
    environment: dict[str, str] = field(default_factory=dict)
    shared: bool = False  # the memory comes from rdma.empty
    way: int = 2 if _native.is_portable else 1  # enum CopyMethod (csrc/memory/same_host.h): thread or kernel
    device: bool = False  # both sides use memory of a fake GPU
    refuses: str = ""  # functions that the fake GPU's driver refuses
    nic: bool = False  # a fake NIC, which cannot access GPU memory
    torch: bool = False  # fake torch IPC shares the memory, because the driver refuses


ROUTES = {
    "kernel": RouteCase("same host", way=1),
    "mapped": RouteCase("same host", shared=True, way=0),
    "thread": RouteCase("same host", {"MONARCH_CMA": "0"}, way=2),
    "tcp": RouteCase("tcp", {"MONARCH_RDMA_TRANSPORT": "tcp", "MONARCH_TLS": "0"}),
    "verbs": RouteCase("verbs", {"MONARCH_RDMA_TRANSPORT": "verbs"}),
    "tls": RouteCase("tcp", {"MONARCH_RDMA_TRANSPORT": "tcp"}),
}

DEVICE_ROUTES = {
    "gpu ipc": RouteCase("same host", way=3, device=True),
    "gpu thread": RouteCase("same host", {"MONARCH_GPU_IPC": "0"}, way=2, device=True),
    "gpu not exported": RouteCase("same host", way=2, device=True, refuses="ipc_get"),
    "gpu not mapped": RouteCase("same host", way=2, device=True, refuses="ipc_open"),
    "gpu lent": RouteCase("same host", way=4, device=True, refuses="ipc_get", torch=True),
    "gpu tcp": RouteCase("tcp", {"MONARCH_RDMA_TRANSPORT": "tcp", "MONARCH_TLS": "0"}, way=5, device=True),
    "gpu nic": RouteCase(
        "verbs", {"MONARCH_RDMA_TRANSPORT": "verbs", "MONARCH_TLS": "0"}, way=5, device=True, nic=True
    ),
    "gpu verbs": RouteCase("verbs", {"MONARCH_RDMA_TRANSPORT": "verbs"}, way=5, device=True),
    "gpu tls": RouteCase("tcp", {"MONARCH_RDMA_TRANSPORT": "tcp"}, way=5, device=True),
}
ONE_SIDED_ROUTES = ("kernel", "mapped", "verbs", "gpu ipc")
"""Routes on which a transfer needs no action of the owner's process."""


def case(route: str) -> RouteCase:
    """Return the route with this name."""
    return ROUTES.get(route) or DEVICE_ROUTES[route]


def nics(route: str) -> tuple[str, str]:
    """Return the devices of the owner and of the reader, or empty strings if the route uses no real devices.

    The devices differ, because a transfer within one NIC would not cross a cable. Skips if there are fewer than two.
    """
    if case(route).name != "verbs" or case(route).nic:
        return "", ""
    reader, owner, *_ = peers.two_devices()
    return owner, reader


def take(route: str, device: str = "") -> None:
    """Bootstrap a process that uses this route, on this device if the route needs one."""
    os.environ.update(case(route).environment)
    if device:
        os.environ["MONARCH_RDMA_DEVICES"] = device
    if case(route).device:
        pretended_gpu.take(case(route).refuses)
    if case(route).nic:
        cross_process_nics.use()
    if case(route).torch:
        cuda_ipc.share, cuda_ipc.adopt = pretended_gpu.share, pretended_gpu.adopt


def pattern(nbytes: int, seed: int = 1) -> torch.Tensor:
    """Bytes with a period of 251, so that no two blocks at powers of two are equal."""
    one = (torch.arange(251, dtype=torch.int64) * 7 + seed).to(torch.uint8)
    return one.repeat(nbytes // 251 + 1)[:nbytes]


def memory(kind: str, nbytes: int, shared: bool, device: bool = False) -> Any:
    """Allocate memory of this kind and size."""
    if device:
        return pretended_gpu.Array(nbytes, offset=77 if kind == "slice" else 0)
    if kind == "tensor":
        return rdma.empty(nbytes, dtype=torch.uint8).zero_() if shared else torch.zeros(nbytes, dtype=torch.uint8)
    if kind == "slice":  # part of a tensor, without any alignment
        return memory("tensor", nbytes + 13, shared)[5 : 5 + nbytes]
    if kind == "array":
        return np.zeros(nbytes, dtype=np.uint8)
    if kind == "memoryview":
        return memoryview(bytearray(nbytes))
    raise ValueError(kind)


def as_tensor(value: Any) -> torch.Tensor:
    """Return the bytes of such memory as a tensor."""
    if isinstance(value, pretended_gpu.Array):
        return value.content()
    return value if isinstance(value, torch.Tensor) else torch.frombuffer(value, dtype=torch.uint8)


def fill(value: Any, content: torch.Tensor) -> Any:
    """Fill the memory with these bytes, and return it."""
    if isinstance(value, pretended_gpu.Array):
        value.put(content)
    else:
        as_tensor(value).copy_(content)
    return value


class Process(Actor):
    """Owns memory, or reads the memory of other actors."""

    def __init__(self, route: str) -> None:
        self.route = case(route)
        self.kept: dict[RDMABuffer, Any] = {}
        self.last: Any = None

    def mine(self, kind: str, nbytes: int) -> Any:
        """Allocate local memory for a reader or writer."""
        return memory(kind, nbytes, shared=False, device=self.route.device)

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def own(self, kind: str, nbytes: int, seed: int = 1) -> RDMABuffer:
        self.last = fill(memory(kind, nbytes, self.route.shared, self.route.device), pattern(nbytes, seed))
        return RDMABuffer(self.last)

    @endpoint
    def own_value(self, value: Any) -> RDMABuffer:
        self.last = value
        return RDMABuffer(value)

    @endpoint
    def shows(self, nbytes: int, seed: int) -> bool:
        return torch.equal(as_tensor(self.last), pattern(nbytes, seed))

    @endpoint
    def value(self) -> Any:
        return self.last

    @endpoint
    def drop(self, buffer: RDMABuffer) -> int:
        buffer.drop()
        return registrations.registry().count()

    @endpoint
    def backend(self, buffer: RDMABuffer) -> str:
        return buffer.backend

    @endpoint
    def way(self, buffer: RDMABuffer) -> int:
        handle = buffer._handle
        native, until = registrations.registry().native, time.monotonic() + 10
        while True:
            buffer.read_into(self.mine("tensor", buffer.size())).get()  # both processes are connected after a transfer
            found = int(native.copy_method(handle.token, handle.ticket))
            if found == self.route.way or not self.route.torch or time.monotonic() > until:
                return found  # torch's IPC mapping exists shortly after the first transfer

    @endpoint
    def read(self, buffer: RDMABuffer, kind: str = "tensor", seed: int = 1, timeout: float | None = 30) -> bool:
        into = self.mine(kind, buffer.size())
        buffer.read_into(into, timeout=timeout).get()
        return torch.equal(as_tensor(into), pattern(buffer.size(), seed))

    @endpoint
    def read_into_larger(self, buffer: RDMABuffer, kind: str, by_action: bool) -> tuple[bool, bool]:
        """Return whether the buffer's bytes arrived, and whether the rest of the target is unchanged."""
        size = buffer.size()
        into = fill(self.mine(kind, size + 4099), pattern(size + 4099, 5))
        transfer = (
            RDMAAction().read_remote(into, buffer).submit if by_action else functools.partial(buffer.read_into, into)
        )
        for _ in range(2):  # the second transfer uses a cached plan
            transfer(timeout=30).get()
        found = as_tensor(into)
        return torch.equal(found[:size], pattern(size)), torch.equal(found[size:], pattern(size + 4099, 5)[size:])

    @endpoint
    def debug_lines(self, buffer: RDMABuffer, atomic: bool = False) -> list[str]:
        """Return the lines that MONARCH_DEBUG=1 prints during three transfers."""
        said = io.StringIO()
        with mock.patch.dict(os.environ, MONARCH_DEBUG="1"), contextlib.redirect_stderr(said):
            for _ in range(3):
                if atomic:
                    buffer.fetch_add(1, timeout=30).get()
                else:
                    buffer.read_into(self.mine("tensor", buffer.size()), timeout=30).get()
        return said.getvalue().splitlines()

    @endpoint
    def read_value(self, buffer: RDMABuffer, into: Any, timeout: float | None = 30) -> Any:
        buffer.read_into(into, timeout=timeout).get()
        return into

    @endpoint
    def write(self, buffer: RDMABuffer, kind: str = "tensor", seed: int = 2, timeout: float | None = 30) -> None:
        source = fill(self.mine(kind, buffer.size()), pattern(buffer.size(), seed))
        buffer.write_from(source, timeout=timeout).get()

    @endpoint
    def write_value(self, buffer: RDMABuffer, value: Any) -> None:
        buffer.write_from(value, timeout=30).get()

    @endpoint
    def add(self, buffer: RDMABuffer, amount: int, times: int = 1, offset: int = 0) -> list[int]:
        return [buffer.fetch_add(amount, offset, timeout=30).get() for _ in range(times)]

    @endpoint
    def swap(self, buffer: RDMABuffer, compare: int, swap: int, offset: int = 0) -> int:
        return buffer.compare_and_swap(compare, swap, offset, timeout=30).get()

    @endpoint
    def scatter(self, buffer: RDMABuffer, ranges: list[tuple[int, int]]) -> bool:
        """Read all pieces in one action, submitted twice."""
        pieces = [self.mine("tensor", stop - start) for start, stop in ranges]
        action = RDMAAction()
        for piece, (start, stop) in zip(pieces, ranges, strict=True):
            action.read_remote(piece, buffer[start:stop])
        whole = pattern(buffer.size())
        for _ in range(2):
            for piece in pieces:
                fill(piece, torch.zeros(len(as_tensor(piece)), dtype=torch.uint8))
            action.submit(timeout=30).get()
            if not all(torch.equal(as_tensor(p), whole[a:b]) for p, (a, b) in zip(pieces, ranges, strict=True)):
                return False
        return True

    @endpoint
    def read_for_ever(self, buffer: RDMABuffer, seconds: float = 30) -> str:
        """Read until a transfer fails. Return the error and the seconds since the last success."""
        into = self.mine("tensor", buffer.size())
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            begun = time.monotonic()
            try:
                buffer.read_into(into).get()
            except rdma.RDMAError as error:
                return f"{type(error).__name__} after {time.monotonic() - begun:.3f} s: {error}"
        return "it went on"

    @endpoint
    def cancel_after(self, buffer: RDMABuffer, seconds: float) -> str:
        """Start a read and cancel it after ``seconds``."""
        future = buffer.read_into(self.mine("tensor", buffer.size()))
        try:
            future.get(seconds)
        except TimeoutError:
            future.cancel()
        error = future.exception()
        return "done" if error is None else type(error).__name__

    @endpoint
    def gives_up_many(self, stuck: RDMABuffer, healthy: RDMABuffer, count: int) -> list[str]:
        """Start many reads from an owner that does not answer, and cancel them. Meanwhile read from a healthy owner."""
        futures = [stuck.read_into(torch.empty(stuck.size(), dtype=torch.uint8)) for _ in range(count)]
        healthy.read_into(torch.empty(healthy.size(), dtype=torch.uint8), timeout=10).get()
        for future in futures:
            future.cancel()
        return [type(future.exception()).__name__ for future in futures]

    @endpoint
    def add_within(self, buffer: RDMABuffer, seconds: float) -> str:
        error = buffer.fetch_add(1, timeout=seconds).exception()
        return "done" if error is None else type(error).__name__

    @endpoint
    def hold_interpreter_until_read(self, fifo: str) -> int:
        """Block in one C call that holds the GIL and writes more than a pipe's capacity.

        A test that has read a byte knows that no Python runs in this process until the test has read everything.
        """
        with open(fifo, "wb", buffering=0) as pipe:
            return int(ctypes.PyDLL(None).write(pipe.fileno(), bytes(1 << 20), ctypes.c_size_t(1 << 20)))


@contextlib.contextmanager
def no_python_in(owner: ActorMesh) -> Iterator[None]:
    """Stop all Python in the owner's process during the block. A request to its Python waits until the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        fifo = f"{folder}/held"
        os.mkfifo(fifo)
        holding = owner.hold_interpreter_until_read.call_one(fifo)
        with open(fifo, "rb", buffering=0) as pipe:
            assert len(pipe.read(1)) == 1
            yield
            while pipe.read(1 << 16):
                pass
        assert holding.get(30) == 1 << 20


def two_processes(route: str, kind: type[Process] = Process) -> Iterator[tuple[ActorMesh, ActorMesh]]:
    """Start an owner of memory and a reader in separate processes that use this route. For fixtures."""
    procs = [
        this_host().spawn_procs({"gpus": 1}, bootstrap=functools.partial(take, route, device), name=f"memory {route}")
        for device in nics(route)
    ]
    owner, reader = (each.spawn("process", kind, route) for each in procs)
    for each in (owner, reader):
        each.pid.call().get()
    yield owner, reader
    for mesh in procs:
        mesh.stop().get(30)
