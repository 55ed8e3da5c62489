"""Memory layout of arrays and tensors. It uses neither NumPy nor torch."""

from __future__ import annotations

from collections.abc import Sequence


def is_dense(shape: Sequence[int], strides: Sequence[int], step: int) -> bool:
    """Return whether elements ``step`` apart fill a stretch of memory, each place once, in any order of axes.

    >>> is_dense((2, 3), (3, 1), 1), is_dense((2, 3), (8, 16), 8)
    (True, True)
    >>> is_dense((2, 3), (4, 1), 1), is_dense((9, 3), (0, 1), 1)
    (False, False)
    """
    for stride, length in sorted(
        (stride, length) for stride, length in zip(strides, shape, strict=True) if length != 1
    ):
        if stride != step:
            return False
        step *= length
    return True
