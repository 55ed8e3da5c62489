"""Forms that torch's private parts for shardings and meshes have in one release and not in another."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._mesh_layout import _MeshLayout
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor._ops import _pointwise_ops

pointwise: Any = _pointwise_ops  # its names differ between releases of torch


def register_list_operator(operator: Any) -> None:
    """Register an operator on lists of tensors that is calculated value by value."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    if operator in propagator.op_single_dim_strategy_funcs or operator in propagator.op_strategy_funcs:
        return
    if hasattr(pointwise, "_register_single_dim_pointwise"):
        pointwise._register_single_dim_pointwise(operator)
    else:  # before torch 2.12
        info = RuntimeSchemaInfo(needs_pytree=True)
        propagator.register_op_strategy(operator, pointwise.list_pointwise_strategy, info)


def rows_of(layout: Any, rank_map: torch.Tensor) -> list[list[list[int]]]:
    """Return, for each dimension of a mesh, its groups' ranks."""
    parts = [layout[dim] for dim in range(len(layout))]
    # Before torch 2.13 a part of a layout is a layout.
    layouts = [each if isinstance(each, _MeshLayout) else _MeshLayout([each]) for each in parts]
    return [each.remap_to_tensor(rank_map).tolist() for each in layouts]
