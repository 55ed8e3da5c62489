"""Memory order of results: workers use the strides that the controller computed before any worker ran the operation.

For some operators torch's shape functions give other strides than a device's kernels: `batch_norm` of a transposed
input, the gradient of `layer_norm`. A `view` is accepted or refused by the computed strides. So the definition has
them. At the first execution a worker compares its results with them. If they differ, it copies results into that order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from monarch_backend.dtensor._per_rank import per_rank_int

_aten = torch.ops.aten
Strides = list[int] | None
"""Strides of a result; None if any are accepted."""

_BATCH_NORMS = {
    _aten.native_batch_norm.default: 0,
    _aten._native_batch_norm_legit.default: 0,
    _aten._native_batch_norm_legit.no_stats: 0,
    _aten._native_batch_norm_legit_no_training.default: 0,
    _aten._batch_norm_with_update.default: 0,
    _aten.native_batch_norm_backward.default: 1,
}
"""Batch norms, and the position of the input among their arguments."""


def as_cpus_have_it(func: Any, arguments: Sequence[Any], result: Any) -> Any:
    """Return an eager batch norm's results, on metadata, with a CPU's strides: the input's. A trace has torch's."""
    at = _BATCH_NORMS.get(func)
    if at is None or result[0] is None or result[0].device.type != "cpu":
        return result
    shape, strides = arguments[at].shape, arguments[at].stride
    return (result[0].new_empty_strided(result[0].shape, _of_a_batch_norm(tuple(shape), tuple(strides))), *result[1:])


@functools.lru_cache(1024)
def _of_a_batch_norm(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a CPU's result for this input, and of its gradient."""
    like = torch.empty_strided(shape, strides, device="meta")
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(like.ndim, torch.contiguous_format)
    is_last = not like.is_contiguous() and like.is_contiguous(memory_format=last)
    return torch.empty_like(like, memory_format=last if is_last else torch.contiguous_format).stride()


def as_part(whole: Any, local: Any) -> Any:
    """Return a whole tensor's metadata in its parts' order, so that a view of it is a view of its parts."""
    sizes, strides = ([_largest(each) for each in of] for of in (local.shape, local.stride()))
    if -1 in (*sizes, *strides) or not all(type(each) is int for each in (*whole.shape, *whole.stride)):
        return whole
    dims = [dim for dim, size in enumerate(sizes) if size > 1]
    order = sorted(dims, key=lambda dim: -strides[dim])
    if order == sorted(dims, key=lambda dim: -whole.stride[dim]) or 0 in [strides[dim] for dim in dims]:
        return whole
    right, step = [0] * len(sizes), 1
    for dim in reversed([*(dim for dim in range(len(sizes)) if dim not in dims), *order]):
        right[dim], step = step, step * whole.shape[dim]
    return whole._replace(stride=tuple(right))


def _largest(number: Any) -> int:
    """Return the largest value of all ranks; -1 for a symbol."""
    values = per_rank_int.values_of(number)
    if values is not None:
        return max(each for each in values if each is not None)
    return number if type(number) is int else -1


def said(results: Any, device: torch.device) -> list[Strides]:
    """Return the strides of results (metadata or fake tensors) for workers of this device. XLA has its own orders."""
    many = results if isinstance(results, (list, tuple)) else [results]
    if device.type == "xla":
        return [None] * len(many)
    return [_strides(each) for each in many]


def _strides(one: Any) -> Strides:
    stride = getattr(one, "stride", None)  # None for an int beside tensors, or a list of them
    return None if stride is None else list(stride() if callable(stride) else stride)


def is_wrong(tensor: Any, strides: Strides) -> bool:
    if strides is None or not isinstance(tensor, torch.Tensor) or tensor.numel() < 2 or tensor._is_view():
        return False
    steps = [each for each in zip(tensor.shape, tensor.stride(), strides, strict=True) if each[0] > 1]
    # Overlapping elements can't be written by a copy.
    return any(has != right for _, has, right in steps) and all(right for _, _, right in steps)


def ordered(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
