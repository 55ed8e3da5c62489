"""Forked processes that stand for hosts: each has an engine on its own device and runs commands.

A fork is fast, whereas an import of torch takes ten seconds. The commands are functions at module level. Their first
argument is the process's `Host`.
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
from monarch_backend._verbs.work_requests import Segment

PATIENCE = 60.0
"""Limit in seconds for any operation. The guest has one processor."""

_forks = multiprocessing.get_context("fork")


def two_devices() -> list[str]:
    """Return the names of usable verbs devices. Skips if there are fewer than two."""
    if reason := available():
        pytest.skip(reason)
    found = sorted({port.device for port in survey() if port.active})
    if len(found) < 2:
        pytest.skip("two verbs devices are needed; make test-rdma has them")
    return found


def crossed(what: str) -> int:
    """Return the bytes that crossed the guest's cable, counted at the reader's end."""
    return int(Path("/sys/class/net/v0/statistics", f"{what}_bytes").read_text())


def lock_at_most(nbytes: int) -> None:
    """Limit the memory that this process may lock. Call this before other threads start.

    The process keeps its user, because other processes refuse another user. It drops only the privilege that lifts
    the limit.
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
        """Fill the memory with bytes that depend on their offset."""
        block = bytes((seed + i * 7 + (i >> 8)) & 0xFF for i in range(min(self.nbytes, 1 << 16)))
        for start in range(0, self.nbytes, len(block)):
            self.view[start : start + len(block)] = block[: self.nbytes - start]
            if start:
                self.view[start] = (seed + start // len(block)) & 0xFF


class Outcome:
    """The argument of `done`, the number of its calls, and the calling thread."""

    def __init__(self) -> None:
        self._got: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.calls = 0
        self.thread = ""

    def __call__(self, outcome: Any) -> None:
        self.calls += 1
        self.thread = threading.current_thread().name
        self._got.put(outcome)

    def wait(self, patience: float = PATIENCE) -> Any:
        """Wait for the outcome, and raise it if it is an error."""
        outcome = self._got.get(timeout=patience)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


@dataclass
class Host:
    """State of the forked process."""

    engine: Engine
    memory: dict[str, Memory] = field(default_factory=dict)
    regions: dict[str, Region] = field(default_factory=dict)
    running: dict[str, Outcome] = field(default_factory=dict)
    posted: dict[str, int] = field(default_factory=dict)
    streams: list[Any] = field(default_factory=list)

    def transfer(
        self, peer: str, kind: Any, region: bytes, segments: list[Segment], memory: str, patience: float = PATIENCE
    ) -> None:
        """Run a transfer and wait for its end."""
        done = Outcome()
        self.engine.transfer(peer, kind, Region.from_bytes(region), segments, self.memory[memory].view, done)
        done.wait(patience)
        assert done.calls == 1
        assert done.thread == "monarch-verbs"


class Peer:
    """A forked process, as the test sees it. Functions that it runs get its Host as first argument."""

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
        """Start a function in the process. `end` returns its result."""
        self._pipe.send((function, arguments))

    def end(self, patience: float = PATIENCE) -> Any:
        """Return the function's result, or raise its error, caused by the text of its traceback."""
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
        """Return the name of the peer to which the process's engine wants to connect."""
        if not self._dials.poll(patience):
            raise TimeoutError(f"{self.name} has dialed nobody")
        return str(self._dials.recv())

    def dials_waiting(self) -> bool:
        """Return whether the engine wants to connect to a peer."""
        return bool(self._dials.poll(0))

    def kill(self) -> None:
        """Kill the process, as a crash would."""
        assert self.process.pid
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(PATIENCE)

    def close(self) -> None:
        """End the process, cleanly if possible."""
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
    """Wait until ``holds()`` is true. Return False after ``patience`` seconds."""
    deadline = time.monotonic() + patience
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


# ---- functions that run in hosts


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
    """Run a transfer whose segments have offsets into the local memory instead of addresses."""
    base = host.memory[memory].address
    host.transfer(peer, kind, region, [(far, base + near, nbytes) for far, near, nbytes in segments], memory)


def introduce(asking: Peer, owner: Peer) -> None:
    """Carry the connection offer to the owner, and the owner's answer back."""
    answer = owner(accept, asking.name, asking(offer, owner.name))
    asking(connect, owner.name, answer)


def digest(host: Host, name: str) -> str:
    return hashlib.blake2b(host.memory[name].view).hexdigest()


def fill(host: Host, name: str, seed: int) -> None:
    host.memory[name].fill(seed)
