"""Checks of labels, sizes, coordinates and ranks, with the texts of their errors."""

from __future__ import annotations

import keyword
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch_backend._mesh.extent import Extent


def no_dimension(label: object, extent: Extent) -> KeyError:
    if not extent.labels:
        return KeyError(f"no dimension {label!r}: there is one rank and no dimension")
    return KeyError(f"no dimension {label!r}; there are: {', '.join(extent.labels)}")


def check_label(label: object) -> None:
    """Raise TypeError or ValueError for a label that cannot name a dimension."""
    if not isinstance(label, str):
        raise TypeError(f"the label {label!r} is not a string; name the dimension, such as 'gpus'")
    if not label.isidentifier() or keyword.iskeyword(label):
        raise ValueError(f"the label {label!r} cannot be a keyword argument; name the dimension, such as 'gpus'")


def checked_int(what: str, value: object) -> int:
    """Return a value as a plain int. Raise TypeError, which calls it ``what``, for other values."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{what} is a {type(value).__name__}; give an int")
    return int(operator.index(value))  # a plain int, also for an IntEnum


def checked_size(label: str, size: object) -> int:
    """Return the size of a dimension as an int. Raise ValueError for a size below 1."""
    checked = checked_int(f"the size {label}={size!r}", size)
    if checked < 1:
        raise ValueError(f"{label}={checked}: a dimension has at least one rank; give a size of 1 or more")
    return checked


def checked_rank(rank: object, extent: Extent) -> int:
    """Return the rank as an int. Raises TypeError if it is not an int, IndexError if it is outside the extent."""
    checked = checked_int(f"the rank {rank!r}", rank)
    if not 0 <= checked < extent.nelements:
        raise IndexError(f"rank {checked} is not in {extent}, which has ranks 0 to {extent.nelements - 1}")
    return checked


def checked_index(label: str, index: object, size: int) -> int:
    """Return a coordinate, counted from the start. Raise IndexError if it is outside the dimension."""
    checked = checked_int(f"the coordinate {label}={index!r}", index)
    if not -size <= checked < size:
        raise IndexError(f"{label}={checked} is out of range: {label} has size {size}, so 0 to {size - 1}")
    return checked % size


def dot(indices: Sequence[int], strides: Sequence[int]) -> int:
    return sum(index * stride for index, stride in zip(indices, strides, strict=True))
