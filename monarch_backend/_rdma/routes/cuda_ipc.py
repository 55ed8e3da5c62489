"""GPU memory shared through torch.multiprocessing with processes of this host, where the driver alone can't export it.

This is memory of torch's expandable segments. The owner is asked once for each registration. The first transfer does
not wait for that: it takes another way. torch maps the memory and lends it to the core, which copies
(csrc/memory/ipc_mapping_cache.h).

Only this module of the package depends on torch.multiprocessing. tests/rdma/test_cuda_ipc.py fails when that changes.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from typing import Any

import msgspec
import torch
from torch.multiprocessing import reductions as _reductions

from monarch_backend._actor.runtime import Runtime, program
from monarch_backend._actor.runtime_extension import RuntimeExtension
from monarch_backend._rdma import gpu_memory
from monarch_backend._rdma.control_rpc import ask
from monarch_backend._rdma.errors import RDMAError
from monarch_backend._rdma.registrations import Handle, Registry, Ticket

reductions: Any = _reductions  # it has no type hints

TOPIC = "torch_ipc"

_COUNTER_FILE = 11
"""Index in the arguments of `rebuild_cuda_tensor`: the name of a shared-memory file with torch's reference counters."""

SWEEP_INTERVAL_S = 1.0
"""Seconds between two checks for dropped registrations: no message reports a drop to readers."""

MAX_CACHED_REFUSALS = 1024
"""Refusals that are remembered. For older ones the owner is asked again."""


class CounterFiles(RuntimeExtension):
    """Files of torch's reference counters that this process has made. torch leaves them behind in `os._exit`."""

    def __init__(self, runtime: Runtime) -> None:
        self.names: set[str] = set()
        runtime.last.append(self.close)  # in a process of a mesh

    def close(self) -> None:
        """Delete the files, once. Files that are gone already are skipped."""
        while self.names:
            with contextlib.suppress(OSError):
                os.unlink("/dev/shm/" + self.names.pop().lstrip("/"))


def share(keep: Any, address: int) -> bytes:
    """Return what another process needs to `adopt` the memory.

    Raises RDMAError for memory that torch did not allocate, and RuntimeError from torch.
    """
    if not isinstance(keep, torch.UntypedStorage) or keep.device.type != "cuda":
        raise RDMAError("it is no tensor's memory")
    whole = torch.empty(0, dtype=torch.uint8, device=keep.device).set_(keep)
    rebuild, words = reductions.reduce_tensor(whole)
    if rebuild is not reductions.rebuild_cuda_tensor:
        raise RDMAError("this torch shares it in a way that is not known here")
    if words[_COUNTER_FILE]:
        runtime = program()
        runtime.extensions.extend(CounterFiles, lambda: CounterFiles(runtime)).names.add(
            os.fsdecode(words[_COUNTER_FILE])
        )
    return pickle.dumps((words, address - keep.data_ptr()))


def adopt(shared: bytes) -> tuple[Any, int]:
    """Map shared memory. Return an object that keeps it mapped, and its address. Raises RuntimeError if torch can't."""
    words, offset = pickle.loads(shared)
    tensor = reductions.rebuild_cuda_tensor(*words)
    gpu_memory.settle(tensor.device)
    return tensor, tensor.data_ptr() + offset


def answer(registry: Registry, question: bytes) -> bytes:
    """Answer a reader on the owner's host with `share`. Raises RDMAError, and what `share` raises."""
    memory = registry.memory(msgspec.msgpack.decode(question, type=Ticket))
    if memory is None:
        raise RDMAError("it is not registered any more")
    return share(memory.keep, memory.address)


Name = tuple[str, int, int]
"""Name of a registration: its owner's token, slot and epoch."""


class TorchMappings:
    """Cache of other processes' memory that torch has mapped, kept until the core returns it."""

    def __init__(self, owner: Runtime, registry: Registry) -> None:
        self._program, self._native = owner, registry.native
        self._lock = threading.Lock()
        self._requested: set[Name] = set()  # registrations whose request is under way or has succeeded
        self._refused: dict[Name, str] = {}  # error texts
        self._mapped: dict[Name, Any] = {}
        self._sweeps = False

    def request(self, handle: Handle) -> None:
        """Ask the owner for memory that the driver does not map, once, without waiting for the answer."""
        name = handle.token, handle.ticket[0], handle.ticket[1]
        with self._lock:
            if name in self._requested or name in self._refused:
                return
            self._requested.add(name)
        self._program.run_in_thread(lambda: self._request(handle, name))

    def why_not(self, handle: Handle) -> str:
        return self._refused.get((handle.token, handle.ticket[0], handle.ticket[1]), "")

    def unmap_unused(self) -> None:
        for name in self._native.take_unused_mappings() if self._mapped else ():
            self._unmap(name)

    def _unmap(self, name: Name) -> None:
        with self._lock:
            mapped = self._mapped.pop(name, None)
            self._requested.discard(name)
        del mapped  # its destructor may wait for the driver, so not under the lock

    def forget(self, token: str) -> None:
        self.unmap_unused()
        with self._lock:
            self._refused = {name: why for name, why in self._refused.items() if name[0] != token}

    def _request(self, handle: Handle, name: Name) -> None:
        peer = self._program.router.peer(handle.token)
        try:
            mapped, address = adopt(ask(self._program, peer, TOPIC, msgspec.msgpack.encode(handle.ticket)))
        except Exception as error:  # torch may raise anything: the bytes take another way
            with self._lock:
                self._requested.discard(name)
                self._refused[name] = f"{type(error).__name__}: {error}"
                if len(self._refused) > MAX_CACHED_REFUSALS:
                    del self._refused[next(iter(self._refused))]
            return
        with self._lock:
            self._mapped[name] = mapped
        if not self._native.add_external_mapping(handle.token, handle.ticket, address):  # its owner has ended meanwhile
            self._unmap(name)
            return
        del mapped
        with self._lock:
            begin, self._sweeps = not self._sweeps, True
        if begin:
            self._sweep_later()

    def _sweep_later(self) -> None:
        # Not on the progress's own thread, because drivers are slow to unmap.
        self._program.progress.later(SWEEP_INTERVAL_S, lambda: self._program.run_in_thread(self._sweep))

    def _sweep(self) -> None:
        self.unmap_unused()
        with self._lock:
            self._sweeps = bool(self._mapped)
        if self._sweeps:
            self._sweep_later()
