"""`SlurmJob`: hosts in an allocation of Slurm, which sbatch submits, or in the allocation that the program is in.

Each node runs node.py. The job's folder, beside the job's file, is on a file system that all nodes have. The secret's
file and the addresses of hosts go through it.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec
from typing_extensions import Self

from monarch_backend._core.state import make_private
from monarch_backend._core.timeouts import check_bounded, check_timeout
from monarch_backend._job import state_file
from monarch_backend._job.base import Job, check_host_count, check_mesh_name, check_variables, with_meshes
from monarch_backend._job.errors import JobError
from monarch_backend._job.scheduled import (
    POLL_INTERVAL_S,
    READY_TIMEOUT_S,
    REASON_TIMEOUT_S,
    NotRemovedError,
    Replica,
    ScheduledJob,
    log,
)
from monarch_backend._job.slurm import commands, messages
from monarch_backend._job.slurm.allocations import Allocation, read_allocations, write_allocations
from monarch_backend._job.slurm.node import NOTICE_SIGNAL, Report, ended_path, read_reports, report_path
from monarch_backend._job.slurm.records import SlurmRecord
from monarch_backend._job.state_file import JobFile
from monarch_backend._transport.network.auth import write_private

QUERY_INTERVAL_S = 2.0
"""Seconds between two questions to slurmctld while the job waits in the queue."""
REMOVE_TIMEOUT_S = 120.0
"""Seconds for a cancelled job to end on all nodes. Slurm kills its processes after KillWait, by default 30 s."""
WITHDRAW_TIMEOUT_S = 10.0
"""Seconds in which a job is looked for whose submission was not answered, to cancel it."""
ACCEPT_TIMEOUT_S = 120.0
"""Seconds from the start of a submission in which Slurm may accept it. sbatch waits for half of them at most."""
SRUN_END_TIMEOUT_S = 10.0
MAX_NOTICE_S = 65535.0
"""Limit of sbatch's --signal."""
STEP_START_TIMEOUT_S = 30.0
"""Seconds for a step to appear in the allocation of this program."""

_RESOURCES = ("partition", "account", "qos", "time", "gpus_per_node", "cpus_per_node", "memory_per_node", "exclusive",
              "constraint", "options")  # fmt: skip

_STATES_WITH_NODES = ("RUNNING", "COMPLETING", "NODE_FAIL")
"""States in which the problems of the job's nodes are looked for."""

_T = TypeVar("_T")
_Component = tuple[dict[str, Any], dict[str, range]]
"""A component of a Slurm job: its resources, and the indices of its hosts by mesh."""


