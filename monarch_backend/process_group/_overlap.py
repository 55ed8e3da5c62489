"""Tensors of one call that share memory: results as from Gloo, or an error before any data are moved.

Gloo reads all inputs of nearly every call before it writes an output, and writes the outputs in the order of their
list, so that the last one wins. The compiled core and the stages between hosts write while they still read. The
``separate`` functions replace outputs that share memory by private ones; the returned ``finish`` copies the results to
the caller's tensors in Gloo's order. An all_to_all_single and the receives of a batch write while they read on Gloo as
well, and the result depends on timing: CollectiveArgumentError.

An input may lie in the place of its result, as in an all_gather of a tensor's own slice: it costs no copy.

Only the range of a tensor's memory counts. Columns of one matrix have overlapping ranges and no common element: they
are copied without need, and their values are right. The tensors given to ``refuse`` are contiguous.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from monarch_backend.process_group import _cpu
from monarch_backend.process_group._errors import bad_argument

if TYPE_CHECKING:
    from monarch_backend.process_group._collectives import Collectives

Finish = Callable[[], object]
_Range = tuple[int, int]  # the addresses of the first byte and of the byte after the last one; (0, 0) without memory


def _range(tensor: Tensor) -> _Range:
    if type(tensor) not in _cpu.PLAIN or not tensor.numel() or tensor.layout is not torch.strided:
        return 0, 0
    first = tensor.data_ptr()
    if tensor.is_contiguous():
        return first, first + tensor.nbytes
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (steps + 1) * tensor.itemsize


def _meet(reads: Iterable[_Range], writes: Iterable[_Range]) -> bool:
    """Return whether a range that is written overlaps any other one."""
    read_end = write_end = 0
    ranges = [(*r, False) for r in reads]
    ranges += [(*r, True) for r in writes]
    ranges.sort()
    for first, end, written in ranges:
        if first < write_end or (written and first < read_end):
            return True
        if written:
            write_end = max(write_end, end)
        else:
            read_end = max(read_end, end)
    return False


def _in_place(read: Tensor, write: Tensor) -> bool:
    return read.data_ptr() == write.data_ptr() and read.is_contiguous() and write.is_contiguous()


def separate_in_place(tensors: list[Tensor]) -> tuple[list[Tensor], Finish | None]:
    """Tensors that are read and written: copies of all of them if two share memory."""
    if len(tensors) < 2 or not _meet((), map(_range, tensors)):
        return tensors, None
    copies = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
    return copies, functools.partial(_write_back, tensors, copies)


def separate(
    reads: Sequence[Tensor], rows: list[list[Tensor]], homes: Sequence[Tensor | None]
) -> tuple[list[list[Tensor]], Finish | None]:
    """Lists of tensors that are written, private ones if they share memory with each other or with ``reads``.

    ``homes`` has, for each tensor that is read, the one that receives its value on this rank, where both may be the
    same.
    """
    apart = [r for r, home in zip(reads, homes, strict=True) if home is None or not _in_place(r, home)]
    writes = [tensor for row in rows for tensor in row]
    if not _meet(map(_range, apart), map(_range, writes)):
        return rows, None
    private = [[_blank(tensor) for tensor in row] for row in rows]
    return private, functools.partial(_write_back, writes, [tensor for row in private for tensor in row])


def separate_slices(
    reads: Sequence[Tensor], writes: Sequence[Tensor], rank: int, size: int
) -> tuple[list[Tensor], Finish | None]:
    """Tensors that are written, where the large one of each pair has a slice for each rank; private ones as above.

    The small tensor of a pair may be the slice of this rank in the large one.
    """
    apart, touched = [], []
    for pair in zip(map(_range, reads), map(_range, writes), strict=True):
        small, large = sorted(pair, key=lambda r: r[1] - r[0])
        if small[0] == large[0] + rank * (small[1] - small[0]):
            touched.append(large)
        else:
            apart.append(pair[0])
            touched.append(pair[1])
    if not _meet(apart, touched):
        return list(writes), None
    private = [_blank(tensor) for tensor in writes]
    if writes[0].numel() > reads[0].numel():  # Gloo writes the slices of rank 0 first
        slices = [[tensor.detach().view(size, -1) for tensor in side] for side in (writes, private)]
        parts = [[tensor[r] for r in range(size) for tensor in side] for side in slices]
        return private, functools.partial(_write_back, *parts)
    return private, functools.partial(_write_back, writes, private)


def _blank(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format, requires_grad=False)


def _write_back(tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    for tensor, copy in zip(tensors, copies, strict=True):
        tensor.detach().copy_(copy)


def read_in_turn(group: Collectives, collective: str, reads: list[Tensor], write: Tensor) -> list[Tensor]:
    """Contiguous tensors that are read, one for each rank: copies if ``write`` shares memory with one of them.

    Gloo copies them in the order of the ranks, and that of this rank into ``write``. So later ones may have its values.
    """
    rank = group.rank()
    own, output = _range(reads[rank]), _range(write)
    in_place = own == output
    if not _meet([_range(read) for at, read in enumerate(reads) if at != rank or not in_place], [output]):
        return reads
    if not in_place and _meet([own], [output]):
        raise _shared(group, collective, f"input {rank} and output 0 share a part of their memory")
    copies = [tensor.detach().clone() for tensor in reads[: rank + 1]]
    write.detach().copy_(reads[rank])
    return copies + [tensor.detach().clone() for tensor in reads[rank + 1 :]]


def refuse(group: Collectives, collective: str, read: Tensor, write: Tensor) -> None:
    """Raise CollectiveArgumentError if the input and the output share memory, except in a group of one rank."""
    if group.size() > 1 and _meet([_range(read)], [_range(write)]):
        raise _shared(group, collective, "input 0 and output 0 share memory, so that the result depends on timing")


def _shared(group: Collectives, collective: str, what: str) -> Exception:
    return bad_argument(group, collective, what, "Give the output memory of its own.")


def refuse_batch(group: Collectives, operations: Sequence[tuple[bool, Tensor, int, int]]) -> None:
    """Raise CollectiveArgumentError if a receive of a batch shares memory with another operation of it.

    An operation is (is it a receive, tensor, rank, tag). Receives from one rank with one tag may share memory, because
    the messages arrive in the order in which they were sent.
    """
    ranges = [_range(tensor) for _, tensor, _, _ in operations]
    received = [r for r, operation in zip(ranges, operations, strict=True) if operation[0]]
    if not _meet([r for r, operation in zip(ranges, operations, strict=True) if not operation[0]], received):
        return
    for later, (first, end) in enumerate(ranges):
        for earlier, (other_first, other_end) in enumerate(ranges[:later]):
            a, b = operations[earlier], operations[later]
            one_after_the_other = a[0] and b[0] and a[2:] == b[2:]
            if first < other_end and other_first < end and (a[0] or b[0]) and not one_after_the_other:
                what = (
                    f"operations {earlier} and {later} of the batch share memory, so that the result depends on timing"
                )
                raise bad_argument(group, "batch_isend_irecv", what, "Give each receive memory of its own.")
