"""Pods that are deleted, replaced or lost while a program uses them; resize; programs outside; the API server's end."""

from __future__ import annotations

import base64
import ctypes
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import monarch_backend.actor
from monarch_backend.actor import Channel, MeshFailure, Restart, SupervisionError
from monarch_backend.job import Job, JobError, KubernetesJob
from tests.job.support import Saver, Where
from tests.k8s.cluster import ADMIN, INSIDE, OUTSIDE, Cluster
from tests.k8s.conftest import Place
from tests.k8s.kubelet import Api
from tests.k8s.service_account import ServiceAccountToken
from tests.k8s.test_kubernetes_job import IMAGE, READY_S, ended, job_of, names_of_hosts
from tests.support import hosts as namespaces
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.k8s]

PRIORITY = "urgent"
"""Name of a PriorityClass."""


def record_failures() -> list[MeshFailure]:
    """Return a list that gets the failures of meshes, in place of the program's end."""
    failures: list[MeshFailure] = []
    monarch_backend.actor.unhandled_fault_hook = failures.append
    return failures


def delete_pod(admin: Api, namespace: str, name: str) -> None:
    admin("DELETE", f"/api/v1/namespaces/{namespace}/pods/{name}")


def replace_a_pod(kubeconfig: str, folder: Path, server: str, namespace: str) -> dict[str, Any]:
    job = job_of(kubeconfig, folder).add_mesh("trainers", 2, image=IMAGE, grace_period=2)
    with ended(job):
        job.apply(READY_S)
        mesh = job.state().trainers
        actors = mesh.spawn_procs({"gpus": 1}).spawn("where", Where)
        names = [actors.slice(hosts=index).machine.call_one().get(30) for index in range(2)]
        before = [each.address for each in job.status()]
        delete_pod(Api(server, ADMIN), namespace, names[1])
        failures = record_failures()
        wait_until(lambda: failures)
        with pytest.raises(SupervisionError) as failure:
            actors.slice(hosts=1).machine.call_one().get(30)
        survivor = actors.slice(hosts=0).machine.call_one().get(30)
        again = job.state(READY_S).trainers
        return {
            "names": names,
            "failures": [str(failure.value), *map(str, failures)],
            "survivor": survivor,
            "again": names_of_hosts(again),
            "addresses": [before, [each.address for each in job.status()]],
        }


def test_deleted_pod_fails_with_the_reason_and_is_found_again_under_its_new_address(place: Place) -> None:
    found = place.run(replace_a_pod, place.kube.server, place.namespace)
    assert all("trainers-1: the pod is being deleted" in text for text in found["failures"]), found["failures"]
    assert found["again"] == found["names"] and found["survivor"] == found["names"][0]
    before, after = found["addresses"]
    assert before[0] == after[0] and before[1] != after[1]


def restart_on_the_next_pod(kubeconfig: str, folder: Path, server: str, namespace: str, index: int) -> dict[str, Any]:
    job = job_of(kubeconfig, folder).add_mesh("trainers", 2, image=IMAGE, grace_period=2)
    with ended(job):
        job.apply(READY_S)
        procs = job.state().trainers.spawn_procs({"gpus": 1}, restart=Restart())
        actors = procs.spawn("where", Where)
        failures = record_failures()
        names = list(actors.machine.call().get(30).values())
        before = [each.address for each in job.status()]

        def answer() -> str | None:
            try:
                return actors.slice(hosts=index).machine.call_one().get(30)
            except SupervisionError:
                return None

        delete_pod(Api(server, ADMIN), namespace, names[index])
        wait_until(lambda: answer() is None)
        wait_until(answer)
        again = wait_for_all(actors)
        after = [each.address for each in job.status()]
        file = job._read()
        assert file is not None
        return {"names": [names, again], "addresses": [before, after], "failures": [str(each) for each in failures],
                "file": [each.address for each in file.hosts]}  # fmt: skip


def wait_for_all(actors: Any) -> list[str]:
    """Return where the actors of all ranks are, once all answer."""

    def answers() -> list[str]:
        try:
            return list(actors.machine.call().get(30).values())
        except SupervisionError:
            return []

    return wait_until(answers)