class SlurmJob(ScheduledJob):
    """Hosts in an allocation of Slurm, one on each node. `apply` submits it with sbatch, and waits until it runs.

    Options of sbatch: ``partition``, ``account``, ``qos``, ``constraint``; ``time`` is a timedelta, or a text as Slurm
    takes it, "days-hours:minutes:seconds". ``gpus_per_node`` is a number or "TYPE:NUMBER", ``memory_per_node`` such as
    "64G", ``exclusive`` keeps other jobs off the nodes, and ``options`` are further words such as
    ``["--reservation=mine"]``. `add_mesh` can give a mesh others: such a job is a heterogeneous one. ``requeue``:
    Slurm may start the job again after a failure of a node; without it the job ends then.

    ``setup`` is shell code that runs on the first node before the hosts start, such as "module load cuda". ``env`` is
    added to the environment. The stored script has it, so do not put secrets into it. ``python`` runs on the nodes, by
    default the path of this one. ``listen`` is the address for connections, with the node's name for "{node}":
    "{node}-ib:0" for names on another network.

    ``in_allocation=True``: use the allocation of salloc or sbatch in which this program runs, and submit nothing.
    ``tether``: the hosts end when no controller has been attached for that many seconds, for example because it has
    died. Then the job ends, too. ``ending_notice``: seconds before the time limit in which hosts are "ending".
    ``notice``: seconds before the time limit at which actors receive a `HostEnding`. Slurm may send it a minute
    earlier. A preemption with a grace time begins it, too.
    ``reason_timeout``: seconds in which the failure of a lost host waits for Slurm's reason.

    The folder of the job's file, ``path``, must be on a file system that all nodes have, such as the home directory.
    Other users cannot read it.

    `resize` submits a further Slurm job for new hosts, and gives the nodes of ended hosts back.

    Raises ValueError for invalid values.

    >>> from monarch_backend.job import SlurmJob
    >>> job = SlurmJob(partition="gpu", time="8:00:00", gpus_per_node=8).add_mesh("trainers", 2)
    >>> [str(each) for each in job.status()]
    ['trainers[0]: not started', 'trainers[1]: not started']
    """

    kind: ClassVar[str] = "slurm"

    def __init__(
        self, *, name: str = "job", path: str | os.PathLike[str] | None = None, partition: str | None = None,
        account: str | None = None, qos: str | None = None, time: str | datetime.timedelta | None = None,
        gpus_per_node: int | str | None = None, cpus_per_node: int | None = None, memory_per_node: str | None = None,
        exclusive: bool = False, constraint: str | None = None, options: Sequence[str] = (), requeue: bool = False,
        setup: str = "", env: Mapping[str, str] | None = None, python: str | None = None, listen: str = "{node}:0",
        in_allocation: bool = False, tether: float | None = None, ending_notice: float = 300.0, notice: float = 0.0,
        reason_timeout: float = REASON_TIMEOUT_S, secret_file: str | os.PathLike[str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name, path, secret_file)
        self._resources = _checked({
            "partition": partition, "account": account, "qos": qos, "time": time,
            "gpus_per_node": gpus_per_node, "cpus_per_node": cpus_per_node, "memory_per_node": memory_per_node,
            "exclusive": exclusive, "constraint": constraint, "options": options,
        })  # fmt: skip
        self._requeue, self._env = _check_flag("requeue", requeue), check_variables(env or {})
        self._setup, self._python = _check_text("setup", setup), _check_text("python", python or sys.executable)
        _check_flag("in_allocation", in_allocation)
        if not isinstance(listen, str) or not re.fullmatch(r"\S+:\d+", listen):
            raise ValueError(f"listen={listen!r}: give HOST:PORT, such as '{{node}}:0'")
        if in_allocation and any(self._resources.values()):
            given = ", ".join(name for name, value in self._resources.items() if value)
            raise ValueError(f"{given}: the allocation that the program is in has its resources already")
        self._listen, self._in_allocation = listen, in_allocation
        self._tether = check_timeout(tether, "tether", zero=False)
        self._ending_notice = check_timeout(ending_notice, "ending_notice") or 0.0
        self._notice = check_timeout(notice, "notice") or 0.0
        self._reason_timeout = check_bounded(reason_timeout, "reason_timeout")
        if self._notice > MAX_NOTICE_S:
            raise ValueError(f"notice={notice!r}: Slurm takes at most {MAX_NOTICE_S:g} seconds")
        self._meshes: dict[str, dict[str, Any]] = {}
        self._steps: list[subprocess.Popen[bytes]] = []
        self._growth: Allocation | None = None  # of the resize() that this program is in

    def add_mesh(self, name: str, hosts: int, **resources: Any) -> Self:
        """Add a mesh of ``hosts`` nodes, and return the job. ``resources`` replace those of the job for this mesh.

        Raises ValueError for an invalid name, a mesh that exists, a number below 1, and an unknown or invalid resource.

        >>> from monarch_backend.job import SlurmJob
        >>> job = SlurmJob(time="1:00:00").add_mesh("trainers", 2, gpus_per_node=8).add_mesh("loaders", 1)
        """
        check_host_count(name, hosts)
        if name in self._meshes:
            raise ValueError(f"the job has a mesh {name!r} already")
        if unknown := ", ".join(set(resources) - set(_RESOURCES)):
            raise ValueError(f"mesh {name!r} cannot have {unknown}; it can have {', '.join(_RESOURCES)}")
        if resources and self._in_allocation:
            raise ValueError(f"mesh {name!r}: the allocation that the program is in has its resources already")
        try:
            checked = _checked(resources)
        except ValueError as error:
            raise ValueError(f"mesh {name!r}: {error}") from None
        self._meshes[check_mesh_name(name)] = {"hosts": hosts, "resources": checked}
        return self

    # ---- description

    def _sizes(self) -> Mapping[str, int]:
        return {mesh: what["hosts"] for mesh, what in self._meshes.items()}

    def _set_size(self, mesh: str, count: int) -> None:
        self._meshes[mesh]["hosts"] = count

    def _description(self) -> dict[str, Any]:
        return {
            **self._resources, "requeue": self._requeue, "setup": self._setup, "env": self._env,
            "python": self._python, "listen": self._listen, "in_allocation": self._in_allocation,
            "tether": self._tether, "ending_notice": self._ending_notice, "notice": self._notice,
            "reason_timeout": self._reason_timeout, "meshes": self._meshes,
        }  # fmt: skip

    @classmethod
    def _from_description(cls, description: dict[str, Any]) -> Job:
        return with_meshes(
            cls, description, lambda job, mesh, what: job.add_mesh(mesh, what["hosts"], **what["resources"])
        )

    def _groups(self, hosts: Mapping[str, range]) -> list[_Component]:
        """Return the components of a Slurm job with these hosts."""
        groups: list[_Component] = []
        for mesh, indices in hosts.items():
            resources = {**self._resources, **self._meshes[mesh]["resources"]}
            for its_resources, meshes in groups:
                if its_resources == resources:
                    meshes[mesh] = indices
                    break
            else:
                groups.append((resources, {mesh: indices}))
        return groups

    @property
    def _folder(self) -> Path:
        """The folder of the submitted job, also where its file is a copy that `dump` has written."""
        file = self._read()
        given = None if file is None else file.submitted.get("folder")
        return self.path.with_name(f"{self.path.stem}.slurm") if given is None else Path(given)

    # ---- submission

    def _submit(self, file: JobFile, secret: bytes) -> dict[str, Any]:  # noqa: ARG002
        make_private(self._folder)
        name = _slurm_name(file)
        if self._in_allocation:
            return self._start_step(file, name)
        # A program may have died before it wrote the number. Two open submissions would become two jobs.
        seconds = WITHDRAW_TIMEOUT_S if _accept_time_left(file) else 0.0
        if found := _search(lambda: commands.find_by_name(name), seconds):
            number = found[0]
        elif left := _accept_time_left(file):
            raise NotRemovedError(f"{_not_answered(name)}. Call apply() again in {left} s, or kill()")
        else:
            _remove_reports(self._folder)
            (self._folder / "batch.log").unlink(missing_ok=True)
            for folder in _further_folders(self._folder):
                shutil.rmtree(folder, ignore_errors=True)
            hosts = {mesh: range(count) for mesh, count in self._sizes().items()}
            words, script = self._sbatch_command(file, hosts, self._folder), self._script(file, hosts, self._folder)
            file.unanswered_at = time.time()  # from here on Slurm may have the job
            state_file.write(self.path, file)
            try:
                number = _sbatch(words, script)
            except BaseException as error:  # Ctrl-C, too, after which it may have been submitted
                _withdraw(file, error)
                raise
        return {"job": number, "folder": str(self._folder)}

    def _sbatch_command(self, file: JobFile, hosts: Mapping[str, range], folder: Path) -> list[str]:
        words = ["sbatch", "--parsable"]
        for offset, (resources, meshes) in enumerate(self._groups(hosts)):
            words += [":"] if offset else []
            words += [f"--job-name={_slurm_name(file)}", f"--comment=monarch_backend {file.id}"]
            words += [f"--output={folder}/batch.log", "--open-mode=append"]
            words += ["--requeue" if self._requeue else "--no-requeue"]
            words += [f"--signal={NOTICE_SIGNAL.name[3:]}@{math.ceil(self._notice)}"] if self._notice else []
            words += [f"--nodes={_count(meshes)}", "--ntasks-per-node=1", *_sbatch_words(resources)]
        return words

    def _script(self, file: JobFile, hosts: Mapping[str, range], folder: Path) -> str:
        """Return the script of the job. It contains no secret: sites store scripts, and administrators read them."""
        groups = self._groups(hosts)
        lines = ["#!/bin/bash", f'echo "{messages.START_MARK}$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}"', self._setup]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self._env.items()]
        # Without these, a host gets the CPUs of one task instead of all CPUs of the job on its node.
        lines += ["unset SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_CPU_BIND"]
        for offset, (_, meshes) in enumerate(groups):
            group = [f"--het-group={offset}"] if len(groups) > 1 else []
            lines.append(f"{shlex.join(self._srun(file, meshes, folder, group))} &")
        return "\n".join([*lines, "wait", ""])

    def _srun(self, file: JobFile, hosts: Mapping[str, range], folder: Path, options: Sequence[str]) -> list[str]:
        nodes = _count(hosts)
        words = ["srun", *options, f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--cpu-bind=none"]
        # A host that ends must not end the others.
        words += ["--kill-on-bad-exit=0", "--wait=0", "--input=none", "--label", self._python]
        words += ["-m", "monarch_backend._job.slurm.node", "--folder", str(folder), "--listen", self._listen]
        meshes = ",".join(f"{mesh}={indices.start}:{indices.stop}" for mesh, indices in hosts.items())
        words += ["--secret-file", file.secret_file, "--meshes", meshes]
        words += ["--notice", str(self._notice)] if self._notice else []
        return words + ([] if self._tether is None else ["--tether", str(self._tether)])

    def _start_step(self, file: JobFile, name: str) -> dict[str, Any]:
        """Start the hosts as a step of the allocation that this program is in. The step outlives the program."""
        number = os.environ.get("SLURM_JOB_ID")
        if not number:
            raise JobError(
                "in_allocation: this program is in no allocation (SLURM_JOB_ID is not set); use salloc or sbatch"
            )
        if os.environ.get("SLURM_HET_SIZE"):
            raise JobError("in_allocation: the allocation is a heterogeneous job, which is not supported")
        meshes = self._sizes()
        for variable in ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES"):
            if not re.fullmatch(r"[0-9]+", os.environ.get(variable, "0")):
                raise JobError(f"in_allocation: {variable}={os.environ[variable]!r} is not a number; Slurm sets it")
        there, wanted = int(os.environ.get("SLURM_JOB_NUM_NODES", 0)), sum(meshes.values())
        if wanted > there:
            raise JobError(f"in_allocation: the job has {wanted} hosts, and the allocation {number} has {there} nodes")
        folder = str(self._folder)
        if (found := commands.find_step(int(number), name)) is not None:  # of a program that died before it wrote this
            return {"job": int(number), "step": found, "folder": folder}
        _remove_reports(self._folder)
        hosts = {mesh: range(count) for mesh, count in meshes.items()}
        words = self._srun(
            file, hosts, self._folder, [f"--jobid={number}", f"--job-name={name}", "--overlap", "--mem=0"]
        )
        kept = {"SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_CLUSTERS"}
        environment = {k: v for k, v in os.environ.items() if k in kept or not re.match(r"SLURM_|PMI_|PMIX_", k)}
        with open(self._folder / "batch.log", "wb") as log:
            step = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**environment, **self._env},
            )  # fmt: skip
        self._steps.append(step)
        until = time.monotonic() + STEP_START_TIMEOUT_S
        try:
            while (found := commands.find_step(int(number), name)) is None:
                self._stop_if_killed()
                if step.poll() is not None or time.monotonic() > until:
                    raise JobError(
                        f"srun could not start the hosts: {_batch_log(self._folder)[-500:] or 'it did not end in time'}"
                    )
                time.sleep(0.1)
        except BaseException:  # Ctrl-C, too
            self._steps.remove(step)
            _reap(step)
            raise
        return {"job": int(number), "step": found, "folder": folder}

    # ---- size

    def resize(self, mesh: str, count: int, timeout: float = READY_TIMEOUT_S) -> None:
        """Start or end hosts of a mesh until it has ``count`` hosts, as `Job.resize` does.

        A further Slurm job with the options of the mesh gets the new hosts, and has its own time limit. If not all
        hosts listen within ``timeout`` seconds, or after Ctrl-C, it is cancelled, and the mesh has its former size.

        Hosts with the highest indices are ended first. Slurm gets their nodes back at once, except from a heterogeneous
        job, from one whose hosts do not listen yet, and where Slurm refuses it, which is logged. Then it gets them when
        the job ends.

        Raises ValueError and JobError as `Job.resize` does. Raises JobError with Slurm's reason if the further job is
        refused or does not start in time. Raises JobError for a job in the program's own allocation.

        >>> from monarch_backend.job import SlurmJob
        >>> job = SlurmJob(time="1:00:00").add_mesh("trainers", 2)
        >>> job.resize("trainers", 3)
        >>> [str(each) for each in job.status()]
        ['trainers[0]: not started', 'trainers[1]: not started', 'trainers[2]: not started']
        """
        self._growth = None
        try:
            super().resize(mesh, count, timeout)
        except BaseException:  # Ctrl-C, too
            self._withdraw_growth(mesh)
            raise
        finally:
            self._growth = None

    def _scale(self, file: JobFile, mesh: str, count: int) -> None:
        if self._in_allocation:
            raise JobError(
                f"job {self.name!r} runs in an allocation of the program, whose hosts are one step: end the job by "
                "kill(), and apply() one with other numbers"
            )
        if not file.submitted:
            raise JobError(f"job {self.name!r} has no number at Slurm yet: call apply() first, or kill()")
        self._cancel_strays(file)
        allocations = read_allocations(file)
        there = max(each.hosts[mesh].stop for each in allocations if mesh in each.hosts)
        if count > there and (left := _accept_time_left(file)):
            raise JobError(f"{_not_answered(_slurm_name(file))}. Call resize() again in {left} s, or kill()")
        if count > there:
            self._growth = self._submit_further(file, mesh, range(there, count))
            write_allocations(file, [*allocations, self._growth])
        elif count < there:
            self._shrink(allocations, mesh, count)
            smaller = [each.without(mesh, count) for each in allocations]
            write_allocations(file, [each for each in smaller if not each.is_empty])

    def _shrink(self, allocations: Sequence[Allocation], mesh: str, count: int) -> None:
        """End the hosts of a mesh from index ``count`` on. Cancel the Slurm jobs that have no other hosts."""
        cancelled = []
        for each in reversed(allocations):
            left = each.without(mesh, count)
            if left.is_empty:
                commands.cancel(str(each.number))
                cancelled.append(each.number)
            elif left != each:
                self._end_some(each, left)
        _wait_until_ended(functools.partial(_jobs_that_run, cancelled))

    def _end_some(self, before: Allocation, left: Allocation) -> None:
        """End hosts of a Slurm job, and return when they have ended.

        A job that runs gives their nodes back. Otherwise the nodes stay allocated until it ends: a job that waits or
        is requeued starts with the number of nodes in its script, and components of a heterogeneous job are fixed.
        """
        number = before.number
        stops = {mesh: indices.stop for mesh, indices in left.hosts.items()}
        write_private(ended_path(before.folder, number), msgspec.json.encode(stops))
        records = commands.show(number)
        if not any(each.state == "RUNNING" for each in records):
            return
        start = f"{number}.{records[0].restarts}"
        running = {where: each for where, each in read_reports(before.folder).items() if each.start == start}
        kept = [running[where].node for where in left.places if where in running]
        if len(records) == 1 and len(kept) == len(left.places):
            if set(commands.node_names(records[0].nodes)) <= set(kept):
                return
            try:
                commands.keep_nodes(number, kept)
            except JobError as refusal:
                log.warning("job %s: nodes of ended hosts stay allocated until Slurm job %d ends, because Slurm does "
                            "not take them back: %s", self.name, number, refusal)  # fmt: skip
            else:
                return
        surplus = [where for where in before.places if where not in left.places and where in running]

        def those_that_run() -> str:
            reports = read_reports(before.folder)
            current = [(where, reports[where]) for where in surplus if where in reports]
            left = [where for where, report in current if report.start == start and not report.ended]
            if not left or not _jobs_that_run([number]):
                return ""
            return ", ".join(f"{mesh}[{index}]" for mesh, index in left)

        _wait_until_ended(those_that_run)

    def _submit_further(self, file: JobFile, mesh: str, indices: range) -> Allocation:
        """Submit a Slurm job for further hosts of a mesh. After an error there is none, or `unanswered_at` is set."""
        hosts, folder = {mesh: indices}, _new_further_folder(self._folder)
        words, script = self._sbatch_command(file, hosts, folder), self._script(file, hosts, folder)
        file.unanswered_at = time.time()
        state_file.write(self.path, file)
        try:
            number = _sbatch(words, script)
        except BaseException as error:  # Ctrl-C, too, after which it may have been submitted
            is_open = not isinstance(error, JobError) or commands.is_outage(error)
            advice = "Slurm may still accept the job for the new hosts: resize() and kill() cancel it then"
            try:
                self._cancel_strays(file, WITHDRAW_TIMEOUT_S if is_open else 0.0)
            except JobError as left:
                is_open, advice = True, f"{advice} ({left})"
            if not is_open:
                file.unanswered_at = 0.0
            state_file.write(self.path, file)
            if file.unanswered_at and isinstance(error, JobError):
                raise JobError(f"{error}; {advice}") from error
            if file.unanswered_at:
                log.warning("job %s: %s", self.name, advice)
            raise
        file.unanswered_at = 0.0
        return Allocation(number, folder, hosts, is_further=True)

    def _cancel_strays(self, file: JobFile, seconds: float = 0.0) -> None:
        """Cancel a Slurm job that the file does not list, if a growth may have submitted one.

        Slurm has accepted it after the growth was given up, or a program has died before it wrote its number.
        """
        if not file.unanswered_at:
            return
        strays = _search(functools.partial(_find_strays, file), seconds)
        for each in strays:
            commands.cancel(str(each))
        if strays:
            file.unanswered_at = 0.0

    def _withdraw_growth(self, mesh: str) -> None:
        """Cancel the further Slurm job of a growth that has failed, and give the mesh its former size."""
        growth = self._growth
        if growth is None:
            return
        try:
            with state_file.locked(self.path, "resize"):
                file = self._read()
                if file is None:  # kill() has ended it
                    return
                others = [each for each in read_allocations(file) if each.number != growth.number]
                size, first = file.description["meshes"][mesh], growth.hosts[mesh].start
                if any(each.hosts.get(mesh, range(0)).stop > first for each in others):
                    self._set_size(mesh, size["hosts"])
                    log.warning("job %s: mesh %s keeps the hosts of this growth, because another program has added "
                                "hosts after them", self.name, mesh)  # fmt: skip
                    return
                commands.cancel(str(growth.number))
                write_allocations(file, others)
                size["hosts"] = min(size["hosts"], first)
                self._set_size(mesh, size["hosts"])
                file.hosts = [each for each in file.hosts if each.mesh != mesh or each.index < first]
                file.unanswered_at = 0.0
                state_file.write(self.path, file)
            _wait_until_ended(functools.partial(_jobs_that_run, [growth.number]))
        except (JobError, OSError) as left:
            log.warning("job %s: Slurm job %d of a growth that has failed may run, until kill(): %s",
                        self.name, growth.number, left)  # fmt: skip

    # ---- search

    def _find(self, file: JobFile) -> Sequence[Replica]:
        allocations = read_allocations(file)
        records = [{each.offset: each for each in commands.show(one.number)} for one in allocations]
        step = file.submitted.get("step")
        step_runs = step is None or commands.find_step(file.submitted["job"], _slurm_name(file)) == step
        used = [each.nodes for some in records for each in some.values() if each.state in _STATES_WITH_NODES]
        problems = commands.node_problems(nodes) if (nodes := ",".join(filter(None, used))) else {}
        found = []
        for allocation, its_records in zip(allocations, records, strict=True):
            reports = read_reports(allocation.folder)
            for offset, (_, meshes) in enumerate(self._groups(allocation.hosts)):
                record = its_records.get(offset, SlurmRecord(allocation.number, "UNKNOWN"))
                start = f"{allocation.number}.{record.restarts}"
                output = functools.cache(functools.partial(_last_output, allocation, record))  # it may be long
                for mesh, index in ((mesh, index) for mesh, indices in meshes.items() for index in indices):
                    report = reports.get((mesh, index))
                    if report is not None and report.start != start:
                        report = None  # of the job before it was requeued
                    words = functools.partial(_last_words, allocation, output)
                    state, reason = self._state_of(record, report, step_runs, problems, output, words)
                    found.append(_replica(allocation, mesh, index, start, state, reason, report))
        return found

    def _state_of(
        self, record: SlurmRecord, report: Report | None, step_runs: bool, problems: Mapping[str, str],
        output: Callable[[], str], last_words: Callable[[], str],
    ) -> tuple[str, str]:  # fmt: skip
        """Return state and reason of one host. ``output`` returns the output of the job's last start.

        ``last_words`` returns its end, for a host that has not reported.
        """
        if record.state == "UNKNOWN":
            return "gone", f"Slurm does not know its job {record.number} any more"
        if record.has_ended:
            nodes = problems.values() if record.state == "NODE_FAIL" else ()
            rest = [report.ended] if report and report.ended else [] if report else [last_words()]
            return "gone", "; ".join([str(record), *nodes, *messages.reasons(output()), *rest])
        if record.state in ("COMPLETING", "SUSPENDED"):  # how a completing job has ended is known when it is complete
            return f"unknown: it is {record.state.lower()}", "; ".join([str(record), *messages.reasons(output())])
        if record.state != "RUNNING":
            again = f", requeued {record.restarts} times" if record.restarts else ""
            return "pending", "; ".join([f"{record}{again}", *messages.reasons(output())])
        if report is not None and report.ended:
            preempted = [self._ending(record)] if record.preempt_time else []
            why = [*preempted, *messages.reasons(output(), report.node)]
            return "gone", "; ".join([f"{report.ended} on node {report.node}", *why])
        if not step_runs:
            why = messages.reasons(output(), report.node if report else "")
            return "gone", "; ".join([f"its step in Slurm job {record.number} has ended", *why])
        if report is None or not report.address:
            return "pending", f"{record} on {record.nodes}; its host does not listen yet"
        problem = problems.get(report.node, "")
        if end := self._ending(record):
            return "ending", "; ".join(filter(None, [end, problem]))
        return "up", problem

    def _ending(self, record: SlurmRecord) -> str:
        """Return why the job ends, by preemption or within `ending_notice` seconds, and when; "" if it goes on."""
        at = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(record.end_time))
        if record.preempt_time:  # scontrol does not print the end of a job without a time limit
            return f"its job is preempted, and ends at {at}" if record.end_time else "its job is preempted"
        if record.end_time and record.end_time - time.time() <= self._ending_notice:
            return f"its time limit ends at {at}"
        return ""

    def _wait_for_change(self, seconds: float) -> None:
        """Wait for a report of a node, or for the time to ask slurmctld again."""
        until = time.monotonic() + (QUERY_INTERVAL_S if seconds == POLL_INTERVAL_S else seconds)
        before = _listing(self._folder)
        while (left := until - time.monotonic()) > 0 and _listing(self._folder) == before:
            time.sleep(min(0.1, left))

    # ---- end

    def _remove(self, file: JobFile) -> None:
        number, step, name = file.submitted.get("job"), file.submitted.get("step"), _slurm_name(file)
        is_open = file.unanswered_at or (file.is_begun and number is None)
        seconds = WITHDRAW_TIMEOUT_S if is_open else 0.0
        if step is not None or (number is None and self._in_allocation):
            step = step or _search(lambda: commands.find_step(None, name), seconds)
            if step is None:
                return
            commands.cancel(step)
            ended = functools.partial(_step_that_runs, int(step.partition(".")[0]), name)
        else:
            known = [each.number for each in read_allocations(file)]
            for each in known:
                commands.cancel(str(each))
            found = _search(functools.partial(_find_strays, file), seconds)
            commands.cancel(f"--name={name}")  # also a job of an earlier submission that was accepted late
            if not found and (left := _accept_time_left(file)):
                raise JobError(f"{_not_answered(name)}. It was not found yet: call kill() again in {left} s")
            ended = functools.partial(_jobs_that_run, {*known, *found})
        _wait_until_ended(ended)
        while self._steps:
            _reap(self._steps.pop(), is_ending=True)

    def _forget(self, file: JobFile) -> None:
        folder = self._folder
        super()._forget(file)
        for each in (folder, *_further_folders(folder)):
            _remove_reports(each)


