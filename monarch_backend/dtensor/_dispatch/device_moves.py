"""Devices of remote tensors, and copies between the workers' devices and their CPUs.

A worker has one GPU, its own: "cuda", "cuda:0" and "cuda:3" all mean that. Replaced functions of torch that call this
module are in _patches/semantics/device_queries.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from monarch_backend.dtensor._controller import controller_process_group
from monarch_backend.dtensor._controller.operations import operations
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._controller.worker_set import WorkerSet
from monarch_backend.dtensor._dispatch import dispatch
from monarch_backend.dtensor._errors import RemoteTensorError
from monarch_backend.dtensor._torch_internals import c10d_registry
from monarch_backend.dtensor._worker import local_functions as there

_THERE = "monarch_backend.dtensor._worker.local_functions:"


def workers_of_factory(device: torch.device) -> WorkerSet:
    """Return the workers of ``with mesh:``, or the only ones. Raises RemoteTensorError for several, or none."""
    mesh = c10d_registry.mesh_of_context()
    owner = None if mesh is None else controller_process_group.owner_of(mesh._flatten_rank_map)
    if owner is not None and owner.device.type == device.type:
        return owner
    found = [each for each in controller_process_group.owners() if each.device.type == device.type]
    if len(found) == 1:
        return found[0]
    if found:
        raise RemoteTensorError(
            f"a tensor on {device}: of {len(found)} sets of processes with such devices. Say which one: make it inside "
            "`with mesh:`, or from a tensor that is there (x.new_zeros(), torch.zeros_like(x))"
        )
    raise RemoteTensorError(
        f"a tensor on {device}: this process has no such device, and no mesh has one (procs.device_mesh("
        f"{device.type!r}))"
    )


def of(tensor: Any) -> torch.device:
    """Return the workers' device of a remote tensor or a DTensor of one."""
    return _local(tensor)._meta.device


def _local(tensor: Any) -> RemoteTensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # type: ignore[return-value]


def moved(tensor: Any, device: Any) -> Any:
    """Return the values on another device of the workers. Raises RemoteTensorError for one that they do not have."""
    mine, wanted = of(tensor), torch.device(device)
    if wanted.type == mine.type:
        return tensor
    workers = _local(tensor)._meta.workers
    if wanted.type not in ("cpu", "meta", workers.device.type):
        raise RemoteTensorError(
            f"{wanted} for a tensor of {workers.name}, whose processes compute on {workers.device.type}: make the mesh "
            f"of such devices, procs.device_mesh({wanted.type!r})"
        )
    if wanted.type == workers.device.type:
        wanted = workers.device  # torch without GPUs knows only devices with a number
    return _Moved.apply(tensor, wanted)  # type: ignore[no-untyped-call]


class _Moved(torch.autograd.Function):
    """Move whose gradient returns to the tensor's device. torch's own takes that from C++: the CPU."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, device: torch.device) -> Any:
        ctx.came_from = of(tensor)
        return _move(tensor, device)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return _move(gradient, ctx.came_from), None


def _move(tensor: Any, device: torch.device) -> Any:
    if isinstance(tensor, DTensor):
        return DTensor(_move(tensor._local_tensor, device), tensor._spec, requires_grad=False)
    if of(tensor).type == device.type:
        return tensor.detach()
    return dispatch.call(there.moved, _THERE + "moved", (tensor, device), {})


def to(own: Any, tensor: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Run ``tensor.to(...)``. ``own`` is torch's method, which handles all arguments but the device."""
    if not isinstance(_local(tensor), RemoteTensor):
        return own(tensor, *args, **options)
    if "other" in options:
        args, options = (options["other"], *args), {name: each for name, each in options.items() if name != "other"}
    if args and isinstance(args[0], torch.Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    copy = options.get("copy", False)
    plain = {name: each for name, each in options.items() if name != "copy"}
    flags = [each for each in args if isinstance(each, bool)]  # non_blocking, copy
    if len(flags) > 1:
        copy, args = flags[1], args[:-1]
    parsed: Any = torch._C._nn._parse_to(*args, **plain)
    device, dtype, non_blocking, memory_format = parsed
    if device is None or device.type == "meta":
        return own(tensor, *args, **options)
    there = moved(tensor, device)
    copy = copy and there is tensor
    if dtype is None:
        dtype = tensor.dtype
    given = {} if memory_format is None else {"memory_format": memory_format}
    return own(there, dtype, non_blocking, copy, **given)


def pinned(tensor: Any) -> Any:
    """Return the tensor in pinned memory if the workers have GPUs. Raises RuntimeError for a tensor on a GPU."""
    if of(tensor).type != "cpu":
        raise RuntimeError(f"a tensor on {of(tensor)} can't be pinned: only one on the CPU, x.cpu().pin_memory()")
    if isinstance(tensor, DTensor):
        return DTensor(pinned(tensor._local_tensor), tensor._spec, requires_grad=False)
    return dispatch.call(there.pinned, _THERE + "pinned", (tensor,), {})


operations.to, operations.pinned = to, pinned
