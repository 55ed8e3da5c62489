"""`ProcessJob`: hosts that are processes of this machine, for tests and trials of programs for many hosts."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from monarch_backend._core.env import without_secrets
from monarch_backend._core.parallel import in_parallel
from monarch_backend._core.timeouts import check_timeout
from monarch_backend._job.base import Job, Plan, check_host_count, check_mesh_name
from monarch_backend._job.errors import JobError
from monarch_backend._job.host_launcher import ARGUMENTS
from monarch_backend._job.state_file import HostEntry, JobFile

TERM_GRACE_S = 10.0
"""Seconds from SIGINT to SIGKILL."""


class ProcessJob(Job):
    """Meshes of hosts on this machine: ``meshes`` has the number of hosts of each.

    The hosts outlive the program; ``kill()`` ends them. ``env`` is added to their environment. Their output goes to
    files in a directory beside the job's file, which errors and ``status()`` name. With ``notice`` a host that receives
    SIGTERM goes on for that many seconds. `watch` reports it as "ending", and actors receive a `HostEnding`.

    Raises ValueError for a name that is not an identifier, for a number that is not an int of 1 or more, and for a
    negative ``notice``.

    >>> import tempfile
    >>> from monarch_backend.job import ProcessJob
    >>> directory = tempfile.TemporaryDirectory()
    >>> job = ProcessJob({"trainers": 1}, path=f"{directory.name}/job.json")
    >>> job.apply()
    >>> [status.state for status in job.status()]
    ['up']
    >>> job.kill()
    >>> [status.state for status in job.status()]
    ['not started']
    >>> directory.cleanup()
    """

    kind: ClassVar[str] = "process"
    looks_at_once: ClassVar[bool] = True

    def __init__(
        self, meshes: Mapping[str, int], *, name: str = "job", path: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None, secret_file: str | os.PathLike[str] | None = None, notice: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(name, path, secret_file)
        self._meshes = {check_mesh_name(mesh): check_host_count(mesh, count) for mesh, count in meshes.items()}
        self._env = dict(env or {})
        self._notice = check_timeout(notice, "notice") or 0.0

    def _plans(self) -> list[Plan]:
        inherited = without_secrets(os.environ)
        plans = []
        for mesh, count in self._meshes.items():
            for index in range(count):
                log = self.path.with_name(f"{self.path.stem}.logs") / f"{mesh}-{index}.log"
                listen = ["--address", "127.0.0.1:0", "--detach", "--log", str(log), "--notice", str(self._notice)]
                command = [sys.executable, "-m", "monarch_backend.cli", *ARGUMENTS, *listen]
                environment = {**inherited, "MONARCH_HOST_NAME": f"{mesh}{index}", **self._env}
                plans.append(Plan(mesh, index, "", command, environment))
        return plans

    def _read(self) -> JobFile | None:
        file = super()._read()
        if file is not None and file.machine != (here := socket.gethostname()):
            raise JobError(f"{self.path} is of processes on {file.machine}, and this is {here}: run this there")
        return file

    def _look(self, hosts: Sequence[HostEntry]) -> list[str]:
        return ["up" if host.daemon.runs() else "gone" for host in hosts]

    def _end(self, hosts: Sequence[HostEntry]) -> list[str]:
        in_parallel(lambda host: host.daemon.end(TERM_GRACE_S, signal.SIGINT), hosts)
        return ["unknown: it does not end" if host.daemon.runs() else "gone" for host in hosts]

    def _set_size(self, mesh: str, count: int) -> None:
        self._meshes[mesh] = count

    def _description(self) -> dict[str, Any]:
        return {"meshes": self._meshes, "env": self._env, "notice": self._notice}
