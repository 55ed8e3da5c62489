"""`SkyPilotJob`: meshes of hosts in a task of SkyPilot. It renders the task, and its program finds the meshes.

`sky` launches, watches and ends the task. The rendered variables make each node a rank, as spmd.py needs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import Self

from monarch_backend._job.base import JobState, check_host_count, check_mesh_name
from monarch_backend._job.errors import JobError
from monarch_backend._job.rendering import RENDEZVOUS_PORT, skypilot_task
from monarch_backend._job.spmd import START_TIMEOUT_S, SPMDJob


class SkyPilotJob(SPMDJob):
    """Meshes of hosts in a task of SkyPilot, one host on each node. `task` returns the task, and starts nothing.

    The program of the task makes the same job. It calls `apply` on all nodes, and goes on on the first one only, which
    is the controller. There `state` has the meshes: the first mesh has the first nodes, the next mesh the next ones.

    ``resources`` are SkyPilot's, and all nodes have them. ``setup`` is shell code that installs this package on each
    node. ``env`` is added to the environment, and ``workdir`` is a directory that SkyPilot copies to the nodes. Nodes
    find each other at ``port`` of the first one, within ``timeout`` seconds.

    >>> from monarch_backend.job import SkyPilotJob
    >>> job = SkyPilotJob(name="train", resources={"accelerators": "H100:8"})
    >>> task = job.add_mesh("trainers", 4).add_mesh("loaders", 2).task(["python", "train.py"])
    >>> task["num_nodes"], task["resources"]
    (6, {'accelerators': 'H100:8'})
    """

    def __init__(
        self, *, name: str = "job", resources: Mapping[str, Any] | None = None, setup: str = "",
        env: Mapping[str, str] | None = None, workdir: str | None = None, port: int = RENDEZVOUS_PORT,
        timeout: float = START_TIMEOUT_S,
    ) -> None:  # fmt: skip
        super().__init__(timeout=timeout)
        self._options: dict[str, Any] = {
            "name": name, "resources": resources, "setup": setup, "env": env, "workdir": workdir, "port": port,
        }  # fmt: skip
        self._meshes: dict[str, int] = {}

    def add_mesh(self, name: str, hosts: int) -> Self:
        """Add a mesh of ``hosts`` nodes, and return the job.

        Raises ValueError for an invalid name, a mesh that exists, and a number below 1.

        >>> from monarch_backend.job import SkyPilotJob
        >>> job = SkyPilotJob().add_mesh("trainers", 4).add_mesh("loaders", 2)
        """
        check_host_count(name, hosts)
        if name in self._meshes:
            raise ValueError(f"the job has a mesh {name!r} already")
        self._meshes[check_mesh_name(name)] = hosts
        return self

    def task(self, program: Sequence[str]) -> dict[str, Any]:
        """Return the task of SkyPilot that runs ``program``, a list of words, on all nodes, as `skypilot_task` does.

        Raises ValueError for a job without meshes, an invalid program and an invalid name of a variable.
        """
        if not self._meshes:
            raise ValueError("the job has no hosts: add a mesh")
        return skypilot_task(program, sum(self._meshes.values()), **self._options)

    def state(self) -> JobState:
        """Return the meshes, on the first node. Raises JobError as `host_mesh_from_env` does.

        Raises JobError, too, if the task has another number of nodes than the job.
        """
        every = super().state()[self._mesh]
        if every.extent["hosts"] != sum(self._meshes.values()):
            raise JobError(
                f"the job has {sum(self._meshes.values())} hosts, and the task runs on {every.size('hosts')} nodes: "
                "render the task again"
            )
        found, first = {}, 0
        for mesh, count in self._meshes.items():
            found[mesh] = every.slice(hosts=slice(first, first + count))
            first += count
        return JobState(self._options["name"], found)
