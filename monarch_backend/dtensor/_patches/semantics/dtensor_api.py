"""Replacements of torch's functions that act for this process's rank, where one controller acts for all ranks.

`install` applies the manifest with the first mesh; a mesh that is not a controller's gets torch's own functions.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
import torch.distributed._local_tensor as local_tensor
from torch.distributed._mesh_layout import _MeshLayout
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import _api as api
from torch.distributed.tensor import _collective_utils as collective_utils
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._ops import _pointwise_ops as pointwise
from torch.distributed.tensor.debug import _visualize_sharding
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from monarch_backend import _native
from monarch_backend._core import patches
from monarch_backend.dtensor._compile import per_rank_op, rank_classes
from monarch_backend.dtensor._controller import controller_process_group, fetch, per_rank_host_tensor, per_rank_int
from monarch_backend.dtensor._controller.device_module import DeviceHandle
from monarch_backend.dtensor._controller.per_rank_host_tensor import PerRankTensor
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor, no_pointer
from monarch_backend.dtensor._controller.worker_set import WorkerSet
from monarch_backend.dtensor._dispatch import dispatch
from monarch_backend.dtensor._dispatch import global_shape as _global_shape
from monarch_backend.dtensor._errors import MeshMismatchError, RemoteTensorError
from monarch_backend.dtensor._ops import (
    convolution,
    decomposed_losses,
    fused_optimizers,
    grad_scaler,
    normalization,
    sharding_rules,
)
from monarch_backend.dtensor._patches.fixes.xla_spmd import handle_for, without_spmd
from monarch_backend.dtensor._rng import philox, random_ops, shard_origins
from monarch_backend.dtensor._torch_internals import tracing_state

_aten = torch.ops.aten

Replacement = Callable[..., Any]


def install() -> None:
    """Apply the rows of the manifest that a mesh needs, and register operators; a second call does nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    from monarch_backend.dtensor._patches import manifest  # it imports this module
    from monarch_backend.dtensor._patches.fixes import composite_ops, grouped_mm, sharding_fixes
    from monarch_backend.dtensor._patches.semantics import per_rank_int_operands

    patches.apply(manifest.MESH)
    modes: list[Any] = local_tensor._PROCESS_LOCAL_TENSOR_MODE
    modes.insert(0, _mode)  # torch looks for its LocalTensorMode there
    handlers: dict[Any, Any] = api.DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = _item
    handlers[torch.ops.aten.is_nonzero.default] = lambda func, args, kwargs: bool(_item(func, args, kwargs))
    handlers[torch.ops.aten.equal.default] = _equal
    handlers.update({func: _random_operation(handle) for func, handle in random_ops.handlers.items()})
    for operator, ours in {**convolution.HANDLERS, **grad_scaler.HANDLERS}.items():
        handlers[operator] = _of_controllers(ours, handlers[operator])
    handlers.update(
        {func: _or_torchs(handle) for func, handle in {**normalization.HANDLERS, **fused_optimizers.HANDLERS}.items()}
    )
    handlers.update(decomposed_losses.HANDLERS)
    _register_lists()
    _register_shapes()
    per_rank_int_operands.install()
    sharding_fixes.correct()
    grouped_mm.register()
    composite_ops.register()
    sharding_rules.install()
    # A host's tensor beside distributed ones is the same on all ranks, because only this process has one.
    torch._C._set_dtensor_allow_implicit_replication(True)


_installed = False


def set_metadata(func: Any, args: Any, kwargs: Any) -> None:
    """Let an operator change the sizes of a wrapper, its first argument, which has no values."""
    _native.without_address(args[0])
    try:
        with no_dispatch():
            func(*args, **kwargs)
    finally:
        no_pointer(args[0])


# Meshes ---------------------------------------------------------------------------------------------------------


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
    """Return each rank's coordinate by mesh dimension; in a sliced mesh, within that rank's slice.

    In a trace, only for the ranks that it stands for.
    """
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
    """Return the workers outside the mesh and its other slices; none for a mesh that is not a controller's.

    They do not have tensors of the mesh. They would not take part in changes, and would keep old values.
    """
    found = mesh.__dict__.get("_monarch_outside")
    if found is None:
        workers = workers_of(mesh)
        ranks = range(0 if workers is None else workers.size)
        inside = set() if workers is None else {rank - workers.first for rank in rows_of(mesh).flatten().tolist()}
        found = mesh.__dict__["_monarch_outside"] = frozenset(ranks) - inside
    return found  # type: ignore[no-any-return]


