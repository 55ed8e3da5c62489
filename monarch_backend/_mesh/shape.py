"""Shapes: selections of the ranks of a mesh, by strides or one by one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

from monarch_backend._mesh.extent import (
    Extent,
    Point,
    checked_index,
    checked_int,
    checked_rank,
    checked_size,
    no_dimension,
)
from monarch_backend._mesh.rank_text import ranks_in_words

Index: TypeAlias = "int | slice[Any, Any, Any]"  # defined here, before methods hide Python's `slice`

_WHOLE = slice(None)


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
        self._strides = tuple(checked_int(f"the stride {stride!r}", stride) for stride in strides)
        self._offset = checked_int(f"the offset {offset!r}", offset)
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
        chosen = tuple(checked_int(f"the rank {rank!r}", rank) for rank in ranks)
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
        steps = zip(self._extent._indices(coords), self._strides, strict=True)
        return self._offset + sum(index * stride for index, stride in steps)

    def at(self, /, **coords: int) -> Shape:
        """Return the part at these coordinates, without the named dimensions. Raises as `MeshBase.slice` does."""
        return self.slice(**{label: checked_int(f"{label}={index!r}", index) for label, index in coords.items()})

    def slice(self, /, **selection: Index) -> Shape:
        """Return the selected part. Raises as `MeshBase.slice` does."""
        for label in selection:
            if label not in self._extent:
                raise no_dimension(label, self._extent)
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
                raise no_dimension(label, self._extent)
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


def _chosen(label: str, index: object, size: int) -> int | range:
    if not isinstance(index, slice):
        if not hasattr(index, "__index__"):
            raise TypeError(f"{label}={index!r}: give an int, which drops the dimension, or slice(start, stop, step)")
        return checked_index(label, index, size)
    try:
        chosen = range(size)[index]
    except (TypeError, ValueError) as error:  # bounds that are not ints, a step of 0
        raise type(error)(f"{label}={index}: {error}") from None
    if not chosen:
        raise ValueError(f"{label}={index} selects nothing: {label} has size {size}; a mesh has at least one rank")
    return chosen


def _position(rank: int | Point, extent: Extent) -> int:
    if not isinstance(rank, Point):
        return checked_rank(rank, extent)
    if rank.extent != extent:
        raise ValueError(f"{rank!r} is a point of {rank.extent}, the mesh is {extent}; give a rank of the mesh")
    return rank.rank


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
                raise no_dimension(label, extent)
            into[label] = tuple(value)
        elif isinstance(value, str):
            raise TypeError(f"{label}={value!r}: give the new labels as a tuple, such as {label}=('dp', 'pp')")
        else:
            given[label] = checked_size(label, value)
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
