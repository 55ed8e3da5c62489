"""``torch.autocast("cuda")`` and ``torch.autocast("xla")`` of remote tensors.

torch decides by the device that C++ has for a tensor. For a remote one that is the CPU, whose lists of operators
differ. From a controller's first such block on, our kernels replace torch's or torch_xla's. They also check the
workers' device. _ops/autocast_rules.py has the dtype of each operator.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.weak import TensorWeakRef

from monarch_backend.dtensor._controller.controller_mesh import Replacement, _is_remote
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._dispatch import device_moves
from monarch_backend.dtensor._ops import autocast_rules
from monarch_backend.dtensor._patches.semantics.device_queries import controls
from monarch_backend.process_group._c10d_patches import overriding

_RULES = {"cuda": autocast_rules.CUDA, "xla": autocast_rules.XLA}
_KEYS = {"cuda": "AutocastCUDA", "xla": "AutocastXLA"}
_libraries: dict[str, list[torch.library.Library]] = {}
_cast: dict[tuple[int, torch.dtype], tuple[TensorWeakRef, TensorWeakRef, int]] = {}
"""Parameters with their casts, for as long as a graph has these, and the parameter's version. Of one autocast."""


def operators(kind: str) -> list[Any]:
    """Return the operators with a rule of torch or torch_xla on this kind of device."""
    if kind == "xla":
        known = (name for name in autocast_rules.XLA_OPERATORS if hasattr(torch.ops.aten, name.partition(".")[0]))
        return [_operator(name) for name in known]  # 2.14 lacks some of them, such as "cholesky"
    names = torch._C._dispatch_get_registrations_for_dispatch_key(_KEYS[kind])
    return [_operator(name.removeprefix("aten::")) for name in names if name.startswith("aten::")]


def _key(kind: str) -> torch._C.DispatchKey:
    key = torch._C._parse_dispatch_key(_KEYS[kind])
    assert key is not None, _KEYS[kind]
    return key


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _register(kind: str) -> None:
    library = torch.library.Library("aten", "IMPL")
    _libraries[kind] = [library]
    if kind == "xla" and "torch_xla" not in sys.modules:  # it registers this key
        others = torch.library.Library("_", "IMPL")
        others.fallback(torch.library.fallthrough_kernel, _KEYS[kind])
        _libraries[kind].append(others)
    with overriding():
        for operator in operators(kind):
            library.impl(operator, _kernel(operator, kind), _KEYS[kind])


def _kernel(operator: Any, kind: str) -> Any:
    name = operator._schema.name.removeprefix("aten::")
    keys = torch._C.DispatchKeySet(_key(kind))

    def kernel(*args: Any, **options: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            tensors = [each for each in pytree.tree_leaves((args, options)) if isinstance(each, torch.Tensor)]
            floating = [each.dtype for each in tensors if each.is_floating_point() and each.dtype != torch.float64]
            if not floating or not any(_device_of(each).type == kind for each in tensors):
                return operator(*args, **options)
            if name in _RULES[kind].refused:
                raise RuntimeError(
                    f"{name} is unsafe in autocast: combine it with the sigmoid before it, {name}_with_logits or "
                    "BCEWithLogitsLoss"
                )
            dtype = _wanted(name, kind, floating)
            args, options = pytree.tree_map_only(torch.Tensor, lambda each: _as(each, dtype), (args, options))
            return operator(*args, **options)

    return kernel


def _wanted(name: str, kind: str, dtypes: list[torch.dtype]) -> torch.dtype:
    rules, lower = _RULES[kind], torch.get_autocast_dtype(kind)
    if name in rules.lower or (name in rules.widest and all(each == lower for each in dtypes)):
        return lower
    return torch.float32


def _device_of(tensor: Any) -> torch.device:
    remote = isinstance(tensor, RemoteTensor) or (isinstance(tensor, DTensor) and _is_remote(tensor))
    return device_moves.of(tensor) if remote else tensor.device


def _as(tensor: Any, dtype: torch.dtype) -> Any:
    if not tensor.is_floating_point() or tensor.dtype in (dtype, torch.float64):
        return tensor
    if not (tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled() and torch.is_autocast_cache_enabled()):
        return tensor.to(dtype)
    key, version = (id(tensor), dtype), tensor._version
    parameter, cast, at = _cast.get(key, (None, None, -1))
    found = None if parameter is None or cast is None or at != version or parameter() is not tensor else cast()
    if found is None:
        found = tensor.to(dtype)
        _cast[key] = TensorWeakRef(tensor), TensorWeakRef(found), version
    return found


def _enter(own: Any) -> Replacement:
    def __enter__(self: Any) -> Any:
        if not any(map(torch.is_autocast_enabled, _KEYS)):
            _cast.clear()
        found = own(self)
        if self.device in _KEYS and self._enabled and controls(self.device):
            if self.device not in _libraries:
                _register(self.device)
            # For the rest of the thread: torch excludes the key again where the autocast ends.
            torch._C._dispatch_tls_set_dispatch_key_included(_key(self.device), True)
        return found

    return __enter__
