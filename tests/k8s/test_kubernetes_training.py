"""examples/kubernetes_train.py on the test cluster: training through faults and changes of the number of pods."""

from __future__ import annotations

import contextlib
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import monarch_backend.actor
from monarch_backend.job import JobError
from tests.k8s.cluster import ADMIN, ROOT, Cluster
from tests.k8s.conftest import Place
from tests.k8s.kubelet import Api, ApiError
from tests.k8s.service_account import ServiceAccountToken
from tests.k8s.test_kubernetes_job import IMAGE, READY_S, ended, job_of
from tests.support.undisturbed_training import train_undisturbed
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.k8s]

STEPS = 50
FAULTS = {1: "expire", 2: "renew", 3: "restart", 5: "kill", 8: "oom", 12: "delete", 16: "evict", 20: "cut", 25: "crash",
          30: "heal"}  # fmt: skip
"""What happens after which step.

"heal" is the return of the crashed node. The token expires and is renewed, and the API server is restarted.
"""
HARMLESS = ("expire", "renew", "restart", "heal")
"""What does not interrupt the training."""


class Faults:
    """What happens to the pods of a run after which step."""

    def __init__(self, kube: Cluster, namespace: str, token: ServiceAccountToken, marks: Path) -> None:
        self._kube, self._namespace, self._token, self._marks = kube, namespace, token, marks
        self.done: list[str] = []
        self.crashed = ""

    def __call__(self, run: Any, step: int) -> None:
        fault = FAULTS.get(step)
        if fault is not None and fault not in self.done:
            self.done.append(fault)
            getattr(self, fault)(run.job)

    def expire(self, job: Any) -> None:
        self._token.expire()
        with pytest.raises(JobError, match="they have expired"):
            job.status()

    def renew(self, job: Any) -> None:
        self._token.renew()
        assert len(job.status()) == 4

    def restart(self, _job: Any) -> None:
        """Let the test restart the API server. Steps go on without it."""
        (self._marks / "restart").touch()
        wait_until((self._marks / "stopped").exists)

    def _pod(self, job: Any, index: int) -> str:
        return str(job.status()[index].log.split()[1])

    def kill(self, job: Any) -> None:
        self._kube.tell_kubelet(f"kill {self._pod(job, 1)}")

    def oom(self, job: Any) -> None:
        self._kube.tell_kubelet(f"oom {self._pod(job, 0)}")

    def evict(self, job: Any) -> None:
        self._kube.tell_kubelet(f"evict {self._pod(job, 1)}")

    def delete(self, job: Any) -> None:
        """Delete a pod, and wait until it has ended: the next fault is another failure then."""
        path = f"/api/v1/namespaces/{self._namespace}/pods/{self._pod(job, 2)}"
        with contextlib.closing(Api(self._kube.server, ADMIN)) as api:
            before = api("GET", path)["metadata"]["uid"]
            api("DELETE", path)

            def is_gone() -> bool:
                try:
                    return bool(api("GET", path)["metadata"]["uid"] != before)
                except ApiError as error:
                    return error.status == 404

            wait_until(is_gone)

    def cut(self, job: Any) -> None:
        self._kube.tell_kubelet(f"cut {self._pod(job, 3)}")

    def crash(self, job: Any) -> None:
        self.crashed = job.status()[0].log.rpartition(" ")[2]
        self._kube.tell_kubelet(f"crash {self.crashed}")

    def heal(self, _job: Any) -> None:
        self._kube.tell_kubelet(f"start {self.crashed}")


def train(kubeconfig: str, folder: Path, kube: Cluster, namespace: str) -> dict[str, Any]:
    sys.path.insert(0, str(ROOT / "examples"))
    import kubernetes_train

    monarch_backend.actor.unhandled_fault_hook = lambda failure: None
    own = folder / "kubeconfig"
    own.write_text(Path(kubeconfig).read_text())
    token = ServiceAccountToken(kube.server, namespace, own)
    job = job_of(str(own), folder, "lm", force_delete=True)
    job.add_mesh("trainers", 4, image=IMAGE, grace_period=1)
    with ended(job):
        job.apply(READY_S)
        run = kubernetes_train.Run(job, STEPS, sizes={34: 2, 38: 4, 44: 3})
        faults = Faults(kube, namespace, token, folder)
        run.train(faults)
        return {"losses": run.losses, "failures": run.failures, "recoveries": run.recoveries, "done": faults.done}


def test_training_goes_on_through_faults_and_resizes_with_the_same_losses(place: Place) -> None:
    kube = place.kube
    with ThreadPoolExecutor() as pool:
        training = pool.submit(place.run, train, kube, place.namespace, timeout=400)
        wait_until(lambda: (place.folder / "restart").exists() or training.done(), 200)
        if not training.done():
            kube.stop_api_server()
            (place.folder / "stopped").touch()
            kube.start_api_server()
    try:
        found = training.result()
    finally:
        for node in ("n0", "n1", "n2"):
            kube.tell_kubelet(f"start {node}")
        kube.until(lambda: len(kube.ready_nodes()) == 3, "the crashed node to return")
    print("\n".join(found["failures"]), [f"{seconds:.1f} s" for seconds in found["recoveries"]])
    assert found["done"] == list(FAULTS.values())
    assert len(found["recoveries"]) >= len(FAULTS) - len(HARMLESS)
    expected = kube.run(train_undisturbed, STEPS)
    assert found["losses"] == pytest.approx(expected, rel=1e-3)
