"""Base class of jobs whose hosts a scheduler starts, such as Kubernetes or Slurm.

The job is submitted once. Then the scheduler is asked where its hosts listen, and why others do not run yet.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from monarch_backend._core.timeouts import check_bounded
from monarch_backend._hosts.attach import expect_successors, explain_losses
from monarch_backend._hosts.loss_reasons import LossReason, LossReasons
from monarch_backend._job import state_file
from monarch_backend._job.base import HostStatus, Job, JobState, Plan, read_job_secret, with_notices
from monarch_backend._job.errors import JobError
from monarch_backend._job.state_file import HostEntry, JobFile
from monarch_backend._mesh.host_mesh import HostMesh

log = logging.getLogger("monarch_backend")

READY_TIMEOUT_S = 600.0
POLL_INTERVAL_S = 0.5
"""Seconds between two questions to a scheduler that does not report changes by itself."""

ATTACH_TIMEOUT_S = 15.0
"""Seconds of one attempt to attach all hosts. Then the scheduler is asked again where they are."""
REASON_TIMEOUT_S = 2.0
"""Seconds in which a scheduler is asked why a host is lost. The loss is reported then."""
REASON_INTERVAL_S = 0.2
SUCCESSOR_TIMEOUT_S = 60.0
"""Seconds in which a scheduler has to replace a lost host. Then its ranks are restarted on another host."""
SUCCESSOR_ATTACH_TIMEOUT_S = 5.0
SUCCESSOR_INTERVAL_S = 0.5


_BEGUN = "unknown: a program submits it, or has died while it did: then kill() removes what there is"


class NotRemovedError(JobError):
    """A submission has failed, and parts of it may run. The job's file stays, so that `kill` can end them."""


@dataclass(frozen=True)
class Replica:
    """One host as its scheduler sees it. ``state``: one of those of `HostStatus`.

    ``incarnation`` is the scheduler's identity of this start, such as a pod's uid. ``where`` names the pod or node.
    ``address``, "tcp://HOST:PORT", is "" until the host listens. ``is_final``: its state does not change any more.
    """

    mesh: str
    index: int
    state: str
    incarnation: str = ""
    where: str = ""
    address: str = ""
    log: str = ""
    reason: str = ""
    is_final: bool = False

    @property
    def status(self) -> HostStatus:
        return HostStatus(self.mesh, self.index, self.state, self.address, self.log, self.reason)

    @property
    def entry(self) -> HostEntry:
        return HostEntry(self.mesh, self.index, self.where, self.address, None, self.log, self.incarnation)


