"""Arguments and reference results of each collective in the table, for tests in one process without a group.

A rank's input is a list of tensors. A reference computes what one rank receives from the lists of all ranks. The keys
of the references are those of `_collective_specs.COLLECTIVES`. A reference returns an empty list for a rank that
receives nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from monarch_backend.process_group._collective_specs import CollectiveSpec, Form

Given = Sequence[Sequence[Tensor]]  # inputs by rank
Reference = Callable[[Given, int, int], list[Tensor]]  # arguments: the inputs of all ranks, a rank, the root

ELEMENTS = 4  # of each piece


def _total(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum(0)


def _columns(given: Given) -> list[tuple[Tensor, ...]]:
    return list(zip(*given, strict=True))


def _piece(tensor: Tensor, rank: int) -> Tensor:
    return tensor[rank * ELEMENTS : (rank + 1) * ELEMENTS]


REFERENCES: dict[str, Reference] = {
    "allreduce": lambda given, rank, root: [_total(column) for column in _columns(given)],
    "allreduce_coalesced": lambda given, rank, root: [_total(column) for column in _columns(given)],
    "reduce": lambda given, rank, root: [_total(_columns(given)[0])] if rank == root else [],
    "reduce_scatter": lambda given, rank, root: [_total([row[rank] for row in given])],
    "_reduce_scatter_base": lambda given, rank, root: [_piece(_total(_columns(given)[0]), rank)],
    "reduce_scatter_tensor_coalesced": lambda given, rank, root: [_piece(_total(c), rank) for c in _columns(given)],
    "broadcast": lambda given, rank, root: list(given[root]),
    "allgather": lambda given, rank, root: [row[0] for row in given],
    "allgather_coalesced": lambda given, rank, root: [tensor for row in given for tensor in row],
    "_allgather_base": lambda given, rank, root: [torch.cat(_columns(given)[0])],
    "allgather_into_tensor_coalesced": lambda given, rank, root: [torch.cat(column) for column in _columns(given)],
    "gather": lambda given, rank, root: [row[0] for row in given] if rank == root else [],
    "gather_single": lambda given, rank, root: [torch.cat(_columns(given)[0])] if rank == root else [],
    "scatter": lambda given, rank, root: [given[root][rank]],
    "alltoall": lambda given, rank, root: [row[rank] for row in given],
    "alltoall_base": lambda given, rank, root: [torch.cat([_piece(row[0], rank) for row in given])],
    "barrier": lambda given, rank, root: [],
    "monitored_barrier": lambda given, rank, root: [],
    "send": lambda given, rank, root: [],
    "recv": lambda given, rank, root: list(given[root]),
    "recv_anysource": lambda given, rank, root: list(given[root]),
}


def given_by(spec: CollectiveSpec, rank: int, size: int) -> list[Tensor]:
    """Return a rank's input: small integers that differ between ranks, tensors and elements."""
    large = spec.form is Form.EXCHANGE or (spec.form in (Form.PAIR, Form.PAIR_LIST) and spec.reduces)
    several = (Form.IN_PLACE_LIST, Form.PAIR_LIST, Form.TO_LISTS)
    per_rank = spec.form in (Form.FROM_LIST, Form.LISTS)
    count = 0 if spec.form is Form.NOTHING else size if per_rank else 2 if spec.form in several else 1
    length = ELEMENTS * size if large else ELEMENTS
    return [torch.arange(length).float() + 100 * rank + 1000 * index for index in range(count)]


def options(spec: CollectiveSpec, root: int = 0) -> Any:
    """Return the options of a synchronous call with this root."""
    assert spec.options is not None
    made = spec.options()
    made.asyncOp = False
    made.timeout = timedelta(seconds=30)
    if spec.has_root or hasattr(made, "rootRank"):
        made.rootRank = root
    return made


def arguments(
    spec: CollectiveSpec, mine: list[Tensor], outputs: list[Tensor], root: int, rank: int, size: int
) -> tuple[Any, ...]:
    """Return the arguments of a group's method, without the options."""
    form = spec.form
    if form is Form.NOTHING:
        return ()
    if form.is_in_place:
        return (mine,)
    if form is Form.SEND:
        return (mine, root, 0)
    if form is Form.RECEIVE:
        return (outputs, 0) if spec.key == "recv_anysource" else (outputs, root, 0)
    if form is Form.PAIR:
        return outputs[0] if outputs else torch.empty(0), mine[0]
    if form is Form.EXCHANGE:
        return outputs[0], mine[0], [], []
    if form is Form.TO_LIST:
        return [outputs] if outputs else [], mine
    if form is Form.TO_LISTS:
        return [outputs[r * len(mine) : (r + 1) * len(mine)] for r in range(size)], mine
    if form is Form.FROM_LIST:
        return outputs, [mine] if spec.reduces or rank == root else []
    return outputs, mine


def call(group: dist.ProcessGroup, method: str, spec: CollectiveSpec, args: tuple[Any, ...], root: int) -> None:
    """Call a group's method and wait for it."""
    work = getattr(group, method)(*args, *([] if spec.options is None else [options(spec, root)]))
    if work is not None:
        work.wait()
