"""Workers of a device mesh: they turn commands into operations on real tensors."""

from monarch_backend.dtensor._worker import (
    mesh_transfer as mesh_transfer,  # imported now: later two threads would import it at once
)
from monarch_backend.dtensor._worker.control_actor import ControlActor
from monarch_backend.dtensor._worker.executor import Executor

__all__ = ["ControlActor", "Executor"]
