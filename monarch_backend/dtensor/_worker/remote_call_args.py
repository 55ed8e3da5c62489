"""Arguments and results of a function on a worker: ids become this worker's tensors, and vice versa.

The controller's _controller/remote_call_args.py packs messages that call the functions here.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from monarch_backend._serialization.pickling import DeserializationError, dumps_by, loads
from monarch_backend.dtensor._torch_internals import c10d_registry
from monarch_backend.dtensor._worker import torch_compat
from monarch_backend.process_group._xla import graph_hash_workaround

if TYPE_CHECKING:
    from monarch_backend.dtensor._worker.executor import Executor


@dataclass(frozen=True)  # not a tuple, which pytrees would flatten
class Returned:
    """Placeholder of a DTensor in a result, on the mesh of this number in the call, or on this slice of it."""

    index: int
    mesh: int
    names: tuple[str, ...] | None
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    local: tuple[tuple[int, ...], tuple[int, ...], int]
    """Sizes, strides and offset of this worker's part."""

    @property
    def whole(self) -> tuple[Any, ...]:
        return tuple(getattr(self, each.name) for each in fields(self) if each.name != "local")


class RunFailed(Exception):  # only the controller catches it by this name
    """Error that reports to the controller how the function ended. ``report``: as for any operation."""

    def __init__(self, report: dict[str, Any]) -> None:
        super().__init__(report["message"])
        self.report = report

    def __reduce__(self) -> Any:
        return RunFailed, (self.report,)


class NotThereError(RuntimeError):
    """An argument of the function is the result of an operation that failed."""

    def __init__(self, failure: Any) -> None:
        super().__init__("the operation of an argument has failed")
        self.failure = failure


class _Here(threading.local):
    """The call whose arguments this thread makes."""

    executor: Executor
    meshes: list[DeviceMesh | None]


_here = _Here()


def unpack(executor: Executor, described: list[Any], body: Any, buffers: Any) -> tuple[Any, list[DeviceMesh | None]]:
    """Return the arguments, and the call's meshes. Raises NotThereError."""
    _here.executor, _here.meshes = executor, []
    try:
        for each in described:
            _here.meshes.append(_made(executor, each))
        return loads(body, buffers), _here.meshes
    except DeserializationError as error:
        raise (error.__cause__ if isinstance(error.__cause__, NotThereError) else error) from None
    finally:
        del _here.executor, _here.meshes


def _made(executor: Executor, described: Any) -> DeviceMesh | None:
    """Return this worker's own mesh; None if it is not in it."""
    key = repr(described)
    if isinstance(described[0], int):
        root = _here.meshes[described[0]]
        sliced: DeviceMesh | None = None if root is None else root[described[1]]
        return sliced
    if key not in executor.meshes:
        device_type, names, groups, rows = described
        executor.meshes[key] = _mesh_of(executor, device_type, names, groups, rows)
    made: DeviceMesh | None = executor.meshes[key]
    return made


def _mesh_of(executor: Executor, device_type: str, names: Any, groups: list[str], rows: list[Any]) -> DeviceMesh | None:
    mine = next((row for row in map(torch.tensor, rows) if executor.rank in row), None)
    if mine is None:
        return None
    own = [c10d_registry.by_name(executor.groups.name_of(name)) for name in groups]
    if len(own) == 1:
        return DeviceMesh.from_group(own[0], device_type, mesh_dim_names=names)
    names = names or tuple(f"dim_{i}" for i in range(len(own)))
    return DeviceMesh.from_group(own, device_type, mesh=mine, mesh_dim_names=names)


# Called by the unpickler ----------------------------------------------------------------------------------------


def mesh(number: int) -> DeviceMesh | None:
    return _here.meshes[number]


def tensor(held: int, requires_grad: bool, is_parameter: bool, grad: Any) -> torch.Tensor:
    return _as(_local(held), requires_grad, is_parameter, grad)


def dtensor(
    held: int, number: int, placements: Any, shape: Any, stride: Any, requires_grad: bool, is_parameter: bool, grad: Any
) -> Any:
    """Return a DTensor on this worker's own mesh; None if the worker is not in it."""
    where = _here.meshes[number]
    if where is None:
        return None
    made = DTensor.from_local(
        _local(held), where, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )
    return _as(made.detach(), requires_grad, is_parameter, grad)


def _local(held: int) -> torch.Tensor:
    found = _here.executor.commands.results.settled(held)
    if isinstance(found, torch.Tensor):
        return found.detach()
    raise NotThereError(found)


class Unfailed:
    """Argument that is None. After a failed check that was not reported the function is not called."""

    def __reduce__(self) -> Any:
        return _unfailed, ()


def _unfailed() -> None:
    failed = _here.executor.failed_check()
    if failed is not None:
        raise NotThereError(failed)


def _as(made: torch.Tensor, requires_grad: bool, is_parameter: bool, grad: Any) -> torch.Tensor:
    if is_parameter:
        made = torch.nn.Parameter(made, requires_grad)
    else:
        made.requires_grad_(requires_grad)
    made.grad = grad
    return made


# Results --------------------------------------------------------------------------------------------------------


def part(held: list[torch.Tensor], index: int) -> torch.Tensor:
    return held[index]


def pack(result: Any, meshes: list[DeviceMesh | None]) -> tuple[bytes, list[memoryview], list[torch.Tensor]]:
    """Return the message, and the tensors that stay here. Plain tensors are sent by value, from the host's memory."""
    kept: list[torch.Tensor] = []

    def reduce(value: Any) -> Any:
        if isinstance(value, DTensor):
            detached: Any = value.detach()
            local = c10d_registry.settled(detached.to_local())
            kept.append(local)
            at = local.size(), local.stride(), local.storage_offset()
            number, names = _number_of(value.device_mesh, meshes)
            return Returned, (
                len(kept) - 1, number, names, value.placements, tuple(value.shape), tuple(value.stride()),
                value.dtype, value.requires_grad, (tuple(at[0]), *at[1:]),
            )  # fmt: skip
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            own = value.detach()
            return _itself, tuple(graph_hash_workaround.on_host([own]) if own.device.type == "xla" else [own.cpu()])
        return torch_compat.reduce_placement(value)

    body, buffers = dumps_by(reduce, result)
    return body, buffers, kept


def _itself(value: Any) -> Any:
    return value


def _number_of(mesh: DeviceMesh, meshes: list[DeviceMesh | None]) -> tuple[int, tuple[str, ...] | None]:
    if mesh in meshes:
        return meshes.index(mesh), None
    names = mesh.mesh_dim_names
    for i, root in enumerate(meshes):
        if names and root is not None and set(names) <= set(root.mesh_dim_names or ()) and root[names] == mesh:
            return i, tuple(names)
    raise ValueError(
        f"a result is on {mesh}, which the controller has not given to this function: pass it that mesh as an "
        "argument, or redistribute the result to one that it has got"
    )
