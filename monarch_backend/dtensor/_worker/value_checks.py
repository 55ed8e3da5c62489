"""Checks of values that a single process would refuse, but that shards or torch's decompositions would accept.

Each is one command with a function without a result. It fails for a wrong value, and the next read reports that. In a
captured step it is part of the graph (see `require` of deferred_checks.py).
"""

from __future__ import annotations

import torch


def probabilities(x: torch.Tensor) -> None:
    """Check for `binary_cross_entropy`. Raises RuntimeError for a value outside of 0 to 1."""
    torch._assert_async(((x >= 0) & (x <= 1)).all(), "all elements of input should be between 0 and 1")


def classes(x: torch.Tensor, count: int) -> None:
    """Check for `one_hot`. Raises RuntimeError for an invalid class. ``count``: -1 if the largest value defines it."""
    are_classes = ((x >= 0) & (x < count)).all() if count >= 0 else (x >= 0).all()
    torch._assert_async(are_classes, "Class values must be non-negative and smaller than num_classes")


def rows_here(index: torch.Tensor, first: int, count: int, whole: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mask of rows of a table of ``whole`` that other ranks have, and the local indices, 0 for these rows.

    A row outside of the whole table is not masked: the operator that looks it up raises, as in one process. torch's own
    function would mask it as another rank's, and return 0.
    """
    elsewhere = ((index < first) & (index >= 0)) | ((index >= first + count) & (index < whole))
    return elsewhere, torch.where(elsewhere, 0, index - first)