def _count(hosts: Mapping[str, range]) -> int:
    return sum(len(indices) for indices in hosts.values())


def _replica(
    allocation: Allocation, mesh: str, index: int, start: str, state: str, reason: str, report: Report | None
) -> Replica:
    report = report or Report(start, "")
    return Replica(
        mesh, index, state, f"{start}.{mesh}.{index}", report.node, report.address,
        report.log or str(allocation.folder / "batch.log"), reason, is_final=state == "gone",
    )  # fmt: skip


def _last_words(allocation: Allocation, output: Callable[[], str]) -> str:
    """Return the last lines of the script's output, for a job whose hosts have not reported."""
    return output()[-500:] or f"is {allocation.folder} on a file system that all nodes have?"


def _last_output(allocation: Allocation, record: SlurmRecord) -> str:
    """Return the output of the last start of a job. A job that is requeued is counted before it starts again."""
    start = f"{allocation.number}.{record.restarts}"
    output = "" if record.state == "PENDING" else _batch_log(allocation.folder, start)
    if not output and record.restarts and record.state in ("PENDING", "COMPLETING"):
        return _batch_log(allocation.folder, f"{allocation.number}.{record.restarts - 1}")
    return output


def _batch_log(folder: Path, start: str = "") -> str:
    """Return Slurm's messages in the output of a start of the job's script and of srun, and the output's end."""
    with contextlib.suppress(OSError):
        output = messages.of_start((folder / "batch.log").read_text(errors="replace"), start)
        return messages.shorten(output.strip())
    return ""


