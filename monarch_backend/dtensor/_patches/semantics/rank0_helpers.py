"""Replacements of functions that torch runs on one rank for the others, or on each rank for itself.

A whole state dict is the controller's, which broadcasts nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import _state_dict_utils as state_dicts
from torch.distributed.tensor import DTensor

from monarch_backend.dtensor._controller import controller_process_group
from monarch_backend.dtensor._controller.controller_mesh import Replacement
from monarch_backend.dtensor._errors import RemoteTensorError


def _broadcast(own: Any) -> Replacement:
    def _broadcast_state_dict(
        full_state_dict: dict[str, Any], local_state_dict: dict[str, Any], device: torch.device, pg: Any = None,
        strict: bool = False, cpu_offload: bool = False,
    ) -> None:  # fmt: skip
        if not controller_process_group.is_controller():
            own(full_state_dict, local_state_dict, device, pg, strict, cpu_offload)
            return
        wanted = {key: each for key, each in full_state_dict.items() if key in local_state_dict}
        before = dict(local_state_dict)
        # Values stay where they are: `distribute_tensor` sends each worker its part.
        state_dicts._distribute_state_dict(wanted, local_state_dict, torch.device("cpu"), pg)
        for key in wanted:
            local_state_dict[key] = _filled(before[key], local_state_dict[key])
        for key, value in wanted.items():
            if cpu_offload and isinstance(value, torch.Tensor):
                local_state_dict[key] = local_state_dict[key].cpu()
        for key in set(local_state_dict) - set(wanted) if strict else ():
            local_state_dict.pop(key)

    return _broadcast_state_dict


def _filled(there: Any, received: Any) -> Any:
    """Return a received value, written into the present DTensor if that has values.

    A replicated DTensor of a tensor on workers would be that tensor. An optimizer would then share its state with the
    caller's state dict.
    """
    if not isinstance(there, DTensor) or not isinstance(received, DTensor) or there.is_meta:
        return received
    with torch.no_grad():
        return there.copy_(received)


def _device_of_all(own: Any) -> Replacement:
    # Device for a state dict's values of tensors on "meta".
    def _get_pg_default_device(group: Any = None) -> torch.device:
        if not controller_process_group.is_controller():
            return own(group)  # type: ignore[no-any-return]
        types = {each.device.type for each in controller_process_group.owners()}
        return torch.device(types.pop() if len(types) == 1 else "cpu")

    return _get_pg_default_device


def _of_one_rank(own: Any) -> Replacement:
    # DistributedDataParallel calls it first.
    def _verify_param_shape_across_processes(process_group: Any, tensors: Any, logger: Any = None) -> Any:
        if controller_process_group.is_controller():
            raise RemoteTensorError(
                "DistributedDataParallel wraps the module of one rank, which averages its gradients with other "
                "programs' like it; this program is the only one. Distribute the module "
                "(torch.distributed.tensor.distribute_module(module, mesh), or fully_shard(module, mesh=mesh)) and "
                "each batch by rows (distribute_tensor(batch, mesh, [Shard(0)]), for fully_shard shard_batch): the "
                "gradients are those of all rows then. Or make it on the workers: monarch_backend.dtensor.run"
            )
        return own(process_group, tensors, logger)

    return _verify_param_shape_across_processes
