"""The forward operation that this thread's backward is at, by torch's numbers of autograd nodes."""

from __future__ import annotations

import torch


def forward_operation() -> int:
    """Return the number of the node that was made last. An operation's own node is made before it runs."""
    return torch._C._autograd._get_sequence_nr() - 1


def backward_of() -> int | None:
    """Return the number of the node whose backward runs; None outside of any."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()