def _step_that_runs(number: int, name: str) -> str:
    step = commands.find_step(number, name)
    return f"step {step} runs" if step else ""


def _jobs_that_run(numbers: Collection[int]) -> str:
    return "; ".join(
        f"{each}{' is completing' if each.is_completing else ''}"
        for number in numbers
        for each in commands.show(number)
        if each.is_completing or not each.has_ended
    )


def _wait_until_ended(ended: Callable[[], str]) -> None:
    """Wait until ``ended`` returns "". Raises JobError with what it returns instead after `REMOVE_TIMEOUT_S`."""
    until = time.monotonic() + REMOVE_TIMEOUT_S
    while why := ended():
        if time.monotonic() > until:
            raise JobError(f"not ended within {REMOVE_TIMEOUT_S:g} s: {why}")
        time.sleep(0.2)


def _search(find: Callable[[], _T], seconds: float) -> _T:
    """Return what ``find`` returns, once or until it finds something within ``seconds``."""
    until = time.monotonic() + seconds
    while not (found := find()) and time.monotonic() < until:
        time.sleep(0.2)
    return found


def _find_strays(file: JobFile) -> list[int]:
    """Return the numbers of Slurm jobs of this job that its file does not list."""
    known = {each.number for each in read_allocations(file)}
    return [each for each in commands.find_by_name(_slurm_name(file)) if each not in known]


