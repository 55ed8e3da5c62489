"""Base of the runners of actors.py: a process that holds one peer and times its calls on order.

Every peer is measured by the loops of this file, through the few methods of `Peer` and `Mesh`. Orders and answers are
lines of JSON on stdin and stdout: {"do": "round_trip", "n": 300} is answered {"value": [seconds, ...]}, or {"error":
"why not"}. Between orders a runner sleeps in read. It ends, with all its workers, when stdin does. Only the standard
library and torch may be imported here: runners run in the peers' own environments.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

HOLD_SECONDS = 3600.0  # how long a pending call would last
PR_SET_PDEATHSIG = 1


class Mesh(Protocol):
    """Workers that have answered a no-op. noop, pipelined, take and hold are asked of meshes of one worker only."""

    def noop(self) -> None:
        """A round trip to the worker."""

    def pipelined(self, n: int) -> None:
        """n no-ops to the worker, all sent before the first reply is asked for."""

    def cast(self) -> None:
        """A no-op of every worker, and all their replies."""

    def take(self, tensor: Any) -> float:
        """Send a tensor to the worker; its reply is the last element."""

    def pids(self) -> list[int]:
        """Of all workers."""

    def hold(self) -> Callable[[], object]:
        """A call in which the worker sleeps by now; what is returned waits for the reply."""

    def stop(self) -> None:
        """End the workers, dead ones too."""


class Peer(Protocol):
    """One library."""

    def versions(self) -> str:
        """For the reader."""

    def start(self, procs: int) -> Mesh:
        """New processes, with torch imported, one actor in each; returns when all have answered a no-op."""

    def close(self) -> None:
        """Leave nothing behind."""


class Cannot(Exception):
    """What this peer has no way to do; the text is the reason."""


class Runner:
    """What a runner can be told. A pair (one worker) stays for good, a mesh until the next one or ``drop``."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._pair: Mesh | None = None
        self._mesh: Mesh | None = None
        self._procs = 0

    def round_trip(self, n: int) -> list[float]:
        """Seconds of each of n no-ops in a row."""
        return _times(self._one().noop, n)

    def pipelined(self, n: int) -> list[float]:
        """Calls a second."""
        pair = self._one()
        pair.pipelined(n // 10)
        start = time.perf_counter()
        pair.pipelined(n)
        return [n / (time.perf_counter() - start)]

    def tensor(self, mib: int, n: int) -> list[float]:
        """Seconds of each call with a float32 tensor as argument; every reply is compared."""
        import torch

        pair, times = self._one(), []
        tensor = torch.ones(mib << 18)
        for turn in range(n + 1):
            tensor[-1] = turn
            start = time.perf_counter()
            reply = pair.take(tensor)
            times.append(time.perf_counter() - start)
            if reply != turn:
                raise ValueError(f"the worker saw {reply} in the tensor, not {turn}")
        return times[1:]

    def cast(self, procs: int, n: int) -> list[float]:
        """Seconds of each of n no-ops of all workers."""
        if self._procs != procs or self._mesh is None:
            self.start(procs)
        assert self._mesh is not None
        return _times(self._mesh.cast, n)

    def start(self, procs: int) -> list[float]:
        """Seconds until this many new processes have answered; in a new runner, with what the library starts once."""
        self.drop()
        start = time.perf_counter()
        self._mesh = self._peer.start(procs)
        took = time.perf_counter() - start
        self._procs = procs
        return [took]

    def drop(self) -> None:
        """End the mesh."""
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            mesh.stop()

    def death(self) -> dict[str, Any]:
        """Seconds from SIGKILL of a worker to the error of the call that waits for it, and what the error says."""
        mesh = self._peer.start(1)
        try:
            [pid] = mesh.pids()
            wait = mesh.hold()
            start = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            try:
                wait()
            except Exception as error:
                return {"seconds": time.perf_counter() - start, "says": f"{type(error).__name__}: {error}"[:2000]}
            raise RuntimeError("the call on a killed worker ended without an error")
        finally:
            mesh.stop()

    def memory(self) -> list[int]:
        """Bytes of an idle worker that no other process shares."""
        mesh = self._peer.start(1)
        try:
            return [_private_bytes(pid) for pid in mesh.pids()]
        finally:
            mesh.stop()

    def close(self) -> None:
        """End everything."""
        self.drop()
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.stop()
        self._peer.close()

    def _one(self) -> Mesh:
        if self._pair is None:
            self._pair = self._peer.start(1)
        return self._pair


def _times(call: Callable[[], None], n: int) -> list[float]:
    clock, times = time.perf_counter, [0.0] * n
    for _ in range(n // 10 + 1):
        call()
    start = clock()
    for index in range(n):
        call()
        now = clock()
        times[index] = now - start
        start = now
    return times


def _private_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup", encoding="utf-8") as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Private_"))


@contextlib.contextmanager
def begun() -> Iterator[str]:
    """A path that the worker shall open for writing when it is in the call; the end of the block waits for that."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "begun")
        os.mkfifo(path)
        yield path
        with open(path, "rb") as file:
            file.read()


def die_with_parent() -> None:
    """Have the kernel end this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(runner: Any, about: str) -> None:
    """Do the orders that come on stdin; what libraries print goes to stderr."""
    orders = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    _answer(answers, {"value": about})
    try:
        for line in orders:
            order = json.loads(line)
            try:
                value = getattr(runner, order.pop("do"))(**order)
            except Exception as error:
                text = str(error) if isinstance(error, Cannot) else f"{type(error).__name__}: {error}"
                _answer(answers, {"error": text[:2000]})
            else:
                _answer(answers, {"value": value})
    finally:
        runner.close()
        sys.stderr.flush()


def _answer(answers: Any, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
