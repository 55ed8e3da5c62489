"""Inputs of a trace by dynamo: tensors of workers with the sizes that the trace stands for."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
import weakref
from collections.abc import Iterator
from types import CodeType
from typing import Any, NoReturn

import torch
from torch._dynamo import exc
from torch._dynamo.exc import TensorifyScalarRestartAnalysis, TorchRuntimeError
from torch._dynamo.source import AttrSource
from torch._dynamo.symbolic_convert import tls as dynamos
from torch._dynamo.variables import TensorVariable, builder
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from monarch_backend.dtensor._controller import controller_mesh
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor, on_the_cpu
from monarch_backend.dtensor._patches.semantics import dtensor_api
from monarch_backend.dtensor._patches.semantics.graph_breaks import (
    _differs,
    _is_uneven,
    _refuse_input,
    _refuse_number,
    _refuse_sizes,
)
from monarch_backend.dtensor._per_rank import per_rank_int, rank_classes, shard_origins
from monarch_backend.dtensor._torch_internals import tracing_state


def _keep_sizes_of_shards(fake: Any) -> None:
    """Keep a shard's size constant if the whole's size is.

    torch makes it variable after another sharding in the last call, and then never asks for the whole's size.
    """
    for whole, part in zip(fake.shape, fake._local_tensor.shape, strict=True):
        if isinstance(whole, int) and isinstance(part, torch.SymInt) and per_rank_int.values_of(part) is None:
            int(part)


def _wrap_by_type() -> None:
    """Register how dynamo takes tensors and ints of workers into a graph, in its tables by type.

    Remote tensors without a DTensor are parameters outside plans, and `to_local()`'s. Dynamo asks a class with a
    `__torch_dispatch__` for inner tensors, which these lack.
    """
    torch._dynamo.config.traceable_tensor_subclasses.add(RemoteTensor)
    for traces_numpy in (False, True):
        table = builder.VariableBuilder._type_dispatch_impl(traces_numpy)
        table.update({RemoteTensor: _wrap_tensor, DTensor: _wrap_tensor, torch.SymInt: _wrap_number})
    builder.SourcelessBuilder._type_handlers[torch.SymInt] = _wrap_number_without_source  # type: ignore[attr-defined]


def _wrap_number(self: Any, value: torch.SymInt) -> Any:
    _refuse_number(value)
    with _left_out(self._type_dispatch()):
        return self._wrap(value)


def _wrap_number_without_source(tx: Any, value: torch.SymInt) -> Any:
    _refuse_number(value)
    with _left_out(builder.SourcelessBuilder._type_handlers):  # type: ignore[attr-defined]
        return builder.SourcelessBuilder.create(tx, value)


@contextlib.contextmanager
def _left_out(table: dict[Any, Any]) -> Iterator[None]:
    """Context in which a table of dynamo has nothing for a SymInt, as torch's own."""
    ours = table.pop(torch.SymInt)
    try:
        yield
    finally:
        table[torch.SymInt] = ours


def _wrap_tensor(self: Any, value: Any) -> Any:
    """Break the graph at inputs with sizes that differ by rank, or with a mask beside the tensor."""
    local = value._local_tensor if isinstance(value, DTensor) else value
    _refuse_input(value, local, getattr(self.source, "member", ""))
    with _no_word_of_grad(), on_the_cpu() if isinstance(local, RemoteTensor) else contextlib.nullcontext():
        found = self.wrap_tensor(value)
    fake = found.proxy.node.meta.get("example_value") if isinstance(found, TensorVariable) else None
    if _is_ours(fake):
        _keep_sizes_of_shards(fake)
    if _is_uneven(local):  # guarded by the DTensor's guards
        source = self.source if local is value else AttrSource(self.source, "_local_tensor")
        known = self.tx.output.input_source_to_sizes_strides.get(source)
        if known is not None:
            known.update(size=local.size(), stride=local.stride())
    return found


