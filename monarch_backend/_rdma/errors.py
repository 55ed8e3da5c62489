"""Exceptions of registered memory and its transfers."""

from __future__ import annotations

from typing import Any

from monarch_backend._actor.errors import MeshFailure, SupervisionError
from monarch_backend._core.errors import MonarchError, public


@public("monarch_backend.rdma")
class RDMAError(MonarchError, RuntimeError):
    """A transfer failed. The text says why, which process owns the memory, and what to do."""


@public("monarch_backend.rdma")
class DroppedError(RDMAError):
    """The memory is not registered any more: a process has called ``drop()``, or the owner was restarted."""


@public("monarch_backend.rdma")
class OwnerLostError(RDMAError, SupervisionError):
    """The process that owns the memory has ended. ``failure``, ``rank``, ``host``, ``pid``: see SupervisionError."""

    def __init__(self, text: str, failure: MeshFailure | None = None) -> None:
        SupervisionError.__init__(self, text, "RDMABuffer", failure, "unknown")

    def __reduce__(self) -> Any:
        return (OwnerLostError, (self.args[0], self.failure))
