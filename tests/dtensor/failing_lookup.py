"""Lookup that fails on workers of any device when an index is out of range.

torch checks an index on the CPU. XLA takes the last row instead, so a function of the tests checks first.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from monarch_backend.dtensor._dispatch import dispatch
from tests.dtensor import worker_functions
from tests.dtensor.conftest import DEVICE

CHECKED = "tests.dtensor.worker_functions:checked_look_up"
OPERATION = CHECKED if DEVICE == "xla" else "aten.embedding.default"
"""What errors say has failed."""


def look_up(indices: Any, table: Any) -> Any:
    """Rows of the table; both are tensors of workers, and no DTensors. Workers for which one is not there fail."""
    if DEVICE == "xla":
        return dispatch.call(worker_functions.checked_look_up, CHECKED, (indices, table), {})
    return F.embedding(indices, table)
