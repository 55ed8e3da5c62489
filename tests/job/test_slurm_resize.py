"""SlurmJob.resize on a real cluster: growth by further Slurm jobs, shrinking, and training through both."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch_backend import actor
from monarch_backend.errors import MonarchError
from monarch_backend.job import Job, JobError, SlurmJob
from tests.job.conftest import ROOT
from tests.job.slurm_support import apply, on_login_node
from tests.job.support import Where, in_program
from tests.support.slurm_cluster import SlurmCluster
from tests.support.undisturbed_training import train_undisturbed
from tests.support.waiting import wait_until

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
        run = slurm_train.SlurmRun(job, STEPS, sizes={3: 4, 6: 3})
        run.train(after_step)
        return {"losses": run.losses, "failures": run.failures, "queue": queue}
    finally:
        job.kill()


def test_training_goes_on_with_the_same_losses_through_resizes(cluster: SlurmCluster, tmp_path: Path) -> None:
    expected = in_program(train_undisturbed, STEPS, timeout=120)
    found = in_program(train, cluster, tmp_path, timeout=200)
    assert found["failures"] == []
    assert found["losses"] == pytest.approx(expected, rel=1e-3)
    assert [found["queue"][step] for step in (3, 4, 7)] == [[2], [2, 2], [1, 2]]


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


def shrink(cluster: SlurmCluster, job: SlurmJob) -> Any:
    actor.unhandled_fault_hook = lambda _: None
    apply(job)
    state = job.state()
    kept = [state.trainers.slice(hosts=0), state.loaders]
    actors = [mesh.spawn_procs({"gpus": 1}).spawn("where", Where) for mesh in kept]
    before = [each.machine.call_one().get(60) for each in actors]
    job.resize("trainers", 1)
    nodes = cluster.jobs("%D %N")
    wait_until(lambda: hosts_on(cluster, 2) == 0, 30)
    after = [each.machine.call_one().get(60) for each in actors]
    states = [str(each) for each in job.status()]
    job.kill()
    return nodes, before, after, states


def hosts_on(cluster: SlurmCluster, index: int) -> int:
    return sum("slurm.node" in words for words in cluster.where.processes(index).values())


def test_node_of_an_ended_host_is_given_back(cluster: SlurmCluster, tmp_path: Path) -> None:
    """The node is the second one of three."""
    job = SlurmJob(name="shrunk", path=tmp_path / "job.json").add_mesh("trainers", 2).add_mesh("loaders", 1)
    nodes, before, after, states = on_login_node(cluster, shrink, cluster, job)
    first, _, last = cluster.nodes
    assert nodes == [f"2 {first},{last}"]
    assert before == after == [first, last]
    assert states == ["trainers[0]: up", "loaders[0]: up"]


def shrink_a_heterogeneous_job(cluster: SlurmCluster, job: SlurmJob) -> Any:
    actor.unhandled_fault_hook = lambda _: None
    apply(job)
    job.resize("loaders", 1)
    found = [hosts_on(cluster, 3), [str(each) for each in job.status()], cluster.jobs("%D")]
    job.resize("trainers", 2, timeout=60)
    machines = job.state().trainers.spawn_procs({"gpus": 1}).spawn("where", Where).machine.call().get(60)
    job.kill()
    return [*found, sorted(machines.values())]


def test_ended_host_of_a_heterogeneous_job_leaves_its_node_allocated(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = SlurmJob(name="two", path=tmp_path / "job.json", notice=60)
    job.add_mesh("trainers", 1).add_mesh("loaders", 2, constraint="slow")
    running, states, nodes, machines = on_login_node(cluster, shrink_a_heterogeneous_job, cluster, job)
    assert running == 0
    assert states == ["trainers[0]: up", "loaders[0]: up"]
    assert sorted(nodes) == ["1", "2"]
    assert len(machines) == 2


def requeue(cluster: SlurmCluster, job: SlurmJob) -> Any:
    actor.unhandled_fault_hook = lambda _: None
    number = apply(job).submitted["job"]
    job.resize("trainers", 1)
    cluster.run("scontrol", "requeue", str(number))
    next(each for each in job.watch(interval=0.1, timeout=60) if each.state == "pending")
    cluster.run("scontrol", "update", f"JobId={number}", "StartTime=now+2seconds")
    job.state(timeout=60)
    output = job.path.with_name("job.slurm") / "batch.log"
    wait_until(lambda: "1: trainers[1] was ended by a resize" in output.read_text(), 30)
    states = [str(each) for each in job.status()]
    running = hosts_on(cluster, 2)
    job.kill()
    return states, running


def test_ended_host_stays_ended_after_a_requeue(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = SlurmJob(name="again", path=tmp_path / "job.json", requeue=True).add_mesh("trainers", 2)
    assert on_login_node(cluster, requeue, cluster, job) == (["trainers[0]: up"], 0)


def lose_the_further_job(cluster: SlurmCluster, job: SlurmJob) -> Any:
    actor.unhandled_fault_hook = lambda _: None
    number = apply(job).submitted["job"]
    job.resize("trainers", 3, timeout=60)
    waiting = job.state().trainers.spawn_procs({"gpus": 1}).spawn("where", Where).sleep.call(600)
    cluster.run("scancel", str(number + 1))
    with pytest.raises(MonarchError) as failure:
        waiting.get(60)
    wait_until(lambda: [each.state for each in job.status()] == ["up", "up", "gone"], 60)
    reason = job.status()[2].reason
    job.resize("trainers", 2)
    mesh = job.state().trainers
    machines = mesh.spawn_procs({"gpus": 1}).spawn("where", Where).machine.call().get(60)
    job.kill()
    return str(failure.value), reason, sorted(machines.values())


def test_loss_of_a_further_job_is_a_failure_of_its_hosts_only(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = SlurmJob(name="lost", path=tmp_path / "job.json", reason_timeout=20).add_mesh("trainers", 2)
    failure, reason, machines = on_login_node(cluster, lose_the_further_job, cluster, job)
    assert "CANCELLED" in failure
    assert "CANCELLED, cancelled" in reason
    assert machines == cluster.nodes[:2]
