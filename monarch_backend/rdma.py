"""Memory that processes read and write one-sided, at the speed of the best route between them.

>>> import torch
>>> from monarch_backend.rdma import RDMABuffer
>>> from monarch_backend.actor import Actor, endpoint, this_host
>>> class Reader(Actor):
...     @endpoint
...     def sum(self, buffer):
...         mine = torch.empty(1024)
...         buffer.read_into(mine).get()
...         return mine.sum().item()
>>> procs = this_host().spawn_procs({"gpus": 1})
>>> reader = procs.spawn("reader", Reader)
>>> weights = torch.ones(1024)
>>> buffer = RDMABuffer(weights)
>>> reader.sum.call_one(buffer).get()
1024.0
>>> buffer.drop()
>>> procs.stop().get()
"""

from monarch_backend import _wiring as _wiring
from monarch_backend._rdma.action import RDMAAction
from monarch_backend._rdma.buffer import RDMABuffer
from monarch_backend._rdma.errors import DroppedError, OwnerLostError, RDMAError
from monarch_backend._rdma.registrations import empty
from monarch_backend._rdma.routes.selection import get_rdma_backend, is_rdma_available
from monarch_backend._rdma.sharded_state import Plan, ShardedState, StatePart

__all__ = [
    "DroppedError",
    "OwnerLostError",
    "Plan",
    "RDMAAction",
    "RDMABuffer",
    "RDMAError",
    "ShardedState",
    "StatePart",
    "empty",
    "get_rdma_backend",
    "is_rdma_available",
]
