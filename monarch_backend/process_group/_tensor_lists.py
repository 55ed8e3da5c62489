"""Several tensors per rank in one collective, done as one operation on one tensor.

`ProcessGroup.allreduce`, `broadcast` and `allgather` take lists of tensors, and Gloo defines their results. Here the
group's operation on one tensor gives the same values, on every route. All other collectives take one tensor per rank,
which is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions

from monarch_backend.process_group import _cpu_validation, _overlap
from monarch_backend.process_group._errors import bad_argument
from monarch_backend.process_group._hierarchical.reduction import combine
from monarch_backend.process_group._hooks import AliasedOutputWork
from monarch_backend.process_group._shm import shm_backend

if TYPE_CHECKING:
    from monarch_backend.process_group._collectives import Collectives

_Method = Callable[..., Any]  # of the group's class: a subclass's method has already been called


def check_one(group: Collectives, collective: str, what: str, tensors: Sequence[object]) -> None:
    if len(tensors) != 1:
        cure = "Call the collective once for each tensor." if tensors else "Give one."
        raise bad_argument(group, collective, f"the {what} list has {len(tensors)} entries; it takes one", cure)


def check_same_dtype(group: Collectives, collective: str, tensors: Sequence[Tensor]) -> None:
    dtype, layout = tensors[0].dtype, tensors[0].layout
    for index, tensor in enumerate(tensors[1:], 1):
        if tensor.dtype is not dtype or tensor.layout is not layout:
            what = f"tensor {index} is {_kind(tensor)}, tensor 0 is {_kind(tensors[0])}"
            raise bad_argument(group, collective, what, "Give tensors of one dtype and layout.")


def all_reduce(group: Collectives, run_one: _Method, tensors: list[Tensor], opts: Any) -> Any:
    """All-reduce over all tensors of all ranks; each of them gets the result."""
    name = "all_reduce"
    inner, _, _ = group._find(name, tensors)
    _check_alike(group, name, tensors)
    _overlap.refuse_partial(group, name, tensors)
    if _cpu_validation.op_name(opts.reduceOp) == "AVG":
        what = f"reduce op AVG of {len(tensors)} tensors per rank has no agreed divisor"
        raise bad_argument(group, name, what, "Use SUM and divide, or call all_reduce once for each tensor.")
    opts = _cpu_validation.bool_sum_as_max(tensors, opts)
    values, opts = _cpu_validation.premultiplied(group, name, tensors, opts, in_place=False)
    _cpu_validation.reducible(group, name, values, opts.reduceOp, inner)
    parts = [value.view(-1) for value in _cpu_validation.readable(values)]
    total = torch.empty_like(parts[0])
    combine(parts, total, shm_backend.op_code(opts.reduceOp), [1] * len(parts))
    return AliasedOutputWork(
        run_one(group, [total], opts), tensors, _cpu_validation.copies([(tensor, total) for tensor in tensors])
    )


def broadcast(group: Collectives, run_one: _Method, tensors: list[Tensor], opts: Any) -> Any:
    """Broadcast the root's tensor number ``opts.rootTensor`` into all tensors of all ranks."""
    name = "broadcast"
    group._find(name, tensors)
    check_root_tensor(group, name, tensors, opts)
    _check_alike(group, name, tensors)
    _overlap.refuse_partial(group, name, tensors)
    (one,) = _cpu_validation.readable([tensors[opts.rootTensor]])
    single = BroadcastOptions()
    single.rootRank, single.timeout, single.asyncOp = opts.rootRank, opts.timeout, opts.asyncOp
    others = [(tensor, one) for tensor in tensors if tensor is not one]
    return AliasedOutputWork(run_one(group, [one], single), tensors, _cpu_validation.copies(others))


def check_root_tensor(group: Collectives, collective: str, tensors: Sequence[Tensor], opts: Any) -> None:
    if not 0 <= opts.rootTensor < len(tensors):
        what = f"rootTensor {opts.rootTensor} is outside the list of {len(tensors)} tensors"
        raise bad_argument(group, collective, what, f"Give an index from 0 to {len(tensors) - 1}.")


def all_gather(
    group: Collectives, run_one: _Method, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any
) -> Any:
    """Gather all inputs of all ranks into each list of outputs, ordered by rank and then by input."""
    name, size, count = "all_gather", group.size(), len(inputs)
    group._find(name, [*inputs, *(t for row in outputs for t in row)])
    _cpu_validation.check_pairs(group, name, outputs, inputs)
    for row in outputs:
        if len(row) != size * count:
            what = f"an output list has {len(row)} tensors, {size} ranks with {count} inputs each give {size * count}"
            raise bad_argument(group, name, what, "Give one tensor for each input of each rank.")
    _cpu_validation.check_memory(group, name, outputs)
    _check_alike(group, name, [*inputs, *(t for row in outputs for t in row)])
    sent = torch.stack(_cpu_validation.readable(inputs))
    received = [torch.empty_like(sent) for _ in range(size)]
    parts = [part for one in received for part in one.unbind()]
    pairs = [pair for row in outputs for pair in zip(row, parts, strict=True)]
    shown = [tensor for row in outputs for tensor in row]
    return AliasedOutputWork(run_one(group, [received], [sent], opts), shown, _cpu_validation.copies(pairs))


def _check_alike(group: Collectives, collective: str, tensors: Sequence[Tensor]) -> None:
    check_same_dtype(group, collective, tensors)
    _cpu_validation.check_settled(group, collective, tensors)
    first = tensors[0]
    for index, tensor in enumerate(tensors):
        if tensor.shape != first.shape:
            what = f"tensor {index} has shape {list(tensor.shape)}, tensor 0 has {list(first.shape)}"
            raise bad_argument(group, collective, what, "All tensors of the call must have one shape.")


def _kind(tensor: Tensor) -> str:
    dtype, layout = (str(x).removeprefix("torch.") for x in (tensor.dtype, tensor.layout))
    return dtype if layout == "strided" else f"{layout} {dtype}"
