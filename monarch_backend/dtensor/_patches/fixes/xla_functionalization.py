"""What an XLA worker needs of a private part of its torch (2.9): what a DTensor changes in place has changed for all.

torch_xla keeps a tensor and its views together by the dispatch key Functionalize. torch calls `__torch_dispatch__`, in
which a DTensor calls the operator on its local tensor, without the keys that come before it, this one too: an operation
in place would change the local tensor, a view, and not what that is a view of.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor._dispatch import OpDispatcher

_KEY: Any = "Functionalize"


def keep_views_together() -> None:
    """From now on, of this process's DTensors; again: nothing."""
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
