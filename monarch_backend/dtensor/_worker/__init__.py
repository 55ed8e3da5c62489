"""Workers of a device mesh: they turn records into operations on real tensors."""

from monarch_backend.dtensor._worker import (
    mesh_transfer as mesh_transfer,  # now: later the executor's thread and the side's would at once
)
from monarch_backend.dtensor._worker.control_actor import ControlActor
from monarch_backend.dtensor._worker.executor import Executor

__all__ = ["ControlActor", "Executor"]