def root_of(mesh: Any) -> DeviceMesh:
    """Return the mesh that it was sliced from, or itself."""
    return mesh._get_root_mesh()  # type: ignore[no-any-return]


def check_mesh(what: str, one: Any, other: Any) -> None:
    """Raise MeshMismatchError if these are two meshes, and a controller's."""
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
    """Return the DTensor's shards if they are on workers of this controller, else None."""
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
        if sys._getframe(1).f_globals["__name__"] == _visualize_sharding.__name__:
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
    def _init_process_groups(layout: Any, rank_map: Any, mesh_dim_names: Any, backend_override: Any) -> Any:  # noqa: ARG004
        rows = [_MeshLayout([each]).remap_to_tensor(rank_map).tolist() for each in layout]
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


# Functions that torch itself runs once for each rank ------------------------------------------------------------


class _Mode(threading.local):
    """Stand-in for torch's LocalTensorMode. The real mode would cost time in each operation, and loop over ranks.

    Each thread disables its own.
    """

    def __init__(self) -> None:
        self.disabled = False
        self.parallelizing = False
        self.ranks: frozenset[int] = frozenset()
        self._per_rank_rng_states: dict[int, Any] = {}

    @property
    def _disable(self) -> bool:
        return self.disabled

    def disable(self) -> _Disabled:
        """Return a context in which torch's functions act for one rank."""
        return _Disabled(self)


class _Disabled:
    """Context that is entered twice for each redistribution; a generator would take a microsecond more."""

    __slots__ = ("_before", "_mode")

    def __init__(self, mode: _Mode) -> None:
        self._mode, self._before = mode, False

    def __enter__(self) -> None:
        self._before, self._mode.disabled = self._mode.disabled, True

    def __exit__(self, *_: object) -> None:
        self._mode.disabled = self._before


_mode = _Mode()


def _for_each_rank(own: Any) -> Replacement:
    def _for_each_rank_run_func(func: Any, ranks: Any, args: Any, kwargs: Any, *, alias: bool = True) -> Any:
        if ranks is not _mode.ranks:
            return own(func, ranks, args, kwargs, alias=alias)
        if _are_alike([*args, *kwargs.values()]):
            return func(*args, **kwargs)
        flat = [_settled(each) for each in pytree.tree_leaves((args, kwargs))]
        if any(map(tracing_state.is_traced, flat)):
            differs = any(per_rank_int.values_of(each) is not None for each in flat)
            return per_rank_op.call(func, args, kwargs) if differs else func(*args, **kwargs)
        if any(isinstance(each, RemoteTensor) for each in flat):
            return dispatch.call(func, f"{func.__module__}:{func.__qualname__}", args, kwargs)
        if any(isinstance(each, PerRankTensor) or per_rank_int.values_of(each) is not None for each in flat):
            return per_rank_host_tensor.run(func, args, kwargs)
        return func(*args, **kwargs)

    return _for_each_rank_run_func


def _are_alike(values: Iterable[Any]) -> bool:
    """Whether these are remote tensors, or no tensors, and all ranks have the same.

    Then a function that acts for one rank acts for all, as when even shards are gathered.
    """
    for each in values:
        kind = type(each)
        if kind is RemoteTensor:
            if each._meta.classes is not None:
                return False
        elif kind is list or kind is tuple:
            if not _are_alike(each):
                return False
        elif kind is torch.SymInt or kind is dict or isinstance(each, torch.Tensor):
            return False
    return True


def _settled(value: Any) -> Any:
    return value.wait() if isinstance(value, funcol.AsyncCollectiveTensor) else value


def _local_shape(own: Any) -> Replacement:
    def _compute_local_shape_and_global_offset(
        global_shape: Any, mesh_shape: Any, my_coordinate: Any, placements: Any, skip_offset: bool = False
    ) -> Any:
        at = [my_coordinate(i) for i in range(len(mesh_shape))] if callable(my_coordinate) else my_coordinate
        if at is None or all(per_rank_int.values_of(each) is None for each in at):
            return own(global_shape, mesh_shape, my_coordinate, placements, skip_offset)

        def of_one(*mine: int) -> Any:
            with _mode.disable():
                return own(global_shape, mesh_shape, list(mine), placements, skip_offset)

        return per_rank_host_tensor.run(of_one, tuple(at), {})

    return _compute_local_shape_and_global_offset