def _accept_time_left(file: JobFile) -> int:
    """Return the seconds in which Slurm may still accept a submission without a known outcome; 0 if there is none."""
    age = abs(time.time() - file.unanswered_at)  # another machine's clock may differ
    return max(0, math.ceil(ACCEPT_TIMEOUT_S - age))


def _not_answered(name: str) -> str:
    return f"Slurm may still accept {name}, whose submission was not answered"


def _withdraw(file: JobFile, error: BaseException) -> None:
    """Cancel a job whose submission has failed. slurmctld may accept it later than sbatch has waited.

    `JobFile.unanswered_at` is 0 afterwards if Slurm cannot accept it any more. Otherwise raises NotRemovedError, or
    after an interruption logs what to do, so that the interruption goes on as itself.
    """
    name = _slurm_name(file)
    is_interrupted = not isinstance(error, JobError)
    is_open = is_interrupted or commands.is_outage(error)
    if is_interrupted:
        log.warning("looking for the submission of %s for %g s, to cancel it", name, WITHDRAW_TIMEOUT_S)
    advice = f"{name} may be submitted: end it with kill()"
    try:
        found = _search(lambda: commands.find_by_name(name), WITHDRAW_TIMEOUT_S if is_open else 0.0)
        commands.cancel(f"--name={name}")
    except JobError as left:
        advice = f"{advice} ({left})"
    except BaseException:  # a second Ctrl-C
        log.warning("%s", advice)
        raise
    else:
        if found or not is_open:
            file.unanswered_at = 0.0
            return
        advice = f"Slurm may still accept {name}: apply() finds it then, and kill() ends it"
    if not is_interrupted:
        raise NotRemovedError(f"{error}; {advice}") from error
    log.warning("%s", advice)


