"""Runner of PyTorch Monarch's actors (torchmonarch on PyPI), in .envs/peer-torchmonarch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import monarch.actor
import torch
from _runner import HOLD_SECONDS, Mesh, Runner, begun, serve
from monarch.actor import Actor, endpoint, this_host
from monarch.config import configure

# 64 imports of torch on few cores take longer than the default timeout of 30 s.
PATIENCE = "600s"


class Worker(Actor):
    def __init__(self, hold_seconds: float) -> None:
        import torch

        torch.set_num_threads(1)
        self.hold_seconds = hold_seconds

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
    def hold(self, path: str) -> None:
        with open(path, "wb") as file:
            file.write(b"1")
        time.sleep(self.hold_seconds)


class Workers:
    """A process mesh with an actor in each process."""

    def __init__(self, procs: int) -> None:
        self._procs = this_host().spawn_procs(per_host={"procs": procs})
        self._actors: Any = self._procs.spawn("worker", Worker, HOLD_SECONDS)
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

    def pids(self) -> list[int]:
        return list(self._actors.pid.call().get().values())

    def hold(self) -> Callable[[], object]:
        with begun() as path:
            future = self._actors.hold.call_one(path)
        return lambda: future.get()

    def stop(self) -> None:
        self._procs.stop("measured").get()


class Torchmonarch:
    """PyTorch Monarch as a peer."""

    def versions(self) -> str:
        return f"torchmonarch {version('torchmonarch')}"

    def start(self, procs: int) -> Mesh:
        return Workers(procs)

    def close(self) -> None:
        monarch.actor.shutdown_context().get()


def _handled(_: object) -> None:
    """Ignore unhandled faults: the benchmark kills workers, which must not end the program."""


if __name__ == "__main__":
    monarch.actor.unhandled_fault_hook = _handled
    configure(mesh_proc_spawn_max_idle=PATIENCE, actor_spawn_max_idle=PATIENCE, proc_stop_max_idle=PATIENCE)
    torch.set_num_threads(1)
    peer = Torchmonarch()
    serve(Runner(peer), peer.versions())
