"""Pods of a KubernetesJob that a JobSet or indexed Jobs start: objects, submission, states, tether."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from monarch_backend._hosts import daemon
from monarch_backend._hosts.agent import NEVER_ATTACHED
from monarch_backend._job.state_file import HostEntry
from monarch_backend._processes.spawner import Exited
from monarch_backend._transport.network.auth import new_secret
from monarch_backend.job import Job, JobError, KubernetesJob
from tests.job.test_kubernetes_objects import IMAGE, manifest
from tests.support.kubernetes_api import ApiServer, api_server
from tests.support.ranks import run_ranks

ID = "0123456789abcdef"
JOB_SET_FIELDS = {
    "spec": {
        "coordinator", "failurePolicy", "managedBy", "network", "replicatedJobs", "startupPolicy", "successPolicy",
        "suspend", "ttlSecondsAfterFinished", "volumeClaimPolicies",
    },
    "network": {"enableDNSHostnames", "publishNotReadyAddresses", "subdomain"},
    "replicatedJob": {"dependsOn", "groupName", "name", "replicas", "template"},
}  # fmt: skip
"""Fields of jobset.x-k8s.io/v1alpha2, from the reference at https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/."""


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    with api_server(tmp_path) as made:
        yield made


def job_of(api: ApiServer, controller: str, **options: Any) -> KubernetesJob:
    path = api.kubeconfig.with_name("job.json")
    job = KubernetesJob(name="train", path=path, kubeconfig=api.kubeconfig, controller=controller, **options)
    return job.add_mesh("trainers", 2, image=IMAGE).add_mesh("data_loaders", 1, image=IMAGE)


def of_kind(made: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in made if each["kind"] == kind]


def add_event(api: ApiServer, reason: str, message: str, **subject: str) -> None:
    event = {
        "kind": "Event",
        "metadata": {"name": "e"},
        "reason": reason,
        "message": message,
        "involvedObject": subject,
    }
    api.objects["/api/v1/namespaces/team/events/e"] = event


def remove_pods(api: ApiServer) -> None:
    """Remove all pods, as the controllers of a cluster do after the end of what started them."""
    for path in [path for path in api.objects if "/pods/" in path]:
        del api.objects[path]


@pytest.mark.parametrize("tether", [None, 60])
def test_job_set_has_the_fields_of_its_api_and_valid_jobs(tether: float | None) -> None:
    job = KubernetesJob(name="Train_1", controller="jobset", tether=tether)
    job.add_mesh("trainers", 4, image=IMAGE, resources={"nvidia.com/gpu": 8}).add_mesh("data_loaders", 2, image=IMAGE)
    made = job.manifests(ID, bytes(32))
    assert [each["kind"] for each in made] == ["Secret", "JobSet"]
    spec = made[1]["spec"]
    assert made[1]["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert spec.keys() <= JOB_SET_FIELDS["spec"] and spec["network"].keys() <= JOB_SET_FIELDS["network"]
    assert [(each["name"], each["replicas"]) for each in spec["replicatedJobs"]] == [
        ("trainers", 1),
        ("data-loaders", 1),
    ]
    for each, mesh, count in zip(spec["replicatedJobs"], ("trainers", "data_loaders"), (4, 2), strict=True):
        assert each.keys() <= JOB_SET_FIELDS["replicatedJob"]
        template = each["template"]
        assert template["spec"]["template"]["metadata"]["labels"]["monarch-backend/mesh"] == mesh
        assert template["spec"]["completions"] == template["spec"]["parallelism"] == count
        as_job = {"apiVersion": "batch/v1", "kind": "Job", **template, "metadata": {"name": "x"}}
        for version in ("1.31", "1.37"):
            kubernetes_validate.validate(as_job, version, strict=True)
    assert spec.get("ttlSecondsAfterFinished") == (None if tether is None else 0)


@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_jobs_follow_the_schemas_of_kubernetes(version: str) -> None:
    code, made, _ = manifest("--mesh", "trainers=4", "--image", IMAGE, "--controller", "job")
    assert code == 0
    assert [each["kind"] for each in made] == ["Secret", "Service", "Job"]
    for each in made:
        kubernetes_validate.validate(each, version, strict=True)
    spec = made[2]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    assert spec["template"]["spec"]["subdomain"] == made[1]["metadata"]["name"]  # each pod has a name


def test_tether_is_an_option_of_hosts_and_of_jobs_only() -> None:
    job = KubernetesJob(controller="job", tether=60).add_mesh("trainers", 1, image=IMAGE)
    [made] = of_kind(job.manifests(ID, bytes(32)), "Job")
    assert made["spec"]["ttlSecondsAfterFinished"] == 0
    command = made["spec"]["template"]["spec"]["containers"][0]["command"][-1]
    assert "--signal-exit-code 143 --tether 60 --first-tether 600 <" in command
    with pytest.raises(ValueError, match="a StatefulSet starts pods again"):
        KubernetesJob(tether=60)
    with pytest.raises(ValueError, match="'statefulset', 'jobset', 'job'"):
        KubernetesJob(controller="deployment")


@pytest.mark.parametrize("controller", ["jobset", "job"])
def test_other_objects_belong_to_the_jobs(api: ApiServer, controller: str) -> None:
    job = job_of(api, controller, tether=60)
    job.apply(wait=False)
    kinds = [path.split("/")[-1] for method, path in api.requests if method == "POST"]
    if controller == "jobset":
        assert kinds == ["jobsets", "secrets"]
    else:
        assert sorted(kinds[:2]) == ["jobs", "jobs"] and sorted(kinds[2:]) == ["secrets", "services", "services"]
    workloads = {each["metadata"]["uid"] for each in api.objects.values() if each["kind"] in ("Job", "JobSet")}
    others = [each for each in api.objects.values() if each["kind"] in ("Secret", "Service")]
    for each in others:
        assert {owner["uid"] for owner in each["metadata"]["ownerReferences"]} == workloads
    Job.load(job.path).kill()
    assert api.names() == []


def test_missing_crd_is_named_with_the_other_controllers(api: ApiServer) -> None:
    api.missing = ["/apis/jobset.x-k8s.io"]
    job = job_of(api, "jobset")
    with pytest.raises(JobError, match=r"has no JobSets \(jobset.x-k8s.io/v1alpha2\).*install JobSet.*'statefulset'"):
        job.apply(wait=False)
    assert api.names() == []
    assert not job.path.exists()


def test_second_submission_finds_the_owner_of_the_first(api: ApiServer) -> None:
    job = job_of(api, "jobset")
    file = job._own_file()
    first, _ = job._submit(file, bytes(32)), job._submit(file, bytes(32))
    assert first["namespace"] == "team"
    assert [name.partition("/")[0] for name in api.names()] == ["JobSet", "Secret"]


def test_pods_of_a_job_set_have_their_index_and_its_reasons(api: ApiServer) -> None:
    job = job_of(api, "jobset")
    job.apply(wait=False)
    [name] = [each.partition("/")[2] for each in api.names() if each.startswith("JobSet")]
    [labels] = [each["metadata"]["labels"] for each in api.objects.values() if each["kind"] == "JobSet"]
    for index, phase in ((0, "Running"), (1, "Succeeded")):
        own = {**labels, "monarch-backend/mesh": "trainers", "batch.kubernetes.io/job-completion-index": str(index)}
        api.add_pod(f"{name}-trainers-0-{index}-x7k2p", own, phase=phase)
    assert [str(each) for each in job.status()] == [
        "trainers[0]: up", "trainers[1]: gone (its phase is Succeeded)", "data_loaders[0]: pending (not created yet)",
    ]  # fmt: skip
    with pytest.raises(JobError, match=r"cannot run: trainers\[1\]: gone"):  # a Job starts no other pod for it
        job.apply(timeout=60)
    add_event(api, "FailedCreate", "exceeded quota: few", kind="Job", name=f"{name}-data-loaders-0")
    assert job.status()[2].reason == "FailedCreate: exceeded quota: few"
    for each in api.objects.values():
        if each["kind"] == "JobSet":
            each["spec"]["suspend"] = True
    assert "is suspended, such as by Kueue" in job.status()[2].reason
    with pytest.raises(JobError, match="the pods of a JobSet have a fixed number"):
        job.resize("trainers", 3)
    remove_pods(api)
    job.kill()


def test_replaced_pod_has_the_reason_of_its_eviction_from_its_event(api: ApiServer) -> None:
    job = job_of(api, "statefulset")
    job.apply(wait=False)
    [labels] = [each["metadata"]["labels"] for each in api.objects.values() if each["kind"] == "Secret"]
    for name, mesh in (("trainers-0", "trainers"), ("trainers-1", "trainers"), ("loaders-0", "data_loaders")):
        api.add_pod(name, {**labels, "monarch-backend/mesh": mesh})
    lost = HostEntry("trainers", 0, "trainers-0", "", None, "", "uid-before/0")
    other = HostEntry("trainers", 1, "trainers-1", "", None, "", "uid-trainers-1/0")
    assert job._why_lost([lost, other]) == [
        ("trainers-0 was replaced: up", True), ("trainers-1 is up for the scheduler", False),
    ]  # fmt: skip
    add_event(api, "Evicted", "The node was low on resource: memory.", kind="Pod", uid="uid-before")
    assert job._why_lost([lost, other]) == [
        ("trainers-0 was replaced: up (Evicted: The node was low on resource: memory.)", True),
        ("trainers-1 is up for the scheduler", False),
    ]
    api.forbidden = ["/api/v1/namespaces/team/events"]
    assert job._why_lost([lost]) == [("trainers-0 was replaced: up", True)]
    remove_pods(api)
    job.kill()


@pytest.mark.parametrize("path", ["/api/v1/namespaces/team/events", "/apis/apps/v1/namespaces/team/statefulsets"])
def test_missing_pods_without_the_permission_for_their_reason_are_pending(api: ApiServer, path: str) -> None:
    job = job_of(api, "statefulset")
    job.apply(wait=False)
    api.forbidden = [path]
    state = str(job.status()[0])
    assert state.startswith("trainers[0]: pending (not created yet, and the reason cannot be read: ")
    assert path in state
    api.forbidden = []
    job.kill()


UP = [sys.executable, "-m", "monarch_backend.cli", "up", "--address", "127.0.0.1:0", "--signal-exit-code", "143"]


@pytest.mark.parametrize(("words", "code"), [(["--tether", "0.1"], 0), ([], 143)])
def test_host_that_ends_by_its_tether_has_another_exit_code(words: list[str], code: int) -> None:
    process = subprocess.Popen([*UP, *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert "is up" in process.stdout.readline()
        if not words:
            process.terminate()
        assert process.wait(30) == code


def test_first_controller_is_waited_for_longer_also_after_failed_attempts() -> None:
    def ends(_rank: int, _address: str) -> list[bool]:
        ended, checked = threading.Event(), threading.Semaphore(0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(daemon.os, "kill", lambda *_: ended.set())
            host = daemon.Daemon(new_secret())
            later = host._tcp.later
            patch.setattr(host._tcp, "later", lambda *call: (checked.release(), later(*call)))
            host._tcp.start()
            host.end_without_controller(0.01, 600)
            for _ in range(5):  # more than its tether
                checked.acquire()
            result = [ended.is_set()]
            host._agents[1] = "0" * 32
            host._event(Exited(1, 0, NEVER_ATTACHED))
            for _ in range(5):
                if not ended.is_set():
                    checked.acquire(timeout=1)
            result.append(ended.is_set())
            host._agents[2] = "1" * 32
            host._event(Exited(2, 0, 0))
            result.append(ended.wait(10))
            host._tcp.close()
        return result

    assert run_ranks(ends, 1, backend=None) == [[False, False, True]]


CONTROLLER = """
import contextlib, sys
from monarch_backend.hosts import attach, attach_to_workers

