"""SkyPilotJob: its task, the meshes in the task's program, and wrong arguments.

tests/clients/test_skypilot.py checks the task with SkyPilot.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch_backend.job import JobError, SkyPilotJob, skypilot_task
from tests.job.support import gone, marked, new_mark
from tests.job.test_spmd_job import clean_environment, ends, free_port

PROGRAM = """
import sys
from monarch_backend.job import JobError, SkyPilotJob

job = SkyPilotJob().add_mesh("trainers", 2).add_mesh("loaders", int(sys.argv[1]))
try:
    job.apply()
    state = job.state()
except JobError as error:
    print(error)
else:
    print(state)
    print([mesh.spawn_procs({"gpus": 2}).size() for mesh in state.values()])
job.kill()
"""


def test_task_has_a_node_for_each_host_of_all_meshes() -> None:
    options: dict[str, Any] = {
        "name": "train", "resources": {"accelerators": "H100:8"}, "setup": "pip install monarch_backend",
        "env": {"NCCL_DEBUG": "INFO"}, "workdir": ".", "port": 1234,
    }  # fmt: skip
    job = SkyPilotJob(**options).add_mesh("trainers", 4).add_mesh("loaders", 2)
    assert job.task(["python", "train.py"]) == skypilot_task(["python", "train.py"], 6, **options)


@pytest.mark.slow  # three programs that import torch
@pytest.mark.parametrize(
    ("loaders", "printed"),
    [
        (1, "JobState('job': trainers=HostMesh('hosts', hosts=2), loaders=HostMesh('hosts', hosts=1))\n[4, 2]\n"),
        (3, "the job has 5 hosts, and the task runs on 3 nodes: render the task again\n"),
    ],
)
def test_program_of_the_task_has_the_meshes_on_the_first_node(tmp_path: Path, loaders: int, printed: str) -> None:
    job = SkyPilotJob(port=free_port()).add_mesh("trainers", 2).add_mesh("loaders", 1)
    (tmp_path / "train.py").write_text(PROGRAM)
    task = job.task([sys.executable, str(tmp_path / "train.py"), str(loaders)])
    with new_mark() as mark:
        nodes = [
            subprocess.Popen(
                ["bash", "-c", task["run"]], stdout=subprocess.PIPE, text=True,
                env={**clean_environment(mark), "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2\n127.0.0.3",
                     "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NUM_NODES": str(task["num_nodes"])},
            )
            for rank in range(3)
        ]  # fmt: skip
        assert ends(nodes) == [(0, printed), (0, ""), (0, "")]
        assert gone(mark), marked(mark)


def test_wrong_arguments_are_refused() -> None:
    job = SkyPilotJob().add_mesh("trainers", 2)
    with pytest.raises(ValueError, match="the job has a mesh 'trainers' already"):
        job.add_mesh("trainers", 1)
    with pytest.raises(ValueError, match="0 is not a number of hosts"):
        job.add_mesh("loaders", 0)
    with pytest.raises(ValueError, match="'a b' cannot be the name of a mesh"):
        job.add_mesh("a b", 1)
    with pytest.raises(ValueError, match="the job has no hosts: add a mesh"):
        SkyPilotJob().task(["python", "train.py"])
    with pytest.raises(ValueError, match="program is a list of one or more words"):
        job.task([])


def test_program_outside_of_a_task_names_the_missing_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(JobError, match=r"RANK, WORLD_SIZE, .* not set"):
        SkyPilotJob().add_mesh("trainers", 2).state()
