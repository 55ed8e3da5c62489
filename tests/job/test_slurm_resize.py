"""SlurmJob.resize on a real cluster: growth by further Slurm jobs, shrinking, and training through both."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch_backend.job import Job, JobError, SlurmJob
from tests.job.conftest import ROOT
from tests.job.slurm_support import apply, on_login_node
from tests.job.support import Where, in_program
from tests.support.slurm_cluster import SlurmCluster
from tests.support.undisturbed_training import train_undisturbed

pytestmark = pytest.mark.slurm

STEPS = 9


def train(cluster: SlurmCluster, folder: Path) -> dict[str, Any]:
    cluster.where.enter(0)
    sys.path.insert(0, str(ROOT / "examples"))
    import slurm_train

    job = slurm_train.slurm_job(2, name="lm", path=folder / "job.json", tether=60)
    queue = {}

    def after_step(run: Any, step: int) -> None:
        nodes = (line.split() for line in cluster.jobs("%T %D"))
        queue[step] = sorted(int(count) for state, count in nodes if state == "RUNNING")

    try:
        job.apply(timeout=60)
        run = slurm_train.SlurmRun(job, STEPS, sizes={3: 3, 6: 4})
        run.train(after_step)
        return {"losses": run.losses, "failures": run.failures, "queue": queue}
    finally:
        job.kill()


def test_training_goes_on_with_the_same_losses_through_resizes(cluster: SlurmCluster, tmp_path: Path) -> None:
    expected = in_program(train_undisturbed, STEPS, timeout=120)
    found = in_program(train, cluster, tmp_path, timeout=200)
    assert found["failures"] == []
    assert found["losses"] == pytest.approx(expected, rel=1e-3)
    assert [found["queue"][step] for step in (3, 4, 7)] == [[2], [1, 2], [1, 1, 2]]


def grow(job: SlurmJob) -> Any:
    file = apply(job)
    job.resize("trainers", 3, timeout=60)
    return file.submitted["job"]


def seen_by_a_second_program(path: Path) -> Any:
    job = Job.load(path)
    actors = job.state().trainers.spawn_procs({"gpus": 1}).spawn("where", Where)
    machines = actors.machine.call().get(60)
    states = [str(each) for each in job.watch(timeout=0)]
    job.kill()
    return len(machines), states


def test_second_program_uses_a_grown_job_and_ends_all_of_it(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = SlurmJob(name="grown", path=tmp_path / "job.json").add_mesh("trainers", 1)
    number = on_login_node(cluster, grow, job)
    assert sorted(cluster.jobs("%i %D")) == [f"{number} 1", f"{number + 1} 2"]
    count, states = on_login_node(cluster, seen_by_a_second_program, job.path)
    assert count == 3
    assert states == ["trainers[0]: up", "trainers[1]: up", "trainers[2]: up"]
    assert cluster.jobs() == []
    assert not list((tmp_path / "job.slurm").glob("**/*.json"))


def grow_without_room(job: SlurmJob) -> Any:
    apply(job)
    mesh = job.state().trainers
    with pytest.raises(JobError) as caught:
        job.resize("trainers", 4, timeout=3)
    same = job.state().trainers is mesh
    return str(caught.value), same, [str(each) for each in job.status()]


def test_growth_that_waits_in_the_queue_is_withdrawn_with_slurms_reason(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = SlurmJob(name="full", path=tmp_path / "job.json", exclusive=True).add_mesh("trainers", 2)
    error, same, states = on_login_node(cluster, grow_without_room, job)
    [left] = cluster.jobs("%T")
    assert left == "RUNNING"
    on_login_node(cluster, Job.load(job.path).kill)
    assert re.search(r"not all hosts run in time: trainers\[2\]: pending \(Slurm job \d+: PENDING", error)
    assert same
    assert states == ["trainers[0]: up", "trainers[1]: up"]
