"""Extents and points: the ranks of a mesh and their names.

This module is arithmetic on ranks only. It has no processes and no messages. Ranks count in row-major order: the last
label varies fastest.
"""

from __future__ import annotations

import functools
import keyword
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

MAX_RANKS = (1 << 31) - 1
"""Limit of ranks of one extent: torch and the wire format count ranks in 32 bits."""


class Extent:
    """Named dimensions and their sizes, as in ``hosts=2, gpus=4``. Immutable, hashable, picklable.

    Iteration gives the points in order of rank, and ``len()`` counts them. ``extent["gpus"]`` is a size; ``"gpus" in
    extent`` and ``dict(extent)`` treat it as a mapping. An extent without dimensions has one rank.

    Raises ValueError if labels and sizes differ in number, or if a label occurs twice or is not an identifier. Raises
    ValueError for a size below 1, and for more than 2**31 - 1 ranks. Raises TypeError for a label that is not a string
    and a size that is not an int.

    >>> extent = Extent(("hosts", "gpus"), (2, 4))
    >>> extent["gpus"], len(extent), extent.rank_of(hosts=1, gpus=2)
    (4, 8, 6)
    >>> str(extent.point(6)), extent.point(6)["gpus"]
    ('hosts 1 gpus 2', 2)
    >>> extent == Extent.of({"hosts": 2, "gpus": 4})
    True
    """

    __slots__ = ("_labels", "_nelements", "_places", "_sizes")

    def __init__(self, labels: Sequence[str], sizes: Sequence[int]) -> None:
        if isinstance(labels, str):
            raise TypeError(f"labels={labels!r} is one string; write labels=({labels!r},)")
        self._labels = tuple(labels)
        sizes = tuple(sizes)
        if len(self._labels) != len(sizes):
            raise ValueError(f"{len(self._labels)} labels {self._labels} and {len(sizes)} sizes {sizes}; give one each")
        for i, label in enumerate(self._labels):
            check_label(label)
            if label in self._labels[:i]:
                raise ValueError(f"the label {label!r} is there twice in {self._labels}; each dimension needs its own")
        self._sizes = tuple(map(checked_size, self._labels, sizes))
        stride = self._nelements = math.prod(self._sizes)
        if stride > MAX_RANKS:
            raise ValueError(f"{self} has {stride} ranks; an extent has at most {MAX_RANKS}: give smaller sizes")
        self._places: dict[str, tuple[int, int]] = {}  # label -> (stride, size)
        for label, size in zip(self._labels, self._sizes, strict=True):
            stride //= size
            self._places[label] = (stride, size)

    @classmethod
    def of(cls, sizes: Mapping[str, int] | Extent) -> Extent:
        """Return the extent with these sizes by label, the outermost first.

        Raises TypeError for a value that is not a mapping, and otherwise as `Extent` does.

        >>> Extent.of({"gpus": 8}).nelements
        8
        """
        if isinstance(sizes, Extent):
            return sizes
        if not isinstance(sizes, Mapping):
            raise TypeError(f"{sizes!r} gives no dimension a name; write a mapping such as {{'gpus': 8}}")
        return cls(tuple(sizes.keys()), tuple(sizes.values()))

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the dimensions, the outermost first."""
        return self._labels

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the dimensions, in the order of `labels`."""
        return self._sizes

    @property
    def nelements(self) -> int:
        """Number of ranks: the product of the sizes."""
        return self._nelements

    def size(self, label: str | None = None) -> int:
        """Return the size of one dimension, or of all together if ``label`` is None. Raises KeyError for an unknown
        label.
        """
        return self._nelements if label is None else self[label]

    def point(self, rank: int) -> Point:
        """Return the point of this rank. Raises IndexError unless ``0 <= rank < nelements``."""
        return Point(rank, self)

    def rank_of(self, /, **coords: int) -> int:
        """Return the rank at these coordinates, one for each label. A negative one counts from the end.

        Raises KeyError for a missing or unknown label, IndexError for a coordinate outside its dimension.
        """
        return sum(index * stride for index, stride in zip(self._indices(coords), self._strides, strict=True))

    def keys(self) -> tuple[str, ...]:
        """Return the labels. With this method ``dict(extent)`` works."""
        return self._labels

    @property
    def _strides(self) -> tuple[int, ...]:
        return tuple(stride for stride, _ in self._places.values())

    def _indices(self, coords: Mapping[str, int]) -> list[int]:
        """Return the coordinates in the order of the labels, each checked and counted from the start."""
        for label in coords:
            if label not in self._places:
                raise no_dimension(label, self)
        if len(coords) != len(self._places):
            missing = ", ".join(label for label in self._labels if label not in coords)
            raise KeyError(f"no coordinate for {missing}; give one for each of {', '.join(self._labels)}")
        return [checked_index(label, coords[label], size) for label, (_, size) in self._places.items()]

    def __getitem__(self, label: str) -> int:
        try:
            return self._places[label][1]
        except (KeyError, TypeError):
            raise no_dimension(label, self) from None

    def __contains__(self, item: object) -> bool:
        return item.extent == self if isinstance(item, Point) else item in self._labels

    def __iter__(self) -> Iterator[Point]:
        return map(Point, range(self._nelements), repeat(self))

    def __len__(self) -> int:
        return self._nelements

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Extent):
            return NotImplemented
        return self is other or (self._labels == other._labels and self._sizes == other._sizes)

    def __hash__(self) -> int:
        return hash((self._labels, self._sizes))

    def __reduce__(self) -> tuple[Any, ...]:
        return _same_extent, (self._labels, self._sizes)

    def __repr__(self) -> str:
        return f"Extent.of({dict(self)})"

    def __str__(self) -> str:
        return ", ".join(f"{label}={size}" for label, size in zip(self._labels, self._sizes, strict=True)) or "one rank"


