"""Replacements of FSDP2's functions that act for one rank.

`fully_shard` itself is unchanged. A parameter's shard differs by rank, which a process group's rank() already gives.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from monarch_backend.dtensor._controller import controller_process_group
from monarch_backend.dtensor._controller.controller_mesh import Replacement, slices_of, workers_of
from monarch_backend.dtensor._controller.device_module import Stream
from monarch_backend.dtensor._errors import RemoteTensorError
from monarch_backend.dtensor._placement import fsdp, module_placement
from monarch_backend.dtensor._placement.factories import OnWorkers

# Parameters and buffers -----------------------------------------------------------------------------------------


def _move_states(own: Any) -> Replacement:
    def _move_states_to_device(params: Any, buffers: Any, device: torch.device) -> None:
        if not controller_process_group.is_controller():
            own(params, buffers, device)

    return _move_states_to_device


def _init_group(own: Any) -> Replacement:
    def _init_param_group(
        state: Any, params: Any, modules: Any, mesh_info: Any, after_forward: Any, device: Any, placement: Any,
        *args: Any, **options: Any,
    ) -> None:  # fmt: skip
        workers = workers_of(mesh_info.mesh)
        if workers is not None:
            if after_forward not in (None, mesh_info) and slices_of(mesh_info.mesh) > 1:
                raise RemoteTensorError(
                    f"reshard_after_forward={options.get('reshard_after_forward')} with {mesh_info.mesh}: torch makes "
                    "a mesh of this one's first slice only. Give True or False, or a mesh that is no slice of another"
                )
            if after_forward not in (None, mesh_info) and any(_is_by_another_dimension(placement, p) for p in params):
                raise RemoteTensorError(
                    f"reshard_after_forward={options.get('reshard_after_forward')} with a shard_placement_fn that "
                    "shards by another dimension than 0: torch reshards by that one only. Give True or False"
                )
            state.__class__, state._monarch_workers = _ControllerState, workers
            for module in modules:
                module_placement.put_buffers(module.modules(), mesh_info.mesh)
        own(state, params, modules, mesh_info, after_forward, device, placement, *args, **options)

    return _init_param_group


def _is_by_another_dimension(placement_fn: Any, param: Any) -> bool:
    found = None if placement_fn is None else placement_fn(param)
    found = getattr(found, "placement", found)  # it may also have the mesh
    return found is not None and found.dim % param.ndim != 0


def _param(own: Any) -> Any:
    class ControllerFSDPParam(own):  # type: ignore[misc]
        def _init_sharded_param(self, param: Any, device: Any, placement_fn: Any, mesh_info: Any) -> Any:
            if workers_of(mesh_info.mesh) is None:
                return super()._init_sharded_param(param, device, placement_fn, mesh_info)
            # A host's parameter need not be moved first.
            super()._init_sharded_param(param, param.device, placement_fn, mesh_info)
            self._monarch_padded = self._sharded_local_tensor._ref
            return None

        def _init_sharding_spec_plain(self, param: Any, placement: Any) -> Any:
            found, mesh = super()._init_sharding_spec_plain(param, placement), self.mesh_info.mesh
            is_there = workers_of(mesh) is None or type(found.data) is not torch.Tensor
            return found if is_there else fsdp.whole(found, mesh)

        def reset_sharded_param(self) -> Any:
            if workers_of(self.mesh_info.mesh) is None:
                return super().reset_sharded_param()
            self.sharded_param = param = getattr(self._module_info.module, self._module_info.param_name)
            local = param._local_tensor
            if local.is_meta or local._ref is self._monarch_padded:
                return None
            dim = self.fsdp_placement.dim
            padded, length = local.new_zeros(self.padded_sharded_param_size), local.size(dim)
            with torch.no_grad():
                padded.narrow(dim, 0, length).copy_(local)
                param._local_tensor = padded.narrow(dim, 0, length)
            self._sharded_param_data, self._monarch_padded = padded.view(-1), param._local_tensor._ref
            self._sharding_spec = param._spec
            return None

        def init_all_gather_outputs(self, *args: Any) -> Any:
            if self.all_gather_outputs:
                return super().init_all_gather_outputs(*args)
            with _on_workers(self.mesh_info.mesh):
                return super().init_all_gather_outputs(*args)

    return ControllerFSDPParam


def _chunk(own: Any) -> Replacement:
    def _chunk_with_empty(tensor: Any, num_chunks: int, dim: int) -> Any:
        return (fsdp.Chunks if controller_process_group.is_controller() else own)(tensor, num_chunks, dim)

    return _chunk_with_empty


# Buffers that FSDP makes for itself -----------------------------------------------------------------------------


def _group(own: Any) -> Any:
    class ControllerFSDPParamGroup(own):  # type: ignore[misc]
        _has_forced_sum = False

        def __init__(self, params: Any, modules: Any, mesh_info: Any, *args: Any, **options: Any) -> None:
            with _on_workers(mesh_info.mesh):
                super().__init__(params, modules, mesh_info, *args, **options)

        def unshard(self, async_op: bool = False) -> Any:
            with _on_workers(self.mesh_info.mesh):
                return super().unshard(async_op)

        def post_backward(self, *unused: Any) -> Any:
            with _on_workers(self.mesh_info.mesh):
                return super().post_backward(*unused)

        @property
        def force_sum_reduction_for_comms(self) -> bool:
            # A factor would be in the collective's reduction, for which a command has no place.
            ours = self.gradient_divide_factor is not None and workers_of(self.mesh_info.mesh) is not None
            return self._has_forced_sum or ours

        @force_sum_reduction_for_comms.setter
        def force_sum_reduction_for_comms(self, is_forced: bool) -> None:
            self._has_forced_sum = is_forced

    return ControllerFSDPParamGroup


def _on_workers(mesh: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if workers_of(mesh) is None else OnWorkers(mesh)


def _padded_size(own: Any) -> Replacement:
    def _get_dim0_padded_size(tensor_size: Any, dim0_factor: int) -> Any:
        found = own(tensor_size, dim0_factor)
        return fsdp.Sizes(found) if controller_process_group.is_controller() else found

    return _get_dim0_padded_size


def _record_stream(own: Any) -> Replacement:
    def record_grad_output_stream(buffer: Any, stream: Any) -> None:
        if not isinstance(stream, Stream):  # workers keep their own
            own(buffer, stream)

    return record_grad_output_stream


# Running --------------------------------------------------------------------------------------------------------


class _ControllerState(FSDPState):
    _monarch_workers: Any

    def _root_pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._state_ctx.iter_forward_root is None:
            args, kwargs = fsdp.put_inputs((args, kwargs), self._monarch_workers)
        return super()._root_pre_forward(module, args, kwargs)
