"""Collectives on one plain tensor per rank. Ranks and a controller run the same functions.

Sizes that differ by rank are computed from ``r``, the rank in the group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from monarch_backend._core.torch_version import torch_version

Case = Callable[[Any, Any, Any, int], list[Any]]
"""Function of a tensor with 12 rows, a group, the rank ``r`` in the group, and the group's size ``n``."""


def uneven(r: Any, n: int) -> tuple[list[Any], list[Any]]:
    """Return how many rows each rank sends here, and how many go to each rank.

    Rank s receives s + 1 rows from each rank, and the last rank receives the remaining rows.
    """
    goes = [s + 1 for s in range(n - 1)]
    goes.append(12 - sum(goes))
    at = goes[-1] - n  # the last rank's rows beyond the rule for the other ranks
    mine = r + 1 + at * (r // (n - 1))
    return [mine] * n, goes


def all_to_all_single(x: Any, group: Any, r: Any, n: int) -> list[Any]:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return [out, x]


def all_to_all_single_with_splits(x: Any, group: Any, r: Any, n: int) -> list[Any]:
    out = x.new_zeros(12, *x.shape[1:])
    dist.all_to_all_single(out, x, [12 // n] * n, [12 // n] * n, group=group, async_op=True).wait()  # type: ignore[union-attr]
    return [out]


def all_to_all_single_uneven(x: Any, group: Any, r: Any, n: int) -> list[Any]:
    comes, goes = uneven(r, n)
    out = x.new_empty(sum(comes), *x.shape[1:])
    dist.all_to_all_single(out, x, comes, goes, group=group)
    return [out * 2, x]


def nothing_to_the_first(x: Any, group: Any, r: Any, n: int) -> list[Any]:
    """The first rank gets an empty result."""
    mine = (r + n - 2) // (n - 1) * (12 // (n - 1))  # 0 for the first
    out = x.new_empty(mine * n, *x.shape[1:])
    dist.all_to_all_single(out, x, [mine] * n, [0] + [12 // (n - 1)] * (n - 1), group=group)
    return [out]


def functional_all_to_all(x: Any, group: Any, r: Any, n: int) -> list[Any]:
    return [funcol.all_to_all_single(x, None, None, group) + 1]


def functional_all_to_all_uneven(x: Any, group: Any, r: Any, n: int) -> list[Any]:
    comes, goes = uneven(r, n)
    return [funcol.all_to_all_single(x * 2, comes, goes, group)]


def all_to_all_and_its_gradient(x: Any, group: Any, r: Any, n: int) -> list[Any]:
    leaf = x.float().requires_grad_()
    out = funcol.all_to_all_single_autograd(leaf, [12 // n] * n, [12 // n] * n, group)
    (out * out).sum().backward()
    return [out.detach(), leaf.grad]


def all_reduce_coalesced(x: Any, group: Any, r: Any, n: int) -> list[Any]:
    tensors = [x.clone(), x[1:] * 3, x.new_zeros(0), x.sum()]
    dist.all_reduce_coalesced(tensors, group=group)
    return tensors


def all_reduce_coalesced_max(x: Any, group: Any, r: Any, n: int) -> list[Any]:
    tensors = [x * (r + 1), x - r]
    dist.all_reduce_coalesced(tensors, dist.ReduceOp.MAX, group=group)
    return tensors


def all_gather_coalesced(x: Any, group: Any, r: Any, n: int) -> list[Any]:
    inputs = [x, x[:2] + 1]
    outputs = [[torch.empty_like(each) for each in inputs] for _ in range(n)]
    dist.all_gather_coalesced(outputs, inputs, group=group)
    return [each for row in outputs for each in row]


def coalesced_all_reduces(x: Any, group: Any, r: Any, n: int) -> list[Any]:
    tensors = [x.clone(), x[:5] * 2]
    with dist._coalescing_manager(group):
        for each in tensors:
            dist.all_reduce(each, group=group)
    return tensors


def coalesced_all_gathers(x: Any, group: Any, r: Any, n: int) -> list[Any]:
    inputs = [x + r, x[:2] * 3]
    outputs = [each.new_empty(n * each.shape[0], *each.shape[1:]) for each in inputs]
    with dist._coalescing_manager(group):
        for pair in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(*pair, group=group)
    return outputs


def coalesced_reduce_scatters(x: Any, group: Any, r: Any, n: int) -> list[Any]:
    inputs = [x + r, x.flatten()[:12] * 3]
    outputs = [each.new_empty(12 // n, *each.shape[1:]) for each in inputs]
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for pair in zip(outputs, inputs, strict=True):
            dist.reduce_scatter_tensor(*pair, group=group)
    manager.wait()
    return outputs


def functional_coalesced(x: Any, group: Any, r: Any, n: int) -> list[Any]:
    inputs = [x, x[:6].t().contiguous() * 2]
    if torch_version() >= (2, 13):
        gather, reduce_scatter = funcol.all_gather_single_coalesced, funcol.reduce_scatter_single_coalesced
    else:
        gather, reduce_scatter = funcol.all_gather_into_tensor_coalesced, funcol.reduce_scatter_tensor_coalesced
    return [
        *funcol.all_reduce_coalesced(inputs, "sum", group),
        *gather(inputs, group),
        *reduce_scatter([x, x * 3], "sum", [0, 0], group),
    ]


def in_place(x: Any, group: Any, r: Any, n: int) -> list[Any]:
    """A view of a changed tensor has the new values, and the controller does not wait for the write."""
    name = group.group_name
    first, second, third = x.clone(), x * 2, x + r
    rows = first[1:3]
    out = x.new_empty(n * x.shape[0], *x.shape[1:])
    torch.ops._c10d_functional.all_reduce_coalesced_([first, second], "sum", name)
    torch.ops._c10d_functional.all_reduce_(third, "max", name)
    torch.ops._c10d_functional.all_gather_into_tensor_out(x, n, name, out=out)
    written = [funcol.wait_tensor(each) for each in (first, second, third, out)]
    return [rows * 1, *written]


CASES: dict[str, Case] = {
    each.__name__: each
    for each in (
        all_to_all_single, all_to_all_single_with_splits, all_to_all_single_uneven, nothing_to_the_first,
        functional_all_to_all, functional_all_to_all_uneven, all_to_all_and_its_gradient, all_reduce_coalesced,
        all_reduce_coalesced_max, all_gather_coalesced, coalesced_all_reduces, coalesced_all_gathers,
        coalesced_reduce_scatters, functional_coalesced, in_place,
    )
}  # fmt: skip


def by_rank(name: str, x: Any, mesh: Any) -> list[Any]:
    """Return this rank's results of a case."""
    results = CASES[name](x, mesh.get_group(), mesh.get_local_rank(), mesh.size())
    return [each.tolist() for each in results]


def values(*tensors: Any) -> list[Any]:
    """Return this rank's values of the tensors."""
    return [each.tolist() for each in tensors]


def all_reduced_in_part(x: Any, ranks: list[int]) -> list[Any]:
    """All-reduce in a group of some ranks, and return this rank's result."""
    group = dist.new_group(ranks)
    out = x.clone()
    if dist.get_rank() in ranks:
        dist.all_reduce_coalesced([out], group=group)
    return [out.tolist()]
