"""Tensors of one call that share memory: private copies, so that a call gives what it gives for separate tensors.

Gloo reads all inputs of a call before it writes an output. It writes the outputs in the order of their list, so that
the last one wins. The compiled core and the stages between hosts write while they still read. These functions replace
tensors that share memory by copies; the returned ``finish`` writes the results back in Gloo's order.

Only the range of a tensor's memory counts. Columns of one matrix have overlapping ranges and no common element: they
are copied without need, and their values are right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from monarch_backend.process_group import _cpu

Finish = Callable[[], object]


def span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the byte after its last one; (0, 0) without memory."""
    if type(tensor) not in _cpu.PLAIN or tensor.layout is not torch.strided or not tensor.numel():
        return 0, 0
    first = tensor.data_ptr()
    if tensor.is_contiguous():
        return first, first + tensor.nbytes
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (steps + 1) * tensor.itemsize


def shares_memory(tensors: Sequence[Tensor]) -> bool:
    """Return whether any two of the tensors have overlapping ranges of memory."""
    end = 0
    for first, after in sorted(map(span, tensors)):
        if first < end:
            return True
        end = max(end, after)
    return False


def separate_in_place(tensors: list[Tensor]) -> tuple[list[Tensor], Finish | None]:
    """Tensors that are read and written: copies of all of them if two share memory."""
    if len(tensors) < 2 or not shares_memory(tensors):
        return tensors, None
    copies = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
    return copies, functools.partial(_write_back, tensors, copies)


def _write_back(tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    for tensor, copy in zip(tensors, copies, strict=True):
        tensor.detach().copy_(copy)
