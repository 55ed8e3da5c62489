"""Meshes of a controller, whose subclass of DeviceMesh has ranks and coordinates of all processes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _visualize_sharding

from monarch_backend.dtensor._controller import controller_process_group
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._controller.worker_set import WorkerSet
from monarch_backend.dtensor._errors import MeshMismatchError
from monarch_backend.dtensor._per_rank import per_rank_int, rank_classes
from monarch_backend.dtensor._torch_internals import sharding_tables, tracing_state
from monarch_backend.dtensor._worker.xla.xla_spmd import without_spmd

Replacement = Callable[..., Any]


def workers_of(mesh: Any) -> WorkerSet | None:
    """Return the workers of a mesh; None if it is not a controller's."""
    found = mesh.__dict__.get("_monarch_workers", False)
    if found is False:
        found = mesh.__dict__["_monarch_workers"] = controller_process_group.owner_of(mesh._flatten_rank_map)
    return found  # type: ignore[no-any-return]


def slices_of(mesh: Any) -> int:
    """Return the number of meshes of its form: a sliced mesh stands for each rank's own."""
    return len(mesh._layout.remap_to_tensor(mesh._rank_map))


def coordinate(mesh: Any, workers: WorkerSet) -> list[Any]:
    """Return each rank's coordinate by mesh dimension, within its slice; in a trace, of ranks that it stands for."""
    found = _coordinates(mesh, workers)
    return [rank_classes.seen(each, workers) for each in found] if rank_classes.is_tracing() else found


def _coordinates(mesh: Any, workers: WorkerSet) -> list[Any]:
    found = mesh.__dict__.get("_monarch_coordinate")
    if found is None:
        places: list[list[int | None]] = [[None] * workers.size for _ in range(mesh.ndim)]
        with tracing_state.outside():
            rows = rows_of(mesh)
            for index, rank in enumerate(rows.flatten().tolist()):
                inner = index % max(1, rows[0].numel())
                for dim, at in enumerate(torch.unravel_index(torch.tensor(inner), rows.shape[1:])):
                    places[dim][rank - workers.first] = int(at)
        found = mesh.__dict__["_monarch_coordinate"] = [per_rank_int.by_rank(each) for each in places]
    return found  # type: ignore[no-any-return]


def rows_of(mesh: Any) -> torch.Tensor:
    """Return the global ranks: one mesh of this shape for each slice."""
    return mesh._layout.remap_to_tensor(mesh._rank_map)  # type: ignore[no-any-return]


def outside(mesh: Any) -> frozenset[int]:
    """Return the workers outside the mesh and its other slices. They take no part in changes of the mesh's tensors."""
    found = mesh.__dict__.get("_monarch_outside")
    if found is None:
        workers = workers_of(mesh)
        ranks = range(0 if workers is None else workers.size)
        inside = set() if workers is None else {rank - workers.first for rank in rows_of(mesh).flatten().tolist()}
        found = mesh.__dict__["_monarch_outside"] = frozenset(ranks) - inside
    return found  # type: ignore[no-any-return]


def check_mesh(what: str, one: Any, other: Any) -> None:
    meshes = tracing_state.real(one), tracing_state.real(other)
    if meshes[0] is meshes[1] or meshes[0] == meshes[1]:
        return
    names = [f"{each} of {workers.name}" for each in meshes if (workers := workers_of(each)) is not None]
    if names:
        raise MeshMismatchError(
            f"{what}: {' and '.join(names)} are different meshes. Move a DTensor to the other one first: "
            "monarch_backend.dtensor.move(x, mesh, placements)"
        )


def remote_of(tensor: DTensor) -> RemoteTensor | None:
    local = tensor._local_tensor
    return local if isinstance(local, RemoteTensor) else None


