"""Shared memory of one process for all of its groups: one arena, one progress thread.

This module has its size, its limits, and tensors that live in it. _bootstrap.py connects peers, shm_backend.py runs
operations.
"""

from __future__ import annotations

import atexit
import math
import multiprocessing.util
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from monarch_backend import _native
from monarch_backend._core import env, fork
from monarch_backend._core.errors import public
from monarch_backend._core.limits import explained
from monarch_backend.process_group._errors import ProcessGroupError

before_end: list[Callable[[], None]] = []
"""Called at the end of a process that shares memory, before its peers are informed."""


def _call_before_end() -> None:
    for call in before_end:
        call()


@dataclass
class _Process:
    """This process as a peer on its host, made with its first group."""

    host: Any
    engine: Any

    def stop(self) -> None:
        _call_before_end()
        self.host.leave()
        self.engine.stop()


_process: _Process | None = None


def this_process() -> _Process:
    """Return this process's shared memory, made on first use.

    Raises OSError if the system has no room for the arena.
    """
    global _process
    if _process is None:
        size = int(env.get("MONARCH_SHM_ARENA_BYTES"))
        with explained(f"reserve {size} bytes of shared memory"):
            host = _native.Host(size)
        _process = _Process(host, _native.Engine(host))
        atexit.register(_process.stop)
        multiprocessing.util.Finalize(None, _call_before_end, exitpriority=0)  # multiprocessing's children skip atexit
    return _process


def _in_forked_child() -> None:
    global _process
    if _process is not None:
        atexit.unregister(_process.stop)
        _process.host.abandon()
        _native.keep_for_ever(_process)  # its threads are the parent's, and can't be joined here
        _process = None


fork.register(fork.Step.SHARED_MEMORY, after_in_child=_in_forked_child)


def read_from() -> int:
    """Return MONARCH_CMA_MIN_BYTES, 0 for never, or the default. Raises ValueError if it is not a number of bytes."""
    return int(env.get("MONARCH_CMA_MIN_BYTES"))


@public("monarch_backend")
class SharedMemoryError(ProcessGroupError, MemoryError):
    """No room for a tensor in this process's shared memory; the message says how much is in use. Also a MemoryError.

    Raised by `empty_shared`.
    """


def empty_shared(*size: int | torch.Size | tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an uninitialised CPU tensor of shape ``size`` in memory that the other ranks of this host have mapped.

    ``size`` is given as for ``torch.empty``: integers, or one sequence of them. ``dtype`` is torch's default dtype
    unless given. Collectives on the shared-memory route read such tensors in place, without a copy, if all ranks that
    contribute data use them. Other operations treat it as any tensor. Its bytes count towards MONARCH_SHM_ARENA_BYTES
    until its last view is gone.

    Raises SharedMemoryError if MONARCH_SHM_ARENA_BYTES has no room for it, ValueError for a negative size, and
    NotImplementedError on systems without shared memory.

    >>> import monarch_backend
    >>> x = monarch_backend.empty_shared(2, 3).fill_(1)
    >>> x.sum()
    tensor(6.)
    """
    shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    dtype = torch.get_default_dtype() if dtype is None else dtype
    shape = torch.Size(shape)  # type: ignore[arg-type]
    if any(length < 0 for length in shape):
        raise ValueError(f"empty_shared: a tensor can't have the shape {list(shape)}")
    if not hasattr(_native, "Host"):
        raise NotImplementedError("tensors in shared memory need Linux or macOS")
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    host, wanted = this_process().host, count * dtype.itemsize
    try:
        buffer = _native.ArenaBuffer(host, wanted)
    except MemoryError:
        who = f"rank {os.environ.get('RANK', '?')}, host {socket.gethostname()}, pid {os.getpid()}"
        raise SharedMemoryError(
            f"no room for {wanted} bytes of shared memory in one piece: {host.used()} of {host.size()} are in use. "
            f"Free tensors or groups, or set MONARCH_SHM_ARENA_BYTES higher before the first group is made. [{who}]"
        ) from None
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(shape)
