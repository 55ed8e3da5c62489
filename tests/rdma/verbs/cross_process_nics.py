"""Fake NICs, one for each process. The kernel moves the bytes, by process_vm_readv and process_vm_writev.

They serve the default run of tests with two processes. Unlike fabric.py, these NICs check no keys. They cannot access
memory of fake GPUs.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as File

from monarch_backend import _native
from monarch_backend._rdma.routes import verbs
from monarch_backend._verbs import engine, open_device
from monarch_backend._verbs.discovery import PortFacts
from monarch_backend._verbs.providers.provider import READ, WRITE, Completion, Limits, Path, Port, Work
from monarch_backend._verbs.wire_format import ROCE_V2, Gid

REMOTE_ACCESS, FLUSHED, RETRIES = 10, 5, 12
_numbers = itertools.count(100)
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class NicBehaviour:
    """Behaviour of this process's NIC, from the moment that a test sets a field."""

    fails: int = 0  # this many requests fail as if the peer did not answer
    silent: bool = False  # new queue pairs do not run work requests
    unreachable: bool = False  # connections fail with ENETUNREACH
    memory: int = 1 << 60  # largest registration in bytes
    takes_gpus: bool = False  # GPU memory can be registered, although no NIC can access it


behaviour = NicBehaviour()


class _Range(ctypes.Structure):
    """C's struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


def use() -> None:
    """Replace the NICs of this process by one fake NIC."""
    address = bytes(10) + b"\xff\xff" + os.getpid().to_bytes(4, "big")
    facts = [PortFacts("across0", 1, "ACTIVE", True, (Gid(1, ROCE_V2, address),), -1)]
    open_device.discovery.usable = lambda *_: facts  # type: ignore[assignment]
    engine.available = verbs.available = lambda *_, **__: None  # type: ignore[assignment]
    engine.load = lambda _="": FakeBinding()  # type: ignore[assignment]


class FakeBinding:
    """The binding of the fake NIC."""

    def open_nic(self, device: str, completions: int) -> _Nic:
        return _Nic(device, completions)


class _Registered:
    def __init__(self, nbytes: int) -> None:
        if nbytes > behaviour.memory:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        self.lkey = self.rkey = next(_numbers)

    def close(self) -> None:
        """Nothing to release."""


class _Nic:
    def __init__(self, name: str, completions: int) -> None:
        self.name, self.limits = name, Limits(256, completions, 16, 16)
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._completions: deque[Completion] = deque()
        self._armed = False

    def port(self, number: int) -> Port:
        return Port(True, True, 0, 5, 1 << 30)

    def arm(self) -> None:
        with self._lock:
            self._armed = True

    def take_event(self) -> None:
        os.eventfd_read(self.fd)

    def poll(self, most: int) -> list[Completion]:
        with self._lock:
            return [self._completions.popleft() for _ in range(min(most, len(self._completions)))]

    def tell(self, completion: Completion) -> None:
        with self._lock:
            self._completions.append(completion)
            told, self._armed = self._armed, False
        if told:
            os.eventfd_write(self.fd, 1)

    def register(self, address: int, nbytes: int, access: int) -> _Registered:
        if _native.gpu_device_of(address) >= 0 and not behaviour.takes_gpus:
            raise OSError(errno.EFAULT, "Bad address")
        return _Registered(nbytes)

    def register_dmabuf(self, fd: int, offset: int, nbytes: int, address: int, access: int) -> _Registered:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    def queue_pair(self, depth: int) -> _Pair:
        return _Pair(self)

    def close(self) -> None:
        os.close(self.fd)


class _Pair:
    def __init__(self, nic: _Nic) -> None:
        self._nic, self.number = nic, next(_numbers)
        self._pid = 0
        self._broken, self._silent = False, behaviour.silent

    def initialize(self, port: int, access: int) -> None:
        """Nothing to initialize."""

    def connect(self, path: Path) -> None:
        if behaviour.unreachable:
            raise OSError(errno.ENETUNREACH, "Network is unreachable")
        self._pid = int.from_bytes(path.gid[12:], "big")

    def post(self, works: Sequence[Work]) -> None:
        for work in works:
            if self._silent and work.nbytes:
                return
            status = FLUSHED if self._broken else self._do(work)
            self._broken = self._broken or status != 0
            if status or work.signaled:
                self._nic.tell(Completion(work.id, status, self.number, 0))

    def _do(self, work: Work) -> int:
        if not work.nbytes:
            return 0 if _lives(self._pid) else RETRIES
        if behaviour.fails:
            behaviour.fails -= 1
            return RETRIES
        assert work.opcode in (READ, WRITE), "atomics are not carried"
        move = _libc.process_vm_readv if work.opcode == READ else _libc.process_vm_writev
        here, there = _Range(work.local, work.nbytes), _Range(work.remote, work.nbytes)
        if move(self._pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) == work.nbytes:
            return 0
        return RETRIES if ctypes.get_errno() == errno.ESRCH else REMOTE_ACCESS

    def close(self) -> None:
        """Nothing to release: no request is in progress."""


def _lives(pid: int) -> bool:
    try:
        return File(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
