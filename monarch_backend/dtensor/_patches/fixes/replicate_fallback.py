"""Fallback for operators without a sharding in torch's DTensor, or without one for these arguments: each rank does all.

Examples are an LSTM, attention's fast path, `nonzero`, `bincount`, rows selected by a mask (`x[x > 0]`), and most of
linear algebra. torch raises that there is no strategy, and a program would have to gather its tensors itself. Here
sharded tensors and sums over ranks are gathered. Each rank runs the operation on whole tensors, and has the whole
result. Changed arguments return to their placements.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OutputSharding
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

from monarch_backend._core.torch_version import torch_version
from monarch_backend.dtensor._controller import controller_mesh
from monarch_backend.dtensor._controller.controller_mesh import Replacement
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._dispatch import local_results, op_signatures
from monarch_backend.dtensor._ops import attention, sharding_rules
from monarch_backend.dtensor._patches.fixes import composite_ops, view_writeback
from monarch_backend.dtensor._torch_internals import decompositions, invalid_access, tracing_state

log = logging.getLogger("monarch_backend")

_aten = torch.ops.aten
_BY_VALUES = (DynamicOutputShapeException, DataDependentOutputException)
_GATHERED = (
    "in-place operations that require placement changes", "min() arg is an empty sequence",
    "Attempted to unbind along the sharded dimension", "Cannot flatten unevenly sharded tensor",
    "Cannot unflatten unevenly sharded tensor", "Cannot shard unevenly distributed tensor",
    "would remove or reshape sharded ",
)  # fmt: skip
"""torch's error texts if an argument, or a changed or written tensor (``out=``), would have to be gathered."""
_GATHERED_BEFORE = (
    "is not supported yet for non-first flatten dims", "Attempted to flatten multiple dimensions",
    "Attempted to flatten unevenly sharded dimension", "Attempted to unflatten unevenly sharded dimension",
    "Attempted to split the sharded dimension",
)  # fmt: skip
"""Such texts of torch before 2.13."""
_GATHERED_SINCE = ("no valid sharding strategy for the input placements",)
"""Such texts of torch 2.14 and later: a tensor with a sum over ranks is written by ``out=``."""
_REFUSED = (
    *_GATHERED,
    *(_GATHERED_BEFORE if torch_version() < (2, 13) else ()),
    *(_GATHERED_SINCE if torch_version() >= (2, 14) else ()),
)
_PARTS = "_local_tensor", "_spec"
_said: set[Any] = set()
_OUT_OF_PLACE = {
    _aten.transpose_.default: _aten.transpose.int, _aten.swapdims_.default: _aten.transpose.int,
    _aten.swapaxes_.default: _aten.transpose.int, _aten.t_.default: _aten.t.default,
    _aten.unsqueeze_.default: _aten.unsqueeze.default, _aten.squeeze_.default: _aten.squeeze.default,
    _aten.squeeze_.dim: _aten.squeeze.dim, _aten.squeeze_.dims: _aten.squeeze.dims,
}  # fmt: skip
"""In-place operators that change a tensor's sizes, with the operator for a view of these sizes."""
_OTHER_SIZES = _aten.view.default, _aten._unsafe_view.default, _aten.reshape.default
"""Operators that return a tensor's values in other sizes."""
_NEVER_EMPTY = (
    "_adaptive_", "_fft_", "_upsample_", "adaptive_", "aminmax", "avg_pool", "fractional_max_pool", "grid_sampler",
    "max_pool", "reflection_pad", "replication_pad", "upsample_",
)  # fmt: skip
"""Prefixes of operators whose kernels accept no tensor without channels, or without elements."""
_SQUEEZED = _aten.squeeze_.default, _aten.squeeze_.dim, _aten.squeeze_.dims
"""Operators with a sharding in torch, which leaves the old sizes to autograd if the placements stay the same."""


