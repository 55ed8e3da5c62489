"""torch's Gloo as a reference for every release of torch. Before torch 2.13 Gloo had no all_to_all of lists."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from monarch_backend._core.torch_version import torch_version


def exchanges_lists(group: Any) -> bool:
    """Whether the group has an all_to_all of lists."""
    return dist.get_backend(group) != "gloo" or torch_version() >= (2, 13)


def all_to_all(outputs: list[Tensor], inputs: list[Tensor], group: Any, async_op: bool = False) -> Any:
    """Call `dist.all_to_all`, or exchange slices of one tensor if Gloo has no all_to_all of lists (always
    synchronous).
    """
    if exchanges_lists(group):
        return dist.all_to_all(outputs, inputs, group=group, async_op=async_op)
    assert not async_op
    if not len(outputs) == len(inputs) == dist.get_world_size(group):
        raise ValueError("one tensor for each rank")
    sizes = [x.numel() for x in outputs]
    received = inputs[0].new_empty(sum(sizes))
    sent = torch.cat([x.reshape(-1) for x in inputs])
    dist.all_to_all_single(received, sent, sizes, [x.numel() for x in inputs], group=group)
    for output, piece in zip(outputs, received.split(sizes), strict=True):
        output.copy_(piece.view_as(output))
    return None
