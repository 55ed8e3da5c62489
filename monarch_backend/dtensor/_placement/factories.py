"""Factories of tensors on the workers: ``ones`` and others with a mesh, and buffers of torch's own code."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.overrides import TorchFunctionMode

from monarch_backend.dtensor._controller import controller_mesh
from monarch_backend.dtensor._controller.worker_set import WorkerSet
from monarch_backend.dtensor._dispatch import dispatch, local_results

_aten = torch.ops.aten
_OPERATORS = {
    torch.ones: _aten.ones.default,
    torch.zeros: _aten.zeros.default,
    torch.empty: _aten.empty.memory_format,
    torch.full: _aten.full.default,
    torch.rand: _aten.empty.memory_format,
    torch.randn: _aten.empty.memory_format,
}


def make(workers: WorkerSet, init_op: Any, size: Any, mesh: Any, placements: Any, options: dict[str, Any]) -> DTensor:
    """Return a DTensor of this global size, whose shards are made by the workers; replaces `_dtensor_init_helper`."""
    placements = tuple(placements or [Replicate()] * mesh.ndim)
    if len(placements) != mesh.ndim:
        raise ValueError(f"{len(placements)} placements for a mesh of {mesh.ndim} dimensions: give one for each")
    if options.get("layout", torch.strided) is not torch.strided:
        raise ValueError(f"layout {options['layout']}: only torch.strided can be distributed")
    shape, _ = compute_local_shape_and_global_offset(size, mesh, placements, skip_offset=True)
    dtype = options.get("dtype") or torch.get_default_dtype()
    args: list[Any] = [list(shape)]
    if init_op is torch.full:
        value = options.get("fill_value", 0)
        args.append(value)
        dtype = options.get("dtype") or torch.full((), value).dtype
    device = torch.device(mesh.device_type)
    local = dispatch.create(workers, _OPERATORS[init_op], args, {"dtype": dtype, "device": device})
    local = workers.without(local, controller_mesh.outside(mesh))
    strides = torch._prims_common.make_contiguous_strides_for(size)
    made = local_results.of_parts(local, TensorMeta(size, strides, local.dtype), mesh, placements)
    if init_op is torch.rand:
        made.uniform_()
    elif init_op is torch.randn:
        made.normal_()
    return made.requires_grad_(options.get("requires_grad", False))  # type: ignore[no-any-return]


class OnWorkers(TorchFunctionMode):
    """Context for torch's own functions: ``torch.empty``, ``zeros`` and ``ones`` make tensors on a mesh's workers.

    In user code it would also move other tensors there.
    """

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        workers = controller_mesh.workers_of(mesh)
        assert workers is not None
        self._workers, self._outside = workers, controller_mesh.outside(mesh)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.empty, torch.zeros, torch.ones):
            return func(*args, **kwargs)
        size = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
        options = {"dtype": kwargs.get("dtype") or torch.get_default_dtype(), "device": self._workers.device}
        made = dispatch.create(self._workers, _OPERATORS[func], [list(size)], options)
        return self._workers.without(made, self._outside)
