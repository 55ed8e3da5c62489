"""Fix for XLA workers (torch 2.9): an in-place change of a DTensor also changes the tensors that share its memory.

torch_xla connects a tensor and its views by the dispatch key Functionalize. A DTensor calls the operator on its local
tensor within `__torch_dispatch__`, where torch excludes earlier keys, this one too. An in-place operation would change
the local tensor, a view, and not its base.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor._dispatch import OpDispatcher

_KEY: Any = "Functionalize"


def keep_views_together() -> None:
    """Install the fix for this process's DTensors; a second call does nothing."""
    own: Any = OpDispatcher.dispatch  # type: ignore[attr-defined]
    if hasattr(own, "__wrapped__"):
        return
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    exclude = torch._C._dispatch_tls_set_dispatch_key_excluded

    @functools.wraps(own)
    def dispatch(*args: Any) -> Any:
        before = excluded(_KEY)
        exclude(_KEY, False)
        try:
            return own(*args)
        finally:
            exclude(_KEY, before)

    OpDispatcher.dispatch = dispatch  # type: ignore[attr-defined]
