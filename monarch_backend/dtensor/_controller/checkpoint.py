"""Distributed checkpoints from the controller: workers run torch.distributed.checkpoint and write their shards.

A checkpoint has torch's own format. Files of any program can be loaded here, into any mesh and placements, and vice
versa. _worker/checkpoint.py is the workers' part.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from monarch_backend.dtensor._controller import controller_mesh, fetch, remote_call
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._errors import MeshMismatchError
from monarch_backend.dtensor._worker import checkpoint as there
from monarch_backend.dtensor._worker.remote_call_args import Unfailed


def mesh_of(state_dict: Any) -> DeviceMesh | None:
    """Return the mesh of the DTensors, None without a controller's mesh. Raises MeshMismatchError for several."""
    found: list[DeviceMesh] = []
    for leaf in _leaves(state_dict):
        if isinstance(leaf, DTensor) and controller_mesh.remote_of(leaf) is not None:
            root = leaf.device_mesh._get_root_mesh()
            if root not in found:
                found.append(root)
    ranks = {tuple(sorted(controller_mesh.rows_of(mesh).flatten().tolist())) for mesh in found}
    if len(ranks) > 1:
        raise MeshMismatchError(
            "the state dict has tensors of several sets of processes: " + " and ".join(map(str, found)) + ". Save or "
            "load those of each by itself, with a checkpoint_id of its own"
        )
    return found[0] if found else None


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, Mapping):
        for each in tree.values():
            yield from _leaves(each)
    elif isinstance(tree, (list, tuple)):
        for each in tree:
            yield from _leaves(each)
    else:
        yield tree


def save(mesh: DeviceMesh, state_dict: Any, storage_writer: Any, planner: Any, use_collectives: bool = True) -> Any:
    """Save as torch's function does, and wait. Raises the errors of a read; an earlier checkpoint there stays valid."""
    workers = controller_mesh.workers_of(mesh)
    if workers is not None:
        workers.synchronize()
    return _first(_start(mesh, state_dict, storage_writer, planner, use_collectives))


def async_save(mesh: DeviceMesh | None, state_dict: Any, storage_writer: Any, planner: Any) -> Any:
    """Start to save the current values, before the workers continue. The future raises the errors of `save`."""
    done: concurrent.futures.Future[Any] = concurrent.futures.Future()
    if mesh is None:  # no worker has to write
        done.set_result(dcp.save(state_dict, storage_writer=storage_writer, planner=planner))
        return done
    run = _start(mesh, state_dict, storage_writer, planner, True)

    def ended(_: Any) -> None:
        try:
            done.set_result(_first(run))
        except BaseException as error:
            done.set_exception(error)

    run.add_done_callback(ended)
    return done


def _start(
    mesh: DeviceMesh, state_dict: Any, storage_writer: Any, planner: Any, use_collectives: bool
) -> remote_call.Run:
    return remote_call.run(mesh, there.save, Unfailed(), mesh, state_dict, storage_writer, planner, use_collectives)


def load(mesh: DeviceMesh, state_dict: Any, storage_reader: Any, planner: Any) -> None:
    """Load as torch's function does: DTensors are filled in place, all else is replaced in the state dict."""
    _merged(state_dict, _first(remote_call.run(mesh, there.load, mesh, state_dict, storage_reader, planner)))


def _first(run: remote_call.Run) -> Any:
    return next(iter(run.get().values()))


def save_here(own: Any, state_dict: Any, storage_writer: Any, planner: Any) -> Any:
    """Save a state dict without DTensors in this process by torch's function ``own``. Its remote tensors are read."""
    return own(pytree.tree_map(_as_host, state_dict), storage_writer, no_dist=True, planner=planner)


def load_here(own: Any, state_dict: Any, storage_reader: Any, planner: Any) -> None:
    """Load a state dict without DTensors, as `save_here` saves it."""
    loaded = pytree.tree_map(_as_host, state_dict)
    own(loaded, storage_reader, no_dist=True, planner=planner)
    _merged(state_dict, loaded, RemoteTensor)


def _as_host(value: Any) -> Any:
    return fetch.as_host(value) if isinstance(value, RemoteTensor) else value


def _merged(value: Any, loaded: Any, *fill: type) -> Any:
    """Return the loaded form of ``value``; tensors and containers keep their identity and get the loaded data.

    ``fill``: collects tensors on workers that still have to be filled.
    """
    if isinstance(value, (DTensor, RemoteTensor)) and not isinstance(value, fill):
        return value
    if isinstance(value, torch.Tensor):
        if value is not loaded:
            with torch.no_grad():
                value.copy_(loaded)
        return value
    if type(value) is type(loaded) and isinstance(value, MutableMapping):
        for key in value.keys() - loaded.keys():
            del value[key]
        for key in loaded:  # a planner may have added keys: without keys it gets all that the checkpoint has
            value[key] = _merged(value[key], loaded[key], *fill) if key in value else loaded[key]
        return value
    if type(value) is type(loaded) and type(value) in (list, tuple) and len(value) == len(loaded):
        members = [_merged(*pair, *fill) for pair in zip(value, loaded, strict=True)]
        if isinstance(value, tuple):
            return tuple(members)
        value[:] = members
        return value
    return loaded
