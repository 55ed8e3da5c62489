"""Embedding lookup that fails on workers of any device when an index is out of range.

torch checks the index on the CPU. XLA uses the last row instead, so on XLA a test function checks the index first.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from monarch_backend.dtensor._dispatch import dispatch
from tests.dtensor import worker_functions
from tests.dtensor.conftest import DEVICE

CHECKED = "tests.dtensor.worker_functions:checked_look_up"
OPERATION = CHECKED if DEVICE == "xla" else "aten.embedding.default"
"""Name of the operation that the error of a failed lookup contains."""


def look_up(indices: Any, table: Any) -> Any:
    """Look up rows of the table. Both arguments are remote tensors, not DTensors.

    The lookup fails on each worker whose index is out of range.
    """
    if DEVICE == "xla":
        return dispatch.call(worker_functions.checked_look_up, CHECKED, (indices, table), {})
    return F.embedding(indices, table)
