"""Torch's own DTensors from one controller: the shards live in the processes of a mesh, the program is one.

>>> import torch
>>> from torch.distributed.tensor import Shard, distribute_tensor
>>> from monarch_backend.actor import this_host
>>> procs = this_host().spawn_procs({"dp": 2})
>>> mesh = procs.device_mesh("cpu")
>>> x = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)])
>>> (x * 2).sum().item()
30.0
>>> procs.stop().get()

Facade only, and what a controller needs is imported when somebody asks for it: a worker may have an older torch, as
TPUs' have, which lacks some of it.
The rooms: _remote_tensor, _metadata and _rank_ints (what the controller holds); _dispatch, _signatures, _special and
_collectives (what operations do); _whole (which tensor uneven shards are of); _strategies, _convolution, _norms,
_attention, _scaler and _by_parts (shardings that torch has not, or wrong; _checks: values that they would not refuse;
_results: what these start from and end with; _orders: in which order in memory); _host_copies (what need not be sent
again); _random, _origins, _generator and _philox (random numbers); _compile, _capture, _rank_classes, _class_graphs,
_by_rank_op and _draw_op (captured steps: torch.compile); _fsdp, _storage and _device_handle (what `fully_shard` needs);
_devices (GPUs and XLA devices of the workers); _modules (what of a module is no DTensor); _run, _parcels, _checkpoint
and _move (functions, checkpoints, transfers); _stream, _wire and _workers (how workers hear of it); _torch*.py
(everything that replaces or needs a private part of torch; _torch_redistribute: what a redistribution is, found out
once; _torch_again and _torch_specs: what torch finds out anew for each operation, too; _torch_masks: the rows that a
rank has not; _torch_slices: sizes that differ by slice; _torch_rank_ints: indices that differ by rank;
_torch_strategies: what torch's shardings get wrong; _torch_unsharded: what it has no sharding for; _torch_grouped_mm:
sizes that it refuses; _torch_views: rows that are gathered; _torch_functional: views of XLA's tensors;
_torch_decompositions: operators said in others; _torch_memory: ways to the memory that is not here; _absent_memory and
_torch_addresses: what C++ has for its address; _torch_rank0: what one rank does for the others), _autocast_rules (what
autocast does with which operator); worker/ (what happens in the processes).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from monarch_backend._core import torch_version
from monarch_backend._core.public_names import name_exceptions
from monarch_backend.dtensor._errors import (
    MeshClosedError,
    MeshMismatchError,
    NotReadableError,
    RankDependentError,
    RemoteOpError,
    RemoteTensorError,
)

if TYPE_CHECKING:
    from monarch_backend.dtensor._controller.device_mesh import device_mesh, simulated_mesh
    from monarch_backend.dtensor._controller.fsdp import shard_batch
    from monarch_backend.dtensor._controller.mesh_transfer import move
    from monarch_backend.dtensor._controller.module_placement import put_module
    from monarch_backend.dtensor._controller.remote_call import run
    from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
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

name_exceptions(__name__, globals())

_TORCH = (2, 13)
"""The torch whose private parts a controller finds. 2.14 keeps its shardings in other tables."""
_MODULES = {
    "RemoteTensor": "_controller.remote_tensor",
    "device_mesh": "_controller.device_mesh",
    "move": "_controller.mesh_transfer",
    "own_random_numbers": "_rng.random_ops",
    "put_module": "_controller.module_placement",
    "run": "_controller.remote_call",
    "shard_batch": "_controller.fsdp",
    "simulated_mesh": "_controller.device_mesh",
}
"""What a controller needs, and where it is."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if torch_version.torch_version() != _TORCH:
        raise ImportError(
            f"{__name__}.{name} is for a controller of device meshes, which needs torch {_TORCH[0]}.{_TORCH[1]}; this "
            f"process has {torch.__version__}, and can be a worker of one. In a worker, import it inside the functions "
            f"that the controller calls; in a controller, pip install 'torch=={_TORCH[0]}.{_TORCH[1]}.*'"
        )
    # All of them: which room is imported first makes no difference then.
    importlib.import_module(f"{__name__}._controller.device_mesh")
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return found
