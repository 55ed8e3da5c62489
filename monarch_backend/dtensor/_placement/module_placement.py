"""Placement of whole tensors and modules of the controller on the workers, as each rank has them under torchrun.

They do not become DTensors: a parameter outside all plans is a plain tensor under torchrun, and here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from monarch_backend.dtensor._controller import controller_mesh
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._controller.worker_set import WorkerSet
from monarch_backend.dtensor._dispatch import local_results

log = logging.getLogger("monarch_backend")


def put_module(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Copy the parameters and buffers that are on the controller to all workers of the mesh. Return the module.

    Parameters stay the same objects, so an existing optimizer updates them on the workers. A module that
    ``parallelize_module`` was called with does the same at its first call, for parameters and buffers without a
    parallel style. Modules outside of such a module need this function. Shapes and dtypes do not change.

    Raises ValueError for a mesh that belongs to no controller.

    >>> from torch import nn
    >>> from monarch_backend.actor import this_host
    >>> from monarch_backend.dtensor import put_module
    >>> procs = this_host().spawn_procs({"tp": 2})
    >>> norm = put_module(nn.LayerNorm(3), procs.device_mesh("cpu"))
    >>> type(norm.weight).__name__, norm.weight.tolist()
    ('RemoteTensor', [1.0, 1.0, 1.0])
    >>> procs.stop().get()
    """
    workers = controller_mesh.workers_of(mesh)
    if workers is None:
        raise ValueError(f"{mesh} is no controller's mesh: a rank of a process group has the module's tensors already")
    # The first forward may be in one of these modes, and later ones not.
    with torch.inference_mode(False), torch.no_grad():
        for name, parameter in module.named_parameters():
            is_here = type(parameter) is nn.Parameter and not parameter.is_meta
            if is_here or _is_elsewhere_too(parameter, mesh):
                _put_parameter(name, parameter, mesh)
        put_buffers(module.modules(), mesh)
    return module


def _put_parameter(name: str, parameter: nn.Parameter, mesh: DeviceMesh) -> None:
    remote: Any = nn.Parameter(_put(parameter, mesh), requires_grad=parameter.requires_grad)
    its_own = remote.__dict__.copy()
    remote.__dict__.update(parameter.__dict__)
    remote.__dict__.update(its_own)
    if parameter.grad is not None:
        remote.grad = _put(parameter.grad, mesh)
    why = _exchange(parameter, remote)
    if why:
        log.warning(
            "%s stays on the controller, and is sent to the workers whenever it is used: %s. Call "
            "monarch_backend.dtensor.put_module() before that",
            name,
            why,
        )


def _exchange(parameter: Any, remote: Any) -> str:
    """Let the object ``parameter``, to which others refer, become ``remote``; return why that is impossible, or ""."""
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return "it has hooks of its own"
    try:
        torch.utils.swap_tensors(parameter, remote)
    except RuntimeError as error:  # a graph or a weak reference has the old tensor
        return str(error).split("\n")[0]
    return ""


def _put(tensor: torch.Tensor, mesh: DeviceMesh) -> Any:
    """Return a tensor of the controller, or a gradient, which may be on workers already, on the mesh's workers."""
    workers = controller_mesh.workers_of(mesh)
    assert workers is not None
    whole = local_results.local_of(local_results.everywhere(tensor))
    return sent(whole.detach(), workers, controller_mesh.outside(mesh))


def _is_elsewhere_too(tensor: torch.Tensor, mesh: DeviceMesh) -> bool:
    """Return whether it is also on workers outside the mesh, which would not change it."""
    if not isinstance(tensor, RemoteTensor) or tensor._meta.workers is not controller_mesh.workers_of(mesh):
        return False
    return not controller_mesh.outside(mesh) <= tensor._meta.outside


def put_buffers(modules: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Put the modules' buffers on all workers of the mesh; an operation there can't change a buffer here."""
    known: dict[torch.Tensor, torch.Tensor] = {}
    for module in modules:
        for name, buffer in module.named_buffers(recurse=False):
            is_here = type(buffer) is torch.Tensor and not buffer.is_meta
            if is_here or _is_elsewhere_too(buffer, mesh):
                if buffer not in known:
                    known[buffer] = _put(buffer, mesh)
                module._buffers[name] = known[buffer]


def tied(module: nn.Module) -> list[list[tuple[dict[str, Any], str]]]:
    """Return the places of each parameter and buffer that the module has several times: (table, name)."""
    places: dict[torch.Tensor, list[tuple[dict[str, Any], str]]] = {}
    for each in module.modules():
        for table in (each._parameters, each._buffers):
            for name, tensor in table.items():
                if tensor is not None and not isinstance(tensor, DTensor):
                    places.setdefault(tensor, []).append((table, name))
    return [found for found in places.values() if len(found) > 1]


def tie(places: list[list[tuple[dict[str, Any], str]]]) -> None:
    """Make tensors that were one tensor one again.

    torch distributes a shared tensor once for each place, and would train each alone. If the program shards the places
    differently, they stay several.
    """
    for (table, name), *others in places:
        first = table[name]
        for other, key in others:
            same = isinstance(first, DTensor) and isinstance(other[key], DTensor)
            if same and other[key]._spec == first._spec:
                other[key] = first


class _Sent(torch.autograd.Function):
    """Autograd function that sends a value to the workers. Its gradient stays there."""

    @staticmethod
    def forward(_ctx: Any, value: torch.Tensor, workers: WorkerSet, outside: frozenset[int]) -> torch.Tensor:
        return workers.put_on(value, outside)

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None, None


def sent(value: torch.Tensor, workers: WorkerSet, outside: frozenset[int]) -> Any:
    """Return a tensor on these workers, except for the ranks ``outside``, with its history."""
    if isinstance(value, RemoteTensor) and outside <= value._meta.outside:
        return value
    if value.requires_grad and torch.is_grad_enabled():
        return _Sent.apply(value, workers, outside)  # type: ignore[no-untyped-call]
    return workers.put_on(value, outside)
