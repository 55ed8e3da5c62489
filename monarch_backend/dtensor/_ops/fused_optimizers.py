"""torch's fused optimizers, operators on lists of tensors: each rank runs them on its shards.

torch's DTensor moves a step's other tensors to the placement of the parameter. Then moments and sums with another
placement would be changed in a copy. A momentum has one if the first gradient had, and a loaded state may have one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._dispatch import local_results
from monarch_backend.dtensor._per_rank import per_rank_int

_aten = torch.ops.aten
_GRADIENTS = 1
"""Position of the gradients' list. What a step writes there is not used."""


def _step(func: Any, args: Any, kwargs: Any) -> None:
    """Run a step.

    ``args``: lists of parameters, gradients, and states, some of them empty; last, the steps' numbers.
    """
    of_workers: dict[Any, list[int]] = {}  # tensors of several meshes need several commands
    for i, parameter in enumerate(args[0]):
        of_workers.setdefault(local_results.workers_of(parameter), []).append(i)
    for places in of_workers.values():
        _step_of(func, [[each[i] for i in places] if each else each for each in args], kwargs or {})


def _step_of(func: Any, lists: Sequence[Any], options: dict[str, Any]) -> None:
    moved: list[tuple[Any, Any]] = []
    locals_: list[list[Any]] = []
    for place, each in enumerate(lists):
        locals_.append([])
        for tensor, parameter in zip(each, lists[0], strict=False):
            there = _beside(tensor, parameter)
            local = _in_order(local_results.local_of(there), local_results.local_of(parameter))
            locals_[-1].append(local)
            if place != _GRADIENTS:
                moved += [(local_results.local_of(there), local)] if local is not local_results.local_of(there) else []
                moved += [(tensor, there)] if there is not tensor else []
    func(*locals_, **{name: local_results.local_of(local_results.everywhere(value)) for name, value in options.items()})
    for tensor, there in moved:
        tensor.copy_(there.full_tensor() if isinstance(there, DTensor) and not isinstance(tensor, DTensor) else there)


def _beside(tensor: Any, parameter: Any) -> Any:
    """Return the local tensor in the parameter's placement; a step's number is whole on each rank."""
    if tensor is parameter:
        return tensor
    if not isinstance(parameter, DTensor):
        return local_results.everywhere(tensor)  # a gradient may be each rank's part of a sum
    if tensor.ndim == 0 and parameter.ndim:
        return local_results.everywhere(tensor)
    there = local_results.distributed(tensor, parameter.device_mesh)
    if there.placements == parameter.placements:  # a plain tensor must be in the right placement, too: replicated
        return tensor
    return there.redistribute(parameter.device_mesh, parameter.placements)


def _in_order(local: Any, of_parameter: Any) -> Any:
    """Return the tensor with the parameter's strides, because the kernels process all memory in order.

    A gradient that was scattered along another dimension than the first has padding in between.
    """
    if local is of_parameter or local.ndim == 0 or _is_like(local, of_parameter):
        return local
    return torch.empty_like(of_parameter, dtype=local.dtype).copy_(local)


def _is_like(local: Any, of_parameter: Any) -> bool:
    if type(local) is type(of_parameter) is RemoteTensor and local._meta is of_parameter._meta:
        return True
    return _strides(local) == _strides(of_parameter)


def _strides(local: Any) -> list[Any]:
    return [per_rank_int.values_of(each) or each for each in local.stride()]


HANDLERS: dict[Any, Callable[..., Any]] = {
    getattr(getattr(_aten, f"_fused_{kind}_"), overload): _step
    for kind, overload in itertools.product(("sgd", "adagrad", "adam", "adamw"), ("default", "tensor_lr"))
}