def _or_whole(own: Any) -> Replacement:
    def _propagate_op_sharding_dispatch_slow_path(
        self: Any, op_call: Any, args: Any, kwargs: Any, *rest: Any, **options: Any
    ) -> Any:
        if op_call in _SQUEEZED and _are_ours(args, kwargs):
            return _with_other_sizes(op_call, args, kwargs)
        if op_call in attention.TENSORS and (kwargs or {}).get("attn_mask") is not None and _are_ours(args, kwargs):
            return attention.masked(op_call, args, kwargs)
        if _is_never_empty(op_call) and _are_ours(args, kwargs) and any(map(_has_nothing, _given(args, kwargs))):
            return _whole(op_call, args, kwargs)
        if op_call in _OTHER_SIZES and _are_ours(args, kwargs) and _parts_strides(args[0], args[1]):
            return _whole(op_call, args, kwargs)
        by_others = composite_ops.KERNELS.get(op_call) or decompositions.made_of_others(op_call)
        if by_others is not None and _are_ours(args, kwargs):  # torch takes another version, with other random numbers
            return by_others(*args, **(kwargs or {}))
        try:
            found = own(self, op_call, args, kwargs, *rest, **options)
            is_wrong = _is_moved(op_call, args, found) or _is_of_other_sizes(op_call, args, found)
            if not (is_wrong and _are_ours(args, kwargs)):
                return found
        except (NotImplementedError, RuntimeError, *_BY_VALUES) as error:
            if not _can_be_whole(op_call, args, kwargs, error):
                raise
        if op_call in _OUT_OF_PLACE:
            return _with_other_sizes(op_call, args, kwargs)
        return _whole(op_call, args, kwargs)

    return _propagate_op_sharding_dispatch_slow_path


def _parts_strides(x: Any, sizes: Any) -> bool:
    """Whether torch gets a view wrong: it applies the strides of a dimension's shards to the new dimension.

    It is right only if that dimension stays, or if it is even and comes first.
    """
    if not isinstance(x, DTensor) or not any(isinstance(each, _StridedShard) for each in x.placements):
        return False
    given = math.prod(each for each in sizes if each != -1)
    if given == 0 or x.numel() == 0:
        return False
    after = [x.numel() // given if each == -1 else each for each in sizes]
    for dim in range(x.ndim):
        sharing = [at for at, each in enumerate(x.placements) if sharding_rules.shards(each, dim)]
        if not any(isinstance(x.placements[at], _StridedShard) for at in sharing):
            continue
        ranks = math.prod(x.device_mesh.size(at) for at in sharing)
        before = math.prod(x.shape[:dim])
        at = next((at for at in range(len(after)) if math.prod(after[:at]) == before and after[at] != 1), None)
        is_kept = at is not None and after[at] == x.shape[dim]
        comes_first = at is not None and after[at] % x.shape[dim] == 0 and x.shape[dim] % ranks == 0
        if not (is_kept or comes_first):
            return True
    return False


@functools.cache
def _is_never_empty(op_call: Any) -> bool:
    return op_call._schema.name.removeprefix("aten::").startswith(_NEVER_EMPTY)  # type: ignore[no-any-return]


def _has_nothing(tensor: Any) -> bool:
    return any(sharding_rules.has_nothing(tensor._spec, dim) for dim in range(tensor.ndim))


def _given(args: Any, kwargs: Any) -> list[Any]:
    return [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, DTensor)]


def _are_ours(args: Any, kwargs: Any) -> bool:
    return all(controller_mesh.workers_of(each.device_mesh) is not None for each in _given(args, kwargs))


def _can_be_whole(op_call: Any, args: Any, kwargs: Any, error: BaseException) -> bool:
    if not _are_ours(args, kwargs):
        return False
    given = _given(args, kwargs)
    if torch.Tag.inplace_view in op_call.tags and op_call not in _OUT_OF_PLACE:
        return False
    if any(each.device_mesh != given[0].device_mesh for each in given):
        return False
    if isinstance(error, NotImplementedError) or any(words in str(error) for words in _REFUSED):
        return True
    if op_call is _aten.expand.default and isinstance(error.__cause__, KeyError):  # of a dimension of size 1
        return True
    is_by_values = isinstance(error, _BY_VALUES) or isinstance(error.__cause__, _BY_VALUES)
    if is_by_values and any(tracing_state.is_traced(each._local_tensor) for each in given):
        raise error if isinstance(error, _BY_VALUES) else error.__cause__ or error  # dynamo handles it by a graph break
    return is_by_values


def _is_moved(op_call: Any, args: Any, found: Any) -> bool:
    """Whether torch would change a copy, because an in-place operator needs its argument in another placement."""
    if not isinstance(found, OutputSharding) or torch.Tag.inplace_view in op_call.tags:
        return False
    first = op_call._schema.arguments[0] if args else None
    if first is None or first.alias_info is None or not first.alias_info.is_write:
        return False
    given = [each.placements for each in pytree.tree_leaves(args[0]) if isinstance(each, DTensor)]
    moved = found.redistribute_schema and found.redistribute_schema.args_schema[0]
    for specs in (moved, found.output_spec):
        now = [each.placements for each in pytree.tree_leaves(specs) if isinstance(each, DTensorSpec)]
        if len(now) == len(given) and now != given:
            return True
    return False


