"""Base class of jobs. It starts hosts once, finds them again by the job's file, and ends them.

A subclass defines in four methods how its kind of job starts, finds and ends hosts.
"""

from __future__ import annotations

import contextlib
import json
import keyword
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from monarch_backend._core import env
from monarch_backend._core.parallel import in_parallel
from monarch_backend._core.timeouts import check_bounded
from monarch_backend._hosts.attach import attach_to_workers
from monarch_backend._hosts.connection_settings import parse_address
from monarch_backend._hosts.process_identity import Identity
from monarch_backend._job import state_file
from monarch_backend._job.errors import JobError
from monarch_backend._job.host_launcher import Launch, Up
from monarch_backend._job.state_file import HostEntry, JobFile
from monarch_backend._mesh.host_mesh import HostMesh
from monarch_backend._mesh.runtime_protocol import program
from monarch_backend._telemetry import log_history
from monarch_backend._transport.network.auth import new_secret, read_secret, write_private

if TYPE_CHECKING:
    from monarch_backend._telemetry.sql import QueryResult

MAX_CONCURRENT_STARTS = 64
"""Limit of hosts that are started at a time. Each needs a process of this host while it starts."""
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
"""Seconds for this program's processes on a job's hosts to finish when the job is ended."""


@dataclass(frozen=True)
class HostStatus:
    """Status of one host of a job.

    ``mesh`` and ``index`` tell its place in the job, and ``address`` where it listens. ``log`` is the path of its log.
    ``reason`` tells why it is in its state, in the scheduler's words. What is not known is "". ``state`` is

    - "not started";
    - "pending": a scheduler has not started it yet, and ``reason`` has what it waits for;
    - "up";
    - "ending": it runs, and its scheduler has announced its end, or the host itself to this program;
    - "gone";
    - "unknown: " with the reason.

    >>> from monarch_backend.job import SSHJob
    >>> [status] = SSHJob().add_mesh("trainers", ["node1"]).status()
    >>> status.mesh, status.index, status.state
    ('trainers', 0, 'not started')
    """

    mesh: str
    index: int
    state: str
    address: str = ""
    log: str = ""
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.mesh}[{self.index}]: {self.state}{f' ({self.reason})' if self.reason else ''}"


class JobState(Mapping[str, HostMesh]):
    """The attached meshes of a job, as attributes and items by their names. `Job.state` makes it.

    An unknown name raises AttributeError, or KeyError as an item.

    >>> from monarch_backend.job import LocalJob
    >>> state = LocalJob(["trainers", "loaders"]).state()
    >>> list(state), state.trainers
    (['trainers', 'loaders'], HostMesh(this host))
    """

    def __init__(self, name: str, meshes: Mapping[str, HostMesh]) -> None:
        self._name, self._meshes = name, dict(meshes)

    def __getattr__(self, name: str) -> HostMesh:
        if name.startswith("_") or name not in self._meshes:
            known = ", ".join(self.__dict__.get("_meshes", ()))
            raise AttributeError(f"the job has no mesh {name!r}; it has {known or 'none'}")
        return self._meshes[name]

    def __getitem__(self, name: str) -> HostMesh:
        return self._meshes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._meshes)

    def __len__(self) -> int:
        return len(self._meshes)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._meshes]

    def __repr__(self) -> str:
        return f"JobState({self._name!r}: {', '.join(f'{name}={mesh}' for name, mesh in self._meshes.items())})"


@dataclass(frozen=True)
class Plan:
    """How one host is started: ``where`` is "" for this machine, ``reach`` its address if not the printed one."""

    mesh: str
    index: int
    where: str
    command: Sequence[str]
    environment: Mapping[str, str] | None = None
    reach: str = ""

    @property
    def label(self) -> str:
        return f"{self.mesh}[{self.index}]{f' ({self.where})' if self.where else ''}"


_J = TypeVar("_J", bound="Job")


