"""Handlers of single operators in DTensor's dispatch: reading, comparing, random numbers, lists."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from monarch_backend.dtensor._controller import fetch
from monarch_backend.dtensor._controller.controller_mesh import Replacement, _is_remote, _is_traced
from monarch_backend.dtensor._errors import RemoteTensorError
from monarch_backend.dtensor._patches.fixes import view_writeback
from monarch_backend.dtensor._rng import random_ops
from monarch_backend.dtensor._torch_internals import own_handlers

_aten = torch.ops.aten


def _or_torchs(ours: Replacement) -> Replacement:
    """Return a handler that calls torch's for meshes that are no controller's."""

    def handle(func: Any, args: Any, kwargs: Any) -> Any:
        is_ours = all(_is_remote(each) or _is_traced(each) for each in _distributed(args))
        return (ours if is_ours else own_handlers.run)(func, args, kwargs)

    return handle


def _of_controllers(ours: Replacement, own: Replacement) -> Replacement:
    """Return a handler that calls torch's communication between ranks for meshes that are no controller's."""

    def handle(func: Any, args: Any, kwargs: Any) -> Any:
        is_ours = any(_is_remote(each) or _is_traced(each) for each in _distributed(args))
        return (ours if is_ours else own)(func, args, kwargs)

    return handle


def _distributed(args: Any) -> Iterator[DTensor]:
    """Yield the DTensors among an operator's arguments, also in its lists."""
    given = itertools.chain.from_iterable(each if isinstance(each, (list, tuple)) else (each,) for each in args)
    return (each for each in given if isinstance(each, DTensor))


def _item(func: Any, args: Any, kwargs: Any) -> Any:
    """Read ``.item()``, ``bool()`` and ``float()`` from the whole tensor, not from a rank's shard."""
    tensor = args[0]
    if _is_remote(tensor):
        return fetch.item(tensor.detach().full_tensor())
    return own_handlers.run(func, args, kwargs)


def _equal(func: Any, args: Any, kwargs: Any) -> bool:
    one, other = args
    if not _is_remote(one if isinstance(one, DTensor) else other):
        return own_handlers.run(func, args, kwargs)  # type: ignore[no-any-return]
    return one.shape == other.shape and bool((one == other).all())


def _of_the_host(own: Any) -> Replacement:
    def _dispatch_fast_path_python_tail(
        self: Any, op_call: Any, args: Any, kwargs: Any, mesh: Any, sharding: Any, results: Any, participating: Any,
        is_inplace_op: Any, is_out_variant_op: Any,
    ) -> Any:  # fmt: skip
        if is_inplace_op and isinstance(args[0], torch.Tensor) and not isinstance(args[0], DTensor):
            return args[0]  # it has been changed; torch takes it for a DTensor
        return own(
            self, op_call, args, kwargs, mesh, sharding, results, participating, is_inplace_op, is_out_variant_op
        )

    return _dispatch_fast_path_python_tail


def _random_operation(handle: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    def operation(func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [each for each in args if isinstance(each, DTensor)]
        if all(map(_is_remote, tensors)) or (func not in random_ops.BY_VALUES and all(map(_is_traced, tensors))):
            result = handle(func, args, dict(kwargs))
            view_writeback.write_back(func, args, kwargs)
            return result
        if any(map(_is_traced, tensors)):
            if random_ops.is_bernoulli_on_a_cpu(func, args, kwargs):
                return random_ops.bernoulli_in_a_trace(args[0])
            from monarch_backend.dtensor._torch_internals import graph_break  # needs dynamo, which is imported now

            graph_break.break_graph(
                str(func), RemoteTensorError(f"{func} draws a count of numbers that depends on values")
            )
        return own_handlers.run(func, args, kwargs)

    return operation
