"""RayJob on a Ray cluster of three nodes of this machine: hosts, reasons, lost nodes, killed hosts, nothing left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from monarch_backend._job import ray_cluster as ray_cluster_module
from monarch_backend.job import Job, JobError, RayJob
from tests.clients.programs import needs
from tests.clients.ray_clusters import (
    RayCluster,
    check_host_of_a_lost_node,
    daemons,
    free_port,
    ranks,
    ray_environment,
    tethered_program,
)
from tests.job.support import in_program
from tests.support.waiting import wait_until

pytestmark = needs("ray")


AUTOSCALED = """
import json, os, subprocess, sys
import ray

port = sys.argv[1]
address = f"{ray.util.get_node_ip_address()}:{port}"
unused = dict.fromkeys(["auth", "docker", "file_mounts"], {}) | dict.fromkeys(
    ["cluster_synced_files", "head_setup_commands", "head_start_ray_commands", "initialization_commands",
     "rsync_exclude", "rsync_filter", "setup_commands", "worker_setup_commands", "worker_start_ray_commands"], [])
config = unused | {
    "cluster_name": "test",
    "provider": {"type": "fake_multinode", "gcs_address": address, "use_node_id_as_ip": True,
                 "disable_node_updaters": True, "disable_launch_config_check": True},
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "worker": {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 3},
    },
    "head_node_type": "ray.head.default", "max_workers": 3, "upscaling_speed": 10.0, "idle_timeout_minutes": 0.05,
    "file_mounts_sync_continuously": False,
}
path = os.path.join(os.environ["RAY_TMPDIR"], "autoscaler.json")
with open(path, "w") as file:
    json.dump(config, file)
command = [os.path.join(sys.prefix, "bin", "ray"), "start", "--head", "--block", f"--port={port}", "--num-cpus=0",
           "--include-dashboard=false", f"--autoscaling-config={path}"]
environment = {**os.environ, "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
head = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
for line in head.stdout:
    if "Ray runtime started" in line:
        print(address, flush=True)
        break
sys.stdin.read()
head.terminate()
head.communicate()
"""
"""Program with a head node on a port, its argument, and Ray's autoscaler, which adds up to three nodes."""


def test_meshes_of_three_nodes_and_nothing_left(job: Callable[..., RayJob]) -> None:
    def program() -> None:
        import ray

        before = daemons()
        ray.init(job({"trainers": 1})._address, namespace="of the user", log_to_driver=False)
        mine = job({"trainers": 3})
        mine.apply()
        assert len(daemons() - before) == 3
        assert ranks(mine) == ranks(Job.load(mine.path)) == [0, 1, 2]
        assert [each.state for each in mine.status()] == ["up"] * 3
        mine.kill()
        wait_until(lambda: daemons() == before)
        assert all(each["state"] == "REMOVED" for each in ray.util.placement_group_table().values())

    in_program(program, timeout=120)


def test_second_program_uses_and_ends_the_job(job: Callable[..., RayJob]) -> None:
    before = daemons()
    mine = job({"trainers": 2})
    in_program(mine.apply)
    assert len(daemons() - before) == 2
    assert in_program(lambda: ranks(Job.load(mine.path))) == [0, 1]
    in_program(Job.load(mine.path).kill)
    wait_until(lambda: daemons() == before)


def test_too_many_hosts_wait_with_the_reason(job: Callable[..., RayJob]) -> None:
    def program() -> str:
        with pytest.raises(JobError) as caught:
            job({"trainers": 9}).apply(timeout=3)
        job({"trainers": 9}).kill()
        return str(caught.value)

    text = in_program(program)
    assert re.search(r"trainers\[0\]: pending \(\w+: each host takes .*3 nodes have .*CPU", text)
    assert not job({"trainers": 9}).path.exists()


def test_killed_host_gets_a_new_incarnation(job: Callable[..., RayJob]) -> None:
    def program() -> list[int]:
        before = daemons()
        mine = job({"trainers": 1})
        mine.apply()
        address = mine.status()[0].address
        [pid] = daemons() - before
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: mine.status()[0].address not in ("", address))
        return ranks(mine)

    assert in_program(program, timeout=120) == [0]


