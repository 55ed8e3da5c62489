"""Cache of transfer plans: one for a buffer and the tensor of its last read or write.

A plan holds the address of the tensor's memory, the result of its checks, and the work requests. It serves later
transfers on NIC routes, where planning takes longer than many transfers. The cache keeps neither the tensor nor its
memory alive. engine.py runs the transfers.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from monarch_backend._actor.calls.future import Future
from monarch_backend._rdma.local_memory import CPU, LocalMemory
from monarch_backend._rdma.routes.protocol import ReadWriteOp, of_nics
from monarch_backend._rdma.transfers.engine import Engine, nothing
from monarch_backend._verbs import Allocation


def after(
    last: TransferPlanCache | None, mover: Engine, part: ReadWriteOp, local: Any, memory: LocalMemory
) -> TransferPlanCache | None:
    """Return the cache to keep after NICs have started a transfer that ``last`` did not start."""
    if last is not None and last.is_of(local):
        last.learn(mover, part, memory)
        return last
    # GPU memory needs more checks in each transfer.
    return TransferPlanCache(local) if isinstance(local, torch.Tensor) and memory.device == CPU else None


class TransferPlanCache:
    """Plan of the transfers of one tensor. The second transfer stores it, and the third one uses it."""

    __slots__ = ("_known", "_local")

    def __init__(self, local: torch.Tensor) -> None:
        self._local = weakref.ref(local)
        self._known: tuple[Any, ...] | None = None  # one object, because several threads may read into one tensor

    def is_of(self, local: Any) -> bool:
        return self._local() is local

    def learn(self, mover: Engine, part: ReadWriteOp, memory: LocalMemory) -> None:
        route = of_nics(mover.routes.to(part.handle))
        plan = None if route is None else route.planned(part, (memory,))
        if route is not None and plan is not None:
            storage = weakref.ref(memory.keep)
            self._known = mover, route, part, plan.over(()), storage, memory.address, memory.nbytes

    def start(self, mover: Engine, local: Any) -> Future[None] | None:
        """Start the transfer. Return None if a full check is necessary, which also reports errors."""
        known = self._known
        if known is None or not self.is_of(local):
            return None
        learnt_from, route, part, plan, storage_of, address, nbytes = known
        storage = storage_of()
        if storage is None or learnt_from is not mover:
            return None
        # The tensor may have other memory since then (`data`, `set_`), less (`resize_`), or be a lazy view now.
        if local.untyped_storage() is not storage or local.data_ptr() != address or local.nbytes != nbytes:
            return None
        start, size = storage.data_ptr(), storage.nbytes()
        if address + nbytes > start + size or not local.is_contiguous() or local.is_conj() or local.is_neg():
            return None
        plan = plan.over((Allocation(start, size, storage),))
        begun: Future[None] | None = mover.single(part, route, (storage,), nothing, plan)
        return begun
