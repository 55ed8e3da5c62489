"""Programs on the login node of the test cluster of Slurm, and what they see when their job ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from monarch_backend import actor
from monarch_backend._job import state_file
from monarch_backend._job.state_file import JobFile
from monarch_backend.errors import MonarchError
from monarch_backend.job import HostStatus, Job, JobError, SlurmJob
from tests.job.support import Where, in_program
from tests.support.slurm_cluster import SlurmCluster


def on_login_node(cluster: SlurmCluster, fn: Callable[..., Any], *args: Any, timeout: float = 120) -> Any:
    """Return the result of ``fn(*args)`` in a program on the login node."""

    def run() -> Any:
        cluster.where.enter(0)
        return fn(*args)

    return in_program(run, timeout=timeout)


def apply(job: SlurmJob) -> JobFile:
    job.apply(timeout=60)
    file = state_file.read(job.path)
    assert file is not None
    return file


def ended(cluster: SlurmCluster, job: Job) -> list[HostStatus]:
    """Return the states of the hosts, or [] until all are gone. Before, a job can be completing."""
    states: list[HostStatus] = on_login_node(cluster, job.status)
    return states if all(each.state == "gone" for each in states) else []


def loses_its_job(cluster: SlurmCluster, job: SlurmJob, action: Callable[[int], Any]) -> Any:
    """Return what the program sees after ``action`` has ended its job: seconds, the call's error, states, state()."""
    actor.unhandled_fault_hook = lambda _: None
    number = apply(job).submitted["job"]
    actors = job.state().trainers.spawn_procs({"gpus": 1}).spawn("where", Where)
    actors.machine.call().get(60)
    waiting = actors.sleep.call(600)
    began = time.monotonic()
    action(number)
    with pytest.raises(MonarchError) as failure:
        waiting.get(60)
    seconds = time.monotonic() - began
    changes = job.watch(interval=0.2, timeout=60)
    while any(each.state != "gone" for each in job.status()):
        next(changes)
    states = [str(each) for each in job.status()]
    with pytest.raises(JobError) as late:
        job.state(timeout=5)
    job.kill()
    return seconds, str(failure.value), states, str(late.value)
