"""`HostMesh`: machines on which processes can be started: this one, or others, which _hosts/attach.py attaches."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from monarch_backend._core.extension_points import extension
from monarch_backend._mesh.extent import Extent
from monarch_backend._mesh.mesh_base import MeshBase
from monarch_backend._mesh.runtime_protocol import program
from monarch_backend._mesh.shape import Shape

if TYPE_CHECKING:
    from typing_extensions import Self

    from monarch_backend._mesh.proc_mesh import ProcMesh


class HostMesh(MeshBase):
    """Hosts, one for each rank. `this_host`, `monarch_backend.hosts` and the jobs of `monarch_backend.job` make them.

    Slices are HostMeshes of some of the hosts. ``ids`` are the controller's ids of the base ranks; None stands for this
    host.

    >>> from monarch_backend.mesh import this_host
    >>> with this_host().spawn_procs({"gpus": 1}, name="trainers") as procs:
    ...     print(procs)
    ProcMesh('trainers', gpus=1)
    """

    def __init__(self, shape: Shape, ids: tuple[str, ...] | None = None, name: str = "") -> None:
        self._shape, self._ids, self._name = shape, ids, name

    def _new_with_shape(self, shape: Shape) -> Self:
        return self.__class__(shape, self._ids, self._name)

    def __reduce__(self) -> Any:
        return HostMesh, (self._shape, self._ids, self._name)

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """Ids of the hosts of this mesh, in the order of its ranks; None for this host."""
        return None if self._ids is None else tuple(self._ids[rank] for rank in self._shape.ranks)

    def spawn_procs(
        self,
        per_host: Mapping[str, int] | Extent | None = None,
        bootstrap: Callable[[], object] | None = None,
        name: str = "",
        proc_bind: Any = None,
        restart: Any = None,
        env: Mapping[str, str] | None = None,
        post_mortem: bool = False,
        replay: str | os.PathLike[str] | None = None,
    ) -> ProcMesh:
        """Start processes on each host, 8 with ``per_host={"gpus": 8}``. Return their `ProcMesh` at once.

        The processes come from a fork server that has imported torch. ``env`` is added to their environment.
        ``bootstrap`` is called before other code of the user's. ``proc_bind`` sets their CPU affinity on this host:
        "cores", "numa", a list with the CPUs of each process, or a function of its rank. ``restart``, a `Restart`, is
        the policy for processes that die; without it a death is a failure of the mesh.

        With ``post_mortem``, an error in an endpoint waits with its frames for `monarch-backend debug`. The caller gets
        it when a client of the debugger has sent `continue`.

        With ``replay``, a folder, the messages of the actors are recorded in files there for `monarch-backend replay`.

        If ``bootstrap`` raises, ``initialized`` raises `MeshFailure` and calls raise `SupervisionError`, with its
        traceback. The program does not end.

        Raises ValueError for a dimension that the hosts have, a size below 1, or an invalid ``proc_bind`` or ``env``.
        Raises TypeError for arguments of a wrong type, `SpawnLimitError` (a RuntimeError) for more processes than the
        system has room for, and RuntimeError for a host that is lost.
        """
        if post_mortem:
            env = {**(env or {}), "MONARCH_POST_MORTEM": "1"}
        if replay is not None:
            env = {**(env or {}), "MONARCH_REPLAY": os.path.abspath(replay)}
        extent = Extent.of({} if per_host is None else per_host)
        clash = set(extent.labels) & set(self._shape.labels)
        if clash:
            raise ValueError(f"the hosts have a dimension {sorted(clash)[0]!r} already: give per_host another name")
        whole = Extent((*self.extent.labels, *extent.labels), (*self.extent.sizes, *extent.sizes))
        return program().spawn_procs(  # type: ignore[no-any-return]
            self, whole, bootstrap=bootstrap, name=name, proc_bind=proc_bind, restart=restart, env=env
        )

    def shutdown(self) -> Any:
        """Stop all processes that this program has started on these hosts. Return a `Future` of None."""
        return program().stop_procs(None, "stop", "its hosts were shut down", hosts=self.hosts or ())

    def sync_workspace(
        self, path: str | os.PathLike[str], to: str | None = None, *, ignore: Sequence[str] = (), reload: Any = None
    ) -> Any:
        """Copy the files below a directory to all hosts. Each file that a host lacks is sent once. Return a Synced.

        ``to`` is the directory on the hosts, by default the same path; each host expands "~" and variables. Files that
        an earlier sync wrote and that are gone here are removed there. Permission bits are copied. ``ignore`` has
        patterns of names, in addition to ``.git`` and caches. ``reload`` is a `ProcMesh` whose processes then reload
        the workspace's modules; existing objects do not change.

        Raises NotADirectoryError if ``path`` is not a directory. Raises `WorkspaceError` (a ValueError), before
        anything is written, if a link leads out of the directory or a host's ``.monarch_workspace`` lists a file
        outside of it. A host writes through no link. An error on a host is raised here, with its traceback.
        """
        return extension("workspace sync")(self, path, to, ignore, reload)

    def __repr__(self) -> str:
        if self._ids is None:
            return f"HostMesh({self.extent})" if self.extent.labels else "HostMesh(this host)"
        return f"HostMesh({self._name!r}, {self.extent})"


def this_host() -> HostMesh:
    """Return this machine as a mesh of one host without dimensions.

    >>> from monarch_backend.actor import this_host
    >>> len(this_host())
    1
    """
    return HostMesh(Shape.of(Extent((), ())))
