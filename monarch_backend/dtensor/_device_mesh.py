"""Device meshes: torch's DeviceMesh for a mesh of processes, which hold tensors for this program."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from monarch_backend._core.extension_points import provide
from monarch_backend._core.timeouts import check_bounded
from monarch_backend._mesh.proc_mesh import ProcMesh
from monarch_backend.dtensor._controller import controller_process_group
from monarch_backend.dtensor._controller.actor_command_channel import ActorCommandChannel
from monarch_backend.dtensor._controller.worker_set import WorkerSet
from monarch_backend.dtensor._dispatch import dispatch
from monarch_backend.dtensor._errors import RemoteTensorError
from monarch_backend.dtensor._ops import special_ops as special_ops
from monarch_backend.dtensor._patches import features, installation
from monarch_backend.dtensor._patches.semantics import device_queries
from monarch_backend.dtensor._torch_internals import invalid_access

if TYPE_CHECKING:
    from monarch_backend._mesh.proc_mesh import ProcMeshState

DEVICE_TYPES = ("cpu", "cuda", "xla")

_made: weakref.WeakKeyDictionary[ProcMeshState, dict[str, WorkerSet]] = weakref.WeakKeyDictionary()


def device_mesh(procs: ProcMesh, device_type: str = "cpu", timeout: float = 300.0) -> DeviceMesh:
    """Return torch's DeviceMesh of these processes, with the shape and the dimension names of ``procs``.

    DTensors on it have their shards in the processes. ``device_type`` is the device of the shards: "cpu", "cuda"
    (NVIDIA and AMD) or "xla" (the devices of torch_xla). This program needs no such device. ``timeout``, in seconds, is
    that of the processes' collectives. `ProcMesh.device_mesh` does the same.

    Raises ValueError for another device type. Raises RemoteTensorError if this process is a rank of a torch.distributed
    group, or if one of the processes has no such device.

    >>> from torch.distributed.tensor import Shard, distribute_tensor
    >>> from monarch_backend.actor import this_host
    >>> from monarch_backend.dtensor import device_mesh
    >>> procs = this_host().spawn_procs({"dp": 2})
    >>> mesh = device_mesh(procs)
    >>> mesh.shape, mesh.mesh_dim_names
    ((2,), ('dp',))
    >>> distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).sum().item()
    6.0
    >>> procs.stop().get()
    """
    if device_type not in DEVICE_TYPES:
        raise ValueError(f"device_type {device_type!r}: a mesh has {', '.join(DEVICE_TYPES)} devices")
    timeout = check_bounded(timeout)
    controller_process_group.refuse_a_rank()  # before the processes are used
    installation.install()
    if device_type == "cuda":
        features.require_gpus()
    workers = workers_for(procs, device_type, timeout)
    key = (tuple(procs._shape.ranks), tuple(procs.extent.sizes), tuple(procs.extent.labels))
    found = workers.meshes.get(key)
    if found is None:  # else the same object, because torch compares meshes by value and may return either
        ranks = torch.tensor([workers.first + rank for rank in key[0]], dtype=torch.int)
        found = workers.meshes[key] = DeviceMesh(device_type, ranks.view(key[1]), mesh_dim_names=key[2])
    return found


def workers_for(procs: ProcMesh, device_type: str, timeout: float) -> WorkerSet:
    """Return the WorkerSet of the whole mesh that contains this slice."""
    core = procs._core
    made = _made.setdefault(core, {})
    if device_type not in made:
        from monarch_backend._actor.runtime import program
        from monarch_backend.dtensor._worker import Executor, executor

        whole = ProcMesh(core)
        if device_type == "cuda" and Executor is executor.Executor:  # a test's own executor takes "cuda" for the CPU
            _check_gpus(core.name, whole)
        if not made:  # else workers of another device have groups already, which new ones would end
            whole.process_group("monarch", timeout).get()
        executors = whole.spawn("dtensor", Executor, device_type, timeout)
        if device_type == "xla":
            _begin(core.name, executors)
        line = ActorCommandChannel(whole, executors, program(), device_type, made)
        workers = new_workers(core.name, len(whole), device_type, line)
        made[device_type] = workers
        core.before_stop.append(workers.before_stop)

        def ended(_: Any) -> None:
            made.pop(device_type, None)
            core.before_stop.remove(workers.before_stop)
            workers.close("they were stopped or have died")
            controller_process_group.remove_owner(workers)
            dispatch.forget(workers)

        executors._core.owned.ended.add_done_callback(ended)
    return made[device_type]


def _check_gpus(name: str, whole: ProcMesh) -> None:
    from monarch_backend.dtensor._worker.control_actor import Gpus

    gpus = whole.spawn("gpus", Gpus)
    try:
        missing = _missing(gpus)
    finally:
        gpus.stop().get()
    if missing:
        raise RemoteTensorError(
            f"a mesh of GPUs of {name}: {_described(missing, whole)}. Start these processes on "
            "hosts with GPUs, with a torch that is built for them, or make a mesh of what they have: "
            "procs.device_mesh('cpu')"
        )


def _begin(name: str, executors: Any) -> None:
    """Start the workers' devices. Raises RemoteTensorError that names each process without one."""
    missing = _missing(executors)
    if missing:
        executors.stop().get()
        raise RemoteTensorError(
            f"a mesh of XLA devices of {name}: {_described(missing, executors)}. Start "
            "these processes with a Python that has torch_xla and its torch: on a host, this one or another, whose "
            "`monarch-backend up` is of that Python, and attach it with any_torch=True"
        )
    executors.start.call().get()


