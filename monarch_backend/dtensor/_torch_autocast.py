"""``torch.autocast("cuda")`` of remote tensors.

torch decides by where C++ has a tensor, which for a remote one is the CPU, and the CPU's lists of operators are others.
So from the first such block of a controller of GPUs on, kernels of ours are in the place of torch's, which look at the
workers' device, too. Which operators there are, torch says; what each wants is as torch's documentation lists it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from monarch_backend._torch_patches import overriding
from monarch_backend.dtensor import _devices
from monarch_backend.dtensor._remote_tensor import RemoteTensor
from monarch_backend.dtensor._torch import Replacement, _is_remote, _replaces
from monarch_backend.dtensor._torch_devices import controls_gpus

LOWER = frozenset(
    {
        "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d",
        "conv_transpose3d", "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "prelu", "addmm",
        "addmv", "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm",
        "chain_matmul", "linalg_multi_dot", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell",
        "rnn_tanh_cell", "rnn_relu_cell", "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
    }
)  # fmt: skip
"""Operators that are done in the lower precision."""
WIDEST = frozenset(
    {
        "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "scatter_add",
        "tensordot",
    }
)  # fmt: skip
"""Operators that want one dtype, the widest of their arguments'. All others are done in float32."""
_KEY = torch._C.DispatchKey.AutocastCUDA
_library: list[torch.library.Library] = []
_cast: dict[tuple[int, torch.dtype], tuple[Any, Any]] = {}
"""Parameters, as they have been cast, until the outermost autocast ends."""


def operators() -> list[Any]:
    """Those for which torch has a rule on GPUs."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    return [_operator(name) for name in names if name.startswith("aten::")]


def _operator(name: str) -> Any:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _register() -> None:
    library = torch.library.Library("aten", "IMPL")
    with overriding():
        for operator in operators():
            library.impl(operator, _kernel(operator), "AutocastCUDA")
    _library.append(library)


def _kernel(operator: Any) -> Any:
    name = operator._schema.name.removeprefix("aten::")

    def kernel(*args: Any, **options: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY)):
            tensors = [each for each in pytree.tree_leaves((args, options)) if isinstance(each, torch.Tensor)]
            floating = [each.dtype for each in tensors if each.is_floating_point() and each.dtype != torch.float64]
            if not floating or not any(map(_is_on_gpu, tensors)):
                return operator(*args, **options)
            if name == "binary_cross_entropy":
                raise RuntimeError(
                    "binary_cross_entropy is unsafe in autocast: combine it with the sigmoid before it, "
                    "binary_cross_entropy_with_logits or BCEWithLogitsLoss"
                )
            dtype = _wanted(name, floating)
            args, options = pytree.tree_map_only(torch.Tensor, lambda each: _as(each, dtype), (args, options))
            return operator(*args, **options)

    return kernel


def _wanted(name: str, dtypes: list[torch.dtype]) -> torch.dtype:
    if name in LOWER:
        return torch.get_autocast_dtype("cuda")
    if name in WIDEST:
        lower = torch.get_autocast_dtype("cuda")
        return lower if all(each == lower for each in dtypes) else torch.float32
    return torch.float32


def _is_on_gpu(tensor: Any) -> bool:
    remote = isinstance(tensor, RemoteTensor) or (isinstance(tensor, DTensor) and _is_remote(tensor))
    return _devices.of(tensor).type == "cuda" if remote else tensor.is_cuda


def _as(tensor: Any, dtype: torch.dtype) -> Any:
    if not tensor.is_floating_point() or tensor.dtype in (dtype, torch.float64):
        return tensor
    if not (tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled() and torch.is_autocast_cache_enabled()):
        return tensor.to(dtype)
    found = _cast.get((id(tensor), dtype))
    if found is None:
        found = _cast[id(tensor), dtype] = tensor, tensor.to(dtype)
    return found[1]


@_replaces(torch.autocast, "__enter__")
def _enter(own: Any) -> Replacement:
    def __enter__(self: Any) -> Any:
        found = own(self)
        if self.device == "cuda" and self._enabled and controls_gpus():
            if not _library:
                _register()
            self._monarch_guard = torch._C._IncludeDispatchKeyGuard(_KEY)
            self._monarch_guard.__enter__()
        return found

    return __enter__


@_replaces(torch.autocast, "__exit__")
def _exit(own: Any) -> Replacement:
    def __exit__(self: Any, *error: Any) -> Any:
        guard = self.__dict__.pop("_monarch_guard", None)
        if guard is not None:
            guard.__exit__(None, None, None)
        found = own(self, *error)
        if not torch.is_autocast_enabled("cuda"):
            _cast.clear()
        return found

    return __exit__
