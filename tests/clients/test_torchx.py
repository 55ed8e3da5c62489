"""Apps for TorchX, checked by TorchX: a dry run, the linter of components, and a run on this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from monarch_backend.job import torchx_app
from tests.clients.programs import ROOT, needs
from tests.job.test_spmd_job import free_port

pytestmark = needs("torchx")

COMPONENT = ROOT / "examples" / "frameworks" / "torchx_component.py"
PROGRAM = """
from monarch_backend.job import host_mesh_from_env
print("processes:", host_mesh_from_env().spawn_procs({"gpus": 2}).size())
"""


def test_dry_run_has_a_replica_for_each_host(tmp_path: Path) -> None:
    from torchx.runner import get_runner

    value = "${replica_id} costs $5 or $$6"
    app = torchx_app(["python", "train.py"], 2, name="train", image=str(tmp_path), env={"A": value})
    with get_runner() as runner:
        request: Any = runner.dryrun(app, "local_cwd", {"log_dir": str(tmp_path)}).request
    replicas = request.role_params["hosts"]
    assert [each.env["A"] for each in replicas] == [value, value]
    for rank, each in enumerate(replicas):
        assert each.args[2].startswith(f'export MASTER_ADDR="${{TORCHX_RANK0_HOST:=localhost}}" RANK={rank} ')


def test_component_of_the_example_is_valid() -> None:
    from torchx.specs import file_linter

    assert file_linter.validate(str(COMPONENT), "hosts") == []


def test_component_of_the_example_takes_arguments() -> None:
    from torchx.specs.builders import materialize_appdef
    from torchx.specs.finder import get_component

    function = get_component(f"{COMPONENT}:hosts").fn
    app = materialize_appdef(function, ["--script", "train.py", "--replicas", "3", "--gpu", "8"])
    assert (app.roles[0].num_replicas, app.roles[0].resource.gpu) == (3, 8)


def test_two_replicas_on_this_machine_are_one_mesh(tmp_path: Path) -> None:
    from torchx.runner import get_runner

    environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    app = torchx_app([sys.executable, "-c", PROGRAM], 2, name="train", env=environment, port=free_port())
    with get_runner() as runner:
        handle = runner.run(app, "local_cwd", {"log_dir": str(tmp_path)})
        status: Any = runner.wait(handle, wait_interval=0.2)
        [log] = tmp_path.glob("**/hosts/0/stdout.log")
        assert status.state.name == "SUCCEEDED", log.read_text()
    assert log.read_text().splitlines()[-1] == "processes: 4"
