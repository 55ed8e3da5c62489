"""Fake libibverbs for one process: devices whose queue pairs move memory in order, when a test lets them.

The fakes are as strict as hardware. A queue has room for a fixed number of work requests, keys are checked, and only
signaled or failed requests complete.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from monarch_backend._verbs.providers.provider import (
    COMPARE_SWAP,
    FETCH_ADD,
    READ,
    REMOTE_READ,
    REMOTE_WRITE,
    WRITE,
    Completion,
    Limits,
    Path,
    Port,
    Work,
)

REMOTE_ACCESS, FLUSHED, RETRIES = 10, 5, 12


@dataclass
class Registered:
    nic: FakeNic
    address: int
    nbytes: int
    access: int
    lkey: int
    rkey: int
    shift: int = 0  # offset from GPU addresses to addresses that this process can access
    mapped: mmap.mmap | None = None

    def close(self) -> None:
        self.nic.fabric.fail_if(self.nic.fabric.removed)
        del self.nic.registered[self.rkey]
        self.nic.closed += 1
        if self.mapped is not None:
            self.mapped.close()

    def covers(self, address: int, nbytes: int) -> bool:
        return self.address <= address and address + nbytes <= self.address + self.nbytes


class FakePair:
    def __init__(self, nic: FakeNic, depth: int) -> None:
        self.nic, self.depth = nic, depth
        self.number = next(nic.fabric.numbers)
        self.path: Path | None = None
        self.access = 0
        self.posted: deque[Work] = deque()
        self.unpolled = 0
        self.most = 0
        self.broken = False
        self.silent = nic.fabric.silent
        self.closed = False
        nic.fabric.pairs[self.number] = self

    def initialize(self, port: int, access: int) -> None:
        self.access = access

    def connect(self, path: Path) -> None:
        if path.gid in self.nic.fabric.unreachable:
            raise OSError(errno.ENETUNREACH, "Network is unreachable")
        self.path = path

    def post(self, works: Sequence[Work]) -> None:
        with self.nic.fabric.lock:
            assert len(self.posted) + len(works) <= self.depth, "the send queue overflows"
            assert works[-1].signaled, "nobody would hear of the last"
            self.posted.extend(works)
            self.most = max(self.most, len(self.posted))
            self.nic.fabric.batches.append([work.signaled for work in works])
        if self.nic.fabric.at_once:
            self.nic.fabric.run()

    def close(self) -> None:
        with self.nic.fabric.lock:
            assert not self.closed, "closed twice"
            self.closed = True
            self.nic.fabric.fail_if(self.nic.fabric.stuck)
            del self.nic.fabric.pairs[self.number]

    def step(self) -> bool:
        """Run the next work request. Return whether there was one."""
        if not self.posted or self.path is None or (self.silent and self.posted[0].nbytes):
            return False
        work = self.posted.popleft()
        if self.broken:
            self._complete(work, FLUSHED)
            return True
        status = self._do(work)
        if status:
            self.broken = True
        if status or work.signaled:
            self._complete(work, status)
        return True

    def _complete(self, work: Work, status: int) -> None:
        self.nic.completions.append(Completion(work.id, status, self.number, 0))
        assert len(self.nic.completions) <= self.nic.limits.completions, "the completion queue overflows"
        self.nic.tell()

    def _do(self, work: Work) -> int:
        assert self.path is not None
        other = self.nic.fabric.pairs.get(self.path.number)
        if other is None or self.nic.fabric.dead:
            return RETRIES
        if not work.nbytes:
            return 0
        assert work.nbytes <= self.nic.message, "a message longer than the port takes"
        mine = self.nic.registered[work.lkey]
        assert mine.covers(work.local, work.nbytes)
        there = other.nic.registered.get(work.rkey)
        needed = REMOTE_READ if work.opcode == READ else REMOTE_WRITE
        if there is None or not there.covers(work.remote, work.nbytes) or not there.access & other.access & needed:
            return REMOTE_ACCESS
        local, remote = work.local + mine.shift, work.remote + there.shift
        if work.opcode == READ:
            ctypes.memmove(local, remote, work.nbytes)
        elif work.opcode == WRITE:
            ctypes.memmove(remote, local, work.nbytes)
        else:
            ctypes.memmove(local, remote, 8)
            value = ctypes.c_uint64.from_address(remote)
            if work.opcode == FETCH_ADD:
                value.value += work.compare_add
            elif work.opcode == COMPARE_SWAP and value.value == work.compare_add:
                value.value = work.swap
        return 0


class FakeNic:
    def __init__(self, fabric: Fabric, name: str, completions: int) -> None:
        self.fabric, self.name = fabric, name
        self.limits = Limits(fabric.depth, min(completions, fabric.completions), 16, 16)
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.registered: dict[int, Registered] = {}
        self.completions: deque[Completion] = deque()
        self.armed = False
        self.opened = self.closed = 0
        self.left = False  # still open because it could not be closed
        self.memory = fabric.memory
        self.message = fabric.message
        fabric.nics.append(self)

    def port(self, number: int) -> Port:
        return Port(True, True, 0, 5, self.message)

    def arm(self) -> None:
        self.armed = True

    def tell(self) -> None:
        if self.armed:
            self.armed = False
            os.eventfd_write(self.fd, 1)

    def take_event(self) -> None:
        os.eventfd_read(self.fd)

    def poll(self, most: int) -> list[Completion]:
        with self.fabric.lock:
            return [self.completions.popleft() for _ in range(min(most, len(self.completions)))]

    def register(self, address: int, nbytes: int, access: int) -> Registered:
        with self.fabric.lock:
            if sum(r.nbytes for r in self.registered.values()) + nbytes > self.memory:
                raise OSError(errno.ENOMEM, "Cannot allocate memory")
            shift = 0
            for start, size, real in self.fabric.gpus:
                if start <= address < start + size:
                    if not self.fabric.peer_memory:
                        raise OSError(errno.EFAULT, "Bad address")
                    shift = real - start
            return self._registered(address, nbytes, access, shift)

    def register_dmabuf(self, fd: int, offset: int, nbytes: int, address: int, access: int) -> Registered:
        if not self.fabric.dma_buf:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        with self.fabric.lock:
            mapped = mmap.mmap(fd, 0)
            assert offset + nbytes <= len(mapped)
            real = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
            made = self._registered(address, nbytes, access, real + offset - address)
            made.mapped = mapped
            return made

    def _registered(self, address: int, nbytes: int, access: int, shift: int) -> Registered:
        key = next(self.fabric.numbers) << 8
        if self.fabric.stingy:
            key = next(number << 8 for number in itertools.count(1) if number << 8 not in self.registered)
        self.opened += 1
        self.registered[key] = Registered(self, address, nbytes, access, key, key, shift)
        return self.registered[key]

    def queue_pair(self, depth: int) -> FakePair:
        return FakePair(self, min(depth, self.limits.depth))

    def close(self) -> None:
        self.left = self.fabric.stuck
        self.fabric.fail_if(self.left)
        assert not self.registered, "closed with memory registered"
        os.close(self.fd)


@dataclass
class Fabric:
    """The devices of a test, and their binding. With ``at_once``, work requests run when they are posted."""

    at_once: bool = True
    depth: int = 1024
    completions: int = 1 << 16
    memory: int = 1 << 40
    message: int = 1 << 30
    dead: bool = False
    stuck: bool = False  # queue pairs cannot be destroyed, and devices cannot be closed
    removed: bool = False  # memory cannot be deregistered either
    silent: bool = False  # new queue pairs accept work requests but do not run them
    # address, bytes, and address that this process can access
    gpus: list[tuple[int, int, int]] = field(default_factory=list)
    peer_memory: bool = False
    dma_buf: bool = False
    stingy: bool = False  # a new registration gets the first free key
    unreachable: set[bytes] = field(default_factory=set)
    nics: list[FakeNic] = field(default_factory=list)
    pairs: dict[int, FakePair] = field(default_factory=dict)
    batches: list[list[bool]] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(100))

    def open_nic(self, device: str, completions: int) -> FakeNic:
        return FakeNic(self, device, completions)

    def fail_if(self, condition: bool) -> None:
        """Raise the error of a device that was removed or reset."""
        if condition:
            raise OSError(errno.EIO, "Input/output error")

    def forget(self) -> None:
        """Drop queue pairs and devices that could not be destroyed."""
        with self.lock:
            self.pairs = {number: pair for number, pair in self.pairs.items() if not pair.closed}
            for nic in self.nics:
                if nic.left:
                    nic.closed, nic.left = nic.opened, False
                    os.close(nic.fd)

    def run(self, most: int = 1 << 60) -> int:
        """Run posted work requests, one of each queue pair in turn."""
        done = 0
        with self.lock:
            while done < most and sum(pair.step() for pair in list(self.pairs.values())):
                done += 1
        return done
