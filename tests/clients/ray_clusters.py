"""Ray clusters of several nodes on this machine, for tests of `RayJob`."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from monarch_backend.actor import Actor, current_rank, endpoint
from monarch_backend.job import Job, JobError, RayJob
from tests.job.support import in_program
from tests.support.ranks import KEPT_PIDS
from tests.support.waiting import wait_until

CLUSTER = """
import json, sys
from ray.cluster_utils import Cluster
from ray._private.ray_constants import PROCESS_TYPE_RAY_CLIENT_SERVER as CLIENT_SERVER

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **json.loads(sys.argv[1])})
nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
cluster.wait_for_nodes()
print(cluster.address, flush=True)
for line in sys.stdin:
    what, given = json.loads(line)
    answer = "done"
    if what == "lose":
        for node in [node for node in nodes if node.node_id == given] if given else nodes[-1:]:
            nodes.remove(node)
            cluster.remove_node(node)
    elif what == "add":
        nodes.append(cluster.add_node(**{"num_cpus": 1, **given}))
        answer = nodes[-1].node_id
    elif what == "end client server":
        cluster.head_node._kill_process_type(CLIENT_SERVER, allow_graceful=False)
    elif what == "start client server" and CLIENT_SERVER not in cluster.head_node.all_processes:
        cluster.head_node.start_ray_client_server()
    print(answer, flush=True)
cluster.shutdown()
"""
"""Program with three nodes, which does what lines of JSON on its standard input say, and ends with that."""


class RayCluster:
    """A Ray cluster that a program starts, in a process of its own. The default has three nodes of one CPU."""

    def __init__(self, program: str = CLUSTER, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *(arguments or ("{}",))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        KEPT_PIDS.add(self.process.pid)
        self.address = self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, "the cluster has ended"
        return line

    def lose_node(self, node: str = "") -> None:
        """Kill the processes of a node, by default of the last one."""
        self._tell("lose", node)

    def add_node(self, **arguments: object) -> str:
        """Add a node, by default with one CPU. Return its id."""
        return self._tell("add", arguments)

    @contextlib.contextmanager
    def more_nodes(self, count: int, **arguments: object) -> Iterator[list[str]]:
        """Yield the ids of nodes that the cluster has during the block. The block may lose some of them."""
        nodes = [self.add_node(**arguments) for _ in range(count)]
        try:
            yield nodes
        finally:
            for node in nodes:
                self.lose_node(node)

    def end_client_server(self) -> None:
        self._tell("end client server", "")

    def start_client_server(self) -> None:
        self._tell("start client server", "")

    def _tell(self, what: str, given: object) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{json.dumps([what, given])}\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self.process.communicate(timeout=60)
        KEPT_PIDS.discard(self.process.pid)


@contextlib.contextmanager
def ray_environment() -> Iterator[None]:
    """Set variables of this process for a cluster of its own."""
    # Ray's sockets are in this folder. The path of a socket has at most 107 bytes, so tmp_path is too long.
    folder = tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True)
    with folder, pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_TMPDIR", folder.name)
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        environment.setenv("GRPC_ENABLE_FORK_SUPPORT", "0")  # grpcio 1.85 may crash where Ray Client's server forks
        environment.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # the actors' class is in this package
        yield


@contextlib.contextmanager
def running_cluster(program: str = CLUSTER, *arguments: str) -> Iterator[RayCluster]:
    """Yield a cluster that ends with the block."""
    with ray_environment():
        cluster = RayCluster(program, *arguments)
        try:
            yield cluster
        finally:
            cluster.close()


@contextlib.contextmanager
def jobs_in(folder: Path, address: str) -> Iterator[Callable[..., RayJob]]:
    """Yield a constructor of jobs with a file in the folder. Afterwards the job is ended, and no host is left."""
    before = daemons()
    yield functools.partial(RayJob, address=address, path=folder / "job.json")
    with contextlib.suppress(JobError):
        in_program(Job.load(folder / "job.json").kill)
    wait_until(lambda: daemons() <= before)


class Counter(Actor):
    """Actor with a number for each rank."""

    @endpoint
    def rank(self) -> int:
        return int(current_rank().rank)

    @endpoint
    def pid(self) -> int:
        return os.getpid()


def ranks(job: Job) -> list[int]:
    """Return the ranks of one process on each host of the mesh "trainers"."""
    procs = job.state(60).trainers.spawn_procs({"gpus": 1})
    result = sorted(procs.spawn("counter", Counter).rank.call().get(60).values())
    procs.stop().get(60)
    return result


def check_host_of_a_lost_node(job: RayJob, cluster: RayCluster) -> None:
    """Check that the host of a lost node starts again on a new node. The job has three hosts."""

    def apply_and_lose() -> None:
        job.apply()
        cluster.lose_node()
        wait_until(lambda: any("its node was lost" in each.reason for each in job.status()))

    in_program(apply_and_lose, timeout=120)
    cluster.add_node()
    assert in_program(lambda: ranks(job), timeout=120) == [0, 1, 2]


@contextlib.contextmanager
def tethered_program(job: RayJob, hosts: int, *, resized_to: int = 0) -> Iterator[subprocess.Popen[str]]:
    """Yield a program that has applied a tethered job with some hosts, and has resized it if asked."""
    resize = f'job.resize("trainers", {resized_to}, 60)' if resized_to else ""
    text = f"""
import sys
from monarch_backend.job import RayJob

job = RayJob({{"trainers": {hosts}}}, address={job._address!r}, tether=True, path={str(job.path)!r})
job.apply()
{resize}
print("up", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process


def daemons() -> set[int]:
    """Return the pids of hosts that Ray's workers have started."""
    found = set()
    for process in psutil.process_iter(["cmdline", "ppid"]):
        if "--exit-with-stdin" in (process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.Error):
                if psutil.Process(process.info["ppid"]).name().startswith("ray::"):
                    found.add(process.pid)
    return found


def groups() -> list[str]:
    """Return the names of the placement groups that the cluster of this process's connection has."""
    import ray

    return sorted(entry["name"] for entry in ray.util.placement_group_table().values() if entry["state"] != "REMOVED")


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])
