"""SlurmJob on a real cluster of Slurm: start, search, end, and failures of jobs, nodes and programs."""

from __future__ import annotations

import datetime
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from monarch_backend import actor
from monarch_backend._job import state_file
from monarch_backend._job.slurm import records
from monarch_backend.errors import MonarchError
from monarch_backend.job import Job, JobError, SlurmJob
from tests.job.slurm_support import apply, ended, loses_its_job, on_login_node
from tests.job.support import Saver, Where, seen_by_ps
from tests.support.slurm_cluster import SlurmCluster
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slurm


def found(path: Path) -> Any:
    """Return what a second program sees: names of machines, a variable of Slurm, states."""
    job = Job.load(path)
    state, names, variables = job.state(), [], set()
    for mesh in (state.trainers, state.loaders):
        actors = mesh.spawn_procs({"gpus": 1}).spawn("where", Where)
        names.append(list(actors.machine.call().get(60).values()))
        variables |= set(actors.variable.call("SLURM_PROCID").get(60).values())
    return names, variables, [str(each) for each in job.status()]


def test_second_program_uses_the_hosts_of_two_meshes_and_ends_them(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = SlurmJob(name="shared", path=tmp_path / "job.json").add_mesh("trainers", 2).add_mesh("loaders", 1)
    file = on_login_node(cluster, apply, job)
    secret = Path(file.secret_file).read_text().strip()
    number = str(file.submitted["job"])
    assert not seen_by_ps(secret)
    for words in (["show", "job", number], ["write", "batch_script", number, "-"]):
        assert secret not in cluster.run("scontrol", *words)
    names, variables, states = on_login_node(cluster, found, job.path)
    assert names == [cluster.nodes[:2], cluster.nodes[2:]]
    assert variables == {None}
    assert states == ["trainers[0]: up", "trainers[1]: up", "loaders[0]: up"]
    on_login_node(cluster, Job.load(job.path).kill)
    assert not job.path.exists()
    assert not Path(file.secret_file).exists()
    assert sorted(each.name for each in (tmp_path / "job.slurm").iterdir()) == [
        "batch.log", "loaders.0.log", "trainers.0.log", "trainers.1.log",
    ]  # fmt: skip


def applied_too_late(job: SlurmJob) -> Any:
    with pytest.raises(JobError) as caught:
        job.apply(timeout=3)
    states = [str(each) for each in job.status()]
    job.kill()
    return str(caught.value), states


def test_wait_in_the_queue_has_slurms_reason(cluster: SlurmCluster, tmp_path: Path) -> None:
    number = cluster.run("sbatch", "--parsable", "-N3", "--exclusive", "--output=/dev/null", "--wrap=sleep 100").strip()
    job = SlurmJob(name="late", path=tmp_path / "job.json").add_mesh("trainers", 2)
    error, states = on_login_node(cluster, applied_too_late, job)
    assert "not all hosts run in time" in error
    assert re.search(r"trainers\[1\]: pending \(Slurm job \d+: PENDING \((Resources|Priority)\)\)", error)
    assert all("pending (Slurm job" in each for each in states)
    assert cluster.jobs() == [f"{number} RUNNING"]
    cluster.run("scancel", number)


def refused(job: SlurmJob) -> str:
    with pytest.raises(JobError) as caught:
        job.apply()
    assert not job.active
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"partition": "nowhere"}, "invalid partition"), ({"gpus_per_node": 9}, "node configuration is not available")],
)
def test_refused_job_has_slurms_reason(
    cluster: SlurmCluster, tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    job = SlurmJob(name="refused", path=tmp_path / "job.json", **options).add_mesh("trainers", 1)
    error = on_login_node(cluster, refused, job)
    assert "sbatch has failed (1)" in error
    assert reason in error


def test_scancel_from_outside_is_a_failure_with_its_reason(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = SlurmJob(name="cancelled", path=tmp_path / "job.json", reason_timeout=20).add_mesh("trainers", 2)
    seconds, failure, states, late = on_login_node(
        cluster, loses_its_job, cluster, job, lambda number: cluster.run("scancel", str(number))
    )
    print(f"scancel to error: {seconds:.2f} s: {failure}")
    assert seconds < 30
    assert re.search(r"host-[bc]: Slurm job \d+: CANCELLED, cancelled .*; CANCELLED AT 20", failure), failure
    assert all(re.search(r"gone \(Slurm job \d+: CANCELLED, cancelled", each) for each in states), states
    assert "CANCELLED" in late


def test_failure_of_a_node_is_a_failure_with_its_reason(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Slurm notices a dead node after SlurmdTimeout, so the failure waits for it here."""
    job = SlurmJob(name="crash", path=tmp_path / "job.json", reason_timeout=40).add_mesh("trainers", 2)
    try:
        seconds, failure, states, late = on_login_node(
            cluster, loses_its_job, cluster, job, lambda _: cluster.crash_node(1)
        )
    finally:
        cluster.repair_node(1)
    print(f"crash to error: {seconds:.2f} s: {failure}")
    node = cluster.nodes[1]
    assert re.search(rf"{node}: Slurm job \d+: NODE_FAIL, a node has failed", failure), failure
    assert f"node {node} is down: Not responding" in failure
    assert all(re.search(r"gone \(Slurm job \d+: NODE_FAIL, a node has failed", each) for each in states), states
    assert "NODE_FAIL" in late


def test_node_taken_down_by_an_administrator_is_a_failure_at_once(cluster: SlurmCluster, tmp_path: Path) -> None:
    node = f"NodeName={cluster.nodes[1]}"
    job = SlurmJob(name="down", path=tmp_path / "job.json", reason_timeout=20).add_mesh("trainers", 2)
    try:
        _, failure, _, _ = on_login_node(
            cluster, loses_its_job, cluster, job,
            lambda _: cluster.run("scontrol", "update", node, "State=DOWN", "Reason=new disk"),
        )  # fmt: skip
    finally:
        cluster.run("scontrol", "update", node, "State=RESUME", check=False)  # Slurm may have done it by itself
    assert re.search(r"Slurm job \d+: NODE_FAIL, a node has failed", failure), failure
    assert "DUE TO NODE FAILURE" in failure


def test_requeue_is_a_failure_with_its_reason(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = SlurmJob(name="requeued", path=tmp_path / "job.json", requeue=True, reason_timeout=20).add_mesh("trainers", 1)
    failure = on_login_node(cluster, lost_by_requeue, cluster, job)
    assert re.search(r"was replaced: Slurm job \d+: PENDING \(BeginTime\), requeued 1 times; CANCELLED AT", failure)
    assert "DUE TO JOB REQUEUE" in failure


def lost_by_requeue(cluster: SlurmCluster, job: SlurmJob) -> str:
    actor.unhandled_fault_hook = lambda _: None
    number = apply(job).submitted["job"]
    waiting = job.state().trainers.spawn_procs({"gpus": 1}).spawn("where", Where).sleep.call(600)
    cluster.run("scontrol", "requeue", str(number))
    with pytest.raises(MonarchError) as failure:
        waiting.get(60)
    job.kill()
    return str(failure.value)


def requeued(cluster: SlurmCluster, job: SlurmJob) -> Any:
    actor.unhandled_fault_hook = lambda _: None
    before = apply(job)
    first = job.state().trainers
    first.spawn_procs({"gpus": 1}).initialized.get(60)
    cluster.run("scontrol", "requeue", str(before.submitted["job"]))
    changes = job.watch(interval=0.1, timeout=60)
    pending = next(each for each in changes if each.state == "pending")
    # It would wait for two minutes. slurmd compares whole seconds: it refuses a start in the second of the job's end
    # ("Job credential revoked"), and the job is then FAILED with NonZeroExitCode.
    cluster.run("scontrol", "update", f"JobId={before.submitted['job']}", "StartTime=now+2seconds")
    second = job.state(timeout=60).trainers
    names = list(second.spawn_procs({"gpus": 1}).spawn("where", Where).machine.call().get(60).values())
    after = state_file.read(job.path)
    assert after is not None
    job.kill()
    return str(pending), first is second, names, [f.hosts[0].incarnation.split(".")[1] for f in (before, after)]


def test_requeued_job_is_attached_again(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = SlurmJob(name="again", path=tmp_path / "job.json", requeue=True).add_mesh("trainers", 1)
    pending, same, names, restarts = on_login_node(cluster, requeued, cluster, job)
    assert "requeued 1 times" in pending
    assert not same
    assert names == cluster.nodes[:1]
    assert restarts == ["0", "1"]


def drained(cluster: SlurmCluster, job: SlurmJob) -> Any:
    apply(job)
    cluster.run("scontrol", "update", f"NodeName={cluster.nodes[0]}", "State=DRAIN", "Reason=new disk")
    try:
        [event] = [each for each in job.watch(interval=0.1, timeout=0.5) if each.reason]
    finally:
        cluster.run("scontrol", "update", f"NodeName={cluster.nodes[0]}", "State=RESUME")
    job.kill()
    return str(event)


def test_drained_node_is_an_event_of_its_host(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = SlurmJob(name="drained", path=tmp_path / "job.json").add_mesh("trainers", 2)
    event = on_login_node(cluster, drained, cluster, job)
    assert event == f"trainers[0]: up (node {cluster.nodes[0]} is draining: new disk)"


def near_its_end(job: SlurmJob) -> Any:
    apply(job)
    states = [str(each) for each in job.status()]
    job.kill()
    return states


def test_time_limit_is_announced(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = SlurmJob(
        name="short", path=tmp_path / "job.json", time=datetime.timedelta(minutes=4), ending_notice=300
    ).add_mesh("trainers", 1)
    [state] = on_login_node(cluster, near_its_end, job)
    assert re.fullmatch(r"trainers\[0\]: ending \(its time limit ends at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d \w+\)", state)


def see_the_notice(job: SlurmJob, is_sent: bool) -> Any:
    number = apply(job).submitted["job"]
    procs = job.state().trainers.spawn_procs({"gpus": 1})
    port, received = actor.Channel.open()
    savers = procs.spawn("savers", Saver, port)
    savers.initialized.get(60)
    if is_sent:
        subprocess.run(["scancel", "--signal=URG", str(number)], check=True)
    _, host, reason, left = received.recv().get(100)
    savers.work.call_one().get(30)  # a signal for all processes of the node has ended none
    states = [each.state for each in job.status()]
    procs.stop().get(30)
    job.kill()
    return host, reason, left, states


@pytest.mark.parametrize("is_sent", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_notice_of_the_time_limit_reaches_actors(cluster: SlurmCluster, tmp_path: Path, is_sent: bool) -> None:
    job = SlurmJob(name="notice", path=tmp_path / "job.json", time="2", notice=60, ending_notice=0)
    job.add_mesh("trainers", 1)
    host, reason, left, states = on_login_node(cluster, see_the_notice, job, is_sent)
    assert (host, reason, states) == (cluster.nodes[0], "it has received SIGURG", ["ending"])
    assert 0 < left <= 60


@pytest.mark.slow  # Slurm looks for passed limits every 30 seconds, and counts in minutes
def test_passed_time_limit_is_the_reason(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = SlurmJob(name="limit", path=tmp_path / "job.json", time="1", ending_notice=0).add_mesh("trainers", 1)
    on_login_node(cluster, apply, job)
    wait_until(lambda: not cluster.jobs(), 150)
    [state] = wait_until(lambda: ended(cluster, job), 30)
    assert "TIMEOUT, its time limit has passed" in state.reason
    assert "DUE TO TIME LIMIT" in state.reason
    on_login_node(cluster, job.kill)


DIES = """
import os, signal, sys
from monarch_backend.job import SlurmJob
job = SlurmJob(name="tethered", path=sys.argv[1], tether=float(sys.argv[3])).add_mesh("trainers", 2)
is_attached = sys.argv[2] == "attached"
job.apply(wait=is_attached)
if is_attached:
    job.state().trainers.spawn_procs({"gpus": 1}).initialized.get(60)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("when", "tether"), [("submitted", 2), pytest.param("attached", 30, marks=pytest.mark.slow)])
def test_tethered_job_ends_after_a_killed_controller(
    cluster: SlurmCluster, tmp_path: Path, when: str, tether: float
) -> None:
    path = tmp_path / "job.json"
    words = [sys.executable, "-c", DIES, str(path), when, str(tether)]
    program = subprocess.run(cluster.where.command(0, *words), env=cluster.environment, timeout=100)
    assert program.returncode == -signal.SIGKILL
    began = time.monotonic()
    wait_until(lambda: not cluster.jobs(), tether + 30)
    print(f"controller's end to the job's end: {time.monotonic() - began:.1f} s")
    job = Job.load(path)
    states = wait_until(lambda: ended(cluster, job), 30)
    assert all("COMPLETED, its processes have ended" in each.reason for each in states)
    on_login_node(cluster, job.kill)


def in_two_components(job: SlurmJob) -> Any:
    apply(job)
    state = job.state()
    result = []
    for mesh in (state.trainers, state.loaders):
        actors = mesh.spawn_procs({"gpus": 1}).spawn("where", Where)
        result.append(list(actors.machine.call().get(60).values()))
        result.append(list(actors.variable.call("SLURM_GPUS_ON_NODE").get(60).values()))
    states = [str(each) for each in job.status()]
    job.kill()
    return result, states


def test_meshes_with_other_resources_are_a_heterogeneous_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = SlurmJob(name="two", path=tmp_path / "job.json", time="10")
    job.add_mesh("trainers", 1, gpus_per_node=2, constraint="fast").add_mesh("loaders", 2, constraint="slow")
    (trainers, gpus, loaders, none), states = on_login_node(cluster, in_two_components, job)
    assert (trainers, loaders) == (cluster.nodes[:1], cluster.nodes[1:])
    assert gpus == ["2"]
    assert none == [None, None]
    assert states == ["trainers[0]: up", "loaders[0]: up", "loaders[1]: up"]


IN_ALLOCATION = """
from monarch_backend.job import JobError, SlurmJob
from tests.job.support import Where
try:
    SlurmJob(name="big", path={path!r} + ".big", in_allocation=True).add_mesh("trainers", 3).apply()
except JobError as error:
    print(error)
job = SlurmJob(name="inside", path={path!r}, in_allocation=True).add_mesh("trainers", 1).add_mesh("loaders", 1)
job.apply(timeout=60)
for mesh in job.state().values():
    print(*mesh.spawn_procs({{"gpus": 1}}).spawn("where", Where).machine.call().get(60).values())
print(*job.status())
job.kill()
print(*job.status())
"""


def test_allocation_of_the_program_is_used(cluster: SlurmCluster, tmp_path: Path) -> None:
    script, output = tmp_path / "inside.py", tmp_path / "output"
    script.write_text(IN_ALLOCATION.format(path=str(tmp_path / "job.json")))
    wrapped = f"--wrap=PYTHONPATH={ROOT} {sys.executable} {script}"
    cluster.run("sbatch", "-N2", f"--output={output}", wrapped)
    wait_until(lambda: not cluster.jobs(), 100)
    lines = output.read_text().splitlines()
    assert re.fullmatch(r"in_allocation: the job has 3 hosts, and the allocation \d+ has 2 nodes", lines[0]), lines
    assert lines[1:] == [
        *cluster.nodes[:2], "trainers[0]: up loaders[0]: up", "trainers[0]: not started loaders[0]: not started",
    ]  # fmt: skip


def killed_daemon(cluster: SlurmCluster, job: SlurmJob) -> Any:
    apply(job)
    job.state()
    [daemon, *_] = [pid for pid, words in cluster.where.processes(2).items() if "slurm.node" in words]
    children = [pid for pid, words in cluster.where.processes(2).items() if "slurm.node" in words and pid != daemon]
    os.kill(min(children), signal.SIGKILL)
    wait_until(lambda: job.status()[1].state == "gone", 20)
    states = [str(each) for each in job.status()]
    job.kill()
    return states


def test_killed_daemon_does_not_end_the_other_hosts(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = SlurmJob(name="daemon", path=tmp_path / "job.json").add_mesh("trainers", 2)
    states = on_login_node(cluster, killed_daemon, cluster, job)
    assert states == [
        "trainers[0]: up", f"trainers[1]: gone (its daemon was killed by signal 9 on node {cluster.nodes[1]})",
    ]  # fmt: skip


def test_json_and_text_of_a_real_job_are_the_same(cluster: SlurmCluster) -> None:
    wrapped = ["--output=/dev/null", "--wrap=sleep 100"]
    number = cluster.run("sbatch", "--parsable", "-N2", "--time=10", *wrapped).strip()
    wait_until(lambda: cluster.jobs() == [f"{number} RUNNING"])
    cluster.environment["SLURM_TIME_FORMAT"] = "%s"
    try:
        [text] = records.parse(cluster.run("scontrol", "--oneliner", "show", "job", number))
    finally:
        del cluster.environment["SLURM_TIME_FORMAT"]
    by_json = [each for each in records.parse(cluster.run("squeue", "--json")) if each.number == int(number)]
    assert by_json == [text]
    assert text.state == "RUNNING"
    assert 540 < text.end_time - time.time() <= 600
    cluster.run("scancel", number)
