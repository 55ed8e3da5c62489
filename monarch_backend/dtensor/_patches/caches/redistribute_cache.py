"""Cache of redistributions: the operations that torch found for one are recorded and repeated.

torch plans a redistribution from the mesh, groups and placements in about 60 us of Python. The result depends only on
the metadata of the shards, the two placements and the mesh. It is a list of operations on remote tensors, mostly one or
two.

Placements with a state of their own (an embedding's mask) are left to torch each time. Where torch has no path, from
one kind of partial values to another, the tensor is replicated first.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import _redistribute as redistribution
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from monarch_backend.dtensor._controller import controller_mesh
from monarch_backend.dtensor._controller.controller_mesh import Replacement
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._dispatch import dispatch
from monarch_backend.dtensor._errors import MeshMismatchError
from monarch_backend.dtensor._torch_internals import tracing_state

CACHE_SIZE = 1024
"""Limit of redistributions of one set of workers. Beyond it all are dropped."""
MAX_TRIES = 3
"""Attempts to record one. At the first an operation's metadata may be computed, too."""
_STATELESS = (Shard, Replicate, Partial)
_number_of_modes = torch._C._len_torch_dispatch_stack


class Value:
    """Reference in the arguments of a step: the redistributed tensor (0), or the result of the n-th step."""

    __slots__ = ("at",)

    def __init__(self, at: int) -> None:
        self.at = at


