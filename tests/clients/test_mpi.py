"""Ranks of a real mpiexec: the one of MPICH, Intel MPI or Open MPI that is in this environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MPIEXEC = Path(sys.executable).with_name("mpiexec")

pytestmark = [
    pytest.mark.skipif(
        not MPIEXEC.exists(),
        reason='no mpiexec is in this environment: run make test-clients CLIENTS="intel_mpi mpich open_mpi"',
    ),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}  # fmt: skip
RANK = """
import os, sys, time
from pathlib import Path
from monarch_backend._core.launcher_environment import NAMES, complete
complete(os.environ)
started = Path(sys.argv[1])
(started / str(os.getpid())).touch()
while len(os.listdir(started)) < 4:  # ranks of two jobs
    time.sleep(0.01)
sys.stdout.write(" ".join(os.environ[name] for name in NAMES) + "\\n")
"""
GROUP = """
import sys, torch, torch.distributed as dist
dist.init_process_group("monarch")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
sys.stdout.write(f"total {total.item()}\\n")
dist.destroy_process_group()
"""
INCOMPLETE = """
import os, sys
from monarch_backend._core.launcher_environment import complete
try:
    complete(os.environ)
except ValueError as error:
    sys.stdout.write(f"{error}\\n")
"""


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [MPIEXEC, *words], env={**os.environ, **OPEN_MPI, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def output(process: subprocess.Popen[str]) -> list[str]:
    """Return the lines that the ranks have printed."""
    with process:
        try:
            out, err = process.communicate(timeout=100)
        finally:
            process.terminate()
    assert process.returncode == 0, (out, err)
    return out.splitlines()


def test_ranks_of_mpiexec_are_a_process_group() -> None:
    assert output(start("-n", "2", sys.executable, "-c", GROUP)) == ["total 3"] * 2


def test_jobs_at_the_same_time_have_different_ports(tmp_path: Path) -> None:
    """A shell is between mpiexec and each rank."""
    started = tmp_path / "started"
    started.mkdir()
    (tmp_path / "rank.py").write_text(RANK)
    line = f"{sys.executable} {tmp_path / 'rank.py'} {started}; exit $?"
    jobs = [start("-n", "2", "sh", "-c", line) for _ in range(2)]
    ports = []
    for job in jobs:
        *values, its_ports = zip(*(line.split() for line in sorted(output(job))), strict=True)
        assert values == [("0", "1"), ("2", "2"), ("0", "1"), ("127.0.0.1", "127.0.0.1")]
        ports.append(set(its_ports))
    assert [len(each) for each in ports] == [1, 1]
    assert ports[0] != ports[1]


def test_several_nodes_of_mpich_need_an_address_and_a_port() -> None:
    """Only MPICH takes two names of this machine for two nodes."""
    version = subprocess.run([MPIEXEC, "--version"], capture_output=True, text=True).stdout
    if "HYDRA" not in version or "Intel" in version:
        pytest.skip("this is not MPICH")
    nodes = ["-launcher", "fork", "-hosts", "localhost,127.0.0.1"]
    lines = output(start(*nodes, "-n", "2", sys.executable, "-c", INCOMPLETE))
    assert len(lines) == 2
    assert all("does not tell MASTER_ADDR and MASTER_PORT: set MASTER_ADDR and" in line for line in lines)
