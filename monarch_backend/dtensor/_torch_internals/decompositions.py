"""What torch knows of an operator and does not publish: how to say it in others, and which devices have it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decomposition_table

_FOR_ALL = "CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional"

_OF_METADATA = {
    f"aten::{name}"
    for name in (
        "dim", "is_contiguous", "is_non_overlapping_and_dense", "is_strides_like_format", "layout", "numel", "size",
        "storage_offset", "stride", "sym_is_contiguous", "sym_numel", "sym_size", "sym_storage_offset", "sym_stride",
    )
}  # fmt: skip
"""What C++ asks of a tensor that has its metadata in Python: by these, whose own kernels ask the same again."""


def is_there(operator: Any, backend: str) -> bool:
    """Whether a backend ("XLA") has it, or torch has it for all of them."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has(operator.name(), key) for key in (backend, *_FOR_ALL))


@functools.cache
def made_of_others(operator: Any) -> Callable[..., Any] | None:
    """What autograd calls for an operator that it only knows by others (`linear`, `item`, `reshape`); None for another.
    Without autograd, in `torch.inference_mode`, such an operator comes as it is.
    """
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    if operator._schema.name in _OF_METADATA:  # some of which the dispatcher does not even know
        return None
    if not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key):
        return None
    # Not `operator.decompose`: that prefers a version in Python for compilers, whose dropout draws other numbers.
    return functools.partial(operator._op_dk, key)


def in_others(operator: Any) -> Callable[..., Any] | None:
    """A function that does the same in other operators, where torch has one."""
    return decomposition_table.get(operator)
