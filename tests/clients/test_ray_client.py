"""`RayJob` through Ray Client (``ray://``): hosts, faults, and a Ray Client server that ends or is none."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from monarch_backend._job import ray_cluster as ray_cluster_module
from monarch_backend.job import Job, JobError, RayJob
from tests.clients.programs import needs
from tests.clients.ray_clusters import (
    CLUSTER,
    Counter,
    RayCluster,
    check_host_of_a_lost_node,
    daemons,
    free_port,
    groups,
    jobs_in,
    ranks,
    running_cluster,
    tethered_program,
)
from tests.job.support import in_program
from tests.support.waiting import wait_until

pytestmark = [needs("ray"), needs("grpc")]

GRACE_S = 3
"""Seconds in which Ray Client and its server keep a lost connection. Ray's default is 30."""


@pytest.fixture(scope="module")
def client_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def ray_cluster(client_port: int) -> Iterator[RayCluster]:
    with running_cluster(CLUSTER, json.dumps({"ray_client_server_port": client_port})) as cluster:
        yield cluster


@pytest.fixture
def job(
    tmp_path: Path, ray_cluster: RayCluster, client_port: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., RayJob]]:
    monkeypatch.setenv("RAY_CLIENT_RECONNECT_GRACE_PERIOD", str(GRACE_S))
    with jobs_in(tmp_path, f"ray://127.0.0.1:{client_port}") as make:
        yield make


def test_meshes_through_ray_client_and_nothing_left(job: Callable[..., RayJob]) -> None:
    def program() -> None:
        import ray

        before = daemons()
        mine = job({"trainers": 2})
        mine.apply()
        assert ray.util.client.ray.is_connected()
        assert len(daemons() - before) == 2
        assert ranks(mine) == ranks(Job.load(mine.path)) == [0, 1]
        mine.resize("trainers", 3, 60)
        assert ranks(mine) == [0, 1, 2]
        mine.resize("trainers", 1, 60)
        assert ranks(mine) == [0]
        mine.kill()
        wait_until(lambda: daemons() <= before)
        assert groups() == []

    in_program(program, timeout=200)


def test_second_program_on_ray_client_uses_and_ends_the_job(job: Callable[..., RayJob]) -> None:
    before = daemons()
    mine = job({"trainers": 2})
    in_program(mine.apply)
    assert in_program(lambda: ranks(Job.load(mine.path)), timeout=120) == [0, 1]
    in_program(Job.load(mine.path).kill)
    wait_until(lambda: daemons() <= before)


def test_runtime_environment_is_that_of_hosts_and_of_the_ray_client_server(
    job: Callable[..., RayJob], capfd: pytest.CaptureFixture[str]
) -> None:
    """The server imports the class of the actors, too."""

    def program() -> tuple[int, int]:
        before = daemons()
        mine = job({"trainers": 2}, runtime_env={"env_vars": {"OF_THE_JOB": "yes"}})
        mine.apply()
        hosts = [psutil.Process(pid) for pid in daemons() - before]
        servers = [
            each
            for each in psutil.process_iter(["cmdline"])
            if "--mode=specific-server" in (each.info["cmdline"] or ())
        ]
        found = count_of_job(hosts), count_of_job(servers)
        mine.kill()
        return found

    def count_of_job(processes: list[psutil.Process]) -> int:
        return sum(each.environ().get("OF_THE_JOB") == "yes" for each in processes)

    assert in_program(program, timeout=120) == (2, 1)
    assert "not recommended" not in capfd.readouterr().err  # Ray's warning of actors in placement groups


def test_reasons_through_ray_client(job: Callable[..., RayJob]) -> None:
    def program() -> str:
        mine = job({"trainers": 9})
        with pytest.raises(JobError) as caught:
            mine.apply(timeout=8)
        mine.kill()
        return str(caught.value)

    text = in_program(program, timeout=120)
    assert "trainers[0]: pending" in text
    assert "each host takes" in text and "3 nodes have" in text


