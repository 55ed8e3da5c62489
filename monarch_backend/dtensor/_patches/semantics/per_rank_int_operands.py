"""Indices and operands that differ by rank: plain tensors of workers take each rank's own, others RankDependentError.

torch's C++ asks an index for an int, and turns its refusal into an IndexError. It does not ask an operand: it
calculates with 7777777, which only tensors that are dispatched to Python replace by the number.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from monarch_backend.dtensor._controller.controller_mesh import Replacement
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._errors import RankDependentError
from monarch_backend.dtensor._patches.semantics.submesh_shapes import LOCALLY
from monarch_backend.dtensor._per_rank import per_rank_int

_aten = torch.ops.aten


def _get(own: Any) -> Replacement:
    def __getitem__(self: Any, index: Any) -> Any:
        try:
            return own(self, index)
        except IndexError:
            if not _has_number(index):
                raise
        return own(*_selected(self, index))

    return __getitem__


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


OPERATORS = [
    getattr(packet, name)
    for packet in (_aten.add, _aten.sub, _aten.mul, _aten.div, _aten.floor_divide)
    for name in packet.overloads()
    if getattr(packet, name)._schema.arguments[1].type.kind() == "TensorType" and name[:3] in ("Ten", "out", "def")
] + [
    getattr(packet, name)
    for packet in (_aten.add_, _aten.sub_, _aten.mul_, _aten.div_, _aten.floor_divide_)
    for name in packet.overloads()
    if name.startswith("Tensor")
]  # fmt: skip
"""Operators for which torch makes a tensor of a number."""
_library: torch.library.Library | None = None
_BELOW = torch._C.DispatchKeySet(torch._C.DispatchKey.Negative)


def install() -> None:
    """Make torch's stand-ins for such numbers visible: they get the key of a negation, whose kernels are here."""
    global _library
    _library = torch.library.Library("aten", "IMPL")
    for each in OPERATORS:
        _library.impl(each, functools.partial(_calculate, each), "Negative")


_NUMBER = "_monarch_wrapped_number"


def wrapped_number(_own: None) -> property:
    """Return the property that torch's C++ sets on a tensor made of a number, and reads of every operand."""
    return property(operator.attrgetter(_NUMBER), _stand_in)  # a getter in Python would cost 1 us


def _stand_in(tensor: Any, number: Any) -> None:
    """Setter of the property: torch's C++ sets it on the tensor that it calculates with, also for numbers of traces."""
    setattr(tensor, _NUMBER, number)
    if _differs(number):
        torch._C._set_neg(tensor, True)


def _differs(value: Any) -> bool:
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and isinstance(
        value.node, (per_rank_int.PerRankInt, per_rank_int.PerRankFloat, per_rank_int.PerRankBool)
    )


def _calculate(op: Any, *args: Any, **kwargs: Any) -> Any:
    leaves = pytree.tree_leaves((args, kwargs))
    tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
    number = next(filter(_differs, leaves), None)
    if number is not None and all(type(each) in (torch.Tensor, torch.nn.Parameter) for each in tensors):
        raise RankDependentError(
            f"{op} of a tensor of the controller and {number}", "is another one on each rank", per_rank_int.INSTEAD
        )
    # As torch does for tensors with a lazy negation, also as outputs.
    resolved = {id(each): each.resolve_neg() for each in tensors if each.is_neg()}
    given = pytree.tree_map_only(torch.Tensor, lambda each: resolved.get(id(each), each), (args, kwargs))
    with torch._C._ExcludeDispatchKeyGuard(_BELOW):
        result = op(*given[0], **given[1])
    written = next((each for each in tensors if resolved.get(id(each)) is result), None)
    return result if written is None else written.copy_(result)


def _has_number(index: Any) -> bool:
    return any(per_rank_int.values_of(each) is not None for each in (index if isinstance(index, tuple) else (index,)))


def _selected(tensor: Any, index: Any) -> tuple[Any, Any]:
    """Return each rank's part of the tensor, and the rest of the index; like torch, ints come first.

    Raises RankDependentError for a tensor that is not each rank's own.
    """
    left: list[Any] = list(index) if isinstance(index, tuple) else [index]
    numbers = [at for at, each in enumerate(left) if per_rank_int.values_of(each) is not None]
    if not isinstance(tensor, RemoteTensor):
        what, instead = "a tensor of the controller", per_rank_int.INSTEAD
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
    return sum(
        0 if each is None or each is Ellipsis or isinstance(each, bool)
        else each.ndim if isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8)
        else 1
        for each in index
    )  # fmt: skip
