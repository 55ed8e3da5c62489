"""Both ends of a transfer between meshes, as functions that `run` executes on their workers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from monarch_backend._rdma.sharded_state import ShardedState
from monarch_backend.dtensor._worker.control_actor import inboxes
from monarch_backend.process_group._xla import graph_hash_workaround


class MeshTransfer(NamedTuple):
    """A transfer: the ranks on both sides, and the control actors of each side."""

    transfer_id: int
    senders: list[int]
    source: Any
    readers: list[int]
    target: Any


def offer(x: DTensor, transfer: MeshTransfer) -> None:
    """Offer this source rank's part to the readers, as a copy that is kept until all have read."""
    rank = dist.get_rank()  # in the default group; in this call ranks may be those of a slice
    if rank not in transfer.senders:
        return
    copy = _in_memory(x) if _is_elsewhere(x) else x.clone()  # the controller continues, and may change x
    part = ShardedState.register({"x": copy})
    inboxes[x.device_mesh.device_type].keep(transfer.transfer_id, len(transfer.readers), part.drop)
    transfer.target.tell.broadcast("deliver", transfer.transfer_id, rank, part)


def fill(frame: DTensor, transfer: MeshTransfer) -> DTensor:
    """Read this target rank's part. The last reader lets the copies be dropped."""
    try:
        parts = inboxes[frame.device_mesh.device_type].take(transfer.transfer_id, len(transfer.senders))
        read = _in_memory(frame) if _is_elsewhere(frame) else frame
        ShardedState.merge(parts).read_into({"x": read}).get()
        if read is not frame:
            frame.to_local().copy_(read.to_local())
    finally:
        transfer.source.tell.broadcast("finish_read", transfer.transfer_id)
    return frame


def _is_elsewhere(x: DTensor) -> bool:
    """Return whether it is in memory that only its own process can read: XLA's."""
    return x.to_local().device.type == "xla"


def _in_memory(x: DTensor) -> DTensor:
    [local] = graph_hash_workaround.on_host([x.to_local()])
    return DTensor(local, x._spec, requires_grad=False)
