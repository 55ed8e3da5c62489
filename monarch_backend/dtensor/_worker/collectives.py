"""Collectives on a worker: ``torch.distributed``'s eager ones, and one that torch's CPU groups lack."""

from __future__ import annotations

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


def allreduce_(tensors: Any, **given: Any) -> None:
    """``dist.all_reduce``."""
    _call("allreduce", options.AllreduceOptions(), [tensors], given)


def broadcast_(tensors: Any, **given: Any) -> None:
    """``dist.broadcast``."""
    _call("broadcast", options.BroadcastOptions(), [tensors], given)


def reduce_(tensors: Any, **given: Any) -> None:
    """``dist.reduce``."""
    _call("reduce", options.ReduceOptions(), [tensors], given)


def allgather_(output_tensors: Any, input_tensors: Any, **given: Any) -> None:
    """``dist.all_gather``."""
    _call("allgather", options.AllgatherOptions(), [output_tensors, input_tensors], given)


def _allgather_base_(output_tensor: Any, input_tensor: Any, **given: Any) -> None:
    """``dist.all_gather_into_tensor``."""
    _call("_allgather_base", options.AllgatherOptions(), [output_tensor, input_tensor], given)


def reduce_scatter_(output_tensors: Any, input_tensors: Any, **given: Any) -> None:
    """``dist.reduce_scatter``."""
    _call("reduce_scatter", options.ReduceScatterOptions(), [output_tensors, input_tensors], given)


def _reduce_scatter_base_(output_tensor: Any, input_tensor: Any, **given: Any) -> None:
    """``dist.reduce_scatter_tensor``."""
    _call("_reduce_scatter_base", options.ReduceScatterOptions(), [output_tensor, input_tensor], given)


def alltoall_(output_tensors: Any, input_tensors: Any, **given: Any) -> None:
    """``dist.all_to_all``."""
    _call("alltoall", options.AllToAllOptions(), [output_tensors, input_tensors], given)


def alltoall_base_(
    output: Any, input: Any, output_split_sizes: Any = (), input_split_sizes: Any = (), **given: Any
) -> None:
    """``dist.all_to_all_single``."""
    splits = [list(output_split_sizes), list(input_split_sizes)]
    _call("alltoall_base", options.AllToAllOptions(), [output, input, *splits], given)


def allreduce_coalesced_(tensors: Any, **given: Any) -> None:
    """``dist.all_reduce_coalesced``, and several ``dist.all_reduce`` in a coalescing manager."""
    _call("allreduce_coalesced", options.AllreduceCoalescedOptions(), [tensors], given)


def allgather_coalesced_(output_lists: Any, input_list: Any, **given: Any) -> None:
    """``dist.all_gather_coalesced``."""
    _call("allgather_coalesced", options.AllgatherOptions(), [output_lists, input_list], given)


def allgather_into_tensor_coalesced_(outputs: Any, inputs: Any, **given: Any) -> None:
    """Several ``dist.all_gather_into_tensor`` in a coalescing manager."""
    _call("allgather_into_tensor_coalesced", options.AllgatherOptions(), [outputs, inputs], given)


def reduce_scatter_tensor_coalesced_(outputs: Any, inputs: Any, **given: Any) -> None:
    """Several ``dist.reduce_scatter_tensor`` in a coalescing manager."""
    _call("reduce_scatter_tensor_coalesced", options.ReduceScatterOptions(), [outputs, inputs], given)


def barrier(**given: Any) -> None:
    """``dist.barrier``."""
    _group_of(given["process_group"]).barrier().wait()
