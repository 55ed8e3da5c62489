"""Extents, points and shapes: the ranks of a mesh, their names, and the mesh operations.

This module is arithmetic on ranks only. It has no processes and no messages. Ranks count in row-major order: the last
label varies fastest.
"""

from __future__ import annotations

import functools
import keyword
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_RANKS = (1 << 31) - 1
"""Limit of ranks of one extent: torch and the wire format count ranks in 32 bits."""

Index: TypeAlias = "int | slice[Any, Any, Any]"  # defined here, before methods hide Python's `slice`


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
            _check_label(label)
            if label in self._labels[:i]:
                raise ValueError(f"the label {label!r} is there twice in {self._labels}; each dimension needs its own")
        self._sizes = tuple(map(_checked_size, self._labels, sizes))
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
        return _dot(self._indices(coords), self._strides)

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
                raise _no_dimension(label, self)
        if len(coords) != len(self._places):
            missing = ", ".join(label for label in self._labels if label not in coords)
            raise KeyError(f"no coordinate for {missing}; give one for each of {', '.join(self._labels)}")
        return [_checked_index(label, coords[label], size) for label, (_, size) in self._places.items()]

    def __getitem__(self, label: str) -> int:
        try:
            return self._places[label][1]
        except (KeyError, TypeError):
            raise _no_dimension(label, self) from None

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
            rank = _checked_rank(rank, extent)
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
            raise _no_dimension(label, self._extent) from None
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