@pytest.mark.parametrize(
    ("host", "index"), [(INSIDE, 1), (OUTSIDE, 1), (OUTSIDE, 0)], ids=["inside", "outside", "gateway"]
)
def test_ranks_of_a_deleted_pod_are_restarted_on_the_one_that_replaces_it(place: Place, host: int, index: int) -> None:
    """From outside the first pod is the gateway to the other, which is attached again, too."""
    found = place.run(restart_on_the_next_pod, place.kube.server, place.namespace, index, host=host)
    names, again = found["names"]
    assert again == names and len(set(names)) == 2 and found["failures"] == []
    before, after = found["addresses"]
    assert before[1 - index] == after[1 - index] and before[index] != after[index]
    assert found["file"] == after


def end_a_pod(kubeconfig: str, folder: Path, kube: Cluster, how: str) -> tuple[list[str], list[str]]:
    with ended(job_of(kubeconfig, folder).add_mesh("trainers", 1, image=IMAGE)) as job:
        job.apply(READY_S)
        procs = job.state().trainers.spawn_procs({"gpus": 1})
        failures = record_failures()
        procs.spawn("where", Where).machine.call_one().get(30)
        kube.tell_kubelet(f"{how} {job.status()[0].log.split()[1]}")
        wait_until(lambda: failures)
        return [str(each) for each in failures], names_of_hosts(job.state(READY_S).trainers)


@pytest.mark.parametrize(
    ("how", "reason"),
    [("oom", "OOMKilled, exit code 137"), ("evict", "Evicted: The node was low on resource: memory.")],
    ids=["oom", "evict"],
)
def test_pod_that_kubernetes_ends_fails_with_the_reason_and_is_used_again(place: Place, how: str, reason: str) -> None:
    """After "oom" its container is restarted. After "evict" a StatefulSet replaces the pod within milliseconds."""
    [failure], [name] = place.run(end_a_pod, place.kube, how)
    assert reason in failure, failure
    assert name.endswith("-trainers-0")


def resize(kubeconfig: str, folder: Path) -> list[list[str]]:
    found = []
    with ended(job_of(kubeconfig, folder).add_mesh("trainers", 2, image=IMAGE)) as job:
        job.apply(READY_S)
        mesh = job.state().trainers
        actors = mesh.spawn_procs({"gpus": 1}).spawn("where", Where)
        for count in (None, 4, 3):
            if count is not None:
                job.resize("trainers", count, READY_S)
                mesh = job.state().trainers
            found.append(names_of_hosts(mesh))
        # The processes of the first mesh are on hosts that were never ended.
        found.append([actors.slice(hosts=index).machine.call_one().get(30) for index in range(2)])
    return found


def test_resize_adds_and_removes_pods_and_keeps_the_others(place: Place) -> None:
    two, four, three, kept = place.run(resize)
    assert (len(two), len(four), len(three)) == (2, 4, 3)
    assert four[:3] == three and three[:2] == two == kept


def use_from_outside(kubeconfig: str, folder: Path) -> dict[str, Any]:
    with ended(
        job_of(kubeconfig, folder).add_mesh("trainers", 3, image=IMAGE).add_mesh("loaders", 1, image=IMAGE)
    ) as job:
        job.apply(READY_S)
        state = job.state(READY_S)
        names = [names_of_hosts(state.trainers), names_of_hosts(state.loaders)]
        actors = state.trainers.spawn_procs({"gpus": 1}).spawn("where", Where)
        other = state.loaders.spawn_procs({"gpus": 1}).spawn("where", Where)
        passed = actors.slice(hosts=2).next_name.call_one(other).get(30)
        data = "x" * 3_000_000
        echoed = other.echo.call_one(data).get(60) == data
        log = job.log("trainers", 0, lines=5)
    return {"names": names, "passed": passed, "echoed": echoed, "log": log}


def test_program_outside_the_cluster_reaches_pods_through_the_api_server(place: Place) -> None:
    found = place.run(use_from_outside, host=OUTSIDE)
    trainers, [loader] = found["names"]
    assert [name[-1] for name in trainers] == ["0", "1", "2"]
    assert found["passed"] == loader and found["echoed"]
    assert "this host is up" in found["log"]


def lose_a_forwarded_connection(kubeconfig: str, folder: Path, kube: Cluster) -> list[Any]:
    with ended(job_of(kubeconfig, folder).add_mesh("trainers", 2, image=IMAGE)) as job:
        job.apply(READY_S)
        failures = record_failures()
        actors = job.state(READY_S).trainers.spawn_procs({"gpus": 1}).spawn("where", Where)
        names = []
        for _ in range(3):
            names.append([actors.slice(hosts=index).machine.call_one().get(30) for index in range(2)])
            kube.tell_kubelet("drop")
        names.append([actors.slice(hosts=index).machine.call_one().get(30) for index in range(2)])
        return [names, [str(each) for each in failures]]