class Job:
    """Meshes of hosts by name, and the file that records which of them run.

    This is the base class of all jobs, such as `SSHJob`. ``name`` distinguishes the jobs of a user. ``path`` is the
    job's file, by default $XDG_STATE_HOME/monarch_backend/jobs/NAME.json. ``secret_file`` holds the secret of
    all hosts and of the program. The default is MONARCH_SECRET_FILE's, or a new one for this job.

    Raises ValueError for a name that cannot be a file's.

    >>> from monarch_backend.job import SSHJob
    >>> job = SSHJob(name="train").add_mesh("trainers", ["node1"])
    >>> job.path.name, [status.state for status in job.status()]
    ('train.json', ['not started'])
    """

    kind: ClassVar[str]
    looks_at_once: ClassVar[bool] = False  # whether the state of hosts is cheap to find
    _kinds: ClassVar[dict[str, type[Job]]] = {}

    def __init_subclass__(cls) -> None:
        if "kind" in cls.__dict__:
            Job._kinds[cls.kind] = cls

    def __init__(
        self, name: str = "job", path: str | os.PathLike[str] | None = None,
        secret_file: str | os.PathLike[str] | None = None,
    ) -> None:  # fmt: skip
        default = state_file.default_path(name)  # checks the name, too
        self.name = name
        self.path = default if path is None else Path(path).expanduser().absolute()
        given = secret_file or env.get("MONARCH_SECRET_FILE") or None
        self._secret_file = None if given is None else Path(given).expanduser().absolute()

    # ---- of each kind

    def _plans(self) -> list[Plan]:
        raise NotImplementedError

    def _look(self, hosts: Sequence[HostEntry]) -> list[str]:
        """Return the state of each host: "up", "gone", or "unknown: " and the reason."""
        raise NotImplementedError

    def _end(self, hosts: Sequence[HostEntry]) -> list[str]:
        """End hosts, and return their states afterwards, as `_look` does."""
        raise NotImplementedError

    def _description(self) -> dict[str, Any]:
        """Return the arguments that make this job again, as values that JSON has."""
        raise NotImplementedError

    def _set_size(self, mesh: str, count: int) -> None:  # noqa: ARG002
        """Give a mesh of the description another number of hosts."""
        raise JobError(f"a {type(self).__name__} has named hosts, so its meshes cannot be resized")

    # ---- of all

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Job:
        """Return the job of this file, or of this name, for use in a second program.

        Raises JobError if there is no such file, or if it is not a job's file.

        >>> from monarch_backend.job import Job
        >>> Job.load("/nowhere/job.json")
        Traceback (most recent call last):
            ...
        monarch_backend.job.JobError: there is no job: no file /nowhere/job.json
        """
        text = os.fspath(path)
        where = Path(text).expanduser().absolute()
        if os.sep not in text and not where.exists() and not text.endswith(".json"):
            where = state_file.default_path(text)
        file = state_file.read(where)
        if file is None:
            raise JobError(f"there is no job: no file {where}")
        cls = Job._kinds.get(file.kind)
        if cls is None:
            raise JobError(
                f"{where} is of a job of kind {file.kind!r}, which this release of monarch_backend does not have"
            )
        job = cls._described_by(file, where)
        job.name, job.path = file.name, where
        job._secret_file = None if file.own_secret else Path(file.secret_file)
        return job

    def dump(self, path: str | os.PathLike[str]) -> None:
        """Write the job to a file, for `Job.load` in another program. A job that runs is the same job there.

        Only its user can read the file. It replaces an existing one.

        >>> import os, tempfile
        >>> from monarch_backend.job import Job, SSHJob
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "job.json")
        ...     SSHJob(name="train").add_mesh("trainers", ["node1"]).dump(path)
        ...     Job.load(path).name
        'train'
        """
        where = Path(path).expanduser().absolute()
        with state_file.locked(where, "dump"):
            state_file.write(where, self._read() or self._new_file(where))

    @property
    def active(self) -> bool:
        """Whether the job has been applied and not ended, by this program or another one.

        That includes a submission to a scheduler whose program has died meanwhile: `kill` removes what there is.
        """
        file = self._read()
        return file is not None and self._is_submitted(file)

    def can_run(self, job: Job) -> bool:
        """Return whether this job runs, or would run, exactly the hosts that ``job`` describes.

        >>> from monarch_backend.job import ProcessJob
        >>> ProcessJob({"trainers": 2}).can_run(ProcessJob({"trainers": 2}, name="other"))
        True
        """
        return self.kind == job.kind and self._described() == job._described()

    @classmethod
    def _from_description(cls, description: dict[str, Any]) -> Job:
        return cls(**description)

    @classmethod
    def _described_by(cls, file: JobFile, path: Path) -> Job:
        """Return the job of a file's description. Arguments that an earlier release did not have get their defaults."""
        try:
            return cls._from_description(file.description)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise JobError(f"{path} is not the file of a {cls.__name__}: {error}") from None

    def apply(self, timeout: float = START_TIMEOUT_S) -> None:
        """Start the hosts that do not run yet, and return when all listen.

        The job's file records hosts that this job has started before, also from another program. Raises JobError if a
        host cannot be started within ``timeout`` seconds; then no new host is left running. Raises JobError if the file
        is of a job with other arguments, and ValueError for a job without hosts or a negative timeout.
        """
        env.check()
        timeout, plans = check_bounded(timeout), self._plans()
        if not plans and self.kind != "local":
            raise ValueError("the job has no hosts: give it some")
        until = time.monotonic() + timeout
        with state_file.locked(self.path, "apply", until):
            self._start_missing(self._own_file(), plans, until)

    def _own_file(self) -> JobFile:
        """Return the content of the job's file, or a new one. Raises JobError if it is of another job."""
        file = self._read()
        if file is None:
            return self._new_file(self.path)
        self._check_description(file, f"end that one first (Job.load({str(self.path)!r}).kill())")
        return file

    def _check_description(self, file: JobFile, cure: str) -> None:
        if self._described_by(file, self.path)._described() != self._described():
            raise JobError(
                f"{self.path} is of a job that was described differently: {cure}, or give this one another name"
            )

    def _start_missing(self, file: JobFile, plans: Sequence[Plan], until: float) -> None:
        running = self._running(file)
        missing = [plan for plan in plans if (plan.mesh, plan.index) not in running]
        if not missing and file.hosts:
            return
        file.hosts = list(running.values())
        try:
            self._start(missing, file, until)
        finally:
            if not file.hosts and missing:
                self._forget(file)

    def resize(self, mesh: str, count: int, timeout: float = START_TIMEOUT_S) -> None:
        """Start or end hosts of a mesh until it has ``count`` hosts. `state` then returns a mesh of these.

        New hosts get the highest indices, and hosts with the highest indices are ended first. Stop the processes on
        them before, because they are lost. A job that does not run only changes its description.

        Raises ValueError for an unknown mesh and a ``count`` below 1. Raises JobError if the hosts of this job have
        names, or if new hosts cannot be started within ``timeout`` seconds. Raises JobError if the job's file is of a
        job with other arguments, also because another program has resized it.
        """
        timeout = check_bounded(timeout)
        check_host_count(mesh, count)
        before = [plan.mesh for plan in self._plans()]
        if mesh not in (names := list(dict.fromkeys(before))):
            raise ValueError(f"the job has no mesh {mesh!r}; it has {', '.join(names) or 'none'}")
        until = time.monotonic() + timeout
        with state_file.locked(self.path, "resize", until):
            file = self._read()
            if file is not None:
                self._check_description(file, f"resize it by Job.load({str(self.path)!r}).resize({mesh!r}, {count})")
            self._set_size(mesh, count)
            if file is None:
                return
            if self._is_submitted(file):
                try:
                    self._end_surplus(file, mesh, count)
                except BaseException:
                    self._set_size(mesh, before.count(mesh))  # as in the job's file
                    raise
            file.description = self._described()
            state_file.write(self.path, file)
            if self._is_submitted(file):
                self._start_missing(file, self._plans(), until)

    def _end_surplus(self, file: JobFile, mesh: str, count: int) -> None:
        """End the hosts of a mesh from index ``count`` on."""
        surplus = [host for host in file.hosts if host.mesh == mesh and host.index >= count]
        _forget_attached(file)
        states = self._end(surplus)
        if left := [f"{h.label}: {s}" for h, s in zip(surplus, states, strict=True) if s != "gone"]:
            raise JobError("not ended: " + "; ".join(left))
        file.hosts = [host for host in file.hosts if host not in surplus]

    @staticmethod
    def _is_submitted(file: JobFile) -> bool:
        return bool(file.hosts or file.submitted or file.is_begun)

    def _described(self) -> dict[str, Any]:
        """Return the description as it is after a round trip through JSON."""
        described: dict[str, Any] = json.loads(json.dumps(self._description()))
        return described

    def _running(self, file: JobFile) -> dict[tuple[str, int], HostEntry]:
        states = self._look(file.hosts)
        unknown = [f"{h.label}: {s}" for h, s in zip(file.hosts, states, strict=True) if s not in ("up", "gone")]
        if unknown:
            raise JobError("it is unknown whether these hosts still run: " + "; ".join(unknown))
        return {(h.mesh, h.index): h for h, s in zip(file.hosts, states, strict=True) if s == "up"}

    def _new_file(self, path: Path) -> JobFile:
        given = self._secret_file
        if given is not None:
            read_job_secret(self.name, given, is_own=False)
        own = path.with_name(f"{path.stem}.secret")
        if given is None and self.kind != "local":
            write_private(own, new_secret().hex().encode() + b"\n")
        return JobFile(
            version=state_file.STATE_VERSION, kind=self.kind, name=self.name, id=secrets.token_hex(8),
            machine=socket.gethostname(), secret_file=str(given or own), own_secret=given is None,
            description=self._described(), hosts=[],
        )  # fmt: skip

    def _start(self, plans: Sequence[Plan], file: JobFile, until: float) -> None:
        """Start all of these hosts, or none. The file is written before the first one is told to stay."""
        before = list(file.hosts)
        launches: list[Launch] = []
        try:
            path = Path(file.secret_file)
            secret = read_job_secret(self.name, path, is_own=file.own_secret) if plans else b""
            for first in range(0, len(plans), MAX_CONCURRENT_STARTS):
                some = plans[first : first + MAX_CONCURRENT_STARTS]
                new = []
                for plan in some:
                    new.append(Launch(plan.label, plan.command, secret, plan.environment))
                    launches.append(new[-1])
                file.hosts += [
                    _entry(plan, each.ready(until, self._stop_if_killed)) for plan, each in zip(some, new, strict=True)
                ]
            order = {name: number for number, name in enumerate(dict.fromkeys(plan.mesh for plan in self._plans()))}
            file.hosts.sort(key=lambda host: (order[host.mesh], host.index))
            state_file.write(self.path, file)
            while launches:
                launches[-1].stay()
                launches.pop()
        except BaseException:
            new_hosts = [host for host in file.hosts if host not in before]
            for each in launches:
                each.let_go()
            for each in launches:
                each.give_up()
            with contextlib.suppress(JobError, OSError):
                self._end(new_hosts)
            file.hosts = before
            if before:
                state_file.write(self.path, file)
            raise

    def _stop_if_killed(self) -> None:
        """Raise JobError if a `kill` waits for this command, which starts or ends hosts."""
        if state_file.is_kill_requested(self.path):
            raise JobError(f"job {self.name!r} was ended by kill() while this program started or ended hosts of it")

    def _read(self) -> JobFile | None:
        file = state_file.read(self.path)
        if file is not None and file.kind != self.kind:
            raise JobError(f"{self.path} is of a job of kind {file.kind!r}: give this one another name")
        return file

    def state(self, timeout: float = 15.0, *, cached_path: str | os.PathLike[str] | None = None) -> JobState:
        """Attach the hosts, and return the meshes of the job. Later calls return the same meshes.

        With ``cached_path`` the job's file is that one, and hosts that do not run are started first. A second run of
        the same program then finds the hosts of the first one.

        Raises JobError, with names and logs, if the job was not applied, if hosts of it are gone, or if they cannot be
        attached within ``timeout`` seconds.
        """
        timeout = check_bounded(timeout)
        if cached_path is not None:
            self.path = Path(cached_path).expanduser().absolute()
            self.apply()
        file = self._read()
        if file is None:
            raise JobError(f"the job {self.name!r} does not run (no file {self.path}): apply() starts it")
        plans, there = self._plans(), {(host.mesh, host.index): host for host in file.hosts}
        if missing := [plan.label for plan in plans if (plan.mesh, plan.index) not in there]:
            raise JobError(f"job {self.name!r}: not started: {', '.join(missing)}; apply() starts them")
        meshes: dict[str, list[HostEntry]] = {}
        for plan in plans:
            meshes.setdefault(plan.mesh, []).append(there[plan.mesh, plan.index])
        if self.looks_at_once and (why := self._who_is_gone(file)):
            raise JobError(f"job {self.name!r}{why}")
        log_history.note_job(self.name)
        attached = {name: self._attach(file, name, hosts, timeout) for name, hosts in meshes.items()}
        return JobState(self.name, attached)

    def _attach(self, file: JobFile, name: str, hosts: Sequence[HostEntry], timeout: float) -> HostMesh:
        key = (file.id, name, tuple(host.incarnation or host.process for host in hosts))
        with _attaching:
            connecting = _connecting.setdefault(key, threading.RLock())
        with connecting:  # not `_attaching`: other hosts are attached meanwhile, and status() does not wait
            with _attaching:
                mesh = _attached.get(key)
            if mesh is not None and not _lost(mesh):
                return mesh
            addresses = [host.address for host in hosts]
            if any(_refuse(addresses)) and (why := self._who_is_gone(file)):
                raise JobError(f"job {self.name!r}{why}")
            try:
                secret = read_secret(Path(file.secret_file))
                mesh = self._connect(file, name, hosts, secret, timeout)
            except OSError as error:  # a ConnectionError, or no file of the secret
                raise JobError(f"mesh {name!r} of job {self.name!r}: {error}{self._who_is_gone(file)}") from error
            with _attaching:
                _attached[key] = mesh
            return mesh

    def _connect(
        self,
        file: JobFile,  # noqa: ARG002
        name: str,
        hosts: Sequence[HostEntry],
        secret: bytes,
        timeout: float,
    ) -> HostMesh:
        """Attach hosts. Raises ConnectionError, with all reasons, if one is not reached within ``timeout`` seconds."""
        return attach_to_workers([host.address for host in hosts], name, secret=secret, timeout=timeout)

    def _who_is_gone(self, file: JobFile) -> str:
        states = self._look(file.hosts)
        gone = [
            f"{host.label}: its process {host.daemon.pid} is gone, its log is {host.log}"
            if state == "gone"
            else f"{host.label}: {state}"
            for host, state in zip(file.hosts, states, strict=True)
            if state != "up"
        ]
        return f": {'; '.join(gone)}. apply() starts again what is gone" if gone else ""

    def status(self) -> list[HostStatus]:
        """Return the `HostStatus` of each host, without attaching it. Raises JobError if the job's file is invalid."""
        file = self._read()
        hosts = [] if file is None else file.hosts
        found = dict(zip(((h.mesh, h.index) for h in hosts), zip(hosts, self._look(hosts), strict=True), strict=True))
        result = []
        for plan in self._plans():
            host, state = found.get((plan.mesh, plan.index), (None, "not started"))
            address, log = ("", "") if host is None else (host.address, host.log)
            result.append(HostStatus(plan.mesh, plan.index, state, address, log))
        return result if file is None else with_notices(result, file)

    def watch(self, *, interval: float = 1.0, timeout: float | None = None) -> Iterator[HostStatus]:
        """Yield the status of each host, and then each change, until the job has ended or ``timeout`` seconds are over.

        The hosts are looked at every ``interval`` seconds, or earlier if a scheduler reports a change.

        >>> from monarch_backend.job import SSHJob
        >>> [str(each) for each in SSHJob().add_mesh("trainers", ["node1"]).watch()]
        ['trainers[0]: not started']
        """
        interval, until = check_bounded(interval), time.monotonic() + check_bounded(timeout)
        seen: dict[tuple[str, int], HostStatus] = {}
        while True:
            active = self.active
            for each in self.status():
                if seen.get((each.mesh, each.index)) != each:
                    seen[each.mesh, each.index] = each
                    yield each
            left = until - time.monotonic()
            if left <= 0 or not active:
                return
            self._wait_for_change(min(interval, left))

    def _wait_for_change(self, seconds: float) -> None:
        time.sleep(seconds)

    def query(self, sql: str, *, engine: str = "sqlite") -> QueryResult:
        """Return the answer to a query over what this program and all hosts of the job have recorded.

        docs/operate/telemetry.md has the tables. On each host of another machine a process is started that reads there.
        The answer has all ``hosts``, and for one that cannot be read the reason. With ``engine="duckdb"`` the
        query is one of DuckDB, which has to be installed here but not on the hosts.

        Raises QueryError for a wrong query, JobError if the job's file is invalid, NotImplementedError on systems
        other than Linux, and ImportError if DuckDB is not installed.

        >>> from monarch_backend.actor import this_proc
        >>> from monarch_backend.job import LocalJob
        >>> procs = this_proc()
        >>> len(LocalJob().query("select pid from processes where parent_pid is null"))
        1
        """
        # Imported here, because they import numpy and sqlite3.
        from monarch_backend._job.inspection import Inspection
        from monarch_backend._telemetry.sql import ask

        self._read()
        with Inspection(self.path, [os.getpid()]) as inspection:
            return ask(sql, inspection.recording, inspection, engine)

    def kill(self) -> None:
        """End all hosts that the job has started, from this program or another one.

        This program's processes on them are stopped before. An `apply` or `resize` that still starts hosts gives up.
        Raises JobError, with their names, for hosts that could not be ended: they stay in the job's file. Raises
        JobError, with the pid, if another program does not end its command on the job within minutes.
        """
        with state_file.locked(self.path, "kill", is_kill=True):
            file = self._read()
            if file is None:
                return
            _stop_using(file)
            self._end_all(file)
            self._forget(file)

    def _end_all(self, file: JobFile) -> None:
        states = self._end(file.hosts)
        left = [(host, state) for host, state in zip(file.hosts, states, strict=True) if state != "gone"]
        if left:
            file.hosts = [host for host, _ in left]
            with contextlib.suppress(OSError):  # on a full disk the file keeps the ended ones, too
                state_file.write(self.path, file)
            raise JobError("not ended: " + "; ".join(f"{host.label}: {state}" for host, state in left))

    def _forget(self, file: JobFile) -> None:
        self.path.unlink(missing_ok=True)
        if file.own_secret:
            Path(file.secret_file).unlink(missing_ok=True)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self._description()})"


