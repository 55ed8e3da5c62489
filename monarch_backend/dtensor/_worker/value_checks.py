"""What a single process finds in values, and shards or torch's way to do an operation on them would not notice.

Each is one record of a function without a result: it fails where a value is wrong, and whoever reads next is told. In a
captured step what it does is in the graph (see `require` of value_checks.py).
"""

from __future__ import annotations

import torch


def probabilities(x: torch.Tensor) -> None:
    """For `binary_cross_entropy`. Raises RuntimeError where one of them is none."""
    torch._assert_async(((x >= 0) & (x <= 1)).all(), "all elements of input should be between 0 and 1")


def classes(x: torch.Tensor, count: int) -> None:
    """For `one_hot`. Raises RuntimeError where one of them is none. ``count``: -1 where the largest says it."""
    are_classes = ((x >= 0) & (x < count)).all() if count >= 0 else (x >= 0).all()
    torch._assert_async(are_classes, "Class values must be non-negative and smaller than num_classes")


def rows_here(index: torch.Tensor, first: int, count: int, whole: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows this rank has not, of a table of ``whole``; and where among its own the others are.

    What is no row of the whole table is none here either: the operator that looks it up says so, as in one process.
    torch's own takes it for another rank's, and nobody's row is 0.
    """
    elsewhere = ((index < first) & (index >= 0)) | ((index >= first + count) & (index < whole))
    return elsewhere, torch.where(elsewhere, 0, index - first)
