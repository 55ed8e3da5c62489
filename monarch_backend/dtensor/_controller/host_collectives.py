"""Collectives of the controller's own plain tensors: every rank of the group has their values.

An all_reduce with SUM gives value * group size. A collective that gives each rank another result is refused, because
one tensor of this process cannot hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from monarch_backend.dtensor._errors import RemoteTensorError

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""torch can't multiply unsigned integers of these widths. The signed product has the same bits."""
_ONE_RANKS = frozenset({"send", "recv", "recv_anysource"})


def run(name: str, size: int, given: Sequence[Any]) -> None:
    """Run the collective ``name`` of a group of ``size`` ranks, with the arguments that a ProcessGroup takes.

    Raises RemoteTensorError if ranks get different results, for unknown reductions and for outputs of other sizes;
    ValueError for a root that is not in the group.
    """
    if name not in _HERE and (size > 1 or name in _ONE_RANKS):
        raise RemoteTensorError(
            f"{name}() of a tensor of the controller: the {size} ranks do not all get the same result, and one tensor "
            "of this process cannot hold several. Distribute the tensor first (distribute_tensor), or run the function "
            "on the workers (monarch_backend.dtensor.run)"
        )
    root = next((each.rootRank for each in given if hasattr(each, "rootRank")), 0)
    if not 0 <= root < size:
        raise ValueError(f"{name}() from or to rank {root} of a group of {size} ranks: give one from 0 to {size - 1}")
    with torch.no_grad():
        act: Callable[..., None] = _HERE.get(name, _copy)
        act(size, *given)


def _reduce(size: int, tensors: Any, options: Any = None, *rest: Any) -> None:
    """Write the result of all ranks. reduce() leaves ranks other than its root undefined."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    op = next((each for each in (options, *rest) if hasattr(each, "reduceOp") or hasattr(each, "op")), None)
    results = [_reduced(each, op, size) for each in tensors]  # all of them first: tensors may overlap
    for each, result in zip(tensors, results, strict=True):
        each.detach().copy_(result)


def _reduced(value: torch.Tensor, given: Any, size: int) -> torch.Tensor:
    op = getattr(given, "reduceOp", dist.ReduceOp.SUM if given is None else given)
    name = getattr(op, "op", op).name
    is_bitwise = name in ("BAND", "BOR", "BXOR")
    if name not in _REDUCED or (is_bitwise and (value.is_floating_point() or value.is_complex())):
        raise RemoteTensorError(
            f"{name} of a tensor of the controller of {value.dtype}: there is no such reduction. Use one of "
            f"{', '.join(_REDUCED)}; those that begin with B take integers only"
        )
    if value.dtype == torch.bool and name in ("SUM", "PRODUCT"):
        return value.clone()  # the logical or, and: of equal values that value
    signed = value.view(_SIGNED[value.dtype]) if value.dtype in _SIGNED else value
    return _REDUCED[name](signed, size).view(value.dtype)


_REDUCED: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "SUM": lambda value, size: value * size,
    "PRODUCT": lambda value, size: value**size,
    "BXOR": lambda value, size: value.clone() if size % 2 else torch.zeros_like(value),
    **dict.fromkeys(("AVG", "MIN", "MAX", "BAND", "BOR"), lambda value, _: value.clone()),
}


def _gather(size: int, outputs: Any, inputs: Any, *_: Any) -> None:
    """Copy into lists of ``size`` tensors, or tensors of ``size`` parts. Ranks other than the root have none."""
    if isinstance(inputs, torch.Tensor):
        outputs, inputs = [outputs], [inputs]
    for output, value in zip(outputs, inputs, strict=False):
        source = value.detach().clone()  # it may be a part of the output
        parts = output
        if isinstance(output, torch.Tensor):
            parts = output.detach().view(size, *value.shape) if output.numel() == size * value.numel() else []
        if len(parts) != size or any(each.shape != value.shape for each in parts):
            raise RemoteTensorError(
                f"all_gather of a tensor of sizes {tuple(value.shape)} of {size} ranks needs {size} outputs of these "
                "sizes, or one with room for all of them"
            )
        for part in parts:
            part.detach().copy_(source)


def _gather_coalesced(size: int, outputs: Any, inputs: Any, *rest: Any) -> None:
    """Gather into a list for each rank, where other functions of torch have one for each input."""
    _gather(size, [list(each) for each in zip(*outputs, strict=True)], inputs, *rest)


def _copy(_size: int, outputs: Any, inputs: Any, *rest: Any) -> None:
    """Copy the input, in a group of one rank."""
    if isinstance(outputs, torch.Tensor):
        outputs.detach().view(-1).copy_((inputs if isinstance(inputs, torch.Tensor) else inputs[0]).reshape(-1))
        return
    for output, value in zip(outputs, inputs, strict=True):
        _copy(1, output, value, *rest)


_HERE: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced", "reduce"), _reduce),
    "broadcast": lambda *_: None,  # every rank has the root's value
    **dict.fromkeys(
        ("allgather", "_allgather_base", "all_gather_single", "allgather_into_tensor_coalesced", "gather"), _gather
    ),
    "allgather_coalesced": _gather_coalesced,
}
