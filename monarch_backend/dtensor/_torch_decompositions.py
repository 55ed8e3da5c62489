"""What torch knows of an operator and does not publish: how to say it in simpler ones, and which devices have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decomposition_table

_FOR_ALL = "CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional"


def is_there(operator: Any, backend: str) -> bool:
    """Whether a backend ("XLA") has it, or torch has it for all of them."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has(operator.name(), key) for key in (backend, *_FOR_ALL))


def in_others(operator: Any) -> Callable[..., Any] | None:
    """A function that does the same in other operators, where torch has one."""
    return decomposition_table.get(operator)
