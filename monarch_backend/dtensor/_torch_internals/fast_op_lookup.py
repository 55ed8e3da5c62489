"""Fastest Python function for an operator; a worker calls operators a hundred thousand times in a second.

torch has two. An operator of `torch.ops` looks up for each call how to convert its arguments to C++. The functions that
programs use (``torch.add``) have that compiled, which takes 0.6 us less. The operator of such a function depends on the
arguments. So both are called without execution to compare them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from monarch_backend.process_group._c10d_internals import UntracedMode

_C: Any = torch._C
_ROOMS = (_C._VariableFunctions, _C.TensorBase, _C._nn)
"""Where torch has the functions, by the operators' names."""


def quickest(operator: Callable[..., Any], args: Any, kwargs: Any) -> Callable[..., Any]:
    """Return the fastest function that equals the operator for arguments of these types."""
    if not isinstance(operator, torch._ops.OpOverload):
        return operator
    if operator.namespace == "aten":
        name = operator._schema.name.split("::")[1]
        own = _asked(operator, args, kwargs)
        for room in _ROOMS:
            found = getattr(room, name, None)
            if own is not None and found is not None and _are_same(_asked(found, args, kwargs), own):
                return found  # type: ignore[no-any-return]
    return operator._op


class _AskedError(Exception):
    """Raised in place of an execution."""


class _Asking(UntracedMode):
    """Mode that intercepts the first operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.what: tuple[Any, Any, Any] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.what = func, args, kwargs or {}
        raise _AskedError


def _asked(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any, Any] | None:
    """Return the first operator that a function calls, with its arguments; None if it refuses these arguments."""
    asking = _Asking()
    with contextlib.suppress(Exception), asking:
        function(*args, **kwargs)
    return asking.what


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_are_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_same(each, other[name]) for name, each in one.items())
    return one is other or bool(one == other)


def above_autograd() -> contextlib.AbstractContextManager[None]:
    """In this context operations have histories, also in an operator's own implementation, which is below autograd."""
    keys = [_C.DispatchKey.AutogradFunctionality, _C.DispatchKey.ADInplaceOrView]
    excluded = _C._dispatch_tls_local_exclude_set()
    for each in keys:
        excluded = excluded.remove(each)
    return _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set(), excluded)  # type: ignore[no-any-return]
