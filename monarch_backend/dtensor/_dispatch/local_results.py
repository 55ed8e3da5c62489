"""Helpers for handwritten operators (_ops/): DTensors on one mesh, and results from each rank's part."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils import _pytree as pytree

from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor


def distributed(tensor: Any, mesh: Any) -> Any:
    """Return a DTensor on the mesh: a plain tensor is the same on all ranks. None stays None."""
    if tensor is None or isinstance(tensor, DTensor):
        return tensor
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def on_one_mesh(tensors: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return the mesh of the DTensors, and all tensors on it; the others may be tensors of the controller."""
    mesh = next(each.device_mesh for each in tensors if isinstance(each, DTensor))
    return mesh, [distributed(each, mesh) for each in tensors]


def everywhere(tensor: Any) -> Any:
    """Return a replicated DTensor; other values are unchanged."""
    if not isinstance(tensor, DTensor) or all(each.is_replicate() for each in tensor.placements):
        return tensor
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)


def local_of(tensor: Any) -> Any:
    """Return the local tensor of a DTensor; other values are unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def workers_of(tensor: Any) -> Any:
    local = local_of(tensor)
    return local._meta.workers if isinstance(local, RemoteTensor) else None


def of_parts(local: Any, whole: TensorMeta, mesh: Any, placements: Sequence[Any]) -> Any:
    return DTensor(local, DTensorSpec(mesh, tuple(placements), tensor_meta=whole), requires_grad=False)


def meta_of(tensor: Any) -> TensorMeta:
    return TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)


def wholes(func: Any, args: Any, kwargs: Any = None) -> tuple[Any, ...]:
    """Return TensorMetas of the operator's results for whole tensors, None for results that are None. Cached."""
    leaves, spec = pytree.tree_flatten((args, kwargs or {}))
    return _wholes(func, spec, *(meta_of(each) if isinstance(each, torch.Tensor) else each for each in leaves))


# typed: 1 and True are equal. Bounded: a program may have new lengths each time.
@functools.lru_cache(1024, typed=True)
def _wholes(func: Any, spec: pytree.TreeSpec, *leaves: Any) -> tuple[Any, ...]:
    made = [
        torch.empty_strided(*each[:2], dtype=each.dtype, device="meta") if type(each) is TensorMeta else each
        for each in leaves
    ]
    args, kwargs = pytree.tree_unflatten(made, spec)
    found = func(*args, **kwargs)
    results = found if isinstance(found, tuple) else (found,)
    return tuple(None if each is None else meta_of(each) for each in results)