@contextlib.contextmanager
def _no_word_of_grad() -> Iterator[None]:
    """Silence the warning about `.grad` of tensors that are not leaves, which dynamo also reads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
        yield


def _seen(tensor: Any) -> RemoteTensor:
    """Return a shard whose size differs by rank as the present trace sees it."""
    shown = RemoteTensor(rank_classes.meta_seen(tensor._meta), tensor._ref)
    shown.requires_grad_(tensor.requires_grad)
    return shown


def _has_gradient_of_another_kind(tensor: Any) -> bool:
    """Whether a plain parameter has a DTensor as gradient, which torch would convert as a plain one."""
    with _no_word_of_grad():
        gradient = tensor.grad
    is_there = isinstance(gradient, DTensor) and isinstance(gradient._local_tensor, RemoteTensor)
    return is_there and not isinstance(tensor, DTensor)


def _describe(own: Any) -> Any:
    def describe_tensor(self: Any, tensor: Any, **options: Any) -> Any:
        if not _is_uneven(tensor):
            described = own(self, tensor, **options)
            if described.grad is not None and _has_gradient_of_another_kind(tensor):
                return dataclasses.replace(described, grad=None)
            return described
        described = own(self, _seen(tensor), **options)
        return dataclasses.replace(described, id=self.get_tensor_id(tensor), is_leaf=tensor.is_leaf)

    return describe_tensor


def before_to_local(tensor: Any) -> None:
    """Break the graph where a program would see sizes that differ by rank: a trace has those of some ranks only."""
    if tracing_state.is_dynamos() and not rank_classes.stands_for_some() and _differs(tensor._spec):
        _refuse_sizes(tensor._spec)
    _note_origin(tensor)


def _note_origin(tensor: Any) -> None:
    """Record in the traced graph the origin of a DTensor's local tensor, on which its random numbers depend."""
    mode = get_proxy_mode()
    origin = None if mode is None or not _is_ours(tensor) else dtensor_api.origin_of(tensor._spec)
    if mode is None or origin is None:
        return
    local = tensor._local_tensor
    if isinstance(local, FunctionalTensor):
        torch._sync(local)  # type: ignore[attr-defined, no-untyped-call]
        local = torch._from_functional_tensor(local.elem)
    traced = get_proxy_slot(local, mode.tracer, None)
    if traced is not None:
        traced.proxy.node.meta[shard_origins.MARK] = origin


def _static(own: Any) -> Any:
    """Make sizes constant if they differ by rank; other sizes are traced anew.

    So are sizes of a DTensor that is a view, which torch makes once more from its base. Expressions of both symbols
    would be symbols of no input, for which dynamo can't write guards. The same holds for code of `trace_with_sizes`.
    """

    def _automatic_dynamic(tensor: Any, tx: Any, source: Any, static_shapes: bool, *rest: Any, **options: Any) -> Any:
        local = getattr(tensor, "_local_tensor", tensor)
        is_remote = type(local) is RemoteTensor
        is_view = local is not tensor and is_remote and tensor._is_view()
        shown = _seen(tensor) if _is_uneven(tensor) else tensor
        static = (
            static_shapes or is_view or _is_uneven(local) or (is_remote and tx.output.root_tx.f_code in _with_sizes)
        )
        return own(shown, tx, source, static, *rest, **options)

    return _automatic_dynamic


_with_sizes: weakref.WeakSet[CodeType] = weakref.WeakSet()
"""Code that could not be traced for all sizes: random numbers, caches by sizes. Each size makes a new graph."""

_in_vain: weakref.WeakSet[CodeType] = weakref.WeakSet()
"""Code that could not be traced with sizes either."""


def trace_with_sizes() -> None:
    """Restart a failed trace once, with the sizes of this call's DTensors, if it had symbols for them."""
    tx = getattr(dynamos, "current_tx", None)
    if tx is None:
        return
    code = tx.output.root_tx.f_code
    if code in _with_sizes:  # sizes were not the reason
        _with_sizes.discard(code)
        _in_vain.add(code)
    elif code not in _in_vain and any(_has_symbols(each.fake) for each in tx.output.tracked_fakes):
        _with_sizes.add(code)
        # The one that dynamo also accepts from a backend.
        raise TensorifyScalarRestartAnalysis(restart_reason="an operation wants a DTensor's sizes")


def _has_symbols(fake: Any) -> bool:
    return _is_ours(fake) and any(isinstance(each, torch.SymInt) for each in (*fake.shape, *fake._local_tensor.shape))


def _is_ours(fake: Any) -> bool:
    """Whether a tensor in a trace is a DTensor on a controller's mesh."""
    return type(fake) is DTensor and controller_mesh.workers_of(tracing_state.real(fake.device_mesh)) is not None


_FAILURES = TorchRuntimeError, getattr(exc, "FakeTensorObservedException", TorchRuntimeError)
"""Exceptions for an operation that fails on tensors of a trace; torch 2.14 and later may have the second one."""


def _or_with_sizes(own: Any) -> Any:
    def get_fake_value(node: Any, tx: Any, *rest: Any, **options: Any) -> Any:
        try:
            return own(node, tx, *rest, **options)
        except _FAILURES:
            trace_with_sizes()
            raise

    return get_fake_value


class _Before(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, tensor: Any) -> Any:
        return DTensor(tensor._local_tensor, tensor._spec, requires_grad=False)

    @staticmethod
    def backward(_ctx: Any, *_gradients: Any) -> NoReturn:
        raise RuntimeError("a trace went backward through an input of its graph")


def _with_history(own: Any) -> Any:
    """Return the input with a history; torch's operator for it has DTensors cache sizes, which fails for symbols."""

    def _backward_error(converter: Any, tensor: Any) -> Any:
        if _is_ours(tensor):
            return _Before.apply(tensor)  # type: ignore[no-untyped-call]
        return own(converter, tensor)

    return _backward_error
