"""RayJob on a Ray cluster of three nodes of this machine: hosts, reasons, lost nodes, killed hosts, nothing left."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from monarch_backend._job import ray_cluster as ray_cluster_module
from monarch_backend.actor import Actor, current_rank, endpoint
from monarch_backend.job import Job, JobError, RayJob
from tests.clients.programs import needs
from tests.job.support import in_program
from tests.support.ranks import KEPT_PIDS
from tests.support.waiting import wait_until

pytestmark = needs("ray")


class Counter(Actor):
    """Actor with a number for each rank."""

    @endpoint
    def rank(self) -> int:
        return int(current_rank().rank)


CLUSTER = """
import sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
cluster.wait_for_nodes()
print(cluster.address, flush=True)
for line in sys.stdin:
    if line == "lose\\n":
        cluster.remove_node(nodes.pop())
    else:
        nodes.append(cluster.add_node(num_cpus=1))
    print("done", flush=True)
cluster.shutdown()
"""
"""Program with three nodes, which loses and adds one when it is told so. It ends with its standard input."""


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


class RayCluster:
    """A Ray cluster that a program starts, in a process of its own. The default has three nodes."""

    def __init__(self, program: str = CLUSTER, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        KEPT_PIDS.add(self.process.pid)
        self.address = self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, "the cluster has ended"
        return line

    def lose_node(self) -> None:
        self._tell("lose")

    def add_node(self) -> None:
        self._tell("add")

    def _tell(self, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        self._answer()

    def close(self) -> None:
        self.process.communicate(timeout=60)
        KEPT_PIDS.discard(self.process.pid)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    # Ray's sockets are in this folder. The path of a socket has at most 107 bytes, so tmp_path is too long.
    folder = tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True)
    with folder, pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_TMPDIR", folder.name)
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        environment.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # the actors' class is in this package
        cluster = RayCluster()
        try:
            yield cluster
        finally:
            cluster.close()


@pytest.fixture
def job(tmp_path: Path, ray_cluster: RayCluster) -> Iterator[Callable[..., RayJob]]:
    before = daemons()
    yield functools.partial(RayJob, address=ray_cluster.address, path=tmp_path / "job.json")
    with contextlib.suppress(JobError):
        in_program(Job.load(tmp_path / "job.json").kill)
    wait_until(lambda: daemons() <= before)


def daemons() -> set[int]:
    """Return the pids of hosts that Ray's workers have started."""
    found = set()
    for process in psutil.process_iter(["cmdline", "ppid"]):
        if "--exit-with-stdin" in (process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.Error):
                if psutil.Process(process.info["ppid"]).name().startswith("ray::"):
                    found.add(process.pid)
    return found


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def ranks(job: Job) -> list[int]:
    procs = job.state(60).trainers.spawn_procs({"gpus": 1})
    result = sorted(procs.spawn("counter", Counter).rank.call().get(60).values())
    procs.stop().get(60)
    return result


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
        [(_, actor)] = mine._actors(ray, file)
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(actor.end.remote(), timeout=60)
        wait_until(lambda: mine.status()[0].state == "gone", 30)
        state = str(mine.status()[0])
        mine.kill()
        return state

    assert in_program(program, timeout=120) == "trainers[0]: gone (its Ray actor has ended)"


def test_host_of_a_lost_node_starts_on_a_new_node(job: Callable[..., RayJob], ray_cluster: RayCluster) -> None:
    mine = job({"trainers": 3})

    def apply_and_lose() -> None:
        mine.apply()
        ray_cluster.lose_node()
        wait_until(lambda: any("its node was lost" in each.reason for each in mine.status()))

    in_program(apply_and_lose, timeout=120)
    ray_cluster.add_node()
    assert in_program(lambda: ranks(mine), timeout=120) == [0, 1, 2]


def test_autoscaler_adds_nodes_for_the_hosts_and_removes_them_after_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True)
    monkeypatch.setenv("RAY_TMPDIR", folder.name)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))

    def program(address: str) -> tuple[list[int], int]:
        import ray

        def nodes() -> int:
            return sum(node["Alive"] for node in ray.nodes())

        mine = RayJob({"trainers": 2}, address=address, path=tmp_path / "job.json")
        mine.apply(timeout=120)
        found, most = ranks(mine), nodes()
        mine.kill()
        wait_until(lambda: nodes() == 1, 60)
        return found, most

    with folder:
        cluster = RayCluster(AUTOSCALED, str(free_port()))
        try:
            assert in_program(program, cluster.address, timeout=200) == ([0, 1], 3)
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
    mine = job({"trainers": 2}, tether=True)
    text = f"""
import sys
from monarch_backend.job import RayJob

RayJob({{"trainers": 2}}, address={mine._address!r}, tether=True, path={str(mine.path)!r}).apply()
print("up", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
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
