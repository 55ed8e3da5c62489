"""What can go wrong with registered memory, as exceptions. Nothing is decided here."""

from __future__ import annotations

from typing import Any

from monarch_backend._actor.errors import MeshFailure, SupervisionError
from monarch_backend._core.errors import MonarchError, public


@public("monarch_backend.rdma")
class RDMAError(MonarchError, RuntimeError):
    """A transfer failed; the text says why, whose memory it was, and what to do."""


@public("monarch_backend.rdma")
class DroppedError(RDMAError):
    """The memory is not registered any more: somebody has called ``drop()``, or its owner has been started anew."""


@public("monarch_backend.rdma")
class OwnerLostError(RDMAError, SupervisionError):
    """The process that owns the memory is gone. ``failure``, ``rank``, ``host``, ``pid``: as SupervisionError's."""

    def __init__(self, text: str, failure: MeshFailure | None = None) -> None:
        SupervisionError.__init__(self, text, "RDMABuffer", failure, "unknown")

    def __reduce__(self) -> Any:
        return (OwnerLostError, (self.args[0], self.failure))