@functools.lru_cache(maxsize=1024)
def _same_extent(labels: tuple[str, ...], sizes: tuple[int, ...]) -> Extent:
    """Return the extent for unpickling. Messages of one mesh repeat one extent, which is checked and kept once."""
    return Extent(labels, sizes)


class Point(Mapping[str, int]):
    """One rank of an extent, as an immutable mapping from label to coordinate. Hashable, picklable.

    It holds the rank and the extent only, because one is made for every message; coordinates are computed on access.
    Points are equal if rank and extent are. Comparison with another mapping compares coordinates.

    Raises IndexError for a rank outside the extent, TypeError for a rank that is not an int, and KeyError for an
    unknown label.

    >>> point = Extent.of({"hosts": 2, "gpus": 4}).point(5)
    >>> point["hosts"], point["gpus"], point.rank, point.size("gpus")
    (1, 1, 5, 4)
    >>> dict(point), str(point)
    ({'hosts': 1, 'gpus': 1}, 'hosts 1 gpus 1')
    """

    __slots__ = ("_extent", "_rank")

    def __init__(self, rank: int, extent: Extent) -> None:
        if rank.__class__ is not int or not 0 <= rank < extent._nelements:
            rank = checked_rank(rank, extent)
        self._rank = rank
        self._extent = extent

    @property
    def rank(self) -> int:
        """Rank from 0, in row-major order of the extent."""
        return self._rank

    @property
    def extent(self) -> Extent:
        """Extent in which `rank` counts."""
        return self._extent

    def size(self, label: str | None = None) -> int:
        """Return the size of one dimension of the extent, or of all together if ``label`` is None."""
        return self._extent.size(label)

    def __getitem__(self, label: str) -> int:
        try:
            stride, size = self._extent._places[label]
        except (KeyError, TypeError):
            raise no_dimension(label, self._extent) from None
        return self._rank // stride % size

    def __iter__(self) -> Iterator[str]:
        return iter(self._extent._labels)

    def __len__(self) -> int:
        return len(self._extent._labels)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Point):
            return self._rank == other._rank and self._extent == other._extent
        return super().__eq__(other)

    def __hash__(self) -> int:
        return hash((self._rank, self._extent))

    def __reduce__(self) -> tuple[Any, ...]:
        return Point, (self._rank, self._extent)

    def __repr__(self) -> str:
        return f"<rank {self._rank} of {self._extent._nelements}: {self}>" if len(self) else "<rank 0 of 1>"

    def __str__(self) -> str:
        return " ".join(f"{label} {index}" for label, index in self.items()) or "rank 0"


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
