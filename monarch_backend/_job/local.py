"""`LocalJob`: this machine under the names of a program's host meshes. Nothing is started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

from monarch_backend._core.timeouts import check_bounded
from monarch_backend._job import state_file
from monarch_backend._job.base import Job, JobState, Plan, check_mesh_name
from monarch_backend._job.state_file import HostEntry, JobFile
from monarch_backend._mesh.host_mesh import this_host


class LocalJob(Job):
    """Job in which each mesh is `this_host()`. A program then runs unchanged on a laptop and on a cluster.

    Raises ValueError for a name that is not an identifier.

    >>> from monarch_backend.job import LocalJob
    >>> LocalJob(["trainers"]).state().trainers
    HostMesh(this host)
    """

    kind: ClassVar[str] = "local"

    def __init__(
        self, meshes: Sequence[str] = ("hosts",), *, name: str = "job", path: str | os.PathLike[str] | None = None
    ) -> None:
        super().__init__(name, path)
        self._secret_file = None
        self._meshes = [check_mesh_name(each) for each in meshes]

    def _plans(self) -> list[Plan]:
        return []

    def _look(self, hosts: Sequence[HostEntry]) -> list[str]:
        return ["gone"] * len(hosts)

    _end = _look

    def _description(self) -> dict[str, Any]:
        return {"meshes": self._meshes}

    def _start(self, plans: Sequence[Plan], file: JobFile, until: float) -> None:  # noqa: ARG002
        state_file.write(self.path, file)

    def state(
        self,
        timeout: float = 15.0,
        *,
        cached_path: str | os.PathLike[str] | None = None,  # noqa: ARG002
    ) -> JobState:
        """Return the meshes, as `Job.state` does. It needs no `apply`.

        ``timeout``, in seconds, and ``cached_path`` have no effect. Raises ValueError if ``timeout`` is negative.
        """
        check_bounded(timeout)
        return JobState(self.name, {name: this_host() for name in self._meshes})