class Step(NamedTuple):
    """An operation: ``call(args, kwargs)``, with Values in place of tensors."""

    call: Callable[[Any, Any], Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Recorded(NamedTuple):
    """Recorded steps. ``mesh``: the mesh of the recording, whose ``groups`` the steps name."""

    mesh: Any
    groups: Any
    steps: list[Step]
    result: int

    def is_of(self, mesh: Any) -> bool:
        """True for a mesh that is equal to its own and has the same groups, as a slice that is made again."""
        return self.mesh is mesh or (self.groups is not None and self.groups == _groups_of(mesh))

    def repeat(self, tensor: RemoteTensor) -> Any:
        """Return the result for another tensor of the same metadata."""
        values: list[Any] = [tensor]
        for call, args, kwargs in self.steps:
            named = {name: _filled(each, values) for name, each in kwargs.items()} if kwargs else kwargs
            values += _tensors_of(call([_filled(each, values) for each in args], named))
        return values[self.result]


def _groups_of(mesh: Any) -> list[str] | None:
    """Return the groups' names by dimension; None if they are not made yet."""
    return getattr(mesh, "_dim_group_names", None)


def _filled(place: Any, values: list[Any]) -> Any:
    if type(place) is Value:
        return values[place.at]
    if type(place) is list or type(place) is tuple:
        return type(place)([_filled(each, values) for each in place])
    return place


def _by_torch(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _tensors_of(result: Any) -> Sequence[Any]:
    if isinstance(result, torch.Tensor):
        return (result,)
    return [each for each in result if isinstance(each, torch.Tensor)] if isinstance(result, (list, tuple)) else ()


class Recorder(TorchDispatchMode):
    """Mode that records this thread's operations on remote tensors. ``is_plain``: they can be repeated."""

    def __init__(self, tensor: RemoteTensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values: list[Any] = [tensor]  # it keeps them alive, so that no id is reused
        self._steps: list[Step] = []
        self._views: dict[int, tuple[int, Any]] = {}  # by index of a value: its step and operator
        self.is_plain = True

    def __enter__(self) -> Any:
        dispatch.heard.note = self._note_call
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        dispatch.heard.note = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            self.is_plain = False
        first = len(self._values)
        self._note(functools.partial(dispatch.dispatch, func), args, kwargs or {}, result)
        if any(each.alias_info is not None for each in func._schema.returns):
            self._views.update(dict.fromkeys(range(first, len(self._values)), (len(self._steps) - 1, func)))
        return result

    def _note_call(self, function: Any, name: str, args: Any, kwargs: Any, writes: Any, result: Any) -> None:
        if writes:
            self.is_plain = False
        self._note(functools.partial(dispatch.call, function, name), args, kwargs, result)

    def _note(self, call: Callable[[Any, Any], Any], args: Any, kwargs: Any, result: Any) -> None:
        places = {id(each): at for at, each in enumerate(self._values)}

        def noted(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            self.is_plain = self.is_plain and id(value) in places  # else it comes from elsewhere
            return Value(places.get(id(value), -1))

        args, kwargs = pytree.tree_map(noted, (tuple(args), dict(kwargs)))
        self._steps.append(Step(call, args, kwargs))
        made = _tensors_of(result)
        self.is_plain = self.is_plain and all(type(each) is RemoteTensor for each in made)  # else metadata is computed
        self._values += made

    def recorded(self, mesh: Any, result: Any) -> Recorded | None:
        places = [at for at, each in enumerate(self._values) if each is result]
        if not self.is_plain or not places:
            return None
        steps = list(self._steps)
        if places[-1] in self._views:  # autograd compares the version of a saved view's base
            at, func = self._views[places[-1]]
            steps[at] = steps[at]._replace(call=functools.partial(_by_torch, func))
        return Recorded(mesh, _groups_of(mesh), steps, places[-1])


def _on_the_way(current: DTensorSpec, target: DTensorSpec) -> DTensorSpec | None:
    """Return an intermediate spec if an operator's sharding needs a step that torch's redistribution lacks."""
    pairs = list(zip(current.placements, target.placements, strict=True))
    if not any(_has_no_way(*pair) for pair in pairs):
        return None
    placements = tuple(Replicate() if _has_no_way(*pair) else pair[0] for pair in pairs)
    is_in_order = DTensorSpec.is_default_device_order(current.shard_order)  # False for a placement with its own order
    if any(type(each) not in _STATELESS for each in placements) or not is_in_order:
        placements = (Replicate(),) * len(pairs)
    return DTensorSpec(current.mesh, placements, tensor_meta=current.tensor_meta)


def _in_order(local: Any, spec: DTensorSpec) -> Any:
    """Return the tensor with its dimensions in the order of the whole tensor's strides, by which ``view`` is checked.

    Gathered tensors are contiguous. From exchanged ones torch removes rows if sizes do not divide.
    """
    shape, strides = spec.tensor_meta.shape, spec.tensor_meta.stride  # type: ignore[union-attr]
    if not all(type(each) is int and each > 0 for each in strides):
        return local
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])  # stable
    if order == list(range(len(strides))):
        is_dense = list(strides) == [math.prod(shape[dim + 1 :]) for dim in order]
        return local.contiguous() if is_dense and not local.is_contiguous() else local
    if local.permute(order).is_contiguous():
        return local
    return local.permute(order).contiguous().permute([order.index(dim) for dim in range(len(order))])


def _has_no_way(current: Any, target: Any) -> bool:
    return type(target) is Partial and current != target and not current.is_replicate()


def _redistribute(own: Any) -> Replacement:
    def redistribute_local_tensor(
        local_tensor: Any, current_spec: Any, target_spec: Any, *, async_op: bool = False,
        use_graph_based_transform: bool | None = None, is_explicit: bool = False,
    ) -> Any:  # fmt: skip
        # torch keeps a trace's specs, with the trace's own mesh object, and uses them for real tensors.
        mesh = tracing_state.real(current_spec.mesh)
        by_torch = functools.partial(
            _by_torchs_plan, own, local_tensor, current_spec, target_spec, mesh, async_op=async_op,
            use_graph_based_transform=use_graph_based_transform, is_explicit=is_explicit,
        )  # fmt: skip
        # A mode must see torch's operations, and only they make a history.
        if (
            type(local_tensor) is not RemoteTensor
            or async_op
            or _number_of_modes()
            or (local_tensor.requires_grad and torch.is_grad_enabled())
        ):
            return by_torch()
        settings = (
            use_graph_based_transform,
            redistribution._DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION,
            redistribution._FORCE_MIN_COST_REDISTRIBUTION_PLAN,
            len(mesh._get_root_mesh()._flatten_mapping) if mesh.ndim > 1 else 0,  # it makes one collective of several
        )
        known = local_tensor._meta.workers.kept.setdefault("redistributions", {})
        key = (local_tensor._meta, current_spec, target_spec, settings)
        found = known.get(key, 0)
        if type(found) is Recorded and found.is_of(mesh):
            return found.repeat(local_tensor)
        tried = found if type(found) is int else 0
        if tried == MAX_TRIES:
            return by_torch()
        if len(known) >= CACHE_SIZE:
            known.clear()
        with Recorder(local_tensor) as recorder:
            result = by_torch()
        stateless = all(type(each) in _STATELESS for each in (*current_spec.placements, *target_spec.placements))
        recorded = recorder.recorded(mesh, result) if stateless else None
        known[key] = recorded or (tried + 1 if stateless else MAX_TRIES)
        return result

    return redistribute_local_tensor


def _by_torchs_plan(
    own: Any, local_tensor: Any, current_spec: Any, target_spec: Any, mesh: Any, *, async_op: bool, **settings: Any
) -> Any:
    controller_mesh.check_mesh("a redistribution", mesh, target_spec.mesh)
    is_ours = controller_mesh.workers_of(mesh) is not None
    first = _on_the_way(current_spec, target_spec) if is_ours else None
    steps = [current_spec, target_spec] if first is None else [current_spec, first, target_spec]
    result = local_tensor
    is_uneven = is_ours and _is_uneven(current_spec, target_spec)
    with _maker_of_indices(local_tensor, mesh), _one_by_one() if is_uneven else contextlib.nullcontext():
        for before, after in itertools.pairwise(steps):
            result = own(result, before, after, async_op=async_op and after is target_spec, **settings)
    return _in_order(result, target_spec) if is_ours else result


_one_by_one: Any = redistribution.disable_redistribute_transform_optimization
"""Context without torch's gathering of shards over two dimensions of a mesh as those over the flattened one."""


def _is_uneven(*specs: DTensorSpec) -> bool:
    """Whether several dimensions of a mesh shard one dimension unevenly, which the flattened one would do otherwise."""
    for spec in specs:
        parts: dict[int, list[int]] = {}
        for dim, each in enumerate(spec.placements):
            if each.is_shard():
                parts.setdefault(each.dim, []).append(spec.mesh.size(dim))  # type: ignore[attr-defined]
        for dim, sizes in parts.items():
            size = spec.shape[dim]
            if len(sizes) > 1 and not (type(size) is int and size % math.prod(sizes) == 0):
                return True
    return False


def _maker_of_indices(local: Any, mesh: Any) -> Any:
    """Return the function that makes torch's indices on this mesh's workers instead of any workers of the device.

    A trace makes its own, also if it views its input once more outside of its mode.
    """
    if type(local) is RemoteTensor:
        return mesh
    return tracing_state.mode_of(local) or contextlib.nullcontext()


def _of_one_mesh(own: Any) -> Replacement:
    # Each operator of torch would report it differently, and none has an alternative.
    def _propagate_op_sharding_dispatch_slow_path(
        self: Any, op_call: Any, args: Any, kwargs: Any, *rest: Any, **options: Any
    ) -> Any:
        try:
            return own(self, op_call, args, kwargs, *rest, **options)
        except Exception as error:
            given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, DTensor)]
            try:
                for each in given:
                    controller_mesh.check_mesh(str(op_call), given[0].device_mesh, each.device_mesh)
            except MeshMismatchError as mismatch:
                raise mismatch from error
            raise

    return _propagate_op_sharding_dispatch_slow_path
