"""Both ends of a transfer between meshes, as functions that `run` executes on their workers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from monarch_backend.dtensor.worker._side import boards
from monarch_backend.rdma import ShardedState


class Desk(NamedTuple):
    """Who takes part in a transfer: ranks, and the `Side` of each."""

    parcel: int
    senders: list[int]
    source: Any
    readers: list[int]
    target: Any


def offer(x: DTensor, desk: Desk) -> None:
    """On the source: tell the readers where a copy of this rank's part is, and keep it until all have read."""
    rank = dist.get_rank()  # of all; that of this call may count those of a slice
    if rank not in desk.senders:
        return
    part = ShardedState.register({"x": x.clone()})  # the controller goes on, and may change x
    boards[x.device_mesh.device_type].keep(desk.parcel, len(desk.readers), part.drop)
    desk.target.deliver.broadcast(desk.parcel, rank, part)


def fill(frame: DTensor, desk: Desk) -> DTensor:
    """On the target: read this rank's part. What is left of the copies when the last has read is let go."""
    try:
        parts = boards[frame.device_mesh.device_type].take(desk.parcel, len(desk.senders))
        ShardedState.merge(parts).read_into({"x": frame}).get()
    finally:
        desk.source.let_go.broadcast(desk.parcel)
    return frame