def test_forwarded_connection_that_is_lost_is_made_anew_without_a_failure(place: Place) -> None:
    [first, *others], failures = place.run(lose_a_forwarded_connection, place.kube, host=OUTSIDE)
    assert failures == []
    assert others == [first] * 3 and len(set(first)) == 2


def wait_for_file(path: Path) -> None:
    wait_until(path.exists)


def use_without_api_server(kubeconfig: str, folder: Path) -> list[Any]:
    with ended(job_of(kubeconfig, folder).add_mesh("trainers", 1, image=IMAGE)) as job:
        job.apply(READY_S)
        mesh = job.state().trainers
        (folder / "up").touch()
        wait_for_file(folder / "stopped")
        during = names_of_hosts(mesh)
        (folder / "used").touch()
        # This waits until the server is back. It takes the node for lost until its next heartbeat.
        return [during, str(next(each for each in job.watch(timeout=60) if each.state == "up"))]


def test_restart_of_the_api_server_does_not_disturb_a_job(place: Place) -> None:
    with ThreadPoolExecutor() as pool:
        program = pool.submit(place.run, use_without_api_server)
        try:
            wait_for_file(place.folder / "up")
            place.kube.stop_api_server()
            (place.folder / "stopped").touch()
            wait_for_file(place.folder / "used")
        finally:
            if "kube-apiserver" not in place.kube.processes:
                place.kube.start_api_server()
        names, state = program.result()
    assert names[0].endswith("trainers-0") and state == "trainers[0]: up"


def use_outside_through_a_restart(kubeconfig: str, folder: Path) -> dict[str, Any]:
    with ended(job_of(kubeconfig, folder).add_mesh("trainers", 2, image=IMAGE)) as job:
        job.apply(READY_S)
        failures = record_failures()
        mesh = job.state(READY_S).trainers
        actors = mesh.spawn_procs({"gpus": 1}).spawn("where", Where)
        restarted = mesh.spawn_procs({"gpus": 1}, restart=Restart()).spawn("where", Where)
        names = [list(each.machine.call().get(30).values()) for each in (actors, restarted)]
        (folder / "up").touch()
        wait_for_file(folder / "back")
        # The pause is longer than `silence`, so the mesh is lost.
        wait_until(lambda: failures)
        with pytest.raises(SupervisionError):
            actors.machine.call().get(30)
        names.append(wait_for_all(restarted))
        names.append(names_of_hosts(job.state(READY_S).trainers))
        return {"names": names, "failures": [str(each) for each in failures]}


def test_pods_are_reached_again_from_outside_after_a_restart_of_the_api_server(place: Place) -> None:
    with ThreadPoolExecutor() as pool:
        program = pool.submit(place.run, use_outside_through_a_restart, host=OUTSIDE)
        try:
            wait_for_file(place.folder / "up")
            place.kube.stop_api_server()
        finally:
            if "kube-apiserver" not in place.kube.processes:
                place.kube.start_api_server()
        (place.folder / "back").touch()
        found = program.result()
    [first, *others] = found["names"]
    assert others == [first] * 3 and len(set(first)) == 2
    assert all("is lost" in failure for failure in found["failures"])


def use_with_expired_token(kubeconfig: str, folder: Path, kube: Cluster, namespace: str) -> dict[str, Any]:
    own = folder / "kubeconfig"
    own.write_text(Path(kubeconfig).read_text())
    token = ServiceAccountToken(kube.server, namespace, own)
    with ended(job_of(str(own), folder).add_mesh("trainers", 2, image=IMAGE)) as job:
        job.apply(READY_S)
        failures = record_failures()
        actors = job.state(READY_S).trainers.spawn_procs({"gpus": 1}).spawn("where", Where)
        names = [list(actors.machine.call().get(30).values())]
        token.expire()
        with pytest.raises(JobError) as refused:
            job.status()
        names.append(list(actors.machine.call().get(30).values()))
        token.renew()
        # Nothing has asked the API server with the new token before the connection to the pods is made anew.
        kube.tell_kubelet("drop")
        names.append(list(actors.machine.call().get(30).values()))
        return {
            "error": str(refused.value), "names": names, "failures": [str(each) for each in failures],
            "log": job.log("trainers", 0, lines=5), "states": [str(each) for each in job.status()],
        }  # fmt: skip