class Shape:
    """A selection of the ranks of a base mesh, arranged in an extent, like a view of ``numpy.arange``.

    The base rank at coordinates i, j, ... is ``offset + i * strides[0] + j * strides[1] + ...``. A selection that
    strides cannot describe stores its ranks instead, and `strides` is None. Shapes are equal if their extents and ranks
    are. Immutable, hashable, picklable.

    Raises ValueError for strides that differ in number from the dimensions, reach a rank twice, or reach one below 0.

    >>> whole = Shape.of(Extent.of({"hosts": 2, "gpus": 4}))
    >>> every_other = whole.slice(gpus=slice(None, None, 2))
    >>> every_other.ranks, every_other.strides, str(every_other.extent)
    ((0, 2, 4, 6), (4, 2), 'hosts=2, gpus=2')
    >>> whole.at(hosts=1).ranks
    (4, 5, 6, 7)
    """

    __slots__ = ("_extent", "_offset", "_ranks", "_strides")

    _extent: Extent
    _strides: tuple[int, ...] | None
    _offset: int
    _ranks: tuple[int, ...] | None  # computed at the first access if there are strides

    def __init__(self, extent: Extent, strides: Sequence[int], offset: int = 0) -> None:
        if len(strides) != len(extent.labels):
            raise ValueError(f"{len(strides)} strides {tuple(strides)} for the dimensions {extent}; give one each")
        self._extent = extent
        self._strides = tuple(_checked_int(f"the stride {stride!r}", stride) for stride in strides)
        self._offset = _checked_int(f"the offset {offset!r}", offset)
        self._ranks = None
        _check_base_ranks(self.ranks)

    @classmethod
    def of(cls, extent: Extent) -> Shape:
        """Return the shape of all ranks of the extent, in order."""
        return cls._make(extent, extent._strides, 0)

    @classmethod
    def from_ranks(cls, extent: Extent, ranks: Iterable[int]) -> Shape:
        """Return the shape of these base ranks, in row-major order of the extent. It has strides if they describe the
        ranks.

        Raises ValueError unless there is one distinct rank, 0 or more, for each point of the extent.

        >>> Shape.from_ranks(Extent.of({"gpus": 3}), [5, 3, 1]).strides
        (-2,)
        >>> Shape.from_ranks(Extent.of({"gpus": 3}), [0, 1, 5]).strides is None
        True
        """
        chosen = tuple(_checked_int(f"the rank {rank!r}", rank) for rank in ranks)
        if len(chosen) != extent.nelements:
            raise ValueError(f"{len(chosen)} ranks for the {extent.nelements} points of {extent}; give one each")
        _check_base_ranks(chosen)
        return cls._from_ranks(extent, chosen)

    @classmethod
    def _from_ranks(cls, extent: Extent, ranks: tuple[int, ...]) -> Shape:
        # If strides describe the ranks, each is the step from the first rank to its neighbor in that dimension.
        strides = tuple(ranks[stride] - ranks[0] if size > 1 else stride for stride, size in extent._places.values())
        if _strided(extent.sizes, strides, ranks[0]) == ranks:
            return cls._make(extent, strides, ranks[0], ranks)
        return cls._make(extent, None, ranks[0], ranks)

    @classmethod
    def _make(
        cls, extent: Extent, strides: tuple[int, ...] | None, offset: int, ranks: tuple[int, ...] | None = None
    ) -> Shape:
        """Make a shape without checks, from values derived from a checked shape."""
        shape = cls.__new__(cls)
        shape._extent = extent
        shape._strides = strides
        shape._offset = offset
        shape._ranks = ranks
        return shape

    @property
    def extent(self) -> Extent:
        """Labels and sizes of the selection."""
        return self._extent

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the dimensions, the outermost first."""
        return self._extent.labels

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the dimensions, in the order of `labels`."""
        return self._extent.sizes

    @property
    def strides(self) -> tuple[int, ...] | None:
        """Step in base ranks along each dimension; None if strides do not describe the ranks."""
        return self._strides

    @property
    def offset(self) -> int:
        """Base rank of the first point."""
        return self._offset

    @property
    def ranks(self) -> tuple[int, ...]:
        """Base ranks in row-major order: ``ranks[i]`` is the base rank of ``extent.point(i)``."""
        if self._ranks is None:
            assert self._strides is not None
            self._ranks = _strided(self.sizes, self._strides, self._offset)
        return self._ranks

    def rank_of(self, /, **coords: int) -> int:
        """Return the base rank at these coordinates. Raises as `Extent.rank_of` does."""
        if self._strides is None:
            return self.ranks[self._extent.rank_of(**coords)]
        return self._offset + _dot(self._extent._indices(coords), self._strides)

    def at(self, /, **coords: int) -> Shape:
        """Return the part at these coordinates, without the named dimensions. Raises as `MeshBase.slice` does."""
        return self.slice(**{label: _checked_int(f"{label}={index!r}", index) for label, index in coords.items()})

    def slice(self, /, **selection: Index) -> Shape:
        """Return the selected part. Raises as `MeshBase.slice` does."""
        for label in selection:
            if label not in self._extent:
                raise _no_dimension(label, self._extent)
        if self._strides is None:
            positions = Shape.of(self._extent).slice(**selection)
            return Shape._from_ranks(positions.extent, tuple(map(self.ranks.__getitem__, positions.ranks)))
        labels, sizes, strides, offset = [], [], [], self._offset
        for label, size, stride in zip(self.labels, self.sizes, self._strides, strict=True):
            chosen = _chosen(label, selection.get(label, _WHOLE), size)
            if isinstance(chosen, int):
                offset += chosen * stride
                continue
            labels.append(label)
            sizes.append(len(chosen))
            strides.append(chosen.step * stride)
            offset += chosen.start * stride
        return Shape._make(Extent(labels, sizes), tuple(strides), offset)

    def split(self, /, **how: Sequence[str] | int) -> Shape:
        """Return the shape with dimensions split into several. Raises as `MeshBase.split` does."""
        into, given = _read_split(self._extent, how)
        labels: list[str] = []
        sizes: list[int] = []
        for label, size in zip(self.labels, self.sizes, strict=True):
            names = into.get(label, (label,))
            labels += names
            sizes += _split_sizes(label, size, names, given) if label in into else (size,)
        return Shape._from_ranks(Extent(labels, sizes), self.ranks)

    def flatten(self, name: str) -> Shape:
        """Return the shape with one dimension of this name. Raises as `MeshBase.flatten` does."""
        return Shape._from_ranks(Extent((name,), (len(self),)), self.ranks)

    def rename(self, /, **names: str) -> Shape:
        """Return the shape with new labels, ``old="new"``. Raises as `MeshBase.rename` does."""
        for label in names:
            if label not in self._extent:
                raise _no_dimension(label, self._extent)
        extent = Extent([names.get(label, label) for label in self.labels], self.sizes)
        return Shape._make(extent, self._strides, self._offset, self._ranks)

    def without(self, ranks: Iterable[int | Point]) -> Shape:
        """Return the shape without some of its ranks, in one dimension. See `MeshBase.without`.

        Raises IndexError for a rank outside the shape, ValueError if no rank is left or for a point of another extent,
        and TypeError for a single rank.
        """
        if isinstance(ranks, (int, Point, str)):
            raise TypeError(f"without({ranks!r}): give the ranks as a list, without([{ranks!r}])")
        gone = {_position(rank, self._extent) for rank in ranks}
        left = tuple(rank for position, rank in enumerate(self.ranks) if position not in gone)
        if not left:
            raise ValueError(f"no rank of {self._extent} is left without {ranks_in_words(self._extent, gone)}")
        label = self.labels[0] if len(self.labels) == 1 else "ranks"
        return Shape._from_ranks(Extent((label,), (len(left),)), left)

    def __len__(self) -> int:
        return self._extent.nelements

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Shape):
            return NotImplemented
        return self is other or (self._extent == other._extent and self.ranks == other.ranks)

    def __hash__(self) -> int:
        return hash((self._extent, self.ranks))

    def __reduce__(self) -> tuple[Any, ...]:
        # With strides the ranks are not sent: the receiver computes them at the first access.
        return Shape._make, (self._extent, self._strides, self._offset, self.ranks if self._strides is None else None)

    def __repr__(self) -> str:
        if self._strides is None:
            shown = ", ".join(map(str, self.ranks[:8])) + (f" ... and {len(self) - 8} more" if len(self) > 8 else "")
            return f"<Shape {self._extent}: base ranks {shown}>"
        return f"<Shape {self._extent}: strides {self._strides}, offset {self._offset}>"


