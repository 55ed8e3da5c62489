"""Handling of tensors that share memory within one call: results as from Gloo, or an error before any data are moved.

In nearly every call Gloo reads all inputs before it writes an output. It writes outputs in the order of their list, so
that the last one wins. The compiled core and the stages between hosts write while they still read.

The ``separate`` functions replace outputs that share memory by private ones. The returned ``finish`` copies the results
to the caller's tensors in Gloo's order. An all_to_all_single and the receives of a batch write while they read on Gloo
as well. Their result would depend on timing, so they raise CollectiveArgumentError.

An input may have the memory of its own result, as in an all_gather of a tensor's own slice. It is not copied.

Only the range of a tensor's memory counts. Columns of one matrix have overlapping ranges and no common element. They
are copied without need, and their values are right. The tensors given to ``refuse`` are contiguous.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from monarch_backend.process_group import _cpu_validation
from monarch_backend.process_group._errors import bad_argument

if TYPE_CHECKING:
    from monarch_backend.process_group._collectives import Collectives

Finish = Callable[[], object]


def _overlap(reads: Iterable[Tensor], writes: Iterable[Tensor]) -> bool:
    """True if a written tensor overlaps another tensor in memory, or has elements that share memory."""
    ranges = []  # (address of the first byte, address after the last one, whether it is written)
    strided = torch.strided
    for written, tensors in enumerate((reads, writes)):
        for tensor in tensors:
            if type(tensor) in _cpu_validation.PLAIN and tensor.layout is strided and (size := tensor.nbytes):
                first = tensor.data_ptr()
                if not tensor.is_contiguous():
                    if written and _is_expanded(tensor):
                        return True
                    steps = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
                    size = (steps + 1) * tensor.itemsize
                ranges.append((first, first + size, written))
    ranges.sort()
    read_end = write_end = 0
    for first, end, written in ranges:
        if first < write_end or (written and first < read_end):
            return True
        if written:
            write_end = max(write_end, end)
        else:
            read_end = max(read_end, end)
    return False


def _are_apart(a: Tensor, b: Tensor) -> bool:
    """True if two contiguous tensors share no memory; takes a third of the time of `_meet`."""
    if type(a) not in _cpu_validation.PLAIN or type(b) not in _cpu_validation.PLAIN:
        return True
    first_of_a, first_of_b = a.data_ptr(), b.data_ptr()
    return first_of_a >= first_of_b + b.nbytes or first_of_b >= first_of_a + a.nbytes


def _is_expanded(tensor: Tensor) -> bool:
    return any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _is_at(small: Tensor, large: Tensor, offset: int) -> bool:
    """True if a contiguous tensor begins ``offset`` bytes after the beginning of another one."""
    return small.data_ptr() == large.data_ptr() + offset and small.is_contiguous() and large.is_contiguous()


def refuse_expanded(group: Collectives, collective: str, writes: Iterable[Tensor]) -> None:
    """Raise CollectiveArgumentError if several elements of a tensor to write have the same memory."""
    for index, tensor in enumerate(writes):
        if _is_expanded(tensor):
            what = f"elements of output {index} share memory: shape {list(tensor.shape)}, strides {tensor.stride()}"
            raise bad_argument(group, collective, what, "Call .contiguous() and copy back.")


def separate_in_place(group: Collectives, collective: str, tensors: list[Tensor]) -> tuple[list[Tensor], Finish | None]:
    """Return tensors that are read and written: copies of all of them if two share memory."""
    if not _overlap((), tensors):
        return tensors, None
    refuse_expanded(group, collective, tensors)
    copies = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
    return copies, _cpu_validation.copies(list(zip(tensors, copies, strict=True)))


def separate(
    group: Collectives,
    collective: str,
    reads: Sequence[Tensor],
    rows: list[list[Tensor]],
    home: Callable[[int], Tensor | None],
) -> tuple[list[list[Tensor]], Finish | None]:
    """Return lists of tensors to write: private ones if they share memory with each other or with ``reads``.

    ``home(i)`` is the tensor that receives the value of ``reads[i]`` on this rank, and may be the same.
    """
    writes = [tensor for row in rows for tensor in row]
    if not _overlap(reads, writes):
        return rows, None
    refuse_expanded(group, collective, writes)
    homes = map(home, range(len(reads)))
    apart = [read for read, own in zip(reads, homes, strict=True) if own is None or not _is_at(read, own, 0)]
    if not _overlap(apart, writes):
        return rows, None
    private = [[_blank(tensor) for tensor in row] for row in rows]
    return private, _cpu_validation.copies(list(zip(writes, itertools.chain(*private), strict=True)))


def separate_slices(
    group: Collectives, reads: Sequence[Tensor], writes: Sequence[Tensor]
) -> tuple[list[Tensor], Finish | None]:
    """Return tensors to write, as `separate` does, where the larger tensor of a pair has a slice for each rank.

    The small tensor of a pair may be the slice of this rank in the large one. All are contiguous.
    """
    if _are_apart(reads[0], writes[0]) if len(reads) == 1 else not _overlap(reads, writes):
        return list(writes), None
    apart, touched = [], []
    for read, write in zip(reads, writes, strict=True):
        small, large = (read, write) if read.nbytes < write.nbytes else (write, read)
        if _is_at(small, large, group.rank() * small.nbytes):
            touched.append(large)
        else:
            apart.append(read)
            touched.append(write)
    if not _overlap(apart, touched):
        return list(writes), None
    private = [_blank(tensor) for tensor in writes]
    if writes[0].numel() > reads[0].numel():  # Gloo writes the slices of rank 0 first
        slices = [[tensor.detach().view(group.size(), -1) for tensor in side] for side in (writes, private)]
        parts = [[tensor[r] for r in range(group.size()) for tensor in side] for side in slices]
        return private, _cpu_validation.copies(list(zip(*parts, strict=True)))
    return private, _cpu_validation.copies(list(zip(writes, private, strict=True)))


def _blank(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format, requires_grad=False)


def read_in_turn(group: Collectives, collective: str, reads: list[Tensor], write: Tensor) -> list[Tensor]:
    """Return contiguous tensors to read, one for each rank: copies if ``write`` shares memory with one of them.

    Gloo copies them in the order of the ranks, and this rank's one into ``write``. So later ones may have its values.
    """
    if not _overlap(reads, [write]):
        return reads
    rank = group.rank()
    own = reads[rank]
    in_place = _is_at(write, own, 0)
    if in_place and not _overlap([*reads[:rank], *reads[rank + 1 :]], [write]):
        return reads
    if not in_place and _overlap([own], [write]):
        raise _shared(group, collective, f"input {rank} and output 0 share a part of their memory")
    copies = [tensor.detach().clone() for tensor in reads[: rank + 1]]
    write.detach().copy_(own)
    return copies + [tensor.detach().clone() for tensor in reads[rank + 1 :]]


def refuse(group: Collectives, collective: str, read: Tensor, write: Tensor) -> None:
    """Raise CollectiveArgumentError if a contiguous input and output share memory, except in a group of one rank."""
    if not _are_apart(read, write) and group.size() > 1:
        raise _shared(group, collective, "input 0 and output 0 share memory, so that the result depends on timing")


def refuse_partial(group: Collectives, collective: str, tensors: Sequence[Tensor]) -> None:
    """Raise CollectiveArgumentError if two tensors, or elements of one, share memory, unless the two are the same.

    Gloo reduces such tensors into each other, and fails in the middle of a broadcast.
    """
    if not _overlap((), tensors):
        return
    refuse_expanded(group, collective, tensors)
    for (earlier, a), (later, b) in itertools.combinations(enumerate(tensors), 2):
        if a is not b and not _is_at(a, b, 0) and _overlap([a], [b]):
            raise _shared(group, collective, f"tensors {earlier} and {later} share a part of their memory")


def _shared(group: Collectives, collective: str, what: str) -> Exception:
    return bad_argument(group, collective, what, "Give each tensor that is written memory of its own.")


def refuse_batch(group: Collectives, operations: Sequence[tuple[bool, Tensor, int, int]]) -> None:
    """Raise CollectiveArgumentError if a receive of a batch shares memory with another operation of the batch.

    An operation is (whether it is a receive, tensor, rank, tag). Receives from one rank with one tag may share memory,
    because the messages arrive in the order in which they were sent. Messages carried by NICs may not.
    """
    sent = [tensor for receives, tensor, _, _ in operations if not receives]
    if not _overlap(sent, [tensor for receives, tensor, _, _ in operations if receives]):
        return
    for (earlier, a), (later, b) in itertools.combinations(enumerate(operations), 2):
        in_order = group._rdma_p2p is None or not group._rdma_p2p.takes([a[1]], a[3])
        one_after_the_other = a[0] and b[0] and a[2:] == b[2:] and in_order
        if (a[0] or b[0]) and not one_after_the_other and _overlap([a[1]], [b[1]]):
            what = f"operations {earlier} and {later} of the batch share memory, so that the result depends on timing"
            raise bad_argument(group, "batch_isend_irecv", what, "Give each receive memory of its own.")
