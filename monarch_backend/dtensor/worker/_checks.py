"""What a single process finds in values, and shards or torch's way to do an operation on them would not notice.

Each is one record of a function without a result: it fails where a value is wrong, and whoever reads next is told. In a
captured step its condition is in the graph (see `require` of _checks.py).
"""

from __future__ import annotations

import torch


def are_probabilities(x: torch.Tensor) -> torch.Tensor:
    """For `binary_cross_entropy`: the condition."""
    return ((x >= 0) & (x <= 1)).all()


def are_classes(x: torch.Tensor, count: int) -> torch.Tensor:
    """For `one_hot`: the condition. ``count``: -1 where the largest says it."""
    return ((x >= 0) & (x < count)).all() if count >= 0 else (x >= 0).all()


MESSAGES = {
    are_probabilities: "all elements of input should be between 0 and 1",
    are_classes: "Class values must be non-negative and smaller than num_classes",
}


def probabilities(x: torch.Tensor) -> None:
    """Raises RuntimeError where one of them is none."""
    torch._assert_async(are_probabilities(x), MESSAGES[are_probabilities])


def classes(x: torch.Tensor, count: int) -> None:
    """Raises RuntimeError where one of them is none."""
    torch._assert_async(are_classes(x, count), MESSAGES[are_classes])


def rows_here(index: torch.Tensor, first: int, count: int, whole: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows this rank has not, of a table of ``whole``; and where among its own the others are.

    What is no row of the whole table is none here either: the operator that looks it up says so, as in one process.
    torch's own takes it for another rank's, and nobody's row is 0.
    """
    elsewhere = ((index < first) & (index >= 0)) | ((index >= first + count) & (index < whole))
    return elsewhere, torch.where(elsewhere, 0, index - first)
