"""Tasks for SkyPilot and apps for TorchX: their shell code with the variables of the launcher, and wrong arguments.

tests/clients/test_skypilot.py and test_torchx.py check them with these packages.
"""

from __future__ import annotations

import os
import subprocess
import sys
from string import Template
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_backend.job import skypilot_task, torchx_app

PROGRAM = [sys.executable, "-c", "import os, sys; print(*map(os.environ.get, sys.argv[1:]), '$HOME')"]
VARIABLES = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]


def printed(shell: str, **variables: str) -> str:
    environment = {**os.environ, **variables}
    return subprocess.run(["bash", "-c", shell], env=environment, capture_output=True, text=True, check=True).stdout


def test_nodes_of_skypilot_are_ranks_of_the_first_node() -> None:
    task = skypilot_task([*PROGRAM, *VARIABLES], 2, name="train", setup="pip install monarch_backend", port=1234)
    assert {key: task[key] for key in task if key != "run"} == {
        "name": "train", "num_nodes": 2, "setup": "pip install monarch_backend",
    }  # fmt: skip
    node = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2"}
    assert printed(task["run"], **node) == "1 2 0 10.0.0.1 1234 $HOME\n"


def test_replicas_of_torchx_are_ranks_of_the_first_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package has the names of its macros and keeps what the specification gets."""
    specs = SimpleNamespace(
        macros=SimpleNamespace(rank0_env="${rank0_env}", replica_id="${replica_id}"),
        Role=SimpleNamespace, Resource=SimpleNamespace, AppDef=SimpleNamespace,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torchx", SimpleNamespace(specs=specs))  # type: ignore[arg-type]
    given = {"COST": "$5 or $$6", "NAME": "${app_id}"}
    [role] = torchx_app([*PROGRAM, *VARIABLES], 3, gpu=8, port=1234, env=given).roles
    # As macros.Values of TorchX does.
    assert {key: Template(value).safe_substitute(app_id="app") for key, value in role.env.items()} == given
    assert (role.num_replicas, role.resource.gpu) == (3, 8)
    shell = role.args[1].replace("${rank0_env}", "FIRST").replace("${replica_id}", "2").replace("$$", "$")
    assert printed(shell, FIRST="10.0.0.1") == "2 3 0 10.0.0.1 1234 $HOME\n"
    assert printed(shell) == "2 3 0 localhost 1234 $HOME\n"


@pytest.mark.parametrize("render", [skypilot_task, torchx_app])
def test_wrong_arguments_are_refused(render: Any) -> None:
    for arguments, options, text in (
        (("python train.py", 2), {}, "program is a list of one or more words"),
        (([], 2), {}, "program is a list of one or more words"),
        ((["python"], 0), {}, "0 is not a number of hosts"),
        ((["python"], 2), {"env": {"a b": "c"}}, "'a b' is not a name of an environment variable"),
    ):
        with pytest.raises(ValueError, match=text):
            render(*arguments, **options)
