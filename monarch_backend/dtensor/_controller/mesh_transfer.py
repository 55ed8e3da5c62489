"""`move`: transfer of a DTensor to another set of processes.

Each worker of the target reads only the bytes that it needs, from other workers. It waits for descriptions from the
source's workers; the controller does not wait. _worker/mesh_transfer.py is the workers' part; _rdma/sharded_state.py
reads the memory.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, empty

from monarch_backend.dtensor._controller import controller_mesh, remote_call, remote_call_args
from monarch_backend.dtensor._errors import RemoteTensorError
from monarch_backend.dtensor._worker import mesh_transfer as there

_numbers = itertools.count(1)


def move(x: DTensor, mesh: DeviceMesh, placements: Sequence[Placement] | None = None) -> DTensor:
    """Copy a DTensor to another mesh, also of other processes. The result has the shape and dtype of ``x``.

    ``placements`` has a Shard or Replicate for each dimension of ``mesh``; the default is replicated. The controller
    does not wait. The workers of ``mesh`` read the bytes that they need from the memory of the workers that hold ``x``,
    once both have reached this operation. Autograd moves gradients back.

    Raises RemoteTensorError if ``x`` or ``mesh`` does not belong to this controller, TypeError if ``mesh`` is no
    DeviceMesh, and ValueError for a Partial or a wrong number of placements.

    >>> from torch.distributed.tensor import Shard, distribute_tensor
    >>> from monarch_backend.actor import this_host
    >>> from monarch_backend.dtensor import move
    >>> here, there = (this_host().spawn_procs({"gpus": size}) for size in (2, 3))
    >>> x = distribute_tensor(torch.arange(4.0), here.device_mesh("cpu"), [Shard(0)])
    >>> (move(x, there.device_mesh("cpu"), [Shard(0)]) + 1).tolist()
    [1.0, 2.0, 3.0, 4.0]
    >>> here.stop().get(), there.stop().get()
    (None, None)
    """
    if not isinstance(x, DTensor) or controller_mesh.remote_of(x) is None:
        raise RemoteTensorError("move() takes DTensors of this controller: distribute_tensor() makes them")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"move() takes the DeviceMesh that the tensor goes to, as ProcMesh.device_mesh() makes it, not {mesh!r}; "
            "x.to(device) is to another device of the same processes, x.full_tensor().numpy() the values here"
        )
    if controller_mesh.workers_of(mesh) is None:
        raise RemoteTensorError(f"{mesh} is no mesh of this controller: make one with ProcMesh.device_mesh()")
    there = tuple(placements or [Replicate()] * mesh.ndim)
    if len(there) != mesh.ndim or any(each.is_partial() for each in there):
        raise ValueError(f"move() to {mesh} got placements {there}: give a Shard or Replicate for each dimension")
    if mesh == x.device_mesh:
        return x.redistribute(mesh, there)
    if any(each.is_partial() for each in x.placements):
        x = x.redistribute(placements=[Replicate() if each.is_partial() else each for each in x.placements])
    moved: DTensor = _Move.apply(x, mesh, there)  # type: ignore[no-untyped-call]
    return moved


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, mesh: DeviceMesh, placements: Any) -> DTensor:
        ctx.source, ctx.placements = x.device_mesh, x.placements
        return _transfer(x.detach(), mesh, placements)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> Any:
        return move(gradient, ctx.source, ctx.placements), None, None


def _transfer(x: DTensor, mesh: DeviceMesh, placements: Any) -> DTensor:
    source, target = controller_mesh.workers_of(x.device_mesh), controller_mesh.workers_of(mesh)
    assert source is not None
    assert target is not None
    transfer_id = next(_numbers)
    # Each slice of a sliced mesh has its own tensor. The first slice's is the one that reading shows.
    senders = (controller_mesh.rows_of(x.device_mesh)[0].flatten() - source.first).tolist()
    readers = (controller_mesh.rows_of(mesh._get_root_mesh()).flatten() - target.first).tolist()
    transfer = there.MeshTransfer(
        transfer_id, senders, source.line.control_actors_of(senders), readers, target.line.control_actors_of(readers)
    )
    offered = remote_call.run(x.device_mesh, there.offer, x, transfer)
    frame = empty(x.shape, dtype=x.dtype, device_mesh=mesh, placements=placements)
    filled = remote_call.run(mesh, there.fill, frame, transfer)
    # A read of the tensor raises the failure; the results of these two are not used.
    offered.ignore()
    filled.ignore()

    def report_failure(run: remote_call.Run) -> None:
        error = run.exception()
        if error is not None:
            transfer.target.tell.broadcast("refuse", transfer_id, str(error))

    def on_end(_: Any) -> None:
        source.unfinished.end(("move", transfer_id))
        error = offered.exception() or filled.exception()
        if error is not None:
            for actors in (transfer.source, transfer.target):
                with contextlib.suppress(Exception):  # its processes may have ended, with their tensors
                    actors.tell.broadcast("forget", transfer_id, str(error))

    offered.add_done_callback(report_failure)  # type: ignore[arg-type]
    source.unfinished.begin(("move", transfer_id))
    filled.add_done_callback(lambda _: offered.add_done_callback(on_end))
    return remote_call_args.first_like(filled.held, frame)
