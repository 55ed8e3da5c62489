"""SlurmJob that Slurm preempts for a job of a partition with a higher priority: at once, or after a notice."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_backend import actor
from monarch_backend.errors import MonarchError
from monarch_backend.job import SlurmJob
from tests.job.slurm_support import apply, loses_its_job, on_login_node
from tests.job.support import Saver, Where
from tests.support.slurm_cluster import GRACE_S, SlurmCluster

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


def test_preempted_job_that_may_start_again_is_requeued(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = SlurmJob(name="requeued", path=tmp_path / "job.json", requeue=True, reason_timeout=20)
    job.add_mesh("trainers", 1)
    failure = on_login_node(cluster, lost_by_preemption, cluster, job)
    assert re.search(r"was replaced: Slurm job \d+: PENDING \(\w+\), requeued 1 times; CANCELLED AT", failure), failure
    assert "DUE TO PREEMPTION" in failure


def lost_by_preemption(cluster: SlurmCluster, job: SlurmJob) -> str:
    actor.unhandled_fault_hook = lambda _: None
    apply(job)
    waiting = job.state().trainers.spawn_procs({"gpus": 1}).spawn("where", Where).sleep.call(600)
    preempt(cluster)
    with pytest.raises(MonarchError) as failure:
        waiting.get(60)
    job.kill()
    return str(failure.value)


def test_preempted_job_without_a_notice_ends_when_its_grace_begins(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = SlurmJob(name="graceful", path=tmp_path / "job.json", partition="graceful", reason_timeout=20)
    job.add_mesh("trainers", 2)
    seconds, failure, states, _ = on_login_node(cluster, loses_its_job, cluster, job, lambda _: preempt(cluster))
    assert seconds < GRACE_S
    assert re.search(r"host-[bc]: .*preempted", failure), failure
    assert all("preempted" in each for each in states), states


NOTICE_S = 8


def sees_the_notice(cluster: SlurmCluster, job: SlurmJob) -> dict[str, Any]:
    actor.unhandled_fault_hook = lambda _: None
    apply(job)
    procs = job.state().trainers.spawn_procs({"gpus": 1})
    port, received = actor.Channel.open()
    savers = procs.spawn("savers", Saver, port)
    savers.initialized.get(60)
    preempt(cluster)
    notices = [received.recv().get(60) for _ in range(2)]
    begun = time.monotonic()
    left = list(savers.work.call().get(30).values())  # the signal for all processes of the node has ended none
    states = [str(each) for each in job.status()]
    waiting = savers.sleep.call(600)
    with pytest.raises(MonarchError) as failure:
        waiting.get(60)
    seconds = time.monotonic() - begun
    job.kill()
    return {"notices": notices, "left": left, "states": states, "seconds": seconds, "failure": str(failure.value)}


@contextlib.contextmanager
def user_signal(cluster: SlurmCluster) -> Iterator[None]:
    """Let Slurm send a job's own signal at the begin of its grace, where it has one."""
    file = cluster.folder / "slurm.conf"
    before = file.read_text()
    file.write_text(f"{before}SlurmctldParameters=preempt_send_user_signal\n")
    cluster.run("scontrol", "reconfigure")
    try:
        yield
    finally:
        file.write_text(before)
        cluster.run("scontrol", "reconfigure")


@pytest.mark.parametrize("signal", ["SIGTERM", pytest.param("SIGURG", marks=pytest.mark.slow)])
def test_preemption_reaches_actors_as_a_notice(cluster: SlurmCluster, tmp_path: Path, signal: str) -> None:
    job = SlurmJob(
        name="notice", path=tmp_path / "job.json", partition="graceful", time="10", ending_notice=0, notice=NOTICE_S,
        reason_timeout=20,
    ).add_mesh("trainers", 2)  # fmt: skip
    with user_signal(cluster) if signal == "SIGURG" else contextlib.nullcontext():
        found = on_login_node(cluster, sees_the_notice, cluster, job)
    assert sorted((host, reason) for _, host, reason, _ in found["notices"]) == [
        (node, f"it has received {signal}") for node in cluster.nodes[:2]
    ]
    assert all(0 < each <= NOTICE_S for each in found["left"])
    ending = r"trainers\[\d\]: ending \(its job is preempted, and ends at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d \w+\)"
    assert all(re.fullmatch(ending, each) for each in found["states"]), found["states"]
    assert found["seconds"] < GRACE_S
    assert "preempted" in found["failure"], found["failure"]
