"""A Kubernetes cluster for tests: a real control plane, nodes of kubelet.py, and programs beside them.

All is in network namespaces on one bridge, so the machine's interfaces are not touched. `INSIDE` is a host for programs
that reach pods. `OUTSIDE` is a host that reaches only the API server, as a laptop does.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from monarch_backend._job.kubernetes import manifests
from monarch_backend._job.kubernetes.manifests import JOBSET_VERSION
from monarch_backend._mesh.runtime_protocol import program
from tests.k8s.kubelet import Api, ApiError, Json
from tests.support import hosts as namespaces
from tests.support.ranks import KEPT_PIDS, run_ranks

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "k8s_control_plane.sh"

INSIDE, CONTROL, NODES, OUTSIDE = range(4)
"""Hosts: of programs in the pod network, of the control plane, of the kubelet, of programs outside the cluster."""
PORT = 6443
START_TIMEOUT_S = 60.0
_END_WITH_US = ("setpriv", "--pdeathsig", "KILL")
ADMIN, USER = "admin-token", "user-token"
USER_NAME = "monarch-test"
"""The user of tests. Roles of deploy/k8s are its only rights: role.yaml, and role-shell.yaml in tests of the shell."""


@functools.cache
def refusal() -> str:
    """Return the reason why there cannot be a cluster on this machine, or ''."""
    if reason := namespaces.refusal():
        return reason
    if shutil.which("etcd") is None or not _programs():
        return f"there is no control plane: `{TOOL.relative_to(ROOT)} --prepare` builds it once, in minutes"
    if missing := [tool for tool in ("unshare", "openssl", "setpriv") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} not found"
    return ""


def _programs() -> str:
    return subprocess.run([TOOL, "--where"], capture_output=True, text=True, check=False).stdout.strip()


class Cluster:
    """The cluster. ``nodes``: names with extended resources, such as ``{"n0": {"nvidia.com/gpu": "8"}}``."""

    def __init__(self, folder: Path, nodes: Mapping[str, Mapping[str, str]]) -> None:
        self.folder, self._stack = folder, contextlib.ExitStack()
        self.where = self._stack.enter_context(namespaces.hosts(4))
        self.server = f"https://{self.where.address(CONTROL)}:{PORT}"
        self.processes: dict[str, subprocess.Popen[Any]] = {}
        try:
            self._isolate_outside()
            self._start(nodes)
        except BaseException:
            self.close()
            raise

    def _isolate_outside(self) -> None:
        """Leave this host a route to the API server only."""
        own, server = self.where.address(OUTSIDE), self.where.address(CONTROL)
        self.where.cables.ip(
            OUTSIDE, "addr flush dev eth0", f"addr add {own}/32 dev eth0", f"route add {server}/32 dev eth0"
        )

    def _start(self, nodes: Mapping[str, Mapping[str, str]]) -> None:
        self._write_files()
        client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"  # there is no "localhost" on a host
        self._run(
            "etcd", "etcd", f"--data-dir={self.folder / 'etcd'}", "--unsafe-no-fsync",
            f"--listen-client-urls={client}", f"--advertise-client-urls={client}", f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}",
        )  # fmt: skip
        self.start_api_server()
        self._define_job_sets()
        for name, port in (("kube-controller-manager", 10257), ("kube-scheduler", 10259)):
            words = [f"--kubeconfig={self.kubeconfig()}", "--bind-address=127.0.0.1", "--port=0"]
            words += [f"--secure-port={port}", f"--cert-dir={self.folder / 'pki'}", "--leader-elect=false"]
            if name == "kube-controller-manager":
                # Without the controllers of clouds. Lost nodes are noticed after seconds.
                words += ["--controllers=*,-nodeipam,-route,-service,-cloud-node-lifecycle"]
                words += ["--node-monitor-period=1s", "--node-monitor-grace-period=6s"]
                words += [f"--service-account-private-key-file={self.folder / 'pki/sa.key'}"]
                words += ["--feature-gates=TTLAfterFinished=true"]  # on by default since 1.21
            self._run(name, f"{_programs()}/{name}", *words)
        self._start_kubelet(nodes)

    def _write_files(self) -> None:
        keys = self.folder / "pki"
        keys.mkdir()
        key, public, both = keys / "sa.key", keys / "sa.pub", keys / "kubelet.pem"
        address = self.where.address(CONTROL)
        certificate = "openssl req -x509 -newkey rsa:2048 -nodes -days 1"
        name = f"-subj /CN=api -addext subjectAltName=IP:{address}"
        for command in (
            f"openssl genrsa -out {key} 2048",
            f"openssl rsa -in {key} -pubout -out {public}",
            f"{certificate} -subj /CN=kubelet -keyout {both} -out {keys}/kubelet.crt",
            f"{certificate} {name} -keyout {keys}/api.key -out {keys}/api.crt",
        ):
            subprocess.run(command.split(), check=True, capture_output=True)
        with both.open("a") as file:
            file.write((keys / "kubelet.crt").read_text())
        tokens = f"{ADMIN},admin,1,system:masters\n{USER},{USER_NAME},2\n"
        (self.folder / "tokens.csv").write_text(tokens)

    def kubeconfig(self, token: str = ADMIN, namespace: str = "default") -> Path:
        """Return a kubeconfig with this token."""
        path = self.folder / f"kubeconfig-{token}-{namespace}"
        cluster = {"server": self.server, "certificate-authority": str(self.folder / "pki/api.crt")}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "me", "user": {"token": token}}],
            "contexts": [{"name": "me", "context": {"cluster": "test", "user": "me", "namespace": namespace}}],
            "current-context": "me",
        }
        path.write_text(json.dumps(config))
        return path

    def _run(self, name: str, *words: str) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                self.where.command(CONTROL, *_END_WITH_US, *words), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        KEPT_PIDS.add(self.processes[name].pid)  # a test may restart it

    def start_api_server(self) -> None:
        """Start the API server and wait until it is ready."""
        keys, address = self.folder / "pki", self.where.address(CONTROL)
        self._run(
            "kube-apiserver", f"{_programs()}/kube-apiserver", "--etcd-servers=http://127.0.0.1:2379",
            f"--bind-address={address}", f"--advertise-address={address}", f"--secure-port={PORT}",
            f"--tls-cert-file={keys}/api.crt", f"--tls-private-key-file={keys}/api.key", f"--cert-dir={keys}",
            f"--service-account-key-file={keys}/sa.pub",
            f"--service-account-signing-key-file={keys}/sa.key", f"--token-auth-file={self.folder}/tokens.csv",
            "--service-account-issuer=https://kubernetes.default.svc", "--authorization-mode=RBAC",
            "--service-cluster-ip-range=198.18.128.0/24", "--allow-privileged=true",
            "--kubelet-preferred-address-types=InternalIP", "--disable-admission-plugins=ServiceAccount",
            "--default-not-ready-toleration-seconds=3", "--default-unreachable-toleration-seconds=3",
            "--feature-gates=TTLAfterFinished=true",
        )  # fmt: skip
        self.until(lambda: self.ask("GET", "/api/v1/namespaces/default"), "the API server to answer")

    def _define_job_sets(self) -> None:
        """Define the kind JobSet, without its controller. The garbage collector knows what exists when it starts."""
        group, _, version = JOBSET_VERSION.partition("/")
        schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
        definition = {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {
                "name": f"jobsets.{group}",
                "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"},
            },
            "spec": {
                "group": group,
                "names": {"kind": "JobSet", "plural": "jobsets"},
                "scope": "Namespaced",
                "versions": [{"name": version, "served": True, "storage": True, "schema": schema}],
            },
        }
        self.ask("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
        self.until(lambda: self.ask("GET", f"/apis/{JOBSET_VERSION}/jobsets"), "JobSets to be served")

    def start_jobs_of_job_set(self, namespace: str) -> None:
        """Wait for a JobSet in a namespace, and create its Jobs in place of its controller."""
        sets = f"/apis/{JOBSET_VERSION}/namespaces/{namespace}/jobsets"
        [found] = self.until(lambda: self.ask("GET", sets)["items"], "a JobSet")
        for each in found["spec"]["replicatedJobs"]:
            meta = {"name": f"{found['metadata']['name']}-{each['name']}-0", **each["template"]["metadata"]}
            job = {"apiVersion": "batch/v1", "kind": "Job", **each["template"], "metadata": meta}
            owner = {"apiVersion": JOBSET_VERSION, **found}
            self.ask("POST", f"/apis/batch/v1/namespaces/{namespace}/jobs", manifests.owned(job, [owner]))

    def stop_api_server(self) -> None:
        self._end("kube-apiserver")

    def _start_kubelet(self, nodes: Mapping[str, Mapping[str, str]]) -> None:
        pods = self.folder / "pods"
        pods.mkdir()
        bin_folder = Path(sys.executable).parent
        environment = {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}",
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "HOME": "/tmp",
        }
        plan = {
            "server": self.server, "token": ADMIN, "address": self.where.address(NODES), "switch": self.where.pids[-1],
            "nodes": nodes, "network": "198.18.0", "first": 30, "last": 250, "folder": str(pods),
            "certificate": str(self.folder / "pki/kubelet.pem"), "environment": environment,
        }  # fmt: skip
        with open(self.folder / "kubelet.log", "ab") as log:
            # Only the network is the host's: the mounts that it makes for pods are of the pods.
            command = [*_END_WITH_US, "nsenter", f"--net=/proc/{self.where.pids[NODES]}/ns/net", sys.executable, "-m"]
            self.processes["kubelet"] = subprocess.Popen(
                [*command, "tests.k8s.kubelet"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
        stdin = self.processes["kubelet"].stdin
        assert stdin is not None
        stdin.write(json.dumps(plan).encode() + b"\n")
        stdin.flush()
        self.until(lambda: len(self.ready_nodes()) == len(nodes), "all nodes to be ready")

    def tell_kubelet(self, command: str) -> None:
        """Give the kubelet a command, as its module describes, and wait until it is done."""
        kubelet = self.processes["kubelet"]
        assert kubelet.stdin is not None and kubelet.stdout is not None
        kubelet.stdin.write(command.encode() + b"\n")
        kubelet.stdin.flush()
        assert kubelet.stdout.readline() == b"done\n"

    def ready_nodes(self) -> list[str]:
        """Return the names of the nodes that can run pods."""
        found = []
        for node in self.ask("GET", "/api/v1/nodes")["items"]:
            conditions = {each["type"]: each["status"] for each in node["status"].get("conditions", ())}
            if conditions.get("Ready") == "True" and not node["spec"].get("taints"):
                found.append(node["metadata"]["name"])
        return found

    def ask(self, method: str, path: str, body: Json | None = None, kind: str = "application/json") -> Json:
        """Return the API server's answer to the cluster's administrator. Raises OSError, ApiError."""
        with self._network(INSIDE), contextlib.closing(Api(self.server, ADMIN)) as api:
            return api(method, path, body, kind)

    @contextlib.contextmanager
    def _network(self, host: int) -> Iterator[None]:
        """Give this thread the network of a host: the sockets that it makes are there."""
        with open("/proc/thread-self/ns/net") as before, open(f"/proc/{self.where.pids[host]}/ns/net") as there:
            namespaces._libc("setns", there.fileno(), namespaces._NEW_NET)
            try:
                yield
            finally:
                namespaces._libc("setns", before.fileno(), namespaces._NEW_NET)

    def until(self, holds: Callable[[], Any], what: str, timeout: float = START_TIMEOUT_S) -> Any:
        """Wait until ``holds()`` returns a true value, and return it."""
        end, error = time.monotonic() + timeout, ""
        while time.monotonic() < end:
            try:
                if found := holds():
                    return found
            except (OSError, ApiError) as problem:
                error = str(problem)
            for name, process in self.processes.items():
                if process.poll() is not None:
                    log = (self.folder / f"{name}.log").read_text(errors="replace")[-2000:]
                    raise AssertionError(f"{name} has ended with {process.returncode}: {log}")
            time.sleep(0.05)
        raise AssertionError(f"waited {timeout:g} s for {what}: {error}")

    def pods(self, namespace: str = "default") -> dict[str, Json]:
        """Return the pods of a namespace by name."""
        listed = self.ask("GET", f"/api/v1/namespaces/{namespace}/pods")["items"]
        return {each["metadata"]["name"]: each for each in listed}

    def objects(self, namespace: str) -> list[str]:
        """Return kinds and names of what is in a namespace, without the objects that Kubernetes makes in each."""
        found = []
        kinds = {
            "api/v1": ("pods", "services", "secrets", "configmaps"),
            "apis/apps/v1": ("statefulsets",),
            "apis/batch/v1": ("jobs",),
            f"apis/{JOBSET_VERSION}": ("jobsets",),
        }
        for group, names in kinds.items():
            for kind in names:
                for each in self.ask("GET", f"/{group}/namespaces/{namespace}/{kind}")["items"]:
                    name = each["metadata"]["name"]
                    if each.get("type") != "kubernetes.io/service-account-token" and name != "kube-root-ca.crt":
                        found.append(f"{kind}/{name}")
        return found

    def new_namespace(self, name: str, manifests: list[Json]) -> Path:
        """Make a namespace with these objects, and return the kubeconfig of USER_NAME for it."""
        self.ask("POST", "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        for each in manifests:
            group = each["apiVersion"]
            plural = {"ServiceAccount": "serviceaccounts", "Role": "roles", "RoleBinding": "rolebindings"}[each["kind"]]
            path = f"/{'api' if group == 'v1' else 'apis'}/{group}/namespaces/{name}/{plural}"
            self.ask("POST", path, each)
        return self.kubeconfig(USER, name)

    def run(self, fn: Callable[..., Any], *args: Any, host: int = INSIDE, timeout: float = 120) -> Any:
        """Return the result of ``fn(*args)`` in a program on a host."""

        def run(_rank: int, _address: str) -> Any:
            self.where.enter(host)
            try:
                return fn(*args)
            finally:
                program().shutdown.run()  # type: ignore[attr-defined]
                program().shutdown.kill_all()  # type: ignore[attr-defined]

        return run_ranks(run, 1, backend=None, timeout=timeout)[0]

    def _end(self, name: str) -> None:
        process = self.processes.pop(name)
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def close(self) -> None:
        """End all processes of the cluster: the API server after its clients, and before etcd."""
        last = ("kube-apiserver", "etcd")
        for name in sorted(self.processes, key=lambda name: last.index(name) if name in last else -1):
            self._end(name)
        self._stack.close()


@contextlib.contextmanager
def cluster(folder: Path, nodes: Mapping[str, Mapping[str, str]]) -> Iterator[Cluster]:
    """Run a cluster, which ends with the block."""
    made = Cluster(folder, nodes)
    try:
        yield made
    finally:
        made.close()
