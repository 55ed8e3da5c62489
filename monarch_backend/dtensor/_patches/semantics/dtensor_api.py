"""Replacements in DTensor's interface: how tensors are distributed, made, redistributed and printed.

A mesh that is not a controller's gets torch's own functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import _api as api
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from monarch_backend.dtensor._controller import fetch, per_rank_host_tensor
from monarch_backend.dtensor._controller.controller_mesh import (
    Replacement,
    _coordinates,
    _is_remote,
    check_mesh,
    outside,
    rows_of,
    workers_of,
)
from monarch_backend.dtensor._controller.per_rank_host_tensor import PerRankTensor
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor, no_pointer
from monarch_backend.dtensor._controller.worker_set import WorkerSet
from monarch_backend.dtensor._dispatch import global_shape as _global_shape
from monarch_backend.dtensor._errors import MeshMismatchError, RemoteTensorError
from monarch_backend.dtensor._per_rank import shard_origins
from monarch_backend.dtensor._placement import factories, module_placement
from monarch_backend.dtensor._torch_internals import tracing_state
from monarch_backend.dtensor._worker.xla.xla_spmd import without_spmd


def _distribute_module(own: Any) -> Replacement:
    ours = without_spmd(own)

    def distribute_module(module: Any, device_mesh: Any = None, *args: Any, **options: Any) -> Any:
        mesh = device_mesh or api._mesh_resources.get_current_mesh()
        if workers_of(mesh) is None:
            return own(module, mesh, *args, **options)
        tied = module_placement.tied(module)
        done = ours(module, mesh, *args, **options)
        module_placement.tie(tied)
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
        local = module_placement.sent(local, workers, outside(mesh))
        return own(local, mesh, placements, **{**options, "run_check": False})

    return from_local


def _of_a_plain_gradient(own: Any) -> Replacement:
    """Refuse a DTensor as the gradient of a plain tensor, as `_from_local` does, which torch 2.12 and later call."""

    def backward(ctx: Any, gradient: Any) -> Any:
        if isinstance(gradient, DTensor) and workers_of(gradient.device_mesh) is not None:
            raise RemoteTensorError(_NO_PLAIN_TENSOR)
        return own(ctx, gradient)

    return backward


before_to_local: Callable[[Any], None] | None = None
"""Called in a trace; set by trace_installation.py."""


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
        return factories.make(workers, init_op, size, mesh, placements, options)

    return _dtensor_init_helper


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


def _repr(own: Any) -> Replacement:
    def __repr__(self: Any, **options: Any) -> str:
        if not _is_remote(self):
            return own(self, **options)  # type: ignore[no-any-return]
        return f"DTensor({fetch.text_of(self)}, device_mesh={self.device_mesh}, placements={self.placements})"

    return __repr__