def _is_of_other_sizes(op_call: Any, args: Any, found: Any) -> bool:
    """Whether a rank's shard can't have these sizes.

    If two dimensions of a mesh share a dimension, torch checks that each of them divides it evenly, but not both.
    """
    if op_call not in _OTHER_SIZES or not isinstance(found, OutputSharding) or not isinstance(args[0], DTensor):
        return False
    before, after = args[0]._spec, found.output_spec
    if not isinstance(after, DTensorSpec) or not (_is_nested(before) or _is_nested(after)):
        return False
    each_rank = itertools.product(*map(range, before.mesh.shape))
    return any(_numel_on(before, rank) != _numel_on(after, rank) for rank in each_rank)


def _is_nested(spec: DTensorSpec) -> bool:
    dims = [each.dim for each in spec.placements if isinstance(each, Shard)]
    return len(dims) > len(set(dims))


def _numel_on(spec: DTensorSpec, rank: Sequence[int]) -> int:
    sizes = list(spec.shape)
    for each, size, at in zip(spec.placements, spec.mesh.shape, rank, strict=True):
        if isinstance(each, Shard):
            sizes[each.dim] = Shard.local_shard_size_and_offset(sizes[each.dim], size, at)[0]
    return math.prod(sizes)


def strided(own: Replacement) -> Replacement:
    """Handle a view by strides, as `fill_diagonal_` makes one. torch has it only for a whole tensor."""

    def as_strided_handler(func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return own(func, args, kwargs)
        except RuntimeError:
            tensor = args[0]
            if not _are_ours(args, kwargs):
                raise
            whole = view_writeback._as_placed(tensor, (Replicate(),) * tensor.device_mesh.ndim)
            if whole._local_tensor.stride() != tensor.stride():
                raise
            return _whole(func, args, kwargs)

    return as_strided_handler


def _whole(op_call: Any, args: Any, kwargs: Any) -> Any:
    leaves, form = pytree.tree_flatten((args, dict(kwargs or {})))
    given = [each for each in leaves if isinstance(each, DTensor)]
    _say(op_call, given)
    mesh = given[0].device_mesh
    placements = (Replicate(),) * mesh.ndim
    gathered = {id(each): view_writeback._as_placed(each, placements)._local_tensor for each in given}
    local_args, local_kwargs = form.unflatten([gathered.get(id(each), each) for each in leaves])
    result = op_call(*local_args, **local_kwargs)
    changed = op_signatures.written(op_call._schema, args, kwargs or {})
    for each in changed:
        if isinstance(each, DTensor):
            _put_back(each, gathered[id(each)], placements)
    of_local = {id(gathered.get(id(each), each)): each for each in changed}

    def wrapped(local: Any) -> Any:
        if id(local) in of_local or not (isinstance(local, RemoteTensor) or tracing_state.is_traced(local)):
            return of_local.get(id(local), local)
        return local_results.of_parts(local, local_results.meta_of(local), mesh, placements)

    found = pytree.tree_map_only(torch.Tensor, wrapped, result)
    if op_call._schema._is_view_op():
        return _as_view(op_call, args, kwargs, found, placements)
    view_writeback.write_back(op_call, args, kwargs)
    return found


def _say(op_call: Any, given: list[Any]) -> None:
    if op_call not in _said and any(not each.is_replicate() for of in given for each in of.placements):
        _said.add(op_call)
        log.info("torch's DTensor has no sharding for %s: each rank does all of it, of gathered tensors", op_call)


def _put_back(changed: Any, local: Any, placements: Any) -> None:
    if changed.placements != placements:  # else it was the tensor itself
        whole = local_results.of_parts(local, local_results.meta_of(local), changed.device_mesh, placements)
        changed._local_tensor.copy_(view_writeback._as_placed(whole, changed.placements)._local_tensor)


def _as_view(op_call: Any, args: Any, kwargs: Any, found: Any, placements: Any) -> Any:
    """Return the result as a view for autograd; writes into gathered rows are written back as for other rows."""
    if args[0].placements != placements:
        taken = view_writeback._Taken(op_call, tuple(args), placements, None)
        locals_, specs = (pytree.tree_map(lambda each, name=name: getattr(each, name), found) for name in _PARTS)
        view_writeback.note(taken, locals_, specs)
    return return_and_correct_aliasing(op_call, args, kwargs or {}, found)


def _with_other_sizes(op_call: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    view = _OUT_OF_PLACE[op_call](*args, **(kwargs or {}))
    invalid_access.set_metadata(op_call, args, kwargs or {})
    tensor._local_tensor, tensor._spec = view._local_tensor, view._spec
    return tensor
