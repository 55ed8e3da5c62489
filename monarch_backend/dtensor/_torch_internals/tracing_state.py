"""Private parts of torch that tell traced tensors from others. Imports nothing of this package, and not dynamo."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch._guards import TracingContext
from torch._library.fake_class_registry import FakeScriptObject
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes


def is_traced(value: Any) -> bool:
    """Whether a value is a tensor of a trace, without values."""
    return isinstance(value, (FakeTensor, FunctionalTensor))


_mode_of, _FAKE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE


def is_dynamos() -> bool:
    """Whether torch.compile traces the operation that runs now."""
    return _mode_of(_FAKE) is not None and TracingContext.try_get() is not None


def mode_of(tensor: Any) -> Any:
    return tensor.fake_mode if isinstance(tensor, FakeTensor) else None


def share_memory(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    return any(torch._C._is_alias_of(tensor, each) for each in others)  # type: ignore[attr-defined]


def real(value: Any) -> Any:
    """Return the real object for a trace's stand-in (of a placement, a mesh)."""
    return value.real_obj if isinstance(value, FakeScriptObject) else value


outside = _disable_current_modes
"""In this context real tensors are calculated with, also while torch traces."""


class _Quiet(logging.Filter):
    """Context without log lines of FakeTensor about errors that it raises as well."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0
        logging.getLogger("torch._subclasses.fake_tensor").addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        return self._depth == 0

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1


quiet = _Quiet()