def _reap(step: subprocess.Popen[bytes], *, is_ending: bool = False) -> None:
    """End a step by its srun, which passes SIGTERM to the hosts, and return when srun has ended.

    With ``is_ending`` srun may first end by itself. If it cannot be killed, as in a system call on a lost file system,
    return without it.
    """
    for end in (*([lambda: None] if is_ending else []), step.terminate, step.kill):
        end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            step.wait(SRUN_END_TIMEOUT_S)
            return
    log.warning("srun (pid %d) does not end, although it was killed", step.pid)


def _remove_reports(folder: Path) -> None:
    """Remove the addresses of hosts. Their logs stay until the next submission under this name."""
    for mesh, index in read_reports(folder):
        report_path(folder, mesh, index).unlink(missing_ok=True)
    for ended in folder.glob("ended-*.json"):
        ended.unlink(missing_ok=True)


def _further_folders(folder: Path) -> list[Path]:
    """Return the folders of further Slurm jobs in the folder of a job."""
    with contextlib.suppress(OSError):
        return [each for each in folder.iterdir() if re.fullmatch(r"[0-9]+", each.name)]
    return []


def _new_further_folder(folder: Path) -> Path:
    """Make the folder of a further Slurm job. An earlier one may still be in use by a job that Slurm accepts late."""
    numbers = [int(each.name) for each in _further_folders(folder)]
    new = folder / str(max(numbers, default=0) + 1)
    make_private(new)
    return new


