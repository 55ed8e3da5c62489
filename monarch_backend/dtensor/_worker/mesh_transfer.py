"""Both ends of a transfer between meshes, as functions that `run` executes on their workers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from monarch_backend._rdma.sharded_state import ShardedState
from monarch_backend.dtensor._worker.control_actor import boards
from monarch_backend.process_group._xla import graph_hash_workaround


class TransferBuffers(NamedTuple):
    """A transfer: the ranks on both sides, and the control actors of each side."""

    parcel: int
    senders: list[int]
    source: Any
    readers: list[int]
    target: Any


def offer(x: DTensor, desk: TransferBuffers) -> None:
    """Offer this source rank's part to the readers, as a copy that is kept until all have read."""
    rank = dist.get_rank()  # in the default group; in this call ranks may be those of a slice
    if rank not in desk.senders:
        return
    copy = _in_memory(x) if _is_elsewhere(x) else x.clone()  # the controller continues, and may change x
    part = ShardedState.register({"x": copy})
    boards[x.device_mesh.device_type].keep(desk.parcel, len(desk.readers), part.drop)
    desk.target.deliver.broadcast(desk.parcel, rank, part)


def fill(frame: DTensor, desk: TransferBuffers) -> DTensor:
    """Read this target rank's part. The last reader lets the copies be dropped."""
    try:
        parts = boards[frame.device_mesh.device_type].take(desk.parcel, len(desk.senders))
        read = _in_memory(frame) if _is_elsewhere(frame) else frame
        ShardedState.merge(parts).read_into({"x": read}).get()
        if read is not frame:
            frame.to_local().copy_(read.to_local())
    finally:
        desk.source.let_go.broadcast(desk.parcel)
    return frame


def _is_elsewhere(x: DTensor) -> bool:
    """Return whether it is in memory that only its own process can read: XLA's."""
    return x.to_local().device.type == "xla"


def _in_memory(x: DTensor) -> DTensor:
    """Return the current values in this host's memory."""
    [local] = graph_hash_workaround.on_host([x.to_local()])
    return DTensor(local, x._spec, requires_grad=False)
