"""Kubernetes objects of a job: a Secret, and for each mesh a headless Service and a StatefulSet or a Job, or a JobSet.

This module makes dictionaries. It talks to no cluster.
"""

from __future__ import annotations

import base64
import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

Manifest = dict[str, Any]

PORT = 26600
JOB_LABEL = "monarch-backend/job"
MESH_LABEL = "monarch-backend/mesh"
NOTICE_ANNOTATION = "monarch-backend/notice"
"""Annotation of a pod with the seconds for which its host goes on after SIGTERM."""
MANAGED = {"app.kubernetes.io/managed-by": "monarch-backend"}
SECRET_FOLDER = "/run/monarch-backend"
SECRET_KEY = "secret"
CONTAINER = "monarch"
"""Name of the container that runs the host, if a pod template has several."""
GRACE_PERIOD_S = 30
CONTROLLERS = ("statefulset", "jobset", "job")
"""Kinds of objects that start the pods of a mesh."""
JOBSET_VERSION = "jobset.x-k8s.io/v1alpha2"
FIRST_CONTROLLER_S = 600.0
"""Seconds for which a tethered pod waits for its first controller, which waits until all pods listen."""
NO_LIMIT = 2**31 - 1
"""Largest number of restarts that a Job can have."""
EXIT_CODE = 143
"""Exit code of a Job's host after SIGTERM. After 0 the Job would take its work as done, and start no other pod."""
MAX_NAME = 52
"""Limit of a StatefulSet's name: Kubernetes appends a hash to it in a label of 63 characters."""


def object_name(job: str, job_id: str, mesh: str = "") -> str:
    """Return the name of a job's object. Two jobs, and two meshes of a job, have different ones.

    The name of a Service begins with a letter.

    >>> object_name("train", "0123456789abcdef", "trainers")
    'train-01234567-trainers'
    >>> object_name("7b-sft", "0123456789abcdef", "trainers")
    'job-7b-sft-01234567-trainers'
    """
    own = as_name(job)
    if not own[:1].isalpha():
        own = f"job-{own}"
    return "-".join([own[:18].strip("-"), job_id[:8], *([as_name(mesh)] if mesh else [])])


def as_name(text: str) -> str:
    """Return a text as a part of an object's name: letters in lower case, digits and "-"."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def check_mesh(name: str) -> None:
    """Raise ValueError if a mesh cannot have this name on Kubernetes, where names are shorter."""
    if not re.fullmatch(r"[A-Za-z]\w{0,22}", name) or name.endswith("_"):
        raise ValueError(
            f"{name!r} cannot be the name of a mesh on Kubernetes: use at most 23 letters, digits and '_', with a "
            "letter first and no '_' last"
        )


def labels(job_id: str, mesh: str = "") -> dict[str, str]:
    """Return the labels by which the objects of a job are found."""
    return {**MANAGED, JOB_LABEL: job_id, **({MESH_LABEL: mesh} if mesh else {})}


def secret(name: str, job_id: str, value: bytes) -> Manifest:
    """Return the Secret with the job's secret, 32 bytes."""
    text = base64.b64encode(value.hex().encode() + b"\n").decode()
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "labels": labels(job_id)},
        "type": "Opaque",
        "data": {SECRET_KEY: text},
    }


def service(name: str, job_id: str, mesh: str, port: int) -> Manifest:
    """Return the headless Service of a mesh, which gives its pods their names."""
    own = labels(job_id, mesh)
    ports = [{"name": "monarch", "port": port, "protocol": "TCP"}]
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": own, "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "labels": own}, "spec": spec}


def stateful_set(
    name: str, job_id: str, mesh: str, replicas: int, template: Manifest, secret_name: str, port: int
) -> Manifest:
    """Return the StatefulSet of a mesh. Its pods start at the same time, and a lost one is replaced under its index."""
    own = labels(job_id, mesh)
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name, "labels": own},
        "spec": {
            "serviceName": name,
            "replicas": replicas,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": own},
            "template": _with_host(template, own, secret_name, port, []),
        },
    }


def job(
    name: str, job_id: str, mesh: str, replicas: int, template: Manifest, secret_name: str, port: int,
    tether: float | None,
) -> Manifest:  # fmt: skip
    """Return the indexed Job of a mesh. A lost pod is replaced under its index. Tethered pods end it."""
    spec = _job_spec(job_id, mesh, replicas, template, secret_name, port, tether)
    spec["template"]["spec"].setdefault("subdomain", name)
    meta = {"name": name, "labels": labels(job_id, mesh)}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": {**_lifetime(tether), **spec}}