@pytest.mark.parametrize("host", [INSIDE, OUTSIDE])
def test_expired_token_is_named_and_a_renewed_one_is_taken(place: Place, host: int) -> None:
    found = place.run(use_with_expired_token, place.kube, place.namespace, host=host)
    assert "does not accept the credentials, or they have expired" in found["error"]
    [first, *others] = found["names"]
    assert others == [first] * 2 and len(set(first)) == 2 and found["failures"] == []
    assert "this host is up" in found["log"]
    assert found["states"] == ["trainers[0]: up", "trainers[1]: up"]


def lose_a_node(kubeconfig: str, folder: Path, kube: Cluster) -> dict[str, Any]:
    job = job_of(kubeconfig, folder, force_delete=True).add_mesh("trainers", 2, image=IMAGE, grace_period=1)
    with ended(job):
        job.apply(READY_S)
        mesh = job.state().trainers
        failures = record_failures()
        actors = mesh.spawn_procs({"gpus": 1}).spawn("where", Where)
        actors.machine.call().get(30)
        node = job.status()[1].log.rpartition(" ")[2]
        kube.tell_kubelet(f"crash {node}")
        wait_until(lambda: failures)
        reasons: list[str] = []
        for status in job.watch(timeout=60):
            if status.index == 1:
                reasons.append(status.reason)
                if status.state == "up" and len(reasons) > 1:
                    break
        again = job.state(READY_S).trainers
        return {"node": node, "failures": [str(each) for each in failures], "reasons": reasons,
                "again": names_of_hosts(again), "where": job.status()[1].log}  # fmt: skip


def test_pod_of_a_crashed_node_is_force_deleted_and_replaced_elsewhere(place: Place) -> None:
    kube = place.kube
    try:
        found = place.run(lose_a_node, kube)
    finally:
        for node in ("n0", "n1", "n2"):
            kube.tell_kubelet(f"start {node}")
        kube.until(lambda: len(kube.ready_nodes()) == 3, "the crashed node to return")
    assert found["failures"] and len(found["again"]) == 2
    assert any("does not respond" in reason for reason in found["reasons"])
    assert found["node"] not in found["where"]


def attach_pods_of_others(kubeconfig: str, folder: Path) -> list[Any]:
    with ended(job_of(kubeconfig, folder, "others").add_mesh("workers", 2, image=IMAGE)) as owner:
        owner.apply(READY_S)
        secret, label = folder / "others.secret", f"monarch-backend/job={content_id(owner)}"
        job = job_of(kubeconfig, folder, "mine", secret_file=secret).attach_mesh("trainers", 2, label)
        with ended(job):
            job.apply(READY_S)
            names = names_of_hosts(job.state().trainers)
            with pytest.raises(JobError, match="started by others"):
                job.resize("trainers", 3)
        return [names, [str(each) for each in owner.status()]]


def content_id(job: Job) -> str:
    file = job._read()
    assert file is not None
    return file.id


def test_attached_pods_of_others_are_used_and_not_ended(place: Place) -> None:
    names, states = place.run(attach_pods_of_others)
    assert [name[-1] for name in names] == ["0", "1"]
    assert states == ["workers[0]: up", "workers[1]: up"]


def see_a_notice(kubeconfig: str, folder: Path, server: str, namespace: str) -> list[Any]:
    job = job_of(kubeconfig, folder).add_mesh("trainers", 1, image=IMAGE, grace_period=60, notice=50)
    with ended(job):
        job.apply(READY_S)
        procs = job.state().trainers.spawn_procs({"gpus": 1})
        actor = procs.spawn("where", Where)
        name = actor.machine.call_one().get(30)
        port, received = Channel.open()
        procs.spawn("saver", Saver, port).initialized.get(30)
        delete_pod(Api(server, ADMIN), namespace, name)
        ending = next(each for each in job.watch(timeout=30) if each.state != "up")
        notice = received.recv().get(30)
        saved = actor.machine.call_one().get(30)  # such as a checkpoint
        procs.stop().get(30)
        begun = time.monotonic()
    return [str(ending), notice == ("Saver", name, "it has received SIGTERM", notice[3]), saved == name,
            time.monotonic() - begun]  # fmt: skip


def test_pod_with_notice_works_on_after_its_deletion_until_the_job_ends(place: Place) -> None:
    ending, is_announced, saved, seconds = place.run(see_a_notice, place.kube.server, place.namespace)
    assert ending == "trainers[0]: ending (the pod is being deleted)" and is_announced and saved
    assert seconds < 30  # kill() does not wait for the notice