class ControllerMesh(DeviceMesh):
    """A mesh of a controller, with the ranks and coordinates of all of its processes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        _init_without_spmd(self, *args, **options)

    def get_coordinate(self) -> Any:
        known = self.__dict__.get("_monarch_coordinate")
        # Called by each operation on a mesh.
        if known is not None and not _mode.disabled and not rank_classes.is_tracing():
            return known
        workers = None if _mode.disabled else workers_of(self)
        return super().get_coordinate() if workers is None else coordinate(self, workers)

    def _is_current_rank_part_of_mesh(self) -> bool:
        return True

    def _sym_get_coordinate(self, index: int) -> Any:
        workers = None if _mode.disabled else workers_of(self)
        return super()._sym_get_coordinate(index) if workers is None else coordinate(self, workers)[index]

    def get_local_rank(self, mesh_dim: int | str | None = None) -> Any:
        if mesh_dim is None and self.ndim > 1:
            raise RuntimeError(f"this mesh has {self.ndim} dimensions: say which one by mesh_dim")
        if sys._getframe(1).f_globals.get("__name__") == _visualize_sharding.__name__:
            return 0  # torch draws its picture on rank 0
        dim = self._mesh_dim_names.index(mesh_dim) if isinstance(mesh_dim, str) else mesh_dim or 0  # type: ignore[union-attr]
        return coordinate(self, _workers(self))[dim]

    def get_rank(self) -> Any:
        workers = _workers(self)
        return per_rank_int.by_rank([workers.first + rank for rank in range(workers.size)])

    @staticmethod
    def _get_mesh_tensor_from_full_mesh(full_mesh: torch.Tensor, current_rank: int | None = None) -> Any:
        # The slice of the first rank: all slices have the same shape.
        own = DeviceMesh._get_mesh_tensor_from_full_mesh
        return full_mesh[0] if current_rank is None else own(full_mesh, current_rank)

    def _setup_world_group_and_device(self) -> Any:
        return None  # no device of the controller is used

    def _compute_coordinate_on_dim(self) -> Any:
        # torch's caches compare meshes by value. Ranks are reused when processes are started anew. A mesh of ended
        # processes must not be found for a mesh of new ones.
        self._thread_id = _workers(self).serial
        return (0,) * self.ndim

    @staticmethod
    def _init_process_groups(layout: Any, rank_map: Any, mesh_dim_names: Any, *_options: Any) -> Any:
        rows = sharding_tables.rows_of(layout, rank_map)
        names = mesh_dim_names or [f"dim_{dim}" for dim in range(len(rows))]
        made = [controller_process_group.make(ranks, f"mesh_{name}") for ranks, name in zip(rows, names, strict=True)]
        return [each.group_name for each in made]


_init_without_spmd: Any = without_spmd(DeviceMesh.__init__)


def _workers(mesh: Any) -> WorkerSet:
    found = workers_of(mesh)
    assert found is not None, "a controller has ended"
    return found


def make_mesh(_own: Any) -> Replacement:
    """Replacement for `DeviceMesh.__new__`: a mesh of a controller's ranks is a `ControllerMesh`."""

    def __new__(
        cls: Any, _device_type: str = "", mesh: Any = None, *, _rank_map: Any = None, **_options: Any
    ) -> Any:  # fmt: skip
        ranks = _rank_map if mesh is None else mesh
        if cls is DeviceMesh and ranks is not None and controller_process_group.is_controller():
            ranks = torch.as_tensor(ranks).flatten().tolist()
            cls = DeviceMesh if controller_process_group.owner_of(ranks) is None else ControllerMesh
        return object.__new__(cls)

    return __new__


class _Mode(threading.local):
    """Stand-in for torch's LocalTensorMode, by thread. The real mode would cost time in each operation."""

    def __init__(self) -> None:
        self.disabled = 0  # depth of contexts
        self.parallelizing = False
        self.ranks: frozenset[int] = frozenset()
        self._per_rank_rng_states: dict[int, Any] = {}

    @property
    def _disable(self) -> bool:
        return self.disabled > 0

    def disable(self) -> _Mode:
        """Return a context in which torch's functions act for one rank. A generator would take a microsecond more."""
        return self

    def __enter__(self) -> None:
        self.disabled += 1

    def __exit__(self, *_: object) -> None:
        self.disabled -= 1


_mode = _Mode()


def _is_remote(tensor: Any) -> bool:
    return isinstance(tensor._local_tensor, RemoteTensor)


def _is_traced(tensor: Any) -> bool:
    return tracing_state.is_traced(tensor._local_tensor) and workers_of(tensor.device_mesh) is not None
