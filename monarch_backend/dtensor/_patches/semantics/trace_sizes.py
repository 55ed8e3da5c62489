"""Sizes in a trace: those of the ranks that the trace stands for. Imports nothing of dynamo."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from monarch_backend.dtensor._controller import controller_mesh
from monarch_backend.dtensor._per_rank import rank_classes
from monarch_backend.dtensor._torch_internals import tracing_state


def for_all_ranks(own: Any) -> Any:
    """Layer over `ShardingPropagator.propagate_op_sharding_non_cached`.

    torch caches its result, also for eager code and for the other classes of ranks. So it is computed without a class.
    """

    def propagate_op_sharding_non_cached(self: Any, op_schema: Any) -> Any:
        with rank_classes.unseen():
            return own(self, op_schema)

    return propagate_op_sharding_non_cached


def seen_arguments(own: Any) -> Any:
    """Layer over `OpDispatcher.redistribute_local_args`: cached sizes become those of the ranks in this trace."""

    def redistribute_local_args(op_info: Any, *rest: Any) -> None:
        own(op_info, *rest)
        workers = controller_mesh.workers_of(op_info.compute_mesh)
        if workers is not None and any(map(tracing_state.is_traced, op_info.local_args)):
            seen = lambda each: rank_classes.seen(each, workers)  # noqa: E731
            op_info.local_args = pytree.tree_map_only(torch.SymInt, seen, op_info.local_args)

    return redistribute_local_args


def whole_sizes(own: Any) -> Any:
    """Layer over `_find_attr_matching_outer_metadata`: sizes of a sharded result are those of the trace.

    torch reads them from the shard in each call if the traced shard is as large as the whole. With one row on two
    ranks, this holds for the first rank only.
    """

    def _find_attr_matching_outer_metadata(a: Any, inner_keys: Any, *, metadata_fn: Any) -> str | None:
        is_sharded = isinstance(a, DTensor) and any(
            not (each.is_replicate() or each.is_partial()) for each in a.placements
        )
        if is_sharded and controller_mesh.workers_of(tracing_state.real(a.device_mesh)) is not None:
            return None
        found: str | None = own(a, inner_keys, metadata_fn=metadata_fn)
        return found

    return _find_attr_matching_outer_metadata
