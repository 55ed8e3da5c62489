"""Exceptions of registered memory and its transfers."""

from __future__ import annotations

from typing import Any

from monarch_backend._actor.errors import MeshFailure, SupervisionError
from monarch_backend._core.errors import MonarchError, public


@public("monarch_backend.rdma")
class RDMAError(MonarchError, RuntimeError):
    """A transfer failed. The text says why, which process owns the memory, and what to do.

    Raised by the futures of transfers, and by `monarch_backend.rdma.empty` if its memory is exhausted.
    """


@public("monarch_backend.rdma")
class DroppedError(RDMAError):
    """The memory is not registered any more: a process has called ``drop()``, or the owner was restarted.

    Raised by the futures of transfers with it.
    """


@public("monarch_backend.rdma")
class OwnerLostError(RDMAError, SupervisionError):
    """The process that owns the memory has ended. Raised by the futures of transfers with it.

    ``failure``, ``rank``, ``host``, ``pid``: see SupervisionError.
    """

    def __init__(self, text: str, failure: MeshFailure | None = None) -> None:
        SupervisionError.__init__(self, text, "RDMABuffer", failure, "unknown")

    def __reduce__(self) -> Any:
        return (OwnerLostError, (self.args[0], self.failure))
