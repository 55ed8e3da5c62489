"""A buffer and the tensor that it was read into, or written from, the last time: the next time may be the same again.

What such a transfer has to find out (where the tensor's memory lies, whether it does, the work requests) serves those
that follow, on routes of NICs, where it takes longer than many of them do. Nothing here keeps the tensor or its memory
alive, and nothing here is a transfer: those are transfer_engine.py's.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from monarch_backend._actor.future import Future
from monarch_backend._rdma.local_memory import CPU, LocalMemory
from monarch_backend._rdma.routes.base import ReadWriteOp, of_nics
from monarch_backend._rdma.transfer_engine import Engine, nothing


def after(
    last: TransferPlanCache | None, mover: Engine, part: ReadWriteOp, local: Any, memory: LocalMemory
) -> TransferPlanCache | None:
    """What to keep when NICs have begun a part that ``last`` did not begin."""
    if last is not None and last.is_of(local):
        last.learn(mover, part, memory)
        return last
    # Memory of a GPU has more to be asked each time.
    return TransferPlanCache(local) if isinstance(local, torch.Tensor) and memory.device == CPU else None


class TransferPlanCache:
    """Of one tensor. When its transfer comes for the second time it learns how that is done, and begins the third."""

    __slots__ = ("_known", "_local")

    def __init__(self, local: torch.Tensor) -> None:
        self._local = weakref.ref(local)
        self._known: tuple[Any, ...] | None = None  # one object: several threads may read into one tensor

    def is_of(self, local: Any) -> bool:
        """This is the tensor."""
        return self._local() is local

    def learn(self, mover: Engine, part: ReadWriteOp, memory: LocalMemory) -> None:
        """How it is done; nothing, if it is not done like this."""
        route = of_nics(mover.routes.to(part.handle))
        plan = None if route is None else route.planned(part, (memory,))
        if route is not None and plan is not None:
            storage = weakref.ref(memory.keep)
            self._known = mover, route, part, route.rebind_request(plan, ()), storage, memory.address, memory.nbytes

    def start(self, mover: Engine, local: Any) -> Future[None] | None:
        """Begin it. None: others have to, who also know what is wrong with it."""
        known = self._known
        if known is None or not self.is_of(local):
            return None
        learnt_from, route, part, plan, storage_of, address, nbytes = known
        storage = storage_of()
        if storage is None or learnt_from is not mover:
            return None
        # It may have other memory since then (`data`, `set_`), less (`resize_`), or become what has to be resolved.
        if local.untyped_storage() is not storage or local.data_ptr() != address or local.nbytes != nbytes:
            return None
        start, size = storage.data_ptr(), storage.nbytes()
        if address + nbytes > start + size or not local.is_contiguous() or local.is_conj() or local.is_neg():
            return None
        plan = route.rebind_request(plan, (start, size, storage))
        begun: Future[None] | None = mover.single(part, route, (storage,), nothing, plan)
        return begun