class ScheduledJob(Job):
    """Job whose hosts a scheduler starts. `apply` submits it, and waits until all hosts listen.

    A subclass submits, looks for and removes the whole job in four methods. ``poll_interval_s``: seconds until the
    scheduler is asked again, if it does not report a change.
    """

    poll_interval_s: ClassVar[float] = POLL_INTERVAL_S
    replaces_hosts: ClassVar[bool] = False
    """Whether the scheduler starts another host in the place of a lost one, under its index."""
    _reason_timeout: float = REASON_TIMEOUT_S
    _loss_reasons: LossReasons[HostEntry] | None = None
    _searching: ClassVar[threading.Lock] = threading.Lock()  # of all jobs: guards what their searches know
    _answer: tuple[list[Replica], JobError | None] = ([], None)
    _answered_at: float = -math.inf  # monotonic time

    # ---- of each kind

    @abstractmethod
    def _sizes(self) -> Mapping[str, int]:
        """Return the number of hosts of each mesh."""

    @abstractmethod
    def _submit(self, file: JobFile, secret: bytes) -> dict[str, Any]:
        """Submit the whole job, and return the names that the scheduler has given to it, for `JobFile.submitted`.

        Raises JobError with the scheduler's reason, after it has removed what it has submitted. Raises NotRemovedError
        if it could not remove it. After any error with `JobFile.unanswered_at` the job's file stays, too.
        """

    @abstractmethod
    def _find(self, file: JobFile) -> Sequence[Replica]:
        """Return the replicas that the scheduler knows. Raises JobError if it cannot be asked."""

    @abstractmethod
    def _remove(self, file: JobFile) -> None:
        """Remove the whole job, and return when its hosts have ended. Raises JobError with the names of the rest."""

    def _scale(self, file: JobFile, mesh: str, count: int) -> None:  # noqa: ARG002
        """Ask the scheduler for another number of hosts of a mesh."""
        raise JobError(f"a {type(self).__name__} cannot be resized after it was submitted")

    def _correct(self, file: JobFile, replicas: Sequence[Replica], until: float) -> None:
        """Ask the scheduler anew for hosts that it cannot start as they were asked for. Do nothing by default.

        It is called while a program waits for the hosts, until the monotonic time ``until``. No lock is held.
        """

    # ---- of all

    def _plans(self) -> list[Plan]:
        return [Plan(mesh, index, "", ()) for mesh, count in self._sizes().items() for index in range(count)]

    def apply(self, timeout: float = READY_TIMEOUT_S, *, wait: bool = True) -> None:
        """Submit the job unless it was submitted before, and return when all hosts listen.

        With ``wait=False`` return after the submission; `state` waits then. What the hosts wait for is logged when it
        changes, in the scheduler's words.

        Raises JobError, with these reasons, if the job is refused, if a host cannot start, or if not all hosts listen
        within ``timeout`` seconds. A job that was submitted stays then: `kill` removes it. Raises ValueError for a job
        without hosts or a negative timeout.
        """
        until = time.monotonic() + check_bounded(timeout)
        if not self._plans():
            raise ValueError("the job has no hosts: give it some")
        with state_file.locked(self.path, "apply", until):
            file = self._own_file()
            if not file.submitted:
                self._submit_new(file)
        if wait:
            self._wait_until_up(file.id, until)

    def _submit_new(self, file: JobFile) -> None:
        # The file is written before the job is submitted, and tells by its id what to remove if this program dies now.
        file.is_begun = True
        state_file.write(self.path, file)
        try:
            secret = read_job_secret(self.name, Path(file.secret_file), is_own=file.own_secret)
            file.submitted = self._submit(file, secret)
        except NotRemovedError:
            raise
        except BaseException:  # Ctrl-C, too
            if not file.unanswered_at:
                self._forget(file)
            raise
        file.unanswered_at = 0.0
        state_file.write(self.path, file)

    def _wait_until_up(self, job: str, until: float) -> None:
        """Wait until all hosts listen, and write their addresses to the file. Meanwhile `kill` can end the job."""
        logged: list[str] = []
        while True:
            file = self._read()
            if file is None or file.id != job:
                raise JobError(f"job {self.name!r} was ended while this program waited for its hosts")
            replicas = self._known(file)
            waiting = [each for each in replicas if each.state not in ("up", "ending")]
            if not waiting:
                break
            reasons = [str(each.status) for each in waiting]
            if any(each.is_final for each in waiting):
                raise JobError(f"job {self.name!r} cannot run: {'; '.join(reasons)}")
            if time.monotonic() > until:
                raise JobError(f"job {self.name!r}: not all hosts run in time: {'; '.join(reasons)}")
            self._correct(file, replicas, until)
            if reasons != logged:
                logged = reasons
                log.info("job %s waits: %s", self.name, "; ".join(reasons))
            self._wait_for_change(min(self.poll_interval_s, max(0.0, until - time.monotonic())))
        hosts = [each.entry for each in replicas]
        if hosts != file.hosts:
            with state_file.locked(self.path, "apply", until):
                file = self._read()
                if file is not None and file.id == job:
                    file.hosts = hosts
                    state_file.write(self.path, file)

    def _known(self, file: JobFile) -> list[Replica]:
        """Return a replica for each host of the description, in its order."""
        found = {(each.mesh, each.index): each for each in self._find(file)}
        return [
            found.get((plan.mesh, plan.index), Replica(plan.mesh, plan.index, "pending", reason="not created yet"))
            for plan in self._plans()
        ]

    def state(
        self, timeout: float = READY_TIMEOUT_S, *, cached_path: str | os.PathLike[str] | None = None
    ) -> JobState:  # fmt: skip
        """Wait until all hosts listen, and attach them as `Job.state` does. A replaced host has its new address.

        Raises JobError as `apply` and `Job.state` do, after ``timeout`` seconds at most.
        """
        until = time.monotonic() + check_bounded(timeout)
        if cached_path is not None:
            self.path = Path(cached_path).expanduser().absolute()
            self.apply(timeout)
        while True:
            file = self._read()
            if file is not None and file.submitted:
                self._wait_until_up(file.id, until)
            begun = time.monotonic()
            some = max(1.0, min(ATTACH_TIMEOUT_S, until - begun))
            try:
                return super().state(some)
            except JobError:
                # A scheduler notices a lost host later than this program. Other reasons are known at once, and stay.
                is_silent = time.monotonic() - begun >= some
                if time.monotonic() > until or not (is_silent or self._has_changed()):
                    raise

    def _has_changed(self) -> bool:
        """Return whether the scheduler's hosts are others than those of the job's file."""
        file = self._read()
        return file is not None and [each.entry for each in self._known(file)] != file.hosts

    def _attach(self, file: JobFile, name: str, hosts: Sequence[HostEntry], timeout: float) -> HostMesh:
        mesh = super()._attach(file, name, hosts, timeout)
        if self._loss_reasons is None:
            self._loss_reasons = LossReasons(
                self._why_lost, self._reason_timeout, lambda: self._wait_for_change(REASON_INTERVAL_S)
            )
        explain_losses(mesh, self._loss_reasons, hosts)
        if self.replaces_hosts:
            expect_successors(mesh, self._find_successor, hosts)
        return mesh

    def _find_successor(self, lost: HostEntry, stopping: threading.Event) -> HostMesh | None:
        """Wait until the scheduler has replaced a lost host, and attach the new one. Return None if there is none.

        It is given up when ``stopping`` is set.
        A host that the scheduler has kept, such as after a loss of the network, is attached again.
        """
        until = time.monotonic() + SUCCESSOR_TIMEOUT_S
        while time.monotonic() < until and not stopping.is_set():
            with contextlib.suppress(JobError):  # the scheduler, the host or the file system does not answer yet
                file = self._read()
                if file is None:
                    return None
                here = [each for each in self._known_lately(file) if (each.mesh, each.index) == (lost.mesh, lost.index)]
                if not here or here[0].is_final:
                    return None
                if here[0].state == "up":
                    mesh = self._attach(file, lost.mesh, [here[0].entry], SUCCESSOR_ATTACH_TIMEOUT_S)
                    self._record(file.id, here[0].entry)
                    log.info("host %s of job %s is attached again: %s", lost.where, self.name, here[0].status)
                    return mesh
            stopping.wait(min(SUCCESSOR_INTERVAL_S, max(0.0, until - time.monotonic())))
        return None

    def _known_lately(self, file: JobFile) -> list[Replica]:
        """Return what `_known` has answered to the search for another lost host, unless that is too long ago."""
        with self._searching:
            if time.monotonic() - self._answered_at >= SUCCESSOR_INTERVAL_S:
                try:
                    self._answer = self._known(file), None
                except JobError as error:
                    self._answer = [], error
                self._answered_at = time.monotonic()
            found, failed = self._answer
        if failed is not None:
            raise failed
        return found

    def _record(self, job: str, host: HostEntry) -> None:
        """Write the new address of a host to the job's file. It is attached, so this program works without, too."""
        try:
            with state_file.locked(self.path, "apply", time.monotonic()):
                file = self._read()
                if file is not None and file.id == job:
                    file.hosts = [
                        host if (each.mesh, each.index) == (host.mesh, host.index) else each for each in file.hosts
                    ]
                    state_file.write(self.path, file)
        except (JobError, OSError) as error:  # in use by another program, or no room
            log.warning("job %s: the new address of host %s is not in its file: %s", self.name, host.where, error)

    def _why_lost(self, hosts: Sequence[HostEntry]) -> list[LossReason]:
        """Return why hosts are lost. The scheduler may notice the loss later than this program."""
        file = self._read()
        if file is None:
            return [LossReason("the job was ended", True)] * len(hosts)
        found = {(each.mesh, each.index): each for each in self._find(file)}
        return [_loss_reason(host, found.get((host.mesh, host.index))) for host in hosts]

    def status(self) -> list[HostStatus]:
        """Return the status of each host, with the scheduler's reason. Raises JobError if it cannot be asked."""
        file = self._read()
        if file is None or not file.submitted:
            state = "not started" if file is None or not file.is_begun else _BEGUN
            return [HostStatus(plan.mesh, plan.index, state) for plan in self._plans()]
        return with_notices([each.status for each in self._known(file)], file)

    def _look(self, hosts: Sequence[HostEntry]) -> list[str]:
        file = self._read()
        found = {} if file is None else {each.incarnation: each.state for each in self._find(file)}
        return [found.get(host.incarnation, "gone") for host in hosts]

    def _who_is_gone(self, file: JobFile) -> str:
        gone = [str(each.status) for each in self._known(file) if each.state != "up"]
        return f": {'; '.join(gone)}" if gone else ""

    def _end_surplus(self, file: JobFile, mesh: str, count: int) -> None:
        self._scale(file, mesh, count)

    def _start_missing(self, file: JobFile, plans: Sequence[Plan], until: float) -> None:
        """Do nothing: the scheduler starts hosts by itself."""

    def resize(self, mesh: str, count: int, timeout: float = READY_TIMEOUT_S) -> None:
        """Ask the scheduler for ``count`` hosts of a mesh, and wait until all hosts listen, as `Job.resize` does.

        Raises ValueError and JobError as `Job.resize` does. ``timeout`` is in seconds.
        """
        until = time.monotonic() + check_bounded(timeout)
        super().resize(mesh, count, max(0.0, until - time.monotonic()))
        file = self._read()
        if file is not None and file.submitted:
            self._wait_until_up(file.id, until)

    def _end_all(self, file: JobFile) -> None:
        self._remove(file)


def _loss_reason(host: HostEntry, replica: Replica | None) -> LossReason:
    if replica is None:
        return LossReason(f"{host.where} does not exist any more", True)
    if replica.incarnation != host.incarnation:
        # An unknown state becomes one with a better reason, such as that of a job that is completing.
        is_final = not replica.state.startswith("unknown")
        return LossReason(f"{host.where} was replaced: {replica.reason or replica.state}", is_final)
    # This program has seen the loss. A scheduler that still has the host in another state has not noticed it yet.
    is_final = replica.state == "gone"
    if replica.reason and replica.state not in ("up", "ending"):
        return LossReason(f"{host.where}: {replica.reason}", is_final)
    text = f"{host.where} is {replica.state} for the scheduler"
    return LossReason(f"{text}: {replica.reason}" if replica.reason else text, is_final)
