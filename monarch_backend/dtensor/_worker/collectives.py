"""Collectives on a worker: ``torch.distributed``'s eager ones, and one that torch's CPU groups lack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._C._distributed_c10d as options
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def shard_dim_alltoall(tensor: torch.Tensor, gather_dim: int, shard_dim: int, group_name: str) -> torch.Tensor:
    """Change shards of one dimension to shards of another."""
    group = _group_of(group_name)
    parts = [part.contiguous() for part in torch.chunk(tensor, group.size(), shard_dim)]
    received = [torch.empty_like(parts[group.rank()]) for _ in range(group.size())]
    dist.all_to_all(received, parts, group=group)
    return torch.cat(received, gather_dim)


def _group_of(name: Any) -> Any:
    return c10d._resolve_process_group(name)


def _call(name: str, settings: Any, tensors: list[Any], given: dict[str, Any]) -> None:
    group = _group_of(given["process_group"])
    for option, key in (("reduceOp", "reduce_op"), ("rootRank", "root_rank"), ("rootTensor", "root_tensor")):
        if key in given:
            value = given[key]
            setattr(settings, option, getattr(dist.ReduceOp, value) if key == "reduce_op" else value)
    getattr(group, name)(*tensors, settings).wait()


def _collective(name: str, settings: Callable[[], Any], *tensors: str) -> Callable[..., None]:
    """Return the function for the group's method ``name``. ``tensors``: names of its arguments with tensors."""

    def collective(**given: Any) -> None:
        _call(name, settings(), [given[each] for each in tensors], given)

    return collective


allreduce_ = _collective("allreduce", options.AllreduceOptions, "tensors")
broadcast_ = _collective("broadcast", options.BroadcastOptions, "tensors")
reduce_ = _collective("reduce", options.ReduceOptions, "tensors")
allgather_ = _collective("allgather", options.AllgatherOptions, "output_tensors", "input_tensors")
_allgather_base_ = _collective("_allgather_base", options.AllgatherOptions, "output_tensor", "input_tensor")
reduce_scatter_ = _collective("reduce_scatter", options.ReduceScatterOptions, "output_tensors", "input_tensors")
_reduce_scatter_base_ = _collective(
    "_reduce_scatter_base", options.ReduceScatterOptions, "output_tensor", "input_tensor"
)
alltoall_ = _collective("alltoall", options.AllToAllOptions, "output_tensors", "input_tensors")
allreduce_coalesced_ = _collective("allreduce_coalesced", options.AllreduceCoalescedOptions, "tensors")
allgather_coalesced_ = _collective("allgather_coalesced", options.AllgatherOptions, "output_lists", "input_list")
allgather_into_tensor_coalesced_ = _collective(
    "allgather_into_tensor_coalesced", options.AllgatherOptions, "outputs", "inputs"
)
reduce_scatter_tensor_coalesced_ = _collective(
    "reduce_scatter_tensor_coalesced", options.ReduceScatterOptions, "outputs", "inputs"
)


def alltoall_base_(
    output: Any, input: Any, output_split_sizes: Any = (), input_split_sizes: Any = (), **given: Any
) -> None:
    splits = [list(output_split_sizes), list(input_split_sizes)]
    _call("alltoall_base", options.AllToAllOptions(), [output, input, *splits], given)


def barrier(**given: Any) -> None:
    _group_of(given["process_group"]).barrier().wait()
