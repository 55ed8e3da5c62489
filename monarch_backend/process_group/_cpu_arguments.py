"""Checked arguments of collectives on the CPU, in the form that the inner groups take.

_cpu_validation.py has the single checks. The functions here combine them for arguments of one form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from monarch_backend.process_group import _cpu_validation, _overlap, _tensor_lists
from monarch_backend.process_group._errors import bad_argument

if TYPE_CHECKING:
    from monarch_backend.process_group._collectives import Collectives


def writable(
    group: Collectives, collective: str, given: Tensor, input: Tensor
) -> tuple[Tensor, Callable[[], object] | None]:
    """Return a tensor that the inner group may write, and a function that copies it to the given one, if needed."""
    output, finish = _cpu_validation.writable(given)
    if finish is None:
        (output,), finish = _overlap.separate_slices(group, [input], [output])
    else:
        _overlap.refuse_expanded(group, collective, [given])
    return output, finish


def lists(
    group: Collectives, collective: str, flat: list[Tensor], nested: list[list[Tensor]], what: str
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Return tensors and their lists with one tensor for each rank; ``what`` names the lists."""
    pair = (nested, flat) if what == "output" else (flat, nested)
    _cpu_validation.check_pairs(group, collective, *pair)
    for tensor, row in zip(flat, nested, strict=True):
        _cpu_validation.check_count(group, collective, what, row)
        _cpu_validation.check_same_shape(group, collective, row, tensor)
    moved = [_cpu_validation.movable(group, collective, row) for row in nested]
    return _cpu_validation.movable(group, collective, flat), moved


def rooted(
    group: Collectives,
    collective: str,
    opts: Any,
    flat: list[Tensor],
    nested: list[list[Tensor]],
    names: tuple[str, str],
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Return tensors and their lists, which only the root gives; ``names`` are those of both."""
    _tensor_lists.check_one(group, collective, names[0], flat)
    has_list, at_root = any(nested), opts.rootRank == group._own_rank
    if has_list != at_root:
        what = f"the {names[1]} list is {'missing' if at_root else 'given'} on rank {group._own_rank}"
        raise bad_argument(group, collective, what, f"Give it on the root, rank {opts.rootRank}, and only there.")
    if not at_root:
        return _cpu_validation.movable(group, collective, flat), []
    return lists(group, collective, flat, nested, names[1])


def exchange(group: Collectives, output: Tensor, input: Tensor, outputs: Any, inputs: Any) -> list[Tensor]:
    name = "all_to_all_single"
    if output.dtype != input.dtype:
        raise bad_argument(group, name, f"output is {output.dtype}, input is {input.dtype}", "Use one dtype.")
    _cpu_validation.check_splits(group, name, "output", output, outputs)
    _cpu_validation.check_splits(group, name, "input", input, inputs)
    tensors = [output, *_cpu_validation.settled([input])]
    _cpu_validation.check_contiguous(group, name, tensors)
    _overlap.refuse(group, name, tensors[1], output)
    return _cpu_validation.movable(group, name, tensors)
