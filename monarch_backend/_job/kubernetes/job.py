"""`KubernetesJob`: meshes of pods, which a StatefulSet, Job or JobSet starts and replaces, or which others start."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from typing_extensions import Self

from monarch_backend._core.timeouts import check_timeout
from monarch_backend._hosts.attach import attach
from monarch_backend._hosts.connection_settings import parse_address
from monarch_backend._hosts.loss_reasons import LossReason
from monarch_backend._job.base import check_mesh_name
from monarch_backend._job.errors import JobError
from monarch_backend._job.kubernetes import manifests, pods
from monarch_backend._job.kubernetes.api import Api, ApiRefusal, until_true
from monarch_backend._job.kubernetes.manifests import (
    CONTAINER,
    CONTROLLERS,
    JOB_LABEL,
    MESH_LABEL,
    PORT,
    Manifest,
)
from monarch_backend._job.kubernetes.pod_exec import Execution
from monarch_backend._job.kubernetes.pod_template import pod_template as made_template
from monarch_backend._job.kubernetes.port_forward import PortForward
from monarch_backend._job.scheduled import NotRemovedError, Replica, ScheduledJob
from monarch_backend._job.state_file import HostEntry, JobFile
from monarch_backend._mesh.host_mesh import HostMesh

REMOVE_TIMEOUT_S = 60.0
"""Seconds in which removed pods have to end, in addition to their grace period."""
WATCH_S = 5.0
"""Seconds until pods are listed again, if the API server reports no change. Quotas change without one."""
CONNECT_TIMEOUT_S = 2.0
EVENTS_TIMEOUT_S = 1.0
"""Seconds for a list of events of lost hosts. Their reason without events must not be late."""
LOG_LINES = 3
"""Lines of a container's log in the reason of its crash."""

_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")

_Json = dict[str, Any]