class MeshBase(ABC):
    """Base class of all meshes with their operations on dimensions: hosts, processes, actors, values, devices.

    A subclass has a `_shape`, and makes a similar mesh of another shape in `_new_with_shape`. The ranks of a shape are
    always those of the mesh that all slices come from.
    """

    __slots__ = ()

    _shape: Shape

    @abstractmethod
    def _new_with_shape(self, shape: Shape) -> Self:
        """Return this mesh with another selection of its base ranks."""

    def slice(self, /, **selection: Index) -> Self:
        """Return the selected part of the mesh. Dimensions that are not named stay whole.

        An int drops its dimension, a ``slice`` keeps the selected coordinates in its order. Both count as in Python,
        negative values from the end. Raises KeyError for an unknown label, IndexError for an int outside the dimension,
        ValueError for an empty selection, TypeError for another value.

        >>> from monarch_backend._mesh.value_mesh import ValueMesh
        >>> mesh = ValueMesh(Extent.of({"hosts": 2, "gpus": 4}), range(8))
        >>> list(mesh.slice(hosts=1).values()), list(mesh.slice(gpus=slice(0, 2)).values())
        ([4, 5, 6, 7], [0, 1, 4, 5])
        """
        return self._new_with_shape(self._shape.slice(**selection))

    def split(self, /, **how: Sequence[str] | int) -> Self:
        """Return the mesh with dimensions split into several, the outermost first. Ranks keep their order.

        ``dimension=("new", "labels")`` names the new dimensions, ``label=size`` gives the size of one. One size of each
        tuple may be omitted. Raises KeyError for an unknown label. Raises ValueError if the product of the sizes is not
        the dimension's size, more than one is omitted, or a label occurs twice.

        >>> from monarch_backend._mesh.value_mesh import ValueMesh
        >>> mesh = ValueMesh(Extent.of({"host": 32}), range(32))
        >>> mesh.split(host=("dp", "pp"), pp=16).sizes
        {'dp': 2, 'pp': 16}
        """
        return self._new_with_shape(self._shape.split(**how))

    def flatten(self, name: str) -> Self:
        """Return the mesh with one dimension of this name. Ranks keep their order. Raises ValueError for an invalid
        name.
        """
        return self._new_with_shape(self._shape.flatten(name))

    def rename(self, /, **names: str) -> Self:
        """Return the mesh with new labels, ``old="new"``.

        Raises KeyError for an unknown label, ValueError for a label that is in use.
        """
        return self._new_with_shape(self._shape.rename(**names))

    def without(self, ranks: Iterable[int | Point]) -> Self:
        """Return the mesh without some of its ranks, in one dimension. For the survivors of a failure.

        ``ranks`` are ranks of this mesh, from 0, or points of it. The dimension keeps its label if it was the only one,
        and is called "ranks" otherwise. Raises IndexError for a rank outside the mesh, ValueError for a point of
        another extent or if no rank is left, TypeError for a single rank.

        >>> from monarch_backend._mesh.value_mesh import ValueMesh
        >>> left = ValueMesh(Extent.of({"gpus": 4}), "abcd").without([2])
        >>> left.sizes, left.item(gpus=2)
        ({'gpus': 3}, 'd')
        """
        return self._new_with_shape(self._shape.without(ranks))

    def size(self, dim: str | Sequence[str] | None = None) -> int:
        """Return the number of ranks along one dimension, along several, or in all.

        Raises KeyError for an unknown dimension.

        >>> from monarch_backend._mesh.value_mesh import ValueMesh
        >>> mesh = ValueMesh(Extent.of({"hosts": 2, "gpus": 4}), range(8))
        >>> mesh.size("gpus"), mesh.size(("hosts", "gpus")), mesh.size()
        (4, 8, 8)
        """
        if dim is None or isinstance(dim, str):
            return self.extent.size(dim)
        return math.prod(self.extent[label] for label in dim)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each dimension by its label."""
        return dict(self.extent)

    @property
    def extent(self) -> Extent:
        """Dimensions and their sizes."""
        return self._shape.extent

    @property
    def _labels(self) -> tuple[str, ...]:
        return self._shape.labels

    def __len__(self) -> int:
        return len(self._shape)


_WORDS = 120  # characters that a set of ranks may take in a message
_MORE = len(" ... and 100000 more")

_Box: TypeAlias = tuple[tuple[int, ...], ...]  # for each dimension the coordinates; the box is their product
_Runs: TypeAlias = list[list[tuple[int, int]]]  # the same, as first and last of consecutive coordinates


def ranks_in_words(extent: Extent, ranks: Iterable[int]) -> str:
    """Return a short text for a set of ranks, for logs and errors. It has about 120 characters at most.

    Raises IndexError for a rank outside the extent.

    >>> ranks_in_words(Extent.of({"gpus": 8}), [1, 3, 4, 5])
    'gpus 1,3-5'
    >>> hosts = Extent.of({"hosts": 2, "gpus": 4})
    >>> ranks_in_words(hosts, range(8)), ranks_in_words(hosts, [0, 1, 2, 3, 6])
    ('hosts 0-1 gpus 0-3', 'hosts 0 gpus 0-3; hosts 1 gpus 2')
    >>> ranks_in_words(Extent.of({"gpus": 1000}), range(0, 1000, 2))[-28:]
    '58,60,62,64 ... and 467 more'
    """
    chosen = sorted({_checked_rank(rank, extent) for rank in ranks})
    if not chosen:
        return "no ranks"
    if not extent.labels:
        return "rank 0"
    boxes = [[_runs(coords) for coords in box] for box in _boxes(extent, chosen)]
    if sum(len(runs) for box in boxes for runs in box) <= _WORDS:  # else it is too long with any labels
        words = "; ".join(_box_in_words(extent.labels, box) for box in boxes)
        if len(words) <= _WORDS:
            return words
    return _shortened(extent.labels, boxes, len(chosen))


def _boxes(extent: Extent, ranks: list[int]) -> list[_Box]:
    if len(ranks) == len(extent):
        return [tuple(tuple(range(size)) for size in extent.sizes)]
    points = {tuple(rank // stride % size for stride, size in extent._places.values()) for rank in ranks}
    return sorted(_products(points, len(extent.labels)), key=lambda box: [coords[0] for coords in box])


def _products(points: set[tuple[int, ...]], dims: int) -> list[_Box]:
    """Return few products of coordinates that together are exactly these points."""
    if dims == 1:
        return [(tuple(sorted(index for (index,) in points)),)]
    best: dict[frozenset[tuple[int, ...]], list[int]] = {}
    best_dim = -1
    for dim in range(dims):  # greedy: the dimension along which the fewest different slices occur
        slices: dict[int, set[tuple[int, ...]]] = {}
        for point in points:
            slices.setdefault(point[dim], set()).add(point[:dim] + point[dim + 1 :])
        groups: dict[frozenset[tuple[int, ...]], list[int]] = {}
        for index, rest in slices.items():
            groups.setdefault(frozenset(rest), []).append(index)
        if best_dim < 0 or len(groups) < len(best):
            best, best_dim = groups, dim
    return [
        (*box[:best_dim], tuple(sorted(indices)), *box[best_dim:])
        for rest, indices in best.items()
        for box in _products(set(rest), dims - 1)
    ]


def _runs(coords: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for index in coords:
        if runs and runs[-1][1] == index - 1:
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return runs


def _box_in_words(labels: tuple[str, ...], box: _Runs) -> str:
    named = zip(labels, box, strict=True)
    return " ".join(
        f"{label} " + ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
        for label, runs in named
    )


def _shortened(labels: tuple[str, ...], boxes: list[_Runs], left: int) -> str:
    """Return as many boxes as fit, and the number of ranks that are not among them."""
    words = ""
    for box in boxes:
        room = _WORDS - _MORE - len(words) - len("; ")
        part = [runs[:room] if room > 0 else runs[:1] for runs in box]
        while len(text := _box_in_words(labels, part)) > room and max(map(len, part)) > 1:
            max(part, key=len).pop()
        if len(text) > room and words:
            break
        words += "; " * bool(words) + text
        left -= math.prod(sum(last - first + 1 for first, last in runs) for runs in part)
    return f"{words} ... and {left} more" if left else words


_WHOLE = slice(None)


def _no_dimension(label: object, extent: Extent) -> KeyError:
    if not extent.labels:
        return KeyError(f"no dimension {label!r}: there is one rank and no dimension")
    return KeyError(f"no dimension {label!r}; there are: {', '.join(extent.labels)}")


def _check_label(label: object) -> None:
    if not isinstance(label, str):
        raise TypeError(f"the label {label!r} is not a string; name the dimension, such as 'gpus'")
    if not label.isidentifier() or keyword.iskeyword(label):
        raise ValueError(f"the label {label!r} cannot be a keyword argument; name the dimension, such as 'gpus'")


def _checked_int(what: str, value: object) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{what} is a {type(value).__name__}; give an int")
    return int(operator.index(value))  # a plain int, also for an IntEnum


def _checked_size(label: str, size: object) -> int:
    checked = _checked_int(f"the size {label}={size!r}", size)
    if checked < 1:
        raise ValueError(f"{label}={checked}: a dimension has at least one rank; give a size of 1 or more")
    return checked


def _checked_rank(rank: object, extent: Extent) -> int:
    checked = _checked_int(f"the rank {rank!r}", rank)
    if not 0 <= checked < extent.nelements:
        raise IndexError(f"rank {checked} is not in {extent}, which has ranks 0 to {extent.nelements - 1}")
    return checked


def _checked_index(label: str, index: object, size: int) -> int:
    checked = _checked_int(f"the coordinate {label}={index!r}", index)
    if not -size <= checked < size:
        raise IndexError(f"{label}={checked} is out of range: {label} has size {size}, so 0 to {size - 1}")
    return checked % size


def _chosen(label: str, index: object, size: int) -> int | range:
    if not isinstance(index, slice):
        if not hasattr(index, "__index__"):
            raise TypeError(f"{label}={index!r}: give an int, which drops the dimension, or slice(start, stop, step)")
        return _checked_index(label, index, size)
    try:
        chosen = range(size)[index]
    except (TypeError, ValueError) as error:  # bounds that are not ints, a step of 0
        raise type(error)(f"{label}={index}: {error}") from None
    if not chosen:
        raise ValueError(f"{label}={index} selects nothing: {label} has size {size}; a mesh has at least one rank")
    return chosen


def _position(rank: int | Point, extent: Extent) -> int:
    if not isinstance(rank, Point):
        return _checked_rank(rank, extent)
    if rank.extent != extent:
        raise ValueError(f"{rank!r} is a point of {rank.extent}, the mesh is {extent}; give a rank of the mesh")
    return rank.rank


def _dot(indices: Sequence[int], strides: Sequence[int]) -> int:
    return sum(index * stride for index, stride in zip(indices, strides, strict=True))


def _strided(sizes: Sequence[int], strides: Sequence[int], offset: int) -> tuple[int, ...]:
    ranks = [offset]
    for size, stride in zip(sizes, strides, strict=True):
        steps = [stride * index for index in range(size)]
        ranks = [rank + step for rank in ranks for step in steps]
    return tuple(ranks)


def _check_base_ranks(ranks: tuple[int, ...]) -> None:
    if min(ranks) < 0:
        raise ValueError(f"the rank {min(ranks)} is below 0; ranks count from 0")
    if len(set(ranks)) != len(ranks):
        ordered = sorted(ranks)
        twice = next(rank for rank, following in pairwise(ordered) if rank == following)
        raise ValueError(f"the rank {twice} is there more than once; a mesh has each of its ranks once")


def _read_split(
    extent: Extent, how: Mapping[str, Sequence[str] | int]
) -> tuple[dict[str, tuple[str, ...]], dict[str, int]]:
    """Return the new labels of each dimension, and the sizes that are given for new ones."""
    into: dict[str, tuple[str, ...]] = {}
    given: dict[str, int] = {}
    for label, value in how.items():
        if isinstance(value, (tuple, list)):
            if label not in extent:
                raise _no_dimension(label, extent)
            into[label] = tuple(value)
        elif isinstance(value, str):
            raise TypeError(f"{label}={value!r}: give the new labels as a tuple, such as {label}=('dp', 'pp')")
        else:
            given[label] = _checked_size(label, value)
    new = [name for names in into.values() for name in names]
    for label, size in given.items():
        if label not in new:
            raise KeyError(f"{label}={size} is the size of no new dimension; these are new: {', '.join(new) or 'none'}")
    return into, given


def _split_sizes(label: str, size: int, names: tuple[str, ...], given: Mapping[str, int]) -> list[int]:
    unknown = [name for name in names if name not in given]
    known = math.prod(given[name] for name in names if name in given)
    what = f"cannot split {label}={size} into {names}"
    if not names:
        raise ValueError(f"{what}: name at least one dimension")
    if len(unknown) > 1:
        raise ValueError(f"{what}: the sizes of {', '.join(unknown)} are not given; give all but one of them")
    if unknown and size % known:
        raise ValueError(f"{what}: {size} is not a multiple of {known}, the product of the given sizes")
    if not unknown and size != known:
        raise ValueError(
            f"{what}: the given sizes multiply to {known}, not to {size}; leave one out to have it derived"
        )
    return [given.get(name, size // known) for name in names]
