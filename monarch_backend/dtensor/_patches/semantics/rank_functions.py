"""Replacements of functions that torch runs once for each rank, and of collectives of process groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import _collective_utils as collective_utils
from torch.utils import _pytree as pytree

from monarch_backend.dtensor._controller import controller_process_group, per_rank_host_tensor
from monarch_backend.dtensor._controller.controller_mesh import Replacement, _mode
from monarch_backend.dtensor._controller.per_rank_host_tensor import PerRankTensor
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._dispatch import dispatch
from monarch_backend.dtensor._errors import RemoteTensorError
from monarch_backend.dtensor._per_rank import per_rank_int, per_rank_op
from monarch_backend.dtensor._torch_internals import tracing_state


def _for_each_rank(own: Any) -> Replacement:
    def _for_each_rank_run_func(func: Any, ranks: Any, args: Any, kwargs: Any, *, alias: bool = True) -> Any:
        if ranks is not _mode.ranks:
            return own(func, ranks, args, kwargs, alias=alias)
        if _are_alike([*args, *kwargs.values()]):
            return func(*args, **kwargs)
        flat = [_settled(each) for each in pytree.tree_leaves((args, kwargs))]
        if any(map(tracing_state.is_traced, flat)):
            differs = any(per_rank_int.values_of(each) is not None for each in flat)
            return per_rank_op.call(func, args, kwargs) if differs else func(*args, **kwargs)
        if any(isinstance(each, RemoteTensor) for each in flat):
            return dispatch.call(func, f"{func.__module__}:{func.__qualname__}", args, kwargs)
        if any(isinstance(each, PerRankTensor) or per_rank_int.values_of(each) is not None for each in flat):
            return per_rank_host_tensor.run(func, args, kwargs)
        return func(*args, **kwargs)

    return _for_each_rank_run_func


def _are_alike(values: Iterable[Any]) -> bool:
    """Whether these are remote tensors, or no tensors, and all ranks have the same.

    Then a function that acts for one rank acts for all, as when even shards are gathered.
    """
    for each in values:
        kind = type(each)
        if kind is RemoteTensor:
            if each._meta.classes is not None:
                return False
        elif kind is list or kind is tuple:
            if not _are_alike(each):
                return False
        elif kind is torch.SymInt or kind is dict or isinstance(each, torch.Tensor):
            return False
    return True


def _settled(value: Any) -> Any:
    return value.wait() if isinstance(value, funcol.AsyncCollectiveTensor) else value


def _local_shape(own: Any) -> Replacement:
    def _compute_local_shape_and_global_offset(
        global_shape: Any, mesh_shape: Any, my_coordinate: Any, placements: Any, skip_offset: bool = False
    ) -> Any:
        at = [my_coordinate(i) for i in range(len(mesh_shape))] if callable(my_coordinate) else my_coordinate
        if at is None or all(per_rank_int.values_of(each) is None for each in at):
            return own(global_shape, mesh_shape, my_coordinate, placements, skip_offset)

        def of_one(*mine: int) -> Any:
            with _mode.disable():
                return own(global_shape, mesh_shape, list(mine), placements, skip_offset)

        return per_rank_host_tensor.run(of_one, tuple(at), {})

    return _compute_local_shape_and_global_offset


NO_NEW_GROUP = (
    "torch.distributed.new_group in a controller needs torch 2.13. Use the groups of a device mesh, "
    "mesh.get_group(), or of a slice of the processes"
)


def _no_new_group(own: Any) -> Replacement:
    def _new_group_with_tag(*args: Any, **options: Any) -> Any:
        if controller_process_group.is_controller():
            raise RemoteTensorError(NO_NEW_GROUP)
        return own(*args, **options)

    return _new_group_with_tag


def _rank_in(own: Any) -> Replacement:
    def get_rank(group: Any = None) -> Any:
        # torch calls it for any group when it logs an error; the controller is in none.
        return group.rank() if isinstance(group, controller_process_group.ControllerGroup) else own(group)

    return get_rank


def _register_shapes() -> None:
    """Register the shape of a resharding's result, for which torch asks for this process's rank."""
    torch.library.register_fake("_dtensor::shard_dim_alltoall", _shape_of_resharding, allow_override=True)


def _shape_of_resharding(input: Any, gather_dim: int, shard_dim: int, group_name: Any) -> Any:
    group: Any = group_name
    if isinstance(group_name, str):
        group = collective_utils._resolve_process_group(group_name)  # type: ignore[arg-type]
    if not isinstance(group, controller_process_group.ControllerGroup):
        return collective_utils._shard_dim_alltoall_meta(input, gather_dim, shard_dim, group_name)
    gathered = torch.cat([torch.empty_like(input)] * group.size(), dim=gather_dim)
    return gathered.narrow(shard_dim, 0, gathered.size(shard_dim) // group.size()).contiguous()


def _wrap(own: Any) -> Replacement:
    # Workers wait for a collective when its result is used, so no wrapper has to wait here.
    return lambda tensor: tensor if type(tensor) is RemoteTensor else own(tensor)


def _broadcast_objects(own: Any) -> Replacement:
    def broadcast_object_list(object_list: Any, src: Any = None, group: Any = None, *rest: Any, **options: Any) -> Any:
        # Every rank has the controller's objects. torch would unpickle an empty buffer if src is not rank 0.
        if not isinstance(
            group or (controller_process_group.is_controller() and controller_process_group.universe()),
            controller_process_group.ControllerGroup,
        ):
            own(object_list, src, group, *rest, **options)

    return broadcast_object_list
