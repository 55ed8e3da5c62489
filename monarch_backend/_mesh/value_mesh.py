"""ValueMesh: one value for each rank of a mesh, such as the replies of a call. It has no processes and no messages."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from monarch_backend._mesh.extent import Extent, Point
from monarch_backend._mesh.mesh_base import MeshBase
from monarch_backend._mesh.shape import Shape

if TYPE_CHECKING:
    from typing_extensions import Self

T_co = TypeVar("T_co", covariant=True)

_SHOWN = 6  # values in a repr


class ValueMesh(MeshBase, Generic[T_co]):
    """One value for each rank, with the operations of every mesh. Picklable.

    ``values`` holds the value of rank i at index i. It is referenced, not copied, also by slices. Pickling a slice
    takes only its own values. Meshes are equal if their extents and values are. Values are compared as in lists, so
    arrays, whose ``==`` is not a bool, cannot be compared.

    Raises ValueError unless there is one value for each rank.

    >>> squares = ValueMesh(Extent.of({"hosts": 2, "gpus": 4}), [i * i for i in range(8)])
    >>> squares.item(hosts=1, gpus=0), list(squares.slice(hosts=1).values())
    (16, [16, 25, 36, 49])
    >>> [(str(point), value) for point, value in squares.slice(gpus=3)]
    [('hosts 0', 9), ('hosts 1', 49)]
    >>> squares
    ValueMesh(hosts=2, gpus=4: 0, 1, 4, 9, 16, 25 ... and 2 more)
    """

    __slots__ = ("_shape", "_values")

    _values: Sequence[T_co]

    def __init__(self, extent: Extent, values: Sequence[T_co]) -> None:
        if len(values) != extent.nelements:
            raise ValueError(f"{len(values)} values for the {extent.nelements} ranks of {extent}; give one each")
        self._shape = Shape.of(extent)
        self._values = values

    def _new_with_shape(self, shape: Shape) -> Self:
        mesh = self.__class__.__new__(self.__class__)
        mesh._shape = shape
        mesh._values = self._values
        return mesh

    def item(self, /, **coords: int) -> T_co:
        """Return the value at these coordinates, one for each label. A negative one counts from the end.

        Raises KeyError for a missing or unknown label, IndexError for a coordinate outside its dimension.
        """
        return self._values[self._shape.rank_of(**coords)]

    def items(self) -> Iterator[tuple[Point, T_co]]:
        """Return points of this mesh and their values, in order of rank."""
        return zip(self.extent, self.values(), strict=True)

    def values(self) -> Iterator[T_co]:
        """Return the values in order of rank."""
        return map(self._values.__getitem__, self._shape.ranks)

    def __iter__(self) -> Iterator[tuple[Point, T_co]]:
        return self.items()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ValueMesh):
            return NotImplemented
        return self is other or (self.extent == other.extent and list(self.values()) == list(other.values()))

    def __reduce__(self) -> tuple[Any, ...]:
        return self.__class__, (self.extent, tuple(self.values()))

    def __repr__(self) -> str:
        shown = ", ".join(
            " ".join(reprlib.repr(value).split()) for _, value in zip(range(_SHOWN), self.values(), strict=False)
        )
        more = f" ... and {len(self) - _SHOWN} more" if len(self) > _SHOWN else ""
        return f"ValueMesh({self.extent}: {shown}{more})"
