"""Forked processes that stand for hosts: each has an engine on a device of its own, and runs commands.

A fork is cheap where importing torch takes ten seconds. Functions for them are at module level, and get the process's
`Host`.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import multiprocessing
import os
import queue
import resource
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._verbs import Engine, Region, Settings, available
from monarch_backend._verbs.discovery import survey
from monarch_backend._verbs.engine import Segment

PATIENCE = 60.0
"""Seconds for anything; the guest has one processor."""

_forks = multiprocessing.get_context("fork")


def two_devices() -> list[str]:
    """The names of verbs devices that can be used; skips where there are not two."""
    if reason := available():
        pytest.skip(reason)
    found = sorted({port.device for port in survey() if port.active})
    if len(found) < 2:
        pytest.skip("two verbs devices are needed; make test-rdma has them")
    return found


def crossed(what: str) -> int:
    """Bytes of the guest's cable, as the reader's end counts them."""
    return int(Path("/sys/class/net/v0/statistics", f"{what}_bytes").read_text())


def lock_at_most(nbytes: int) -> None:
    """This process, from before it has other threads. It stays who it is, for others let nobody else in; what goes is
    the privilege that lifts the limit.
    """
    assert len(os.listdir("/proc/self/task")) == 1, "a privilege is a thread's own"
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (nbytes, resource.RLIM_INFINITY))
    libc, ipc_lock = ctypes.CDLL(None, use_errno=True), 14
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    for i in range(3):  # effective, permitted, inheritable
        sets[i] &= ~(1 << ipc_lock)
    assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())


class Memory:
    """Anonymous pages of this process."""

    def __init__(self, nbytes: int, *, shared: bool = False) -> None:
        self.map = mmap.mmap(-1, nbytes, mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE)
        self.view = memoryview(self.map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.nbytes = nbytes

    def fill(self, seed: int) -> None:
        """With bytes that say where they are."""
        block = bytes((seed + i * 7 + (i >> 8)) & 0xFF for i in range(min(self.nbytes, 1 << 16)))
        for start in range(0, self.nbytes, len(block)):
            self.view[start : start + len(block)] = block[: self.nbytes - start]
            if start:
                self.view[start] = (seed + start // len(block)) & 0xFF


class Outcome:
    """What `done` was called with, and how often."""

    def __init__(self) -> None:
        self._got: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.calls = 0
        self.thread = ""

    def __call__(self, outcome: Any) -> None:
        self.calls += 1
        self.thread = threading.current_thread().name
        self._got.put(outcome)

    def wait(self, patience: float = PATIENCE) -> Any:
        """Raises what is an error."""
        outcome = self._got.get(timeout=patience)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


@dataclass
class Host:
    """In the forked process."""

    engine: Engine
    memory: dict[str, Memory] = field(default_factory=dict)
    regions: dict[str, Region] = field(default_factory=dict)
    running: dict[str, Outcome] = field(default_factory=dict)
    posted: dict[str, int] = field(default_factory=dict)
    streams: list[Any] = field(default_factory=list)

    def transfer(
        self, peer: str, kind: Any, region: bytes, segments: list[Segment], memory: str, patience: float = PATIENCE
    ) -> None:
        """And wait for it."""
        done = Outcome()
        self.engine.transfer(peer, kind, Region.from_bytes(region), segments, self.memory[memory].view, done)
        done.wait(patience)
        assert done.calls == 1
        assert done.thread == "monarch-verbs"


class Peer:
    """A forked process, from here. Its functions get its Host first."""

    def __init__(self, name: str, device: str, binding: str, environment: dict[str, Any] | None = None) -> None:
        self.name = name
        self._pipe, theirs = _forks.Pipe()
        self._dials, their_dials = _forks.Pipe(duplex=False)
        settings = Settings(devices=tuple((d, 0) for d in device.split(",")), binding=binding, **(environment or {}))
        self.process = _forks.Process(target=_live, args=(theirs, their_dials, settings), name=name, daemon=True)
        self.process.start()
        theirs.close()
        their_dials.close()
        self._lock = threading.Lock()

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have it done; `end` has the result."""
        self._pipe.send((function, arguments))

    def end(self, patience: float = PATIENCE) -> Any:
        """What it returned; raises what it raised, with its traceback noted."""
        if not self._pipe.poll(patience):
            raise TimeoutError(f"{self.name} has not answered within {patience} s")
        ok, outcome = self._pipe.recv()
        if not ok:
            error, text = outcome
            raise error from RuntimeError(text)
        return outcome

    def __call__(self, function: Callable[..., Any], *arguments: Any, patience: float = PATIENCE) -> Any:
        self.begin(function, *arguments)
        return self.end(patience)

    def wants(self, patience: float = PATIENCE) -> str:
        """Whom its engine wants dialed."""
        if not self._dials.poll(patience):
            raise TimeoutError(f"{self.name} has dialed nobody")
        return str(self._dials.recv())

    def dials_waiting(self) -> bool:
        """It wants somebody dialed."""
        return bool(self._dials.poll(0))

    def kill(self) -> None:
        """As a crash would."""
        assert self.process.pid
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(PATIENCE)

    def close(self) -> None:
        """End the process cleanly, if it can."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self.process.join(PATIENCE)
        if self.process.is_alive():
            self.kill()
        self._pipe.close()
        self._dials.close()
        self.process.close()


def _live(pipe: Any, dials: Any, settings: Settings) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    host = Host(Engine(dials.send, settings=settings))
    try:
        while (told := pipe.recv()) is not None:
            function, arguments = told
            try:
                pipe.send((True, function(host, *arguments)))
            except BaseException as error:
                pipe.send((False, (error, traceback.format_exc())))
    except EOFError:
        pass
    finally:
        host.engine.close()
        os._exit(0)


def until(holds: Callable[[], bool], patience: float = PATIENCE) -> bool:
    """It does, in time."""
    deadline = time.monotonic() + patience
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


# ---- what hosts are told


def offer(host: Host, peer: str) -> bytes:
    return host.engine.offer(peer)


def accept(host: Host, peer: str, data: bytes) -> bytes:
    return host.engine.accept(peer, data)


def connect(host: Host, peer: str, data: bytes) -> None:
    host.engine.connect(peer, data)


def gone(host: Host, peer: str, why: str) -> None:
    host.engine.peer_gone(peer, why)


def allocate(host: Host, name: str, nbytes: int, seed: int | None = None) -> None:
    memory = host.memory[name] = Memory(nbytes)
    if seed is not None:
        memory.fill(seed)


def expose(host: Host, name: str, nbytes: int, seed: int | None = None, writable: bool = True) -> bytes:
    allocate(host, name, nbytes, seed)
    memory = host.memory[name]
    region = host.regions[name] = host.engine.expose(memory.address, nbytes, memory.view, writable=writable)
    return region.to_bytes()


def release(host: Host, name: str) -> None:
    host.engine.release(host.regions.pop(name))


def content(host: Host, name: str, start: int, end: int) -> bytes:
    return bytes(host.memory[name].view[start:end])


def move(host: Host, peer: str, kind: str, region: bytes, segments: list[Segment], memory: str) -> None:
    """Segments with offsets into the memory instead of addresses."""
    base = host.memory[memory].address
    host.transfer(peer, kind, region, [(far, base + near, nbytes) for far, near, nbytes in segments], memory)


def introduce(asking: Peer, owner: Peer) -> None:
    """Carry the offer there and the answer back."""
    answer = owner(accept, asking.name, asking(offer, owner.name))
    asking(connect, owner.name, answer)


def digest(host: Host, name: str) -> str:
    return hashlib.blake2b(host.memory[name].view).hexdigest()


def fill(host: Host, name: str, seed: int) -> None:
    host.memory[name].fill(seed)