def _rank_in(own: Any) -> Replacement:
    def get_rank(group: Any = None) -> Any:
        # torch calls it for any group when it logs an error; the controller is in none.
        return group.rank() if isinstance(group, controller_process_group.ControllerGroup) else own(group)

    return get_rank


# Collectives ----------------------------------------------------------------------------------------------------


def _register_shapes() -> None:
    """Register the shape of a resharding's result, for which torch asks for this process's rank."""
    torch.library.register_fake("_dtensor::shard_dim_alltoall", _shape_of_resharding, allow_override=True)


def _shape_of_resharding(input: Any, gather_dim: int, shard_dim: int, group_name: Any) -> Any:
    group = collective_utils._resolve_process_group(group_name) if isinstance(group_name, str) else group_name
    if not isinstance(group, controller_process_group.ControllerGroup):
        return collective_utils._shard_dim_alltoall_meta(input, gather_dim, shard_dim, group_name)
    gathered = torch.cat([torch.empty_like(input)] * group.size(), dim=gather_dim)
    return gathered.narrow(shard_dim, 0, gathered.size(shard_dim) // group.size()).contiguous()


def _wrap(own: Any) -> Replacement:
    # Workers wait for a collective when its result is used, so no wrapper has to wait here.
    return lambda tensor: tensor if type(tensor) is RemoteTensor else own(tensor)


def _broadcast_objects(own: Any) -> Replacement:
    def broadcast_object_list(object_list: Any, src: Any = None, group: Any = None, *rest: Any, **options: Any) -> Any:
        # Every rank has the controller's objects. torch would unpickle an empty buffer if src is not rank 0.
        if not isinstance(
            group or (controller_process_group.is_controller() and controller_process_group.universe()),
            controller_process_group.ControllerGroup,
        ):
            own(object_list, src, group, *rest, **options)

    return broadcast_object_list


# Values of the controller that become distributed ---------------------------------------------------------------


def _handle(own: Any) -> Replacement:
    @functools.cache
    def made(device_type: str) -> Any:
        return DeviceHandle(handle_for(own, device_type))

    def _get_device_handle(device_type: str = "cuda") -> Any:
        is_ours = device_type != "cpu" and controller_process_group.is_controller()
        return made(device_type) if is_ours else own(device_type)

    return _get_device_handle


def _distribute_module(own: Any) -> Replacement:
    ours = without_spmd(own)

    def distribute_module(module: Any, device_mesh: Any = None, *args: Any, **options: Any) -> Any:
        mesh = device_mesh or api._mesh_resources.get_current_mesh()
        if workers_of(mesh) is None:
            return own(module, mesh, *args, **options)
        tied = _modules().tied(module)
        done = ours(module, mesh, *args, **options)
        _modules().tie(tied)
        return done

    return distribute_module


def _check_workers(what: str, tensor: RemoteTensor, workers: WorkerSet) -> None:
    if tensor._meta.workers is not workers:
        raise MeshMismatchError(
            f"{what} of a tensor of {tensor._meta.workers.name} on a mesh of {workers.name}: make it on its own mesh, "
            "and move that (monarch_backend.dtensor.move)"
        )


def _distribute(own: Any) -> Replacement:
    ours = without_spmd(own)

    def distribute_tensor(tensor: Any, device_mesh: Any = None, placements: Any = None, **options: Any) -> Any:
        mesh = device_mesh or api._mesh_resources.get_current_mesh()
        workers = workers_of(mesh)
        if workers is not None and isinstance(tensor, DTensor):
            check_mesh("distribute_tensor() of a DTensor", tensor.device_mesh, mesh)
        if workers is not None and isinstance(tensor, RemoteTensor):
            _check_workers("distribute_tensor()", tensor, workers)
        if workers is None:
            return own(tensor, mesh, placements, **options)
        if not isinstance(tensor, DTensor) and tensor.is_leaf:
            # Else torch moves it to a device that this process lacks. Each worker is sent its shard.
            tensor = per_rank_host_tensor.belonging(tensor, workers, outside(mesh))
        return ours(tensor, mesh, placements, **{**options, "src_data_rank": None})

    return distribute_tensor


_NO_PLAIN_TENSOR = (
    "DTensor.from_local() of a DTensor, which is one already. In a backward: a plain tensor that came of to_local() "
    "was calculated with together with a DTensor, for which it is the same on all ranks, so its gradient is a DTensor. "
    "Say what it is of all ranks before: DTensor.from_local(plain, mesh, [Partial()]) where each rank has its part of "
    "a sum (a loss of its rows, say), [Replicate()] where all have the same"
)


def _from_local(own: Any) -> Replacement:
    def from_local(local: Any, device_mesh: Any = None, placements: Any = None, **options: Any) -> Any:
        mesh = device_mesh or api._mesh_resources.get_current_mesh()
        workers = workers_of(mesh)
        if workers is not None and workers.device.type == "xla" and tracing_state.is_traced(local):
            return _from_local_here(local, mesh, placements, **options)
        if workers is None or tracing_state.is_traced(local):
            return own(local, device_mesh, placements, **options)
        if isinstance(local, DTensor):
            raise RemoteTensorError(_NO_PLAIN_TENSOR)
        if isinstance(local, PerRankTensor):
            local = local.sent(workers).requires_grad_(local.requires_grad)
        elif isinstance(local, RemoteTensor):
            _check_workers("DTensor.from_local()", local, workers)
        local = _modules().sent(local, workers, outside(mesh))
        return own(local, mesh, placements, **{**options, "run_check": False})

    return from_local


before_to_local: Callable[[Any], None] | None = None
"""Called in a trace; set by graph_inputs.py."""


def _to_local(own: Any) -> Replacement:
    # A plain tensor does not have its sharding, which random operations on it need.
    def to_local(self: Any, *args: Any, **options: Any) -> Any:
        if before_to_local is not None and (tracing_state.is_traced(self._local_tensor) or tracing_state.is_dynamos()):
            before_to_local(self)
        local = own(self, *args, **options)
        if type(local) is not RemoteTensor:
            return local
        meta, origin = local._meta, origin_of(self._spec)
        if meta.origin != origin:
            if local is self._local_tensor:
                local = RemoteTensor(meta, local._ref)
            local._meta = meta.workers.metas.with_origin(meta, origin)
        return local

    return to_local


def origin_of(spec: Any) -> Any:
    """Return the `shard_origins.Origin` of local tensors of DTensors like this."""
    found = spec.__dict__.get("_monarch_origin", False)
    if found is False:
        found = spec.__dict__["_monarch_origin"] = _origin_of_new(spec)
    return found


def _origin_of_new(spec: Any) -> Any:
    """Return a cached origin: torch makes a spec for each gradient, so a mesh keeps the origins of equal specs."""
    mesh = tracing_state.real(spec.mesh)
    workers = workers_of(mesh)
    if workers is None:
        return None
    known = mesh.__dict__.setdefault("_monarch_origins", {})
    key = spec.placements, spec.shard_order, spec.tensor_meta
    try:
        if key not in known:
            if len(known) >= _KEPT_ORIGINS:
                known.clear()
            known[key] = shard_origins.of_shard(spec, mesh, _coordinates(mesh, workers))
        return known[key]
    except TypeError:  # sizes of a trace have no hash
        return shard_origins.of_shard(spec, mesh, _coordinates(mesh, workers))


_KEPT_ORIGINS = 1024
"""Limit for each mesh."""


def _from_local_here(
    local: Any, mesh: Any, placements: Any = None, *, run_check: bool = False, shape: Any = None, stride: Any = None,
    grad_placements: Any = None,
) -> Any:  # fmt: skip
    """Run from_local as in a trace, without a move to the mesh's device, which fails without torch_xla."""
    placed = [Replicate()] * mesh.ndim if placements is None else placements
    placed = [Shard(each.dim + local.ndim) if type(each) is Shard and each.dim < 0 else each for each in placed]
    back = None if grad_placements is None else tuple(grad_placements)
    return api._FromTorchTensor.apply(local, mesh, tuple(placed), run_check, shape, stride, back)


def _on_its_mesh(own: Any) -> Replacement:
    def redistribute(self: Any, device_mesh: Any = None, placements: Any = None, **options: Any) -> Any:
        # torch compares placements first. If they are equal, it returns the tensor on the old mesh.
        is_other = isinstance(device_mesh, DeviceMesh) and device_mesh is not self.device_mesh
        if is_other and not torch.compiler.is_compiling():
            check_mesh("redistribute()", self.device_mesh, device_mesh)
        is_list = isinstance(placements, (list, tuple))
        if is_list and len(placements) != self.device_mesh.ndim and workers_of(self.device_mesh) is not None:
            raise ValueError(
                f"redistribute() got placements {placements} on {self.device_mesh}: give one for each of its "
                f"{self.device_mesh.ndim} dimensions"
            )
        return own(self, device_mesh, placements, **options)

    return redistribute


def _whole_of_shards(own: Any) -> Replacement:
    # torch multiplies one rank's sizes, for from_local and for the gradient of to_local.
    def compute_global_tensor_info(tensor: Any, mesh: Any, placements: Any) -> Any:
        workers = workers_of(mesh) if type(tensor) is RemoteTensor else None
        if workers is None:
            return own(tensor, mesh, placements)
        with tracing_state.outside():
            found = _global_shape.shape_and_stride(tensor, rows_of(mesh), workers.first, placements)
        return own(tensor, mesh, placements) if found is None else found

    return compute_global_tensor_info


def _init_helper(own: Any) -> Replacement:
    def _dtensor_init_helper(
        init_op: Any, size: Any, device_mesh: Any = None, placements: Any = None, **options: Any
    ) -> Any:
        mesh = device_mesh or api._mesh_resources.get_current_mesh()
        workers = workers_of(mesh)
        if workers is None:
            return own(init_op, size, device_mesh, placements, **options)
        from monarch_backend.dtensor._controller import factories

        return factories.make(workers, init_op, size, mesh, placements, options)

    return _dtensor_init_helper


# Checkpoints ----------------------------------------------------------------------------------------------------


def _save(own: Any) -> Replacement:
    def _save_state_dict(
        state_dict: Any, storage_writer: Any, process_group: Any = None, coordinator_rank: int = 0,
        no_dist: bool = False, planner: Any = None, use_collectives: bool = True,
    ) -> Any:  # fmt: skip
        if not controller_process_group.is_controller():
            return own(state_dict, storage_writer, process_group, coordinator_rank, no_dist, planner, use_collectives)
        mesh = _checkpoint().mesh_of(state_dict)
        if mesh is None:
            return _checkpoint().save_here(own, state_dict, storage_writer, planner)
        return _checkpoint().save(mesh, state_dict, storage_writer, planner, use_collectives)

    return _save_state_dict


def _async_save(own: Any) -> Replacement:
    def async_save(
        state_dict: Any, *, checkpoint_id: Any = None, storage_writer: Any = None, planner: Any = None, **options: Any
    ) -> Any:
        given = {"checkpoint_id": checkpoint_id, "storage_writer": storage_writer, "planner": planner}
        if not controller_process_group.is_controller():
            return own(state_dict, **given, **options)
        values = state_dict_saver._stateful_to_state_dict(state_dict)
        writer = state_dict_saver._storage_setup(storage_writer, checkpoint_id, reader=False)
        return _checkpoint().async_save(_checkpoint().mesh_of(values), values, writer, planner)

    return async_save


def _load(own: Any) -> Replacement:
    def _load_state_dict(
        state_dict: Any, storage_reader: Any, process_group: Any = None, coordinator_rank: int = 0,
        no_dist: bool = False, planner: Any = None,
    ) -> None:  # fmt: skip
        if not controller_process_group.is_controller():
            own(state_dict, storage_reader, process_group, coordinator_rank, no_dist, planner)
            return
        mesh = _checkpoint().mesh_of(state_dict)
        if mesh is None:
            _checkpoint().load_here(own, state_dict, storage_reader, planner)
        else:
            _checkpoint().load(mesh, state_dict, storage_reader, planner)

    return _load_state_dict


def _checkpoint() -> Any:
    from monarch_backend.dtensor._controller import checkpoint as found  # it imports this module

    return found


def _made(own: Any) -> Replacement:
    # torch's own does nothing outside of a trace, through six functions, for each result of each operation.
    def __init__(self: Any, local_tensor: Any = None, *args: Any, **options: Any) -> None:
        if type(local_tensor) is not RemoteTensor:
            own(self, local_tensor, *args, **options)
        else:
            no_pointer(self)  # C++ code that needs the memory gets an error, as for its shard

    return __init__


def _wrap_result(own: Any) -> Replacement:
    new = DTensor.__new__

    def wrap(res: Any, spec: Any) -> Any:
        if type(res) is RemoteTensor and type(spec) is DTensorSpec:
            made = new(DTensor, res, spec, requires_grad=res.requires_grad)  # __init__ would do no more than this
            no_pointer(made)
            return made
        if type(res) in (list, tuple) and isinstance(spec, (list, tuple)):
            return type(res)([wrap(each, one) for each, one in zip(res, spec, strict=False)])
        return own(res, spec)

    return wrap


def _device_for_whom(own: Any) -> Replacement:
    def _lazy_init() -> None:
        # Each function of torch with a device argument calls it, also for the workers' device.
        if torch.cuda.is_available() or not controller_process_group.is_controller():
            own()

    return _lazy_init


# Compiling ------------------------------------------------------------------------------------------------------


def _first_trace(own: Any) -> Replacement:
    """Install the rows for traces at dynamo's first trace for any backend; their imports take a second."""

    def __call__(self: Any, *args: Any, skip: int = 0, **options: Any) -> Any:
        if controller_process_group.is_controller():
            from monarch_backend.dtensor._patches.semantics import graph_inputs  # it imports this module

            graph_inputs.install()
        return own(self, *args, skip=skip + 1, **options)

    return __call__


# Shardings ------------------------------------------------------------------------------------------------------


def _or_torchs(ours: Replacement) -> Replacement:
    """Return a handler that calls torch's for meshes that are no controller's."""

    def handle(func: Any, args: Any, kwargs: Any) -> Any:
        is_ours = all(_is_remote(each) or _is_traced(each) for each in _distributed(args))
        return (ours if is_ours else _in_torchs_way)(func, args, kwargs)

    return handle


def _in_torchs_way(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator as torch does, for meshes that are no controller's."""
    handlers = api.DTensor._op_dispatcher._custom_op_handlers
    mine = handlers.pop(func)
    try:
        return func(*args, **(kwargs or {}))
    finally:
        handlers[func] = mine


def _of_controllers(ours: Replacement, own: Replacement) -> Replacement:
    """Return a handler that calls torch's communication between ranks for meshes that are no controller's."""

    def handle(func: Any, args: Any, kwargs: Any) -> Any:
        is_ours = any(_is_remote(each) or _is_traced(each) for each in _distributed(args))
        return (ours if is_ours else own)(func, args, kwargs)

    return handle


def _distributed(args: Any) -> Iterator[DTensor]:
    """Yield the DTensors among an operator's arguments, also in its lists."""
    given = itertools.chain.from_iterable(each if isinstance(each, (list, tuple)) else (each,) for each in args)
    return (each for each in given if isinstance(each, DTensor))


def _register_lists() -> None:
    """Register operators on lists of tensors, calculated value by value, that torch lacks."""
    known = api.DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs
    if _aten._foreach_copy_.default not in known:
        pointwise._register_single_dim_pointwise(_aten._foreach_copy_.default)


# Reading --------------------------------------------------------------------------------------------------------


def _is_remote(tensor: Any) -> bool:
    return isinstance(tensor._local_tensor, RemoteTensor)


def _item(func: Any, args: Any, kwargs: Any) -> Any:
    """Read ``.item()``, ``bool()`` and ``float()`` from the whole tensor, not from a rank's shard."""
    tensor = args[0]
    if _is_remote(tensor):
        return fetch.item(tensor.detach().full_tensor())
    return func(tensor._local_tensor, **kwargs)


def _equal(func: Any, args: Any, kwargs: Any) -> bool:
    one, other = args
    if not _is_remote(one if isinstance(one, DTensor) else other):
        return func(one._local_tensor, other._local_tensor, **kwargs)  # type: ignore[no-any-return]
    return one.shape == other.shape and bool((one == other).all())


def _repr(own: Any) -> Replacement:
    def __repr__(self: Any, **options: Any) -> str:
        if not _is_remote(self):
            return own(self, **options)  # type: ignore[no-any-return]
        return f"DTensor({fetch.text_of(self)}, device_mesh={self.device_mesh}, placements={self.placements})"

    return __repr__


def _of_the_host(own: Any) -> Replacement:
    def _dispatch_fast_path_python_tail(
        self: Any, op_call: Any, args: Any, kwargs: Any, mesh: Any, sharding: Any, results: Any, participating: Any,
        is_inplace_op: Any, is_out_variant_op: Any,
    ) -> Any:  # fmt: skip
        if is_inplace_op and isinstance(args[0], torch.Tensor) and not isinstance(args[0], DTensor):
            return args[0]  # it has been changed; torch takes it for a DTensor
        return own(
            self, op_call, args, kwargs, mesh, sharding, results, participating, is_inplace_op, is_out_variant_op
        )

    return _dispatch_fast_path_python_tail


# Random numbers -------------------------------------------------------------------------------------------------


def _random_operation(handle: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    def operation(func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [each for each in args if isinstance(each, DTensor)]
        if all(map(_is_remote, tensors)) or (func not in random_ops.BY_VALUES and all(map(_is_traced, tensors))):
            result = handle(func, args, dict(kwargs))
            from monarch_backend.dtensor._patches.fixes import view_writeback  # it imports this module

            view_writeback.write_back(func, args, kwargs)
            return result
        if any(map(_is_traced, tensors)):
            if random_ops.is_bernoulli_on_a_cpu(func, args, kwargs):
                return random_ops.bernoulli_in_a_trace(args[0])
            from monarch_backend.dtensor._patches.semantics import graph_inputs  # needs dynamo, which is imported now

            graph_inputs.break_graph(
                str(func), RemoteTensorError(f"{func} draws a count of numbers that depends on values")
            )
        return _in_torchs_way(func, args, kwargs)

    return operation


def _is_traced(tensor: Any) -> bool:
    return tracing_state.is_traced(tensor._local_tensor) and workers_of(tensor.device_mesh) is not None


def _seeding(own: Any) -> Replacement:
    def manual_seed(seed: int) -> None:  # torch.manual_seed() calls it
        philox.default.manual_seed(int(seed))
        own(seed)

    return manual_seed


def _get_rng_state(own: Any) -> Replacement:
    return lambda *device, **named: own(*device, **named) if torch.cuda.is_available() else philox.default.get_state()


def _set_rng_state(own: Any) -> Replacement:
    def set_rng_state(new_state: torch.Tensor, *device: Any, **named: Any) -> None:
        if torch.cuda.is_available():
            own(new_state, *device, **named)
        else:
            philox.default.set_state(new_state)

    return set_rng_state


def _on_the_host(own: Any) -> Replacement:
    def init(tensor: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(tensor, DTensor) or not _is_remote(tensor) or tensor.device.type == "meta":
            return own(tensor, *args, **options)
        # No sharding of a factorisation gives the whole's result, so it is done once, here.
        whole = own(torch.empty(tensor.shape, dtype=tensor.dtype), *args, **options)
        with torch.no_grad():
            return tensor.copy_(api.distribute_tensor(whole, tensor.device_mesh, tensor.placements))

    return init


# Modules --------------------------------------------------------------------------------------------------------


def _parallelize(own: Any) -> Replacement:
    def parallelize_module(module: Any, device_mesh: Any = None, parallelize_plan: Any = None, **options: Any) -> Any:
        outermost, _mode.parallelizing = not _mode.parallelizing, True  # torch's own calls itself for each style
        try:
            done = own(module, device_mesh, parallelize_plan, **options)
        finally:
            _mode.parallelizing = not outermost
        if outermost and parallelize_plan is not None:
            mesh = device_mesh or api._mesh_resources.get_current_mesh()
            hooked = any(isinstance(each, _AtFirstCall) for each in done._forward_pre_hooks.values())
            if not hooked and workers_of(mesh) is not None:
                done.register_forward_pre_hook(_AtFirstCall(mesh))
        return done

    return parallelize_module


class _AtFirstCall:
    """Hook of a parallelized module: its first call puts what no style has taken on the workers.

    Not earlier, since a style or `fully_shard` may follow, which send each worker its shard only. It is here because
    dynamo traces it, and of this package only this file.
    """

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh

    def __deepcopy__(self, _memo: Any) -> _AtFirstCall:
        return self

    def __call__(self, module: Any, _inputs: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            from torch._dynamo.comptime import comptime

            comptime(_put_in_a_trace)
            return
        if torch.compiler.is_compiling():
            return  # a trace of other kinds could not do it; an eager call still can
        self.put(module)

    def put(self, module: Any) -> None:
        """Put what no style has taken on the workers, and remove the hook."""
        for key in [key for key, each in module._forward_pre_hooks.items() if each is self]:  # of a copy, too
            del module._forward_pre_hooks[key]
        if workers_of(self.mesh) is not None:  # else it was sent to a worker, which has everything
            _modules().put_module(module, self.mesh)


def _put_in_a_trace(context: Any) -> None:
    """Put tensors on the workers in a trace of the hook, and restart the trace with them.

    Dynamo calls this with the hook's names. It is done once for all hooks of the modules in the traced function.
    """
    from torch._dynamo.exc import UnspecializeRestartAnalysis

    root = context._ComptimeContext__tx.output.root_tx
    known = [*root.f_locals.values(), context.get_local("module")._ComptimeVar__variable.value]
    known += [root.f_globals.get(name) for name in root.f_code.co_names]
    with contextlib.suppress(ValueError):  # one that is empty
        known += [each.cell_contents for each in root.closure or ()]
    modules = {each for found in known if isinstance(found, torch.nn.Module) for each in found.modules()}
    for module in modules:
        for hook in [each for each in module._forward_pre_hooks.values() if isinstance(each, _AtFirstCall)]:
            hook.put(module)
    raise UnspecializeRestartAnalysis(restart_reason="parameters outside all plans were put on the workers")


def exchange(parameter: Any, remote: Any) -> str:
    """Let the object ``parameter``, to which others refer, become ``remote``; return why that is impossible, or ""."""
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return "it has hooks of its own"
    try:
        torch.utils.swap_tensors(parameter, remote)
    except RuntimeError as error:  # a graph or a weak reference has the old tensor
        return str(error).split("\n")[0]
    return ""


def _modules() -> Any:
    from monarch_backend.dtensor._controller import module_placement as found  # it imports this module

    return found


def grouped_by_device(own: Any) -> Replacement:
    """Replace torch's grouping of tensor lists. It is here and not in device_queries.py, because dynamo traces it."""

    def _group_tensors_by_device_and_dtype(tensorlistlist: Any, with_indices: bool = False) -> Any:
        found = own(tensorlistlist, with_indices)
        if torch.compiler.is_compiling():  # a trace is on the CPU
            return found
        first = next((each for each in tensorlistlist[0] if each is not None), None)
        if not isinstance(first, RemoteTensor) and not (isinstance(first, DTensor) and _is_remote(first)):
            return found
        # C++ has found them all on the CPU. A caller that moves a number there would move it away from the gradients.
        return {(lists[0][0].device, dtype): (lists, at) for (_, dtype), (lists, at) in found.items()}

    return _group_tensors_by_device_and_dtype


def _total_norm(own: Any) -> Replacement:
    """Return the norm of gradients on several meshes: the norm of each mesh's norms as plain tensors."""

    def _get_total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Any:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        groups = _by_mesh(tensors, tensors)
        if not groups:
            return own(tensors, norm_type, error_if_nonfinite, foreach)
        norms = [_on_each_rank(own(each, norm_type, False, foreach)) for each in groups]
        remote = [each for each in norms if isinstance(each, RemoteTensor)]
        if len({each._meta.outside for each in remote}) > 1:
            norms = [fetch.as_host(each) if isinstance(each, RemoteTensor) else each for each in norms]
        elif remote:
            norms = [_beside(remote[0], each) for each in norms]
        return own(norms, norm_type, error_if_nonfinite, foreach)

    return _get_total_norm


def _clip_by_norm(own: Any) -> Replacement:
    def _clip_grads_with_norm_(parameters: Any, max_norm: float, total_norm: Any, foreach: bool | None = None) -> None:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        having = [each for each in parameters if each.grad is not None]
        groups = _by_mesh(having, [*(each.grad for each in having), total_norm])
        if not groups:
            own(parameters, max_norm, total_norm, foreach)
            return
        for each in groups:
            own(each, max_norm, _beside(each[0].grad, _on_each_rank(total_norm)), foreach)

    return _clip_grads_with_norm_


def _by_mesh(values: list[Any], tensors: list[Any]) -> list[list[Any]]:
    """Group the values by the mesh of the tensors; nothing if all DTensors of a controller are on one."""
    if torch.compiler.is_compiling():
        return []
    meshes = [each.device_mesh if isinstance(each, DTensor) and _is_remote(each) else None for each in tensors]
    if len({each for each in meshes if each is not None}) < 2:
        return []
    groups: dict[Any, list[Any]] = {}
    for value, mesh in zip(values, meshes, strict=False):
        groups.setdefault(mesh, []).append(value)
    return list(groups.values())


def _beside(tensor: Any, norm: Any) -> Any:
    """Copy a norm of the program to the processes of a tensor, if their device is another one.

    ``norm.to(tensor.device)`` would not say which of several meshes with such devices is meant.
    """
    if isinstance(norm, RemoteTensor) or norm.device == tensor.device:
        return norm
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.new_empty((), dtype=norm.dtype).copy_(norm)


def _on_each_rank(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
