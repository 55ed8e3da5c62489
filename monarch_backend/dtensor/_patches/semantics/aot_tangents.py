"""Gradients that the backward of a captured step accepts or refuses; part of the AOTAutograd replacements.

A missing gradient arrives as zeros. torch makes them in C++, as a tensor of this process, where the trace has a
DTensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, zeros
from torch.utils import _pytree as pytree

from monarch_backend.dtensor._controller import controller_mesh
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._dispatch import local_results
from monarch_backend.dtensor._errors import RemoteTensorError
from monarch_backend.dtensor._per_rank import rank_classes


class _Step:
    """State of one call. ``meshes``: of each result, None for results that are not DTensors.

    ``has_plain``: whether its running backward was given tensors of this process.
    """

    def __init__(self, results: Sequence[Any]) -> None:
        self.meshes = [each.device_mesh if isinstance(each, DTensor) else None for each in results]
        self.has_plain = True

    def look_at(self, gradients: Any) -> None:
        """Raise under create_graph=True.

        torch connects a gradient's gradient to an unused leaf, unless a tensor given to the backward requires one. The
        second derivative would be missing without an error.
        """
        if torch.is_grad_enabled():  # as in a backward with create_graph
            raise RemoteTensorError(
                "create_graph=True in the backward of a captured step, which has no second derivative, as no step of "
                "torch.compile has: leave this one to eager code"
            )
        self.has_plain = any(type(each) is torch.Tensor for each in gradients)  # a missing gradient is None here


_STEP = "monarch_backend.step"
SAMPLE_SIZE = 4096
"""Numbers that are checked to decide that a gradient is zeros, if no explicit gradient is known."""


def with_hooks(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled function with a hook that checks the gradients given to its backward."""

    def call(*args: Any) -> Any:
        results = compiled(*args)
        if torch.is_grad_enabled():
            made = pytree.tree_leaves(results)
            step = _Step(made)
            for node in set(itertools.chain.from_iterable(map(_steps_of, made))):
                # It may belong to the step before, whose result is an argument here.
                if node.metadata.setdefault(_STEP, step) is step:
                    node.register_prehook(step.look_at)
        return results

    return call


def _steps_of(result: Any) -> list[Any]:
    """Return the captured steps whose backward made this result, or the tensor that it is a view of."""
    node = result.grad_fn if isinstance(result, torch.Tensor) else None
    nearest = [] if node is None else [node, *(each for each, _ in node.next_functions)]
    return [each for each in nearest if each is not None and each.name().startswith("CompiledFunction")]


def process(own: Any) -> Any:
    """Replace torch's function of this name: a gradient of this process for a DTensor is distributed.

    A DTensor for a plain tensor of all ranks becomes a plain one.
    """

    def process_runtime_tangent(x: Any, meta: Any, at: Any = None, desc: Any = None, *rest: Any) -> Any:
        kind = getattr(meta, "original_subclass_type", None)
        if isinstance(x, DTensor) and kind is None and controller_mesh.workers_of(x.device_mesh) is not None:
            with torch.no_grad():
                x = local_results.local_of(local_results.everywhere(x))
        elif type(x) is torch.Tensor and kind is DTensor:
            node: Any = torch._C._current_autograd_node()
            step: Any = None if node is None else node.metadata.get(_STEP)
            mesh = None if step is None else _mesh_of(step, desc)
            if mesh is not None and controller_mesh.workers_of(mesh) is not None:
                x = _there(x, step, mesh, meta.meta[0])
        elif isinstance(x, RemoteTensor) and kind is None and meta.memory_format.memory_format is None:
            x = _with_strides(x, meta.memory_format)
            return x, [x]
        return own(x, meta, at, desc, *rest)

    return process_runtime_tangent


def _with_strides(x: RemoteTensor, expected: Any) -> Any:
    """Convert a gradient with other strides than in the trace; torch's own uses a factory that ignores workers."""
    meta = rank_classes.meta_seen(x._meta)  # of the ranks that the called graph's trace stood for
    if meta.shape == tuple(expected.size) and meta.stride == tuple(expected.stride):
        return x
    if meta is not x._meta:
        return x.contiguous()  # each rank's graph is made for such a gradient
    return x.new_empty_strided(expected.size, expected.stride).copy_(x)


def _mesh_of(step: _Step, desc: Any) -> Any:
    """Return the mesh of the result whose gradient this is; for a base of results, their common mesh."""
    output = getattr(desc, "output", None)
    if isinstance(output, PlainAOTOutput):
        return step.meshes[output.idx] if output.idx < len(step.meshes) else None
    found = {each for each in step.meshes if each is not None}
    return found.pop() if len(found) == 1 else None


def _there(x: torch.Tensor, step: _Step, mesh: Any, placements: Sequence[Any]) -> DTensor:
    exact = [each if type(each) is Shard else Replicate() for each in placements]  # own() makes any other of these
    with torch.no_grad():
        # A later hook may still have given a gradient. Of large missing gradients (logits) only a sample is checked.
        looked_at = x if step.has_plain else x.reshape(-1)[:: 1 + x.numel() // SAMPLE_SIZE]
        if bool(looked_at.any()):
            return distribute_tensor(x, mesh, exact)
        return zeros(x.shape, dtype=x.dtype, device_mesh=mesh, placements=exact)
