"""Replacements of operators for which torch's DTensor gives wrong results on shards.

Losses use torch's own decompositions. Some in-place additions are done out of place. Operators whose names only look
in-place get another name.

torch computes a loss on each rank's shard and takes the mean over ranks. That is right only for equal shards. Shards of
unequal sizes, or with unequal numbers of ignored labels, get equal weight. Its gradient is divided by the number of the
shard's elements, and is that of one loss for each rank. In the decomposition torch does each part right, with the
number of elements of the whole tensor. A tensor that is whole on all ranks remains one operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from monarch_backend.dtensor._dispatch import deferred_checks, local_results
from monarch_backend.dtensor._torch_internals import tracing_state
from monarch_backend.dtensor._worker import value_checks as worker_checks

_aten = torch.ops.aten

OF_CLASSES = (_aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default)
OPERATORS = (
    _aten.mse_loss.default, _aten.mse_loss_backward.default,
    _aten.smooth_l1_loss.default, _aten.smooth_l1_loss_backward.default,
    _aten.huber_loss.default, _aten.huber_loss_backward.default,
    _aten.soft_margin_loss.default, _aten.soft_margin_loss_backward.default,
    _aten.binary_cross_entropy.default, _aten.binary_cross_entropy_backward.default,
    _aten.binary_cross_entropy_with_logits.default, _aten.log_sigmoid_backward.default,
    *OF_CLASSES,
)  # fmt: skip


def _handler(func: Any) -> Callable[..., Any]:
    in_parts = decomposition_table[func]

    def handle(func: Any, args: Any, kwargs: Any) -> Any:
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, DTensor)]
        is_whole = all(placement.is_replicate() for each in given for placement in each.placements)
        if func is _aten.binary_cross_entropy.default and not (is_whole and _looks(given[0]._local_tensor)):
            deferred_checks.require(worker_checks.probabilities, args[0])
        if not is_whole:
            if func in OF_CLASSES:
                args = (_with_all_classes(args[0]), args[1], local_results.everywhere(args[2]), *args[3:])
            return in_parts(*args, **(kwargs or {}))
        mesh, placements = given[0].device_mesh, given[0].placements
        args, kwargs = pytree.tree_map_only(DTensor, lambda each: each._local_tensor, (args, kwargs or {}))

        def whole(local: Any) -> Any:
            return local_results.of_parts(local, local_results.meta_of(local), mesh, placements)

        return pytree.tree_map_only(torch.Tensor, whole, func(*args, **kwargs))

    return handle


def _looks(local: Any) -> bool:
    """Whether the operator checks its labels. Its decomposition, Inductor's code and XLA do not."""
    return not tracing_state.is_traced(local) and local.device.type != "xla"


def _with_all_classes(scores: Any) -> Any:
    dim = min(1, scores.ndim - 1)
    return scores.redistribute(placements=[Replicate() if each.is_shard(dim) else each for each in scores.placements])


def _index_add(_func: Any, args: Any, kwargs: Any) -> Any:
    """Add out of place: torch would take the source's shards for those of a replicated tensor."""
    added = _aten.index_add.default(*args, **(kwargs or {}))
    if any(placement.is_partial() for placement in args[0].placements):  # a shard can't become a part of a sum
        added = local_results.everywhere(added)
    return args[0].copy_(added)


def _named(operator: Any) -> Callable[..., Any]:
    """Return the operator under another name: torch takes names that end with "_" for in-place, as ``x >> 1``."""
    return lambda _func, args, kwargs: operator(*args, **(kwargs or {}))


HANDLERS: dict[Any, Callable[..., Any]] = {
    **{operator: _handler(operator) for operator in OPERATORS},
    _aten.index_add_.default: _index_add,
    _aten.__lshift__.Scalar: _named(_aten.bitwise_left_shift.Tensor_Scalar),
    _aten.__lshift__.Tensor: _named(_aten.bitwise_left_shift.Tensor),
    _aten.__rshift__.Scalar: _named(_aten.bitwise_right_shift.Tensor_Scalar),
    _aten.__rshift__.Tensor: _named(_aten.bitwise_right_shift.Tensor),
}
