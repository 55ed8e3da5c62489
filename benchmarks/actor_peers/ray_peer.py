"""Runner of Ray's actors, in .envs/peer-ray.

One raylet runs as long as the runner, without dashboard and without logs to the driver. Each actor is one process with
num_cpus=0.
"""

from __future__ import annotations

import contextlib
import os
import select
import tempfile
import time
from collections.abc import Callable
from typing import Any

import ray
import torch
from _runner import HOLD_SECONDS, Mesh, Runner, begun, serve

OBJECT_STORE_BYTES = 1 << 30
ADDRESS = "127.0.0.2"  # for 127.0.0.1 Ray would use the machine's external address


@ray.remote(num_cpus=0)
class Worker:
    def __init__(self, hold_seconds: float) -> None:
        import torch

        torch.set_num_threads(1)
        self.hold_seconds = hold_seconds

    def noop(self) -> None:
        pass

    def pid(self) -> int:
        return os.getpid()

    def take(self, tensor: torch.Tensor) -> float:
        return float(tensor[-1])

    def make(self, nbytes: int) -> None:
        self.made = torch.ones(nbytes, dtype=torch.uint8)

    def give(self) -> torch.Tensor:
        return self.made

    def hold(self, path: str) -> None:
        with open(path, "wb") as file:
            file.write(b"1")
        time.sleep(self.hold_seconds)


class Workers:
    """Actors, each in its own process."""

    def __init__(self, procs: int) -> None:
        self._actors: list[Any] = [Worker.remote(HOLD_SECONDS) for _ in range(procs)]
        self._first: Any = self._actors[0]
        self._pids = ray.get([actor.pid.remote() for actor in self._actors])

    def noop(self) -> None:
        ray.get(self._first.noop.remote())

    def pipelined(self, n: int) -> None:
        call = self._first.noop.remote
        ray.get([call() for _ in range(n)])

    def cast(self) -> None:
        ray.get([actor.noop.remote() for actor in self._actors])

    def take(self, tensor: torch.Tensor) -> float:
        return float(ray.get(self._first.take.remote(tensor)))

    def make(self, nbytes: int) -> None:
        ray.get(self._first.make.remote(nbytes))

    def give(self) -> int:
        return int(ray.get(self._first.give.remote())[-1])

    def pids(self) -> list[int]:
        return list(self._pids)

    def hold(self) -> Callable[[], object]:
        with begun() as path:
            future = self._first.hold.remote(path)
        return lambda: ray.get(future)

    def stop(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        # ray.kill does not wait. Wait here, so that ending processes do not disturb the next measurement.
        for pid in self._pids:
            _gone(pid)


def _gone(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            select.select([pidfd], [], [], 60.0)
        finally:
            os.close(pidfd)


class Ray:
    """Ray as a peer. It is started with the first workers."""

    def versions(self) -> str:
        return f"ray {ray.__version__}"

    def start(self, procs: int) -> Mesh:
        if not ray.is_initialized():
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address=ADDRESS,
                _temp_dir=os.path.join(tempfile.gettempdir(), "ray"),
            )
        return Workers(procs)

    def close(self) -> None:
        ray.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    peer = Ray()
    serve(Runner(peer), peer.versions())
