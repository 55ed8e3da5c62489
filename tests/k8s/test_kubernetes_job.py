"""KubernetesJob on a real control plane: start, reasons of jobs that cannot run, isolation, end."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._job.kubernetes.permissions import OPTIONAL
from monarch_backend.actor import Actor, endpoint
from monarch_backend.cli import main
from monarch_backend.hosts import attach_to_workers
from monarch_backend.job import Job, JobError, KubernetesJob
from tests.hosts.support import UP
from tests.job.support import Where
from tests.k8s.cluster import INSIDE, OUTSIDE, ROOT, Cluster
from tests.k8s.conftest import Place
from tests.support.strangers import ask_as_stranger, check_stranger

pytestmark = [pytest.mark.slow, pytest.mark.k8s]

IMAGE = "testbed/monarch:1"
READY_S = 100.0
PODS, MANY_READY_S = 100, 300.0


def job_of(kubeconfig: str, folder: Path, name: str = "hello", **options: Any) -> KubernetesJob:
    return KubernetesJob(name=name, path=folder / f"{name}.json", kubeconfig=kubeconfig, **options)


@contextlib.contextmanager
def ended(job: KubernetesJob) -> Iterator[KubernetesJob]:
    try:
        yield job
    finally:
        job.kill()


def names_of_hosts(mesh: Any) -> list[str]:
    procs = mesh.spawn_procs({"gpus": 1})
    actors = procs.spawn("where", Where)
    names = [actors.slice(hosts=index).machine.call_one().get(30) for index in range(mesh.size("hosts"))]
    procs.stop().get(30)
    return names


def start_hello(kubeconfig: str, folder: Path) -> list[str]:
    job = job_of(kubeconfig, folder).add_mesh("trainers", 3, image=IMAGE, labels={"team": "a"})
    job.apply(READY_S)
    return names_of_hosts(job.state().trainers)


def find_and_end_hello(kubeconfig: str, folder: Path) -> tuple[list[str], list[str], bool]:
    job = Job.load(folder / "hello.json")
    names, states = names_of_hosts(job.state().trainers), [str(each) for each in job.status()]
    job.kill()
    return names, states, job.active


def test_hello_over_three_pods_is_found_and_ended_by_a_second_program(place: Place) -> None:
    names = place.run(start_hello)
    assert names == sorted(place.pods()) and [name[-1] for name in names] == ["0", "1", "2"]
    assert {pod["metadata"]["labels"]["team"] for pod in place.pods().values()} == {"a"}
    again, states, active = place.run(find_and_end_hello)
    assert again == names and not active
    assert states == ["trainers[0]: up", "trainers[1]: up", "trainers[2]: up"]
    assert place.kube.objects(place.namespace) == []


# A program of its own: where the controller has imported DTensors, as pytest has, each pod imports them, too.
MANY = """
import sys
from monarch_backend.job import KubernetesJob
from tests.k8s.host_name import HostName
path, kubeconfig, image, pods, seconds = *sys.argv[1:4], int(sys.argv[4]), float(sys.argv[5])
job = KubernetesJob(name="many", path=path, kubeconfig=kubeconfig)
small = {"MONARCH_PRELOAD_TORCH": "0", "MONARCH_PREFAULT_BYTES": "0"}
job.add_mesh("workers", pods, image=image, grace_period=5, env=small)
try:
    job.apply(seconds)
    procs = job.state(seconds).workers.spawn_procs({"gpus": 1})
    print(*procs.spawn("names", HostName).read.call().get(seconds).values())
    procs.stop().get(seconds)
finally:
    job.kill()