def job_set(
    name: str, job_id: str, meshes: Mapping[str, Manifest], secret_name: str, port: int, tether: float | None
) -> Manifest:
    """Return the JobSet of all meshes, which have "replicas" and "template". Each is one indexed Job of it."""
    replicated = []
    for mesh, each in meshes.items():
        spec = _job_spec(job_id, mesh, each["replicas"], each["template"], secret_name, port, tether)
        of_job = {"metadata": {"labels": labels(job_id, mesh)}, "spec": spec}
        replicated.append({"name": as_name(mesh), "replicas": 1, "template": of_job})
    network = {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    return {
        "apiVersion": JOBSET_VERSION,
        "kind": "JobSet",
        "metadata": {"name": name, "labels": labels(job_id)},
        "spec": {**_lifetime(tether), "network": network, "replicatedJobs": replicated},
    }


def _lifetime(tether: float | None) -> Manifest:
    return {} if tether is None else {"ttlSecondsAfterFinished": 0}


def _job_spec(
    job_id: str, mesh: str, replicas: int, template: Manifest, secret_name: str, port: int, tether: float | None
) -> Manifest:
    options = ["--signal-exit-code", str(EXIT_CODE)]
    if tether is not None:
        options += ["--tether", f"{tether:g}", "--first-tether", f"{FIRST_CONTROLLER_S:g}"]
    made = _with_host(template, labels(job_id, mesh), secret_name, port, options)
    made["spec"].setdefault("restartPolicy", "OnFailure")
    return {
        "completionMode": "Indexed",
        "completions": replicas,
        "parallelism": replicas,
        "backoffLimit": NO_LIMIT,
        "podReplacementPolicy": "Failed",  # as with a StatefulSet: not while the former pod still ends
        "template": made,
    }


def owned(manifest: Manifest, owners: Sequence[Manifest]) -> Manifest:
    """Return an object that Kubernetes deletes with the last of these existing objects."""
    references = [
        {"apiVersion": each["apiVersion"], "kind": each["kind"], "name": each["metadata"]["name"],
         "uid": each["metadata"]["uid"]}
        for each in owners
    ]  # fmt: skip
    return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": references}}


def _with_host(
    template: Manifest, own: Mapping[str, str], secret_name: str, port: int, words: Sequence[str]
) -> Manifest:
    """Return a pod template whose container runs a host. What the template defines already stays.

    ``words``: further options of the host.
    """
    made = copy.deepcopy(template)
    meta, spec = made.setdefault("metadata", {}), made.setdefault("spec", {})
    meta["labels"] = {**meta.get("labels", {}), **own}
    spec.setdefault("terminationGracePeriodSeconds", GRACE_PERIOD_S)
    spec.setdefault("automountServiceAccountToken", False)
    spec.setdefault("volumes", []).append(
        # Readable for each user of the image. The volume is in memory and belongs to the pod.
        {"name": "monarch-secret", "secret": {"secretName": secret_name, "defaultMode": 0o444}}
    )
    container = host_container(spec)
    # From standard input: a file of the secret would have to belong to the container's user alone.
    options = " ".join([f"--address 0.0.0.0:{port} --secret-from-stdin", *words])
    if notice := meta.get("annotations", {}).get(NOTICE_ANNOTATION):
        options += f" --notice {float(notice):g}"
    up = f"exec monarch-backend up {options} < {SECRET_FOLDER}/{SECRET_KEY}"
    container.setdefault("command", ["/bin/sh", "-c", up])
    container.setdefault("volumeMounts", []).append(
        {"name": "monarch-secret", "mountPath": SECRET_FOLDER, "readOnly": True}
    )
    container.setdefault("ports", []).append({"name": "monarch", "containerPort": port, "protocol": "TCP"})
    container.setdefault("readinessProbe", {"tcpSocket": {"port": port}, "periodSeconds": 2})
    variables = container.setdefault("env", [])
    if all(each["name"] != "MONARCH_HOST_NAME" for each in variables):
        variables.append({"name": "MONARCH_HOST_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}})
    return made


def host_container(spec: Manifest) -> Manifest:
    """Return the container of a pod's specification that runs the host. Raises ValueError if there is none."""
    containers = spec.get("containers")
    if not isinstance(containers, list) or not containers:
        raise ValueError("the pod template has no containers")
    if not all(isinstance(each, dict) for each in containers):
        raise ValueError(f"containers of the pod template are dictionaries, not {containers!r}")
    named = [each for each in containers if each.get("name") == CONTAINER]
    if not named and len(containers) > 1:
        raise ValueError(f"the pod template has {len(containers)} containers, and none is named {CONTAINER!r}")
    found: Manifest = (named or containers)[0]
    if not found.get("image"):
        raise ValueError(f"container {found.get('name')!r} of the pod template has no image")
    return found