def _slurm_name(file: JobFile) -> str:
    """Return the name of the job or step at Slurm. It has the job's id, so that it is found without its number."""
    return f"monarch-{file.name}-{file.id}"


def _sbatch(words: Sequence[str], script: str) -> int:
    """Submit a job, and return its number."""
    output = commands.run(words, script)
    if not (found := re.match(r"\s*(\d+)", output)):
        raise JobError(f"sbatch has printed no number of a job: {output.strip()!r}")
    return int(found[1])


def _sbatch_words(resources: Mapping[str, Any]) -> list[str]:
    words = []
    for option, value in (
        ("partition", resources["partition"]), ("account", resources["account"]), ("qos", resources["qos"]),
        ("time", resources["time"]), ("constraint", resources["constraint"]), ("mem", resources["memory_per_node"]),
        ("cpus-per-task", resources["cpus_per_node"]),
        ("gres", f"gpu:{resources['gpus_per_node']}" if resources["gpus_per_node"] else None),
    ):  # fmt: skip
        words += [] if value is None else [f"--{option}={value}"]
    return [*words, *(["--exclusive"] if resources["exclusive"] else []), *resources["options"]]


def _time_text(value: str | datetime.timedelta | None) -> str | None:
    if isinstance(value, datetime.timedelta):
        seconds = math.ceil(value.total_seconds())
        if seconds <= 0:
            raise ValueError(f"time={value!r}: give more than 0 seconds")
        return f"{seconds // 86400}-{seconds // 3600 % 24:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    if value is not None and not (isinstance(value, str) and re.fullmatch(r"[\d:-]+|UNLIMITED", value)):
        raise ValueError(f"time={value!r}: give a timedelta, or a text such as '1-12:00:00'")
    return value


