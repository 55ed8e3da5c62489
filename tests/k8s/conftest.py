"""The cluster of all tests here. Without a control plane they skip with the reason."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.cluster import ROOT, USER_NAME, Cluster, cluster, refusal

NODES: dict[str, dict[str, str]] = {"n0": {"nvidia.com/gpu": "8"}, "n1": {}, "n2": {}}
_numbers = itertools.count()


@pytest.fixture(scope="session")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if why := refusal():
        pytest.skip(f"no Kubernetes cluster: {why}")
    with cluster(tmp_path_factory.mktemp("k8s"), NODES) as made:
        yield made


def permissions() -> list[dict[str, Any]]:
    """Return the objects of deploy/k8s, with the tests' user as a further subject of the binding."""
    found = []
    for path in sorted(ROOT.glob("deploy/k8s/*.yaml")):
        for each in yaml.safe_load_all(path.read_text()):
            if each["kind"] == "RoleBinding":
                group = each["roleRef"]["apiGroup"]
                each["subjects"].append({"kind": "User", "name": USER_NAME, "apiGroup": group})
            found.append(each)
    return found


class Place:
    """A namespace, and the kubeconfig of a user with the rights of deploy/k8s in it, and no others."""

    def __init__(self, kube: Cluster, folder: Path) -> None:
        self.kube, self.folder = kube, folder
        self.namespace = f"test-{next(_numbers)}"
        self.kubeconfig = kube.new_namespace(self.namespace, permissions())

    def run(self, fn: Callable[..., Any], *args: Any, host: int = 0, timeout: float = 120) -> Any:
        """Return ``fn(kubeconfig, folder, *args)`` of a program on a host."""
        return self.kube.run(fn, str(self.kubeconfig), self.folder, *args, host=host, timeout=timeout)

    def pods(self) -> dict[str, Any]:
        return self.kube.pods(self.namespace)


@pytest.fixture
def place(kube: Cluster, tmp_path: Path) -> Iterator[Place]:
    made = Place(kube, tmp_path)
    yield made
    if left := kube.objects(made.namespace):
        kube.ask("DELETE", f"/api/v1/namespaces/{made.namespace}")
        kube.until(lambda: not kube.pods(made.namespace), "the pods of a failed test to end")
        pytest.fail(f"the test left behind: {', '.join(left)}")
