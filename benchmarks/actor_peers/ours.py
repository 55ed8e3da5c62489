"""Runner of this project's actors, written as user code."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from _runner import HOLD_SECONDS, Mesh, Runner, begun, serve

import monarch_backend.actor
from monarch_backend.actor import Actor, endpoint, this_host


class Worker(Actor):
    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)

    @endpoint
    def noop(self) -> None:
        pass

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def take(self, tensor: torch.Tensor) -> float:
        return float(tensor[-1])

    @endpoint
    def make(self, nbytes: int) -> None:
        self.made = torch.ones(nbytes, dtype=torch.uint8)

    @endpoint
    def give(self) -> torch.Tensor:
        return self.made

    @endpoint
    def hold(self, path: str) -> None:
        with open(path, "wb") as file:
            file.write(b"1")
        time.sleep(HOLD_SECONDS)


class Workers:
    """A process mesh with an actor in each process."""

    def __init__(self, procs: int) -> None:
        self._procs = this_host().spawn_procs(per_host={"procs": procs})
        self._actors: Any = self._procs.spawn("worker", Worker)
        self.cast()

    def noop(self) -> None:
        self._actors.noop.call_one().get()

    def pipelined(self, n: int) -> None:
        call = self._actors.noop.call_one
        for future in [call() for _ in range(n)]:
            future.get()

    def cast(self) -> None:
        self._actors.noop.call().get()

    def take(self, tensor: torch.Tensor) -> float:
        return float(self._actors.take.call_one(tensor).get())

    def make(self, nbytes: int) -> None:
        self._actors.make.call_one(nbytes).get()

    def give(self) -> int:
        return int(self._actors.give.call_one().get()[-1])

    def pids(self) -> list[int]:
        return list(self._actors.pid.call().get().values())

    def hold(self) -> Callable[[], object]:
        with begun() as path:
            future = self._actors.hold.call_one(path)
        return lambda: future.get()

    def stop(self) -> None:
        self._procs.stop("measured").get()


class Ours:
    """monarch_backend as a peer."""

    def versions(self) -> str:
        return f"monarch_backend {version('monarch_backend')}"

    def start(self, procs: int) -> Mesh:
        return Workers(procs)

    def close(self) -> None:
        pass


def _handled(_: object) -> None:
    """Ignore unhandled faults: the benchmark kills workers, which must not end the program."""


if __name__ == "__main__":
    monarch_backend.actor.unhandled_fault_hook = _handled
    torch.set_num_threads(1)
    ours = Ours()
    serve(Runner(ours), ours.versions())
