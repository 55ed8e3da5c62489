"""Cache of redistribution plans for DTensor operations that redistribute arguments or change sizes.

Examples are a view, which has a shard's sizes, ``x[0]``, ``torch.cat`` and a product. C++ knows the sharding. For each
call it makes Python flatten the arguments, compare each spec with the wanted one, redistribute, and rebuild the
arguments. That takes 14 us. A `RedispatchPlan` on the cached sharding stores what is to be done with each argument, and
replays it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _dispatch as op_dispatch
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import ExplicitRedistributionContext
from torch.utils import _pytree as pytree

from monarch_backend import _native
from monarch_backend.dtensor._controller.controller_mesh import Replacement
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._patches.fixes import view_writeback

_ADDED = "_monarch_way"
"""Attribute of an OutputSharding: its `RedispatchPlan`; None if it has none."""
_number_of_modes = torch._C._len_torch_dispatch_stack
_is_excluded, _VIEWS = torch._C._dispatch_tls_is_dispatch_key_excluded, torch._C.DispatchKey.ADInplaceOrView
_explicit: Any = ExplicitRedistributionContext._local


class NotCacheableError(Exception):
    """torch's own code must run the operation."""


class OpInfo:
    """Replacement of torch's OpInfo, which flattens the arguments: done only if more than these attributes is used."""

    def __init__(self, own: Callable[[], Any], args: Any, kwargs: Any) -> None:
        self.own, self.args, self.kwargs = own, args, kwargs
        self.output_sharding: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.torchs(), name)

    def torchs(self) -> Any:
        found = self.own()
        found.output_sharding = self.output_sharding
        return found


class RedispatchPlan(NamedTuple):
    """Plan of an operation. ``call``: the operator to run.

    ``wanted``: for each argument, and each tensor of a list, the wanted spec or value. ``has_values``: True if there
    are values. ``parts``: number of tensors of each list, None for single arguments. ``rows``: placements of what is
    gathered for a view. ``last``: by position, the last spec, and whether it is the wanted one.
    """

    call: Any
    wanted: Sequence[Any]
    has_values: bool
    parts: Sequence[int | None]
    rows: Any
    last: dict[int, tuple[Any, bool]]

    def results(self, args: Any, kwargs: Any) -> Any:
        """Return the operation's results on remote tensors. Raises NotCacheableError for other arguments."""
        if len(args) != len(self.parts) or (kwargs and _has_tensors(kwargs)):
            raise NotCacheableError
        at, local = 0, []
        for each, parts in zip(args, self.parts, strict=True):
            if parts is None:
                local.append(self._local(each, at))
                at += 1
                continue
            if type(each) is not list or len(each) != parts:
                raise NotCacheableError
            local.append([self._local(part, at + i) for i, part in enumerate(each)])
            at += parts
        local.extend(self.wanted[at:])
        if _is_excluded(_VIEWS) and not _number_of_modes():  # no mode is to see it, as everywhere below autograd
            return _native.dispatch(self.call, local, kwargs)
        return self.call(*local, **kwargs)

    def _local(self, value: Any, at: int) -> Any:
        if isinstance(value, torch.Tensor):
            if type(value) is not DTensor or type(value._local_tensor) is not RemoteTensor:
                raise NotCacheableError
            return self._placed(value._local_tensor, value._spec, at)
        return self.wanted[at] if self.has_values else value

    def _placed(self, local: Any, spec: Any, at: int) -> Any:
        wanted = self.wanted[at]
        last = self.last.get(at)
        if last is None or last[0] is not spec:
            last = self.last[at] = spec, spec == wanted
        if last[1]:
            return local
        if getattr(_explicit, "_active", None) is not None:  # torch checks it before redistributing
            raise NotCacheableError
        return op_dispatch.redistribute_local_tensor(local, spec, wanted)


def _way(dispatcher: Any, op_call: Any, args: Any, kwargs: Any, info: Any) -> RedispatchPlan | None:
    """Return the plan, or None if torch's own code must run the operation each time."""
    sharding = info.output_sharding
    schema = sharding.redistribute_schema
    if not sharding.needs_redistribute or schema is None or op_call in dispatcher._random_ops:
        return None
    if _has_tensors(kwargs):
        return None
    is_tree = info.args_tree_spec is not None
    wanted = tuple(pytree.tree_leaves(schema.args_schema) if is_tree else schema.args_schema)
    parts = [len(each) if is_tree and type(each) is list else None for each in args]
    leaves = [each for arg, count in zip(args, parts, strict=True) for each in (arg if count is not None else [arg])]
    has_values = sharding.use_val_from_redistribute_schema
    is_flat = len(leaves) == len(info.flat_args_schema) and not any(
        isinstance(each, (list, tuple, dict)) for each in (leaves if is_tree else ())
    )
    if not is_flat or len(wanted) < len(leaves) or (len(wanted) > len(leaves) and not has_values):
        return None
    for each, target in zip(leaves, wanted, strict=False):
        if isinstance(each, torch.Tensor) is not isinstance(target, DTensorSpec):
            return None
    return RedispatchPlan(schema.op, wanted, has_values, parts, _rows(op_call, args, schema), {})


def _has_tensors(kwargs: Any) -> bool:
    return any(isinstance(each, torch.Tensor) for each in pytree.tree_leaves(kwargs))


def _rows(op_call: Any, args: Any, schema: Any) -> Any:
    """Return the placements of gathered arguments of a view; see view_writeback.py."""
    gathered = schema.args_spec[0].placements if op_call._schema._is_view_op() else None
    return None if gathered is None or gathered == args[0].placements else gathered


def _later(own: Any) -> Replacement:
    def _unwrap_to_op_info_impl(self: Any, op_call: Any, args: Any, kwargs: Any, create_schema: bool) -> Any:
        if create_schema:  # the operation's schema is not known yet
            return own(self, op_call, args, kwargs, create_schema)
        return OpInfo(lambda: own(self, op_call, args, kwargs, create_schema), args, kwargs)

    return _unwrap_to_op_info_impl


def _again(own: Any) -> Replacement:
    def _dispatch_get_local_results_slow_path(self: Any, op_call: Any, args: Any, op_info: Any) -> Any:
        if type(op_info) is not OpInfo:
            return own(self, op_call, args, op_info)
        sharding = op_info.output_sharding
        way = sharding.__dict__.get(_ADDED, NotCacheableError)
        if way is NotCacheableError:
            way = sharding.__dict__[_ADDED] = _way(self, op_call, args, op_info.kwargs, op_info.torchs())
        if way is None or op_dispatch.get_active_debug_mode() is not None:
            return own(self, op_call, args, op_info.torchs())
        try:
            results = way.results(args, op_info.kwargs)
        except NotCacheableError:
            return own(self, op_call, args, op_info.torchs())
        if way.rows is not None:
            view_writeback.note(
                view_writeback._Taken(op_call, tuple(args), way.rows, None), results, sharding.output_spec
            )
        return results

    return _dispatch_get_local_results_slow_path
