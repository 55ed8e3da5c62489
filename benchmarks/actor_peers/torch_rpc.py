"""Runner of torch.distributed.rpc.

A process can be in only one RPC world, whose size is fixed. So each mesh has its own caller, a process that is rank 0
and has imported torch before the clock starts. The runner forwards requests to the right caller. In every process,
TensorPipe's shared-memory transport has threads that never sleep. So the runner stops a world (SIGSTOP) between its
requests.

    torch_rpc.py                                 the runner
    torch_rpc.py --caller                        a caller, which takes the same requests
    torch_rpc.py --worker RANK WORLD ADDRESS     a worker
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from _runner import HOLD_SECONDS, Cannot, Mesh, Runner, begun, die_with_parent, serve
from torch.distributed import rpc

PATIENCE = 600.0  # seconds for all workers to join; the default of 60 is too short for 64 imports of torch

# Largest world that uses shared memory. With 65 ranks its connections fail ("connect: Resource temporarily
# unavailable"), so larger worlds use TCP.
SHM_WORLD = 9


def noop() -> None:
    pass


def pid() -> int:
    return os.getpid()


def take(tensor: torch.Tensor) -> float:
    return float(tensor[-1])


def hold(path: str) -> None:
    with open(path, "wb") as file:
        file.write(b"1")
    time.sleep(HOLD_SECONDS)


def _join(rank: int, world: int, address: str) -> None:
    transports = None if world <= SHM_WORLD else ["uv"]
    options = rpc.TensorPipeRpcBackendOptions(init_method=address, rpc_timeout=PATIENCE, _transports=transports)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world, rpc_backend_options=options)


class World:
    """An RPC world of this process and its workers."""

    def __init__(self, procs: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        self._names = [f"worker{rank}" for rank in range(1, procs + 1)]
        self._processes = [_worker(rank, procs + 1, address) for rank in range(1, procs + 1)]
        joined = threading.Event()
        watch = threading.Thread(target=_end_without, args=(self._processes, joined), daemon=True)
        watch.start()
        _join(0, procs + 1, address)
        joined.set()
        watch.join()
        self.cast()

    def noop(self) -> None:
        rpc.rpc_sync("worker1", noop)

    def pipelined(self, n: int) -> None:
        for future in [rpc.rpc_async("worker1", noop) for _ in range(n)]:
            future.wait()

    def cast(self) -> None:
        for future in [rpc.rpc_async(name, noop) for name in self._names]:
            future.wait()

    def take(self, tensor: torch.Tensor) -> float:
        return float(rpc.rpc_sync("worker1", take, args=(tensor,)))

    def pids(self) -> list[int]:
        return [rpc.rpc_sync(name, pid) for name in self._names]

    def hold(self) -> Callable[[], object]:
        with begun() as path:
            future = rpc.rpc_async("worker1", hold, args=(path,))
        return lambda: future.wait()

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()


def _end_without(processes: list[subprocess.Popen[bytes]], joined: threading.Event) -> None:
    """End this process if a worker ends before it joins. Otherwise init_rpc would wait until its timeout."""
    while not joined.wait(0.2):
        if any(process.poll() is not None for process in processes):
            print("a worker ended while the world was made", file=sys.stderr, flush=True)
            os._exit(1)


def _worker(rank: int, world: int, address: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--worker", str(rank), str(world), address]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)


class TorchRpc:
    """torch.distributed.rpc as a peer, with TensorPipe, its only backend. It makes one world."""

    def __init__(self) -> None:
        self._used = False

    def versions(self) -> str:
        return f"torch {torch.__version__}"

    def start(self, procs: int) -> Mesh:
        if self._used:
            raise Cannot("a second RPC world in one process")
        self._used = True
        return World(procs)

    def close(self) -> None:
        pass


class Caller:
    """A caller process, which has one world."""

    def __init__(self) -> None:
        command = [sys.executable, __file__, "--caller"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # its own process group, which is stopped and continued as a whole
        )
        self._answer()

    def ask(self, **order: Any) -> Any:
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return self._answer()
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the caller ended, exit code {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise Cannot(answer["error"])
        return answer["value"]

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            self._process.communicate()  # closes stdin, which ends the caller


class Callers:
    """Requests that this runner handles. It forwards each one to the caller that has the workers for it."""

    def __init__(self) -> None:
        self._pair: Caller | None = None
        self._mesh: Caller | None = None
        self._procs = 0

    def round_trip(self, n: int) -> Any:
        return self._one().ask(do="round_trip", n=n)

    def pipelined(self, n: int) -> Any:
        return self._one().ask(do="pipelined", n=n)

    def tensor(self, mib: int, n: int) -> Any:
        return self._one().ask(do="tensor", mib=mib, n=n)

    def start(self, procs: int) -> Any:
        self.drop()
        self._mesh, self._procs = Caller(), procs
        return self._mesh.ask(do="start", procs=procs)

    def cast(self, procs: int, n: int) -> Any:
        if self._procs != procs or self._mesh is None:
            self.start(procs)
        assert self._mesh is not None
        return self._mesh.ask(do="cast", procs=procs, n=n)

    def drop(self) -> None:
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            mesh.close()

    def death(self) -> Any:
        return self._once("death")

    def memory(self) -> Any:
        return self._once("memory")

    def close(self) -> None:
        self.drop()
        if self._pair is not None:
            self._pair.close()

    def _one(self) -> Caller:
        if self._pair is None:
            self._pair = Caller()
        return self._pair

    def _once(self, order: str) -> Any:
        caller = Caller()
        try:
            return caller.ask(do=order)
        finally:
            caller.close()


def main() -> None:
    """Run the runner, a caller or a worker, as the command line says."""
    torch.set_num_threads(1)
    if "--worker" in sys.argv:
        die_with_parent()
        _join(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
        while True:
            time.sleep(HOLD_SECONDS)  # torch's threads answer calls until the caller kills this process
    about = f"torch {torch.__version__}"
    if "--caller" in sys.argv:
        die_with_parent()
        with contextlib.suppress(KeyboardInterrupt):
            serve(Runner(TorchRpc()), about)
        # At a normal exit torch's agent would wait for workers that have been killed.
        os._exit(0)
    serve(Callers(), about)


if __name__ == "__main__":
    main()