"""


def use_many_pods(kubeconfig: str, folder: Path) -> tuple[list[str], str]:
    words = [str(folder / "many.json"), kubeconfig, IMAGE, str(PODS), str(MANY_READY_S)]
    program = [sys.executable, "-c", MANY, *words]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=3 * MANY_READY_S, check=False)
    return done.stdout.split(), done.stderr


@pytest.mark.nightly
def test_hundred_pods_are_used_and_ended(place: Place) -> None:
    """A pod takes 90 MB of memory: it has no torch, and commits no memory for messages."""
    names, errors = place.run(use_many_pods, timeout=4 * MANY_READY_S)
    assert len({name for name in names if name.startswith("many-")}) == PODS, errors
    assert place.kube.objects(place.namespace) == []


def fail(kubeconfig: str, folder: Path, timeout: float, mesh: dict[str, Any]) -> str:
    with ended(job_of(kubeconfig, folder).add_mesh("trainers", **mesh)) as job:
        with pytest.raises(JobError) as failure:
            job.apply(timeout)
    return str(failure.value)


def template(*command: str) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "monarch", "image": IMAGE, "command": list(command)}]}}


@pytest.mark.parametrize(
    ("mesh", "timeout", "reasons"),
    [
        ({"replicas": 2, "image": "testbed/missing:1"}, 60, ["ImagePull", "testbed/missing:1"]),
        (
            {"replicas": 1, "image": IMAGE, "resources": {"nvidia.com/gpu": 9}},
            3,
            ["not all hosts run in time", "Unschedulable: 0/3 nodes are available", "Insufficient nvidia.com/gpu"],
        ),
        (
            {"replicas": 1, "image": IMAGE, "node_selector": {"zone": "moon"}},
            3,
            ["Unschedulable", "didn't match"],
        ),
        (
            {"replicas": 1, "pod_template": template("sh", "-c", "echo no such module; exit 3")},
            60,
            ["CrashLoopBackOff", "exit code 3", "its log ends: no such module"],
        ),
        ({"replicas": 1, "image": IMAGE, "labels": {"a/b/c": "x"}}, 60, ["was not accepted", "a/b/c"]),
    ],
    ids=["image", "gpus", "selector", "crash", "refused"],
)
def test_job_that_cannot_run_raises_the_reason(
    place: Place, mesh: dict[str, Any], timeout: float, reasons: list[str]
) -> None:
    text = place.run(fail, timeout, mesh)
    assert [reason for reason in reasons if reason not in text] == []


OTHER_VERSION = f"""
exec python -c 'import monarch_backend; monarch_backend.__version__ = "0.0.7"; {UP}' \
    up --address 0.0.0.0:26600 --secret-from-stdin < /run/monarch-backend/secret
