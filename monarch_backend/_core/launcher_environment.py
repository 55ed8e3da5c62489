"""Variables of a rank, RANK and so on, from those of srun, of Open MPI's mpirun and of launchers with PMI.

torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. The others have their own names for ranks and
sizes. They do not tell where the ranks can meet, so that is derived: from Slurm's list of nodes and the number of the
step, or from the launcher's name of its job.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

OF_A_RANK = re.compile(
    r"MONARCH_SECRET(_FILE)?|((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE))|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
    r"|SLURM_(PROCID|LOCALID|NODEID|GTIDS|TASK_PID|TASKS_PER_NODE|NTASKS.*|NPROCS|STEP.*|SRUN_.*|LAUNCH_.*|MPI_TYPE|PMI.*"
    r"|CPU_BIND.*|DISTRIBUTION|PRIO_PROCESS|UMASK)|SRUN_DEBUG|PMI_.*|PMIX_.*|MPI_LOCAL.*|OMPI_COMM_.*|OMPI_MCA_ess.*"
)
"""Variables that do not apply to processes of a host: they are not ranks of the launcher that has started the host."""

_FIRST_PORT, _PORTS = 10000, 20000
"""Ports below those that systems give to clients (from 32768)."""


class _Found(NamedTuple):
    """What a launcher tells a rank. ``master`` and ``job`` are "" where it does not tell them."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    master: str
    job: str  # the same text in all ranks, and different in other jobs


def complete(variables: MutableMapping[str, str]) -> str:
    """Set those of `NAMES` and LOCAL_WORLD_SIZE that are missing, and return the launcher's name.

    Return "" if RANK or WORLD_SIZE is set, or if no launcher is known. Raises ValueError if a launcher has started this
    process, and does not tell where its ranks can meet.

    >>> step = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}
    >>> rank = {**step, "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "gpu[08-09]"}
    >>> complete(rank), [rank[name] for name in NAMES]
    ('srun', ['3', '4', '1', 'gpu08', '10049'])
    """
    if variables.get("RANK") or variables.get("WORLD_SIZE"):
        return ""
    found = _of_open_mpi(variables) or _of_pmi(variables) or _of_slurm(variables)
    if found is None:
        sizes = [int(variables.get(name) or 1) for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES")]
        if variables.get("SLURM_PROCID") and max(sizes) > 1:
            raise ValueError(
                "this process runs in the script of a Slurm job and is not a rank: start the program by srun"
            )
        return ""
    values = {
        "RANK": found.rank, "WORLD_SIZE": found.size, "LOCAL_RANK": found.local_rank,
        "LOCAL_WORLD_SIZE": found.local_size, "MASTER_ADDR": found.master,
        "MASTER_PORT": found.job and _port(found.job),
    }  # fmt: skip
    if missing := [name for name in NAMES if not (values[name] or variables.get(name))]:
        raise ValueError(
            f"{found.launcher} has started this process as rank {found.rank} of {found.size}, and does not tell "
            f"{' and '.join(missing)}: set {'it' if len(missing) == 1 else 'them'} to the same value in all ranks, "
            "such as MASTER_ADDR=HOST_OF_RANK_0 MASTER_PORT=29500"
        )
    for name, value in values.items():
        if value and not variables.get(name):
            variables[name] = value
    return found.launcher


def first_node(nodes: str) -> str:
    """Return the first node of a list of Slurm.

    >>> first_node("rack[1-2]n[07,09-12],login1"), first_node("a,b[1-2]")
    ('rack1n07', 'a')
    """
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0] if first else "")


def _port(job: str) -> str:
    """Return the port of a job. Jobs with successive numbers get different ports."""
    number, _, step = job.partition(".")
    if number.isdigit():
        return str(_FIRST_PORT + (7 * int(number) + (int(step) if step.isdigit() else 0)) % _PORTS)
    return str(_FIRST_PORT + zlib.crc32(job.encode()) % _PORTS)


def _of_open_mpi(variables: Mapping[str, str]) -> _Found | None:
    if "OMPI_COMM_WORLD_RANK" not in variables:
        return None
    size, local_size = variables.get("OMPI_COMM_WORLD_SIZE", ""), variables.get("OMPI_COMM_WORLD_LOCAL_SIZE", "")
    job = variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid", "")
    return _Found(
        "Open MPI's mpirun", variables["OMPI_COMM_WORLD_RANK"], size, variables.get("OMPI_COMM_WORLD_LOCAL_RANK", ""),
        local_size, _master(variables, size == local_size), f"mpirun {job}" if job else "",
    )  # fmt: skip


def _of_pmi(variables: Mapping[str, str]) -> _Found | None:
    """Read the variables of MPICH's and Intel's launcher. Those of srun with PMI are not needed."""
    rank, size = variables.get("PMI_RANK"), variables.get("PMI_SIZE", "")
    # A task of srun has the same numbers twice. mpiexec under Slurm starts its ranks in tasks with other numbers.
    is_task = rank == variables.get("SLURM_PROCID") and size in ("", variables.get("SLURM_STEP_NUM_TASKS"))
    if rank is None or (is_task and variables.get("SLURM_STEP_ID")):
        return None
    local_rank, local_size = variables.get("MPI_LOCALRANKID", ""), variables.get("MPI_LOCALNRANKS", "")
    job = variables.get("PMI_JOBID") or variables.get("PMI_PORT", "")
    if not local_rank and size == "1":
        local_rank = "0"
    master = _master(variables, local_size == size)
    return _Found("a launcher with PMI", rank, size, local_rank, local_size, master, f"pmi {job}" if job else "")


def _master(variables: Mapping[str, str], is_one_node: bool) -> str:
    """Return the node of rank 0: the only one, or the first one of Slurm's allocation."""
    return "127.0.0.1" if is_one_node else first_node(variables.get("SLURM_JOB_NODELIST", ""))


def _of_slurm(variables: Mapping[str, str]) -> _Found | None:
    """Read the variables of a task of srun. A script of sbatch has most of them, too, but no SLURM_STEP_ID."""
    if not (variables.get("SLURM_PROCID") and variables.get("SLURM_STEP_ID")):
        return None
    per_node = _tasks_per_node(variables.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = int(variables.get("SLURM_NODEID", 0))
    return _Found(
        "srun", variables["SLURM_PROCID"], variables.get("SLURM_STEP_NUM_TASKS") or variables.get("SLURM_NTASKS", ""),
        variables.get("SLURM_LOCALID", ""), str(per_node[node]) if node < len(per_node) else "",
        first_node(variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "")),
        f"{variables.get('SLURM_JOB_ID', '')}.{variables['SLURM_STEP_ID']}",
    )  # fmt: skip


def _tasks_per_node(text: str) -> list[int]:
    """Return the numbers of a text such as "2(x3),1": 2, 2, 2, 1."""
    result: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        result += [int(count)] * int(times or 1)
    return result
