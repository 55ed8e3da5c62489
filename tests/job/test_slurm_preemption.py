"""SlurmJob that Slurm preempts for a job of a partition with a higher priority: at once, or after a notice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_backend.job import SlurmJob
from tests.job.slurm_support import loses_its_job, on_login_node
from tests.support.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.slurm


def preempt(cluster: SlurmCluster) -> None:
    """Submit a job that needs all nodes, and has the higher priority."""
    words = ["--partition=urgent", "--nodes=3", "--exclusive", "--job-name=urgent", "--output=/dev/null"]
    cluster.run("sbatch", *words, "--wrap=sleep 600")


@pytest.fixture(autouse=True)
def urgent_job_is_ended(cluster: SlurmCluster) -> Iterator[None]:
    yield
    cluster.run("scancel", "--name=urgent")
    cluster.wait_until_idle()


def test_preemption_is_a_failure_with_its_reason(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = SlurmJob(name="preempted", path=tmp_path / "job.json", partition="spare", reason_timeout=20)
    job.add_mesh("trainers", 2)
    _, failure, states, late = on_login_node(cluster, loses_its_job, cluster, job, lambda _: preempt(cluster))
    assert re.search(
        r"host-[bc]: Slurm job \d+: PREEMPTED, preempted by another job.*; CANCELLED AT \S+ DUE TO PREEMPTION", failure
    ), failure
    assert all(re.search(r"gone \(Slurm job \d+: PREEMPTED, preempted", each) for each in states), states
    assert "DUE TO PREEMPTION" in late
