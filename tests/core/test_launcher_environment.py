"""Variables of ranks from those of srun, mpirun and PMI: recorded environments, and what they do not tell.

tests/clients/test_mpi.py runs the launchers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from monarch_backend._core import platform
from monarch_backend._core.launcher_environment import NAMES, OF_A_RANK, complete, first_node

SRUN = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "2", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_NTASKS": "6", "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "gpu[07,09-10]", "SLURM_JOB_NODELIST": "gpu[05-10]",
}  # fmt: skip


def recorded(text: str) -> dict[str, str]:
    """Return the environment that ``mpiexec -n 2 env`` has printed for one rank."""
    return dict(line.split("=", 1) for line in text.split("\n") if line)


# Open MPI 5.0.11, rank 1 of two on one node; without paths and variables that all ranks have, as PMIX_VERSION
MPIRUN = recorded("""
OMPI_COMM_WORLD_LOCAL_RANK=1
OMPI_COMM_WORLD_LOCAL_SIZE=2
OMPI_COMM_WORLD_NODE_RANK=1
OMPI_COMM_WORLD_RANK=1
OMPI_COMM_WORLD_SIZE=2
PMIX_HOSTNAME=node1
PMIX_NAMESPACE=prterun-node1-21988@1
PMIX_RANK=1
""")
# MPICH 5.0.2, rank 1 of two on one node: everything that mpiexec adds
MPICH = recorded("""
GFORTRAN_UNBUFFERED_PRECONNECTED=y
HYDI_CONTROL_FD=7
MPI_LOCALNRANKS=2
MPI_LOCALRANKID=1
PMI_FD=11
PMI_HOSTNAME=node1
PMI_RANK=1
PMI_SIZE=2
""")
MPICH_TWO_NODES = MPICH | {"MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}
# Intel MPI 2021.18.1, rank 1 of two on one node: without HYDRA_BSTRAP_ and I_MPI_INFO_
INTEL = recorded("""
GFORTRAN_UNBUFFERED_PRECONNECTED=y
HYDRA_IP_VERSION=2
HYDRA_LAUNCH_TYPE=2
I_MPI_HYDRA_TOPOLIB=ipl2
I_MPI_HYDRA_UUID=34100000-1001-cb0e-7861-060076ef663b
I_MPI_PIN_INFO=1
I_MPI_PIN_MAPPING=2:0 0,1 1
MPI_LOCALNRANKS=2
MPI_LOCALRANKID=1
PMI_FD=11
PMI_RANK=1
PMI_SIZE=2
""")
# A launcher that names its job, on the second of two nodes
HYDRA = {**MPICH_TWO_NODES, "PMI_JOBID": "7", "SLURM_JOB_NODELIST": "a[1-2]"}


def completed(variables: dict[str, str]) -> tuple[str, list[str | None], str | None]:
    """Return the launcher, the values of NAMES, and LOCAL_WORLD_SIZE."""
    rank = dict(variables)
    launcher = complete(rank)
    return launcher, [rank.get(name) for name in NAMES], rank.get("LOCAL_WORLD_SIZE")


@pytest.mark.parametrize(
    ("variables", "launcher", "values", "local_size"),
    [
        (SRUN, "srun", ["5", "6", "1", "gpu07", str(10000 + (7 * 4711 + 2) % 20000)], "2"),
        ({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "6"}, "srun", ["5", "6", "1", "gpu07", "22979"], "2"),
        ({**SRUN, "MASTER_PORT": "29500"}, "srun", ["5", "6", "1", "gpu07", "29500"], "2"),
        (MPIRUN, "Open MPI's mpirun", ["1", "2", "1", "127.0.0.1", None], "2"),
        # mpirun starts a daemon on each node by srun, and its ranks have the variables of that task, too
        ({**SRUN, **MPIRUN}, "Open MPI's mpirun", ["1", "2", "1", "127.0.0.1", None], "2"),
        (INTEL, "a launcher with PMI", ["1", "2", "1", "127.0.0.1", None], "2"),
        (HYDRA, "a launcher with PMI", ["1", "2", "0", "a1", None], "1"),
        # rank 0 of mpiexec, which starts a proxy on each of two nodes by srun, and in a script of sbatch
        (
            {**SRUN, **HYDRA, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "PMI_RANK": "0", "PMI_SIZE": "4"},
            "a launcher with PMI",
            ["0", "4", "0", "a1", None],
            "1",
        ),
        ({**HYDRA, "SLURM_PROCID": "0", "PMI_RANK": "0"}, "a launcher with PMI", ["0", "2", "0", "a1", None], "1"),
    ],
)
def test_recorded_environment_has_the_variables_of_a_rank(
    variables: dict[str, str], launcher: str, values: list[str | None], local_size: str
) -> None:
    found, completed_values, size = completed(variables)
    assert (found, size) == (launcher, local_size)
    for value, expected in zip(completed_values, values, strict=True):
        assert value == expected if expected else 10000 <= int(value or 0) < 30000


def test_jobs_of_intel_have_different_ports() -> None:
    other = {**INTEL, "I_MPI_HYDRA_UUID": "80220000-164a-2214-7861-0600cf490073"}
    ports = {completed(variables)[1][-1] for variables in (INTEL, {**INTEL, "PMI_RANK": "0"}, other)}
    assert len(ports) == 2


def test_steps_of_mpich_have_different_ports_on_several_nodes() -> None:
    """Its mpiexec starts a process on each node by srun."""
    step = {**MPICH_TWO_NODES, "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "a[1-2]"}
    ports = {completed(each)[1][-1] for each in (step, {**step, "PMI_RANK": "0"}, {**step, "SLURM_STEP_ID": "1"})}
    assert len(ports) == 2


RANK = """
import os, sys
from monarch_backend._core.launcher_environment import complete
complete(os.environ)
print(os.environ["MASTER_PORT"])
"""


def ports_of_mpich(folder: Path) -> list[str]:
    """Return the ports of two ranks of a process with the name of MPICH's. One has a shell between it and its rank."""
    proxy = folder / "hydra_pmi_proxy"
    if not proxy.exists():
        proxy.symlink_to("/bin/sh")
    (folder / "rank.py").write_text(RANK)
    rank = f"{sys.executable} {folder / 'rank.py'}"
    script = f"{rank} && sh -c '{rank}; exit $?'; exit $?"
    done = subprocess.run(
        [proxy, "-c", script], env={**os.environ, **MPICH}, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.split()


@pytest.mark.skipif(not platform.HAS_PROC, reason="reads /proc")
def test_ranks_of_one_process_of_mpich_have_one_port(tmp_path: Path) -> None:
    first, second = (ports_of_mpich(tmp_path) for _ in range(2))
    assert len(first) == len(second) == 2
    assert len({*first}) == len({*second}) == 1
    assert first != second


def test_torchruns_variables_stay() -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "MASTER_ADDR": "host", "MASTER_PORT": "1"}
    assert completed({**SRUN, **torchrun})[:2] == ("", list(torchrun.values()))
    assert completed({}) == ("", [None] * 5, None)