def test_host_of_a_lost_node_starts_on_a_new_node_through_ray_client(
    job: Callable[..., RayJob], ray_cluster: RayCluster
) -> None:
    check_host_of_a_lost_node(job({"trainers": 3}), ray_cluster)


def test_hosts_run_on_without_the_ray_client_server(
    job: Callable[..., RayJob], ray_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster_module, "CLUSTER_TIMEOUT_S", 5.0)

    def program() -> list[str]:
        before = daemons()
        mine = job({"trainers": 2})
        mine.apply()
        procs = mine.state(60).trainers.spawn_procs({"gpus": 1})
        actors = procs.spawn("counter", Counter)
        ray_cluster.end_client_server()
        errors = [error_of(mine)]
        assert sorted(actors.rank.call().get(60).values()) == [0, 1]
        assert len(daemons() - before) == 2
        wait_until(lambda: error_of(mine).startswith("no Ray cluster at"))  # Ray Client has given up its connection
        errors.append(error_of(mine))
        with pytest.raises(JobError, match="no Ray cluster at"):
            mine.kill()
        ray_cluster.start_client_server()
        wait_until(lambda: not error_of(mine))
        assert ranks(mine) == [0, 1]
        mine.kill()
        wait_until(lambda: daemons() <= before)
        return errors

    try:
        lost, refused = in_program(program, timeout=200)
    finally:
        ray_cluster.start_client_server()
    assert "cannot be asked about job 'job'" in lost
    assert "The hosts run on." in lost and "a later call makes a new one" in lost
    assert "Ray Client listens on the port of `ray start --head --ray-client-server-port`" in refused


def error_of(job: RayJob) -> str:
    try:
        job.status()
    except JobError as error:
        return str(error)
    return ""


def test_port_of_another_server_is_an_error(
    tmp_path: Path, ray_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_CLIENT_INITIAL_CONNECTION_TIMEOUT_S", "1")
    monkeypatch.setenv("RAY_CLIENT_MAX_CONNECTION_TIMEOUT_S", "1")
    mine = RayJob({"trainers": 1}, address=f"ray://{ray_cluster.address}", path=tmp_path / "job.json")

    def program() -> str:
        warnings.simplefilter("ignore")  # Ray warns about closed ports
        with pytest.raises(JobError) as caught:
            mine.apply()
        return str(caught.value)

    text = in_program(program)
    assert f"no Ray cluster at 'ray://{ray_cluster.address}'" in text
    assert "--ray-client-server-port" in text
    assert not mine.path.exists()


def test_reason_of_a_ray_client_server_that_cannot_start_is_in_the_error(
    job: Callable[..., RayJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionAbortedError(
            "Initialization failure from server:\nTraceback (most recent call last):\nRuntimeError: no module x\n"
        )

    def program() -> str:
        import ray

        monkeypatch.setattr(ray, "init", refuse)
        with pytest.raises(JobError) as caught:
            job({"trainers": 1}).apply()
        return str(caught.value)

    assert in_program(program).endswith(": RuntimeError: no module x")


def test_ray_without_its_extra_for_ray_client_is_an_error_with_the_cure(job: Callable[..., RayJob]) -> None:
    def program() -> str:
        sys.modules["grpc"] = None  # type: ignore[assignment]
        with pytest.raises(JobError) as caught:
            job({"trainers": 1}).apply()
        return str(caught.value)

    assert "pip install ray[client]" in in_program(program)


def test_tethered_job_ends_with_its_killed_program_after_the_grace_of_ray_client(job: Callable[..., RayJob]) -> None:
    before = daemons()
    mine = job({"trainers": 1}, tether=True)
    with tethered_program(mine, 1, resized_to=2) as process:
        assert len(daemons() - before) == 2
        process.kill()
        killed_at = time.monotonic()
    wait_until(lambda: daemons() <= before)
    assert time.monotonic() - killed_at < GRACE_S + 20