class KubernetesJob(ScheduledJob):
    """Hosts that are pods of a Kubernetes cluster.

    ``namespace`` has all objects of the job; by default it is that of the kubeconfig's context. ``kubeconfig`` and
    ``context`` are as for kubectl, with its defaults. With ``in_cluster=True`` the program is itself in a pod, and uses
    its service account. deploy/k8s/role.yaml has the permissions that it needs.

    Pods listen on ``port``. A program outside the cluster reaches them through the API server. ``forward`` is whether
    it does. By default it does if it cannot connect to a pod directly.

    Kubernetes replaces a pod on a lost node only after the pod is deleted there. With ``force_delete=True`` this
    program deletes such pods after their grace period when it looks for hosts. The lost node must not run them still.
    Pods that others have started are not deleted.

    ``controller`` starts and replaces the pods: "statefulset", one for each mesh; "jobset", one JobSet for the job,
    where its CRD is installed; or "job", an indexed Job for each mesh. With ``tether`` the pods end when no controller
    has been attached for that many seconds, for example because it has died. Then all objects of the job are deleted.
    This needs "jobset" or "job", since a StatefulSet would start its pods again.

    Needs the extra ``kubernetes``. Raises ValueError for an invalid port, namespace, ``controller`` or ``tether``, and
    for ``in_cluster=True`` with a ``kubeconfig`` or ``context``.

    >>> from monarch_backend.job import KubernetesJob
    >>> job = KubernetesJob("team", name="train")
    >>> job.add_mesh("trainers", 2, image="registry.example/train:1", resources={"nvidia.com/gpu": 8}).name
    'train'
    """

    kind: ClassVar[str] = "kubernetes"
    poll_interval_s: ClassVar[float] = WATCH_S
    replaces_hosts: ClassVar[bool] = True

    def __init__(
        self, namespace: str | None = None, *, name: str = "job", path: str | os.PathLike[str] | None = None,
        kubeconfig: str | os.PathLike[str] | None = None, context: str | None = None, in_cluster: bool = False,
        port: int = PORT, forward: bool | None = None, force_delete: bool = False, controller: str = "statefulset",
        tether: float | None = None, secret_file: str | os.PathLike[str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name, path, secret_file)
        if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
            raise ValueError(f"port={port!r}: give a whole number from 1 to 65535")
        if namespace is not None and not (isinstance(namespace, str) and _NAMESPACE.fullmatch(namespace)):
            raise ValueError(f"{namespace!r} is not the name of a namespace")
        if in_cluster and not (kubeconfig is None and context is None):
            raise ValueError("in_cluster=True uses the pod's service account: give no kubeconfig and no context")
        if controller not in CONTROLLERS:
            raise ValueError(f"controller={controller!r}: give one of {', '.join(map(repr, CONTROLLERS))}")
        tether = check_timeout(tether, "tether", zero=False)
        if tether is not None and controller == "statefulset":
            raise ValueError(
                "tether: a StatefulSet starts pods again that have ended; give controller='job' or 'jobset'"
            )
        self._settings: _Json = {
            "namespace": namespace,
            "kubeconfig": None if kubeconfig is None else os.path.abspath(os.path.expanduser(kubeconfig)),
            "context": context,
            "in_cluster": in_cluster,
            "port": port,
            "forward": forward,
            "force_delete": force_delete,
            "controller": controller,
            "tether": tether,
        }
        self._meshes: dict[str, _Json] = {}
        self._client: Api | None = None
        self._version = ""  # of the last list of pods

    # ---- description

    def add_mesh(
        self, name: str, replicas: int, *, image: str | None = None, pod_template: Mapping[str, Any] | None = None,
        resources: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None, annotations: Mapping[str, str] | None = None,
        node_selector: Mapping[str, str] | None = None, tolerations: Sequence[Mapping[str, Any]] = (),
        priority_class: str | None = None, service_account: str | None = None, scheduler: str | None = None,
        image_pull_policy: str | None = None, image_pull_secrets: str | Sequence[str] = (),
        grace_period: int | None = None, notice: int = 0,
    ) -> Self:  # fmt: skip
        """Add a mesh of ``replicas`` pods, all made from ``image``. Return the job.

        The image has this package, of the same version as this program, and a shell. ``resources`` of a pod, such as
        ``{"cpu": 8, "memory": "64Gi", "nvidia.com/gpu": 8}``, are its requests and limits; with the keys "requests" and
        "limits" they differ. ``env`` is added to the pod's environment: do not put secrets into it. ``grace_period``:
        seconds from the deletion of a pod, such as its preemption, to SIGKILL, by default 30. For the first ``notice``
        seconds of these the host goes on. `watch` reports it as "ending", with the reason, and its actors receive a
        `HostEnding`. The other arguments are fields of the pod, as Kubernetes describes them.

        ``pod_template`` takes the place of ``image``: it is a PodTemplateSpec as a dictionary. Its container named
        "monarch", or its only one, runs the host. The command, the secret, a port and a readiness probe are added to
        it, unless it has its own. So are the other arguments.

        Raises ValueError for an invalid name or argument, for fewer than one pod, and for a mesh that exists. Exactly
        one of ``image`` and ``pod_template`` is given, else ValueError is raised. So it is if ``notice`` is not shorter
        than ``grace_period``, or if the ``pod_template`` has another value of an argument.
        """
        if (image is None) == (pod_template is None):
            raise ValueError(f"mesh {name!r}: give either an image or a pod_template")
        try:
            template = made_template(
                pod_template, image, resources=resources, env=env, labels=labels, annotations=annotations,
                node_selector=node_selector, tolerations=tolerations, priority_class=priority_class,
                service_account=service_account, scheduler=scheduler, image_pull_policy=image_pull_policy,
                image_pull_secrets=image_pull_secrets, grace_period=grace_period, notice=notice,
            )  # fmt: skip
        except ValueError as error:
            raise ValueError(f"mesh {name!r}: {error}") from None
        return self._add(name, {"replicas": _count(name, replicas), "template": template})

    def attach_mesh(self, name: str, replicas: int, selector: str, *, rank_label: str | None = None) -> Self:
        """Add a mesh of pods that others start, such as Kubeflow Trainer, JobSet, Kueue or Volcano. Return the job.

        ``selector`` is their label selector, as "trainer.kubeflow.org/job=x,role=worker". Their indices come from the
        label or annotation ``rank_label``. By default they come from the labels of StatefulSets, indexed Jobs, Kubeflow
        and Volcano, or from the number at the end of the pod's name.

        The pods run ``monarch-backend up --address 0.0.0.0:PORT`` with the secret of the job's ``secret_file``. Ending
        the job does not end them.

        Raises ValueError as `add_mesh`, and for a job without a ``secret_file``.
        """
        if not isinstance(selector, str) or not selector or any(character in selector for character in "\r\n"):
            raise ValueError(f"mesh {name!r}: {selector!r} is not a label selector")
        if self._secret_file is None:
            raise ValueError(f"mesh {name!r}: pods of others have a secret already: give its file as secret_file=")
        return self._add(name, {"replicas": _count(name, replicas), "selector": selector, "rank_label": rank_label})

    def _add(self, name: str, mesh: _Json) -> Self:
        manifests.check_mesh(check_mesh_name(name))
        if manifests.as_name(name) in map(manifests.as_name, self._meshes):
            raise ValueError(f"the job has a mesh {name!r} already, or one whose name differs in letters' case only")
        self._meshes[name] = mesh
        return self

    def _sizes(self) -> Mapping[str, int]:
        return {name: int(mesh["replicas"]) for name, mesh in self._meshes.items()}

    def _set_size(self, mesh: str, count: int) -> None:
        if "selector" in self._meshes[mesh]:
            raise JobError(f"the pods of mesh {mesh!r} are started by others, which must resize it")
        self._meshes[mesh]["replicas"] = count

    def _description(self) -> _Json:
        return {**self._settings, "meshes": self._meshes}

    @classmethod
    def _from_description(cls, description: _Json) -> KubernetesJob:
        made = cls(**{name: value for name, value in description.items() if name != "meshes"})
        made._meshes = dict(description["meshes"])
        return made

    def manifests(self, job_id: str, secret: bytes) -> list[Manifest]:
        """Return the objects of the job as dictionaries, without asking a cluster.

        ``job_id`` distinguishes jobs, and ``secret`` has 32 bytes. ``monarch-backend k8s manifest`` prints them.

        >>> from monarch_backend.job import KubernetesJob
        >>> job = KubernetesJob(name="train").add_mesh("trainers", 2, image="registry.example/train:1")
        >>> for each in job.manifests("0123456789abcdef", bytes(32)):
        ...     print(each["kind"], each["metadata"]["name"])
        Secret train-01234567
        Service train-01234567-trainers
        StatefulSet train-01234567-trainers
        """
        port, own = self._settings["port"], {n: m for n, m in self._meshes.items() if "template" in m}
        secret_name = manifests.object_name(self.name, job_id)
        made = [manifests.secret(secret_name, job_id, secret)] if own else []
        tether = self._settings["tether"]
        if own and self._settings["controller"] == "jobset":
            return [*made, manifests.job_set(secret_name, job_id, own, secret_name, port, tether)]
        for name, mesh in own.items():
            called = manifests.object_name(self.name, job_id, name)
            made.append(manifests.service(called, job_id, name, port))
            arguments = called, job_id, name, mesh["replicas"], mesh["template"], secret_name, port
            if self._settings["controller"] == "job":
                made.append(manifests.job(*arguments, tether))
            else:
                made.append(manifests.stateful_set(*arguments))
        return made

    def _workload(self, file: JobFile, mesh: str) -> tuple[str, str]:
        """Return kind and name of the object that starts the pods of a mesh."""
        if self._settings["controller"] == "jobset":
            return "JobSet", manifests.object_name(self.name, file.id)
        kind = "Job" if self._settings["controller"] == "job" else "StatefulSet"
        return kind, manifests.object_name(self.name, file.id, mesh)

    # ---- the cluster

    def _api(self, file: JobFile | None = None) -> Api:
        """Return the client. Raises JobError if the job was submitted to another cluster."""
        if self._client is None:
            given = self._settings
            self._client = Api(given["namespace"], given["kubeconfig"], given["context"], given["in_cluster"])
        server, namespace = self._client.server, self._client.namespace
        if file is not None and file.submitted:
            there = (file.submitted["server"], file.submitted["namespace"])
            if there != (server, namespace):
                raise JobError(
                    f"job {self.name!r} runs in namespace {there[1]} of {there[0]}, and the kubeconfig now leads to "
                    f"namespace {namespace} of {server}: give the job's own context"
                )
        return self._client

    def _submit(self, file: JobFile, secret: bytes) -> _Json:
        api, created = self._api(), False
        try:
            made = self.manifests(file.id, secret)
            workloads = [each for each in made if each["kind"] in ("Job", "JobSet")]
            owners = []
            for manifest in workloads:
                owners.append(api.create(manifest))
                created = True
            for manifest in made:
                if manifest not in workloads:
                    api.create(manifests.owned(manifest, owners) if owners else manifest)
                    created = True
        except BaseException as error:
            try:
                self._remove(file)
            except JobError as left:
                if created:
                    raise NotRemovedError(
                        f"job {self.name!r} is submitted in part: end it with kill() ({error}; not removed: {left})"
                    ) from error
            if isinstance(error, ApiRefusal) and error.status == 404 and self._settings["controller"] == "jobset":
                raise JobError(
                    f"job {self.name!r}: {api.server} has no JobSets ({manifests.JOBSET_VERSION}), or no namespace "
                    f"{api.namespace}: install JobSet in the cluster, or use controller='job' or 'statefulset'"
                ) from None
            if isinstance(error, JobError):
                raise JobError(f"job {self.name!r} was not accepted in namespace {api.namespace}: {error}") from None
            raise
        return {"server": api.server, "namespace": api.namespace}

    def _find(self, file: JobFile) -> Sequence[Replica]:
        api, found = self._api(file), []
        listed, self._version = api.list("pods", f"{JOB_LABEL}={file.id}")
        for name, mesh in self._meshes.items():
            if "selector" in mesh:
                others, _ = api.list("pods", mesh["selector"])
                by_index = _by_index(others, mesh["rank_label"])
            else:
                own = [pod for pod in listed if pod["metadata"]["labels"].get(MESH_LABEL) == name]
                by_index = _by_index(own, None)
            for index in range(mesh["replicas"]):
                if (pod := by_index.get(index)) is not None:
                    is_done = self._settings["controller"] != "statefulset" and pods.has_succeeded(pod)
                    is_replaced = "template" in mesh and not is_done
                    found.append(self._replica(api, pod, name, index, is_replaced=is_replaced))
            missing = [index for index in range(mesh["replicas"]) if index not in by_index]
            if missing:
                why, is_final = self._why_missing(api, file, name)
                found += [Replica(name, index, "pending", reason=why, is_final=is_final) for index in missing]
        return found

    def _replica(self, api: Api, pod: _Json, mesh: str, index: int, *, is_replaced: bool) -> Replica:
        found = pods.replica_of(pod, mesh, index, self._settings["port"], is_replaced=is_replaced)
        if found.is_final and "CrashLoopBackOff" in found.reason:
            with contextlib.suppress(JobError):
                tail = api.log(found.where, LOG_LINES, previous=True).strip()
                return replace(found, reason=f"{found.reason}; its log ends: {' | '.join(tail.splitlines())}")
        now = datetime.datetime.now(datetime.timezone.utc)
        if self._settings["force_delete"] and "template" in self._meshes[mesh] and pods.is_stuck(pod, now):
            _force_delete(api, pod)
        return found

    def _why_missing(self, api: Api, file: JobFile, mesh: str) -> tuple[str, bool]:
        """Return the reason why a mesh has too few pods, and whether that is final."""
        if "selector" in self._meshes[mesh]:
            return f"no pod with labels {self._meshes[mesh]['selector']} and this index", False
        kind, name = self._workload(file, mesh)
        try:
            return self._why_not_created(api, kind, name, mesh)
        except ApiRefusal as refusal:
            if refusal.status == 404:
                return f"{kind} {name} was deleted", True
            if refusal.status == 403:
                return f"not created yet, and the reason cannot be read: {refusal}", False
            raise

    def _why_not_created(self, api: Api, kind: str, name: str, mesh: str) -> tuple[str, bool]:
        found = api.request("GET", api.path_of(kind, name))
        if found.get("spec", {}).get("suspend"):
            return f"{kind} {name} is suspended, such as by Kueue until there is room", False
        if kind == "JobSet":
            kind, name = "Job", f"{name}-{manifests.as_name(mesh)}-0"
        events, _ = api.list("events", fields=f"involvedObject.kind={kind},involvedObject.name={name}")
        failed = [each for each in events if each.get("reason") == "FailedCreate"]
        if not failed:
            return "not created yet", False
        last = max(failed, key=lambda each: str(each.get("lastTimestamp") or each.get("eventTime") or ""))
        return f"FailedCreate: {last.get('message', '')}", False

    def _why_lost(self, hosts: Sequence[HostEntry]) -> list[LossReason]:
        """Return why hosts are lost. A set deletes an evicted pod within milliseconds, and its events stay."""
        found, file = super()._why_lost(hosts), self._read()
        if file is None or not any(each.is_final for each in found):
            return found
        api, events = self._api(file), dict[str, str]()
        with contextlib.suppress(JobError):  # a reason without them is better than none
            events = _disruptions(api)
        causes = [events.get(host.incarnation.partition("/")[0]) for host in hosts]
        return [
            each if cause is None or cause in each.text else LossReason(f"{each.text} ({cause})", each.is_final)
            for each, cause in zip(found, causes, strict=True)
        ]

    def log(self, mesh: str, index: int, lines: int = 100, *, previous: bool = False) -> str:
        """Return the last lines that the host's pod has printed; with ``previous`` before its container's restart.

        Raises JobError if the job does not run, or the log cannot be read.
        """
        file, pod = self._pod(mesh, index)
        return self._api(file).log(pod, lines, previous=previous)

    def execute(
        self, mesh: str, index: int, command: Sequence[str], *, stdin: int | None = None, is_tty: bool = False
    ) -> int:
        """Run a command in the host's container, with this process's stdout and stderr. Return its exit code.

        ``stdin``: descriptor of its input. With ``is_tty`` it has a terminal, with the size of that of ``stdin``.
        ``monarch-backend k8s shell`` calls it. deploy/k8s/role-shell.yaml has the permissions. While the terminal of
        ``stdin`` is raw, SIGTERM raises SystemExit, unless it has a handler.

        Raises JobError if the job does not run, if the command cannot be started, or if the connection is lost.
        """
        file, pod = self._pod(mesh, index)
        api, template = self._api(file), self._meshes[mesh].get("template")
        container = CONTAINER if template is None else manifests.host_container(template["spec"])["name"]
        if template is None:  # a pod of others
            listed, _ = api.list("pods", self._meshes[mesh]["selector"])
            specs = [each["spec"] for each in listed if each["metadata"]["name"] == pod]
            if not specs:
                raise JobError(f"pod {pod} of {mesh}[{index}] was deleted or replaced meanwhile: run the command again")
            names = [each["name"] for each in specs[0]["containers"]]
            container = CONTAINER if CONTAINER in names else names[0]
        connection = api.execute(pod, container, command, stdin=stdin is not None, is_tty=is_tty)
        return Execution(connection, f"pod {pod}", is_tty=is_tty).run(stdin)

    def _pod(self, mesh: str, index: int) -> tuple[JobFile, str]:
        """Return the job's file and the name of a host's pod. Raises JobError if there is none."""
        file = self._read()
        found = [] if file is None else [each for each in self._find(file) if (each.mesh, each.index) == (mesh, index)]
        if file is None or not found or not found[0].where:
            raise JobError(f"job {self.name!r} has no pod {mesh}[{index}]")
        return file, found[0].where

    def _remove(self, file: JobFile) -> None:
        api = self._api(file)
        PortForward.close_all(file.id)
        for name, mesh in self._meshes.items():
            if "template" in mesh:
                api.delete_kind(*self._workload(file, name))
                if self._settings["controller"] != "jobset":
                    api.delete("services", manifests.object_name(self.name, file.id, name))
        self._end_notices(api, file)
        api.delete("secrets", manifests.object_name(self.name, file.id))
        self._until_gone(api, lambda _: True, file)

    def _end_notices(self, api: Api, file: JobFile) -> None:
        """Delete pods that would go on for their notice. The program itself ends them, and needs none."""
        for pod in api.list("pods", f"{JOB_LABEL}={file.id}")[0]:
            if pods.has_notice(pod):
                options = {"gracePeriodSeconds": 1, "preconditions": {"uid": pod["metadata"]["uid"]}}
                api.delete("pods", pod["metadata"]["name"], options)

    def _until_gone(self, api: Api, is_meant: Callable[[_Json], bool], file: JobFile) -> None:
        """Wait until pods have ended. Raises JobError with the others' names."""
        left: list[_Json] = []

        def gone() -> bool:
            listed, _ = api.list("pods", f"{JOB_LABEL}={file.id}")
            left[:] = [pod for pod in listed if is_meant(pod)]
            if self._settings["force_delete"]:
                now = datetime.datetime.now(datetime.timezone.utc)
                for pod in left:
                    if pods.is_stuck(pod, now):
                        _force_delete(api, pod)
            return not left

        grace = [
            m["template"]["spec"].get("terminationGracePeriodSeconds", 30)
            for m in self._meshes.values()
            if "template" in m
        ]
        if not until_true(gone, REMOVE_TIMEOUT_S + max(grace, default=0)):
            names = [f"{pod['metadata']['name']} ({pods.replica_of(pod, '', 0, 0).reason})" for pod in left]
            raise JobError(
                f"job {self.name!r}: pods still exist: {', '.join(names)}. Their nodes may be lost: force_delete=True "
                "deletes such pods"
            )

    def _scale(self, file: JobFile, mesh: str, count: int) -> None:
        api, (kind, name) = self._api(file), self._workload(file, mesh)
        if kind != "StatefulSet":
            raise JobError(f"the pods of a {kind} have a fixed number: only controller='statefulset' can be resized")
        api.request(
            "PATCH", api.path("statefulsets", f"{name}/scale"), {"spec": {"replicas": count}},
            kind="application/merge-patch+json",
        )  # fmt: skip

        def is_surplus(pod: _Json) -> bool:
            self._stop_if_killed()
            return pod["metadata"]["labels"].get(MESH_LABEL) == mesh and (pods.index_of(pod) or 0) >= count

        self._until_gone(api, is_surplus, file)

    def _wait_for_change(self, seconds: float) -> None:
        file = self._read()
        if file is None or self._client is None or any("selector" in mesh for mesh in self._meshes.values()):
            super()._wait_for_change(min(seconds, 0.5))
        else:
            self._client.wait("pods", f"{JOB_LABEL}={file.id}", self._version, seconds)

    def _connect(self, file: JobFile, name: str, hosts: Sequence[HostEntry], secret: bytes, timeout: float) -> HostMesh:
        addresses = [host.address for host in hosts]
        forward = self._settings["forward"]
        if forward is None:
            forward = not self._settings["in_cluster"] and not _answers(addresses[0])
        if not forward:
            return super()._connect(file, name, hosts, secret, timeout)
        # One pod is the gateway to the others of its mesh, so a mesh of any size needs one connection.
        local = PortForward.to_pod(file.id, self._api(file), hosts[0].where, self._settings["port"])
        return attach(local.address, addresses, name, secret=secret, timeout=timeout)


def _force_delete(api: Api, pod: _Json) -> None:
    options = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
    api.delete("pods", pod["metadata"]["name"], options)


def _count(name: str, replicas: int) -> int:
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
        raise ValueError(f"mesh {name!r}: {replicas!r} is not a number of pods; give 1 or more")
    return replicas


def _by_index(listed: Sequence[_Json], rank_label: str | None) -> dict[int, _Json]:
    """Return pods by their indices. Of two pods with one index, the newer one that is not being deleted."""

    def age(pod: _Json) -> tuple[bool, str]:
        meta = pod["metadata"]
        return "deletionTimestamp" not in meta, str(meta.get("creationTimestamp", ""))

    found = ((pods.index_of(pod, rank_label), pod) for pod in sorted(listed, key=age))
    return {index: pod for index, pod in found if index is not None}


def _answers(address: str) -> bool:
    try:
        socket.create_connection(parse_address(address), CONNECT_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def _disruptions(api: Api) -> dict[str, str]:
    """Return why pods were ended, by their uids."""
    return {
        event["involvedObject"].get("uid", ""): f"{reason}: {event.get('message', '')}"
        for reason in pods.DISRUPTIONS
        for event in api.list("events", fields=f"involvedObject.kind=Pod,reason={reason}", timeout=EVENTS_TIMEOUT_S)[0]
    }
