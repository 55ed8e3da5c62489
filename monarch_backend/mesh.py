"""Meshes of hosts and processes, and their shapes.

>>> from monarch_backend.mesh import Extent
>>> len(Extent(["hosts", "gpus"], [2, 4]))
8
"""

from monarch_backend import _wiring as _wiring
from monarch_backend._mesh.extent import Extent, Point
from monarch_backend._mesh.host_mesh import HostMesh, this_host
from monarch_backend._mesh.proc_mesh import ProcMesh
from monarch_backend._mesh.shape import Shape
from monarch_backend._mesh.value_mesh import ValueMesh

__all__ = ["Extent", "HostMesh", "Point", "ProcMesh", "Shape", "ValueMesh", "this_host"]
