"""Pods that are deleted, replaced or lost while a program uses them; resize; programs outside; the API server's end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import monarch_backend.actor
from monarch_backend.actor import MeshFailure, SupervisionError
from monarch_backend.job import Job, JobError, KubernetesJob
from tests.job.support import Where
from tests.k8s.cluster import ADMIN, OUTSIDE, USER, Cluster
from tests.k8s.conftest import Place
from tests.k8s.kubelet import Api
from tests.k8s.test_kubernetes_job import IMAGE, READY_S, ended, job_of, names_of_hosts, template

pytestmark = [pytest.mark.slow, pytest.mark.k8s]


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
        with pytest.raises(SupervisionError) as failure:
            while True:
                actors.slice(hosts=1).machine.call_one().get(30)
        survivor = None
        try:
            survivor = actors.slice(hosts=0).machine.call_one().get(30)
        except SupervisionError as error:
            survivor = str(error)
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
    print(found)
    assert found["again"] == found["names"] and found["survivor"] == found["names"][0]
    before, after = found["addresses"]
    assert before[0] == after[0] and before[1] != after[1]
