"""Base of the runners of actors.py: a process that has one peer and times its calls on request.

The loops of this file measure all peers, through the methods of `Peer` and `Mesh`. Requests and answers are lines of
JSON on stdin and stdout. The answer to {"do": "round_trip", "n": 300} is {"value": [seconds, ...]} or {"error":
"reason"}. Between requests a runner blocks in read. When stdin ends, it ends with all its workers. This module may
import only the standard library and torch, because runners run in the peers' own environments.
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

HOLD_SECONDS = 3600.0  # duration of a pending call, longer than any test
PR_SET_PDEATHSIG = 1


class Mesh(Protocol):
    """Workers that have answered a no-op. The runner uses noop, pipelined, take and hold with one worker only."""

    def noop(self) -> None:
        """Call a no-op of the worker and wait for the reply."""

    def pipelined(self, n: int) -> None:
        """Send n no-ops to the worker, then wait for all replies."""

    def cast(self) -> None:
        """Call a no-op of every worker and wait for all replies."""

    def take(self, tensor: Any) -> float:
        """Send a tensor to the worker. Return its reply, the last element."""

    def make(self, nbytes: int) -> None:
        """Let the worker make a tensor of ones of this size."""

    def give(self) -> int:
        """Call the worker, which replies with the tensor that it has made. Return the last element."""

    def pids(self) -> list[int]:
        """Return the pids of all workers."""

    def hold(self) -> Callable[[], object]:
        """Start a call in which the worker sleeps. Return a function that waits for the reply."""

    def stop(self) -> None:
        """End the workers. Some may be dead already."""


class Peer(Protocol):
    """A library that is measured."""

    def versions(self) -> str:
        """Return the library's version for the report."""

    def start(self, procs: int) -> Mesh:
        """Start processes that import torch, with one actor in each. Return when all have answered a no-op."""

    def close(self) -> None:
        """End all processes of the library."""


class Cannot(Exception):
    """The peer does not support a case. The text is the reason."""


class Runner:
    """Requests that a runner handles. The pair (one worker) stays to the end, a mesh until the next one or ``drop``."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._pair: Mesh | None = None
        self._mesh: Mesh | None = None
        self._procs = 0

    def round_trip(self, n: int) -> list[float]:
        """Return the seconds of each of n successive no-ops."""
        return _times(self._one().noop, n)

    def pipelined(self, n: int) -> list[float]:
        """Return the calls per second of n pipelined no-ops."""
        pair = self._one()
        pair.pipelined(n // 10)
        start = time.perf_counter()
        pair.pipelined(n)
        return [n / (time.perf_counter() - start)]

    def tensor(self, mib: int, n: int) -> list[float]:
        """Return the seconds of each call with a float32 tensor as argument. Check every reply."""
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

    def payloads(self, nbytes: int, n: int, reply: bool, pause: float = 0.0) -> list[float]:
        """Return the seconds of each of the first n calls of a worker with a large argument, or a large reply.

        No large message was sent before. The same call with a small tensor was made, ``pause`` seconds before.
        """
        import torch

        pair, times = self._one(), []
        pair.make(64)
        for _ in range(10):
            pair.take(torch.ones(64))
            pair.give()
        pair.make(nbytes)
        tensor = torch.ones(nbytes // 4)
        time.sleep(pause)
        for turn in range(n):
            tensor[-1] = turn
            start = time.perf_counter()
            seen = pair.give() if reply else pair.take(tensor)
            times.append(time.perf_counter() - start)
            if seen != (1 if reply else turn):
                raise ValueError(f"the last element is {seen} in call {turn}")
        return times

    def cast(self, procs: int, n: int) -> list[float]:
        """Return the seconds of each of n no-ops of all workers."""
        if self._procs != procs or self._mesh is None:
            self.start(procs)
        assert self._mesh is not None
        return _times(self._mesh.cast, n)

    def start(self, procs: int) -> list[float]:
        """Return the seconds until ``procs`` new processes have answered.

        In a new runner this includes the processes that the library starts once.
        """
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
        """Return the seconds from SIGKILL of a worker to the error of a pending call, and the error's text."""
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
        """Return the private bytes of an idle worker."""
        mesh = self._peer.start(1)
        try:
            return [_private_bytes(pid) for pid in mesh.pids()]
        finally:
            mesh.stop()

    def close(self) -> None:
        """End the mesh, the pair and the library's processes."""
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
    """Yield the path of a FIFO. At the end of the context, wait until a worker has opened and closed it for writing.

    A worker does this inside the call that is to be pending.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "begun")
        os.mkfifo(path)
        yield path
        with open(path, "rb") as file:
            file.read()


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(runner: Any, about: str) -> None:
    """Answer requests from stdin until it ends. Output of libraries goes to stderr."""
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
