"""Specifications of one program with hosts, for SkyPilot and TorchX. They are returned, and nothing is started.

Each node runs the same program with the variables of a launcher. `host_mesh_from_env` in it starts a host on the node.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from monarch_backend._job.base import check_host_count, check_variables
from monarch_backend._job.errors import JobError

RENDEZVOUS_PORT = 29500


def skypilot_task(
    program: Sequence[str], hosts: int, *, name: str = "job", resources: Mapping[str, Any] | None = None,
    setup: str = "", env: Mapping[str, str] | None = None, workdir: str | None = None, port: int = RENDEZVOUS_PORT,
) -> dict[str, Any]:  # fmt: skip
    """Return the task of SkyPilot that runs ``program`` on ``hosts`` nodes, for ``sky launch`` or ``sky jobs launch``.

    The program calls `host_mesh_from_env`, which returns the mesh of all nodes on the first one. ``program`` is a list
    of words, ``resources`` is SkyPilot's, and ``setup`` is shell code that installs this package on each node. ``env``
    is added to the environment, and ``workdir`` is a directory that SkyPilot copies to the nodes. Nodes find each other
    at ``port`` of the first one. The task is a dictionary of SkyPilot's schema. As JSON it is a YAML file for ``sky``.

    Raises ValueError for an invalid number, program or name of a variable.

    >>> from monarch_backend.job import skypilot_task
    >>> task = skypilot_task(["python", "train.py"], 4, name="train", resources={"accelerators": "H100:8"})
    >>> task["num_nodes"], task["resources"]
    (4, {'accelerators': 'H100:8'})
    """
    run = [
        'export RANK="$SKYPILOT_NODE_RANK" WORLD_SIZE="$SKYPILOT_NUM_NODES" LOCAL_RANK=0',
        f'export MASTER_ADDR="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)" MASTER_PORT={port}',
        f"exec {_command(program)}",
    ]
    task = {
        "name": name, "num_nodes": check_host_count("hosts", hosts), "resources": dict(resources or {}),
        "envs": check_variables(env or {}), "setup": setup, "run": "\n".join(run), "workdir": workdir,
    }  # fmt: skip
    return {key: value for key, value in task.items() if value}


def torchx_app(
    program: Sequence[str], hosts: int, *, name: str = "job", image: str = "", cpu: int = 1, gpu: int = 0,
    memory_mib: int = 1024, env: Mapping[str, str] | None = None, port: int = RENDEZVOUS_PORT,
) -> Any:  # fmt: skip
    """Return the ``torchx.specs.AppDef`` that runs ``program`` in ``hosts`` replicas. Needs the package torchx.

    The program calls `host_mesh_from_env`, which returns the mesh of all replicas in the first one. ``program`` is a
    list of words. Each replica gets ``cpu`` cores, ``gpu`` GPUs and ``memory_mib`` MiB. ``image`` has this package, and
    ``env`` is added to the environment. Replicas find each other at ``port`` of the first one. A component of TorchX
    returns the app, as ``examples/frameworks/torchx_component.py`` does.

    Raises ValueError for an invalid number, program or name of a variable, and JobError without torchx.

    >>> from monarch_backend.job import JobError, torchx_app
    >>> try:
    ...     app = torchx_app(["python", "train.py"], 4, name="train", image="registry.example/train:1", gpu=8)
    ... except JobError:
    ...     print("pip install torchx")
    pip install torchx
    """
    count, variables = check_host_count("hosts", hosts), check_variables(env or {})
    run = _escaped(f"exec {_command(program)}")
    try:
        from torchx import specs
    except ImportError as error:
        raise JobError(f"torchx_app needs the package torchx (pip install torchx): {error}") from None
    first = f"$${{{specs.macros.rank0_env}:=localhost}}"
    exports = f'export MASTER_ADDR="{first}" RANK={specs.macros.replica_id} WORLD_SIZE={count} LOCAL_RANK=0'
    role = specs.Role(
        name="hosts", image=image, entrypoint="bash", args=["-c", f"{exports} MASTER_PORT={port}\n{run}"],
        env={key: _escaped(value) for key, value in variables.items()}, num_replicas=count,
        resource=specs.Resource(cpu=cpu, gpu=gpu, memMB=memory_mib), port_map={"rendezvous": port},
    )  # fmt: skip
    return specs.AppDef(name=name, roles=[role])


def _escaped(text: str) -> str:
    """Return a text that TorchX leaves as it is. TorchX substitutes ${...} in arguments and values, and $$ by $."""
    return text.replace("$", "$$")


def _command(program: Sequence[str]) -> str:
    if isinstance(program, str) or not program:
        raise ValueError("program is a list of one or more words, such as ['python', 'train.py']")
    return shlex.join(program)
