"""Base class of all meshes, with their operations on dimensions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from monarch_backend._mesh.extent import Extent, Point
from monarch_backend._mesh.shape import Index, Shape

if TYPE_CHECKING:
    from typing_extensions import Self


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

    def __len__(self) -> int:
        return len(self._shape)
