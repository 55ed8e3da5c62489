"""Names of torch's backends under which a program gets this one: MONARCH_AS=gloo, for programs that list names.

A group that asks for such a name is made with "monarch" for the device types below. The others keep torch's backend.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from monarch_backend._core import env

DEVICES = {"gloo": "cpu", "nccl": "cuda"}
"""The device type whose tensors move to "monarch", by torch's name. Gloo's CUDA tensors, for instance, stay."""


def names_in(backend: str) -> set[str]:
    """Return the names in a ``backend``, which is one name or "device:name" pairs."""
    return {part.rpartition(":")[2].strip() for part in backend.split(",")}


def request_for(backend: str) -> str:
    """Return the ``backend`` that makes the requested group by "monarch", or "" if it is not under our names.

    ``backend`` is one that torch has checked: a name, "device:name" pairs, or "undefined" for the default. Raises
    ValueError for a bad MONARCH_AS.
    """
    names = env.get("MONARCH_AS")
    if backend != dist.Backend.UNDEFINED and names_in(backend).isdisjoint(names):
        return ""
    requested = {device: str(name) for device, name in _config(backend).get_device_backend_map().items()}
    ours = {device for device, name in requested.items() if name in names and DEVICES[name] == device}
    if not ours:
        return ""
    # "monarch" first: torch takes its group for all devices and makes no further backend.
    ordered = sorted(requested.items(), key=lambda item: item[0] not in ours)
    return ",".join(f"{device}:{'monarch' if device in ours else name}" for device, name in ordered)


def _config(backend: str) -> c10d.BackendConfig:
    return c10d.BackendConfig(dist.Backend(backend))


def options_for(options: Any) -> Any:
    """Return the ``pg_options`` for "monarch". Torch ignores those of Gloo."""
    return None if type(options).__qualname__.startswith("ProcessGroupGloo") else options


def rename(group: Any, backend: str) -> None:
    """Let torch.distributed.get_backend and get_backend_config answer as for the requested ``backend``."""
    world: Any = c10d._world
    world.pg_map[group] = backend, world.pg_map[group][1]
    world.pg_backend_config[group] = str(_config(backend))


@functools.cache
def report() -> None:
    """Print once that this program's groups are ours, though it sees torch's names."""
    names = env.get("MONARCH_AS")
    tensors = " and ".join(f"{_TENSORS[name]} tensors of groups for {name!r}" for name in names)
    sys.stderr.write(f"monarch_backend: MONARCH_AS={','.join(names)}: moves {tensors}\n")


_TENSORS = {"gloo": "CPU", "nccl": "GPU"}
