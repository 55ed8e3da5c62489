"""The cluster of all tests here. Without a control plane they skip with the reason."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
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


ORDINARY = ("service-account", "role", "role-binding")
SHELL = ("role-shell", "role-binding-shell")
"""Files of deploy/k8s: what each user needs, and what `k8s shell` needs in addition."""


def permissions(files: Sequence[str]) -> list[dict[str, Any]]:
    """Return the objects of these files of deploy/k8s, with the tests' user as a further subject of the bindings."""
    found = []
    for name in files:
        for each in yaml.safe_load_all((ROOT / "deploy/k8s" / f"{name}.yaml").read_text()):
            if each["kind"] == "RoleBinding":
                group = each["roleRef"]["apiGroup"]
                each["subjects"].append({"kind": "User", "name": USER_NAME, "apiGroup": group})
            found.append(each)
    return found


class Place:
    """A namespace, and the kubeconfig of a user with the rights of these files in it, and no others."""

    def __init__(self, kube: Cluster, folder: Path, files: Sequence[str] = ORDINARY) -> None:
        self.kube, self.folder = kube, folder
        self.namespace = f"test-{next(_numbers)}"
        self.kubeconfig = kube.new_namespace(self.namespace, permissions(files))

    def run(self, fn: Callable[..., Any], *args: Any, host: int = 0, timeout: float = 120) -> Any:
        """Return ``fn(kubeconfig, folder, *args)`` of a program on a host."""
        return self.kube.run(fn, str(self.kubeconfig), self.folder, *args, host=host, timeout=timeout)

    def pods(self) -> dict[str, Any]:
        return self.kube.pods(self.namespace)


@contextlib.contextmanager
def a_place(kube: Cluster, folder: Path, files: Sequence[str]) -> Iterator[Place]:
    """Yield a namespace, in which nothing must be left at the end."""
    made = Place(kube, folder, files)
    yield made
    if left := kube.objects(made.namespace):
        kube.ask("DELETE", f"/api/v1/namespaces/{made.namespace}")
        kube.until(lambda: not kube.pods(made.namespace), "the pods of a failed test to end")
        pytest.fail(f"the test left behind: {', '.join(left)}")


@pytest.fixture
def place(kube: Cluster, tmp_path: Path) -> Iterator[Place]:
    with a_place(kube, tmp_path, ORDINARY) as made:
        yield made


@pytest.fixture
def place_with_shell(kube: Cluster, tmp_path: Path) -> Iterator[Place]:
    """A place whose user may run commands in pods."""
    with a_place(kube, tmp_path, (*ORDINARY, *SHELL)) as made:
        yield made
