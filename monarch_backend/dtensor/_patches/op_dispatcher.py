"""Subclasses of the objects with which DTensor dispatches operators, in place of their own classes.

torch has one `OpDispatcher` for all DTensors. Its class becomes a subclass whose methods are layers of functions. Each
layer handles its case and calls the next one for others, down to torch's own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monarch_backend.dtensor._patches.caches import redispatch_cache, redistribute_cache
from monarch_backend.dtensor._patches.fixes import embedding_mask, replicate_fallback, view_writeback
from monarch_backend.dtensor._patches.semantics import dtensor_api, op_handlers, submesh_shapes, trace_sizes

Layers = Mapping[str, Sequence[Callable[[Any], Callable[..., Any]]]]

DISPATCHER: Layers = {
    "_propagate_op_sharding_dispatch_slow_path": (
        submesh_shapes._ours_as_raised, redistribute_cache._of_one_mesh, replicate_fallback._or_whole,
    ),
    "_dispatch_get_local_results_slow_path": (
        view_writeback._note_copies, redispatch_cache._again, embedding_mask._local_results,
    ),
    "_unwrap_to_op_info_impl": (redispatch_cache._later,),
    "_dispatch_fast_path_python_tail": (op_handlers._of_the_host, view_writeback._after_each),
    "redistribute_local_args": (trace_sizes.seen_arguments,),
    "wrap": (dtensor_api._wrap_result,),
}  # fmt: skip
"""Layers by method around torch's own, from the inside."""
PROPAGATOR: Layers = {
    "propagate_op_sharding_non_cached": (submesh_shapes._for_each_slice, trace_sizes.for_all_ranks),
    "_propagate_tensor_meta_non_cached": (submesh_shapes._on_the_cpu,),
}


def dispatcher(own: type) -> type:
    return _layered(own, DISPATCHER)


def propagator(own: type) -> type:
    return _layered(own, PROPAGATOR, propagate_op_sharding=property(submesh_shapes.PropagationCache))


def _layered(own: type, layers: Layers, **more: Any) -> type:
    methods: dict[str, Any] = {"__slots__": ()} if "__dict__" not in dir(own) else {}
    methods.update(more)
    for name, makers in layers.items():
        raw = inspect.getattr_static(own, name)
        method = raw.__func__ if isinstance(raw, staticmethod) else raw
        for maker in makers:
            method = functools.wraps(method)(maker(method))
        methods[name] = staticmethod(method) if isinstance(raw, staticmethod) else method
    return type(f"Controller{own.__name__}", (own,), methods)