def check_mesh_name(name: str) -> str:
    """Return ``name``. Raises ValueError where it cannot be an attribute of the job's state."""
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_") or hasattr(JobState, name):
        raise ValueError(f"{name!r} cannot be the name of a mesh, which is an attribute of state()")
    return name


def check_host_count(mesh: str, count: int) -> int:
    """Return ``count``. Raises ValueError where it is not a number of hosts of a mesh."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"mesh {mesh!r}: {count!r} is not a number of hosts; give 1 or more")
    return count


def with_meshes(cls: type[_J], description: Mapping[str, Any], add: Callable[[_J, str, Any], object]) -> _J:
    """Return the job of a description whose meshes are added by ``add(job, name, what)``."""
    job = cls(**{name: value for name, value in description.items() if name != "meshes"})
    for mesh, what in description["meshes"].items():
        add(job, mesh, what)
    return job


def check_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of environment variables. Raises ValueError for a name or value that a shell would not take."""
    if not isinstance(variables, Mapping):
        raise ValueError(f"env={variables!r}: give a mapping of names to texts")
    for name, value in variables.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ValueError(f"{name!r} is not a name of an environment variable")
        if not isinstance(value, str) or "\0" in value:
            raise ValueError(f"env: the value of {name} is {value!r}: give a text")
    return dict(variables)


