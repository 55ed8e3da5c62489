"""Fixtures of the tests of `RayJob`: a cluster of three nodes for each module, and jobs on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from monarch_backend.job import RayJob
    from tests.clients.ray_clusters import RayCluster


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    from tests.clients.ray_clusters import running_cluster  # imports packages of Ray's environment

    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def job(tmp_path: Path, ray_cluster: RayCluster) -> Iterator[Callable[..., RayJob]]:
    from tests.clients.ray_clusters import jobs_in

    with jobs_in(tmp_path, ray_cluster.address) as make:
        yield make