@pytest.mark.parametrize("name", NAMES)
def test_preset_variable_stays_and_the_others_are_found(name: str) -> None:
    values = dict(zip(NAMES, ["5", "6", "1", "gpu07", "22979"], strict=True))
    preset = {name: {"MASTER_ADDR": "gpu07-ib", "MASTER_PORT": "29500"}.get(name, values[name])}
    assert completed({**SRUN, **preset}) == ("srun", list((values | preset).values()), "2")


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        (
            {"WORLD_SIZE": "8"},
            "WORLD_SIZE=8 is set, but srun has started this process as rank 5 of 6: unset WORLD_SIZE",
        ),
        ({"RANK": "0"}, "RANK=0 is set, but srun has started this process as rank 5 of 6: unset RANK"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE='x' is not a number"),
    ],
)
def test_preset_variable_that_contradicts_the_launcher_is_an_error(preset: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        complete({**SRUN, **preset})


def test_ranks_of_another_launcher_in_a_task_stay() -> None:
    """A program starts ranks in a task of srun, and sets all but LOCAL_RANK, which torch does not need."""
    preset = {"RANK": "3", "WORLD_SIZE": "12", "MASTER_ADDR": "host", "MASTER_PORT": "1"}
    for variables in ({**SRUN, **preset}, {**MPICH, **preset}, {**SRUN, **preset, "SLURM_NODEID": "x"}):
        assert completed(variables) == ("", ["3", "12", None, "host", "1"], None)


def test_script_of_a_job_is_no_rank() -> None:
    script = {name: value for name, value in SRUN.items() if "STEP" not in name}
    with pytest.raises(ValueError, match="start the program by srun"):
        complete(script)
    assert completed({**script, "SLURM_NTASKS": "1"})[0] == ""


def test_launcher_that_does_not_tell_a_place_is_an_error() -> None:
    several_nodes = {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    with pytest.raises(ValueError, match=r"as rank 1 of 2, and does not tell MASTER_ADDR: set MASTER_ADDR to the same"):
        complete(several_nodes)
    del several_nodes["PMIX_NAMESPACE"]
    for variables in (several_nodes, MPICH_TWO_NODES):
        with pytest.raises(ValueError, match=r"in all ranks, such as MASTER_ADDR=HOST_OF_RANK_0 MASTER_PORT=29500"):
            complete(dict(variables))
        assert completed({**variables, "MASTER_ADDR": "a", "MASTER_PORT": "1"})[1][3:] == ["a", "1"]


def test_ranks_of_mpich_in_another_pid_namespace_need_a_port() -> None:
    """Its process is not among the ancestors of this one."""
    with pytest.raises(ValueError, match=r"does not tell MASTER_PORT: set MASTER_PORT to the same in all ranks"):
        complete(dict(MPICH))


def test_launcher_that_tells_only_a_rank_gets_advice_for_each_variable() -> None:
    with pytest.raises(
        ValueError, match="PMI has started this process as rank 0, and does not tell WORLD_SIZE"
    ) as raised:
        complete({"PMI_RANK": "0"})
    assert str(raised.value).endswith(
        "set WORLD_SIZE to the number of ranks, and LOCAL_RANK to the rank's number on its node, and MASTER_ADDR and "
        "MASTER_PORT to the same in all ranks, such as MASTER_ADDR=HOST_OF_RANK_0 MASTER_PORT=29500"
    )


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        *((SRUN, name) for name in ("SLURM_NODEID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID")),
        (MPIRUN, "OMPI_COMM_WORLD_SIZE"),
        (INTEL, "MPI_LOCALRANKID"),
        ({"SLURM_PROCID": "0"}, "SLURM_NTASKS"),
    ],
)
def test_number_of_a_launcher_that_is_none_is_named(variables: dict[str, str], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}='x' is not a number: correct it, or unset it"):
        complete({**variables, name: "x"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a-1,b", "a-1"), ("n[3,5]-ib,b[1-2]", "n3-ib"), ("r[1-2]n[08-11]", "r1n08"), ("", "")],
)
def test_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_processes_of_a_host_are_no_ranks() -> None:
    left = {name for name in {**SRUN, **MPIRUN, **HYDRA, **INTEL} if not OF_A_RANK.fullmatch(name)}
    assert {name for name in left if name.startswith("SLURM_")} == {"SLURM_JOB_ID", "SLURM_JOB_NODELIST"}
    settings = {"GFORTRAN_UNBUFFERED_PRECONNECTED", "HYDRA_IP_VERSION", "I_MPI_HYDRA_TOPOLIB", "I_MPI_PIN_MAPPING"}
    assert {name for name in left if not name.startswith("SLURM_")} == settings
