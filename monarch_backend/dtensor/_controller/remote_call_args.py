"""Packing of a function's arguments for the workers, and of its results: tensors as ids, meshes as numbers.

All else is pickled as arguments of actors are. _worker/remote_call_args.py is the workers' part; remote_call.py runs
the function.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from monarch_backend._mesh.extent import Extent
from monarch_backend._mesh.value_mesh import ValueMesh
from monarch_backend._serialization.pickling import SerializationError, dumps_by, loads
from monarch_backend.dtensor._controller import controller_mesh
from monarch_backend.dtensor._controller.remote_tensor import Ref, RemoteTensor
from monarch_backend.dtensor._controller.tensor_meta import Meta
from monarch_backend.dtensor._controller.worker_set import WorkerSet
from monarch_backend.dtensor._errors import MeshMismatchError, RemoteTensorError
from monarch_backend.dtensor._protocol import Kind, Tag
from monarch_backend.dtensor._worker import remote_call_args as there


class Packer:
    """Packer of one call. Its meshes have numbers, which results refer to as well."""

    def __init__(self, workers: WorkerSet, mesh: DeviceMesh) -> None:
        self.workers = workers
        self.meshes: list[DeviceMesh] = []
        self._described: list[Any] = []  # what workers make their own meshes from
        self._refused: MeshMismatchError | None = None
        self._mesh(mesh)

    def pack(self, value: Any) -> tuple[bytes, list[memoryview], list[Any]]:
        """Raises MeshMismatchError for tensors of other workers, SerializationError for unpicklable values."""
        try:
            body, buffers = dumps_by(self._reduce, value)
        except SerializationError:
            if self._refused is not None:
                raise self._refused from None
            raise
        return body, buffers, self._described

    def _reduce(self, value: Any) -> Any:
        if isinstance(value, RemoteTensor):
            return there.tensor, (self._held(value), *_role(value))
        if isinstance(value, DTensor):
            local = controller_mesh.remote_of(value)
            if local is None:
                return NotImplemented
            at = self._mesh(value.device_mesh), value.placements, tuple(value.shape), value.stride()
            return there.dtensor, (self._held(local), *at, *_role(value))
        if isinstance(value, DeviceMesh) and controller_mesh.workers_of(value) is not None:
            return there.mesh, (self._mesh(value),)
        return NotImplemented

    def _held(self, tensor: RemoteTensor) -> int:
        self._check(tensor._meta.workers, "a tensor")
        return tensor._ref.id

    def _check(self, workers: Any, what: str) -> None:
        if workers is not self.workers:
            self._refused = MeshMismatchError(
                f"run() on {self.workers.name} got {what} of {workers.name}, whose processes are others: move tensors "
                "first, by monarch_backend.dtensor.move(x, mesh, placements)"
            )
            raise self._refused

    def _mesh(self, mesh: DeviceMesh) -> int:
        if mesh in self.meshes:
            return self.meshes.index(mesh)
        self._check(controller_mesh.workers_of(mesh), "a mesh")
        root = mesh._get_root_mesh()
        names = mesh.mesh_dim_names
        if root is not mesh and names and set(names) <= set(root.mesh_dim_names or ()):
            described: Any = (self._mesh(root), names)
        else:
            groups = [self.workers.group_name(mesh.get_group(dim)) for dim in range(mesh.ndim)]
            rows = (controller_mesh.rows_of(mesh) - self.workers.first).tolist()
            described = (mesh.device_type, names, groups, rows)
        self.meshes.append(mesh)
        self._described.append(described)
        return len(self.meshes) - 1

    # Results ----------------------------------------------------------------------------------------------------

    def merged(self, extent: Extent, ranks: Sequence[int], replies: Sequence[Any], held: Ref) -> Any:
        """Return the ranks' results as one value. ``held``: the list of its shards on the workers."""
        unpacked = []
        for body, buffers, count in replies:
            value = loads(body, buffers)
            leaves, form = pytree.tree_flatten(value)
            if len({each.index for each in leaves if isinstance(each, there.Returned)}) != count:
                raise RemoteTensorError(
                    "the function returned a DTensor inside an object that is no tuple, list or dict: such a result "
                    "can't come back; return its tensors themselves"
                )
            unpacked.append((value, leaves, form, count))
        if not any(count for *_, count in unpacked):
            return ValueMesh(extent, [value for value, *_ in unpacked])
        form = unpacked[0][2]
        if any(other != form for _, _, other, _ in unpacked):
            raise RemoteTensorError(
                "the ranks returned DTensors in trees of different forms: return the same form on every rank "
                f"(rank {ranks[0]}: {form})"
            )
        columns = zip(*(leaves for _, leaves, _, _ in unpacked), strict=True)
        return pytree.tree_unflatten([self._leaf(extent, ranks, list(each), held) for each in columns], form)

    def _leaf(self, extent: Extent, ranks: Sequence[int], column: list[Any], held: Ref) -> Any:
        if not any(isinstance(each, there.Returned) for each in column):
            return ValueMesh(extent, column)
        first = column[0]
        if not all(isinstance(each, there.Returned) and each.whole == first.whole for each in column):
            raise RemoteTensorError(
                "the ranks returned different things where one DTensor should be: "
                + ", ".join(f"rank {rank}: {each}" for rank, each in list(zip(ranks, column, strict=True))[:4])
            )
        metas: list[Meta | None] = [None] * self.workers.size
        for rank, each in zip(ranks, column, strict=True):
            size, stride, offset = each.local
            metas[rank] = self.workers.metas.same(size, stride, offset, first.dtype, self.workers.device)
        local = _part(held, first.index, self.workers.metas.by_rank(metas))
        mesh = self.meshes[first.mesh]
        if first.names is not None:
            mesh = mesh[first.names]
        with torch.no_grad():
            made = DTensor.from_local(
                local, mesh, first.placements, run_check=False, shape=torch.Size(first.shape), stride=first.stride
            )
        return made.requires_grad_(first.requires_grad)


def first_like(held: Ref, like: DTensor) -> DTensor:
    """Return the first DTensor of a result that is known to have this one's layout, without waiting for its shape."""
    remote = controller_mesh.remote_of(like)
    assert remote is not None
    local = _part(held, 0, remote._meta)
    with torch.no_grad():
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def _role(value: Any) -> tuple[bool, bool, Any]:
    """Return whether it requires a gradient, whether it is a parameter, and its gradient."""
    is_parameter = isinstance(value, torch.nn.Parameter)
    return value.requires_grad, is_parameter, value.grad if value.is_leaf else None


def _part(held: Ref, index: int, meta: Meta) -> RemoteTensor:
    """Return the tensor at this index of the list that the workers hold."""
    workers = held.workers
    number = _parts.setdefault(workers, {}).get(index)
    if number is None:
        place = [[Tag.OPERAND, 0], index]
        number = workers.define(f"{there.__name__}:part", place, {}, 1, Kind.ONE, 1, [], [])
        _parts[workers][index] = number
    if -1 in meta.of_rank:
        number = workers.define_by_rank([number], [min(each, 0) for each in meta.of_rank])
    ref = Ref(workers, next(workers.ids))
    workers.write((number, 0, held.id, ref.id))
    return RemoteTensor(meta, ref)


_parts: weakref.WeakKeyDictionary[WorkerSet, dict[int, int]] = weakref.WeakKeyDictionary()
