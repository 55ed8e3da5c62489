"""Variables of ranks from those of srun, mpirun and PMI: recorded environments, and what they do not tell."""

from __future__ import annotations

import pytest

from monarch_backend._core.launcher_environment import NAMES, OF_A_RANK, complete, first_node

SRUN = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "2", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_NTASKS": "6", "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "gpu[07,09-10]", "SLURM_JOB_NODELIST": "gpu[05-10]",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "prterun-node1-1234@1",
}  # fmt: skip
HYDRA = {
    "PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1", "PMI_JOBID": "7",
    "SLURM_JOB_NODELIST": "a[1-2]",
}  # fmt: skip


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
        (MPIRUN, "Open MPI's mpirun", ["3", "4", "3", "127.0.0.1", None], "4"),
        # mpirun starts a daemon on each node by srun, and its ranks have the variables of that task, too
        ({**SRUN, **MPIRUN}, "Open MPI's mpirun", ["3", "4", "3", "127.0.0.1", None], "4"),
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


def test_torchruns_variables_stay() -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "MASTER_ADDR": "host", "MASTER_PORT": "1"}
    assert completed({**SRUN, **torchrun})[:2] == ("", list(torchrun.values()))
    assert completed({}) == ("", [None] * 5, None)


def test_script_of_a_job_is_no_rank() -> None:
    script = {name: value for name, value in SRUN.items() if "STEP" not in name}
    with pytest.raises(ValueError, match="start the program by srun"):
        complete(script)
    assert completed({**script, "SLURM_NTASKS": "1"})[0] == ""


def test_launcher_that_does_not_tell_a_place_is_an_error() -> None:
    several_nodes = {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(ValueError, match=r"as rank 3 of 4, and does not tell MASTER_ADDR: set it to the same value"):
        complete(several_nodes)
    del several_nodes["PMIX_NAMESPACE"]
    with pytest.raises(ValueError, match=r"does not tell MASTER_ADDR and MASTER_PORT: set them"):
        complete(several_nodes)
    assert completed({**several_nodes, "MASTER_ADDR": "a", "MASTER_PORT": "1"})[1][3:] == ["a", "1"]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a-1,b", "a-1"), ("n[3,5]-ib,b[1-2]", "n3-ib"), ("r[1-2]n[08-11]", "r1n08"), ("", "")],
)
def test_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_processes_of_a_host_are_no_ranks() -> None:
    left = [name for name in {**SRUN, **MPIRUN, **HYDRA} if not OF_A_RANK.fullmatch(name)]
    assert sorted(left) == ["SLURM_JOB_ID", "SLURM_JOB_NODELIST"]
