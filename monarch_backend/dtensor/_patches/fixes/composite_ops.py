"""Kernels of operators that torch's C++ takes apart by a tensor's values or device, which remote tensors do not show.

Each is registered for autograd's key, above the parts, and calls torch's own decomposition. Without autograd
(`torch.inference_mode`) a DTensor's dispatch calls it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from monarch_backend.dtensor._controller import controller_process_group
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._dispatch import deferred_checks
from monarch_backend.dtensor._errors import RemoteTensorError
from monarch_backend.dtensor._torch_internals import decompositions, tracing_state
from monarch_backend.dtensor._worker import value_checks

_aten = torch.ops.aten
_library: torch.library.Library | None = None


def register() -> None:
    """Register the kernels; a second call does nothing."""
    global _library
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")
        for operator, kernel in KERNELS.items():
            _library.impl(operator, kernel, "AutogradCPU")


def _by_torch(operator: Any, *args: Any, **kwargs: Any) -> Any:
    own = decompositions.made_of_others(operator)
    assert own is not None
    return own(*args, **kwargs)


def _one_hot(tensor: Any, num_classes: int = -1) -> Any:
    # torch's decomposition checks the classes of plain tensors only.
    if tracing_state.is_dynamos() and controller_process_group.is_controller():
        from monarch_backend.dtensor._torch_internals import graph_break  # needs dynamo, which is imported now

        graph_break.break_graph("one_hot", RemoteTensorError("one_hot checks its classes in eager code"))
    if not torch.compiler.is_compiling() and isinstance(tensor, (DTensor, RemoteTensor)):
        deferred_checks.require(value_checks.classes, tensor, num_classes)
    return _by_torch(_aten.one_hot.default, tensor, num_classes)


def _lstm(operator: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    # By its parts: oneDNN's operator for a whole layer on CPUs keeps nothing for the backward on workers.
    if not isinstance(input, DTensor):
        return _by_torch(operator, input, *args, **kwargs)
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags() warns of other flags
    try:
        return _by_torch(operator, input, *args, **kwargs)
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _attention(*args: Any, **kwargs: Any) -> Any:
    # The CPU, where C++ has remote tensors, has one fused kernel; it stands for any of the GPUs'.
    operator, flags = _aten.scaled_dot_product_attention.default, torch.backends.cuda
    wants_another = flags.mem_efficient_sdp_enabled() or flags.cudnn_sdp_enabled()
    if flags.flash_sdp_enabled() or not wants_another or not _controls_gpus():
        return _by_torch(operator, *args, **kwargs)
    flags.enable_flash_sdp(True)
    try:
        return _by_torch(operator, *args, **kwargs)
    finally:
        flags.enable_flash_sdp(False)


def _controls_gpus() -> bool:
    is_controller = controller_process_group.is_controller()
    return is_controller and any(each.device.type == "cuda" for each in controller_process_group.owners())


KERNELS: dict[Any, Callable[..., Any]] = {
    _aten.one_hot.default: _one_hot,
    _aten.lstm.input: functools.partial(_lstm, _aten.lstm.input),
    _aten.lstm.data: functools.partial(_lstm, _aten.lstm.data),
    _aten.scaled_dot_product_attention.default: _attention,
}
"""Kernels by operator."""