address, nowhere, secret = sys.argv[1], "127.0.0.1:1", bytes.fromhex(sys.argv[2])
for failing in (lambda: attach_to_workers([address, nowhere], secret=secret, timeout=3),
                lambda: attach(address, [nowhere], secret=secret, timeout=3)):
    with contextlib.suppress(ConnectionError):
        failing()
        raise SystemExit("it was attached")
attach_to_workers([address], secret=secret, timeout=60).spawn_procs({"gpus": 1}).initialized.get(60)
"""


@pytest.mark.slow
def test_agent_of_a_failed_attach_is_no_attached_controller() -> None:
    def codes(_rank: int, _address: str) -> list[int]:
        ends: queue.SimpleQueue[int] = queue.SimpleQueue()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                daemon.Daemon, "_event", lambda _, e: ends.put(e.returncode) if isinstance(e, Exited) else None
            )
            secret = new_secret()
            host = daemon.Daemon(secret)
            try:
                where = ":".join(map(str, host.start("127.0.0.1", 0)))
                subprocess.run([sys.executable, "-c", CONTROLLER, where, secret.hex()], check=True, timeout=120)
                return [ends.get(timeout=30) for _ in range(3)]
            finally:
                host.close()

    assert run_ranks(codes, 1, backend=None) == [[NEVER_ATTACHED, NEVER_ATTACHED, 0]]
