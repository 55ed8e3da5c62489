"""Indices that differ by rank: torch's C++ asks such a number for an int, and makes an IndexError of its refusal.

A plain tensor of the workers selects each rank's own part. Other tensors raise RankDependentError.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from monarch_backend.dtensor import _rank_ints
from monarch_backend.dtensor._errors import RankDependentError
from monarch_backend.dtensor._remote_tensor import RemoteTensor
from monarch_backend.dtensor._torch import Replacement, _replaces
from monarch_backend.dtensor._torch_slices import LOCALLY


@_replaces(torch.Tensor, "__getitem__")
def _get(own: Any) -> Replacement:
    def __getitem__(self: Any, index: Any) -> Any:
        try:
            return own(self, index)
        except IndexError:
            if not _has_number(index):
                raise
        return own(*_selected(self, index))

    return __getitem__


@_replaces(torch.Tensor, "__setitem__")
def _set(own: Any) -> Replacement:
    def __setitem__(self: Any, index: Any, value: Any) -> None:
        try:
            own(self, index, value)
            return
        except IndexError:
            if not _has_number(index):
                raise
        own(*_selected(self, index), value)

    return __setitem__


def _has_number(index: Any) -> bool:
    return any(_rank_ints.values_of(each) is not None for each in (index if isinstance(index, tuple) else (index,)))


def _selected(tensor: Any, index: Any) -> tuple[Any, Any]:
    """Each rank's part of the tensor, and what is left of the index. torch selects with ints first, too.

    Raises RankDependentError for a tensor that is not each rank's own.
    """
    left: list[Any] = list(index) if isinstance(index, tuple) else [index]
    numbers = [at for at, each in enumerate(left) if _rank_ints.values_of(each) is not None]
    if not isinstance(tensor, RemoteTensor):
        what, instead = "a tensor of the controller", _rank_ints.INSTEAD
        if isinstance(tensor, DTensor):
            what, instead = "a DTensor", LOCALLY
        raise RankDependentError(f"{what}, indexed with {left[numbers[0]]},", "is another part on each rank", instead)
    for at in reversed(numbers):
        before, number, after = left[:at], left[at], left[at + 1 :]
        is_from_end = any(each is Ellipsis for each in before)
        dim = tensor.ndim - 1 - _dims(after) if is_from_end else _dims(before)
        tensor, left = tensor.select(dim, number), [*before, *after]
    return tensor, tuple(left) or ...


def _dims(index: Iterable[Any]) -> int:
    """How many dimensions of a tensor these are for."""
    return sum(
        0 if each is None or each is Ellipsis or isinstance(each, bool)
        else each.ndim if isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8)
        else 1
        for each in index
    )  # fmt: skip
