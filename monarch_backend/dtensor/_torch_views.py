"""Rows taken of what is sharded by rows (``x[1:]``) are no view of a shard: torch gathers them first, into a copy.

To the program, and to autograd, the result is a view nevertheless, and what it writes into one (``x[1:] = 0``) is to be
in ``x``. torch writes it into the copy. Here the tensor that it was taken of is written, too.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _redistribute as redistribution
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from monarch_backend.dtensor import _signatures, _torch
from monarch_backend.dtensor._errors import RemoteTensorError
from monarch_backend.dtensor._torch import Replacement, _replaces


class _Taken:
    """How a copy was made: ``place`` is its own among several (``x.split(2)``); ``placements``: of the gathered.
    ``version``: of what it was taken of, and of what has been written into the copy since.
    """

    def __init__(self, func: Any, args: Any, placements: Any, place: int | None) -> None:
        self.func, self.args, self.placements, self.place = func, args, placements, place
        self.version = _version(args[0])

    def check(self) -> None:
        """Raises RemoteTensorError where what the copy was taken of has changed: its rows would be written over."""
        if _version(self.args[0]) > self.version:
            raise RemoteTensorError(
                f"these rows were taken of a tensor ({self.func}) which has changed since, and they are a copy: each "
                "rank had a part of them. Take them again before you change them"
            )


def _version(tensor: Any) -> int:
    return 0 if tensor.is_inference() else tensor._version


@_replaces(OpDispatcher, "_dispatch_get_local_results_slow_path")
def _note_copies(own: Any) -> Replacement:
    def _dispatch_get_local_results_slow_path(self: Any, op_call: Any, args: Any, op_info: Any) -> Any:
        results = own(self, op_call, args, op_info)
        sharding = op_info.output_sharding
        if sharding.needs_redistribute and op_call._schema._is_view_op() and _torch.workers_of(op_info.compute_mesh):
            gathered = sharding.redistribute_schema.args_spec[0].placements
            if gathered != args[0].placements:
                several = isinstance(results, (list, tuple))
                for place, each in enumerate(results if several else [results]):
                    each._taken = _Taken(op_call, tuple(args), gathered, place if several else None)
        return results

    return _dispatch_get_local_results_slow_path


@_replaces(OpDispatcher, "_dispatch_fast_path_python_tail")
def _after_each(own: Any) -> Replacement:
    def _dispatch_fast_path_python_tail(self: Any, op_call: Any, args: Any, kwargs: Any, *rest: Any) -> Any:
        result = own(self, op_call, args, kwargs, *rest)
        write_back(op_call, args, kwargs)
        return result

    return _dispatch_fast_path_python_tail


@functools.cache
def _changes(op_call: Any) -> bool:
    return bool(op_call._schema.is_mutable)


def write_back(op_call: Any, args: Any, kwargs: Any) -> None:
    """What this operator has changed, of what was taken of another tensor, is in that tensor, too."""
    if not _changes(op_call):
        return
    for changed in _signatures.written(op_call._schema, args, kwargs or {}):
        taken = getattr(changed._local_tensor, "_taken", None) if isinstance(changed, DTensor) else None
        if taken is not None:
            taken.check()
            with torch.no_grad():
                _written(taken, changed)
            taken.version += 1  # torch counts it when this is over


def _written(taken: _Taken, copy: Any) -> None:
    """Below autograd, which has a gradient for this already: it takes the copy for a view."""
    source, *rest = taken.args
    whole = _as_placed(source, taken.placements)
    view = taken.func(whole, *rest)
    view = view if taken.place is None else view[taken.place]
    view._local_tensor.copy_(_as_placed(copy, view.placements)._local_tensor)
    source._local_tensor.copy_(_as_placed(whole, source.placements)._local_tensor)


def _as_placed(tensor: Any, placements: Any) -> Any:
    spec = DTensorSpec(tensor.device_mesh, placements, tensor_meta=tensor._spec.tensor_meta)
    local = tensor._local_tensor
    if tensor.placements != placements:
        local = redistribution.redistribute_local_tensor(local, tensor._spec, spec)
    return DTensor(local, spec, requires_grad=False)
