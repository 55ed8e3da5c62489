"""Backends of torch.compile for captured steps of DTensors: one graph each way, one trace for each class of ranks.

_compile/lowering.py lowers a trace.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp.autocast_mode import _enter_autocast
from torch.utils.checkpoint import CheckpointPolicy

from monarch_backend.dtensor._errors import RemoteTensorError

Compiler = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def two_graphs(forward: Compiler, backward: Compiler) -> Callable[..., Any]:
    """Return a backend of torch.compile with one graph each way: local operations of DTensors, functional collectives.

    The compiled code changes inputs itself where torch allows it, without copies afterwards.
    """

    return _traced(forward, backward, min_cut_rematerialization_partition)


def _traced(forward: Compiler, backward: Compiler, partition: Callable[..., Any]) -> Callable[..., Any]:
    def boxed(compiler: Compiler) -> Any:
        return lambda graph, inputs: make_boxed_func(compiler(graph, inputs))

    def parted(joint: torch.fx.GraphModule, *args: Any, **options: Any) -> Any:
        _keep_drawn(joint)
        return partition(joint, *args, **options)

    return aot_autograd(
        fw_compiler=boxed(forward), bw_compiler=boxed(backward), inference_compiler=boxed(forward),
        partition_fn=parted, keep_inference_input_mutations=True,
    )  # fmt: skip


def in_classes(compilers: Sequence[Compiler], standing_for: Callable[[int], Any]) -> Callable[..., Any]:
    """Return a backend like `two_graphs` that traces once for each class of ranks and calls the first trace's result.

    Raises RemoteTensorError if the traces differ in more than sizes. The values kept for backward do not depend on
    sizes: all classes keep the same.
    """

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        _specialize()
        known = []
        for number, compiler in enumerate(compilers):
            context = TracingContext.try_get() if number == 0 else None
            context = context or TracingContext(FakeTensorMode())
            traced = _traced(compiler, compiler, default_partition)
            with standing_for(number), tracing(context), functorch.patch(force_non_lazy_backward_lowering=True):
                made = traced(graph, inputs)
            known.append((made, _effects(context.fw_metadata)))
        if any(effects != known[0][1] for _, effects in known):
            raise RemoteTensorError("what is changed, or a view of what, is not the same on all ranks")
        compiled: Callable[..., Any] = known[0][0]
        return compiled

    return backend


def _specialize() -> None:
    """Turn each number and size that may change into a constant; another value makes a new graph."""
    context = TracingContext.try_get()
    shape_env = context.fake_mode.shape_env if context is not None and context.fake_mode is not None else None
    for tracked in (shape_env.tracked_fakes or ()) if shape_env is not None else ():
        fake = tracked.fake
        for number in (*fake.shape, *fake.stride()) if isinstance(fake, torch.Tensor) else (fake,):
            if isinstance(number, torch.SymInt):
                int(number)


def _effects(metadata: Any) -> Any:
    """Return the effects of a trace's calls on their arguments."""
    return (
        [(each.mutates_data, each.mutates_metadata, each.requires_grad) for each in metadata.input_info],
        [(each.output_type, each.base_idx, each.requires_grad) for each in metadata.output_info],
    )


def _keep_drawn(joint: torch.fx.GraphModule) -> None:
    """Keep random numbers for backward, also in a checkpoint, which would draw them again.

    The same holds for operators that torch has only marked as random, such as attention without dropout. torch would
    wrap them in operators that keep the generator's state. These contain functions, which can't be sent.
    """
    for node in joint.graph.nodes:
        is_operator = isinstance(node.target, torch._ops.OpOverload)
        if is_operator and torch.Tag.nondeterministic_seeded in node.target.tags:
            results = [each for each in node.users if each.target is operator.getitem]
            for each in results or [node]:
                each.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            if results:
                node.meta.pop("recompute", None)  # torch sets it to avoid keeping the tuple itself


def autocasts(graph: torch.fx.GraphModule) -> set[str]:
    """Return the device types for which a function's graph enters an autocast."""
    return {str(node.args[0]) for node in graph.graph.nodes if node.target is _enter_autocast}
