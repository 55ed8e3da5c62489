"""Variables of a rank, RANK and so on, from those of srun, of Open MPI's mpirun and of launchers with PMI.

torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. The others have their own names for ranks and
sizes. They do not set where the ranks can meet. Address and port are derived from Slurm's list of nodes and the number
of the step, or from the launcher's name of its job. MPICH's mpiexec sets no such name. On one node, a process of
mpiexec is an ancestor of all its ranks.

The PMI protocol of MPICH's mpiexec, on PMI_FD, has a name. But mpiexec expects a process that uses it to end with
MPI_Finalize, and takes any other end for a crash. So this module does not use it.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

from monarch_backend._core import platform, process_stat

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

OF_A_RANK = re.compile(
    r"MONARCH_SECRET(_FILE)?|((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE))|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
    r"|SLURM_(PROCID|LOCALID|NODEID|GTIDS|TASK_PID|TASKS_PER_NODE|NTASKS.*|NPROCS|STEP.*|SRUN_.*|LAUNCH_.*|MPI_TYPE|PMI.*"
    r"|CPU_BIND.*|DISTRIBUTION|PRIO_PROCESS|UMASK)|SRUN_DEBUG|PMI_.*|PMIX_.*|MPI_LOCAL.*|OMPI_COMM_.*|OMPI_MCA_ess.*"
    r"|HYDI_.*|HYDRA_(BSTRAP_.*|LAUNCH_TYPE)|I_MPI_(HYDRA_UUID|PIN_INFO)"
)
"""Variables that do not apply to processes of a host: they are not ranks of the launcher that has started the host."""

_FIRST_PORT, _PORTS = 10000, 20000
"""Ports below those that systems give to clients (from 32768)."""


_PROCESS_OF_MPICH = "hydra_pmi_proxy"
"""Name of the process that starts the ranks of MPICH on a node."""


class _Found(NamedTuple):
    """What a launcher tells a rank. All but ``launcher`` and ``rank`` are "" where it does not tell them."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    master: str
    job: str  # the same text in all ranks, and different in other jobs


def complete(variables: MutableMapping[str, str]) -> str:
    """Set those of `NAMES` and LOCAL_WORLD_SIZE that are missing, and return the launcher's name.

    Variables that are set stay as they are. Return "" if none of `NAMES` is missing, or if no launcher is known.

    Raises ValueError if a launcher has started this process, and does not tell where its ranks can meet. Raises
    ValueError, too, if RANK or WORLD_SIZE is set to another value than the launcher's. No error is raised if only
    LOCAL_RANK is missing: the ranks may be those of another launcher, and torch does not need it.

    >>> step = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}
    >>> rank = {**step, "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "gpu[08-09]"}
    >>> complete(rank), [rank[name] for name in NAMES]
    ('srun', ['3', '4', '1', 'gpu08', '10049'])
    """
    missing = [name for name in NAMES if not variables.get(name)]
    if not missing:
        return ""
    try:
        return _complete(variables)
    except ValueError:
        if missing == ["LOCAL_RANK"]:
            return ""
        raise


def _complete(variables: MutableMapping[str, str]) -> str:
    found = _of_open_mpi(variables) or _of_pmi(variables) or _of_slurm(variables)
    if found is None:
        if not variables.get("RANK"):
            _check_is_no_script(variables)
        return ""
    for name, value in (("RANK", found.rank), ("WORLD_SIZE", found.size)):
        if value and variables.get(name) and _number(variables, name) != int(value):
            raise ValueError(
                f"{name}={variables[name]} is set, but {found.launcher} has started this process as rank {found.rank} "
                f"of {found.size or 'an unknown number'}: unset {name}, or start the ranks that it is meant for"
            )
    values = {
        "RANK": found.rank, "WORLD_SIZE": found.size, "LOCAL_RANK": found.local_rank,
        "LOCAL_WORLD_SIZE": found.local_size, "MASTER_ADDR": found.master,
        "MASTER_PORT": found.job and _port(found.job),
    }  # fmt: skip
    if missing := [name for name in NAMES if not (values[name] or variables.get(name))]:
        of = f" of {found.size}" if found.size else ""
        raise ValueError(
            f"{found.launcher} has started this process as rank {found.rank}{of}, and does not tell "
            f"{' and '.join(missing)}: set {_advice(missing)}"
        )
    for name, value in values.items():
        if value and not variables.get(name):
            variables[name] = value
    return found.launcher


def _advice(missing: list[str]) -> str:
    """Return what to set the missing variables to."""
    own = {"WORLD_SIZE": "the number of ranks", "LOCAL_RANK": "the rank's number on its node"}
    examples = {"MASTER_ADDR": "MASTER_ADDR=HOST_OF_RANK_0", "MASTER_PORT": "MASTER_PORT=29500"}
    parts = [f"{name} to {own[name]}" for name in missing if name in own]
    if common := [name for name in missing if name in examples]:
        example = " ".join(examples[name] for name in common)
        parts.append(f"{' and '.join(common)} to the same in all ranks, such as {example}")
    return ", and ".join(parts)