def read_job_secret(job: str, path: Path, *, is_own: bool) -> bytes:
    """Return the secret of a job. ``is_own``: the job has made its file.

    Raises JobError if there is no such file, and otherwise as `read_secret`.
    """
    try:
        return read_secret(path)
    except FileNotFoundError:
        cure = (
            "it was removed, so end the job by kill(), and start it again"
            if is_own
            else f"create it by (umask 077; openssl rand -hex 32 > {path}), or give neither secret_file= nor "
            "MONARCH_SECRET_FILE, for a new secret"
        )
        raise JobError(f"job {job!r}: there is no secret file {path}: {cure}") from None


def _entry(plan: Plan, up: Up) -> HostEntry:
    assert up.process is not None  # of a detached one
    scheme, _, address = up.address.partition("://")
    host, _, port = address.rpartition(":")
    if plan.reach:
        host = plan.reach
    elif host in ("0.0.0.0", "[::]"):
        host = up.reached or plan.where
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return HostEntry(plan.mesh, plan.index, plan.where, f"{scheme}://{host}:{port}", up.process, up.log)


def _refuse(addresses: Sequence[str]) -> list[bool]:
    """Return for each host whether its address refuses connections. Attaching would wait for its timeout instead."""

    def refuses(address: str) -> bool:
        try:
            socket.create_connection(parse_address(address), 2.0).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
        return False

    return in_parallel(refuses, addresses)


