"""Masks for rows of a table that a rank does not have, which torch keeps in a placement until the rows are added up.

All tensors of such a sharding share one placement, because torch caches it by the operation's arguments. So a mask that
is left there replaces the mask of another tensor. A row that no rank has raises at its lookup.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._local_tensor import maybe_run_for_local_tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _MaskPartial

from monarch_backend.dtensor._controller import controller_mesh
from monarch_backend.dtensor._controller.controller_mesh import Replacement
from monarch_backend.dtensor._ops import sharding_rules
from monarch_backend.dtensor._worker import value_checks

MASKED = (torch.ops.aten.embedding.default, torch.ops.aten.gather.default)
"""Operators whose table may be sharded by rows."""

_rows_here: Any = maybe_run_for_local_tensor(value_checks.rows_here)


def _partition(own: Any) -> Replacement:
    def _partition_value(self: Any, tensor: Any, mesh: Any, mesh_dim: int) -> Any:
        if controller_mesh.workers_of(mesh) is None:
            return own(self, tensor, mesh, mesh_dim)
        whole = self.offset_shape[self.offset_dim]
        place = mesh._sym_get_coordinate(mesh_dim)
        count, first = Shard.local_shard_size_and_offset(whole, mesh.size(mesh_dim), place)
        mask, rows = _rows_here(tensor, first, count, whole)
        self.mask_buffer.materialize_mask(mask)
        return rows

    return _partition_value


def _local_results(own: Any) -> Replacement:
    """Remove the mask if the operator raises, because its rows are never added up. torch makes the mask before."""

    def _dispatch_get_local_results_slow_path(self: Any, op_call: Any, args: Any, op_info: Any) -> Any:
        if op_call not in MASKED:
            return own(self, op_call, args, op_info)
        placements = op_info.output_sharding.output_spec.placements
        before = [(each.mask_buffer, each.mask_buffer.refcount) for each in placements if is_masked(each)]
        try:
            return own(self, op_call, args, op_info)
        except BaseException:
            for mask, uses in before:
                while mask.refcount > uses:
                    mask.release_mask()
            raise

    return _dispatch_get_local_results_slow_path


def masked_at_once(func: Any, args: Any, kwargs: Any) -> Any:
    """Set rows that a rank does not have to 0 at once.

    torch writes these zeros when the ranks' rows are added up. Operators in between that keep sums, such as ``t()`` and
    ``sum(0)``, have other rows by then, and wrong ones become 0. If a trace ends in between, the next trace and real
    tensors would find its mask, which has no values.
    """
    dispatcher = DTensor._op_dispatcher
    if func is MASKED[0]:
        args = (_with_one_mask(args[0]), *args[1:])
    info = dispatcher.unwrap_to_op_info(func, args, kwargs)
    dispatcher.sharding_propagator.propagate(info)
    spec: Any = info.output_sharding.output_spec  # type: ignore[union-attr]
    local: Any = dispatcher._dispatch_get_local_results_slow_path(func, args, info)
    if controller_mesh.workers_of(spec.mesh) and isinstance(local, torch.Tensor):
        placements = tuple(_without_mask(each, local) for each in spec.placements)
        spec = DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta)
    return dispatcher.wrap(local, spec)


def _with_one_mask(table: Any) -> Any:
    """Return the table with one mask: rows sharded over several dimensions of a mesh would have several in one place.

    A rank without rows can't look up one.
    """
    if not isinstance(table, DTensor):
        return table
    by_rows = [at for at, each in enumerate(table.placements) if sharding_rules.shards(each, 0)]
    nobodys = bool(by_rows) and sharding_rules.has_nothing(table._spec, 0)
    if len(by_rows) < 2 and not nobodys:
        return table
    kept = None if nobodys else max(by_rows, key=table.device_mesh.size)
    placements = [
        Shard(0) if at == kept else Replicate() if at in by_rows else each for at, each in enumerate(table.placements)
    ]
    return table.redistribute(placements=placements)


def _without_mask(placement: Any, local: Any) -> Any:
    if not is_masked(placement):
        return placement
    mask: Any = placement.mask_buffer.data
    # Not by an index as in torch, which would read a mask of one number.
    local.masked_fill_(mask if mask.ndim == local.ndim else mask.unsqueeze(-1), 0)
    placement.mask_buffer.release_mask()
    return Partial(placement.reduce_op)


def is_masked(placement: Any) -> bool:
    return isinstance(placement, _MaskPartial)


def has_all_it_masks(table: DTensorSpec, index: Any, dim: int, *, is_strided: bool) -> bool:
    """Whether each rank has the whole index and some rows, from which the mask is made. ``index``: its placements."""
    masked = [is_masked(each) for each in index]
    if not any(masked):
        return True
    if is_strided:  # torch has no path from such shards to a mask
        return False
    pairs = zip(table.placements, index, masked, strict=True)
    others = [each for of_table, of_index, is_one in pairs if not is_one for each in (of_table, of_index)]
    is_whole = all(each.is_replicate() for each in others) and masked.count(True) == 1
    return is_whole and not sharding_rules.has_nothing(table, dim)
