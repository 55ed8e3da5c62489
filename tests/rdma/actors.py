"""Actors that own and access registered memory, and the routes between them."""

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
    """How processes of one machine come to take a route."""

    name: str  # as RDMABuffer.backend
    environment: dict[str, str] = field(default_factory=dict)
    shared: bool = False  # the memory is that of rdma.empty
    way: int = 2 if _native.is_portable else 1  # as enum CopyMethod (csrc/memory/same_host.h): thread or kernel
    device: bool = False  # the memory is a pretended GPU's, on both sides
    refuses: str = ""  # what its driver refuses
    nic: bool = False  # that is pretended, too, and does not reach the GPU
    torch: bool = False  # and torch, which is pretended, too, knows another way


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
ALONE = ("kernel", "mapped", "verbs", "gpu ipc")
"""Routes on which nobody needs the owner."""


def case(route: str) -> RouteCase:
    """The route of this name."""
    return ROUTES.get(route) or DEVICE_ROUTES[route]


def nics(route: str) -> tuple[str, str]:
    """The device of the owner and that of the reader, if it goes over real ones: on one and the same a NIC would copy
    within itself, and nothing would cross a cable. Skips where there are not two.
    """
    if case(route).name != "verbs" or case(route).nic:
        return "", ""
    reader, owner, *_ = peers.two_devices()
    return owner, reader


def take(route: str, device: str = "") -> None:
    """The bootstrap of a process that is to take this route, on this device if it goes over one."""
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
    """Bytes that repeat after 251, so that no power of two looks alike."""
    one = (torch.arange(251, dtype=torch.int64) * 7 + seed).to(torch.uint8)
    return one.repeat(nbytes // 251 + 1)[:nbytes]


def memory(kind: str, nbytes: int, shared: bool, device: bool = False) -> Any:
    """Memory of this kind and size."""
    if device:
        return pretended_gpu.Array(nbytes, offset=77 if kind == "slice" else 0)
    if kind == "tensor":
        return rdma.empty(nbytes, dtype=torch.uint8).zero_() if shared else torch.zeros(nbytes, dtype=torch.uint8)
    if kind == "slice":  # of a tensor, not aligned to anything
        return memory("tensor", nbytes + 13, shared)[5 : 5 + nbytes]
    if kind == "array":
        return np.zeros(nbytes, dtype=np.uint8)
    if kind == "memoryview":
        return memoryview(bytearray(nbytes))
    raise ValueError(kind)


def as_tensor(value: Any) -> torch.Tensor:
    """The bytes of such memory."""
    if isinstance(value, pretended_gpu.Array):
        return value.content()
    return value if isinstance(value, torch.Tensor) else torch.frombuffer(value, dtype=torch.uint8)


def fill(value: Any, content: torch.Tensor) -> Any:
    """The same memory, with these bytes."""
    if isinstance(value, pretended_gpu.Array):
        value.put(content)
    else:
        as_tensor(value).copy_(content)
    return value


class Process(Actor):
    """Owns memory, or reads that of others."""

    def __init__(self, route: str) -> None:
        self.route = case(route)
        self.kept: dict[RDMABuffer, Any] = {}
        self.last: Any = None

    def mine(self, kind: str, nbytes: int) -> Any:
        """What a reader or writer has."""
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
            buffer.read_into(self.mine("tensor", buffer.size())).get()  # they have met
            found = int(native.copy_method(handle.token, handle.ticket))
            if found == self.route.way or not self.route.torch or time.monotonic() > until:
                return found  # torch's way is there a moment after the first transfer

    @endpoint
    def read(self, buffer: RDMABuffer, kind: str = "tensor", seed: int = 1, timeout: float | None = 30) -> bool:
        into = self.mine(kind, buffer.size())
        buffer.read_into(into, timeout=timeout).get()
        return torch.equal(as_tensor(into), pattern(buffer.size(), seed))

    @endpoint
    def read_into_larger(self, buffer: RDMABuffer, kind: str, by_action: bool) -> tuple[bool, bool]:
        """Whether the buffer's bytes arrived, and whether the rest of the target kept its own."""
        size = buffer.size()
        into = fill(self.mine(kind, size + 4099), pattern(size + 4099, 5))
        transfer = (
            RDMAAction().read_remote(into, buffer).submit if by_action else functools.partial(buffer.read_into, into)
        )
        for _ in range(2):  # a repeated transfer takes a shorter way
            transfer(timeout=30).get()
        found = as_tensor(into)
        return torch.equal(found[:size], pattern(size)), torch.equal(found[size:], pattern(size + 4099, 5)[size:])

    @endpoint
    def says(self, buffer: RDMABuffer, atomic: bool = False) -> list[str]:
        """The lines of MONARCH_DEBUG=1 that three transfers write."""
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
        """Read pieces, all in one action, submitted twice."""
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
        """Until it fails; how, and how long after the last success."""
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
        """Begin to read, and change one's mind."""
        future = buffer.read_into(self.mine("tensor", buffer.size()))
        try:
            future.get(seconds)
        except TimeoutError:
            future.cancel()
        error = future.exception()
        return "done" if error is None else type(error).__name__

    @endpoint
    def gives_up_many(self, stuck: RDMABuffer, healthy: RDMABuffer, count: int) -> list[str]:
        """Read from one who does not answer, many times at once; others are read all the same."""
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
        """One call of C code writes more than fits: whoever reads a byte knows that no Python of this process runs, and
        that none will until he has read all of it.
        """
        with open(fifo, "wb", buffering=0) as pipe:
            return int(ctypes.PyDLL(None).write(pipe.fileno(), bytes(1 << 20), ctypes.c_size_t(1 << 20)))


@contextlib.contextmanager
def no_python_in(owner: ActorMesh) -> Iterator[None]:
    """Meanwhile the process runs none: who needs it has to wait until the end of this."""
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
    """An owner of memory and a reader in processes of their own, which take this route; for fixtures."""
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
