"""Graph breaks: code of a trace that runs eagerly, because a value, a size or a device differs by rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch._dynamo.exc import RestartAnalysis, UnsafeScriptObjectError, Unsupported
from torch._dynamo.variables import builder
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from monarch_backend.dtensor._controller import controller_mesh
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._errors import RankDependentError, RemoteTensorError
from monarch_backend.dtensor._patches.fixes import embedding_mask
from monarch_backend.dtensor._patches.semantics import device_queries, submesh_shapes
from monarch_backend.dtensor._per_rank import per_rank_int
from monarch_backend.dtensor._torch_internals.graph_break import break_graph


def _refuse_number(value: torch.SymInt) -> None:
    """Break the graph at ints that differ by rank; a branch on one raises as in eager code."""
    if per_rank_int.values_of(value) is not None:
        break_graph(f"the int {value}", RankDependentError(f"the int {value}", "has another value on each rank"))


Restart = RestartAnalysis
"""Dynamo's exception for a restart of the trace, with this number as a constant; passes through a backend."""


class LeftToEagerError(UnsupportedOperatorException):
    """Raised by a backend: the code runs eagerly, which dynamo reports as a graph break."""

    def __str__(self) -> str:
        return str(self.func)


def _refuse_input(value: Any, local: Any, member: str) -> None:
    """Raise at an input that a graph cannot have. ``member``: the attribute that it is of its object."""
    is_distributed = local is not value and isinstance(local, RemoteTensor)
    if is_distributed and any(map(embedding_mask.is_masked, value._spec.placements)):
        rows = "rows that an embedding has found on each rank, not yet reduced"
        break_graph(rows, RemoteTensorError(f"{rows}: torch keeps beside them which ones those are"))
    differs = _is_uneven(value) and len(value._meta.classes) > 1  # else some ranks have no part of it
    if differs and member != "_local_tensor":
        size = f"shards of sizes {', '.join(map(str, value.shape))}"
        break_graph(size, RankDependentError(size, "differ by rank"))
    if is_distributed and submesh_shapes.numbers(value._spec):
        size = f"a DTensor of sizes {', '.join(map(str, value.shape))}"
        break_graph(size, RankDependentError(size, "has other sizes on each slice of its mesh"))
    if is_distributed and _is_uneven(local) and value._is_view():
        view = "a view, made before, of shards of unequal sizes"
        break_graph(view, RankDependentError(view, "is made once more in a graph, where no size differs by rank"))


def _is_uneven(tensor: Any) -> bool:
    return type(tensor) is RemoteTensor and tensor._meta.classes is not None


def _attribute(own: Any) -> Any:
    def getattr_of_tensor(self: Any, tx: Any, name: str) -> Any:
        value = self.proxy.node.meta.get("example_value") if name == "_local_tensor" else None
        if isinstance(value, DTensor) and _differs(value._spec):
            _refuse_sizes(value._spec)
        return own(self, tx, name)

    return getattr_of_tensor


def _differs(spec: DTensorSpec) -> bool:
    """Whether shards have sizes that differ by rank."""
    parts = dict.fromkeys(range(spec.ndim), 1)
    for dim, placement in enumerate(spec.placements):
        if placement.is_shard():
            parts[placement.dim % spec.ndim] *= spec.mesh.size(dim)  # type: ignore[attr-defined]
    return controller_mesh.workers_of(spec.mesh) is not None and any(spec.shape[dim] % parts[dim] for dim in parts)


def _refuse_sizes(spec: DTensorSpec) -> NoReturn:
    what = f"the local part of a DTensor of shape {list(spec.shape)}, {spec.placements} on {spec.mesh.shape}"
    break_graph(what, RankDependentError(what, "has sizes that differ by rank"))


def _between_devices(own: Any) -> Any:
    """Break the graph at moves between devices: a trace has all tensors on the CPU, where C++ has them."""

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        moves = name in ("cpu", "cuda") or (name == "to" and _names_a_device([*args, *kwargs.values()]))
        if moves and device_queries.controls_others():
            break_graph(f".{name}()", RemoteTensorError(f".{name}() moves a tensor of workers that have other devices"))
        return own(self, tx, name, args, kwargs)

    return call_method


def _names_a_device(values: Sequence[Any]) -> bool:
    """Whether the program names a device. A tensor of the trace has torch.device("cpu")."""
    constants = [each.as_python_constant() for each in values if each.is_python_constant()]
    return any(isinstance(each, str) or (isinstance(each, torch.device) and each.type != "cpu") for each in constants)


def _made_there(own: Any) -> Any:
    """Make tensors on missing devices where the trace has the tensors of such devices."""

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        device = kwargs.get("device")
        device = device.as_python_constant() if device is not None and device.is_python_constant() else None
        if device is not None and device_queries.is_of_workers(torch.device(device).type):
            kwargs = {**kwargs, "device": builder.SourcelessBuilder.create(tx, torch.device("cpu"))}
        return own(self, tx, args, kwargs)

    return call_function


def _number_of_the_rank(own: Any) -> Any:
    """Break the graph at a method of a mesh that returns a per-rank integer; dynamo takes the break for an error."""

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        try:
            return own(self, tx, name, args, kwargs)
        except UnsafeScriptObjectError as error:
            if isinstance(error.__cause__, Unsupported) and isinstance(error.__cause__.__cause__, RankDependentError):
                raise error.__cause__ from error.__cause__.__cause__
            raise

    return call_method