def _check_is_no_script(variables: Mapping[str, str]) -> None:
    sizes = [_number(variables, name, "1") for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES")]
    if variables.get("SLURM_PROCID") and max(sizes) > 1:
        raise ValueError("this process runs in the script of a Slurm job and is not a rank: start the program by srun")


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


def _number(variables: Mapping[str, str], name: str, default: str = "0") -> int:
    """Return a number of the environment. Raises ValueError, with the variable's name, for other texts."""
    text = variables.get(name) or default
    if not re.fullmatch(r"[0-9]+", text):
        raise ValueError(f"{name}={text!r} is not a number: correct it, or unset it if it is not the launcher's")
    return int(text)


def _digits(variables: Mapping[str, str], name: str) -> str:
    """Return the text of a number of the environment, or "" where it is not set. Raises ValueError as `_number`."""
    return str(_number(variables, name)) if variables.get(name) else ""


def _of_open_mpi(variables: Mapping[str, str]) -> _Found | None:
    if "OMPI_COMM_WORLD_RANK" not in variables:
        return None
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    rank, size, local_rank, local_size = (_digits(variables, f"OMPI_COMM_WORLD_{name}") for name in names)
    job = variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid", "")
    return _Found(
        "Open MPI's mpirun", rank, size, local_rank, local_size, _master(variables, size == local_size),
        f"mpirun {job}" if job else "",
    )  # fmt: skip


def _of_pmi(variables: Mapping[str, str]) -> _Found | None:
    """Read the variables of MPICH's and Intel's launcher. Those of srun with PMI are not needed."""
    rank, size = variables.get("PMI_RANK"), variables.get("PMI_SIZE", "")
    # A task of srun has the same numbers twice. mpiexec under Slurm starts its ranks in tasks with other numbers.
    is_task = rank == variables.get("SLURM_PROCID") and size in ("", variables.get("SLURM_STEP_NUM_TASKS"))
    if rank is None or (is_task and variables.get("SLURM_STEP_ID")):
        return None
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    rank, size, local_rank, local_size = (_digits(variables, name) for name in names)
    if size == "1":
        local_rank, local_size = local_rank or "0", local_size or "1"
    is_one_node = bool(size) and size == local_size
    job = variables.get("PMI_JOBID") or variables.get("I_MPI_HYDRA_UUID", "")
    if not job:
        job = (is_one_node and _process_of_launcher()) or _step(variables)
    return _Found(
        "a launcher with PMI", rank, size, local_rank, local_size, _master(variables, is_one_node),
        f"pmi {job}" if job else "",
    )  # fmt: skip


def _process_of_launcher() -> str:
    """Return pid and start of the process of MPICH that has started the ranks of this node; "" if it is not found.

    A shell or another program may be between it and this process.
    """
    pid = os.getppid() if platform.HAS_PROC else 0
    while pid > 1:
        try:
            stat = process_stat.read(pid)
        except OSError:
            return ""
        if stat.name == _PROCESS_OF_MPICH:
            return f"{pid} {stat.start_ticks}"
        pid = stat.parent
    return ""


def _step(variables: Mapping[str, str]) -> str:
    """Return the step in which mpiexec has started its processes on the nodes of an allocation, or ""."""
    job, step = variables.get("SLURM_JOB_ID", ""), variables.get("SLURM_STEP_ID", "")
    return f"{job}.{step}" if job and step else ""


def _master(variables: Mapping[str, str], is_one_node: bool) -> str:
    """Return the node of rank 0: the only one, or the first one of Slurm's allocation."""
    return "127.0.0.1" if is_one_node else first_node(variables.get("SLURM_JOB_NODELIST", ""))


def _of_slurm(variables: Mapping[str, str]) -> _Found | None:
    """Read the variables of a task of srun. A script of sbatch has most of them, too, but no SLURM_STEP_ID."""
    if not (variables.get("SLURM_PROCID") and variables.get("SLURM_STEP_ID")):
        return None
    per_node = _tasks_per_node(variables.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _number(variables, "SLURM_NODEID")
    return _Found(
        "srun", _digits(variables, "SLURM_PROCID"),
        _digits(variables, "SLURM_STEP_NUM_TASKS") or _digits(variables, "SLURM_NTASKS"),
        _digits(variables, "SLURM_LOCALID"), str(per_node[node]) if node < len(per_node) else "",
        first_node(variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "")),
        f"{_digits(variables, 'SLURM_JOB_ID')}.{_digits(variables, 'SLURM_STEP_ID')}",
    )  # fmt: skip


def _tasks_per_node(text: str) -> list[int]:
    """Return the numbers of a text such as "2(x3),1": 2, 2, 2, 1."""
    result: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        result += [int(count)] * int(times or 1)
    return result
