"""Unpublished data of torch about operators: their decompositions, and the devices that have them."""

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
"""Operators by which C++ queries a tensor with metadata in Python; their own kernels query the same again."""


def is_there(operator: Any, backend: str) -> bool:
    """Whether a backend ("XLA") has the operator, or torch has it for all of them."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has(operator.name(), key) for key in (backend, *_FOR_ALL))


@functools.cache
def made_of_others(operator: Any) -> Callable[..., Any] | None:
    """Return autograd's decomposition of an operator such as `linear`, `item` or `reshape`; None for others.

    Without autograd, in `torch.inference_mode`, such operators are not decomposed before they arrive.
    """
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    if operator._schema.name in _OF_METADATA:  # the dispatcher does not even know some of them
        return None
    if not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key):
        return None
    # Not `operator.decompose`, which prefers a Python version for compilers, whose dropout draws other numbers.
    return functools.partial(operator._op_dk, key)


def in_others(operator: Any) -> Callable[..., Any] | None:
    return decomposition_table.get(operator)


def is_out_variant(call: Any) -> bool:
    """Whether this operator writes its result to an argument ``out``. torch has a tag for it from 2.13 on."""
    if not isinstance(call, torch._ops.OpOverload):
        return False
    tag = getattr(torch.Tag, "out", None)
    return any(each.is_out for each in call._schema.arguments) if tag is None else tag in call.tags