def _checked(resources: Mapping[str, Any]) -> dict[str, Any]:
    """Return resources as a job's file has them. Raises ValueError for values that sbatch would not take as meant."""
    checked = dict(resources)
    for name, value in resources.items():
        if name == "time":
            checked[name] = _time_text(value)
        elif name == "options":
            checked[name] = _words(value)
        elif name == "exclusive":
            _check_flag(name, value)
        elif value is not None:
            _CHECKS.get(name, _check_name)(name, value)
    return checked


def _check_flag(name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: give True or False")
    return value


def _check_text(name: str, value: str) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(f"{name}={value!r}: give a text")
    return value


def _check_name(name: str, value: str) -> None:
    if not isinstance(value, str) or not value.strip() or "\n" in value or "\0" in value:
        raise ValueError(f"{name}={value!r}: give a text on one line, or None")


def _check_gpus(name: str, value: int | str) -> None:
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if not is_number and not (isinstance(value, str) and re.fullmatch(r"([\w.-]+:)?[0-9]+", value)):
        raise ValueError(f"{name}={value!r}: give a number, or a text such as 'a100:8'")


def _check_cpus(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}: give 1 or more")


def _check_memory(name: str, value: str) -> None:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9]+([KMGT]B?)?", value, re.IGNORECASE):
        raise ValueError(f"{name}={value!r}: give a text such as '64G'")


_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "gpus_per_node": _check_gpus, "cpus_per_node": _check_cpus, "memory_per_node": _check_memory,
}  # fmt: skip


def _words(options: Sequence[str]) -> list[str]:
    if isinstance(options, str) or not isinstance(options, Sequence) or not all(isinstance(w, str) for w in options):
        raise ValueError(f"options={options!r}: options is a list of words, such as ['--reservation=mine']")
    return list(options)


def _listing(folder: Path) -> list[tuple[str, float]]:
    """Return path and time of change of the files in the folder of a job, and in those of its further Slurm jobs."""
    found = []
    for each in (folder, *_further_folders(folder)):
        with contextlib.suppress(OSError):
            found += [(entry.path, entry.stat().st_mtime) for entry in os.scandir(each)]
    return sorted(found)