def _lost(mesh: HostMesh) -> bool:
    runtime: Any = program()
    hosts = [runtime.hosts.find(each) for each in mesh.hosts or ()]
    # None: this is a fork of the program that has attached them.
    return any(host is None or host.lost is not None for host in hosts)


def with_notices(states: Sequence[HostStatus], file: JobFile) -> list[HostStatus]:
    """Return states in which hosts that have announced their end to this program are "ending"."""
    notices: dict[tuple[str, int], str] = {}
    places = {(host.mesh, host.incarnation or host.process): host.index for host in file.hosts}
    with _attaching:
        attached = [(name, each, mesh.hosts) for (job, name, each), mesh in _attached.items() if job == file.id]
    for name, incarnations, hosts in attached:
        for incarnation, host_id in zip(incarnations, hosts or (), strict=True):
            runtime: Any = program()
            host, index = runtime.hosts.find(host_id), places.get((name, incarnation))
            if index is not None and host is not None and host.lost is None and host.ending is not None:
                notices[name, index] = str(host.ending)
    return [
        replace(each, state="ending", reason=notices[each.mesh, each.index])
        if each.state == "up" and (each.mesh, each.index) in notices
        else each
        for each in states
    ]


def _stop_using(file: JobFile) -> None:
    """Stop this program's processes on a job's hosts before the hosts end; otherwise their end would be a failure."""
    for mesh in _forget_attached(file):
        if not _lost(mesh):
            with contextlib.suppress(Exception):
                mesh.shutdown().get(timeout=STOP_TIMEOUT_S)


def _forget_attached(file: JobFile) -> list[HostMesh]:
    """Return this program's meshes of a job. The next `Job.state` attaches the hosts anew."""
    with _attaching:
        for key in [key for key in _connecting if key[0] == file.id]:
            del _connecting[key]
        return [_attached.pop(key) for key in list(_attached) if key[0] == file.id]


_Key = tuple[str, str, tuple["Identity | str | None", ...]]
"""A job, a mesh of it, and the starts of its hosts."""

_attached: dict[_Key, HostMesh] = {}
_connecting: dict[_Key, threading.RLock] = {}
"""Locks of hosts that are attached: two threads get the same mesh."""
_attaching = threading.RLock()
"""Guards the two. It is not held while this program connects, or asks a scheduler."""
