"""Jobs on a Kubernetes cluster of this machine: this project's KubernetesJob and torchmonarch's.

    python tools/peer_env.py torchmonarch       # once: the peer's own environment
    python benchmarks/kubernetes_jobs.py [--rounds N] [--limit SECONDS] [--out FILE]

Needs root and `tools/k8s_control_plane.sh --prepare`: the control plane is real, and pods are processes in namespaces
(tests/k8s/cluster.py). Each system has two pods, on two nodes of three. A program in the pods' network starts or
attaches the pods, starts one process on each, and calls an endpoint that does not return. All use the service account.

ours                 KubernetesJob starts a StatefulSet
ours, tethered       KubernetesJob(controller="job", tether=30), for what is left behind only
ours, attached       this benchmark starts the pods when the program has begun, and KubernetesJob attaches them
torchmonarch         the same pods with its worker loop. To start pods itself it needs the MonarchMesh operator

ready        seconds from the program's first line until both processes have imported torch and replied
error        seconds from a fault until the pending call raises in the program; "> LIMIT" if it does not raise
left behind  objects and processes, when kill() returns, and a minute after the program was killed
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from _job_faults import HERE, PEER, Comparison, Testbed, arguments, show

from monarch_backend._job.kubernetes import manifests
from monarch_backend._job.kubernetes.pod_template import pod_template
from tests.k8s.cluster import INSIDE, PORT, USER, Cluster, cluster, refusal
from tests.k8s.conftest import permissions

FAULTS = ["worker killed", "pod deleted", "node crashed"]
NAMESPACE, SLOT = "jobs", "example.com/slot"
NODES = {name: {SLOT: "1"} for name in ("n0", "n1", "n2")}
"""A node has place for one pod."""
RANK_LABEL = "apps.kubernetes.io/pod-index"
LABELS = {"app.kubernetes.io/name": "monarch-worker", "monarch.pytorch.org/mesh-name": "workers"}
"""Labels by which torchmonarch finds the pods of the mesh "workers"."""
SECRET = bytes(range(32))
ACCOUNT = "/run/secrets/kubernetes.io/serviceaccount"
COLLECTIONS = {
    "statefulsets": "apis/apps/v1", "jobs": "apis/batch/v1", "services": "api/v1", "secrets": "api/v1",
    "configmaps": "api/v1", "pods": "api/v1",
}  # fmt: skip


class KubernetesTestbed(Testbed):
    only_left = frozenset({"ours, tethered"})

    def __init__(self, made: Cluster, folder: Path) -> None:
        super().__init__(folder)
        self.cluster, self.crashed = made, ""
        secret = folder / "job.secret"
        secret.touch(0o600)
        secret.write_text(f"{SECRET.hex()}\n")
        selector = ",".join(f"{name}={value}" for name, value in LABELS.items())
        self.systems = {
            "ours, tethered": ["tethered"],
            "ours": ["pods"],
            "ours, attached": ["attached", selector, RANK_LABEL, str(secret)],
            "torchmonarch": ["attached", NAMESPACE],
        }
        self.faults = {
            "worker killed": lambda _: made.tell_kubelet(f"kill {self._last_pod()['metadata']['name']}"),
            "pod deleted": lambda _: self._delete("pods", self._last_pod()["metadata"]["name"]),
            "node crashed": lambda _: self._crash(),
        }
        made.new_namespace(NAMESPACE, permissions())
        self._give_account()

    def _give_account(self) -> None:
        """Give programs the files of a pod's service account, in their host's mounts."""
        certificate = self.cluster.folder / "pki/api.crt"
        script = f"mount -t tmpfs tmpfs /run; mkdir -p {ACCOUNT}; cp {certificate} {ACCOUNT}/ca.crt"
        script += f"; printf {USER} >{ACCOUNT}/token; printf {NAMESPACE} >{ACCOUNT}/namespace"
        subprocess.run(self.cluster.where.command(INSIDE, "sh", "-ec", script), check=True)

    def command(self, system: str, words: list[str]) -> tuple[list[str], dict[str, str]]:
        server = self.cluster.server.removeprefix("https://").partition(":")[0]
        environment = {**os.environ, "KUBERNETES_SERVICE_HOST": server, "KUBERNETES_SERVICE_PORT": str(PORT)}
        environment["PYTHONPATH"] = str(HERE.parent) if system.startswith("ours") else ""
        return self.cluster.where.command(INSIDE, *words), environment

    def provide(self, system: str) -> None:
        if "attached" not in self.systems[system]:
            return
        self.cluster.ask("POST", self._path("secrets"), manifests.secret("others", "others", SECRET))
        for rank in range(2):
            template = pod_template(
                None,
                "testbed/monarch:1",
                resources={SLOT: 1},
                env={"PYTHONPATH": ""} if system == "torchmonarch" else {},
                labels={**LABELS, RANK_LABEL: str(rank)},
            )
            if system == "torchmonarch":
                self._run_peer(template["spec"]["containers"][0])
            # One StatefulSet for each pod, so that it has the label that Kubernetes gives since 1.28.
            name = f"workers-{rank}"
            made = manifests.stateful_set(name, "others", name, 1, template, "others", manifests.PORT)
            self.cluster.ask("POST", self._path("statefulsets"), made)

    def _run_peer(self, container: dict[str, Any]) -> None:
        """Give a container the peer's worker loop. Host names are addresses, because there is no DNS."""
        where = self.cluster.where
        known = f"{where.address(INSIDE)} {where.name(INSIDE)}"
        loop = f"exec {PEER} {HERE / 'job_runners' / 'torchmonarch_worker.py'}"
        container["command"] = ["sh", "-ec", f'hostname "$POD_IP"; echo {known} >>/etc/hosts; {loop}']
        container["env"].append({"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})

    def _path(self, kind: str, name: str = "") -> str:
        return f"/{COLLECTIONS[kind]}/namespaces/{NAMESPACE}/{kind}" + (f"/{name}" if name else "")

    def _delete(self, kind: str, name: str, **options: Any) -> None:
        self.cluster.ask("DELETE", self._path(kind, name), {"propagationPolicy": "Background", **options})

    def _last_pod(self) -> dict[str, Any]:
        return max(self.cluster.pods(NAMESPACE).items())[1]

    def _crash(self) -> None:
        self.crashed = self._last_pod()["spec"]["nodeName"]
        self.cluster.tell_kubelet(f"crash {self.crashed}")

    def left(self) -> str:
        """Return the objects by their kinds, and the numbers of processes in pods and on the program's host.

        When kill() returns, the program's own processes are among the latter.
        """
        objects = Counter(each.partition("/")[0] for each in self.cluster.objects(NAMESPACE))
        found = [f"{count} {kind}" for kind, count in objects.items()] or ["no objects"]
        found.append(f"{len(self._in_pods())} processes in pods")
        if beside := len(self.cluster.where.processes(INSIDE)):
            found.append(f"{beside} on the program's host")
        return ", ".join(found)

    def _in_pods(self) -> list[int]:
        """Return the pids of the kubelet's descendants with their own pids' namespace."""
        kubelet, home = self.cluster.processes["kubelet"].pid, os.readlink("/proc/self/ns/pid")
        found, waiting = [], [kubelet]
        while waiting:
            pid = waiting.pop()
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    waiting += map(int, (task / "children").read_text().split())
                if os.readlink(f"/proc/{pid}/ns/pid") != home:
                    found.append(pid)
        return found

    def clean(self) -> None:
        for pid in self.cluster.where.processes(INSIDE):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.crashed:
            self.cluster.tell_kubelet(f"start {self.crashed}")
            self.crashed = ""
        for kind in COLLECTIONS:
            for each in self.cluster.objects(NAMESPACE):
                if each.startswith(f"{kind}/"):
                    with contextlib.suppress(Exception):  # it has ended in the meantime
                        self._delete(
                            kind, each.partition("/")[2], **({"gracePeriodSeconds": 0} if kind == "pods" else {})
                        )
        self.cluster.until(lambda: not self.cluster.objects(NAMESPACE), "all objects to be deleted")
        self.cluster.until(lambda: not self._in_pods(), "all pods to end")
        self.cluster.until(lambda: len(self.cluster.ready_nodes()) == len(NODES), "all nodes to be ready")


def main() -> None:
    args = arguments((__doc__ or "").partition("\n")[0], FAULTS)
    if why := refusal():
        sys.exit(f"no Kubernetes cluster: {why}")
    with tempfile.TemporaryDirectory() as name, cluster(Path(name), NODES) as made:
        comparison = Comparison(KubernetesTestbed(made, Path(name)), args.limit)
        comparison.run(args.rounds, args.faults, args.ends)
        show(comparison.table(), args.out)


if __name__ == "__main__":
    main()
