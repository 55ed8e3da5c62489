"""Collectives of each library that _rank_main.py times, and the values that they must return.

Buffers of all libraries are NumPy arrays with torch's alignment. Calls of torch get tensors that share their memory.
NumPy has no bfloat16, so its buffers are uint16 there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Call = Callable[[], object]


def empty(count: int, dtype: npt.DTypeLike = np.float32) -> Array:
    """Return an uninitialized array, aligned to 64 bytes."""
    size = count * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip : skip + size].view(dtype)


def pattern(rank: int, count: int) -> Array:
    """Return a rank's values: small integers, so that sums are exact."""
    return np.resize(((np.arange(1021) * 7 + rank * 13) % 1021).astype(np.float32), count)


def _bf16_pattern(rank: int, count: int) -> npt.NDArray[np.float32]:
    """Return a rank's values: integers below 64, whose sums bfloat16 represents exactly with few ranks."""
    return np.resize(((np.arange(61) * 7 + rank * 13) % 61).astype(np.float32), count)


def _bf16_bits(values: npt.NDArray[np.float32]) -> Array:
    bits = empty(values.size, np.uint16)
    bits[:] = values.view(np.uint32) >> 16  # exact for these values
    return bits


def make_buffers(what: str, size: int, rank: int, ranks: int) -> tuple[Array, Array, Array]:
    """Return (input, output, expected output). The larger buffer has ``size`` bytes, or one element per rank if larger.

    Input and output are the same array if the collective works in place.
    """
    if what == "all_reduce_bf16":
        values = [_bf16_pattern(r, size // 2) for r in range(ranks)]
        source = _bf16_bits(values[rank])
        return source, source, _bf16_bits(np.sum(values, axis=0, dtype=np.float32))
    part = max(size // 4 // ranks, 1)
    count = part * ranks
    mine = slice(rank * part, (rank + 1) * part)
    if what == "all_gather":
        given, expected = pattern(rank, part), np.concatenate([pattern(r, part) for r in range(ranks)])
    elif what == "all_to_all":
        given, expected = pattern(rank, count), np.concatenate([pattern(r, count)[mine] for r in range(ranks)])
    elif what in ("all_reduce", "reduce_scatter"):
        given, expected = pattern(rank, count), pattern(0, count)
        for other in range(1, ranks):
            expected = expected + pattern(other, count)
        expected = expected[mine] if what == "reduce_scatter" else expected
    else:  # broadcast and send_recv: each participating rank ends with rank 0's values
        given, expected = pattern(rank, count), pattern(0, count)
        expected = pattern(rank, count) if what == "send_recv" and rank > 1 else expected
    source = empty(given.size)
    source[:] = given
    if what in ("all_gather", "all_to_all", "reduce_scatter"):
        target = empty(expected.size)
        target.fill(0)
        return source, target, expected
    return source, source, expected


class Library(Protocol):
    """A connected rank of a library."""

    rank: int

    def barrier(self) -> object:
        """Wait for the other ranks."""

    def call(self, what: str, source: Array, target: Array) -> Call:
        """Return a function that runs the collective on these buffers."""

    def close(self) -> None:
        """Disconnect from the other ranks."""


def _ping_pong(rank: int, send: Callable[[int], object], receive: Callable[[int], object]) -> Call:
    """Return a round trip between ranks 0 and 1. Other ranks do nothing."""

    def first() -> None:
        send(1)
        receive(1)

    def second() -> None:
        receive(0)
        send(0)

    return (first, second, lambda: None)[min(rank, 2)]


class C10d:
    """torch.distributed with one of its backends."""

    def __init__(self, backend: str, rank: int, ranks: int, store: str) -> None:
        import torch
        import torch.distributed as dist

        if backend == "monarch":
            import monarch_backend  # noqa: F401 (registers it, also where it is not installed)
        if backend == "fake":
            import torch.testing._internal.distributed.fake_pg  # registers it
        self.rank, self._dist, self._tensor, self._bfloat16 = rank, dist, torch.from_numpy, torch.bfloat16
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
        self.barrier = dist.barrier

    def call(self, what: str, source: Array, target: Array) -> Call:
        dist, given, taken = self._dist, self._tensor(source), self._tensor(target)
        if what == "all_reduce_bf16":
            return self._all_reduce(given.view(self._bfloat16))
        # These names exist from torch 2.13 on, where the older ones warn.
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        calls: dict[str, Call] = {
            "all_reduce": self._all_reduce(given),
            "all_gather": lambda: gather(taken, given),
            "reduce_scatter": lambda: scatter(taken, given),
            "all_to_all": lambda: dist.all_to_all_single(taken, given),
            "broadcast": lambda: dist.broadcast(given, 0),
            "send_recv": _ping_pong(self.rank, lambda to: dist.send(given, to), lambda by: dist.recv(given, by)),
        }
        return calls[what]

    def _all_reduce(self, tensor: Any) -> Call:
        return lambda: self._dist.all_reduce(tensor)

    def close(self) -> None:
        self._dist.destroy_process_group()


class DeepSpeed(C10d):
    """DeepSpeed's all-reduce in shared memory. Barriers between batches use a gloo group."""

    def __init__(self, operator: Any, rank: int, ranks: int, store: str) -> None:
        super().__init__("gloo", rank, ranks, store)
        operator.initialize(ranks, rank)

    def _all_reduce(self, tensor: Any) -> Call:
        import torch

        reduce = torch.ops.deepspeed.inference_all_reduce_
        return lambda: reduce(tensor)


class Mpi:
    """OpenMPI or Intel MPI, through mpi4py's buffer functions."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi, self._world = MPI, MPI.COMM_WORLD
        self.rank = self._world.rank
        self.barrier = self._world.Barrier

    def call(self, what: str, source: Array, target: Array) -> Call:
        world, in_place = self._world, self._mpi.IN_PLACE
        calls: dict[str, Call] = {
            "all_reduce": lambda: world.Allreduce(in_place, source),
            "all_gather": lambda: world.Allgather(source, target),
            "reduce_scatter": lambda: world.Reduce_scatter_block(source, target),
            "all_to_all": lambda: world.Alltoall(source, target),
            "broadcast": lambda: world.Bcast(source, 0),
            "send_recv": _ping_pong(self.rank, lambda to: world.Send(source, to), lambda by: world.Recv(source, by)),
        }
        return calls[what]

    def close(self) -> None:
        self._mpi.Finalize()