def test_ended_host_is_not_started_again(job: Callable[..., RayJob]) -> None:
    def program() -> str:
        import ray

        mine = job({"trainers": 1})
        mine.apply()
        file = mine._read()
        assert file is not None
        [(_, actor)] = mine._actors(ray, mine._plans(), file)
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(actor.end.remote(), timeout=60)
        wait_until(lambda: mine.status()[0].state == "gone", 30)
        state = str(mine.status()[0])
        mine.kill()
        return state

    assert in_program(program, timeout=120) == "trainers[0]: gone (its Ray actor has ended)"


def test_host_of_a_lost_node_starts_on_a_new_node(job: Callable[..., RayJob], ray_cluster: RayCluster) -> None:
    check_host_of_a_lost_node(job({"trainers": 3}), ray_cluster)


def test_autoscaler_adds_nodes_for_the_hosts_and_removes_them_after_kill(
    tmp_path: Path,
) -> None:
    def program(address: str) -> tuple[list[list[int]], int]:
        import ray

        def nodes() -> int:
            return sum(node["Alive"] for node in ray.nodes())

        mine = RayJob({"trainers": 2}, address=address, path=tmp_path / "job.json")
        mine.apply(timeout=120)
        found = [ranks(mine)]
        mine.resize("trainers", 3, timeout=120)
        found.append(ranks(mine))
        most = nodes()
        mine.resize("trainers", 2, timeout=60)
        wait_until(lambda: nodes() == 3, 60)
        found.append(ranks(mine))
        mine.kill()
        wait_until(lambda: nodes() == 1, 60)
        return found, most

    with ray_environment():
        cluster = RayCluster(AUTOSCALED, str(free_port()))
        try:
            assert in_program(program, cluster.address, timeout=300) == ([[0, 1], [0, 1, 2], [0, 1]], 4)
        finally:
            started = psutil.Process(cluster.process.pid).children(recursive=True)
            cluster.close()
            for each in psutil.wait_procs(started, timeout=20)[1]:
                each.kill()  # the head node does not know the autoscaler's nodes


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "ray://127.0.0.1:{port}", "auto"])
def test_cluster_that_does_not_listen_is_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    port = free_port()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{port}")  # of a cluster that was killed
    job = RayJob({"trainers": 1}, address=address.format(port=port), path=tmp_path / "job.json")

    def program() -> str:
        with pytest.raises(JobError) as caught:
            job.apply()
        return str(caught.value)

    text = in_program(program)
    assert "no Ray cluster at" in text and f"127.0.0.1:{port}" in text and "ray status" in text


def test_tethered_job_ends_with_its_killed_program(job: Callable[..., RayJob]) -> None:
    before = daemons()
    with tethered_program(job({"trainers": 2}, tether=True), 2) as process:
        assert len(daemons() - before) == 2
        process.kill()
    wait_until(lambda: daemons() == before)


def test_cluster_whose_gcs_is_down_is_an_error_with_its_cure(
    tmp_path: Path, ray_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster_module, "CLUSTER_TIMEOUT_S", 2.0)
    monkeypatch.setattr(ray_cluster_module, "END_TIMEOUT_S", 1.0)
    cluster = RayCluster()  # another one, which is not used again

    def program() -> list[str]:
        mine = RayJob({"trainers": 1}, address=cluster.address, path=tmp_path / "job.json")
        mine.apply(wait=False)
        [gcs] = [each for each in psutil.Process(cluster.process.pid).children() if each.name() == "gcs_server"]
        gcs.kill()
        errors = []
        for use in (mine.status, mine.kill):
            with pytest.raises(JobError) as caught:
                use()
            errors.append(str(caught.value))
        return errors

    try:
        for error in in_program(program):
            assert "cannot be asked about job 'job'" in error
            assert "Is its head node up (ray status)?" in error
    finally:
        cluster.close()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"meshes": {"trainers": 0}}, "not a number of hosts"),
        ({"meshes": {"trainers": 1}, "strategy": "AROUND"}, "not one of STRICT_SPREAD"),
        ({"meshes": {"trainers": 1}, "resources_per_host": {"CPU": -1}}, "not an amount above 0"),
        ({"meshes": {"trainers": 1}, "resources_per_host": {}}, "has no place"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RayJob(**arguments)


def test_example_calls_a_mesh_from_a_driver(ray_cluster: RayCluster) -> None:
    done = subprocess.run(
        [sys.executable, "examples/frameworks/ray_job.py", "2"], env={**os.environ, "RAY_ADDRESS": ray_cluster.address},
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.splitlines())[-1] == "step 2 {'hosts': 1, 'gpus': 1} [8.0, 8.0]"
