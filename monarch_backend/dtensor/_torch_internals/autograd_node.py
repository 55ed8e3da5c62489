"""Which operation of a forward a backward is at, in this thread, by torch's own numbers for its nodes."""

from __future__ import annotations

import torch


def forward_operation() -> int:
    """The number of the node that was made last. An operation's own is made before it is done."""
    return torch._C._autograd._get_sequence_nr() - 1


def backward_of() -> int | None:
    """The number of the node whose backward this is; None outside of any."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()
