"""torch's own DTensors from one controller: a single program, whose shards are in the processes of a mesh.

>>> import torch
>>> from torch.distributed.tensor import Shard, distribute_tensor
>>> from monarch_backend.actor import this_host
>>> procs = this_host().spawn_procs({"dp": 2})
>>> mesh = procs.device_mesh("cpu")
>>> x = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)])
>>> (x * 2).sum().item()
30.0
>>> procs.stop().get()

This module only re-exports. A controller's modules are imported at their first use, because a worker may have an older
torch.

Each of these imports only those below it:

- `_device_mesh.py`: how a program makes a mesh.
- `_compile/`: captured steps: from torch.compile's graph to commands of workers.
- `_patches/`: changes of torch: the manifests of names and of tables, and the replacements by kind.
- `_ops/`: sharding rules and operations that torch lacks or has wrong.
- `_rng/`: random numbers of a single process on shards.
- `_placement/`: modules, batches, new tensors and parameters of FSDP, put on the workers.
- `_dispatch/`: the way of an operation from torch's dispatcher to a command for workers.
- `_controller/`: remote tensors, sets of workers, commands to them, calls on them, checkpoints, transfers.
- `_preload.py`: modules that the fork server imports for workers.
- `_worker/`: what the processes do with a command.
- `_protocol.py`: the messages between controller and workers.
- `_per_rank/`: values that differ by rank: ints, strides, shards, classes of ranks.
- `_torch_internals/`: private parts of torch that are read or called, and not replaced.
- `_errors.py`: the errors of remote tensors.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from monarch_backend._core import torch_version
from monarch_backend.dtensor._errors import (
    MeshClosedError,
    MeshMismatchError,
    NotReadableError,
    RankDependentError,
    RemoteOpError,
    RemoteTensorError,
)

if TYPE_CHECKING:
    from monarch_backend.dtensor._controller.mesh_transfer import move
    from monarch_backend.dtensor._controller.remote_call import run
    from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
    from monarch_backend.dtensor._device_mesh import device_mesh, simulated_mesh
    from monarch_backend.dtensor._placement.fsdp import shard_batch
    from monarch_backend.dtensor._placement.module_placement import put_module
    from monarch_backend.dtensor._rng.random_ops import own_random_numbers

__all__ = [
    "MeshClosedError",
    "MeshMismatchError",
    "NotReadableError",
    "RankDependentError",
    "RemoteOpError",
    "RemoteTensor",
    "RemoteTensorError",
    "device_mesh",
    "move",
    "own_random_numbers",
    "put_module",
    "run",
    "shard_batch",
    "simulated_mesh",
]

_OLDEST = (2, 11)
"""Oldest release of torch whose private parts a controller knows."""
_MODULES = {
    "RemoteTensor": "_controller.remote_tensor",
    "device_mesh": "_device_mesh",
    "move": "_controller.mesh_transfer",
    "own_random_numbers": "_rng.random_ops",
    "put_module": "_placement.module_placement",
    "run": "_controller.remote_call",
    "shard_batch": "_placement.fsdp",
    "simulated_mesh": "_device_mesh",
}
"""Names that a controller needs, and their modules."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if torch_version.torch_version() < _OLDEST:
        old, newest = (f"{major}.{minor}" for major, minor in (_OLDEST, torch_version.NEWEST))
        raise ImportError(
            f"{__name__}.{name} is for a controller of device meshes, which needs torch {old} to {newest}; this "
            f"process has {torch.__version__}, and can be a worker of one. In a worker, import it inside the functions "
            f"that the controller calls; in a controller, pip install 'torch=={newest}.*'"
        )
    # Import all of them, so that the order of later imports makes no difference.
    importlib.import_module(f"{__name__}._device_mesh")
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return found
