"""Checks of CPU collectives' arguments, with errors where Gloo would fail, hang, crash or corrupt data.

Gloo uses a rank outside the group as an index (a segmentation fault), silently drops the rest of an uneven
all_to_all_single, and knows nine dtypes. The checks use the caller's arguments only and do not communicate. This module
also adapts dtypes: those that Gloo lacks are moved under one that it has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from monarch_backend.process_group import _c10d_internals
from monarch_backend.process_group._errors import bad_argument
from monarch_backend.process_group._hooks import AliasedOutputWork
from monarch_backend.process_group._integer_mean import INTEGERS as INTEGERS_WITH_MEAN
from monarch_backend.process_group._integer_mean import divide_sum

if TYPE_CHECKING:
    from monarch_backend.process_group._collectives import Collectives

PLAIN = frozenset({Tensor, torch.nn.Parameter})

FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
INTEGERS = frozenset({torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool})
REDUCIBLE = FLOATS | INTEGERS  # by Gloo; shared memory has its own table

_BITWISE = ("BAND", "BOR", "BXOR")
_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", *_BITWISE, "PREMUL_SUM")


def _names(dtypes: frozenset[torch.dtype]) -> str:
    return ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))


def reducible(group: Collectives, collective: str, tensors: list[Tensor], op: object, inner: object) -> list[Tensor]:
    """Return the tensors in a form that ``inner`` can reduce: complex sums as pairs of floats, all others unchanged.

    Raises for a dtype or reduce op that the route lacks; the error names those that it has.
    """
    dtype = tensors[0].dtype
    able: frozenset[torch.dtype] = getattr(inner, "reduces", REDUCIBLE)
    if dtype in able and not dtype.is_complex and op == ReduceOp.SUM:
        return tensors  # the common case; the name of the op takes a microsecond
    name = op_name(op)
    if dtype.is_complex and name in ("SUM", "AVG"):
        return [torch.view_as_real(t) for t in tensors]
    if dtype not in able:
        remedy = f"It reduces {_names(able)}, and sums and averages of complex; cast first."
        raise bad_argument(group, collective, f"the CPU route can't {name} dtype {dtype}", remedy)
    if name not in _OPS:
        what = f"reduce op {name} is not supported on CPU"
        raise bad_argument(group, collective, what, f"Use one of {', '.join(_OPS)}.")
    takes = taken_by(name, able)
    if dtype not in takes:
        remedy = f"It takes {_names(takes)}; cast first."
        raise bad_argument(group, collective, f"reduce op {name} can't combine {dtype}", remedy)
    return tensors


@functools.cache
def taken_by(op: str, able: frozenset[torch.dtype]) -> frozenset[torch.dtype]:
    """Return those dtypes of a route that a reduce op can combine."""
    if op == "AVG":
        return frozenset(d for d in able if d.is_floating_point or d in INTEGERS_WITH_MEAN)
    if op in _BITWISE:
        return frozenset(d for d in able if not d.is_floating_point and not d.is_complex)
    return able if op == "SUM" else frozenset(d for d in able if not d.is_complex)


def integer_mean_as_sum(
    group: Collectives, outputs: Sequence[Tensor], opts: Any
) -> tuple[Any, Callable[[], object] | None]:
    """Return (``opts`` with SUM, function that divides ``outputs`` afterwards) for AVG of integers on Gloo.

    Gloo divides by a floating-point number, and its work then fails. All other calls are returned unchanged.
    """
    dtype = outputs[0].dtype
    if dtype not in INTEGERS_WITH_MEAN or dtype not in REDUCIBLE:
        return opts, None
    if outputs[0].layout is not torch.strided:
        return opts, None  # Gloo refuses this AVG as it does for floats
    if opts.reduceOp == ReduceOp.SUM or op_name(opts.reduceOp) != "AVG":
        return opts, None
    return _with(opts, ReduceOp.SUM), functools.partial(divide_all, list(outputs), group.size())


def divide_all(totals: list[Tensor], count: int) -> None:
    with torch.inference_mode():  # a total may need a gradient or be an inference tensor
        for total in totals:
            total.copy_(divide_sum(total, count))


def premultiplied(
    group: Collectives, collective: str, tensors: list[Tensor], opts: Any, *, in_place: bool
) -> tuple[list[Tensor], Any]:
    """Return PREMUL_SUM as a sum: (the tensors times the op's factor, ``opts`` with SUM); other ops are unchanged.

    Only the op's pickled state has the factor.
    """
    if opts.reduceOp == ReduceOp.SUM or op_name(opts.reduceOp) != "PREMUL_SUM":
        return tensors, opts
    if any(not t.is_floating_point() for t in tensors):
        what = f"reduce op PREMUL_SUM can't scale {tensors[0].dtype}"
        raise bad_argument(group, collective, what, "It takes floating-point dtypes.")
    factor = opts.reduceOp.__getstate__()[1]
    with torch.no_grad():
        # torch can't multiply float8.
        scaled = [t * factor if t.itemsize > 1 else (t.float() * factor).to(t.dtype) for t in tensors]
        if in_place:
            scaled = [t.copy_(s) for t, s in zip(tensors, scaled, strict=True)]
    return scaled, _with(opts, ReduceOp.SUM)


def bool_sum_as_max(tensors: Sequence[Tensor], opts: Any) -> Any:
    """Return ``opts`` with MAX for the SUM of bools, as NCCL does. Gloo adds bytes, so that 256 times True is False."""
    if tensors[0].dtype is not torch.bool or op_name(opts.reduceOp) != "SUM":
        return opts
    if any(tensor.dtype is not torch.bool for tensor in tensors):
        return opts
    return _with(opts, ReduceOp.MAX)


def _with(opts: Any, op: Any) -> Any:
    swapped = type(opts)()  # a new object: the caller may use theirs for other calls
    for name in ("rootRank", "timeout", "asyncOp"):
        if hasattr(opts, name):
            setattr(swapped, name, getattr(opts, name))
    swapped.reduceOp = op
    return swapped


def op_name(op: object) -> str:
    # A ReduceOp holds its RedOpType in `op`.
    kind = getattr(op, "op", op)
    return str(getattr(kind, "name", kind))


def check_rank(group: Collectives, collective: str, role: str, rank: int) -> None:
    if not 0 <= rank < group.size():
        what = f"{role} rank {rank} is outside the group"
        raise bad_argument(group, collective, what, f"Ranks here are 0 to {group.size() - 1}.")


def check_count(group: Collectives, collective: str, what: str, tensors: Sequence[Tensor]) -> None:
    if len(tensors) != group.size():
        problem = f"the {what} list has {len(tensors)} tensors, the group has {group.size()} ranks"
        raise bad_argument(group, collective, problem, "Give one tensor per rank.")


def check_pairs(group: Collectives, collective: str, a: Sequence[Any], b: Sequence[Any]) -> None:
    if len(a) != len(b):
        what = f"the lists of outputs and inputs have {len(a)} and {len(b)} entries"
        raise bad_argument(group, collective, what, "Give pairs.")


def check_same_shape(group: Collectives, collective: str, tensors: Sequence[Tensor], like: Tensor) -> None:
    for index, tensor in enumerate(tensors):
        if tensor.numel() != like.numel() or tensor.dtype != like.dtype:
            what = f"tensor {index} is {_describe(tensor)}, expected {_describe(like)}"
            raise bad_argument(group, collective, what, "All tensors of the list must match.")


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def check_single(group: Collectives, collective: str, large: Tensor, small: Tensor, names: tuple[str, str]) -> None:
    """Refuse a (large, small) pair where the large one is not world size times the small one."""
    if large.numel() != small.numel() * group.size() or large.dtype != small.dtype:
        raise bad_argument(
            group,
            collective,
            f"{names[0]} is {_describe(large)} and {names[1]} is {_describe(small)}",
            f"The {names[0]} must have {group.size()} (the group's size) times the {names[1]}'s elements, same dtype.",
        )


def concatenated(large: Tensor, small: Tensor) -> tuple[Tensor, Tensor]:
    """Return a checked (large, small) pair in Gloo's form: it refuses stacked outputs and crashes on 0-dim tensors."""
    if small.dim() and large.shape[1:] == small.shape[1:]:
        return large, small
    return large.view(-1), small.view(-1)


def check_contiguous(group: Collectives, collective: str, tensors: Sequence[Tensor]) -> None:
    """Refuse tensors that are not contiguous, where torch's other backends refuse them too."""
    check_settled(group, collective, tensors)
    for tensor in tensors:
        if not tensor.is_contiguous():
            what = f"a tensor of shape {list(tensor.shape)} and strides {list(tensor.stride())} is not contiguous"
            raise bad_argument(group, collective, what, "Call .contiguous() and, for an output, copy back.")


def check_dense(group: Collectives, collective: str, tensors: Sequence[Tensor]) -> None:
    """Refuse tensors with gaps or overlaps, because Gloo would write the memory in between.

    Another order of dimensions (a transposed gradient, channels_last) is accepted, as on NCCL. The elements have the
    same memory, if all ranks use this order.
    """
    check_settled(group, collective, tensors)
    for tensor in tensors:
        if tensor.layout is torch.strided and not tensor.is_contiguous() and not _is_dense(tensor):
            check_contiguous(group, collective, [tensor])


def check_settled(group: Collectives, collective: str, tensors: Sequence[Tensor]) -> None:
    """Refuse to write into a lazy conjugate or negation (``z.conj()``, ``z.conj().imag``): its memory differs."""
    for tensor in tensors:
        if tensor.is_neg() or tensor.is_conj():
            what = "conjugate" if tensor.is_conj() else "negation"
            remedy = f"Call .resolve_{'conj' if tensor.is_conj() else 'neg'}() first and copy back."
            raise bad_argument(group, collective, f"a tensor to write is a lazy {what} of other memory", remedy)


def settled(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors to read, with lazy conjugates and negations resolved, because calls bypass torch's dispatcher."""
    return [t if type(t) is Tensor and not t.is_neg() and not t.is_conj() else _settle(t) for t in tensors]


def _settle(tensor: Tensor) -> Tensor:
    tensor = tensor.resolve_neg().resolve_conj()
    # A copy of a subclass that represents a plain tensor (AsyncCollectiveTensor, the result of a functional collective)
    # is a plain tensor. Copies of other subclasses (FakeTensor, DTensor) keep their type.
    copied = tensor.clone() if type(tensor) not in PLAIN else tensor
    return copied if type(copied) is Tensor else tensor


def check_storage(group: Collectives, collective: str, tensors: Sequence[Tensor]) -> None:
    """Refuse plain tensors whose memory was freed or never allocated: a read would be a segmentation fault."""
    for tensor in tensors:
        if tensor.layout is torch.strided and tensor.nbytes and not tensor.data_ptr():
            what = f"a tensor of shape {list(tensor.shape)} has no memory"
            raise bad_argument(group, collective, what, "Its storage was freed (resize_(0)?): give it memory first.")


def check_memory(group: Collectives, collective: str, rows: Sequence[Sequence[Tensor]]) -> None:
    """Refuse lists of outputs with a wrapper subclass: torch's dispatcher does not search lists of lists."""
    for tensor in (t for row in rows for t in row if type(t) not in PLAIN):
        if not _c10d_internals.watched() and tensor.numel() and torch._C._data_address(tensor) == 0:  # type: ignore[attr-defined]
            what = f"an output is a {type(tensor).__name__}, which has no memory of its own"
            raise bad_argument(group, collective, what, "Give a plain tensor.")


def readable(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors to read in Gloo's form: resolved and contiguous, because Gloo ignores strides."""
    return [t.contiguous() for t in settled(tensors)]


def writable(tensor: Tensor) -> tuple[Tensor, Callable[[], object] | None]:
    """Return a tensor that Gloo can write and, if that is a copy, a function that copies the result back."""
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return tensor, None
    scratch = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return scratch, copies([(tensor, scratch)])


def copies(pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], object]:
    """Return a function that copies each source to its target. It may run on any thread."""

    def copy() -> None:
        with torch.inference_mode():  # a target may need a gradient or be an inference tensor
            for target, source in pairs:
                target.copy_(source.view(target.shape))

    return copy


def with_outputs(work: Any, outputs: Sequence[Tensor], finish: Callable[[], object] | None = None) -> Any:
    """Return a work whose future has the caller's tensors, not views or copies of them.

    ``finish`` copies results to the caller's tensors.
    """
    if finish is None and (not outputs or outputs[0].dtype in REDUCIBLE):
        return work
    return AliasedOutputWork(work, list(outputs), finish)


def in_turn(first: Callable[[], object] | None, then: Callable[[], object] | None) -> Callable[[], object] | None:
    if first is None or then is None:
        return first or then
    return lambda: (first(), then())


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def check_splits(group: Collectives, collective: str, what: str, tensor: Tensor, splits: Sequence[int]) -> None:
    """Refuse split sizes that do not cover the first dimension of ``tensor`` exactly, or an uneven default."""
    if not tensor.dim():
        raise bad_argument(group, collective, f"{what} has no dimensions", "Give a tensor with rows to share.")
    rows = tensor.size(0)
    if not splits:
        if rows % group.size():
            problem = f"{what} has {rows} rows, which {group.size()} ranks can't share evenly"
            raise bad_argument(group, collective, problem, "Give split sizes.")
    elif len(splits) != group.size() or sum(splits) != rows or min(splits) < 0:
        problem = f"{what} split sizes {list(splits)} do not cover its {rows} rows"
        raise bad_argument(group, collective, problem, f"Give {group.size()} sizes whose sum is {rows}.")


# Data that are only moved may have another dtype of the same size; strides and splits stay as they are.
_SAME_SIZE = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


def movable(group: Collectives, collective: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the same memory under a dtype that the route knows: unchanged, else a view.

    Gloo knows nine dtypes. Shared memory takes more under their own names, so that its errors and recordings name them.
    """
    known = REDUCIBLE if group._shm is None else group._shm.moves
    return [t if t.dtype in known and not t.is_conj() else _renamed(group, collective, t) for t in tensors]


def _renamed(group: Collectives, collective: str, tensor: Tensor) -> Tensor:
    if tensor.is_conj():
        raise bad_argument(group, collective, "a tensor is a lazy conjugate", "Call .resolve_conj() first.")
    same = _SAME_SIZE.get(tensor.element_size())
    return torch.view_as_real(tensor.detach()) if same is None else tensor.detach().view(same)


def exchange_lists(exchange: Callable[..., Any], outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Any:
    sent = torch.cat([t.reshape(-1) for t in inputs])
    received = sent.new_empty(sum(t.numel() for t in outputs))
    sizes = [t.numel() for t in outputs]

    def copy() -> None:
        for output, piece in zip(outputs, torch.split(received, sizes), strict=True):
            output.copy_(piece.view(output.shape))

    return AliasedOutputWork(exchange(received, sent, sizes, [t.numel() for t in inputs], opts), list(outputs), copy)