def _missing(actors: Any) -> dict[int, str]:
    return {rank: why for rank, why in enumerate(actors.missing.call().get().values()) if why}


def _described(missing: dict[int, str], processes: Any) -> str:
    each = "; ".join(f"rank {rank}: {why}" for rank, why in missing.items())
    return f"{len(missing)} of {len(processes)} processes have none. {each}"


def new_workers(name: str, size: int, device_type: str, line: Any) -> WorkerSet:
    invalid_access.prepare()
    first = controller_process_group.grow(size)
    # Each process has its own GPU, which is its first one, as with one visible GPU in each process.
    device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, 0)
    workers = WorkerSet(name, size, first, device, line)
    controller_process_group.add_owner(workers)
    if device_type != "cpu":
        device_queries.register_factories(device_type)
    return workers


def _compile_backend() -> Any:
    from monarch_backend.dtensor._compile import compile_backend  # it imports dynamo

    return compile_backend


provide("compile backend", _compile_backend)  # torch.compile of a program with a mesh uses it in place of Inductor


class NoLine:
    """Channel to workers that do not exist, for measuring the controller with any number of them."""

    def send(self, batch: bytes) -> None:
        """Drop it."""

    send_at_the_end = send

    def send_counted(self, batch: bytes) -> Callable[[], object]:
        return lambda: None

    def has_room(self) -> bool:
        return True

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Do nothing: batches are sent when they are full."""

    def put(self, number: int, tensor: torch.Tensor) -> None:
        """Drop it."""

    def put_by_rank(self, number: int, tensors: Any) -> None:
        """Drop it."""

    def ask(self, what: str, *args: Any) -> Callable[[], list[Any]]:
        """Return no failures. Raises RemoteTensorError for values, because no process has them."""
        if what != "failed_since":
            raise RemoteTensorError("this mesh is simulated: there are no workers and no values")
        return list


def simulated_mesh(sizes: tuple[int, ...], names: tuple[str, ...], device_type: str = "cpu") -> DeviceMesh:
    """Return a mesh without processes, for measuring and testing the controller.

    ``sizes`` and ``names``: of its dimensions. Operations have metadata only. Reading a value raises RemoteTensorError.

    >>> from torch.distributed.tensor import Shard, distribute_tensor
    >>> from monarch_backend.dtensor import simulated_mesh
    >>> mesh = simulated_mesh((64, 8), ("dp", "tp"))
    >>> x = distribute_tensor(torch.ones(128, 16), mesh, [Shard(0), Shard(1)])
    >>> (x @ x.T).shape, tuple(x.to_local().shape)
    (torch.Size([128, 128]), (2, 2))
    """
    installation.install()
    size = math.prod(sizes)
    workers = new_workers("simulated", size, device_type, NoLine())
    ranks = torch.arange(workers.first, workers.first + size, dtype=torch.int)
    return DeviceMesh(device_type, ranks.view(sizes), mesh_dim_names=names)
