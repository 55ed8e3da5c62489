"""`run`: a user's function as SPMD code on all workers of a mesh, with genuine local DTensors.

It is for code that one controller cannot express: rank-dependent branches, pipelines, custom kernels, torch.compile.
remote_call_args.py packs arguments and results; `execute` of _worker/executor.py is the workers' part.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from monarch_backend._actor.calls.future import Future
from monarch_backend._actor.errors import ActorError
from monarch_backend._mesh.extent import Extent
from monarch_backend._mesh.proc_mesh import ProcMesh
from monarch_backend.dtensor._controller import call_sites, controller_mesh
from monarch_backend.dtensor._controller.remote_call_args import Packer
from monarch_backend.dtensor._controller.remote_tensor import Ref
from monarch_backend.dtensor._controller.worker_failures import error_of
from monarch_backend.dtensor._controller.worker_set import WorkerSet
from monarch_backend.dtensor._errors import RemoteTensorError
from monarch_backend.dtensor._worker.remote_call_args import RunFailed

_numbers = itertools.count(1)


class Run(Future[Any]):
    """Future of the workers' results of `run`."""

    __slots__ = ("held", "name")

    name: str
    held: Ref
    """Reference to its result's tensors on the workers."""

    def _label(self) -> str:
        return self.name


def run(mesh: DeviceMesh | ProcMesh, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Run:
    """Call ``function(*args, **kwargs)`` on every worker of this mesh, concurrently and in order with all operations.

    The function runs as a program under torchrun does: torch.distributed is initialised, gradients are enabled. It is
    pickled as arguments of actors are, by import path or by value. Arguments are converted, also in modules and
    containers:

    - A DTensor becomes the worker's DTensor on its own mesh, a DeviceMesh the worker's own.
    - A RemoteTensor becomes the plain tensor of the worker.

    Both use the memory of the controller's tensors, so changes in place are visible to the controller. Autograd history
    (``grad_fn``) is not passed. Attributes that the function sets on an argument are lost unless it is returned.

    Return a Future. A result with DTensors, in tuples, lists and dicts, has DTensors of this controller in their
    places, without reading their values; everything else in it is a ValueMesh of the ranks' values. A result without
    DTensors is one ValueMesh. To continue without waiting for shapes, let the function write into an argument.

    The future raises RemoteOpError if the function raises on a worker. Collectives of the other workers then end, and
    all workers get new groups. Raises MeshMismatchError for tensors of other processes, and RemoteTensorError for a
    mesh of no controller.

    >>> from monarch_backend.actor import this_host
    >>> from monarch_backend.dtensor import run
    >>> procs = this_host().spawn_procs({"dp": 2})
    >>> mesh = procs.device_mesh("cpu")
    >>> run(mesh, lambda mesh: mesh.get_local_rank() * 10, mesh).get()
    ValueMesh(dp=2: 0, 10)
    >>> procs.stop().get()
    """
    devices: DeviceMesh = mesh.device_mesh() if isinstance(mesh, ProcMesh) else mesh
    workers = controller_mesh.workers_of(devices)
    if workers is None:
        raise RemoteTensorError(f"{devices} is no mesh of this controller: make one with ProcMesh.device_mesh()")
    return _start(workers, devices._get_root_mesh(), function, args, kwargs)


def _start(workers: WorkerSet, mesh: DeviceMesh, function: Callable[..., Any], args: Any, kwargs: Any) -> Run:
    number, held = next(_numbers), Ref(workers, next(workers.ids))
    packer = Packer(workers, mesh)
    body, buffers, meshes = packer.pack((function, args, kwargs))
    ranks = (controller_mesh.rows_of(mesh).flatten() - workers.first).tolist()
    site = call_sites.here()
    workers.unfinished.begin(number)
    try:
        workers.stream.flush()
        call = workers.line.execute(ranks, number, held.id, site, meshes, body, buffers)
    except BaseException:
        workers.unfinished.end(number)
        raise
    done = Run(call._wait, call.cancel)
    done.held, done.name = held, f"run({getattr(function, '__qualname__', function)})"
    names = mesh.mesh_dim_names or tuple(f"dim_{i}" for i in range(mesh.ndim))
    extent = Extent.of(dict(zip(names, mesh.shape, strict=True)))

    def ended(_: Any) -> None:
        workers.line.run_in_thread(lambda: _settle(workers, ranks, number, call, done, take))

    def take(replies: Any) -> Any:
        return packer.merged(extent, ranks, list(replies.values()), held)

    call.add_done_callback(ended)
    return done


def _settle(workers: WorkerSet, ranks: Sequence[int], number: int, call: Any, done: Run, take: Any) -> None:
    """Let all workers continue, then finish the call's future."""
    error = call.exception()
    if isinstance(error, ActorError) and isinstance(error.__cause__, RunFailed):
        error = error_of(error.__cause__.report)
    try:
        if error is None:
            workers.line.send_verdict(ranks, number, "done", "")
        else:
            why = f"{done.name} ended on another rank: {error}".split("\n")[0]
            workers.line.send_verdict(ranks, number, "failed", why)
    except BaseException as ended:  # the processes have ended and cannot receive it
        error = error or ended
    finally:
        workers.unfinished.end(number)
    if error is not None:
        done._fail(error)
        return
    replies = call.get()
    done.set_lazy_result(lambda: take(replies))
