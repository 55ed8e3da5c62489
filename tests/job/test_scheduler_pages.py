"""The code of docs/guides/schedulers.md and ray-clusters.md, without the clusters of the pages.

Tasks of SkyPilot run as processes of this machine, with fewer nodes and processes. Ray is replaced. tests/clients has
the packages: test_ray_job.py runs the same job and the program of the page on a real Ray, and test_torchx.py the
component. `sky launch`, `torchx run` and `pip install` are not run: they need a cloud, a cluster and an index.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._transport.network.auth import new_secret
from monarch_backend.job import RayJob
from tests.job.conftest import ROOT
from tests.job.support import gone, marked, new_mark
from tests.job.test_spmd_job import clean_environment, ends, free_port

SCHEDULERS, RAY = ((ROOT / "docs" / "guides" / name).read_text() for name in ("schedulers.md", "ray-clusters.md"))


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def run_task(task: dict[str, Any], nodes: int, folder: Path) -> list[tuple[int, str]]:
    """Run a task of SkyPilot on this machine. Return exit code and output of each node."""
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SKYPILOT_NODE_IPS": "\n".join(f"127.0.0.{number + 1}" for number in range(nodes)),
        "SKYPILOT_NUM_NODES": str(nodes),
    }
    run = task["run"].replace("MASTER_PORT=29500", f"MASTER_PORT={free_port()}")
    assert run != task["run"]
    with new_mark() as mark:
        result = ends(
            [
                subprocess.Popen(
                    ["bash", "-c", run], cwd=folder, stdout=subprocess.PIPE, text=True,
                    env={**clean_environment(mark), **environment, "SKYPILOT_NODE_RANK": str(rank)},
                )
                for rank in range(nodes)
            ]
        )  # fmt: skip
        assert gone(mark), marked(mark)
    return result


def test_page_has_the_blocks_that_run_here() -> None:
    controller, task, description, train = blocks(SCHEDULERS, "py")
    assert "host_mesh_from_env()" in controller and "skypilot_task(" in task
    assert description.startswith("# description.py\n") and train.startswith("# train.py\n")
    assert [each.split()[0] for each in blocks(SCHEDULERS, "sh")] == [
        "srun", "sky", "torchx", "MONARCH_SECRET_FILE=/run/secrets/job",
    ]  # fmt: skip


@pytest.mark.slow  # programs that import torch
def test_task_of_the_page_runs_the_controller_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    controller, program, _, _ = blocks(SCHEDULERS, "py")
    controller = controller.replace('{"gpus": 8}', '{"gpus": 1}')
    (tmp_path / "controller.py").write_text(f"{controller}print(procs.extent)\n")
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    task = json.loads((tmp_path / "task.yaml").read_text())
    assert task["num_nodes"] == 4
    assert run_task(task, 2, tmp_path) == [(0, "hosts=2, gpus=1\n"), (0, "")]


@pytest.mark.slow
def test_programs_of_a_skypilot_job_on_the_page_have_its_meshes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, description, train = blocks(SCHEDULERS, "py")
    description = description.replace('"trainers", 4', '"trainers", 2').replace('"loaders", 2', '"loaders", 1')
    (tmp_path / "description.py").write_text(description)
    train = train.replace('{"gpus": 8}', '{"gpus": 1}')
    (tmp_path / "train.py").write_text(f"{train}print(trainers.extent, loaders.extent)\n")
    rendered = re.search(r'`(job\.task\(\["python", "train\.py"\]\))`', SCHEDULERS)
    assert rendered is not None
    namespace: dict[str, Any] = {}
    exec(description, namespace)
    task = eval(rendered[1], namespace)
    printed = "hosts=2, gpus=1 hosts=1, gpus=1\n"
    assert run_task(task, 3, tmp_path) == [(0, printed), (0, ""), (0, "")]


def test_service_of_the_page_is_up(tmp_path: Path) -> None:
    *_, line = blocks(SCHEDULERS, "sh")
    secret = tmp_path / "job.secret"
    secret.touch(0o600)
    secret.write_text(new_secret().hex())
    line = line.replace("/run/secrets/job", str(secret)).replace("0.0.0.0:26600", "127.0.0.1:0")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    words = ["bash", "-c", line.replace(" monarch-backend", f" exec {sys.executable} -m monarch_backend.cli")]
    with subprocess.Popen(words, env={**os.environ, "PATH": path}, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        try:
            assert "this host is up" in service.stdout.readline()
        finally:
            service.terminate()
    assert service.returncode == 0


def test_programs_of_the_page_on_ray_have_valid_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hosts:
        def spawn_procs(self, per_host: dict[str, int]) -> str:
            return f"{len(jobs[-1].status())} x {per_host}"

    class State:
        trainers = Hosts()

    jobs: list[RayJob] = []
    monkeypatch.setattr(RayJob, "apply", lambda job: jobs.append(job))
    monkeypatch.setattr(RayJob, "state", lambda _: State)
    namespace: dict[str, Any] = {}
    for program, hosts in zip(blocks(RAY, "py"), (4, 3), strict=True):
        exec(program, namespace)
        assert namespace["procs"] == f"{hosts} x {{'gpus': 8}}"


def test_options_of_the_page_on_ray_are_valid() -> None:
    options = re.findall(r"^\| `(\w+=.*?)` \|", RAY, re.MULTILINE)
    assert len(options) == 5
    for option in options:
        eval(f"RayJob({{'trainers': 1}}, {option})", {"RayJob": RayJob})


def test_example_of_the_page_on_ray_exists() -> None:
    *_, command = blocks(RAY, "sh")
    assert (ROOT / command.split()[1]).is_file()
    assert f'"{command.split()[1]}"' in (ROOT / "tests" / "clients" / "test_ray_job.py").read_text()
