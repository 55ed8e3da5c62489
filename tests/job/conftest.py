"""Fixtures of jobs: a cluster of Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.slurm_cluster import SlurmCluster, refusal, slurm_cluster
from tests.support.waiting import wait_until
from tests.support.without_torch import programs_without_torch as programs_without_torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="package")
def shared_cluster() -> Iterator[SlurmCluster]:
    if why := refusal():
        pytest.skip(f"NO TEST OF SLURM RUNS: {why}")
    with slurm_cluster(3) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """Yield the cluster with idle nodes. No job and no process may be left on it after the test."""
    monkeypatch.setenv("SLURM_CONF", shared_cluster.environment["SLURM_CONF"])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield shared_cluster
    jobs = shared_cluster.jobs()
    shared_cluster.run("scancel", "--user=root", check=False)
    shared_cluster.wait_until_idle()
    assert not jobs, f"the test has left jobs: {jobs}"
    wait_until(lambda: not shared_cluster.processes(), 15)
