"""SlurmJob over its memory on a real cluster: processes of hosts, and the script of the job."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from monarch_backend import actor
from monarch_backend.actor import Actor, endpoint
from monarch_backend.errors import MonarchError
from monarch_backend.job import JobError, SlurmJob
from tests.job.slurm_support import apply, on_login_node
from tests.support.slurm_cluster import SlurmCluster, has_cgroups

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(not has_cgroups(), reason="Slurm limits no memory here: it needs control groups of version 1"),
]

MIB = 1 << 20


class Hungry(Actor):
    """Actor that takes memory and writes to it."""

    @endpoint
    def take(self, mib: int) -> int:
        return len(b"1" * (mib * MIB))


def takes_too_much(job: SlurmJob) -> tuple[str, list[str]]:
    actor.unhandled_fault_hook = lambda _: None
    apply(job)
    actors = job.state().trainers.spawn_procs({"gpus": 1}).spawn("hungry", Hungry)
    assert actors.take.call_one(10).get(60) == 10 * MIB
    with pytest.raises(MonarchError) as failure:
        actors.take.call_one(3000).get(60)
    states = [str(each) for each in job.status()]
    job.kill()
    return str(failure.value), states


def test_process_over_the_memory_of_the_job_is_a_failure_with_its_reason(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = SlurmJob(name="hungry", path=tmp_path / "job.json", memory_per_node="1500M")
    failure, states = on_login_node(cluster, takes_too_much, job.add_mesh("trainers", 1))
    assert "killed by signal 9 (SIGKILL): out of memory" in failure
    assert states == ["trainers[0]: up"]


def cannot_run(job: SlurmJob) -> str:
    with pytest.raises(JobError) as caught:
        job.apply(timeout=60)
    job.kill()
    return str(caught.value)


def test_job_that_ends_out_of_memory_has_this_state(cluster: SlurmCluster, tmp_path: Path) -> None:
    takes = f"{sys.executable} -c 'bytes(b\"1\") * {500 * MIB}'; exit 1"
    job = SlurmJob(name="script", path=tmp_path / "job.json", memory_per_node="100M", setup=takes)
    error = on_login_node(cluster, cannot_run, job.add_mesh("trainers", 1))
    assert re.search(r"trainers\[0\]: gone \(Slurm job \d+: OUT_OF_MEMORY, out of memory .*oom.kill", error), error
