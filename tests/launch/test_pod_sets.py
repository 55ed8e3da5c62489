"""`monarch-backend run` in pods of Kubeflow Trainer and JobSet: their environment, in network namespaces."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hosts import Hosts, address, hosts, refusal

pytestmark = [pytest.mark.skipif(bool(refusal()), reason=refusal() or "-"), pytest.mark.slow]

ROOT = Path(__file__).parents[2]
TRAIN = """
import sys, torch, torch.distributed as dist
dist.init_process_group("monarch")
x = torch.ones(1) * dist.get_rank()
dist.all_reduce(x)
sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()}: {x.item():g}\\n")  # print may write twice
dist.destroy_process_group()
"""
CONTROL = """
import os, socket
from monarch_backend.actor import Actor, endpoint
from monarch_backend.job import host_mesh_from_env

class Where(Actor):
    @endpoint
    def host(self):
        return socket.gethostname()

hosts = host_mesh_from_env()
procs = hosts.spawn_procs({"gpus": int(os.environ["MONARCH_NPROC_PER_NODE"])})
print(*procs.spawn("where", Where).host.call().get().values(), flush=True)
"""


@pytest.fixture(scope="module")
def pods() -> Iterator[Hosts]:
    with hosts(2) as made:
        yield made


def _kubeflow_trainer(rank: int) -> tuple[dict[str, str], str]:
    """Return the environment of a pod of a TrainJob's torch runtime, and the options for the launcher."""
    return {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "2",
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": address(0),
        "PET_MASTER_PORT": "29400",
        "JOB_COMPLETION_INDEX": str(rank),
    }, ""


def _job_set(rank: int) -> tuple[dict[str, str], str]:
    """Return the environment of a pod of an indexed Job. Its command gives the options."""
    options = f"--nnodes=2 --nproc-per-node=2 --node-rank=$JOB_COMPLETION_INDEX --master-addr={address(0)}"
    return {"JOB_COMPLETION_INDEX": str(rank)}, options


@pytest.mark.parametrize("pod_set", [_kubeflow_trainer, _job_set])
@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (TRAIN, [[f"rank {rank} of 4: 6" for rank in range(2)], [f"rank {rank} of 4: 6" for rank in range(2, 4)]]),
        (CONTROL, [["host-a host-a host-b host-b"], []]),
    ],
    ids=["ranks", "controller"],
)
def test_pods_of_a_job_meet(
    pods: Hosts, pod_set: object, script: str, expected: list[list[str]], tmp_path: Path
) -> None:
    assert callable(pod_set)
    (tmp_path / "script.py").write_text(script)
    mode = "--controller " if script is CONTROL else ""
    with contextlib.ExitStack() as stack:
        launchers = []
        for rank in range(2):
            variables, options = pod_set(rank)
            line = f"exec {sys.executable} -m monarch_backend run {options} {mode}{tmp_path / 'script.py'}"
            environment = {**os.environ, **variables, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
            environment |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
            launcher = subprocess.Popen(
                pods.command(rank, "sh", "-c", line), env=environment,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            stack.callback(_end, pods, rank, launcher)
            launchers.append(launcher)
        for launcher, lines in zip(launchers, expected, strict=True):
            out, err = launcher.communicate(timeout=90)
            assert (launcher.returncode, sorted(out.splitlines())) == (0, lines), err


def _end(pods: Hosts, index: int, launcher: subprocess.Popen[str]) -> None:
    for pid in pods.processes(index):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    launcher.communicate(timeout=10)
