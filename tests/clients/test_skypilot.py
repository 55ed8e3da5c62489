"""Tasks for SkyPilot, checked by SkyPilot: its schema, nodes and resources. No task is launched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from monarch_backend.job import SkyPilotJob, skypilot_task
from tests.clients.programs import needs

pytestmark = needs("sky")

READ = """
import json, sys
import sky

task = sky.Task.from_yaml(sys.argv[1])
task.validate_name()
[resources] = task.resources
print(json.dumps([task.name, task.num_nodes, task.setup, task.envs, task.run, resources.accelerators]))
"""
"""Program that prints what SkyPilot has read. It warns on import, which our pytest settings would make an error."""


def read(task: dict[str, Any], folder: Path) -> subprocess.CompletedProcess[str]:
    """Read a task from a file by SkyPilot, which writes its configuration and catalogs to $HOME."""
    (folder / "task.yaml").write_text(json.dumps(task))
    return subprocess.run(
        [sys.executable, "-c", READ, str(folder / "task.yaml")], env={**os.environ, "HOME": str(folder)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_task_is_valid_as_a_file(tmp_path: Path) -> None:
    task = skypilot_task(
        ["python", "train.py"], 4, name="train", resources={"accelerators": "H100:8"},
        setup="pip install monarch_backend", env={"NCCL_DEBUG": "INFO"}, workdir=str(tmp_path),
    )  # fmt: skip
    done = read(task, tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        "train", 4, "pip install monarch_backend", {"NCCL_DEBUG": "INFO"}, task["run"], {"H100": 8},
    ]  # fmt: skip


def test_task_of_a_job_is_valid(tmp_path: Path) -> None:
    job = SkyPilotJob(name="train", resources={"accelerators": "H100:8"}, env={"NCCL_DEBUG": "INFO"})
    task = job.add_mesh("trainers", 4).add_mesh("loaders", 2).task(["python", "train.py"])
    done = read(task, tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["train", 6, None, {"NCCL_DEBUG": "INFO"}, task["run"], {"H100": 8}]


def test_smallest_task_is_valid(tmp_path: Path) -> None:
    done = read(skypilot_task(["python", "train.py"], 1), tmp_path)
    assert done.returncode == 0, done.stderr


def test_key_of_another_schema_is_refused(tmp_path: Path) -> None:
    """The other tests rely on this check."""
    done = read({**skypilot_task(["python", "train.py"], 1), "num_node": 1}, tmp_path)
    assert done.returncode == 1
    assert "Invalid task YAML" in done.stderr