"""


def attach_other_version(kubeconfig: str, folder: Path) -> str:
    job = job_of(kubeconfig, folder).add_mesh("trainers", 1, pod_template=template("sh", "-c", OTHER_VERSION))
    with ended(job):
        job.apply(READY_S)
        with pytest.raises(JobError) as refusal:
            job.state(READY_S)
    return str(refusal.value)


def test_image_with_another_version_is_refused_with_the_difference(place: Place) -> None:
    text = place.run(attach_other_version)
    assert "monarch_backend is 0.0.7 there and " in text and "install the same versions on both" in text, text


def test_exceeded_quota_is_the_reason_of_missing_pods(place: Place) -> None:
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}}
    path = f"/api/v1/namespaces/{place.namespace}/resourcequotas"
    place.kube.ask("POST", path, quota)
    place.kube.until(lambda: place.kube.ask("GET", f"{path}/few")["status"].get("hard"), "the quota to hold")
    text = place.run(fail, 15, {"replicas": 2, "image": IMAGE})
    assert "trainers[1]: pending (FailedCreate: " in text and "exceeded quota: few" in text, text


def cli_in_pod(job: KubernetesJob) -> list[str]:
    """Return the beginning of a command that runs in the first pod of a job."""
    return [sys.executable, "-m", "monarch_backend.cli", "k8s", "shell", str(job.path), "trainers[0]", "--"]


def run_two_jobs(kubeconfig: str, folder: Path) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(ended(job_of(kubeconfig, folder, name).add_mesh("trainers", 1, image=IMAGE)))
            for name in ("one", "two")
        ]
        for job in jobs:
            job.apply(READY_S, wait=False)
        meshes = [job.state(READY_S).trainers for job in jobs]
        names = [names_of_hosts(mesh) for mesh in meshes]
        secrets = [bytes.fromhex((folder / f"{name}.secret").read_text()) for name in ("one", "two")]
        address = jobs[1].status()[0].address
        strangers = [
            ask_as_stranger(cli_in_pod(jobs[0]), address, secrets[0]),
            ask_as_stranger([], address, bytes(32)),
        ]
        names.append(names_of_hosts(meshes[1]))
        jobs[0].kill()
        attach_to_workers([address], secret=secrets[1], timeout=5)
        return {"names": names, "states": [str(each) for each in jobs[1].status()], "strangers": strangers,
                "secret": secrets[1]}  # fmt: skip


def test_two_jobs_in_a_namespace_are_independent_and_strangers_are_refused(place_with_shell: Place) -> None:
    """The strangers are the pod of the other job, with its own secret, and a program beside the controller."""
    found = place_with_shell.run(run_two_jobs)
    [[one], [two], after] = found["names"]
    assert one.startswith("one-") and two.startswith("two-") and after == [two]
    assert found["states"] == ["trainers[0]: up"]
    for stranger in found["strangers"]:
        check_stranger(stranger, found["secret"])


class Version(Actor):
    """Actor that imports a module of a workspace."""

    @endpoint
    def read(self, folder: str) -> tuple[str, int]:
        return os.uname().nodename, runpy.run_path(f"{folder}/own_module.py")["VERSION"]


def sync_into_pods(kubeconfig: str, folder: Path) -> list[Any]:
    source = folder / "source"
    source.mkdir()
    with ended(job_of(kubeconfig, folder).add_mesh("trainers", 2, image=IMAGE)) as job:
        job.apply(READY_S)
        mesh = job.state().trainers
        actors = mesh.spawn_procs({"gpus": 1}).spawn("version", Version)
        found = []
        for version in (1, 2):
            (source / "own_module.py").write_text(f"VERSION = {version}\n")
            found.append(mesh.sync_workspace(source, "/tmp/workspace").written)  # each pod has a /tmp of its own
            found.append(list(actors.read.call("/tmp/workspace").get(30).values()))
        return found


@pytest.mark.parametrize("host", [INSIDE, OUTSIDE])
def test_workspace_is_copied_into_each_pod(place: Place, host: int) -> None:
    first_written, first, second_written, second = place.run(sync_into_pods, host=host)
    assert first_written == second_written == 2
    names = sorted(name for name, _ in first)
    assert len(set(names)) == 2 and {version for _, version in first} == {1}
    assert sorted(name for name, _ in second) == names and {version for _, version in second} == {2}


# This release of Kubernetes has no indexed Jobs, so the only pod of a mesh has its index from here.
INDEX = {"batch.kubernetes.io/job-completion-index": "0"}


def use_job_set(kubeconfig: str, folder: Path) -> list[list[str]]:
    job = job_of(kubeconfig, folder, controller="jobset")
    for mesh in ("trainers", "data_loaders"):
        job.add_mesh(mesh, 1, image=IMAGE, labels=INDEX, grace_period=2)
    with ended(job):
        job.apply(READY_S)
        state = job.state()
        return [names_of_hosts(state.trainers), names_of_hosts(state.data_loaders)]


def test_pods_of_a_job_set_are_used_and_its_objects_end_with_it(place: Place) -> None:
    with ThreadPoolExecutor() as pool:
        program = pool.submit(place.run, use_job_set)
        place.kube.start_jobs_of_job_set(place.namespace)
        [trainer], [loader] = program.result()
    assert "-trainers-0-" in trainer and "-data-loaders-0-" in loader
    place.kube.until(lambda: place.kube.objects(place.namespace) == [], "all objects of the job to be deleted")


DIES = """
import os, signal, sys
from monarch_backend.job import KubernetesJob
job = KubernetesJob(name="tethered", path=sys.argv[1], kubeconfig=sys.argv[2], controller="job", tether=3)
# The only pod has its index from here, as INDEX says.
job.add_mesh("trainers", 1, image=sys.argv[3], labels={"batch.kubernetes.io/job-completion-index": "0"})
job.apply(float(sys.argv[4]))
job.state().trainers.spawn_procs({"gpus": 1}).initialized.get(60)
print(job.status()[0], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def die(kubeconfig: str, folder: Path) -> tuple[str, int]:
    words = [sys.executable, "-c", DIES, str(folder / "tethered.json"), kubeconfig, IMAGE, str(READY_S)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=READY_S, check=False)
    return done.stdout + done.stderr, done.returncode


def states_of_tethered(_: str, folder: Path) -> list[str]:
    job = Job.load(folder / "tethered.json")
    states = [str(each) for each in job.status()]
    job.kill()
    return states


def test_tethered_job_and_its_objects_end_after_a_killed_program(place: Place) -> None:
    said, code = place.run(die)
    assert (said, code) == ("trainers[0]: up\n", -signal.SIGKILL)
    place.kube.until(lambda: place.kube.objects(place.namespace) == [], "all objects of the job to be deleted")
    [state] = place.run(states_of_tethered)
    assert state.startswith("trainers[0]: pending (Job tethered-") and state.endswith(" was deleted)")


def run_in_pod(kubeconfig: str, folder: Path) -> list[Any]:
    with ended(job_of(kubeconfig, folder).add_mesh("trainers", 1, image=IMAGE)) as job:
        job.apply(READY_S)
        words = [*cli_in_pod(job), "sh", "-c", "hostname; echo error >&2; exit 7"]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
        return [done.returncode, done.stdout, done.stderr, job.status()[0].log]


@pytest.mark.parametrize("host", [INSIDE, OUTSIDE])
def test_command_runs_in_the_pod(place_with_shell: Place, host: int) -> None:
    code, out, error, log = place_with_shell.run(run_in_pod, host=host)
    assert (code, error) == (7, "error\n") and log.startswith(f"pod {out.strip()} on node ")


def command(*words: str) -> tuple[int, str, str]:
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = main(["k8s", *words])
    return code, out.getvalue(), error.getvalue()


def use_commands(kubeconfig: str, folder: Path) -> list[tuple[int, str, str]]:
    with ended(job_of(kubeconfig, folder).add_mesh("trainers", 1, image=IMAGE)) as job:
        job.apply(READY_S)
        return [
            command("doctor", "--kubeconfig", kubeconfig),
            command("doctor", "--kubeconfig", kubeconfig, "--namespace", "default"),
            command("doctor", "--kubeconfig", kubeconfig, "--context", "none"),
            command("logs", str(job.path)),
            command("logs", str(job.path), "--host", "trainers[7]"),
            command("shell", str(job.path), "trainers[0]", "--", "true"),
        ]


def test_commands_print_permissions_and_logs(place: Place) -> None:
    allowed, refused, unknown, logs, no_host, shell = place.run(use_commands)
    assert allowed[0] == 0 and "v1.20.2" in allowed[1], allowed
    lacking = [line for line in allowed[1].splitlines() if "  no: " in line]
    assert [line.partition("  no: ")[2] for line in lacking] == [use for *_, use in OPTIONAL]
    assert refused[0] == 1 and "create apps:statefulsets  " in refused[1] and "deploy/k8s/role.yaml" in refused[2]
    assert unknown[0] == 1 and "none" in unknown[2]
    assert logs[0] == 0 and "trainers[0]: monarch_backend: this host is up: tcp://0.0.0.0:26600" in logs[1]
    assert no_host[0] == 1 and "no host trainers[7]" in no_host[2]
    assert shell[0] == 1 and "no command can be started" in shell[2] and "pods/exec" in shell[2], shell


NUMBERED = """
read uuid < /proc/sys/kernel/random/uuid
echo "start $uuid"
exec monarch-backend up --address 0.0.0.0:26600 --secret-from-stdin < /run/monarch-backend/secret
"""


def read_logs_of_a_restart(kubeconfig: str, folder: Path, kube: Cluster) -> list[tuple[int, str, str]]:
    job = job_of(kubeconfig, folder).add_mesh("trainers", 1, pod_template=template("sh", "-c", NUMBERED))
    with ended(job):
        job.apply(READY_S)
        found = [command("logs", str(job.path))]
        kube.tell_kubelet(f"oom {job.status()[0].log.split()[1]}")
        for status in job.watch(timeout=READY_S):
            if status.state == "up" and "restarted" in status.reason:
                break
        return [*found, command("logs", str(job.path), "--previous"), command("logs", str(job.path))]


def test_previous_log_is_that_from_before_the_restart(place: Place) -> None:
    logs = place.run(read_logs_of_a_restart, place.kube)
    assert [code for code, *_ in logs] == [0, 0, 0], logs
    before, previous, now = (re.findall(r"^trainers\[0\]: start (\S+)$", out, re.MULTILINE) for _, out, _ in logs)
    assert len(before) == 1 and previous == before and len(now) == 1 and now != before, logs
