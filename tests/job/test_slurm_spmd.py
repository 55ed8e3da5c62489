"""Programs that srun starts on a real cluster: process groups and hosts without torchrun."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.slurm_cluster import SlurmCluster
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slurm

MPICH = Path(__file__).parents[2] / ".envs" / "clients-mpich" / "bin" / "mpiexec"

GROUP = """
import os, torch, torch.distributed as dist
dist.init_process_group("monarch")
total = torch.tensor([dist.get_rank()])
dist.all_reduce(total)
names = [None] * dist.get_world_size()
dist.all_gather_object(names, f"{os.uname().nodename}/{os.environ['LOCAL_RANK']}/{os.environ['LOCAL_WORLD_SIZE']}")
if dist.get_rank() == 0:
    print(total.item(), *names, flush=True)
dist.barrier()
dist.destroy_process_group()
"""

MESH = """
from monarch_backend.job import host_mesh_from_env
from tests.job.support import Where
actors = host_mesh_from_env().spawn_procs({"gpus": 2}).spawn("where", Where)
print(*actors.machine.call().get(60).values(), *set(actors.variable.call("SLURM_PROCID").get(60).values()))
"""


@pytest.mark.parametrize("preset", [[], ["env", "WORLD_SIZE=4"]], ids=["none", "WORLD_SIZE"])
def test_process_group_under_srun(cluster: SlurmCluster, preset: list[str]) -> None:
    """Templates of scripts for sbatch often export WORLD_SIZE before srun."""
    said = cluster.run(*preset, "srun", "-N2", "--ntasks-per-node=2", sys.executable, "-c", GROUP)
    first, second = cluster.nodes[:2]
    assert said.split() == ["6", f"{first}/0/2", f"{first}/1/2", f"{second}/0/2", f"{second}/1/2"]


def test_hosts_under_srun(cluster: SlurmCluster) -> None:
    said = cluster.run("srun", "-N2", sys.executable, "-c", MESH)
    assert said.split() == [cluster.nodes[0]] * 2 + [cluster.nodes[1]] * 2 + ["None"]


@pytest.mark.skipif(not MPICH.exists(), reason="mpich is not in this environment: run make test-clients CLIENTS=mpich")
def test_process_group_under_mpichs_mpiexec_on_two_nodes(cluster: SlurmCluster, tmp_path: Path) -> None:
    """In a script of sbatch, mpiexec finds the nodes, and starts a process on each of them by srun."""
    output = tmp_path / "output"
    (tmp_path / "group.py").write_text(GROUP)
    words = f"{MPICH} -n 4 {sys.executable} {tmp_path / 'group.py'}"
    cluster.run("sbatch", "-N2", "--ntasks-per-node=2", f"--output={output}", "--error=/dev/null", f"--wrap={words}")
    wait_until(lambda: not cluster.jobs(), 100)
    first, second = cluster.nodes[:2]
    assert output.read_text().split() == ["6", f"{first}/0/2", f"{first}/1/2", f"{second}/0/2", f"{second}/1/2"]


def test_group_in_the_script_of_a_job_is_refused(cluster: SlurmCluster, tmp_path: Path) -> None:
    output = tmp_path / "output"
    program = "import torch.distributed as dist; dist.init_process_group('monarch')"
    cluster.run("sbatch", "-N2", f"--output={output}", f'--wrap={sys.executable} -c "{program}"')
    wait_until(lambda: not cluster.jobs(), 100)
