"""`SSHJob`: hosts that are started with OpenSSH's client, with its user's configuration.

The secret goes through ssh's standard input. The other machine needs a POSIX shell, /proc, and Python with this
package.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from typing_extensions import Self

from monarch_backend._core.parallel import in_parallel
from monarch_backend._core.timeouts import check_timeout
from monarch_backend._job.base import Job, Plan, check_mesh_name, check_variables, with_meshes
from monarch_backend._job.host_launcher import ARGUMENTS, REACHED
from monarch_backend._job.state_file import HostEntry

MAX_CONNECTIONS = 32
"""Limit of connections that look for hosts or end them at a time."""
COMMAND_TIMEOUT_S = 45.0
"""Seconds for the command of one such connection."""

# runs PID START BOOT: the same process, not one that got its pid later.
_RUNS = """
runs() {
    [ "$(cat /proc/sys/kernel/random/boot_id)" = "$3" ] || return 1
    stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
    started=$2
    set -- ${stat##*) }
    [ "${20}" = "$started" ] && [ "$1" != Z ]
}
tell() { if runs "$@"; then echo "monarch_backend: $1 up"; else echo "monarch_backend: $1 gone"; fi; }
gone_within() { n=0; while runs "$2" "$3" "$4"; do [ $n -ge $1 ] && return 1; n=$((n+1)); sleep 0.1; done; }
end() {
    runs "$@" && kill -INT "$1"
    gone_within 100 "$@" || { runs "$@" && kill -KILL "$1"; gone_within 50 "$@"; }
    tell "$@"
}
"""


class SSHJob(Job):
    """Hosts on other machines, started with ``ssh -o BatchMode=yes``. Keys and known hosts are those of the user's ssh.

    ``user``, ``port`` and ``identity`` (a file with a key) are ssh's -l, -p and -i. ``options`` are further words of
    its command line, such as ``["-o", "ProxyJump=gate"]``. ``python`` runs on the other machine, by default the path of
    this one. ``env`` is added to its environment. It is visible there in ``ps``: do not put secrets into it. ``notice``
    is in seconds and as for `ProcessJob`.

    Raises ValueError if ``options`` is a string, a variable of ``env`` has an invalid name, or ``notice`` is negative.

    >>> from monarch_backend.job import SSHJob
    >>> job = SSHJob(user="me").add_mesh("trainers", ["node1", "node2"])
    >>> [host.state for host in job.status()]
    ['not started', 'not started']
    """

    kind: ClassVar[str] = "ssh"

    def __init__(
        self, *, name: str = "job", path: str | os.PathLike[str] | None = None, user: str | None = None,
        port: int | None = None, identity: str | os.PathLike[str] | None = None, python: str | None = None,
        options: Sequence[str] = (), env: Mapping[str, str] | None = None,
        secret_file: str | os.PathLike[str] | None = None, notice: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(name, path, secret_file)
        if isinstance(options, str):
            raise ValueError("options is a list of words, not one text")
        self._user, self._port, self._options = user, port, list(options)
        self._identity = None if identity is None else os.path.abspath(os.path.expanduser(identity))
        self._python, self._env = python or sys.executable, check_variables(env or {})
        self._notice = check_timeout(notice, "notice") or 0.0
        self._meshes: dict[str, dict[str, Any]] = {}

    def add_mesh(
        self, name: str, hosts: Sequence[str], *, listen: str | None = None, reach: Sequence[str] | None = None
    ) -> Self:
        """Add a mesh of these hosts, named as for ssh; a name may occur twice. Return the job.

        The hosts listen on the address that ssh has reached and any free port, or on ``listen``, such as
        "0.0.0.0:26600". ``reach`` has the address or name of each host for connections, if it differs.

        Raises ValueError for an invalid name of the mesh or of a host, no hosts, a mesh that exists, or a ``reach`` of
        another length.
        """
        if isinstance(hosts, str) or not hosts:
            raise ValueError(f"the hosts of mesh {name!r} are a list of one or more names")
        for host in hosts:
            if not re.fullmatch(r"[^\s-][^\s]*", host):
                raise ValueError(f"{host!r} is not a name of a host")
        if reach is not None and (isinstance(reach, str) or len(reach) != len(hosts)):
            raise ValueError(f"mesh {name!r}: reach is a list of one address for each host")
        if name in self._meshes:
            raise ValueError(f"the job has a mesh {name!r} already")
        reached = None if reach is None else list(reach)
        self._meshes[check_mesh_name(name)] = {"hosts": list(hosts), "listen": listen, "reach": reached}
        return self

    def _ssh(self, host: str, script: str) -> list[str]:
        words = ["ssh", *self._options, "-T", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
        words += ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
        for option, value in (("-l", self._user), ("-p", self._port), ("-i", self._identity)):
            words += [] if value is None else [option, str(value)]
        return [*words, "--", host, f"exec /bin/sh -c {shlex.quote(script)}"]

    def _plans(self) -> list[Plan]:
        plans = []
        for mesh, what in self._meshes.items():
            for index, host in enumerate(what["hosts"]):
                reach = what["reach"][index] if what["reach"] else ""
                plans.append(Plan(mesh, index, host, self._ssh(host, self._up(what["listen"])), None, reach))
        return plans

    def _up(self, listen: str | None) -> str:
        address = '"[$3]:0"' if listen is None else shlex.quote(listen)
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in self._env.items())
        arguments = f"{' '.join(ARGUMENTS)} --detach --notice {self._notice} --address {address}"
        up = f"{shlex.quote(self._python)} -m monarch_backend.cli {arguments}"
        return f'set -- $SSH_CONNECTION; echo "{REACHED}$3"; {f"export {variables}; " if variables else ""}exec {up}'

    def _look(self, hosts: Sequence[HostEntry]) -> list[str]:
        return self._ask(hosts, "tell")

    def _end(self, hosts: Sequence[HostEntry]) -> list[str]:
        return self._ask(hosts, "end")

    def _ask(self, hosts: Sequence[HostEntry], what: str) -> list[str]:
        by_machine: dict[str, list[HostEntry]] = {}
        for host in hosts:
            by_machine.setdefault(host.where, []).append(host)
        asked = in_parallel(lambda item: self._ask_machine(item[0], item[1], what), by_machine.items(), MAX_CONNECTIONS)
        answers = dict(zip(by_machine, asked, strict=True))
        return [answers[host.where][host.daemon.pid] for host in hosts]

    def _ask_machine(self, machine: str, hosts: Sequence[HostEntry], what: str) -> dict[int, str]:
        calls = [f"{what} {h.daemon.pid} {h.daemon.start} {shlex.quote(h.daemon.boot)} &" for h in hosts]
        command = self._ssh(machine, "\n".join([_RUNS, *calls, "wait"]))
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=COMMAND_TIMEOUT_S,
            )
            why = done.stderr.strip() or f"ssh ended with {done.returncode}"
            said = done.stdout
        except (OSError, subprocess.TimeoutExpired) as error:
            why, said = str(error) if isinstance(error, OSError) else f"no answer within {COMMAND_TIMEOUT_S:g} s", ""
        found = dict(re.findall(r"^monarch_backend: (\d+) (up|gone)$", said, re.MULTILINE))
        return {host.daemon.pid: found.get(str(host.daemon.pid), f"unknown: {why}") for host in hosts}

    def _description(self) -> dict[str, Any]:
        return {
            "user": self._user, "port": self._port, "identity": self._identity, "python": self._python,
            "options": self._options, "env": self._env, "notice": self._notice, "meshes": self._meshes,
        }  # fmt: skip

    @classmethod
    def _from_description(cls, description: dict[str, Any]) -> Job:
        return with_meshes(cls, description, lambda job, mesh, what: job.add_mesh(mesh, **what))
