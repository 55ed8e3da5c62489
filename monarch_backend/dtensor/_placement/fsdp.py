"""Controller's part of FSDP: shards of a parameter by rank, inputs on the workers, a batch by rank.

torch's `fully_shard` is unchanged. Its calls into this module are in _patches/semantics/fsdp.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree

from monarch_backend.dtensor._controller import per_rank_host_tensor
from monarch_backend.dtensor._controller.controller_mesh import outside, workers_of
from monarch_backend.dtensor._controller.per_rank_host_tensor import PerRankTensor
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._controller.worker_set import WorkerSet
from monarch_backend.dtensor._dispatch import dispatch
from monarch_backend.dtensor._per_rank import per_rank_int


def shard_batch(batch: Any, mesh: DeviceMesh) -> Any:
    """Send each rank its rows of a batch, for a model that was sharded with ``fully_shard(..., mesh=mesh)``.

    ``batch`` is a tensor, or a container of tensors and other values. Tensors of shape (rows, ...) are split by the
    first dimension over all dimensions of ``mesh``, as ``torch.chunk`` does. Each worker gets its own rows only, with
    the same dtype. A plain tensor that is given to such a model directly is sent whole to all ranks, which then all do
    the same work. With dropout in the model call `own_random_numbers(mesh)` once: its activations are plain tensors,
    which get the same random numbers on all ranks otherwise.

    The model's result differs by rank: ``DTensor.from_local(loss, mesh, [Partial("avg")] * mesh.ndim)`` is the mean of
    the ranks' losses, and its ``.item()`` reads it. Raises ValueError for a mesh that belongs to no controller.

    >>> from monarch_backend.dtensor import shard_batch, simulated_mesh
    >>> mesh = simulated_mesh((2,), ("dp",))  # procs.device_mesh() in a program
    >>> inputs, names = shard_batch((torch.arange(8.0).view(4, 2), "abcd"), mesh)
    >>> type(inputs).__name__, tuple(inputs.shape), names
    ('RemoteTensor', (2, 2), 'abcd')
    """
    workers, place = workers_of(mesh), 0
    if workers is None:
        raise ValueError(f"{mesh} is no controller's mesh: a rank of a process group has its own rows already")
    for dim in range(mesh.ndim):
        place = place * mesh.size(dim) + mesh.get_local_rank(dim)

    def mine(value: Any) -> Any:
        if isinstance(value, DTensor):
            return value.redistribute(mesh, [Shard(0)] * mesh.ndim).to_local()
        if not isinstance(value, torch.Tensor):
            return value
        rows = Chunks(per_rank_host_tensor.belonging(value.detach(), workers, outside(mesh)), mesh.size(), 0)[place]
        return rows.sent() if isinstance(rows, PerRankTensor) else rows

    return pytree.tree_map(mine, batch)


def whole(param: torch.Tensor, mesh: Any) -> Any:
    """Return the source of a parameter's shards. Nothing is sent yet."""
    workers = workers_of(mesh)
    assert workers is not None
    if param.is_meta:
        options = {"dtype": param.dtype, "device": torch.device("meta")}
        made = dispatch.create(workers, torch.ops.aten.empty.memory_format, [list(param.shape)], options)
        return workers.without(made, outside(mesh))
    return per_rank_host_tensor.belonging(param.detach(), workers, outside(mesh))


class Chunks:
    """Chunks like those of ``torch.chunk``; ``chunks[i]`` with a per-rank integer selects each rank's own."""

    def __init__(self, tensor: Any, count: int, dim: int) -> None:
        self._tensor, self._dim, self._size = tensor, dim, -(-tensor.size(dim) // count)

    def __getitem__(self, index: Any) -> Any:
        chunk: Any
        total = self._tensor.size(self._dim)
        start = torch.sym_min(index * self._size, total)
        length = torch.sym_min(total - start, self._size)
        if isinstance(self._tensor, PerRankTensor):
            chunk = self._of_host(self._tensor.by_rank, start, length)
        elif isinstance(self._tensor, RemoteTensor) or isinstance(index, int):
            chunk = self._tensor.narrow(self._dim, start, length)
        else:
            chunk = self._of_host([self._tensor] * len(per_rank_int.values_of(index) or ()), start, length)
        # FSDP asks whether there is anything to copy, which each rank would answer for itself. Some ranks may have
        # nothing.
        chunk.numel = lambda: 1 if total else 0
        return chunk

    def _of_host(self, tensors: Sequence[Any], start: Any, length: Any) -> PerRankTensor:
        starts = per_rank_int.values_of(start) or [start] * len(tensors)
        lengths = per_rank_int.values_of(length) or [length] * len(tensors)
        parts = zip(tensors, starts, lengths, strict=True)
        return PerRankTensor(
            [None if each is None or at is None else each.narrow(self._dim, at, size) for each, at, size in parts],
            getattr(self._tensor, "workers", None),
        )


class Sizes(tuple[Any, ...]):
    """torch.Size whose `numel` allows sizes that differ by rank, of layers that tensor parallelism splits unevenly."""

    __slots__ = ()

    def numel(self) -> Any:
        return math.prod(self)


def put_inputs(inputs: Any, workers: WorkerSet) -> Any:
    """Send the inputs' tensors of this process once, the same to all workers."""
    return pytree.tree_map(
        lambda value: workers.put(value) if type(value) is torch.Tensor and not value.requires_grad else value, inputs
    )
