"""SPMDJob and host_mesh_from_env, under torchrun and another launcher, and with ranks that die."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch_backend.job import JobError, SPMDJob, host_mesh_from_env
from tests.job.support import MARK, Where, gone, marked, new_mark
from tests.support import hosts
from tests.support.ranks import run_ranks

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SCRIPT = """
import os, sys
from monarch_backend.actor import Actor, endpoint
from monarch_backend.job import JobError, SPMDJob

class Where(Actor):
    @endpoint
    def ranks(self):
        return [name for name in os.environ if name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MONARCH_SECRET")]

job = SPMDJob()
job.apply()
assert os.environ["RANK"] == "0", "the others do not come here"
hosts = job.state().hosts
if "kill" in sys.argv:
    hosts.spawn_procs({"gpus": 2}).initialized.get(60)
    job.kill()
    job.kill()
    print("killed", flush=True)
    try:
        job.state()
    except JobError as error:
        print(error)
    sys.exit()
assert job.state().hosts is hosts
print(hosts, list(hosts.spawn_procs({"gpus": 2}).spawn("where", Where).ranks.call().get(60).values()), flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def clean_environment(mark: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in (*LAUNCHER, "LOCAL_WORLD_SIZE")} | {MARK: mark}


def ends(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Wait for the processes' ends. Return their exit codes and output."""
    try:
        return [(each.wait(100), str(each.stdout.read() if each.stdout else "")) for each in processes]
    finally:
        for each in processes:
            each.kill()
            each.wait()
            if each.stdout:
                each.stdout.close()


def start(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[str]:
    with open(log, "w") as out:
        return subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT, text=True)


def by_hand(script: Path, mark: str, placement: list[int], *arguments: str) -> list[subprocess.Popen[str]]:
    """Start one rank for each entry of ``placement``, which is its LOCAL_RANK."""
    port = free_port()
    return [
        start(
            [sys.executable, str(script), *arguments],
            clean_environment(mark)
            | {"RANK": str(rank), "WORLD_SIZE": str(len(placement)), "LOCAL_RANK": str(local), "MASTER_PORT": str(port)}
            | {"MASTER_ADDR": "127.0.0.1"},
            script.with_suffix(f".{rank}"),
        )
        for rank, local in enumerate(placement)
    ]


@pytest.mark.slow  # nine processes that import torch
def test_two_nodes_under_torchrun(script: Path) -> None:
    launch = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    with new_mark() as mark:
        processes = [
            start(
                [sys.executable, "-m", "torch.distributed.run", *launch, f"--node-rank={node}", str(script)],
                clean_environment(mark),
                script.with_suffix(f".{node}"),
            )
            for node in range(2)
        ]
        codes = [code for code, _ in ends(processes)]
        said = [script.with_suffix(f".{node}").read_text() for node in range(2)]
        assert codes == [0, 0], said
        assert "HostMesh('hosts', hosts=2) [[], [], [], []]" in said[0] and "HostMesh" not in said[1]
        assert gone(mark), marked(mark)


@pytest.mark.slow
def test_ranks_that_have_no_host_wait_too(script: Path) -> None:
    """There is one node with two ranks. The launcher has no store of its own."""
    with new_mark() as mark:
        codes = [code for code, _ in ends(by_hand(script, mark, [0, 1]))]
        said = [script.with_suffix(f".{rank}").read_text() for rank in range(2)]
        assert codes == [0, 0], said
        assert "HostMesh('hosts', hosts=1) [[], []]" in said[0] and said[1] == ""
        assert gone(mark), marked(mark)


def die_with_the_mesh(rank: int, size: int, port: int, mark: str, log: Path) -> int:
    """Fork a rank that gets the mesh and then dies. Return its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0", MARK: mark})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        host_mesh_from_env(timeout=60)
        os.kill(os.getpid(), signal.SIGKILL)
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stderr.flush()
        os._exit(code)


@pytest.mark.slow
def test_death_of_rank_0_ends_other_ranks(tmp_path: Path) -> None:
    port = free_port()
    with new_mark() as mark:
        pids = [die_with_the_mesh(rank, 2, port, mark, tmp_path / str(rank)) for rank in range(2)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        said = [(tmp_path / str(rank)).read_text() for rank in range(2)]
        assert codes == [-signal.SIGKILL, 1], said
        assert said[1] == "monarch_backend: rank 1 ends: rank 0 is gone\n"
        assert gone(mark), marked(mark)


@pytest.mark.slow
def test_kill_ends_the_others(script: Path) -> None:
    with new_mark() as mark:
        codes = [code for code, _ in ends(by_hand(script, mark, [0, 0], "kill"))]
        said = [script.with_suffix(f".{rank}").read_text() for rank in range(2)]
        assert codes == [0, 0], said
        assert said == ["killed\nthe ranks have been ended: the launcher has to start them again\n", ""]
        assert gone(mark), marked(mark)


def meet_on_hosts(rank: int, _address: str, where: hosts.Hosts, mark: str) -> Any:
    """Use three nodes with addresses of their own. The actors of each node call those of the next."""
    where.enter(rank)
    os.environ.update({"LOCAL_RANK": "0", "MASTER_ADDR": where.address(0), "MASTER_PORT": "29400", MARK: mark})
    try:
        mesh = host_mesh_from_env(timeout=60)
    except SystemExit as end:
        return end.code
    procs = mesh.spawn_procs()
    actors = procs.spawn("where", Where)
    names = [actors.slice(hosts=n).next_name.call_one(actors.slice(hosts=(n + 1) % 3)).get(30) for n in range(3)]
    procs.stop().get(30)
    SPMDJob().kill()
    return names


@pytest.mark.slow
@pytest.mark.skipif(bool(hosts.refusal()), reason=hosts.refusal())
def test_three_nodes_with_addresses_of_their_own() -> None:
    with new_mark() as mark, hosts.hosts(3) as where:
        results = run_ranks(meet_on_hosts, 3, where, mark, backend=None, timeout=100)
        assert results == [[where.name(1), where.name(2), where.name(0)], 0, 0]
        assert gone(mark), marked(mark)


def test_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(JobError, match="RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set: start"):
        host_mesh_from_env()
    SPMDJob().kill()  # there is no job


def test_variables_that_are_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, Any] = dict.fromkeys(LAUNCHER, "1") | {"LOCAL_RANK": "first"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(JobError, match="LOCAL_RANK='first' is not a number: correct or unset it"):
        SPMDJob().apply()


@pytest.mark.slow
def test_missing_rank_0_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (values | {"MASTER_PORT": str(free_port())}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(JobError, match=r"rank 1: no rendezvous at 127.0.0.1:\d+ within 1 s"):
        host_mesh_from_env(timeout=1)
