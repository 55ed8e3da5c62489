"""What happens in the processes of a device mesh: records become operations on real tensors."""

from monarch_backend.dtensor.worker import (
    _move as _move,
)  # now: later the executor's thread and the side's would at once
from monarch_backend.dtensor.worker._executor import Executor
from monarch_backend.dtensor.worker._side import Side

__all__ = ["Executor", "Side"]
