"""Replacements of functions of lists of gradients, which may be on other devices or on several meshes."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from monarch_backend.dtensor._controller import fetch
from monarch_backend.dtensor._controller.controller_mesh import Replacement, _is_remote
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor


def grouped_by_device(own: Any) -> Replacement:
    """Replace torch's grouping of tensor lists, which dynamo traces."""

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