def see_a_preemption(kubeconfig: str, folder: Path) -> list[Any]:
    gpus: dict[str, Any] = {"image": IMAGE, "resources": {"nvidia.com/gpu": 8}}  # all that the cluster has
    job = job_of(kubeconfig, folder, "low").add_mesh("trainers", 1, **gpus, grace_period=60, notice=50)
    urgent = job_of(kubeconfig, folder, "high").add_mesh("trainers", 1, **gpus, priority_class=PRIORITY)
    with ended(job), ended(urgent):
        job.apply(READY_S)
        procs = job.state().trainers.spawn_procs({"gpus": 1})
        port, received = Channel.open()
        procs.spawn("saver", Saver, port).initialized.get(30)
        urgent.apply(READY_S, wait=False)
        ending = next(each for each in job.watch(timeout=60) if each.state != "up")
        notice = received.recv().get(30)
        procs.stop().get(30)
        job.kill()
        urgent.apply(READY_S)
        return [ending.state, notice[2], names_of_hosts(urgent.state().trainers)]


def test_preempted_pod_announces_its_end_and_leaves_its_place(place: Place) -> None:
    classes = "/apis/scheduling.k8s.io/v1/priorityclasses"
    place.kube.ask("POST", classes, {"metadata": {"name": PRIORITY}, "value": 1000})
    try:
        state, notice, [name] = place.run(see_a_preemption)
    finally:
        place.kube.ask("DELETE", f"{classes}/{PRIORITY}")
    assert (state, notice) == ("ending", "it has received SIGTERM")
    assert name.startswith("high-")


def replace_a_pod_of_a_job(kubeconfig: str, folder: Path, server: str, namespace: str) -> list[list[str]]:
    # This release of Kubernetes has no indexed Jobs, so the only pod has its index from here.
    index = {"batch.kubernetes.io/job-completion-index": "0"}
    job = job_of(kubeconfig, folder, controller="job").add_mesh("trainers", 1, image=IMAGE, labels=index)
    with ended(job):
        job.apply(READY_S)
        before = names_of_hosts(job.state().trainers)
        delete_pod(Api(server, ADMIN), namespace, before[0])
        return [before, names_of_hosts(job.state(READY_S).trainers)]


def test_deleted_pod_of_a_job_is_replaced(place: Place) -> None:
    before, after = place.run(replace_a_pod_of_a_job, place.kube.server, place.namespace)
    assert before != after and len(after) == 1


def use_in_cluster(_: str, folder: Path, server: str, token: str, certificate: str) -> list[Any]:
    secrets = enter_pod_files(folder)
    for name, text in (
        ("token", token),
        ("ca.crt", certificate),
        ("namespace", folder.joinpath("namespace").read_text()),
    ):
        (secrets / name).write_text(text)
    address = server.removeprefix("https://").split(":")
    os.environ.update(KUBERNETES_SERVICE_HOST=address[0], KUBERNETES_SERVICE_PORT=address[1])
    job = KubernetesJob(name="inner", path=folder / "inner.json", in_cluster=True)
    with ended(job.add_mesh("trainers", 1, image=IMAGE)):
        job.apply(READY_S)
        return names_of_hosts(job.state().trainers)


def enter_pod_files(folder: Path) -> Path:
    """Give this process the folder of a pod's service account, for it alone."""
    namespaces._libc("unshare", namespaces._NEW_NS)
    namespaces._libc("mount", b"tmpfs", b"/run", b"tmpfs", ctypes.c_ulong(0), None)  # /var/run is a link to it
    secrets = Path("/var/run/secrets/kubernetes.io/serviceaccount")
    secrets.mkdir(parents=True)
    return secrets


def test_program_in_the_cluster_uses_its_service_account(place: Place) -> None:
    def token() -> str:
        found = place.kube.ask("GET", f"/api/v1/namespaces/{place.namespace}/secrets")["items"]
        data = [each["data"] for each in found if each["metadata"]["name"].startswith("monarch-backend-token")]
        return base64.b64decode(data[0]["token"]).decode() if data else ""

    (place.folder / "namespace").write_text(place.namespace)
    certificate = (place.kube.folder / "pki/api.crt").read_text()
    [name] = place.run(use_in_cluster, place.kube.server, place.kube.until(token, "the account's token"), certificate)
    assert name.startswith("inner-")
